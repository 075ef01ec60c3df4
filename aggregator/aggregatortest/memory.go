// Package aggregatortest has the contract of an aggregator.Counter as a test, and a counter in memory for tests of others.
package aggregatortest

import (
	"context"
	"math"
	"math/big"
	"sync"
	"time"

	"github.com/weirhq/weir/aggregator"
)

// Memory is a counter in memory: what the Redis script does, said plainly and in exact arithmetic. Its clock is Now.
type Memory struct {
	Now func() time.Time

	mu    sync.Mutex
	epoch uint64
	since int64 // µs since which it remembers; 0 for ever, below 0 from when somebody looks
	err   error
	keys  map[aggregator.Key]*bucket
	live  map[aggregator.Key]int64 // until, in µs
}

// NewMemory returns an empty counter with the wall clock.
func NewMemory() *Memory {
	return &Memory{Now: time.Now, keys: make(map[aggregator.Key]*bucket), live: make(map[aggregator.Key]int64)}
}

var _ aggregator.Counter = (*Memory)(nil)

type incarnation struct {
	gateway, boot string
	number        uint32
}

type mark struct {
	cum int64
	seq uint64
}

type demand struct{ micros, until, since int64 }

type bucket struct {
	limit   aggregator.Limit
	level   int64
	frac    int64 // billionths of a µtoken
	at      int64
	version int64
	total   int64
	expires int64
	marks   map[incarnation]*mark
	demand  map[string]*demand
}

// Fail makes every call return err, until it is nil again.
func (m *Memory) Fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

// Flush forgets everything, as FLUSHALL would.
func (m *Memory) Flush() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.keys)
	clear(m.live)
	m.epoch, m.since = 0, -1
}

// Total is the number of tokens counted for a key.
func (m *Memory) Total(k aggregator.Key) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.keys[k]; b != nil {
		return b.total
	}
	return 0
}

// Fold is aggregator.Counter.
func (m *Memory) Fold(_ context.Context, folds []aggregator.Fold) ([]aggregator.KeyState, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	now := m.Now().UnixMicro()
	states := make([]aggregator.KeyState, len(folds))
	for i := range folds {
		states[i] = m.fold(&folds[i], now)
	}
	return states, nil
}

func (m *Memory) fold(f *aggregator.Fold, now int64) aggregator.KeyState {
	b := m.keys[f.Key]
	if b != nil && b.expires <= now {
		b = nil
	}
	limit := aggregator.Limit{RateNanos: min(f.Limit.RateNanos, aggregator.MaxRateNanos), Burst: min(f.Limit.Burst, aggregator.MaxBurst)}
	look := f.Limit == (aggregator.Limit{})
	if look {
		if b == nil {
			return aggregator.KeyState{Key: f.Key, At: now}
		}
		limit = b.limit
	}
	full := limit.Burst * 1e6
	fresh := b == nil
	if fresh {
		level, at := full, now
		switch {
		case f.Strict:
			level = m.earned(limit, now)
		case f.Last != nil:
			level, at = f.Last.Micros, f.Last.At
		}
		b = &bucket{level: level, at: at, marks: make(map[incarnation]*mark), demand: make(map[string]*demand)}
		m.keys[f.Key] = b
	}
	if look { // it knows nothing of what is outstanding: time passes with the next fold
		kept, seen := b, *b
		b = &seen
		defer func() { kept.version = seen.version }()
	}
	b.limit = limit
	brim := full + min(max(f.Outstanding, 0), aggregator.MaxBurst)*1e6
	was := *b
	lag := min(max(now-b.at, 0), f.Lag().Microseconds())
	lid := brim + lag*(limit.RateNanos/1e9) + lag*(limit.RateNanos%1e9)/1e9 // what is used and told later was refilled meanwhile
	if dt := now - b.at; dt > 0 && b.level < lid {
		earned := new(big.Int).Mul(big.NewInt(dt), big.NewInt(limit.RateNanos))
		earned.Add(earned, big.NewInt(b.frac))
		rest := new(big.Int)
		earned.DivMod(earned, big.NewInt(1e9), rest)
		if earned.Cmp(big.NewInt(lid-b.level)) >= 0 {
			b.level = lid
		} else {
			b.level, b.frac = b.level+earned.Int64(), rest.Int64()
		}
	}
	if b.level >= lid {
		b.level, b.frac = lid, 0
	}
	b.at = now
	for i := range f.Uses {
		b.use(&f.Uses[i], now)
	}
	if b.level >= brim {
		b.level, b.frac = brim, 0
	}
	idle := b.level >= brim && b.total == was.total
	if f.Bounds != nil {
		b.level = max(min(b.level, f.Bounds.MostMicros), min(f.Bounds.LeastMicros, brim))
	}
	speed := float64(limit.RateNanos/1e9) + float64(limit.RateNanos%1e9)/1e9
	if f.Plain() && idle && b.level >= brim { // what it earns beyond its brim pays for what is told later
		b.at = min(max(was.at+int64(math.Floor(float64(max(brim-was.level, 0))/speed)), now-aggregator.LagMax.Microseconds()), now)
	}
	b.level = max(b.level, -int64(math.Min(float64(brim+min(max(f.Offered, 0), aggregator.MaxBurst)*1e6)+math.Floor(5e6*speed), 4e15)))
	b.version = max(b.version+1, now)
	b.expires = now + 1000*int64(math.Min(math.Ceil(float64(max(full-b.level, 0))/speed/1000)+60000, 4e10))

	s := aggregator.KeyState{Key: f.Key, Limit: f.Limit, LevelMicros: b.level, Version: uint64(b.version), At: now, New: fresh}
	if look {
		s.Limit = limit
	}
	for g, d := range b.demand {
		if rate := aggregator.Fade(d.micros, now-d.until); rate > 0 {
			s.Demands = append(s.Demands, aggregator.Demand{Gateway: g, RateNanos: rate * 1000, Since: d.since})
		}
	}
	return s
}

// earned is what a bucket has earned since the counter began to remember.
func (m *Memory) earned(l aggregator.Limit, now int64) int64 {
	if m.since < 0 {
		m.since = now
	}
	if m.since == 0 {
		return l.Burst * 1e6
	}
	earned := new(big.Int).Mul(big.NewInt(now-m.since), big.NewInt(l.RateNanos))
	earned.Div(earned, big.NewInt(1e9))
	if full := big.NewInt(l.Burst * 1e6); earned.Cmp(full) > 0 {
		earned = full
	}
	return earned.Int64()
}

func (b *bucket) use(u *aggregator.Use, now int64) {
	id := incarnation{u.Gateway, u.Boot, u.Incarnation}
	m, known := b.marks[id]
	if m == nil {
		m = &mark{}
		b.marks[id] = m
	}
	if known && u.Seq <= m.seq {
		return
	}
	cum := int64(u.Cum)
	charged := int64(u.From)
	if known {
		charged = max(m.cum, int64(u.Settled))
	}
	switch {
	case cum > charged:
		b.level -= (cum - charged) * 1e6
	case known && cum < m.cum: // given back
		b.level += (m.cum - cum) * 1e6
	}
	b.total += cum - m.cum
	m.cum, m.seq = cum, u.Seq
	if u.DemandNanos <= 0 {
		return
	}
	d := b.demand[u.Gateway]
	asked := max(u.DemandNanos/1000, 1)
	if d == nil || now-d.until > 2e6 {
		d = &demand{since: now}
		b.demand[u.Gateway] = d
	} else {
		asked = aggregator.Blend(aggregator.Fade(d.micros, now-d.until), asked, u.SureNanos/1000, u.Span.Microseconds())
	}
	d.micros, d.until = asked, now+u.Window.Microseconds()
}

// Take is aggregator.Counter.
func (m *Memory) Take(_ context.Context, takes []aggregator.Take) ([]aggregator.Taken, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	now := m.Now().UnixMicro()
	taken := make([]aggregator.Taken, len(takes))
	for i := range takes {
		t := &takes[i]
		m.fold(&aggregator.Fold{Key: t.Key, Limit: t.Limit, Strict: true}, now)
		b := m.keys[t.Key]
		b.at = now
		full, cost := b.limit.Burst*1e6, t.Cost*1e6
		switch {
		case cost <= b.level || cost < 0:
			taken[i].OK = true
			b.level = min(b.level-cost, full)
			b.total += t.Cost
		case cost > full:
			taken[i].Wait = -time.Microsecond
		default:
			speed := float64(b.limit.RateNanos) / 1e9
			taken[i].Wait = time.Duration(math.Ceil(float64(cost-b.level)/speed)) * time.Microsecond
		}
		taken[i].LevelMicros = b.level
	}
	return taken, nil
}

// Epoch is aggregator.Counter.
func (m *Memory) Epoch(context.Context) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return 0, m.err
	}
	m.epoch = max(m.epoch+1, uint64(max(m.Now().UnixMicro(), 1)))
	return m.epoch, nil
}

// Mark is aggregator.Counter.
func (m *Memory) Mark(_ context.Context, keys []aggregator.Key) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return m.err
	}
	for _, k := range keys {
		m.live[k] = m.Now().Add(time.Minute).UnixMicro()
	}
	return nil
}

// Live is aggregator.Counter.
func (m *Memory) Live(_ context.Context) ([]aggregator.KeyState, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	now := m.Now().UnixMicro()
	var states []aggregator.KeyState
	for k, until := range m.live {
		if until <= now {
			delete(m.live, k)
			continue
		}
		if s := m.fold(&aggregator.Fold{Key: k}, now); s.Version > 0 {
			states = append(states, s)
		}
	}
	return states, nil
}

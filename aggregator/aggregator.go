// Package aggregator keeps one limit over many gateways: it folds their reports into the global bucket of each key, divides
// the limit between them by demand, and casts the shares back.
package aggregator

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/schemas"
)

// Config says how often the aggregator speaks and how long it remembers. A zero field means its default.
type Config struct {
	Keepalive   time.Duration       // every live gateway hears from us this often (1s)
	TTL         time.Duration       // how long shares hold without a message (3 × Keepalive)
	Digest      time.Duration       // every live share is sent again this often (5s)
	FleetExpiry time.Duration       // a gateway that is silent for longer is gone (5s)
	Learn       time.Duration       // after a start, time to hear from all gateways before limits are divided (2s); negative is none
	Late        time.Duration       // a report that is older when it comes is counted but not charged to the bucket (30s)
	MaxKeys     int                 // keys whose shares are remembered; beyond it some are forgotten (200,000)
	OnPush      func([]PushedShare) // hears of every changed share, from any goroutine; it must not block or keep the slice

	Now   func() time.Time                     // this process's clock (time.Now)
	After func(time.Duration) <-chan time.Time // and what waits by it (time.After)
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.Keepalive, time.Second}, {&c.Digest, 5 * time.Second}, {&c.FleetExpiry, 5 * time.Second},
		{&c.Learn, 2 * time.Second}, {&c.Late, 30 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.TTL == 0 {
		c.TTL = 3 * c.Keepalive
	}
	if c.MaxKeys == 0 {
		c.MaxKeys = 200_000
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.After == nil {
		c.After = time.After
	}
	return c
}

// Caster sends updates to gateways. An update may get lost: it is said again within Config.Digest.
type Caster interface {
	Cast(ctx context.Context, gateway string, u *schemas.ThrottleUpdate) error
}

// PushedShare is one change of one gateway's share, for the history.
type PushedShare struct {
	At      time.Time
	Gateway string
	schemas.Share
}

const (
	calmFor    = 30 * time.Second       // a key at rest for so long is forgotten
	settleIn   = time.Second            // a push shows in the gateway's reports within this; a key unheard of for longer is looked at
	retryPause = 100 * time.Millisecond // after a failed fold, before the batch may come again
	liveHolds  = time.Second            // one reading of all live keys serves all snapshots of this time
	chunk      = 1000                   // keys folded at once when nobody waits
)

// Aggregator is the centre. Its methods may be called from any goroutine.
type Aggregator struct {
	cfg     Config
	counter Counter
	caster  Caster
	log     *slog.Logger
	m       *Metrics
	learned time.Time // from here on limits are divided

	mu       sync.Mutex           // guards what follows
	fleet    map[string]time.Time // when each gateway was last heard
	keys     map[Key]*entry       // keys of which some gateway holds a share it would not guess
	degraded time.Time            // since when the counter does not answer; zero while it does
	castLost int                  // updates not sent since the last word about it

	recalled              bool // by Step, and only there
	keepaliveAt, digestAt time.Time

	liveMu sync.Mutex // guards what follows, also while it is read
	live   []KeyState
	liveAt time.Time
}

// entry is what we remember of a key.
type entry struct {
	state KeyState
	asked time.Time       // when state was read
	held  map[string]held // by gateway
	calm  time.Time       // since when every gateway may have the even share; zero while one needs another
}

// held is the share that a gateway was told.
type held struct {
	Limit
	reason string
	at     time.Time
}

// New returns an aggregator that counts in counter and speaks through caster. m may be nil. It starts nothing.
func New(cfg Config, counter Counter, caster Caster, log *slog.Logger, m *Metrics) *Aggregator {
	cfg = cfg.withDefaults()
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	now := cfg.Now()
	return &Aggregator{cfg: cfg, counter: counter, caster: caster, log: log, m: m, learned: now.Add(cfg.Learn),
		fleet: make(map[string]time.Time), keys: make(map[Key]*entry), keepaliveAt: now.Add(cfg.Keepalive), digestAt: now.Add(cfg.Digest)}
}

// Reports folds a batch and casts the shares that change. It is the handler of the throttle consumer: after an error the batch
// must come again, which changes nothing that was folded already.
func (a *Aggregator) Reports(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
	now := a.cfg.Now()
	late := now.Add(-a.cfg.Late)
	for _, item := range b.Items {
		if item.Arrived.After(late) {
			a.saw(item.Value.Gateway, now)
		}
	}
	folds := merge(b.Items, late)
	states, err := a.fold(ctx, folds)
	if err != nil {
		select { // a counter that is away is asked ten times a second, not in a tight loop
		case <-a.cfg.After(retryPause):
		case <-ctx.Done():
		}
		return fmt.Errorf("fold reports %d to %d of %s: %w", b.First, b.Last, b.Stream, err)
	}
	for _, item := range b.Items {
		a.m.Reconciled.Add(float64(item.Value.Requests()))
	}
	a.divide(ctx, folds, states)
	return nil
}

// Heartbeat takes a gateway's sign of life that arrived at a time of this process's clock.
func (a *Aggregator) Heartbeat(h *schemas.Heartbeat, arrived time.Time) {
	a.saw(h.Gateway, arrived)
	if h.ClockKnown {
		a.m.ClockOffset.WithLabelValues(h.Gateway).Set(h.ClockOffset.Seconds())
	}
}

// Snapshot is every live share of gateway, from the counter and not from memory: it is as good right after a start. It waits
// until the fleet is known.
func (a *Aggregator) Snapshot(ctx context.Context, gateway string) (*schemas.ThrottleUpdate, error) {
	if err := schemas.ValidName(gateway); err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	a.saw(gateway, a.cfg.Now())
	select {
	case <-a.cfg.After(a.learned.Sub(a.cfg.Now())):
	case <-ctx.Done():
		return nil, fmt.Errorf("snapshot for %s: %w", gateway, ctx.Err())
	}
	states, err := a.readLive(ctx)
	if err != nil {
		return nil, fmt.Errorf("snapshot for %s: %w", gateway, err)
	}
	now := a.cfg.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fleet[gateway] = now
	fleet := a.gateways()
	u := a.update(len(fleet))
	u.Snapshot = true
	for i := range states {
		s := &states[i]
		shares, reasons := share(s, fleet)
		at, _ := slices.BinarySearch(fleet, gateway)
		h := held{Limit{shares[at].RateNanos, shares[at].Burst}, reasons[at], now}
		u.Shares = append(u.Shares, s.share(h))
		e := a.keys[s.Key]
		if e == nil {
			e = a.remember(s, now)
		}
		if s.Version >= e.state.Version {
			e.held[gateway] = h
		}
	}
	a.m.Pushes.WithLabelValues("snapshot").Add(float64(len(u.Shares)))
	return u, nil
}

func (a *Aggregator) readLive(ctx context.Context) ([]KeyState, error) {
	a.liveMu.Lock()
	defer a.liveMu.Unlock()
	if now := a.cfg.Now(); a.liveAt.IsZero() || now.Sub(a.liveAt) > liveHolds {
		states, err := a.counter.Live(ctx)
		a.answered(err)
		if err != nil {
			return nil, err
		}
		a.live, a.liveAt = states, now
	}
	return a.live, nil
}

// Run speaks to the gateways until ctx is done: a keepalive each second, also while the counter is away (their shares still add
// up), and every live share each five.
func (a *Aggregator) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.cfg.After(a.Step(ctx).Sub(a.cfg.Now())):
		}
	}
}

// Step does what is due, and returns when something is due next. Run is a loop around it, for one goroutine; a simulation calls it
// instead.
func (a *Aggregator) Step(ctx context.Context) (next time.Time) {
	if a.due(&a.keepaliveAt, a.cfg.Keepalive) {
		a.expire()
		if !a.cfg.Now().Before(a.learned) {
			a.keepalive(ctx)
			if !a.recalled {
				a.recalled = a.recall(ctx)
			}
			a.settle(ctx)
		}
	}
	if a.due(&a.digestAt, a.cfg.Digest) {
		a.digest(ctx)
	}
	if a.digestAt.Before(a.keepaliveAt) {
		return a.digestAt
	}
	return a.keepaliveAt
}

// due says whether at has come, and sets it to the next time: turns that were missed are left out.
func (a *Aggregator) due(at *time.Time, every time.Duration) bool {
	now := a.cfg.Now()
	if now.Before(*at) {
		return false
	}
	if *at = at.Add(every); at.Before(now) {
		*at = now.Add(every)
	}
	return true
}

// saw notes that gateway lives.
func (a *Aggregator) saw(gateway string, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	last, known := a.fleet[gateway]
	if at.After(last) {
		a.fleet[gateway] = at
	}
	if !known {
		a.fleetChanged()
		a.log.Info("gateway joined", "gateway", gateway, "gateways", len(a.fleet))
	}
}

// fleetChanged makes all shares due for a look. mu is held.
func (a *Aggregator) fleetChanged() {
	a.m.Gateways.Set(float64(len(a.fleet)))
	for _, e := range a.keys {
		e.asked = time.Time{}
	}
}

// expire drops silent gateways.
func (a *Aggregator) expire() {
	a.mu.Lock()
	defer a.mu.Unlock()
	gone := 0
	for g, at := range a.fleet {
		if a.cfg.Now().Sub(at) <= a.cfg.FleetExpiry {
			continue
		}
		delete(a.fleet, g)
		for _, e := range a.keys {
			delete(e.held, g)
		}
		a.m.ClockOffset.DeleteLabelValues(g)
		a.log.Warn("gateway is silent", "gateway", g, "gateways", len(a.fleet))
		gone++
	}
	if gone > 0 {
		a.fleetChanged()
	}
}

// gateways is the fleet in order. mu is held.
func (a *Aggregator) gateways() []string { return slices.Sorted(maps.Keys(a.fleet)) }

func (a *Aggregator) update(gateways int) *schemas.ThrottleUpdate {
	return &schemas.ThrottleUpdate{Gateways: gateways, TTL: a.cfg.TTL}
}

func (a *Aggregator) keepalive(ctx context.Context) {
	a.mu.Lock()
	fleet := a.gateways()
	a.mu.Unlock()
	for _, g := range fleet {
		a.cast(ctx, g, a.update(len(fleet)))
	}
}

// recall fetches the keys that were live before this process started, so that their shares come to rest too.
func (a *Aggregator) recall(ctx context.Context) bool {
	states, err := a.readLive(ctx)
	if err != nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range states {
		if a.keys[states[i].Key] == nil {
			a.remember(&states[i], time.Time{})
		}
	}
	return true
}

// settle looks at remembered keys that no report has mentioned lately: demand fades, debt is repaid, gateways come and go.
func (a *Aggregator) settle(ctx context.Context) {
	now := a.cfg.Now()
	var folds []Fold
	a.mu.Lock()
	for key, e := range a.keys {
		if now.Sub(e.asked) >= settleIn {
			folds = append(folds, Fold{Key: key, Limit: e.state.Limit})
		}
	}
	a.mu.Unlock()
	for part := range slices.Chunk(folds, chunk) {
		states, err := a.fold(ctx, part)
		if err != nil {
			return // it has been noted, and the next tick tries again
		}
		a.divide(ctx, part, states)
	}
}

// digest says all shares again, for those who missed some, and keeps their keys live.
func (a *Aggregator) digest(ctx context.Context) {
	a.mu.Lock()
	fleet := a.gateways()
	updates := make(map[string]*schemas.ThrottleUpdate, len(fleet))
	keys := make([]Key, 0, len(a.keys))
	for key, e := range a.keys {
		keys = append(keys, key)
		for g, h := range e.held {
			u := updates[g]
			if u == nil {
				u = a.update(len(fleet))
				updates[g] = u
			}
			u.Shares = append(u.Shares, e.state.share(h))
		}
	}
	a.m.LiveKeys.Set(float64(len(keys)))
	if a.castLost > 0 {
		a.log.Warn("throttle updates not sent", "updates", a.castLost)
		a.castLost = 0
	}
	a.mu.Unlock()
	for _, g := range fleet {
		if u := updates[g]; u != nil {
			a.m.Pushes.WithLabelValues("digest").Add(float64(len(u.Shares)))
			a.cast(ctx, g, u)
		}
	}
	if len(keys) > 0 {
		a.answered(a.counter.Mark(ctx, keys))
	}
}

// fold folds, and notes whether the counter answers.
func (a *Aggregator) fold(ctx context.Context, folds []Fold) ([]KeyState, error) {
	if len(folds) == 0 {
		return nil, nil
	}
	start := time.Now()
	states, err := a.counter.Fold(ctx, folds)
	a.answered(err)
	if err != nil {
		return nil, err
	}
	a.m.FoldSeconds.Observe(time.Since(start).Seconds())
	a.m.Folds.Add(float64(len(folds)))
	for i := range states {
		if states[i].Lost {
			a.m.StatesLost.Inc()
		}
	}
	return states, nil
}

// answered notes whether the counter answers: loud once, on each change.
func (a *Aggregator) answered(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err != nil && a.degraded.IsZero():
		a.degraded = a.cfg.Now()
		a.m.Degraded.Inc()
		a.log.Error("the counter does not answer: shares stay as they are", "err", err)
	case err == nil && !a.degraded.IsZero():
		a.log.Info("the counter answers again", "after", a.cfg.Now().Sub(a.degraded).Round(time.Millisecond))
		a.degraded = time.Time{}
		a.m.Degraded.Dec()
	}
}

// divide casts the shares of states that differ from what gateways have.
func (a *Aggregator) divide(ctx context.Context, folds []Fold, states []KeyState) {
	now := a.cfg.Now()
	if now.Before(a.learned) {
		a.mu.Lock()
		for i := range states {
			if a.keys[states[i].Key] == nil {
				a.remember(&states[i], time.Time{})
			}
		}
		a.mu.Unlock()
		return
	}
	updates := make(map[string]*schemas.ThrottleUpdate)
	var history []PushedShare
	a.mu.Lock()
	fleet := a.gateways()
	for i := range states {
		for g, h := range a.changes(&states[i], folds[i].Uses, fleet, now) {
			u := updates[g]
			if u == nil {
				u = a.update(len(fleet))
				updates[g] = u
			}
			s := states[i].share(h)
			u.Shares = append(u.Shares, s)
			history = append(history, PushedShare{At: now, Gateway: g, Share: s})
		}
	}
	a.mu.Unlock()
	for g, u := range updates {
		a.cast(ctx, g, u)
	}
	if len(history) > 0 {
		a.m.Pushes.WithLabelValues("change").Add(float64(len(history)))
		if a.cfg.OnPush != nil {
			a.cfg.OnPush(history)
		}
	}
}

// changes is what gateways must be told of a key, and is remembered as told. mu is held.
//
// A gateway that was told nothing has the even share, which it works out itself from the size of the fleet. So a key that
// nobody presses costs no message; one that is pressed is said to all, also where the share is the even one.
func (a *Aggregator) changes(s *KeyState, uses []Use, fleet []string, now time.Time) map[string]held {
	e := a.keys[s.Key]
	if len(fleet) == 0 || e != nil && s.Version <= e.state.Version {
		return nil // nobody to tell, or a newer state overtook this one
	}
	shares, reasons := share(s, fleet)
	even := Limit{s.Limit.RateNanos / int64(len(fleet)), max(s.Limit.Burst/int64(len(fleet)), 1)}
	pressed := s.pressed()
	var tell map[string]held
	calm := !pressed
	for i, sh := range shares {
		want := Limit{sh.RateNanos, sh.Burst}
		has, told := even, false
		if e != nil {
			if h, ok := e.held[sh.Gateway]; ok {
				has, told = h.Limit, true
				if now.Sub(h.at) < settleIn {
					uses = without(uses, sh.Gateway) // its reports may be from before it heard
				}
			}
		}
		if u := newest(uses, sh.Gateway); u != nil {
			has = u.Enforced
		}
		if !near(want, even, 1) {
			calm = false
		}
		slack := int64(0)
		if !told {
			slack = 1
		}
		if near(has, want, slack) && (told || !pressed) {
			continue
		}
		if tell == nil {
			tell = make(map[string]held)
		}
		tell[sh.Gateway] = held{want, reasons[i], now}
	}
	if e == nil {
		if len(tell) == 0 {
			return nil
		}
		e = a.remember(s, now)
	}
	limited := e.state.Limit == s.Limit
	e.state, e.asked = *s, now
	maps.Copy(e.held, tell)
	switch {
	case !calm || !limited:
		e.calm = time.Time{}
	case e.calm.IsZero():
		e.calm = now
	case now.Sub(e.calm) >= calmFor:
		delete(a.keys, s.Key)
	}
	if len(e.held) == 0 {
		delete(a.keys, s.Key)
	}
	return tell
}

// remember makes an entry for a key. When there are too many another is forgotten, which costs a message at most: gateways say
// in their reports what they enforce. mu is held.
func (a *Aggregator) remember(s *KeyState, asked time.Time) *entry {
	if len(a.keys) >= a.cfg.MaxKeys {
		for key := range a.keys {
			delete(a.keys, key)
			break
		}
	}
	e := &entry{state: *s, asked: asked, held: make(map[string]held)}
	a.keys[s.Key] = e
	return e
}

// cast sends u. What is lost is counted, and said again by the next digest.
func (a *Aggregator) cast(ctx context.Context, gateway string, u *schemas.ThrottleUpdate) {
	if err := a.caster.Cast(ctx, gateway, u); err != nil {
		a.m.CastErrors.Inc()
		a.mu.Lock()
		a.castLost++
		a.mu.Unlock()
		a.log.Debug("throttle update not sent", "gateway", gateway, "err", err)
	}
}

// share divides the limit of s between the gateways of fleet, which is in order, and says why.
func share(s *KeyState, fleet []string) ([]Share, []string) {
	demands := make([]Demand, len(fleet))
	reasons := make([]string, len(fleet))
	for i, g := range fleet {
		demands[i].Gateway = g
		reasons[i] = "newcomer"
	}
	for _, d := range s.Demands {
		if i, ok := slices.BinarySearch(fleet, d.Gateway); ok && d.RateNanos > 0 {
			d.RateNanos = coarse(d.RateNanos)
			demands[i], reasons[i] = d, "demand"
		}
	}
	limit := s.Limit
	if s.LevelMicros < 0 {
		limit = limit.Repaying(-s.LevelMicros)
		for i := range reasons {
			reasons[i] = "debt"
		}
	}
	return Allocate(limit, demands), reasons
}

// pressed says whether gateways ask for the whole limit, or have spent more.
func (s *KeyState) pressed() bool {
	var sum int64
	for _, d := range s.Demands {
		if sum += d.RateNanos; sum >= s.Limit.RateNanos || sum < 0 {
			return true
		}
	}
	return s.LevelMicros < 0
}

func (s *KeyState) share(h held) schemas.Share {
	level := s.LevelMicros / 1e6
	if s.LevelMicros%1e6 < 0 {
		level-- // any debt shows
	}
	return schemas.Share{Rule: s.Key.Rule, Key: s.Key.Key, Version: s.Version, RateNanos: h.RateNanos, Burst: h.Burst,
		LimitRateNanos: s.Limit.RateNanos, LimitBurst: s.Limit.Burst, Reason: h.reason, Level: level}
}

// near says whether a change of share is too small to tell: under 2 % in rate and burst, or a difference of slack in a burst
// that stays above zero.
func near(a, b Limit, slack int64) bool {
	diff := abs(a.Burst - b.Burst)
	return close2(a.RateNanos, b.RateNanos) && (close2(a.Burst, b.Burst) || diff <= slack && a.Burst > 0 && b.Burst > 0)
}

func close2(a, b int64) bool {
	diff := abs(a - b)
	return diff == 0 || diff < max(a, b)/50
}

func abs(n int64) int64 {
	if n < 0 {
		return -n
	}
	return n
}

// coarse rounds up to four significant bits, at most an eighth, so that the noise of a measurement moves no share.
func coarse(n int64) int64 {
	step := int64(1)
	for n/step >= 16 {
		step *= 2
	}
	return (n + step - 1) / step * step
}

// newest is the last use of gateway that tells what it enforces.
func newest(uses []Use, gateway string) *Use {
	for i := len(uses) - 1; i >= 0; i-- {
		if uses[i].Gateway == gateway && uses[i].Seq > 0 {
			return &uses[i]
		}
	}
	return nil
}

func without(uses []Use, gateway string) []Use {
	return slices.DeleteFunc(slices.Clone(uses), func(u Use) bool { return u.Gateway == gateway })
}

package accuracy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/aggregatortest"
	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// Timing of what stands between the limiter and the centre, which is modelled here: package ingest's reporter, the stream and its
// throttle consumer, and package natsfeed. These are their defaults.
const (
	hotEvery       = 100 * ms
	hotMin         = 10 * ms
	allEvery       = 2 * s
	maxEntries     = 500
	maxReports     = 64
	hastyMin       = 50 * ms  // of the first attempt, doubling …
	publishTimeout = 300 * ms // … up to this; then there is a pause, too
	publishRetry   = 50 * ms  // doubling up to the timeout

	batchDelay = 5 * ms
	batchMax   = 500
	handleWait = 100 * ms // after a failed fold …
	handleMin  = 50 * ms  // … and this, doubling …
	handleMax  = s / 2    // … up to this

	heartbeat   = s
	snapshotMin = 100 * ms
	snapshotMax = 5 * s
	resync      = 60 * s
	learn       = 3 * s / 2
)

// weir is the product: real enforcers, a real aggregator and its counter's twin in memory, in virtual time.
type weir struct {
	w        *world
	policy   *limits.Policy
	gateways []*gateway
	stream   stream
	counter  *counter
	centre   *centre // nil while it is down
	skew     int64   // of the centre's clock
}

// reportRound is how long a round of reports takes at most, as the product is configured: a hot key's use waits to be sealed, then the
// report for others of its batch at the centre, and there are six hops: two to the centre, two to Redis and back, two to the gateways.
const reportRound = hotEvery + batchDelay + 6*hopMax

const tenantPrefix = "tenant-"

// request asks for one token of a key.
func request(key int) *enforcer.Request {
	return &enforcer.Request{Tenant: fmt.Sprintf(tenantPrefix+"%07d", key), Cost: 1}
}

// newWeir starts a fleet whose rule is kept with this consistency.
func newWeir(c limits.Consistency) func(*world) fleet {
	return func(w *world) fleet {
		f := &weir{w: w}
		f.policy = &limits.Policy{Version: 1, Rules: []limits.Rule{{Name: "contract", Layer: limits.LayerContract,
			Key: []limits.Dimension{{Kind: limits.ByTenant}}, Consistency: c, Fixed: w.sc.limit()}}}
		redisSkew := int64(0)
		if w.sc.clocks {
			f.skew, redisSkew = 5*s, -5*s
		}
		f.counter = newCounter(w, redisSkew)
		f.stream.bodies = make(map[reportID]bool)
		f.startCentre()
		f.gateways = make([]*gateway, w.sc.most)
		for i := range w.sc.gateways {
			f.startGateway(i)
		}
		return f
	}
}

func (f *weir) happen(h happening) {
	switch h.what {
	case centreDown:
		f.centre.stop()
		f.centre = nil
	case centreUp:
		f.startCentre()
	case redisDown:
		f.counter.memory.Fail(errors.New("connection refused"))
	case redisUp:
		f.counter.memory.Flush()
		f.counter.memory.Fail(nil)
	case joins:
		f.startGateway(h.gateway)
	case leaves:
		f.gateways[h.gateway].leave()
	case vanishes:
		f.gateways[h.gateway].gone = true
	}
}

func (f *weir) ask(i int) {
	a := &f.w.arrivals[i]
	g := f.gateways[a.gateway]
	e := g.enforcer
	if cold := f.w.sc.cold; cold > 0 && a.key >= cold {
		e = g.coldEnforcer(a.key)
	}
	q := request(int(a.key))
	d := e.Check(g.clock(), q)
	if d.Asks() {
		g.settle(e, i, q, d)
	} else {
		f.w.answer(i, d.Allowed)
	}
	select {
	case <-e.Hot():
		g.hot()
	default:
	}
}

// takeWait is how long a gateway waits for an answer about one request.
const takeWait = 5 * ms

// settle asks the centre about one request.
func (g *gateway) settle(e *enforcer.Enforcer, i int, q *enforcer.Request, d enforcer.Decision) {
	w := g.f.w
	done := false
	end := func(r schemas.TakeReply, err error) {
		if done {
			return
		}
		done = true
		w.answer(i, e.Settle(context.Background(), g.clock(), q, d, func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) { return r, err }).Allowed)
	}
	l := w.sc.limit()
	ask := schemas.TakeRequest{Rule: "contract", Key: q.Tenant, LimitRateNanos: l.Rate.Nano(), LimitBurst: l.Burst, Cost: q.Cost, Gateway: g.name}
	g.toCentre.send(0, func() {
		c := g.f.centre
		if c == nil {
			return
		}
		var replies []schemas.TakeReply
		wait := c.redis()
		var err error
		c.call(wait, func() { replies, err = c.agg.Take(context.Background(), []schemas.TakeRequest{ask}) })
		if err == nil {
			g.down.send(wait, func() { end(replies[0], nil) })
		}
	})
	w.after(takeWait, func() { end(schemas.TakeReply{}, errors.New("no answer")) })
}

// gateway is one real enforcer, and a model of the loops around it.
type gateway struct {
	f          *weir
	name, boot string
	enforcer   *enforcer.Enforcer
	origin     int64 // of its monotonic clock
	skew       int64 // of its wall clock
	gone       bool
	rng        *rand.Rand
	blocks     []*block // of cold keys
	blockOf    map[int32]*block
	heard      *schemas.ThrottleUpdate // the last one, without its shares
	up, down   *link                   // to and from the stream's server
	toCentre   *link

	pending          []schemas.Tokens
	spool            []*schemas.Report
	seq              uint64
	flushedAt, allAt int64
	late             bool // a flush waits for what is on its way
	early            bool // a hot bucket waits for hotMin to pass
	attempt          int  // at the first report of the spool
	sending          bool
	asked            int   // for a snapshot, by number of the asking that counts
	askWait          int64 // before the next one
}

func (f *weir) startGateway(i int) {
	name := fmt.Sprintf("gw-%02d", i)
	g := &gateway{f: f, name: name, boot: name + "-boot", rng: f.w.random("gateway " + name),
		up: f.w.link(1, name+" up"), down: f.w.link(2, name+" down"), toCentre: f.w.link(2, name+" to centre")}
	g.origin = 1000*s + g.rng.Int64N(1000*s)
	if f.w.sc.clocks {
		g.skew = []int64{5 * s, -5 * s}[i%2]
	}
	g.enforcer = g.newEnforcer()
	g.blockOf = make(map[int32]*block)
	f.gateways[i] = g
	g.flushedAt, g.allAt = f.w.now, f.w.now
	f.w.after(g.rng.Int64N(hotEvery), g.tick)
	f.w.after(g.rng.Int64N(heartbeat), g.beat)
	g.askWait = snapshotMin
	g.askSnapshot()
}

func (g *gateway) newEnforcer() *enforcer.Enforcer {
	e := enforcer.New(enforcer.Config{Stripes: 1, Ask: true, Fleet: g.f.w.sc.gateways, Clock: g.clock})
	e.SetPolicy(g.f.policy)
	return e
}

// block is a small enforcer for some cold keys. A large table forgets full buckets when it grows, at times that depend on hashes
// that differ in each process; in blocks nothing is forgotten before all of it is reported. Each key's bucket is the same real one.
type block struct {
	enforcer *enforcer.Enforcer
	keys     []int32
}

const blockKeys = 100

func (g *gateway) coldEnforcer(key int32) *enforcer.Enforcer {
	b := g.blockOf[key]
	if b == nil {
		if n := len(g.blocks); n == 0 || len(g.blocks[n-1].keys) >= blockKeys {
			b := &block{enforcer: g.newEnforcer()}
			if g.heard != nil {
				b.enforcer.Apply(*g.heard)
			}
			g.blocks = append(g.blocks, b)
		}
		b = g.blocks[len(g.blocks)-1]
		b.keys = append(b.keys, key)
		g.blockOf[key] = b
	}
	return b.enforcer
}

// collect gathers records of all enforcers. Blocks that are full and reported are as good as none.
func (g *gateway) collect(all bool, emit func(schemas.Tokens)) {
	g.enforcer.Collect(g.clock(), all, emit)
	for _, b := range g.blocks {
		b.enforcer.Collect(g.clock(), all, emit)
	}
	if all {
		g.blocks = slices.DeleteFunc(g.blocks, func(b *block) bool {
			if len(b.keys) < blockKeys {
				return false
			}
			for _, k := range b.keys {
				delete(g.blockOf, k)
			}
			return true
		})
	}
}

// apply hands an update to all enforcers, and each share to the one that has its key.
func (g *gateway) apply(u *schemas.ThrottleUpdate) {
	cold := g.f.w.sc.cold
	if cold == 0 {
		g.enforcer.Apply(*u)
		return
	}
	shares := make(map[*enforcer.Enforcer][]schemas.Share)
	for _, share := range u.Shares {
		key, err := strconv.Atoi(strings.TrimPrefix(share.Key, tenantPrefix))
		if err != nil {
			panic(err)
		}
		if b := g.blockOf[int32(key)]; b != nil {
			shares[b.enforcer] = append(shares[b.enforcer], share)
		} else if key < int(cold) {
			shares[g.enforcer] = append(shares[g.enforcer], share)
		}
	}
	part := *u
	part.Shares = shares[g.enforcer]
	g.enforcer.Apply(part)
	for _, b := range g.blocks {
		part.Shares = shares[b.enforcer]
		b.enforcer.Apply(part)
	}
	part.Shares = nil
	g.heard = &part
}

// clock is the gateway's monotonic clock.
func (g *gateway) clock() int64 { return g.f.w.now + g.origin }

// leave is an orderly end: what was decided last is reported.
func (g *gateway) leave() {
	h := &schemas.Heartbeat{Gateway: g.name, Boot: g.boot, SentAt: g.f.w.wall(g.skew), Mode: schemas.ModeStopped}
	g.toCentre.send(0, func() {
		if c := g.f.centre; c != nil {
			c.call(0, func() { c.agg.Heartbeat(h, c.now()) })
		}
	})
	g.flush(true)
	g.gone = true
}

func (g *gateway) tick() {
	if g.gone {
		return
	}
	g.flush(false)
	g.f.w.after(hotEvery, g.tick)
}

func (g *gateway) hot() {
	if g.early {
		return
	}
	if wait := hotMin - (g.f.w.now - g.flushedAt); wait > 0 {
		g.early = true
		g.f.w.after(wait, func() {
			g.early = false
			if !g.gone {
				g.flush(false)
			}
		})
		return
	}
	g.flush(false)
}

// flush gathers what is due and seals it.
func (g *gateway) flush(all bool) {
	now := g.f.w.now
	all = all || now-g.allAt >= allEvery
	if g.late = !all && len(g.spool) > 0; g.late {
		return // what is hot goes out with the newest figures, not behind others
	}
	if all {
		g.allAt = now
	}
	g.flushedAt = now
	first := len(g.pending)
	g.collect(all, func(t schemas.Tokens) {
		for i := range g.pending[:first] {
			if p := &g.pending[i]; p.Rule == t.Rule && p.Key == t.Key && p.Incarnation == t.Incarnation {
				t.Taken, t.Refused, t.Window = t.Taken+p.Taken, t.Refused+p.Refused, t.Window+p.Window
				t.TokensMin = min(t.TokensMin, p.TokensMin)
				*p = t
				return
			}
		}
		g.pending = append(g.pending, t)
	})
	// The order of collection is that of a hash that differs in each process.
	slices.SortFunc(g.pending[first:], func(a, b schemas.Tokens) int {
		return cmp.Or(strings.Compare(a.Rule, b.Rule), strings.Compare(a.Key, b.Key), cmp.Compare(a.Incarnation, b.Incarnation))
	})
	g.seal()
}

// seal makes reports of what is pending while the spool takes them.
func (g *gateway) seal() {
	for len(g.pending) > 0 && len(g.spool) < maxReports {
		n := min(len(g.pending), maxEntries)
		g.seq++
		g.spool = append(g.spool, &schemas.Report{Gateway: g.name, Boot: g.boot, Seq: g.seq, PolicyVersion: 1,
			SealedAt: g.f.w.wall(g.skew), Tokens: slices.Clone(g.pending[:n])})
		g.pending = slices.Delete(g.pending, 0, n)
	}
	if !g.sending {
		g.publish()
	}
}

// publish stores the spool's first report. One that is not acknowledged in time is sent again, and stored once.
func (g *gateway) publish() {
	g.sending = len(g.spool) > 0
	if !g.sending {
		return
	}
	r, w := g.spool[0], g.f.w
	w.traffic.bytes += int64(size(schemas.EncodeReport(r)))
	acked := false
	g.up.send(0, func() {
		g.f.stream.store(g.f, r)
		if g.up.lost() {
			return
		}
		w.after(g.up.delay(), func() {
			if acked || len(g.spool) == 0 || g.spool[0] != r {
				return // it was acknowledged before
			}
			acked = true
			g.spool, g.attempt = g.spool[1:], 0
			if len(g.pending) > 0 {
				g.sending = false
				g.seal()
				return
			}
			g.publish()
			if g.late && !g.gone {
				g.hot()
			}
		})
	})
	wait := min(hastyMin<<min(g.attempt, 10), publishTimeout)
	if failed := g.attempt - 3; failed >= 0 { // not in haste any more
		pause := min(publishRetry<<min(failed, 10), publishTimeout)
		wait += pause/2 + g.rng.Int64N(pause/2+1)
	}
	g.attempt++
	w.after(wait, func() {
		if !acked && len(g.spool) > 0 && g.spool[0] == r && !g.gone {
			g.publish()
		}
	})
}

func (g *gateway) beat() {
	if g.gone {
		return
	}
	h := &schemas.Heartbeat{Gateway: g.name, Boot: g.boot, SentAt: g.f.w.wall(g.skew), PolicyVersion: 1, Mode: g.enforcer.Mode(),
		PendingReports: uint64(len(g.spool)), Version: "sim", Weight: g.enforcer.Weight()}
	g.toCentre.send(0, func() {
		if c := g.f.centre; c != nil {
			c.call(0, func() { c.agg.Heartbeat(h, c.now()) })
		}
	})
	g.f.w.after(heartbeat, g.beat)
}

// askSnapshot asks for all shares, and again until an answer comes.
func (g *gateway) askSnapshot() {
	if g.gone {
		return
	}
	g.asked++
	asked := g.asked
	g.toCentre.send(0, func() {
		if c := g.f.centre; c != nil {
			c.snapshot(g)
		}
	})
	wait := g.askWait + g.rng.Int64N(g.askWait/4+1)
	g.askWait = min(2*g.askWait, snapshotMax)
	g.f.w.after(wait, func() {
		if g.asked == asked {
			g.askSnapshot()
		}
	})
}

// hear takes an update from the centre.
func (g *gateway) hear(u *schemas.ThrottleUpdate) {
	if g.gone {
		return
	}
	g.apply(u)
	if !u.Snapshot {
		return
	}
	g.askWait = snapshotMin
	g.asked++
	asked := g.asked
	g.f.w.after(resync+g.rng.Int64N(resync/4), func() {
		if g.asked == asked {
			g.askSnapshot()
		}
	})
}

// stream is the durable log of reports. It outlives the centre, and remembers how far the centre has read.
type stream struct {
	log    []schemas.Delivered[*schemas.Report]
	seq    uint64
	bodies map[reportID]bool
}

type reportID struct {
	boot string
	seq  uint64
}

func (st *stream) store(f *weir, r *schemas.Report) {
	id := reportID{r.Boot, r.Seq}
	if st.bodies[id] {
		return
	}
	st.bodies[id] = true
	st.seq++
	st.log = append(st.log, schemas.Delivered[*schemas.Report]{Seq: st.seq, Arrived: f.w.wall(0), Value: r})
	if f.centre != nil {
		f.centre.wake()
	}
}

// centre is one life of the aggregator, and a model of its consumer and its line to the gateways.
type centre struct {
	f       *weir
	agg     *aggregator.Aggregator
	rng     *rand.Rand
	learned int64
	stopped bool
	stepAt  int64 // when the next step is planned
	busy    bool  // the consumer is gathering or handling a batch
	casts   []cast
}

type cast struct {
	gateway string
	update  *schemas.ThrottleUpdate
}

func (f *weir) startCentre() {
	c := &centre{f: f, rng: f.w.random("centre"), learned: f.w.now + learn}
	ready := make(chan time.Time)
	close(ready)
	c.agg = aggregator.New(aggregator.Config{Learn: time.Duration(learn), Now: c.now,
		After: func(time.Duration) <-chan time.Time { return ready }, // who waits is modelled here
	}, f.counter, c, slog.New(slog.DiscardHandler), nil)
	f.centre = c
	c.step()
	c.wake()
}

func (c *centre) stop() { c.stopped = true }

// now is the centre's wall clock.
func (c *centre) now() time.Time { return c.f.w.wall(c.f.skew) }

// Cast is aggregator.Caster.
func (c *centre) Cast(_ context.Context, gateway string, u *schemas.ThrottleUpdate) error {
	c.casts = append(c.casts, cast{gateway, u})
	return nil
}

// call calls the aggregator and sends what it casts, after a while that it waited for Redis. The aggregator walks over maps: what it
// says to one gateway in one call is put in order here, and cut anew where it is several messages.
func (c *centre) call(wait int64, f func()) {
	f()
	slices.SortStableFunc(c.casts, func(a, b cast) int { return strings.Compare(a.gateway, b.gateway) })
	for first := 0; first < len(c.casts); {
		end := first
		all := schemas.ThrottleUpdate{}
		for ; end < len(c.casts) && c.casts[end].gateway == c.casts[first].gateway; end++ {
			u := c.casts[end].update
			if len(u.Shares) == 0 {
				c.tell(wait, c.casts[end].gateway, u)
			}
			shares := append(all.Shares, u.Shares...)
			all = *u
			all.Shares = shares
		}
		slices.SortFunc(all.Shares, byKey)
		for part := range slices.Chunk(all.Shares, sharesPerMessage) {
			u := all
			u.Shares = part
			c.tell(wait, c.casts[first].gateway, &u)
		}
		first = end
	}
	clear(c.casts)
	c.casts = c.casts[:0]
	c.plan()
}

// sharesPerMessage is about what fits the largest update on the wire.
const sharesPerMessage = 2000

func byKey(a, b schemas.Share) int {
	return cmp.Or(strings.Compare(a.Rule, b.Rule), strings.Compare(a.Key, b.Key), cmp.Compare(a.Version, b.Version))
}

func (c *centre) tell(wait int64, gateway string, u *schemas.ThrottleUpdate) {
	for _, g := range c.f.gateways {
		if g != nil && g.name == gateway {
			c.f.w.traffic.bytes += int64(size(schemas.EncodeThrottleUpdate(u)))
			g.down.send(wait, func() { g.hear(u) })
		}
	}
}

// step lets the aggregator do what is due.
func (c *centre) step() { c.call(c.redis(), func() { c.agg.Step(context.Background()) }) }

// plan plans the next step, if it is sooner than the one that is planned.
func (c *centre) plan() {
	at := c.f.w.now + max(int64(c.agg.Due().Sub(c.now())), 0)
	if c.stopped || c.stepAt > c.f.w.now && c.stepAt <= at {
		return
	}
	c.stepAt = at
	c.f.w.at(at, func() {
		if !c.stopped && c.stepAt == at {
			c.stepAt = 0
			c.step()
		}
	})
}

// redis is the time that Redis takes to answer.
func (c *centre) redis() int64 { return 2*hopMin + c.rng.Int64N(2*(hopMax-hopMin)) }

// snapshot answers one gateway.
func (c *centre) snapshot(g *gateway) {
	if c.f.w.now < c.learned {
		c.f.w.at(c.learned, func() {
			if !c.stopped {
				c.snapshot(g)
			}
		})
		return
	}
	var u *schemas.ThrottleUpdate
	wait := c.redis()
	c.call(wait, func() { u, _ = c.agg.Snapshot(context.Background(), g.name) }) // without an answer the gateway asks again
	if u != nil {
		slices.SortFunc(u.Shares, byKey)
		c.tell(wait, g.name, u)
	}
}

// wake lets the consumer gather a batch, if it waits for one.
func (c *centre) wake() {
	if !c.busy && len(c.f.stream.log) > 0 {
		c.busy = true
		c.f.w.after(hopMin+c.rng.Int64N(hopMax-hopMin)+batchDelay, c.gather)
	}
}

// gather hands over what has come.
func (c *centre) gather() {
	if c.stopped {
		return
	}
	n := min(len(c.f.stream.log), batchMax)
	if n == 0 {
		c.busy = false
		return
	}
	items := slices.Clone(c.f.stream.log[:n])
	c.handle(schemas.Batch[*schemas.Report]{Stream: schemas.UsageStream, First: items[0].Seq, Last: items[n-1].Seq, Items: items}, 0)
}

func (c *centre) handle(b schemas.Batch[*schemas.Report], failed int) {
	if c.stopped {
		return
	}
	var err error
	wait := c.redis()
	c.call(wait, func() { err = c.agg.Reports(context.Background(), b) })
	if err != nil {
		pause := min(handleMin<<min(failed, 20), handleMax)
		c.f.w.after(handleWait+pause/2+c.rng.Int64N(pause/2+1), func() { c.handle(b, failed+1) })
		return
	}
	c.f.stream.log = slices.Delete(c.f.stream.log, 0, len(b.Items))
	c.f.w.after(wait+batchDelay, c.gather)
}

// counter counts the calls of the counter in memory.
type counter struct {
	memory *aggregatortest.Memory
	w      *world
}

const keysPerCall = 50 // of one call of the Redis script

func newCounter(w *world, skew int64) *counter {
	m := aggregatortest.NewMemory()
	m.Now = func() time.Time { return w.wall(skew) }
	return &counter{m, w}
}

var _ aggregator.Counter = (*counter)(nil)

// Fold is aggregator.Counter.
func (c *counter) Fold(ctx context.Context, folds []aggregator.Fold) ([]aggregator.KeyState, error) {
	c.w.traffic.redis += int64(len(folds)+keysPerCall-1) / keysPerCall
	return c.memory.Fold(ctx, folds)
}

// Take is aggregator.Counter.
func (c *counter) Take(ctx context.Context, takes []aggregator.Take) ([]aggregator.Taken, error) {
	c.w.traffic.redis += int64(len(takes))
	return c.memory.Take(ctx, takes)
}

// Epoch is aggregator.Counter.
func (c *counter) Epoch(ctx context.Context) (uint64, error) {
	c.w.traffic.redis++
	return c.memory.Epoch(ctx)
}

// Mark is aggregator.Counter.
func (c *counter) Mark(ctx context.Context, keys []aggregator.Key) error {
	c.w.traffic.redis++
	return c.memory.Mark(ctx, keys)
}

// Live is aggregator.Counter.
func (c *counter) Live(ctx context.Context) ([]aggregator.KeyState, error) {
	states, err := c.memory.Live(ctx)
	c.w.traffic.redis += 1 + int64(len(states)+keysPerCall-1)/keysPerCall
	return states, err
}

func size(b []byte, _ error) int { return len(b) }

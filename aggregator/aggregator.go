// Package aggregator keeps one limit over many gateways: it folds their reports into the global bucket of each key, divides
// the limit between them by demand, and casts the shares back.
package aggregator

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/schemas"
)

// Config says how often the aggregator speaks and how long it remembers. A zero field means its default.
type Config struct {
	Keepalive   time.Duration       // the fleet is looked at, and every live gateway hears from us, this often (1s)
	Beat        time.Duration       // while Run runs, gateways hear from us this often too, whatever the counter does (250ms)
	TTL         time.Duration       // how long shares hold without a message (3 × Keepalive)
	Digest      time.Duration       // every live share is sent again this often (5s)
	FleetExpiry time.Duration       // a gateway that is silent for longer is gone (5s)
	Learn       time.Duration       // after a start, time to hear from all gateways before limits are divided (1.5s); negative is none
	Late        time.Duration       // a report that is older when it comes is counted but not charged to the bucket (30s)
	MaxKeys     int                 // keys whose shares are remembered; beyond it some are forgotten (200,000)
	MaxShares   int                 // the same for keys × gateways, each of which takes about 200 bytes (4,000,000)
	OnPush      func([]PushedShare) // hears of every changed share, from any goroutine; it must not block or keep the slice
	Deaf        func() bool         // says whether reports may not come, for no fault of gateways: no limit is divided then; it must not block (never)

	Now   func() time.Time                     // this process's clock (time.Now)
	After func(time.Duration) <-chan time.Time // and what waits by it (time.After)

	Silent func() time.Duration // how long whoever asks the counter all the time has had no answer, 0 while it is well; nil: nobody does
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.Keepalive, time.Second}, {&c.Beat, 250 * time.Millisecond}, {&c.Digest, 5 * time.Second}, {&c.FleetExpiry, 5 * time.Second},
		{&c.Learn, 1500 * time.Millisecond}, {&c.Late, 30 * time.Second},
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
	if c.MaxShares == 0 {
		c.MaxShares = 4_000_000
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.After == nil {
		c.After = time.After
	}
	if c.Deaf == nil {
		c.Deaf = func() bool { return false }
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
	restAfter  = 5 * time.Second        // a key kept by grants that nobody asks for goes back to the even shares after this
	restMost   = 10 * time.Minute       // or, of a key whose tokens come seldom, after two of them or this
	leaseFor   = time.Second            // a block of a lease lasts this long at the rate of its demand
	tinyFor    = 50 * time.Millisecond  // and of a limit that is too small to divide
	catchUp    = time.Second            // after the counter was away, to fold what has gathered meanwhile
	repeatIn   = 250 * time.Millisecond // a grant that shows in no report within this is said again
	settleIn   = time.Second            // a key unheard of for longer is looked at
	together   = 5 * time.Millisecond   // keys of which tokens are due within this are looked at together
	hearIn     = 50 * time.Millisecond  // a push is in force at the gateway after this
	silentFor  = time.Second            // a counter that is not well, and has answered nothing for so long, is away
	retryPause = 100 * time.Millisecond // after a failed fold, before the batch may come again
	liveHolds  = time.Second            // one reading of all live keys serves all snapshots of this time
	chunk      = 1000                   // keys folded at once when nobody waits
	atOnce     = 10                     // keys of a snapshot looked at in one go
	planPause  = 10                     // after the keys were planned for snapshots, they are not for so many times as long as that took
)

// Aggregator is the centre. Its methods may be called from any goroutine.
type Aggregator struct {
	cfg     Config
	counter Counter
	caster  Caster
	log     *slog.Logger
	m       *Metrics
	learned time.Time // from here on the fleet is known

	mu        sync.Mutex           // guards what follows
	fleet     map[string]time.Time // when each gateway was last heard
	left      map[string]departure // gateways that said that they stop, for as long as their last reports may come
	keys      map[Key]*entry       // keys of which some gateway holds a share it would not guess
	degraded  time.Time            // since when the counter does not answer; zero while it does
	answer    time.Time            // when it last answered one of our calls
	silent    bool                 // Config.Silent says that it is away, too
	castLost  int                  // updates not sent since the last word about it
	epoch     uint64               // of this centre; 0 before it has one
	behind    bool                 // the last batch of reports was not folded
	believe   time.Time            // until then gateways are listened to, and no limit is divided
	said      bool                 // the fleet was told that nothing is granted
	fewer     bool                 // a gateway left, and the fleet was not told
	delays    map[string]*delay    // of each gateway's reports
	weights   weights
	planAgain time.Time         // before it no key is planned for a snapshot; see planPause
	waiting   map[Key]time.Time // keys kept by grants, of which a gateway waits for a token that there is at this time
	turns     turns             // the same in order, with some that wait no longer

	recalled              bool // by Step, and only there
	keepaliveAt, digestAt time.Time
	wake                  chan struct{} // signalled when something is due sooner than it was

	liveMu sync.Mutex // guards what follows, also while it is read
	live   []KeyState
	liveAt time.Time
}

// departure is the end of one life of a gateway.
type departure struct {
	boot string
	at   time.Time
}

// entry is what we remember of a key.
type entry struct {
	state       KeyState
	asked       time.Time        // when state was read
	held        map[string]*held // by gateway
	calm        time.Time        // since when every gateway may have the even share; zero while one needs another
	pressed     time.Time        // when a gateway asked for it last
	last        string           // gateway that had a token last, of those that take turns
	consistency string
	unsure      bool // the level may be wrong: what gateways hold tells
	anew        bool // the counter has made it anew, and nobody knew what it had
}

// held is one gateway's part of a key: the share that it was told, or took for itself, and the tokens that it holds.
type held struct {
	Limit
	reason string
	told   bool
	at     time.Time // when it was told

	tokens         int64 // millionths, with those that are on their way to it …
	asOf           int64 // … in µs by the counter's clock
	granted, grant uint64
	said           int64 // when it reported, in µs by the counter's clock
	unsaid         int64 // as Part.UnsaidMicros, when its share was last worked out

	next *prepared // nil for none

	wished float64 // tokens that it asked for, each second half as much of them
	served int64   // when it last said that it had used one, in µs by the counter's clock

	boot        string // of the bucket that this is about, and of its newest report
	incarnation uint32
	seq         uint64
}

// prepared is the share that was worked out for a gateway's snapshot, before it asked for one.
type prepared struct {
	Limit
	reason string
	at     time.Time
}

// holds is what the gateway may hold at now, in millionths of a token. What it has used since it reported is in it, as it is in the
// central bucket: the difference of the two is right.
func (h *held) holds(now int64) int64 {
	earned := min(float64(h.RateNanos)*float64(max(now-h.asOf, 0))/1e9, 4e15)
	return min(h.tokens+int64(earned), h.fits(h.Burst))
}

// fits is how many it may hold under a burst.
func (h *held) fits(burst int64) int64 { return saturatingAdd(saturatingMul(burst, 1e6), h.unsaid) }

// wishes is what is left at now of the tokens that the gateway asked for.
func (h *held) wishes(now int64) float64 {
	return h.wished * math.Exp2(-float64(max(now-h.said, 0))/1e6)
}

// note takes what a gateway says of its bucket.
func (e *entry) note(u *Use, at int64) {
	h := e.held[u.Gateway]
	if u.late || h != nil && h.boot == u.Boot && u.Seq <= h.seq {
		return
	}
	if h == nil || h.boot != u.Boot || h.incarnation != u.Incarnation || u.Granted < h.granted {
		h = &held{Limit: u.Enforced, boot: u.Boot, incarnation: u.Incarnation} // a bucket that we do not know
		e.held[u.Gateway] = h
	}
	h.wished = h.wishes(at) + float64(u.asked)
	if u.taken > 0 {
		h.served = at
	}
	h.seq, h.granted, h.grant = u.Seq, u.Granted, max(h.grant, u.Granted)
	h.said = at - u.Age.Microseconds()
	h.tokens, h.asOf = 1e6*(max(u.Tokens, 0)+int64(h.grant-h.granted)), h.said
	h.unsaid = 0
}

// used is what the gateway has probably used at now since it reported, by a demand of so many billionths of a token per second.
func (h *held) used(demandNanos, now int64) int64 {
	return int64(min(float64(demandNanos)*float64(max(now-h.said, 0))/1e9, 4e15))
}

// reckon works out what gateways have used of the key that is still in its bucket. A bucket that is full lost what it could not take:
// what was used meanwhile it will not lack.
func (e *entry) reckon(s *KeyState) {
	for _, h := range e.held {
		h.unsaid = 0
	}
	sum := 0.0
	for _, d := range s.Demands {
		if h := e.held[d.Gateway]; h != nil {
			h.unsaid = h.used(d.RateNanos, s.At)
			sum += float64(h.unsaid)
		}
	}
	if room := float64(max(saturatingMul(s.Limit.Burst, 1e6)-s.LevelMicros, 0)); sum > room {
		for _, h := range e.held {
			h.unsaid = int64(float64(h.unsaid) * (room / sum))
		}
	}
}

// delay finds out how much later than usual a gateway's report comes, without a clock that both sides agree on: the smallest
// difference of the two clocks in the last seconds is that of a report that was not delayed.
type delay struct {
	least, before time.Duration // of this while, and of the one before
	since         time.Time
}

const (
	delayWhile = 10 * time.Second
	delayMax   = 5 * time.Second // more is taken for a clock that was set
)

func (d *delay) of(sealed, now time.Time) time.Duration {
	diff := now.Sub(sealed)
	if now.Sub(d.since) > delayWhile {
		d.before = d.least
		if d.since.IsZero() {
			d.before = diff
		}
		d.least, d.since = diff, now
	}
	d.least = min(d.least, diff)
	return min(diff-min(d.least, d.before), delayMax)
}

// age tells of each report how old it is. The last ones of a gateway that has left are charged, and say nothing of what it holds.
func (a *Aggregator) age(folds []Fold, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range folds {
		for j := range folds[i].Uses {
			u := &folds[i].Uses[j]
			if left, ok := a.left[u.Gateway]; ok && left.boot == u.Boot {
				u.late, u.DemandNanos = true, 0
			}
			if u.Sealed.IsZero() {
				continue
			}
			d := a.delays[u.Gateway]
			if d == nil {
				if _, lives := a.fleet[u.Gateway]; !lives {
					continue // a late word of one that is gone
				}
				d = &delay{}
				a.delays[u.Gateway] = d
			}
			u.Age = d.of(u.Sealed, now)
		}
	}
}

// evenShare is what a gateway takes for itself of a limit, as long as it was told no share.
func evenShare(l Limit, gateways int) Limit {
	return Limit{l.RateNanos / int64(gateways), max(l.Burst/int64(gateways), 1)}
}

// part is gateway's part of the key in the even case or as we know it.
func (e *entry) part(gateway string, even Limit, now int64) *held {
	if h := e.held[gateway]; h != nil {
		return h
	}
	return &held{Limit: even, tokens: saturatingMul(even.Burst, 1e6), asOf: now, said: now}
}

// byGrants says whether the key is kept by grants alone: its tokens are too few for rates and bursts, or are not to be given twice.
func (e *entry) byGrants(l Limit, gateways int) bool {
	return e.consistency == "lease" || schemas.TooFew(l.Burst, gateways)
}

// byOffers says whether the key's tokens are so few and seldom that they are offered.
func byOffers(l Limit, gateways int) bool {
	return gateways > 1 && schemas.TooFew(l.Burst, gateways) && l.slow()
}

// New returns an aggregator that counts in counter and speaks through caster. m may be nil. It starts nothing.
func New(cfg Config, counter Counter, caster Caster, log *slog.Logger, m *Metrics) *Aggregator {
	cfg = cfg.withDefaults()
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	now := cfg.Now()
	return &Aggregator{cfg: cfg, counter: counter, caster: caster, log: log, m: m, learned: now.Add(cfg.Learn),
		fleet: make(map[string]time.Time), left: make(map[string]departure), keys: make(map[Key]*entry), waiting: make(map[Key]time.Time), delays: make(map[string]*delay), wake: make(chan struct{}, 1), keepaliveAt: now.Add(cmp.Or(max(cfg.Learn, 0), cfg.Keepalive)), digestAt: now.Add(cfg.Digest)}
}

// Reports folds a batch and casts the shares that change. It is the handler of the throttle consumer: after an error the batch
// must come again, which changes nothing that was folded already.
func (a *Aggregator) Reports(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
	now := a.cfg.Now()
	late := now.Add(-a.cfg.Late)
	for _, item := range b.Items {
		if r := item.Value; item.Arrived.After(late) && !a.hasLeft(r.Gateway, r.Boot) {
			a.saw(r.Gateway, now)
		}
	}
	folds := merge(b.Items, late)
	a.age(folds, now)
	a.outstanding(folds)
	states, err := a.fold(ctx, folds)
	a.behindBy(err, now)
	if err != nil {
		select { // a counter that is away is asked ten times a second, not in a tight loop
		case <-a.cfg.After(retryPause):
		case <-ctx.Done():
		}
		return fmt.Errorf("fold reports %d to %d of %s: %w", b.First, b.Last, b.Stream, err)
	}
	a.mu.Lock()
	for _, item := range b.Items {
		a.m.Reconciled.Add(float64(item.Value.Requests()))
		a.weights.count(item.Value)
	}
	a.mu.Unlock()
	a.divide(ctx, folds, states)
	return nil
}

// behindBy notes whether a batch was folded. After one that was not, what has gathered meanwhile is folded before anything is divided.
func (a *Aggregator) behindBy(err error, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.behind && err == nil {
		a.believe = now.Add(catchUp)
	}
	a.behind = err != nil
	a.turned()
}

// frozen says whether nothing is granted: the counter is away, or was until lately, or reports do not come. mu is held.
func (a *Aggregator) frozen() bool {
	return a.behind || !a.degraded.IsZero() || a.cfg.Now().Before(a.believe) || a.cfg.Deaf()
}

// turned wakes Step when the fleet believes something else of us than is so. mu is held.
func (a *Aggregator) turned() {
	if a.frozen() != a.said {
		a.alarm()
	}
}

// alarm lets Step look at once.
func (a *Aggregator) alarm() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// Heartbeat takes a gateway's sign of life that arrived at a time of this process's clock.
// It may be the last one, after which the gateway's part of all limits is free at once.
func (a *Aggregator) Heartbeat(h *schemas.Heartbeat, arrived time.Time) {
	if h.Mode == schemas.ModeStopped {
		a.leave(h.Gateway, h.Boot, arrived)
		return
	}
	if a.hasLeft(h.Gateway, h.Boot) {
		return
	}
	a.saw(h.Gateway, arrived)
	if h.ClockKnown {
		a.m.ClockOffset.WithLabelValues(h.Gateway).Set(h.ClockOffset.Seconds())
	}
}

var errFrozen = errors.New("the counter was away, and what gateways used meanwhile is counted first")

// Take answers gateways that ask about each request of a key whose limit is kept strictly.
func (a *Aggregator) Take(ctx context.Context, asked []schemas.TakeRequest) ([]schemas.TakeReply, error) {
	takes := make([]Take, len(asked))
	for i, q := range asked {
		takes[i] = Take{Key: Key{q.Rule, q.Key}, Limit: Limit{q.LimitRateNanos, q.LimitBurst}, Cost: q.Cost}
	}
	a.mu.Lock()
	frozen := a.frozen()
	a.mu.Unlock()
	if frozen { // its buckets may be full because it forgot what was taken
		return nil, fmt.Errorf("take tokens of %d keys: %w", len(takes), errFrozen)
	}
	taken, err := a.counter.Take(ctx, takes)
	if err != nil { // it had milliseconds: whether the counter is away is for those to say who have patience
		return nil, fmt.Errorf("take tokens of %d keys: %w", len(takes), err)
	}
	a.mu.Lock()
	a.answer = a.cfg.Now()
	for i := range taken {
		if taken[i].OK {
			a.weights.add(asked[i].Gateway, asked[i].Cost)
		}
	}
	a.mu.Unlock()
	replies := make([]schemas.TakeReply, len(taken))
	for i, t := range taken {
		replies[i] = schemas.TakeReply{Allowed: t.OK, Remaining: max(t.LevelMicros, 0) / 1e6, RetryIn: t.Wait}
		if t.Wait < 0 {
			replies[i].RetryIn = math.MaxInt64
		}
	}
	return replies, nil
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
	a.fleet[gateway] = now
	fleet := a.gateways()
	u := a.update(gateway, len(fleet))
	plans := !now.Before(a.planAgain)
	a.mu.Unlock()
	u.Snapshot = true
	planned := false
	for part := range slices.Chunk(states, atOnce) {
		a.mu.Lock()
		for i := range part {
			s := &part[i]
			e := a.keys[s.Key]
			if e == nil {
				e = a.remember(s, now)
			}
			h := e.held[gateway]
			if (h == nil || !h.told) && plans && (h == nil || !h.ready(now)) {
				a.prepare(e, s, fleet, now)
				h, planned = e.held[gateway], true
			}
			if h != nil && !h.told && h.ready(now) {
				h = e.tell(s, &Share{Gateway: gateway, RateNanos: h.next.RateNanos, Burst: h.next.Burst}, h.next.reason, len(fleet), now)
			}
			if h != nil && h.told {
				u.Shares = append(u.Shares, s.share(h))
			}
		}
		a.mu.Unlock()
	}
	if planned {
		a.mu.Lock()
		end := a.cfg.Now()
		a.planAgain = end.Add(planPause * end.Sub(now))
		a.mu.Unlock()
	}
	a.m.Pushes.WithLabelValues("snapshot").Add(float64(len(u.Shares)))
	return u, nil
}

// prepare plans a key for all gateways that were told no share of it: they are about to ask, too. mu is held.
func (a *Aggregator) prepare(e *entry, s *KeyState, fleet []string, now time.Time) {
	plan, reasons := a.plan(e, s, fleet, now)
	even := evenShare(s.Limit, len(fleet))
	for i := range plan.Shares {
		sh := &plan.Shares[i]
		h := e.part(sh.Gateway, even, s.At)
		if !h.told {
			h.next = &prepared{Limit{sh.RateNanos, sh.Burst}, reasons[i], now}
			e.held[sh.Gateway] = h
		}
	}
}

// ready says whether a share is prepared and still good.
func (h *held) ready(now time.Time) bool { return h.next != nil && now.Sub(h.next.at) <= liveHolds }

func (a *Aggregator) readLive(ctx context.Context) ([]KeyState, error) {
	a.liveMu.Lock()
	defer a.liveMu.Unlock()
	if now := a.cfg.Now(); a.liveAt.IsZero() || now.Sub(a.liveAt) > liveHolds {
		states, err := a.counter.Live(ctx)
		a.answered(ctx, err)
		if err != nil {
			return nil, err
		}
		a.live, a.liveAt = states, now
	}
	return a.live, nil
}

// Run speaks to the gateways until ctx is done: a keepalive each Beat, also while the counter is away (their shares still add
// up), and every live share each five seconds.
func (a *Aggregator) Run(ctx context.Context) error {
	var beating sync.WaitGroup
	defer beating.Wait()
	beating.Go(func() { a.beat(ctx) })
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.cfg.After(a.Step(ctx).Sub(a.cfg.Now())):
		case <-a.wake:
		}
	}
}

// Close takes the aggregator out of its metrics, which it may share with one that follows. Nothing else of it may run any more.
func (a *Aggregator) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.degraded.IsZero() {
		a.degraded = time.Time{}
		a.m.Degraded.Dec()
	}
	for g := range a.fleet {
		a.m.ClockOffset.DeleteLabelValues(g)
	}
	a.m.Gateways.Set(0)
	a.m.LiveKeys.Set(0)
}

// beat is beside Step, which may wait for the counter: a gateway that hears nothing for three of its turns says so.
func (a *Aggregator) beat(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.cfg.After(a.cfg.Beat):
			a.listen()
			if !a.cfg.Now().Before(a.learned) {
				a.speak(ctx)
			}
		}
	}
}

// Step does what is due, and returns when something is due next. Run is a loop around it, for one goroutine; a simulation calls it
// instead.
func (a *Aggregator) Step(ctx context.Context) (next time.Time) {
	a.listen()
	if a.due(&a.keepaliveAt, a.cfg.Keepalive) {
		a.expire()
		if !a.cfg.Now().Before(a.learned) {
			a.takeOver(ctx)
			a.keepalive(ctx)
			if !a.recalled {
				a.recalled = a.recall(ctx)
			}
			a.settle(ctx, func(e *entry) bool { return a.cfg.Now().Sub(e.asked) >= settleIn })
		}
	}
	a.announce(ctx)
	if a.due(&a.digestAt, a.cfg.Digest) {
		a.digest(ctx)
	}
	a.serve(ctx)
	return a.Due()
}

// announce tells the fleet at once when nothing is granted any more, when it is again, and when a gateway has left.
func (a *Aggregator) announce(ctx context.Context) {
	a.mu.Lock()
	frozen, turned, fewer := a.frozen(), a.frozen() != a.said, a.fewer
	a.mu.Unlock()
	if !turned && !fewer || a.cfg.Now().Before(a.learned) {
		return
	}
	a.speak(ctx)
	if !frozen {
		a.settle(ctx, func(e *entry) bool { return fewer || e.unsure })
	}
}

// takeOver begins this centre's epoch: what one before it says from now on is late. Without a counter there is none yet, and nothing
// to grant.
func (a *Aggregator) takeOver(ctx context.Context) {
	a.mu.Lock()
	has := a.epoch > 0
	a.mu.Unlock()
	if has {
		return
	}
	n, err := a.counter.Epoch(ctx)
	a.answered(ctx, err)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.epoch = n
}

// Due returns when Step has something to do next. Reports may make it sooner.
func (a *Aggregator) Due() time.Time {
	next := a.keepaliveAt
	if a.digestAt.Before(next) {
		next = a.digestAt
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.turns) > 0 && a.turns[0].at.Before(next) {
		next = a.turns[0].at
	}
	switch now := a.cfg.Now(); {
	case (a.frozen() != a.said || a.fewer) && a.learned.Before(next):
		next = a.learned // or now, if that is past
	case a.believe.After(now) && a.believe.Before(next):
		next = a.believe
	}
	return next
}

// serve looks at the keys of which a token is due.
func (a *Aggregator) serve(ctx context.Context) {
	now := a.cfg.Now()
	var folds []Fold
	a.mu.Lock()
	for len(a.turns) > 0 && !now.Before(a.turns[0].at) {
		next := heap.Pop(&a.turns).(turn)
		if !a.waiting[next.key].Equal(next.at) {
			continue
		}
		delete(a.waiting, next.key)
		if e := a.keys[next.key]; e != nil {
			folds = append(folds, Fold{Key: next.key, Limit: e.state.Limit})
		}
	}
	a.mu.Unlock()
	a.look(ctx, folds)
}

// look lets time pass in keys, and divides them anew.
func (a *Aggregator) look(ctx context.Context, folds []Fold) {
	for part := range slices.Chunk(folds, chunk) {
		a.outstanding(part)
		states, err := a.fold(ctx, part)
		if err != nil {
			return // it has been noted, and the next tick tries again
		}
		a.divide(ctx, part, states)
	}
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
	a.trim(0)
	for _, e := range a.keys {
		e.asked = time.Time{}
	}
}

// expire drops silent gateways.
func (a *Aggregator) expire() {
	a.mu.Lock()
	defer a.mu.Unlock()
	gone := false
	for g, at := range a.fleet {
		if a.cfg.Now().Sub(at) > a.cfg.FleetExpiry {
			a.forget(g)
			a.log.Warn("gateway is silent", "gateway", g, "gateways", len(a.fleet))
			gone = true
		}
	}
	if gone {
		a.fleetChanged()
	}
	for g, d := range a.left {
		if a.cfg.Now().Sub(d.at) > a.cfg.Late {
			delete(a.left, g)
		}
	}
}

// leave takes a gateway out of the fleet that said so, and divides what it had.
func (a *Aggregator) leave(gateway, boot string, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.left[gateway] = departure{boot, at}
	if _, known := a.fleet[gateway]; !known {
		return
	}
	a.forget(gateway)
	a.log.Info("gateway left", "gateway", gateway, "gateways", len(a.fleet))
	a.fleetChanged()
	a.fewer = true
	a.alarm()
}

// hasLeft says whether this life of a gateway is over.
func (a *Aggregator) hasLeft(gateway, boot string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	left, ok := a.left[gateway]
	return ok && left.boot == boot
}

// forget drops a gateway and what it held. mu is held.
func (a *Aggregator) forget(gateway string) {
	delete(a.fleet, gateway)
	delete(a.delays, gateway)
	for _, e := range a.keys {
		delete(e.held, gateway)
	}
	a.m.ClockOffset.DeleteLabelValues(gateway)
}

// gateways is the fleet in order. mu is held.
func (a *Aggregator) gateways() []string { return slices.Sorted(maps.Keys(a.fleet)) }

// update is a message without shares. mu is held.
func (a *Aggregator) update(gateway string, gateways int) *schemas.ThrottleUpdate {
	return &schemas.ThrottleUpdate{Gateways: gateways, Weight: a.weights.told[gateway], TTL: a.cfg.TTL, Epoch: a.epoch, Frozen: a.frozen()}
}

func (a *Aggregator) keepalive(ctx context.Context) {
	a.mu.Lock()
	a.weights.step(a.gateways(), a.cfg.Now())
	a.mu.Unlock()
	a.speak(ctx)
}

// speak says to each gateway how things are.
func (a *Aggregator) speak(ctx context.Context) {
	a.mu.Lock()
	fleet := a.gateways()
	updates := make([]*schemas.ThrottleUpdate, len(fleet))
	for i, g := range fleet {
		updates[i] = a.update(g, len(fleet))
	}
	a.said, a.fewer = a.frozen(), false
	a.mu.Unlock()
	for i, g := range fleet {
		a.cast(ctx, g, updates[i])
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

// settle looks at remembered keys such as those that no report has mentioned lately: demand fades, debt is repaid, gateways come
// and go.
func (a *Aggregator) settle(ctx context.Context, due func(*entry) bool) {
	var folds []Fold
	a.mu.Lock()
	now, fleet := a.cfg.Now(), len(a.fleet)
	for key, e := range a.keys {
		if a.waiting[key].After(now) && !e.asked.IsZero() && !e.unsure && byOffers(e.state.Limit, fleet) {
			continue // nothing changes before its next token
		}
		if due(e) {
			folds = append(folds, Fold{Key: key, Limit: e.state.Limit})
		}
	}
	a.mu.Unlock()
	a.look(ctx, folds)
}

// outstanding notes in folds what gateways that ask hold of keys that are kept by grants, and which keys are kept strictly. Of keys with
// few tokens it notes what they had: gateways hold too little of them to tell that of a bucket that the counter makes anew.
func (a *Aggregator) outstanding(folds []Fold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range folds {
		f := &folds[i]
		e := a.keys[f.Key]
		f.Strict = f.Strict || e != nil && e.consistency == "strict"
		if byOffers(f.Limit, len(a.fleet)) && !f.Strict {
			f.Offered = min(int64(len(a.fleet)), offerDebt)
		}
		if e == nil || !e.byGrants(f.Limit, max(len(a.fleet), 1)) {
			continue
		}
		few := schemas.TooFew(f.Limit.Burst, max(len(a.fleet), 1))
		if few && len(a.fleet) > 1 && !f.Strict && e.state.Version > 0 {
			f.Last = &Level{e.state.LevelMicros, e.state.At}
		}
		if byOffers(f.Limit, len(a.fleet)) {
			continue // what is offered has not left the bucket
		}
		var sum int64
		for g, h := range e.held {
			if few || slices.ContainsFunc(e.state.Demands, func(d Demand) bool { return d.Gateway == g }) {
				sum = min(sum+h.holds(e.state.At), MaxBurst*1e6)
			}
		}
		f.Outstanding = sum / 1e6
	}
}

// digest says all shares again, for those who missed some, and keeps their keys live.
func (a *Aggregator) digest(ctx context.Context) {
	now := a.cfg.Now()
	a.mu.Lock()
	fleet := a.gateways()
	updates := make(map[string]*schemas.ThrottleUpdate, len(fleet))
	keys := make([]Key, 0, len(a.keys))
	for key, e := range a.keys {
		keys = append(keys, key)
		if byOffers(e.state.Limit, len(fleet)) && now.Sub(e.pressed) > calmFor {
			continue // it was said often enough
		}
		for g, h := range e.held {
			if !h.told {
				continue
			}
			u := updates[g]
			if u == nil {
				u = a.update(g, len(fleet))
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
		a.answered(ctx, a.counter.Mark(ctx, keys))
	}
}

// fold folds, and notes whether the counter answers.
func (a *Aggregator) fold(ctx context.Context, folds []Fold) ([]KeyState, error) {
	if len(folds) == 0 {
		return nil, nil
	}
	start := time.Now()
	states, err := a.counter.Fold(ctx, folds)
	a.answered(ctx, err)
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

// answered notes whether the counter answers: loud once, on each change. Whoever did not wait for its answer knows nothing.
func (a *Aggregator) answered(ctx context.Context, err error) {
	if err != nil && ctx.Err() != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		a.answer, a.silent = a.cfg.Now(), false
	}
	a.answers(err)
}

// answers is answered for what is known of the counter otherwise. mu is held.
func (a *Aggregator) answers(err error) {
	now := a.cfg.Now()
	switch {
	case err != nil && a.degraded.IsZero():
		a.degraded = now
		a.m.Degraded.Inc()
		a.log.Error("the counter does not answer: shares stay as they are", "err", err)
	case err == nil && !a.degraded.IsZero():
		a.log.Info("the counter answers again", "after", now.Sub(a.degraded).Round(time.Millisecond))
		a.degraded, a.believe = time.Time{}, now.Add(catchUp)
		a.m.Degraded.Dec()
	}
	a.turned()
}

var errSilent = errors.New("nobody has an answer from it")

// listen hears of a counter that nothing was asked of lately: where no key is in use the fleet must know, too, that it is away. One
// that answered us within that time is only slow to those who ask how it is.
func (a *Aggregator) listen() {
	if a.cfg.Silent == nil {
		return
	}
	silent := a.cfg.Silent() > silentFor
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case silent && !a.silent && a.cfg.Now().Sub(a.answer) > silentFor:
		a.silent = true
		a.answers(errSilent)
	case !silent && a.silent:
		a.silent = false
		a.answers(nil)
	}
}

// divide casts the shares of states that differ from what gateways have.
func (a *Aggregator) divide(ctx context.Context, folds []Fold, states []KeyState) {
	now := a.cfg.Now()
	a.mu.Lock()
	listening := a.behind || now.Before(a.learned) || now.Before(a.believe) || a.cfg.Deaf()
	if listening {
		for i := range states {
			s := &states[i]
			e := a.keys[s.Key]
			if e == nil {
				e = a.remember(s, time.Time{})
			}
			e.hear(&folds[i], s)
			e.unsure, e.anew = true, e.anew || folds[i].makesAnew(s)
			if folds[i].Last != nil && s.Version > e.state.Version {
				e.state = *s
			}
		}
	}
	a.mu.Unlock()
	if listening {
		return
	}
	a.rebuild(ctx, folds, states)
	updates := make(map[string]*schemas.ThrottleUpdate)
	var history []PushedShare
	a.mu.Lock()
	fleet := a.gateways()
	for i := range states {
		for g, h := range a.changes(&states[i], &folds[i], fleet, now) {
			u := updates[g]
			if u == nil {
				u = a.update(g, len(fleet))
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

// rebuild brings levels that may be wrong to what gateways hold: of buckets that the counter has made anew, for a counter that lost
// its memory must not hand out full ones, and after a time in which reports were not folded. For a key that nobody used before
// that is the full bucket.
func (a *Aggregator) rebuild(ctx context.Context, folds []Fold, states []KeyState) {
	var again []Fold
	var at []int
	a.mu.Lock()
	n := max(len(a.fleet), 1)
	for i := range states {
		s := &states[i]
		e := a.keys[s.Key]
		unsure := e != nil && e.unsure
		anew := folds[i].makesAnew(s) || e != nil && e.anew
		lone := n == 1 && len(folds[i].Uses) > 0            // it has the whole limit and reports at leisure: its bucket is the one that is right
		if !unsure && (folds[i].Strict || !anew && !lone) { // of a strict key gateways hold nothing, unless they were alone with it
			continue
		}
		if e != nil {
			e.unsure, e.anew = false, false
		}
		offered := byOffers(s.Limit, n) && !folds[i].Strict
		if offered && !anew { // what is offered has not left the bucket
			continue
		}
		known := entry{held: make(map[string]*held)}
		if e != nil {
			maps.Copy(known.held, e.held)
		}
		for j := range folds[i].Uses {
			known.note(&folds[i].Uses[j], s.At)
		}
		even := evenShare(s.Limit, n)
		var b Bounds
		for _, h := range known.held {
			b.LeastMicros += h.holds(s.At)
		}
		b.MostMicros = b.LeastMicros + saturatingMul(even.Burst, int64(max(n-len(known.held), 0))*1e6)
		if !unsure && !lone || offered {
			b.LeastMicros = math.MinInt64
		}
		if lone && !unsure && !anew {
			b.MostMicros = math.MaxInt64
		}
		if folds[i].Strict { // what they earned since they reported they have not: it was taken here
			b = Bounds{MostMicros: math.MaxInt64}
			for _, h := range known.held {
				b.LeastMicros += h.tokens
			}
		}
		if e == nil && !lone && s.New && s.pressed() && s.LevelMicros > 0 { // what it earned while its first use went on was lost to a full bucket
			earned := int64(min(folds[i].Lag().Seconds()*float64(s.Limit.RateNanos)/1e3, 4e15))
			b.MostMicros += earned
			b.LeastMicros = min(s.LevelMicros+earned, b.MostMicros)
		}
		few := int64(n) * 1e6
		if offered {
			few = max(s.Limit.Burst-saturatingMul(even.Burst, int64(n)), 0) * 1e6 // that nobody has from the start
		}
		if b.MostMicros < s.LevelMicros-few || b.LeastMicros > s.LevelMicros+few {
			again = append(again, Fold{Key: s.Key, Limit: s.Limit, Outstanding: folds[i].Outstanding, Offered: folds[i].Offered, Bounds: &b})
			at = append(at, i)
		}
	}
	a.mu.Unlock()
	if len(again) == 0 {
		return
	}
	if less, err := a.fold(ctx, again); err == nil {
		for i := range less {
			states[at[i]] = less[i]
		}
	}
}

// hear takes what gateways say of a key in a batch.
func (e *entry) hear(f *Fold, s *KeyState) {
	if len(f.Uses) > 0 {
		e.consistency = f.consistency
	}
	for i := range f.Uses {
		e.note(&f.Uses[i], s.At)
	}
}

// plan divides a key between the gateways of fleet, which is in order, and says why. mu is held.
func (a *Aggregator) plan(e *entry, s *KeyState, fleet []string, now time.Time) (Granting, []string) {
	even := evenShare(s.Limit, len(fleet))
	parts := make([]Part, len(fleet))
	reasons := make([]string, len(fleet))
	e.reckon(s)
	for i, g := range fleet {
		h := e.part(g, even, s.At)
		parts[i] = Part{Demand: Demand{Gateway: g}, HeldMicros: h.holds(s.At), UnsaidMicros: h.unsaid}
		reasons[i] = "newcomer"
	}
	asked := false
	for _, d := range s.Demands {
		if i, ok := slices.BinarySearch(fleet, d.Gateway); ok && d.RateNanos > 0 {
			d.RateNanos = coarse(d.RateNanos)
			parts[i].Demand, reasons[i], asked = d, "demand", true
			parts[i].UsedMicros = e.part(d.Gateway, even, s.At).used(d.RateNanos, s.At)
		}
	}
	if asked {
		e.pressed = now
	}
	if s.LevelMicros < 0 {
		for i := range reasons {
			reasons[i] = "debt"
		}
	}
	if !e.byGrants(s.Limit, len(fleet)) {
		return Granting{Shares: Divide(s.Limit, s.LevelMicros, parts), Last: e.last}, reasons
	}
	rest, offers := restAfter, byOffers(s.Limit, len(fleet))
	if offers { // the next token finds those who want it only if they are remembered
		rest = max(rest, min(2*time.Duration(1e18/s.Limit.RateNanos), restMost))
	}
	if now.Sub(e.pressed) > rest {
		shares := make([]Share, len(fleet))
		for i, g := range fleet {
			shares[i] = Share{Gateway: g, RateNanos: even.RateNanos, Burst: even.Burst}
		}
		return Granting{Shares: shares, Last: e.last}, reasons
	}
	if offers {
		wishes := make([]Wish, len(fleet))
		for i, g := range fleet {
			h := e.part(g, even, s.At)
			wishes[i] = Wish{Gateway: g, PerSecond: h.wishes(s.At) * math.Ln2, Served: h.served, HeldMicros: parts[i].HeldMicros}
		}
		return Offer(s.Limit, s.LevelMicros, wishes), reasons
	}
	lasting := tinyFor
	if e.consistency == "lease" {
		lasting = leaseFor
	}
	return Grant(s.Limit, s.LevelMicros, parts, lasting, e.last), reasons
}

// tell notes that a gateway is told a share. mu is held.
func (e *entry) tell(s *KeyState, sh *Share, reason string, gateways int, now time.Time) *held {
	h := *e.part(sh.Gateway, evenShare(s.Limit, gateways), s.At)
	h.tokens = min(h.holds(s.At), h.fits(sh.Burst)) + 1e6*sh.Grant
	h.Limit, h.asOf = Limit{sh.RateNanos, sh.Burst}, s.At
	h.next = nil
	h.reason, h.told, h.at, h.grant = reason, true, now, h.grant+uint64(sh.Grant)
	e.held[sh.Gateway] = &h
	return &h
}

// changes is what gateways must be told of a key, and is remembered as told. mu is held.
//
// A gateway that was told nothing has the even share, which it works out itself from the size of the fleet. So a key that
// nobody presses costs no message; one that is pressed is said to all, also where the share is the even one.
func (a *Aggregator) changes(s *KeyState, f *Fold, fleet []string, now time.Time) map[string]*held {
	e := a.keys[s.Key]
	if len(fleet) == 0 {
		return nil // nobody to tell
	}
	known := e != nil
	if !known {
		e = &entry{state: *s, held: make(map[string]*held)}
	}
	e.hear(f, s)
	if e.consistency == "strict" {
		delete(a.keys, s.Key) // nobody has a share
		return nil
	}
	if known && s.Version <= e.state.Version {
		return nil // a newer state overtook this one
	}
	plan, reasons := a.plan(e, s, fleet, now)
	shares := plan.Shares
	even := evenShare(s.Limit, len(fleet))
	pressed := s.pressed()
	var tell map[string]*held
	calm := !pressed
	for i := range shares {
		sh := &shares[i]
		want := Limit{sh.RateNanos, sh.Burst}
		h := e.part(sh.Gateway, even, s.At)
		has, slack, late := h.Limit, int64(1), false
		if h.told {
			slack = 0
			late = h.grant > h.granted && now.Sub(h.at) >= repeatIn
		}
		if u := newest(f.Uses, sh.Gateway); u != nil && (!h.told || now.Sub(h.at)-u.Age >= hearIn) { // else its report may be from before it heard
			has, late = u.Enforced, h.grant > h.granted
		}
		if !near(want, even, 1) {
			calm = false
		}
		if near(has, want, slack) && (h.told || !pressed) && sh.Grant == 0 && !late {
			continue
		}
		if tell == nil {
			tell = make(map[string]*held)
		}
		tell[sh.Gateway] = e.tell(s, sh, reasons[i], len(fleet), now)
	}
	if !known {
		if len(tell) == 0 {
			return nil
		}
		made := a.remember(s, now)
		e.state, e.asked = made.state, made.asked
		a.keys[s.Key] = e
	}
	a.await(e, s, &plan, now)
	limited := e.state.Limit == s.Limit
	e.state, e.asked = *s, now
	switch {
	case !calm || !limited:
		e.calm = time.Time{}
	case e.calm.IsZero():
		e.calm = now
	case now.Sub(e.calm) >= calmFor:
		delete(a.keys, s.Key)
	}
	if !slices.ContainsFunc(slices.Collect(maps.Values(e.held)), func(h *held) bool { return h.told }) {
		delete(a.keys, s.Key)
	}
	return tell
}

// await notes whose turn it is, and when the next tokens of a key are there if a gateway waits for some. mu is held.
func (a *Aggregator) await(e *entry, s *KeyState, g *Granting, now time.Time) {
	e.last = g.Last
	if g.Wants <= 0 || s.Limit.RateNanos <= 0 {
		delete(a.waiting, s.Key)
		return
	}
	wait := time.Duration(min(float64(max(g.Wants-g.Free, 0))/float64(s.Limit.RateNanos)*1e12, float64(time.Hour))) // µtokens by nanotokens per second
	at := now.Add(wait + time.Millisecond).Truncate(together).Add(together)
	if was, waits := a.waiting[s.Key]; waits && at.Sub(was).Abs() <= together {
		return
	}
	a.waiting[s.Key] = at
	heap.Push(&a.turns, turn{at, s.Key})
	a.alarm()
}

// turn is a time at which a key waits for a token. One that is not what Aggregator.waiting says is void.
type turn struct {
	at  time.Time
	key Key
}

// turns is a heap of them, the soonest first.
type turns []turn

func (t turns) Len() int           { return len(t) }
func (t turns) Less(i, j int) bool { return t[i].at.Before(t[j].at) }
func (t turns) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *turns) Push(x any)        { *t = append(*t, x.(turn)) }
func (t *turns) Pop() any {
	last := (*t)[len(*t)-1]
	*t = (*t)[:len(*t)-1]
	return last
}

// trim forgets keys until there is room for some more. mu is held.
func (a *Aggregator) trim(more int) {
	most := max(min(a.cfg.MaxKeys, a.cfg.MaxShares/max(len(a.fleet), 1)), 1)
	for key := range a.keys {
		if len(a.keys)+more <= most {
			return
		}
		delete(a.keys, key)
	}
}

// remember makes an entry for a key. When there are too many another is forgotten, which costs a message at most: gateways say
// in their reports what they enforce. mu is held.
func (a *Aggregator) remember(s *KeyState, asked time.Time) *entry {
	a.trim(1)
	e := &entry{state: *s, asked: asked, held: make(map[string]*held)}
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

func (s *KeyState) share(h *held) schemas.Share {
	level := s.LevelMicros / 1e6
	if s.LevelMicros%1e6 < 0 {
		level-- // any debt shows
	}
	return schemas.Share{Rule: s.Key.Rule, Key: s.Key.Key, Version: s.Version, RateNanos: h.RateNanos, Burst: h.Burst,
		LimitRateNanos: s.Limit.RateNanos, LimitBurst: s.Limit.Burst, Reason: h.reason, Level: level,
		Granted: h.granted, Grant: h.grant}
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
		if uses[i].Gateway == gateway && !uses[i].late {
			return &uses[i]
		}
	}
	return nil
}

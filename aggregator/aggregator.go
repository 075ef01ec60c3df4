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
	Late        time.Duration       // a report that is older when it comes is counted, and charged only if its bucket takes longer to fill (30s)
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
	calmFor    = 30 * time.Second        // a key at rest for so long is forgotten
	restAfter  = 5 * time.Second         // a key kept by grants that nobody asks for goes back to the even shares after this
	restMost   = 10 * time.Minute        // or, of a key whose tokens come seldom, after two of them or this
	leaseFor   = time.Second             // a block of a lease lasts this long at the rate of its demand
	tinyFor    = 50 * time.Millisecond   // and of a limit that is too small to divide
	catchUp    = time.Second             // after the counter was away, to fold what has gathered meanwhile
	patience   = 5 * time.Second         // and so much longer while reports wait
	hearMore   = 250 * time.Millisecond  // after each batch behind which more wait
	repeatIn   = 250 * time.Millisecond  // a grant that shows in no report within this is said again
	settleIn   = time.Second             // a key unheard of for longer is looked at
	together   = 5 * time.Millisecond    // keys of which tokens are due within this are looked at together
	hearIn     = 50 * time.Millisecond   // a push is in force at the gateway after this
	silentFor  = time.Second             // a counter that is not well, and has answered nothing for so long, is away
	asleep     = 1500 * time.Millisecond // a process that did not run for longer has missed what it should divide by
	retryPause = 100 * time.Millisecond  // after a failed fold, before the batch may come again
	liveHolds  = time.Second             // one reading of all live keys serves all snapshots of this time
	chunk      = 1000                    // keys folded at once when nobody waits
	atOnce     = 10                      // keys of a snapshot looked at in one go
	planPause  = 10                      // after the keys were planned for snapshots, they are not for so many times as long as that took
)

// Aggregator is the centre. Its methods may be called from any goroutine.
type Aggregator struct {
	cfg     Config
	counter Counter
	caster  Caster
	log     *slog.Logger
	m       *Metrics
	learned time.Time // from here on the fleet is known

	mu        sync.Mutex            // guards what follows
	fleet     map[string]time.Time  // when each gateway was last heard
	left      map[string]departure  // gateways that said that they stop, for as long as their last reports may come
	names     map[string]*namesakes // processes that send the heartbeats of each gateway
	keys      map[Key]*entry        // keys of which some gateway holds a share it would not guess
	degraded  time.Time             // since when the counter does not answer; zero while it does
	answer    time.Time             // when it last answered one of our calls
	silent    bool                  // Config.Silent says that it is away, too
	castLost  int                   // updates not sent since the last word about it
	epoch     uint64                // of this centre; 0 before it has one
	behind    bool                  // the last batch of reports was not folded
	believe   time.Time             // until then gateways are listened to, and no limit is divided
	patience  time.Time             // and no longer than until then, whatever is to be heard yet
	awake     time.Time             // when the process was seen to run last; zero before Run
	said      bool                  // the fleet was told that nothing is granted
	fewer     bool                  // a gateway left, and the fleet was not told
	delays    map[string]*delay     // of each gateway's reports
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

// New returns an aggregator that counts in counter and speaks through caster. m may be nil. It starts nothing.
func New(cfg Config, counter Counter, caster Caster, log *slog.Logger, m *Metrics) *Aggregator {
	cfg = cfg.withDefaults()
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	now := cfg.Now()
	return &Aggregator{cfg: cfg, counter: counter, caster: caster, log: log, m: m, learned: now.Add(cfg.Learn), patience: now.Add(max(cfg.Learn, 0) + patience),
		fleet: make(map[string]time.Time), left: make(map[string]departure), names: make(map[string]*namesakes), keys: make(map[Key]*entry), waiting: make(map[Key]time.Time), delays: make(map[string]*delay), wake: make(chan struct{}, 1), keepaliveAt: now.Add(cmp.Or(max(cfg.Learn, 0), cfg.Keepalive)), digestAt: now.Add(cfg.Digest)}
}

// Reports folds a batch and casts the shares that change. It is the handler of the throttle consumer: after an error the batch
// must come again, which changes nothing that was folded already.
func (a *Aggregator) Reports(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
	now := a.cfg.Now()
	a.wakes(now, false)
	a.hears(b.Waiting, now)
	late := now.Add(-a.cfg.Late)
	for _, item := range b.Items {
		if r := item.Value; item.Arrived.After(late) && !a.hasLeft(r.Gateway, r.Boot) {
			a.saw(r.Gateway, now)
		}
	}
	folds := merge(b.Items, now, a.cfg.Late)
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
		a.listens(now)
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

// listens lets no limit be divided for a while, in which what has gathered is folded. mu is held.
func (a *Aggregator) listens(now time.Time) {
	a.believe, a.patience = now.Add(catchUp), now.Add(catchUp+patience)
}

// hears goes on listening while reports wait behind a batch, for as long as there is patience: they tell of a time whose tokens the
// buckets have lost, and would be charged to what comes.
func (a *Aggregator) hears(waiting uint64, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if next := now.Add(hearMore); waiting > 0 && (now.Before(a.learned) || now.Before(a.believe)) && next.After(a.believe) && now.Before(a.patience) {
		a.believe = next
	}
}

// wakes notes that the process runs; beats says so regularly. One that was frozen finds the reports of that time all at once, but its
// buckets were refilled no further than to their brim meanwhile: gateways are listened to, as after a time without the counter, and
// have time to say that they live.
func (a *Aggregator) wakes(now time.Time, beats bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	slept := now.Sub(a.awake)
	if !a.awake.IsZero() && slept > asleep {
		a.listens(now)
		for g := range a.fleet {
			a.fleet[g] = now
		}
		a.log.Warn("was not running for a while: gateways are listened to before limits are divided", "for", slept.Round(time.Millisecond))
		a.turned()
	}
	if beats || !a.awake.IsZero() {
		a.awake = now
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
	a.spoke(h.Gateway, h.Boot, arrived)
	a.mu.Lock()
	a.weights.hear(h.Gateway, h.Weight)
	a.mu.Unlock()
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
	a.wakes(a.cfg.Now(), true)
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
			a.wakes(a.cfg.Now(), true)
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
	a.wakes(a.cfg.Now(), false)
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
		a.degraded = time.Time{}
		a.listens(now)
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

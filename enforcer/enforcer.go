// Package enforcer decides, in this process and in nanoseconds, whether a request may pass: a funnel of token buckets, one per
// rule and key. It keeps a part of each limit that its fleet shares, as the centre tells it, and says what it took and refused.
package enforcer

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// Config is the enforcer's tuning. A zero field means its default.
type Config struct {
	Stripes    int           // parts of a rule without key, one per core (GOMAXPROCS); 1 makes it exact: see pool
	Fleet      int           // gateways that share the limits, until the centre says how many (1)
	Weight     int           // millionths of each limit that an earlier life of this gateway was told to keep to without the centre (0: nothing is known)
	StaleAfter time.Duration // silence of the centre that makes the mode stale (3s)
	ShareTTL   time.Duration // silence after which shares no longer hold, where an update does not say (30s)
	FloorAfter time.Duration // time without shares after which the weight no longer holds either (10m)
	Ask        bool          // rules that are kept strictly are left to Settle; else this gateway's part of the limit decides
	Clock      func() int64  // what Check's now is read from, for SetPolicy, Apply and Mode (Monotonic)
}

var start = time.Now()

// Monotonic returns the nanoseconds since the process began, by a clock that is never set.
func Monotonic() int64 { return int64(time.Since(start)) }

// Request is what a decision depends on. Values are compared byte by byte; an empty one is a value like any other.
type Request struct {
	Tenant, Route, IP, User, Device string

	Header func(name string) string // by canonical name, for rules whose key has a header; may be nil
	Cost   int64                    // tokens: ordinarily 1; 0 asks without taking
}

// Reason says why a request was refused.
type Reason uint8

// The reasons. The zero one is that of a request that was allowed.
const (
	ReasonNone      Reason = iota
	ReasonLimit            // the rule's bucket has too few tokens
	ReasonDenied           // the rule's limit admits nothing
	ReasonCost             // the cost is above what the rule's bucket holds when full, or negative
	ReasonNoPolicy         // there is no policy yet
	ReasonStoreLoss        // the centre is silent or without its store, and the rule admits nothing without them
)

// String is the reason in a word, empty for none.
func (r Reason) String() string {
	return [...]string{"", "limit", "denied", "cost", "no-policy", "store-loss"}[r]
}

// Standing is how a request left one rule's bucket.
type Standing struct {
	Rule      *limits.Rule
	Limit     *bucket.Limit // the stated limit, of which this gateway may enforce a share; never changes
	Remaining int64         // tokens left here; math.MaxInt64 when unlimited
}

// Decision is the answer to one request.
type Decision struct {
	Allowed     bool
	Reason      Reason        // why not
	N           uint8         // how many rules Standing can tell of
	lost        bool          // the store was, when it was made: what a rule's on_store_loss says counted
	fell        bool          // see FellBack
	Rule, Layer string        // that refused; empty when allowed
	RetryIn     time.Duration // 0 when allowed; else the shortest wait after which that rule would admit the same; bucket.Never if none
	Remaining   int64         // tokens left in that rule's bucket; when allowed, in the one that has fewest
	Burst       int64         // tokens that bucket holds here when full
	Shadow      []string      // shadow rules that would have refused; shared, do not change

	view      *view
	asks      uint64    // rules in view.checks that the centre is to be asked for
	standings [8]uint64 // tokens left, entry and rule, in few bits: every check clears and copies them
}

const (
	standingEntry = 32
	standingRule  = standingEntry + genShift
)

// Standing tells of the rules that were asked, in order. i is below N.
func (d *Decision) Standing(i int) Standing {
	x := d.standings[:d.N][i]
	s := Standing{
		Rule:      d.view.rules[x>>standingRule].src,
		Limit:     &d.view.entry(entryIn(x)).whole,
		Remaining: int64(uint32(x)),
	}
	if uint32(x) == math.MaxUint32 {
		s.Remaining = math.MaxInt64
	}
	return s
}

// Update is a throttle update from the centre.
type Update = schemas.ThrottleUpdate

// Bucket is what Collect says of one bucket.
type Bucket = schemas.Tokens

// Enforcer holds the buckets. All its methods may be called by any number of goroutines.
type Enforcer struct {
	cfg   Config
	seed  uint64 // of the rules' seeds
	seed2 uint64
	hot   chan struct{}

	view        atomic.Pointer[view]
	freshUntil  atomic.Int64 // shares hold until then …
	grantsUntil atomic.Int64 // … and those that live by grants until then
	storeUntil  atomic.Int64 // … and on_store_loss acts after that: what a centre without its store says does not move it
	heard       atomic.Int64 // instant of the last update of a centre that has its store

	began int64 // by the clock

	mu     sync.Mutex // guards changes of view, and what follows
	epoch  uint64     // of the newest centre that was heard
	fleet  int
	weight int            // millionths of each limit, for when the centre is silent; 0 is an even part
	ids    map[string]int // rule identity to id, for the life of the process
	pools  map[int]*pool  // by rule id

	collecting sync.Mutex
	shards     [shardN]shard
}

// New returns an enforcer without a policy: it refuses everything until SetPolicy.
func New(cfg Config) *Enforcer {
	if cfg.Stripes <= 0 {
		cfg.Stripes = runtime.GOMAXPROCS(0)
	}
	if cfg.Fleet <= 0 {
		cfg.Fleet = 1
	}
	if cfg.StaleAfter <= 0 {
		cfg.StaleAfter = 3 * time.Second
	}
	if cfg.ShareTTL <= 0 {
		cfg.ShareTTL = 30 * time.Second
	}
	if cfg.FloorAfter <= 0 {
		cfg.FloorAfter = 10 * time.Minute
	}
	if cfg.Clock == nil {
		cfg.Clock = Monotonic
	}
	e := &Enforcer{
		cfg: cfg, seed: rand.Uint64(), seed2: rand.Uint64(), hot: make(chan struct{}, 1),
		began: cfg.Clock(), fleet: cfg.Fleet, weight: min(max(cfg.Weight, 0), schemas.WholeWeight), ids: map[string]int{}, pools: map[int]*pool{},
	}
	e.freshUntil.Store(math.MinInt64)
	e.grantsUntil.Store(math.MinInt64)
	e.storeUntil.Store(math.MinInt64)
	e.heard.Store(math.MinInt64)
	for i := range e.shards {
		e.shards[i].seg.Store(newSegment(1))
		e.shards[i].seg.Load().slab = make([]byte, 1, 64) // no key is at 0
	}
	return e
}

// SetPolicy puts p in force, at once and as a whole. A rule of the same name and key goes on with its buckets: they keep their
// tokens, less what no longer fits: up to now they refill at the old limit, from now at the new one. That takes some 100 ns for
// every live key, of this goroutine's time; requests do not wait. p must be valid, and must not change.
func (e *Enforcer) SetPolicy(p *limits.Policy) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.change(p, e.cfg.Clock())
}

// change makes a policy, a fleet size or a rung the view. e.mu is held.
func (e *Enforcer) change(p *limits.Policy, now int64) {
	prev := e.view.Load()
	v := e.compile(p, prev, now)
	for _, r := range v.byID {
		if r != nil && r.pool != nil {
			r.pool.restate(e, v.entry(v.entryFor(r, "")), now)
		}
	}
	e.view.Store(v)
	if prev != nil {
		e.sweep(v, now)
		prev.prev.Store(nil) // checks that began under prev may still leave slots of its generation
	}
}

// Policy returns the policy in force, or nil.
func (e *Enforcer) Policy() *limits.Policy {
	if v := e.view.Load(); v != nil {
		return v.policy
	}
	return nil
}

// Check decides one request at now, in nanoseconds of a clock that does not step. It asks the rules in funnel order. The first
// that refuses is named, and what the ones before it took is given back. Shadow rules are asked when a request is admitted.
func (e *Enforcer) Check(now int64, q *Request) (d Decision) {
	e.check(now, q, &d) // apart, so that Check is inlined and the decision made in its caller's frame
	return d
}

// asking is one request on its way through the rules. The view goes beside it: it escapes, and would take the request along.
type asking struct {
	q   *Request
	d   *Decision
	now int64

	credit credit // of the first pool that had one
	from   uint64 // place of that pool's rule
}

func (e *Enforcer) check(now int64, q *Request, d *Decision) {
	v := e.view.Load()
	if v == nil {
		d.Reason, d.RetryIn = ReasonNoPolicy, bucket.Never
		return
	}
	d.view, d.Allowed, d.Remaining = v, true, math.MaxInt64
	d.lost = v.lossy && now > e.storeUntil.Load() // once: it may be found while this goes on
	a := asking{q: q, d: d, now: now}
	for r := v.first; r != nil; r = r.next { // checks, in fewer instructions
		if r.special {
			if !r.applies(a.q.Route) {
				continue
			}
			if r.onLoss != limits.LossLocal && a.d.lost {
				if r.onLoss == limits.LossAllow {
					continue
				}
				a.d.deny(r)
				e.putBack(v, &a, r.nth)
				return
			}
			if r.strict && a.q.Cost > 0 {
				if r.open(e, a.now) {
					a.d.asks |= 1 << r.nth
					continue
				}
				a.d.fell = true
			}
		}
		ok := false
		if r.pool != nil {
			ok = e.takePool(&a, r)
		} else {
			ok = e.take(v, &a, r)
		}
		if !ok {
			e.putBack(v, &a, r.nth)
			return
		}
	}
	if len(v.shadows) > 0 {
		e.askShadows(v, &a)
	}
}

// deny refuses for a rule that admits nothing while the store is lost.
func (d *Decision) deny(r *rule) {
	d.Allowed, d.Rule, d.Layer, d.Reason, d.RetryIn = false, r.src.Name, r.layer, ReasonStoreLoss, time.Second
	d.Remaining = 0
}

func (e *Enforcer) askShadows(v *view, a *asking) {
	for _, r := range v.shadows {
		if !r.applies(a.q.Route) {
			continue
		}
		own := Decision{view: v, Remaining: math.MaxInt64} // not what the caller hears
		b := asking{q: a.q, d: &own, now: a.now}
		ok := false
		if r.pool != nil {
			ok = e.takePool(&b, r)
		} else {
			ok = e.take(v, &b, r)
		}
		if !ok {
			a.d.Shadow = r.names(a.d.Shadow)
		}
	}
}

// putBack gives back what the rules before v.checks[n] took.
func (e *Enforcer) putBack(v *view, a *asking, n int) {
	for i, r := range v.checks[:n] {
		if a.d.asks>>i&1 == 0 {
			e.putBackTo(v, a, r)
		}
	}
	a.d.asks = 0
}

func (e *Enforcer) putBackTo(v *view, a *asking, r *rule) {
	switch {
	case a.q.Cost <= 0:
	case !r.applies(a.q.Route) || r.onLoss == limits.LossAllow && a.d.lost: // it was not asked
	case r.pool == nil:
		e.put(v, r, a.q, a.now)
	case a.credit.stripe != 0 && r.place == a.from:
		r.pool.put(a.q.Cost, a.credit)
	default:
		r.pool.put(a.q.Cost, credit{})
	}
}

// note writes one rule's answer into the decision. mark says which entry lim came from.
func (d *Decision) note(r *rule, mark uint64, b *bucket.Decision, n int64, lim *bucket.Limit) {
	d.stand(mark, b.Remaining, lim.Burst)
	if !b.Allowed {
		d.refuse(r, b, n, lim, &d.view.entry(entryIn(mark)).whole)
	}
}

func (d *Decision) stand(mark uint64, left, burst int64) {
	if left < d.Remaining {
		d.Remaining, d.Burst = left, burst
	}
	if i := d.N; int(i) < len(d.standings) {
		d.standings[i] = mark | uint64(min(left, math.MaxUint32))
		d.N = i + 1
	}
}

func (d *Decision) refuse(r *rule, b *bucket.Decision, n int64, lim, whole *bucket.Limit) {
	d.Allowed, d.Rule, d.Layer, d.RetryIn = false, r.src.Name, r.layer, b.RetryIn
	d.Remaining, d.Burst = b.Remaining, lim.Burst
	switch {
	case whole.Burst == 0 && !whole.Unlimited:
		d.Reason = ReasonDenied
	case n < 0 || n > whole.Burst:
		d.Reason = ReasonCost
	default:
		d.Reason = ReasonLimit
		if b.RetryIn == bucket.Never { // the share earns nothing by itself, or has no room: the centre may grant
			left := bucket.State{Tokens: max(b.Remaining, 0)}
			d.RetryIn = left.Take(*whole, 0, n).RetryIn
		}
	}
}

// takePool asks a pool, and spends if it may. Ordinarily the tokens come from this P's stripe.
func (e *Enforcer) takePool(a *asking, r *rule) bool {
	p, n := r.pool, a.q.Cost
	i := procPin()
	procUnpin()
	if uint(i) < uint(len(p.stripes)) && n > 0 {
		s := &p.stripes[i]
		w := s.word.Load()
		if int64(uint32(w)) >= n && s.word.CompareAndSwap(w, w-uint64(n)) {
			if a.credit.stripe == 0 {
				a.credit, a.from = credit{uint32(i + 1), uint32(w >> 32)}, r.place
			}
			a.d.stand(r.standing, p.level.Load(), r.limit.Burst)
			return true
		}
	}
	return e.takeBucket(a, r)
}

// takeBucket is takePool for every case.
func (e *Enforcer) takeBucket(a *asking, r *rule) bool {
	b, c := r.pool.take(e, a.now, a.q.Cost)
	a.d.note(r, r.standing, &b, a.q.Cost, &r.limit)
	if a.credit.stripe == 0 {
		a.credit, a.from = c, r.place
	}
	return b.Allowed
}

// take asks the bucket of a key, and spends if it may. Only the ordinary case is written out here: a key of one part that has no
// share and is found at the first look, whose request is admitted and tells nothing that should go out at once. A request for a
// cold key waits for one line of memory, and the processor begins the next one meanwhile if all that lies between is short.
func (e *Enforcer) take(v *view, a *asking, r *rule) bool {
	key := r.only(a.q)
	if !r.plain || len(key) > shortKey {
		h, h2 := e.hash(r, a.q)
		return e.takeAny(v, a, r, h, h2)
	}
	h2 := half(hashString(r.seed2, key))
	h := hashString(r.seed, key)
	g := e.shards[h%shardN].seg.Load()
	i, _ := bits.Mul64(h, g.groups) // the first step of find, without a call
	low, high := g.tagsAt(i)
	m, n := zeros(low^tagOf(h)*tagLow), i*groupLen
	if m == 0 {
		m, n = zeros(high^tagOf(h)*tagLow), n+wordLen
	}
	s := g.at(n + uint64(bits.TrailingZeros64(m|1<<63))>>3)
	w := s.word.Load()
	if s.fp.Load() != h || (w^h2)&^(touched|hot) != 0 || !s.word.CompareAndSwap(w, w|locked) {
		return e.takeAny(v, a, r, h, h2)
	}
	cost, left, rem, at := a.q.Cost, int64(s.tokens), s.rem, s.at
	if now := a.now; now > at {
		if r.limit.Rate.Exceeds(uint64(now)-uint64(at), uint64(r.limit.Burst-left)) {
			left, rem = r.limit.Burst, 0
		} else {
			b := s.state().Level(r.limit, now)
			left, rem = b.Tokens, b.Rem
		}
		at = now
	}
	// cost < 1 or cost > left, for one
	if uint64(cost-1) >= uint64(left) || s.lim != r.current || w&touched == 0 || r.eager || left-cost <= r.limit.Burst/4 {
		return e.spend(v, a, r, h, s, w)
	}
	left -= cost
	s.tokens, s.rem, s.at = uint32(left), rem, at
	s.cum += uint64(cost)
	s.taken = int32(min(int64(s.taken)+cost, math.MaxInt32))
	s.min = min(s.min, uint32(left))
	a.d.stand(r.standing, left, r.limit.Burst)
	s.unlock(w)
	return true
}

// takeAny is take for every case.
func (e *Enforcer) takeAny(v *view, a *asking, r *rule, h uint64, h2 uint32) bool {
	s, w := e.lock(v, a, r, h, h2)
	if s == nil {
		return e.peekFull(v, a, r)
	}
	return e.spend(v, a, r, h, s, w)
}

// spend is take once the slot is locked, for every case. It unlocks it.
func (e *Enforcer) spend(v *view, a *asking, r *rule, h uint64, s *slot, w uint32) bool {
	sh := &e.shards[h%shardN]
	lim, idx := e.limit(v, sh, s, r, a.q.Tenant, a.now)
	n := a.q.Cost
	b := s.state().Level(*lim, a.now)
	if n <= 0 || n > b.Tokens || lim.Unlimited {
		return e.spendOther(a, r, sh, s, w, lim, r.mark(idx))
	}
	b.Tokens -= n
	s.set(b)
	s.cum += uint64(n)
	s.taken = int32(min(int64(s.taken)+n, math.MaxInt32))
	s.min = min(s.min, s.tokens)
	if w&touched == 0 {
		s.wake(a.now)
	}
	w |= touched
	if r.eager || w&hot == 0 && b.Tokens*4 <= lim.Burst {
		w = e.heat(sh, s, w, r, b.Tokens, n, lim.Burst)
	}
	a.d.stand(r.mark(idx), b.Tokens, lim.Burst)
	s.unlock(w)
	return true
}

// heat puts a locked slot, of which n tokens have just gone, on the list of what goes out at once, if it belongs there, and
// returns its word.
func (e *Enforcer) heat(sh *shard, s *slot, w uint32, r *rule, left, n, burst int64) uint32 {
	unknown := r.eager && s.lim&shareFlag == 0
	low := left*4 <= burst
	if half := left*2 <= burst && (left+n)*2 > burst; unknown && half || r.eager && low && (left+n)*4 > burst {
		e.signal()
	}
	busy := r.eager && int64(s.taken)*8 >= burst
	if w&hot == 0 && (unknown || low || busy) {
		sh.heat(s)
		w |= hot
	}
	return w
}

// peekFull answers for a key that nobody spent from.
func (e *Enforcer) peekFull(v *view, a *asking, r *rule) bool {
	idx := v.entryFor(r, a.q.Tenant)
	lim := &v.entry(idx).limit
	b := bucket.Full(*lim, 0)
	bd := b.Take(*lim, 0, 0)
	a.d.note(r, r.mark(idx), &bd, 0, lim)
	return bd.Allowed
}

// spendOther is the rest of spend: peeks, unlimited keys and refusals. It unlocks the slot.
func (e *Enforcer) spendOther(a *asking, r *rule, sh *shard, s *slot, w uint32, lim *bucket.Limit, mark uint64) bool {
	n := a.q.Cost
	b := s.state()
	bd := b.Take(*lim, a.now, n)
	a.d.note(r, mark, &bd, n, lim)
	signal := false
	switch {
	case !bd.Allowed:
		signal = s.refused == 0 && n > 0
		s.refused = uint32(min(uint64(s.refused)+uint64(max(n, 0)), math.MaxUint32))
		if !lim.Unlimited {
			s.min = min(s.min, uint32(bd.Remaining))
		}
		if w&touched == 0 {
			s.wake(a.now)
		}
		if w&hot == 0 {
			sh.heat(s)
		}
		w |= touched | hot
	case n > 0: // unlimited
		s.cum += uint64(n)
		s.taken = int32(min(int64(s.taken)+min(n, math.MaxInt32), math.MaxInt32))
		w |= touched
	}
	s.unlock(w)
	if signal {
		e.signal()
	}
	return bd.Allowed
}

// lock finds and locks the slot of a key, entering it if need be, and whatever moves meanwhile. A peek enters nothing: its slot
// may be nil.
func (e *Enforcer) lock(v *view, a *asking, r *rule, h uint64, h2 uint32) (*slot, uint32) {
	sh := &e.shards[h%shardN]
	for {
		s := sh.seg.Load().find(h, h2)
		if s == nil {
			if a.q.Cost == 0 {
				return nil, 0
			}
			var buf [MaxKeyBytes + 64]byte
			s = e.enter(sh, v, r, h, h2, a.q.Tenant, appendKey(buf[:0], r.dims, a.q), a.now)
		}
		if w, ok := s.lock(); ok {
			return s, w
		}
		sh.awaitRebuild()
	}
}

// put gives back what take took for q.
func (e *Enforcer) put(v *view, r *rule, q *Request, now int64) {
	h, h2 := e.hash(r, q)
	sh := &e.shards[h%shardN]
	for {
		g := sh.seg.Load()
		s := g.find(h, h2)
		if s == nil {
			return // evicted meanwhile, and so full
		}
		w, ok := s.lock()
		if !ok {
			sh.awaitRebuild()
			continue
		}
		lim, _ := e.limit(v, sh, s, r, q.Tenant, now)
		b := s.state()
		if !lim.Unlimited {
			b.Put(*lim, q.Cost)
		}
		s.set(b)
		s.cum -= uint64(q.Cost)
		s.taken = int32(max(int64(s.taken)-q.Cost, math.MinInt32))
		if w&touched == 0 { // a report has told of the tokens already
			s.wake(now)
		}
		s.unlock(w | touched)
		return
	}
}

// Hot returns a channel that is signalled when something should go out at once: a bucket's first refusal since its last report,
// a key that has spent half of a share that the centre did not give it, or three quarters of one that it did.
func (e *Enforcer) Hot() <-chan struct{} { return e.hot }

func (e *Enforcer) signal() {
	select {
	case e.hot <- struct{}{}:
	default:
	}
}

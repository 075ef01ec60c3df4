// Package enforcer decides, in this process and in nanoseconds, whether a request may pass: a funnel of token buckets, one per
// rule and key. It keeps a part of each limit that its fleet shares, as the centre tells it, and says what it took and refused.
package enforcer

import (
	"math"
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
	StaleAfter time.Duration // silence of the centre that makes the mode stale (3s)
	ShareTTL   time.Duration // silence after which shares no longer hold, where an update does not say (30s)
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
	ReasonStoreLoss        // the centre is silent, and the rule admits nothing without it
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
		Limit:     &d.view.entry(uint32(x>>standingEntry) & (entryLimit - 1)).whole,
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
	heard       atomic.Int64 // instant of the last update

	mu    sync.Mutex // guards changes of view, and what follows
	epoch uint64     // of the newest centre that was heard
	fleet int
	ids   map[string]int // rule identity to id, for the life of the process
	pools map[int]*pool  // by rule id

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
	if cfg.Clock == nil {
		cfg.Clock = Monotonic
	}
	e := &Enforcer{
		cfg: cfg, seed: rand.Uint64(), seed2: rand.Uint64(), hot: make(chan struct{}, 1),
		fleet: cfg.Fleet, ids: map[string]int{}, pools: map[int]*pool{},
	}
	e.freshUntil.Store(math.MinInt64)
	e.grantsUntil.Store(math.MinInt64)
	e.heard.Store(math.MinInt64)
	for i := range e.shards {
		e.shards[i].seg.Store(newSegment(1, 0))
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

// change makes a policy or a new fleet size the view. e.mu is held.
func (e *Enforcer) change(p *limits.Policy, now int64) {
	prev := e.view.Load()
	v := e.compile(p, e.fleet, prev, now)
	for _, r := range v.byID {
		if r != nil && r.pool != nil {
			r.pool.restate(v.entry(v.entryFor(r, "")), now)
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
	v := e.view.Load()
	if v == nil {
		d.Reason, d.RetryIn = ReasonNoPolicy, bucket.Never
		return d
	}
	d.view, d.Allowed, d.Remaining = v, true, math.MaxInt64
	var first credit // of the first pool
	for i, r := range v.checks {
		if len(r.routes) > 0 && !r.applies(q.Route) {
			continue
		}
		if r.onLoss != limits.LossLocal && now > e.freshUntil.Load() {
			if r.onLoss == limits.LossAllow {
				continue
			}
			d.lost(r)
			e.giveBack(v, i, q, now, first, &d)
			return d
		}
		if r.strict && r.open(e, i, now, q.Cost) {
			d.asks |= 1 << i
			continue
		}
		var ok bool
		if r.pool != nil {
			var c credit
			if ok, c = e.takePool(v, r, q, now, &d); first.stripe == nil {
				first = c
			}
		} else {
			ok = e.take(v, r, q, now, &d)
		}
		if !ok {
			e.giveBack(v, i, q, now, first, &d)
			return d
		}
	}
	if len(v.shadows) > 0 {
		e.askShadows(v, q, now, &d)
	}
	return d
}

// lost refuses for a rule that admits nothing while the centre is silent.
func (d *Decision) lost(r *rule) {
	d.Allowed, d.Rule, d.Layer, d.Reason, d.RetryIn = false, r.src.Name, r.layer, ReasonStoreLoss, time.Second
	d.Remaining = 0
}

func (e *Enforcer) askShadows(v *view, q *Request, now int64, d *Decision) {
	for _, r := range v.shadows {
		if !r.applies(q.Route) {
			continue
		}
		own := Decision{view: v} // not what the caller hears
		ok := false
		if r.pool != nil {
			ok, _ = e.takePool(v, r, q, now, &own)
		} else {
			ok = e.take(v, r, q, now, &own)
		}
		if !ok {
			d.Shadow = r.names(d.Shadow)
		}
	}
}

// giveBack gives back what the rules before v.checks[n] took.
func (e *Enforcer) giveBack(v *view, n int, q *Request, now int64, first credit, d *Decision) {
	if d.asks == 0 {
		e.putBack(v.checks[:n], v, q, now, first)
		return
	}
	for i := range n {
		if d.asks&(1<<i) == 0 {
			e.putBack(v.checks[i:i+1], v, q, now, first)
		}
	}
	d.asks = 0
}

// putBack gives back what rules took. first is the credit of the first pool among them that had one.
func (e *Enforcer) putBack(rules []*rule, v *view, q *Request, now int64, first credit) {
	if q.Cost <= 0 {
		return
	}
	for _, r := range rules {
		switch {
		case !r.applies(q.Route) || r.onLoss == limits.LossAllow && now > e.freshUntil.Load(): // it was not asked
		case r.pool != nil:
			r.pool.put(q.Cost, first)
		default:
			e.put(v, r, q, now)
		}
	}
}

// note writes one rule's answer into the decision. idx is the entry that lim came from.
func (d *Decision) note(r *rule, b *bucket.Decision, n int64, lim *bucket.Limit, idx uint32) {
	d.stand(r, idx, b.Remaining, lim)
	if !b.Allowed {
		d.refuse(r, b, n, lim, &d.view.entry(idx).whole)
	}
}

func (d *Decision) stand(r *rule, idx uint32, left int64, lim *bucket.Limit) {
	if left < d.Remaining {
		d.Remaining, d.Burst = left, lim.Burst
	}
	if i := d.N; int(i) < len(d.standings) {
		d.standings[i] = r.standing | uint64(idx)<<standingEntry | uint64(min(left, math.MaxUint32))
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

func (e *Enforcer) takePool(v *view, r *rule, q *Request, now int64, d *Decision) (bool, credit) {
	b, c := r.pool.take(e, now, q.Cost)
	idx := v.entryFor(r, "")
	d.note(r, &b, q.Cost, &v.entry(idx).limit, idx)
	return b.Allowed, c
}

// take asks the bucket of q's key, and spends if it may. The ordinary case, an admitted request with a key of one part whose
// slot is its own, is written out here; everything else is in functions of its own, so that this one stays short.
func (e *Enforcer) take(v *view, r *rule, q *Request, now int64, d *Decision) bool {
	var h uint64
	var h2 uint32
	if s := r.only(q); len(s) <= shortKey && r.plain {
		h, h2 = hashString(r.seed, s), half(hashString(r.seed2, s))
	} else {
		h, h2 = e.hash(r, q)
	}
	sh := &e.shards[h%shardN]
	g := sh.seg.Load()
	at := g.home(h)
	s := g.at(at)
	w := s.word.Load()
	if s.fp.Load() != h || (w^h2)&^(touched|hot) != 0 || !s.word.CompareAndSwap(w, w|locked) {
		if g, s, at, w = e.lock(sh, v, r, q, h, h2, now); s == nil {
			return e.peekFull(v, r, q, d)
		}
	}
	idx := s.lim & (entryLimit - 1)
	var lim *bucket.Limit
	if v.current(s.lim) {
		lim = &v.entry(idx).limit
	} else {
		lim, idx = e.changed(v, sh, s, r, q.Tenant, now)
	}
	n := q.Cost
	b := s.state()
	if now > b.At {
		b = b.Level(*lim, now)
	}
	if n <= 0 || n > b.Tokens || lim.Unlimited {
		return e.takeOther(sh, g, s, at, w, r, now, n, lim, idx, d)
	}
	b.Tokens -= n
	s.set(b)
	s.cum += uint64(n)
	s.taken = int32(min(int64(s.taken)+n, math.MaxInt32))
	s.min = min(s.min, s.tokens)
	if w&touched == 0 {
		s.wake(now)
	}
	w |= touched
	half := b.Tokens*2 <= lim.Burst && (b.Tokens+n)*2 > lim.Burst // of the bucket has just gone
	if w&hot == 0 && (r.eager || b.Tokens*4 <= lim.Burst) || half && r.eager {
		w = e.heat(sh, g, s, at, w, r, b.Tokens, n, lim.Burst)
	}
	d.stand(r, idx, b.Tokens, lim)
	s.unlock(w)
	return true
}

// heat puts a locked slot on the list of what goes out at once, if it belongs there, and returns its word.
func (e *Enforcer) heat(sh *shard, g *segment, s *slot, at uint64, w uint32, r *rule, left, n, burst int64) uint32 {
	unknown := r.eager && s.lim&shareFlag == 0
	low := left*4 <= burst
	if half := left*2 <= burst && (left+n)*2 > burst; unknown && half || r.eager && low && (left+n)*4 > burst {
		e.signal()
	}
	busy := r.eager && int64(s.taken)*8 >= burst
	if w&hot == 0 && (unknown || low || busy) {
		sh.heat(g, at)
		w |= hot
	}
	return w
}

// peekFull answers for a key that nobody spent from.
func (e *Enforcer) peekFull(v *view, r *rule, q *Request, d *Decision) bool {
	idx := v.entryFor(r, q.Tenant)
	lim := &v.entry(idx).limit
	b := bucket.Full(*lim, 0)
	bd := b.Take(*lim, 0, 0)
	d.note(r, &bd, 0, lim, idx)
	return bd.Allowed
}

// takeOther is the rest of take: peeks, unlimited keys and refusals. It unlocks the slot.
func (e *Enforcer) takeOther(sh *shard, g *segment, s *slot, at uint64, w uint32, r *rule, now, n int64, lim *bucket.Limit, idx uint32, d *Decision) bool {
	b := s.state()
	bd := b.Take(*lim, now, n)
	d.note(r, &bd, n, lim, idx)
	signal := false
	switch {
	case !bd.Allowed:
		signal = s.refused == 0 && n > 0
		s.refused = uint32(min(uint64(s.refused)+uint64(max(n, 0)), math.MaxUint32))
		if !lim.Unlimited {
			s.min = min(s.min, uint32(bd.Remaining))
		}
		if w&touched == 0 {
			s.wake(now)
		}
		if w&hot == 0 {
			sh.heat(g, at)
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
func (e *Enforcer) lock(sh *shard, v *view, r *rule, q *Request, h uint64, h2 uint32, now int64) (*segment, *slot, uint64, uint32) {
	for {
		g := sh.seg.Load()
		s, at := g.find(h, h2)
		if s == nil {
			if q.Cost == 0 {
				return g, nil, 0, 0
			}
			var buf [MaxKeyBytes + 64]byte
			g, s, at = e.enter(sh, v, r, h, h2, q.Tenant, appendKey(buf[:0], r.dims, q), now)
		}
		if w, ok := s.lock(); ok {
			return g, s, at, w
		}
		sh.mu.Lock() // until the rebuild is done
		sh.mu.Unlock()
	}
}

// put gives back what take took for q.
func (e *Enforcer) put(v *view, r *rule, q *Request, now int64) {
	h, h2 := e.hash(r, q)
	sh := &e.shards[h%shardN]
	for {
		g := sh.seg.Load()
		s, _ := g.find(h, h2)
		if s == nil {
			return // evicted meanwhile, and so full
		}
		w, ok := s.lock()
		if !ok {
			sh.mu.Lock()
			sh.mu.Unlock()
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
		s.unlock(w)
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

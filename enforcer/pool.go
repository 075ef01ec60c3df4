package enforcer

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
)

// pool is the one bucket of a rule whose key has no parts, such as the guard, which every request touches. Each P spends from a
// stripe of its own: tokens taken from the bucket ahead of need, so that ordinary takes share no cache line.
//
// It never admits more than an exact bucket does. A bucket refills up to its burst less everything that was handed to stripes,
// spent or not, so it may hold up to that much less than an exact one, 1/128 of the burst at most. Before anything is refused the
// stripes' tokens come back. With one stripe there is no credit, and the pool is exact.
type pool struct {
	stripes []stripe     // none: exact
	batch   int64        // tokens handed to a stripe at once
	dry     atomic.Int64 // before this instant there is not one token, in the bucket or in any stripe
	level   atomic.Int64 // tokens held when last counted
	_       [64]byte

	mu          sync.Mutex // guards what follows
	state       bucket.State
	limit       bucket.Limit // in force
	entry       *entry
	share       share
	shared      bool     // share holds something
	granted     []uint32 // per stripe: what it held after it was last filled. It never holds more
	outstanding int64    // sum of granted
	gone        uint64   // tokens that left the bucket, for requests and for stripes
	told        uint64   // tokens taken, of them, by the last report …
	reported    uint64   // … and by the one that told of most: what is given back afterwards is made up for by the next ones
	refused     uint64
	min         int64
	last        int64 // instant of the last report
	hot         bool
}

// stripe holds a count of fillings in the high half of its word and its tokens in the low half: tokens given back to a filling
// that is gone go to the bucket.
type stripe struct {
	word    atomic.Uint64
	refused atomic.Uint64
	_       [112]byte // the adjacent-line prefetcher works on pairs of lines
}

func newPool(stripes int, ent *entry, now int64) *pool {
	p := &pool{entry: ent, limit: ent.limit, state: bucket.Full(ent.limit, now), last: now, min: ent.limit.Burst}
	if stripes > 1 {
		p.stripes = make([]stripe, stripes)
		p.granted = make([]uint32, stripes)
	}
	p.size()
	p.level.Store(p.state.Tokens)
	p.dry.Store(math.MinInt64)
	return p
}

func (p *pool) size() {
	if len(p.stripes) > 0 {
		p.batch = p.limit.Burst / 128 / int64(len(p.stripes))
	}
}

// stripe returns the stripe of the P that runs us.
func (p *pool) stripe() int {
	n := procPin()
	procUnpin()
	return n % len(p.stripes)
}

// spend takes n tokens from a stripe, if it has them.
func (p *pool) spend(stripe int, n int64) (from credit, ok bool) {
	s := &p.stripes[stripe]
	for {
		w := s.word.Load()
		if int64(uint32(w)) < n {
			return credit{}, false
		}
		if s.word.CompareAndSwap(w, w-uint64(n)) {
			return credit{uint32(stripe + 1), uint32(w >> 32)}, true
		}
	}
}

// take takes n tokens from this P's stripe or the bucket, or refuses. from is where put has to return them to.
func (p *pool) take(e *Enforcer, now, n int64) (d bucket.Decision, from credit) {
	at := -1
	if len(p.stripes) > 0 && n > 0 {
		at = p.stripe()
		if from, ok := p.spend(at, n); ok {
			return bucket.Decision{Allowed: true, Remaining: p.level.Load()}, from
		}
		if dry := p.dry.Load(); n == 1 && now < dry {
			p.stripes[at].refused.Add(1)
			return bucket.Decision{RetryIn: time.Duration(dry - now)}, credit{}
		}
	}
	return p.takeFromBucket(e, now, n, at), credit{}
}

// credit is where tokens came from: a filling of a stripe, or the bucket.
type credit struct {
	stripe  uint32 // its number and 1; 0 is the bucket
	filling uint32
}

func (p *pool) takeFromBucket(e *Enforcer, now, n int64, at int) bucket.Decision {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refill(e, now)
	if n > p.state.Tokens && p.outstanding > 0 {
		p.reclaim()
	}
	if n == 0 {
		d := p.state.Take(p.limit, now, 0)
		d.Remaining += p.credits()
		return d
	}
	if p.refused == 0 && p.gone-uint64(p.credits()) <= p.reported {
		p.last = max(p.last, now-wakeful*1e6) // see slot.wake
	}
	d := p.state.Take(p.limit, now, n)
	if !d.Allowed {
		if p.refused == 0 {
			e.signal()
		}
		p.hot = true
		p.refused += uint64(max(0, min(n, bucket.MaxBurst)))
		p.min = min(p.min, d.Remaining)
		p.level.Store(d.Remaining)
		if n == 1 && p.limit.Burst > 0 {
			p.dry.Store(now + int64(min(d.RetryIn, bucket.Never-time.Duration(max(now, 0)))))
		}
		return d
	}
	p.gone += uint64(n)
	if at >= 0 && p.batch > 0 && p.state.Tokens >= 2*p.batch*int64(len(p.stripes)) {
		p.fill(at)
	}
	d.Remaining = p.state.Tokens + p.credits()
	p.min = min(p.min, d.Remaining)
	p.level.Store(d.Remaining)
	if !p.shared && p.limit != p.entry.whole && !p.hot { // it wants a share
		p.hot = true
		e.signal()
	}
	p.hot = p.hot || d.Remaining*4 <= p.limit.Burst
	return d
}

// refill brings the bucket to now, and its limit up to date with the centre's silence. mu is held.
func (p *pool) refill(e *Enforcer, now int64) {
	if p.shared {
		if until := e.until(&p.share, p.entry); (now > until) != p.share.isolated {
			isolated := now > until
			p.share.isolated = isolated
			at := now
			if isolated {
				at = until
			}
			p.become(p.target(), at)
		}
	}
	l := p.limit
	l.Burst -= p.outstanding
	p.state = p.state.Level(l, now)
	if p.state.Tokens >= l.Burst {
		p.state.Rem = 0
	}
}

// fill hands a batch to stripe n, on top of what it has. mu is held.
func (p *pool) fill(n int) {
	s := &p.stripes[n]
	had := p.empty(n)
	p.state.Tokens += had
	p.gone -= uint64(had)
	b := p.batch
	p.state.Tokens -= b
	p.gone += uint64(b)
	p.granted[n] = uint32(b)
	p.outstanding += b
	s.word.Store(s.word.Load() | uint64(b)) // nobody else changes an empty stripe: a put of an earlier filling does not fit
}

// empty takes everything out of stripe n and begins its next filling. mu is held.
func (p *pool) empty(n int) int64 {
	s := &p.stripes[n]
	for {
		w := s.word.Load()
		if s.word.CompareAndSwap(w, (w>>32+1)<<32) {
			p.outstanding -= int64(p.granted[n])
			p.granted[n] = 0
			return int64(uint32(w))
		}
	}
}

// reclaim takes back what all stripes hold. mu is held.
func (p *pool) reclaim() {
	for n := range p.stripes {
		had := p.empty(n)
		p.state.Tokens += had
		p.gone -= uint64(had)
	}
}

func (p *pool) credits() (sum int64) {
	for n := range p.stripes {
		sum += int64(uint32(p.stripes[n].word.Load()))
	}
	return sum
}

// put gives back n tokens.
func (p *pool) put(n int64, to credit) {
	if to.stripe != 0 {
		s := &p.stripes[to.stripe-1]
		for {
			w := s.word.Load()
			if uint32(w>>32) != to.filling {
				break
			}
			if s.word.CompareAndSwap(w, w+uint64(n)) {
				return
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.limit
	l.Burst -= p.outstanding
	p.state.Put(l, n)
	p.gone -= uint64(n)
	p.dry.Store(math.MinInt64)
}

// target returns the limit that ought to be in force. mu is held.
func (p *pool) target() bucket.Limit {
	if !p.shared || p.share.isolated || p.share.dropped || p.entry.local {
		return p.entry.limit
	}
	return p.share.given
}

// become goes over to another limit with the tokens held. mu is held.
func (p *pool) become(next bucket.Limit, now int64) {
	if next == p.limit {
		return
	}
	l := p.limit
	l.Burst -= p.outstanding
	p.state = p.state.Level(l, now)
	p.reclaim()
	p.state.Resize(p.limit, next, p.state.At)
	p.limit = next
	p.min = min(p.min, p.state.Tokens)
	p.level.Store(p.state.Tokens)
	p.dry.Store(math.MinInt64)
	p.size()
}

// restate tells the pool the stated limit of the policy that comes into force.
func (p *pool) restate(e *Enforcer, ent *entry, now int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.share.dropped = p.share.dropped || p.entry.whole != ent.whole
	p.entry = ent
	p.share.isolated = now > e.until(&p.share, ent)
	p.become(p.target(), now)
}

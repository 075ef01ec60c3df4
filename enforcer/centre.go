package enforcer

import (
	"math"
	"slices"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// The rungs of the degradation ladder, as Mode names them.
const (
	Synced   = "synced"   // the centre was heard from lately
	Stale    = "stale"    // it was not, or is without its store; its shares still hold
	Isolated = "isolated" // its shares hold no longer: every key has limit × the weight that the centre told last
	Floor    = "floor"    // nor does the weight, or there is none: every key has limit/fleet, or limit × weight if that is less
	Local    = "local"    // no rule is shared with other gateways
)

// lapsed is between Synced and Isolated, and no mode: shares hold, but no grants come, and the centre cannot be asked.
const lapsed = "lapsed"

// Mode returns the enforcer's rung.
func (e *Enforcer) Mode() string {
	v := e.view.Load()
	if v == nil || !v.shared {
		return Local
	}
	now := e.cfg.Clock()
	mode := e.rung(now)
	if mode == lapsed {
		mode = Synced
	}
	if heard := e.heard.Load(); mode == Synced && uint64(now)-uint64(heard) > uint64(e.cfg.StaleAfter) && now > heard {
		return Stale
	}
	return mode
}

// Alone says whether a gateway in mode needs the centre and does not hear it.
func Alone(mode string) bool { return mode == Stale || mode == Isolated || mode == Floor }

// rung is Isolated, Floor, or for both rungs above Synced or lapsed.
func (e *Enforcer) rung(now int64) string {
	until := e.freshUntil.Load()
	switch {
	case now <= until && now <= e.grantsUntil.Load():
		return Synced
	case now <= until:
		return lapsed
	case until == math.MinInt64 && e.cfg.Weight <= 0, now-max(until, e.began) > int64(e.cfg.FloorAfter):
		return Floor
	}
	return Isolated
}

// Descend looks whether shares have outlived their time, or the weight has, and puts the limits of the next rung in force. It is to be
// called at that moment; Collect does it, too. A fleet whose gateways do it at different times admits too much or too little meanwhile.
func (e *Enforcer) Descend() { e.descend(e.cfg.Clock()) }

func (e *Enforcer) descend(now int64) {
	if v := e.view.Load(); v == nil || !v.shared || v.rung == e.rung(now) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.change(e.view.Load().policy, now)
}

// behind says whether v is not what is to be in force. e.mu is held.
func (e *Enforcer) behind(v *view, now int64) bool {
	rung := e.rung(now)
	num, den := e.part(rung)
	return v.fleet != e.fleet || v.rung != rung || v.num != num || v.den != den
}

// Weight is the part of each limit, in millionths, that a key without a share has here without the centre: what the centre told last, or
// an even part of the fleet.
func (e *Enforcer) Weight() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.weight > 0 {
		return e.weight
	}
	return schemas.EvenWeight(e.fleet)
}

// part is the part of a limit that a key without a share has here, on a rung: an even part of the fleet while the centre is there,
// which reckons with it; the weight without it; on the floor the less of the two, so that the parts of a fleet add up to no more
// than the limit on whichever rung each gateway is. When grants have lapsed it is that of limits that lapse with them, and of those
// every key has it, whatever its share was: so their parts add up, too.
func (e *Enforcer) part(rung string) (num, den uint64) {
	fleet, weight := uint64(e.fleet), uint64(e.weight)
	if rung == Synced || weight == 0 || rung == Floor && schemas.WholeWeight < weight*fleet {
		return 1, fleet
	}
	return weight, schemas.WholeWeight
}

// Apply takes a throttle update. Any update, even an empty one, makes the shares hold for its time to live, and its count of
// gateways is what keys without a share divide by; its weight, if it has one or the fleet has changed, is kept for when no more updates come. Frozen, it does not make up for
// one of a centre that has its store and its reports: the mode becomes stale, and after a time to live on_store_loss acts. A share of a version not above the one held for its key, of a rule that is
// not shared, or of another limit than the policy states is ignored, and so is every update of an older epoch than one before.
func (e *Enforcer) Apply(u Update) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if u.Epoch > 0 && u.Epoch < e.epoch {
		return
	}
	e.epoch = max(e.epoch, u.Epoch)
	now := e.cfg.Clock()
	ttl := u.TTL
	if ttl <= 0 {
		ttl = e.cfg.ShareTTL
	}
	ttl = min(ttl, time.Duration(math.MaxInt64-max(now, 0)))
	e.freshUntil.Store(now + int64(ttl))
	if u.Frozen {
		e.grantsUntil.Store(min(e.grantsUntil.Load(), now-1))
	} else {
		e.heard.Store(now)
		e.storeUntil.Store(now + int64(ttl))
		e.grantsUntil.Store(now + int64(ttl/4))
	}
	v := e.view.Load()
	if u.Gateways > 0 {
		if u.Weight > 0 || u.Gateways != e.fleet { // else a centre that has just begun, and does not know: what was told before is right
			e.weight = u.Weight
		}
		e.fleet = u.Gateways
	}
	if v == nil {
		return
	}
	if e.behind(v, now) {
		e.change(v.policy, now)
		v = e.view.Load()
	}
	for i := range u.Shares {
		s := &u.Shares[i]
		for _, r := range v.byID {
			if r == nil || r.src.Name != s.Rule || r.local {
				continue
			}
			if r.pool != nil {
				r.pool.give(e, s, now)
			} else if q, ok := parse(r.dims, s.Key); ok {
				e.give(v, r, &q, s, now)
			}
		}
	}
}

// shareOf returns what the centre gave as a limit: never above the stated one, and exactly that where it gave all of it. It is
// false for a share of another limit than whole, from a centre that follows another policy.
func shareOf(whole bucket.Limit, s *schemas.Share) (bucket.Limit, bool) {
	if whole.Unlimited || s.LimitRateNanos != whole.Rate.Nano() || s.LimitBurst != whole.Burst {
		return bucket.Limit{}, false
	}
	l := bucket.Limit{Rate: whole.Rate, Burst: min(s.Burst, whole.Burst)}
	if s.RateNanos < s.LimitRateNanos {
		r, err := bucket.FromNano(s.RateNanos)
		if err != nil {
			return bucket.Limit{}, false
		}
		l.Rate = r
	}
	return l, l.Burst >= 0
}

// take returns the tokens that a grant adds to a bucket that has taken so much of grants before. Whatever is said again, late or
// to another bucket than the one it was meant for, adds none.
func (c *share) take(s *schemas.Share) int64 {
	if s.Grant <= c.granted || s.Granted > c.granted {
		return 0
	}
	n := s.Grant - c.granted
	c.granted = s.Grant
	return int64(min(n, bucket.MaxBurst))
}

// until returns the instant until which a share of ent's limit holds. One without a rate lives by grants, and they last less than a
// second: it does not wait as long for more, nor does any other of a limit that is kept so.
func (e *Enforcer) until(c *share, ent *entry) int64 {
	if c.given.Rate.Num == 0 || ent.lapses {
		return min(e.freshUntil.Load(), e.grantsUntil.Load())
	}
	return e.freshUntil.Load()
}

func (p *pool) give(e *Enforcer, s *schemas.Share, now int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shared && s.Version <= p.share.version {
		return
	}
	given, ok := shareOf(p.entry.whole, s)
	if !ok {
		return
	}
	p.shared = true
	p.share = share{version: s.Version, given: given, granted: p.share.granted}
	p.become(p.target(), now)
	if n := p.share.take(s); n > 0 {
		p.refill(e, now)
		l := p.limit
		l.Burst -= p.outstanding
		p.state.Put(l, n)
		p.level.Store(p.state.Tokens + p.credits())
		p.dry.Store(math.MinInt64)
	}
}

func (e *Enforcer) give(v *view, r *rule, q *Request, said *schemas.Share, now int64) {
	text := said.Key
	var h uint64
	var h2 uint32
	if text != "" && text[0] == '#' {
		h, h2 = e.hashText(r, text)
	} else {
		h, h2 = e.hash(r, q)
	}
	sh := &e.shards[h%shardN]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	idx := v.entryFor(r, q.Tenant)
	ent := v.entry(idx)
	given, ok := shareOf(ent.whole, said)
	if !ok {
		return
	}
	s := e.enterLocked(sh, v, r, h, h2, q.Tenant, []byte(text), now)
	w, _ := s.lock()
	defer func() { s.unlock(w) }()
	held := s.tokens
	if s.lim&shareFlag == 0 {
		lim, _ := e.limit(v, sh, s, r, q.Tenant, now)
		was := *lim
		s.lim = sh.newShare()
		*sh.share(s.lim) = share{version: said.Version, given: given, now: was, entry: ent, idx: idx, gen: v.gen}
	} else {
		c := sh.share(s.lim)
		if said.Version <= c.version {
			return
		}
		e.limit(v, sh, s, r, q.Tenant, now)
		c.version, c.given, c.dropped = said.Version, given, false
	}
	c := sh.share(s.lim)
	e.settle(v, s, c, r, q.Tenant, now)
	if s.tokens < held && !r.local { // tokens that no longer fit go back: the centre waits to hear so
		if w&hot == 0 {
			sh.heat(s)
		}
		w |= touched | hot
	}
	if n := c.take(said); n > 0 {
		b := s.state().Level(c.now, now)
		b.Put(c.now, n)
		s.set(b)
	}
}

// Collect emits the buckets that have something to say: all that were touched since they were last collected, or only the hot
// ones, which were refused, are nearly empty, or have no share yet from a centre that serves several gateways. What is emitted
// counts as reported. emit is called without a lock.
//
// It descends the ladder where it is time to.
func (e *Enforcer) Collect(now int64, all bool, emit func(Bucket)) {
	e.descend(now)
	e.collecting.Lock()
	defer e.collecting.Unlock()
	v := e.view.Load()
	if v == nil {
		return
	}
	var out []Bucket
	flush := func() {
		for i := range out {
			emit(out[i])
		}
		clear(out)
		out = out[:0]
	}
	for _, r := range v.known {
		if r.pool != nil {
			if b, ok := r.pool.report(e, r, now, all); ok {
				out = append(out, b)
			}
		}
	}
	flush()
	for i := range e.shards {
		sh := &e.shards[i]
		if all || sh.hot.Load() {
			out = e.collect(sh, now, all, out)
			flush()
		}
	}
}

// collect appends what one shard has to say.
func (e *Enforcer) collect(sh *shard, now int64, all bool, out []Bucket) []Bucket {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	v, g := e.view.Load(), sh.seg.Load() // in this order of locks the view knows every rule that the shard's keys have
	sh.hot.Store(false)
	if !all {
		for i := range g.hot {
			if g.hot[i].Load() == 0 {
				continue
			}
			word := g.hot[i].Swap(0)
			for n := i * 64; word != 0; n, word = n+1, word>>1 {
				if word&1 != 0 {
					out = e.report(v, sh, g, &g.slots[n], now, out)
				}
			}
		}
		return out
	}
	for i := range g.hot {
		g.hot[i].Store(0)
	}
	quiet := 0
	for n := range g.slots {
		s := &g.slots[n]
		switch {
		case s.ref == 0:
		case s.word.Load()&(touched|hot) == 0:
			quiet++
		default:
			out = e.report(v, sh, g, s, now, out)
		}
	}
	if g.n > groupLen && quiet > g.n/2 && now >= sh.quiet {
		if e.rebuild(sh, now) < g.n/4 {
			sh.quiet = now + int64(time.Minute) // most of these are not full yet
		}
	}
	return out
}

// report appends one bucket and marks it reported. sh.mu is held.
func (e *Enforcer) report(v *view, sh *shard, g *segment, s *slot, now int64, out []Bucket) []Bucket {
	inc, id, text := g.key(s.ref)
	r := v.byID[id]
	key := string(text)
	b := Bucket{Key: key, Incarnation: inc}
	var lim, whole bucket.Limit
	w, _ := s.lock()
	if w&(touched|hot) == 0 { // reported since it was put on the list
		s.unlock(w)
		return out
	}
	if r != nil { // else the rule is gone from the policy, and what it did last goes out without limits
		tenant, known := "", true
		if slices.ContainsFunc(r.dims, func(d limits.Dimension) bool { return d.Kind == limits.ByTenant }) {
			tenant, known = tenantOf(r.dims, text)
		}
		b.Tenant = tenant
		if known || !r.src.ByPlan || v.current(s.lim) {
			l, idx := e.limit(v, sh, s, r, tenant, now)
			lim, whole = *l, v.entry(idx).whole
		}
	}
	level := s.state().Level(lim, now)
	b.Cum = s.cum
	if s.taken > 0 { // else a take was reported before it was given back: the next ones make up for it
		b.Taken = uint64(s.taken)
		s.taken = 0
	}
	b.Refused = uint64(s.refused)
	if s.lim&shareFlag != 0 {
		b.Granted = sh.share(s.lim).granted
	}
	b.TokensMin, b.TokensLast = int64(s.min), level.Tokens
	b.Window = time.Duration(uint32(now/1e6)-s.reported) * time.Millisecond
	s.refused, s.min, s.reported = 0, uint32(level.Tokens), uint32(now/1e6)
	s.unlock(w &^ (touched | hot))

	last := v.known[id]
	b.Rule, b.Layer, b.Mode, b.Consistency = last.src.Name, last.layer, last.src.Mode.String(), last.consistency
	state(&b, lim, whole)
	return append(out, b)
}

// state writes limits into a report.
func state(b *Bucket, lim, whole bucket.Limit) {
	b.RateNanos, b.Capacity = lim.Rate.Nano(), lim.Burst
	b.LimitRateNanos, b.LimitBurst = whole.Rate.Nano(), whole.Burst
	if lim.Unlimited {
		b.RateNanos, b.LimitRateNanos = -1, -1
	}
}

// report says what a pool has taken and refused since it last did.
func (p *pool) report(e *Enforcer, r *rule, now int64, all bool) (b Bucket, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.stripes {
		if n := p.stripes[i].refused.Swap(0); n > 0 {
			p.refused += n
			p.hot = true
		}
	}
	taken := p.gone - uint64(p.credits())
	if !p.hot && (!all || taken == p.told) {
		return b, false
	}
	p.refill(e, now)
	level := p.state.Tokens + p.credits()
	b = Bucket{
		Rule: r.src.Name, Layer: r.layer, Mode: r.src.Mode.String(), Consistency: r.consistency, Refused: p.refused, Granted: p.share.granted,
		Cum: taken, TokensMin: min(p.min, level), TokensLast: level, Window: time.Duration(now - p.last),
	}
	b.Taken = max(taken, p.reported) - p.reported
	state(&b, p.limit, p.entry.whole)
	p.told, p.reported, p.refused, p.min, p.last, p.hot = taken, p.reported+b.Taken, 0, level, now, false
	return b, true
}

package enforcer

import (
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// entry is one stated limit and what this gateway enforces of it while it has no share of its own for a key.
type entry struct {
	limit bucket.Limit
	whole bucket.Limit
	local bool // the gateway has the whole limit to itself

	lapses bool // it is kept by grants, or by asking the centre: without those each gateway has its weight of it
}

// rule is a limits.Rule made ready for Check, which mostly reads what stands first.
type rule struct {
	field   uintptr // of Request, when plain
	seed    uint64  // of the halves of its keys' fingerprints
	seed2   uint64
	limit   bucket.Limit // of a key that has no share, unless the limit is by plan
	current uint32       // slot.lim of such a key; noLimit by plan
	plain   bool         // the key is one part, and not a header
	eager   bool         // shared with other gateways: a key without a share wants one
	special bool         // not every request asks it, or not always
	next    *rule        // in view.checks
	onLoss  limits.StoreLoss
	strict  bool // the centre is asked
	local   bool
	lapses  bool // every limit of it does: see entry

	consistency string // empty for shared

	standing uint64   // what Decision.standings say of a key that has that limit, but for the tokens
	pool     *pool    // of a rule whose key has no parts
	routes   []string // it applies to; none: all
	dims     []limits.Dimension
	src      *limits.Rule
	layer    string
	id       int      // the same for a rule of this name and key in every policy of this process
	fixed    uint32   // index of the entry, unless the limit is by plan
	place    uint64   // in view.rules
	nth      int      // in view.checks
	alone    []string // the rule's name, for Decision.Shadow
}

// noLimit is no slot's lim.
const noLimit = math.MaxUint32

// mark returns what Decision.standings say of a key whose limit is entry idx, but for the tokens.
func (r *rule) mark(idx uint32) uint64 { return r.place<<standingRule | uint64(idx)<<standingEntry }

// entryIn returns the entry that a mark, or what became of it in Decision.standings, names.
func entryIn(mark uint64) uint32 { return uint32(mark>>standingEntry) & (entryLimit - 1) }

//go:noinline
func (r *rule) applies(route string) bool {
	if len(r.routes) == 0 {
		return true
	}
	for _, name := range r.routes {
		if name == route {
			return true
		}
	}
	return false
}

// view is a policy, a fleet size and a rung of the ladder: what a Check needs to know beside the buckets. Only its list of entries grows.
type view struct {
	policy  *limits.Policy
	fleet   int
	rung    string // Synced, lapsed, Isolated or Floor
	num     uint64 // of den: the part of a limit that a key without a share has; lapsed, only of those that lapse
	den     uint64
	gen     uint32  // modulo 1<<12
	since   int64   // when it came into force
	rules   []*rule // all that there is to ask, in policy order
	checks  []*rule
	first   *rule // of checks
	shadows []*rule
	byID    []*rule // nil for a rule of an earlier policy
	known   []*rule // the same, with the last form of rules that are gone
	shared  bool    // some rule is kept together with other gateways
	lossy   bool    // some rule of checks has an on_store_loss other than local

	prev atomic.Pointer[view] // for the limits that slots of the last generation are counted in

	entries atomic.Pointer[[]entry] // entry 0 denies everything
	mu      sync.Mutex
	index   map[entryKey]uint32
}

type entryKey struct {
	whole         bucket.Limit
	local, lapses bool
}

// identity is what makes a rule the same rule in the next policy: tokens stay with it. One that was local and is shared now is another:
// what its buckets gave nobody has shared, and is not to be charged to the others.
func identity(r *limits.Rule) string {
	var b strings.Builder
	b.WriteString(r.Name)
	if r.Consistency == limits.Local {
		b.WriteByte(1)
	}
	for _, d := range r.Key {
		b.WriteByte(0)
		b.WriteString(d.String())
	}
	return b.String()
}

// compile makes the view that follows prev (nil at first). e.mu is held.
func (e *Enforcer) compile(p *limits.Policy, prev *view, now int64) *view {
	v := &view{policy: p, fleet: e.fleet, rung: e.rung(now), since: now, index: map[entryKey]uint32{}}
	v.num, v.den = e.part(v.rung)
	if prev != nil {
		v.gen = (prev.gen + 1) & genMask
		v.prev.Store(prev)
		v.known = slices.Clone(prev.known)
	}
	v.byID = make([]*rule, len(v.known))
	entries := make([]entry, 1, 16)
	v.entries.Store(&entries)
	last := &v.first
	for i := range p.Rules {
		src := &p.Rules[i]
		if !src.ByPlan && src.Fixed.Unlimited { // nothing to ask
			continue
		}
		name := identity(src)
		id, ok := e.ids[name]
		if !ok {
			id = len(e.ids)
			e.ids[name] = id
			v.byID, v.known = append(v.byID, nil), append(v.known, nil)
		}
		r := &rule{
			src: src, layer: src.Layer.String(), id: id, place: uint64(len(v.rules)), dims: src.Key, routes: src.Routes,
			local: src.Consistency == limits.Local, lapses: src.Consistency == limits.Lease || src.Consistency == limits.Strict, alone: []string{src.Name},
			seed: hashString(e.seed, name), seed2: hashString(e.seed2, name), current: noLimit,
		}
		r.eager = !r.local && v.fleet > 1
		if !r.local {
			r.onLoss = src.OnStoreLoss
			r.strict = e.cfg.Ask && src.Consistency == limits.Strict && src.Mode == limits.Enforce
		}
		r.special = len(r.routes) > 0 || r.onLoss != limits.LossLocal || r.strict
		if src.Consistency != limits.Shared {
			r.consistency = src.Consistency.String()
		}
		if len(r.dims) == 1 && r.dims[0].Kind != limits.ByHeader {
			r.plain, r.field = true, fieldOf[r.dims[0].Kind]
		}
		if !src.ByPlan {
			r.fixed = v.intern(src.Fixed, r)
			r.current = v.gen<<genShift | r.fixed
		}
		if !src.ByPlan || len(r.dims) == 0 {
			idx := v.entryFor(r, "")
			r.limit, r.standing = v.entry(idx).limit, r.mark(idx)
		}
		if len(r.dims) == 0 {
			ent := v.entry(v.entryFor(r, ""))
			if r.pool = e.pools[id]; r.pool == nil {
				r.pool = newPool(e.cfg.Stripes, ent, now)
				e.pools[id] = r.pool
			}
		}
		v.rules = append(v.rules, r)
		v.byID[id], v.known[id] = r, r
		v.shared = v.shared || !r.local
		if src.Mode == limits.Shadow {
			v.shadows = append(v.shadows, r)
		} else {
			r.nth = len(v.checks)
			v.lossy = v.lossy || r.onLoss != limits.LossLocal
			v.checks = append(v.checks, r)
			*last, last = r, &r.next
		}
	}
	return v
}

// intern returns the index of the entry for a limit of r. One that is too small to be cut into shares is kept by grants, too.
func (v *view) intern(whole bucket.Limit, r *rule) uint32 {
	v.mu.Lock()
	defer v.mu.Unlock()
	k := entryKey{whole, r.local, r.lapses || !r.local && schemas.TooFew(whole.Burst, v.fleet)}
	if i, ok := v.index[k]; ok {
		return i
	}
	list := *v.entries.Load()
	if len(list) == entryLimit {
		return 0 // 524,287 different limits in one policy: the ones beyond are denied
	}
	ent := entry{limit: whole, whole: whole, local: k.local, lapses: k.lapses}
	switch {
	case k.local:
	case v.rung == lapsed && !k.lapses:
		ent.limit = whole.Part(1, uint64(v.fleet))
	default:
		ent.limit = whole.Part(v.num, v.den)
	}
	i := uint32(len(list))
	list = append(list, ent) // readers of the shorter list do not look where this writes
	v.entries.Store(&list)
	v.index[k] = i
	return i
}

// entryFor returns the index of the entry for a key of r that belongs to tenant.
func (v *view) entryFor(r *rule, tenant string) uint32 {
	if r.src.ByPlan {
		whole, _ := r.src.Limit(v.policy, tenant)
		return v.intern(whole, r)
	}
	return r.fixed
}

func (v *view) entry(idx uint32) *entry { return &(*v.entries.Load())[idx] }

func (v *view) current(lim uint32) bool { return lim>>genShift == v.gen }

// entryOf returns the entry that a slot of this or the last generation is counted in, or nil when that is forgotten.
func (v *view) entryOf(lim uint32) *entry {
	for u := v; u != nil; u = u.prev.Load() {
		if u.current(lim) {
			return u.entry(lim & (entryLimit - 1))
		}
	}
	return nil
}

// limit returns the limit in force for a locked slot, and the index in v of the entry that it is a part of. It first brings the
// slot to that limit: the tokens it holds stay, less what no longer fits. The result is good while the slot is locked.
//
// A slot is behind when its shard was not swept yet, or when a check that began under the last policy left it so.
func (e *Enforcer) limit(v *view, sh *shard, s *slot, r *rule, tenant string, now int64) (*bucket.Limit, uint32) {
	if v.current(s.lim) {
		idx := s.lim & (entryLimit - 1)
		return &v.entry(idx).limit, idx
	}
	return e.changed(v, sh, s, r, tenant, now)
}

func (e *Enforcer) changed(v *view, sh *shard, s *slot, r *rule, tenant string, now int64) (*bucket.Limit, uint32) {
	newest := e.view.Load() // another request may be ahead of us with the next policy
	if s.lim&shareFlag == 0 {
		was := v.entryOf(s.lim)
		if was == nil && newest != v {
			if ent := newest.entryOf(s.lim); ent != nil {
				return &ent.limit, v.intern(ent.whole, r)
			}
		}
		idx := v.entryFor(r, tenant)
		lim := &v.entry(idx).limit
		s.resize(was, *lim, min(v.since, now))
		s.lim = v.gen<<genShift | idx
		return lim, idx
	}
	c := sh.share(s.lim)
	if n := newest.byID[r.id]; n != nil && (c.gen != newest.gen || c.isolated != (now > e.until(c, c.entry))) {
		e.settle(newest, s, c, n, tenant, now)
	}
	if c.gen != v.gen {
		return &c.now, v.intern(c.entry.whole, r)
	}
	return &c.now, c.idx
}

// settle brings a slot that has a share to the limit that the view and the centre's silence ask for.
func (e *Enforcer) settle(v *view, s *slot, c *share, r *rule, tenant string, now int64) {
	at, behind := now, c.gen != v.gen
	if behind {
		idx := v.entryFor(r, tenant)
		ent := v.entry(idx)
		c.dropped = c.dropped || c.entry.whole != ent.whole
		c.entry, c.idx, c.gen = ent, idx, v.gen
		at = min(now, v.since)
	}
	until := e.until(c, c.entry)
	if c.isolated = now > until; c.isolated && !behind {
		at = until
	}
	next := c.given
	if c.isolated || c.dropped || c.entry.local {
		next = c.entry.limit
	}
	if next != c.now {
		b := s.state()
		b.Resize(c.now, next, at)
		s.set(b)
		s.min = min(s.min, s.tokens)
		c.now = next
	}
}

// resize goes from the limit of an entry, nil if it is forgotten, to another.
func (s *slot) resize(from *entry, to bucket.Limit, now int64) {
	b := s.state()
	if from != nil {
		b.Resize(from.limit, to, now)
	} else {
		b.Tokens, b.Rem = min(b.Tokens, to.Burst), 0
	}
	s.set(b)
	s.min = min(s.min, s.tokens)
}

// sweep brings every bucket to v, which has just come into force.
func (e *Enforcer) sweep(v *view, now int64) {
	for i := range e.shards {
		sh := &e.shards[i]
		sh.mu.Lock()
		g := sh.seg.Load()
		for n := range g.slots {
			s := &g.slots[n]
			if s.ref == 0 {
				continue
			}
			_, id, text := g.key(s.ref)
			if r := v.byID[id]; r != nil {
				if tenant, known := r.tenant(text); known {
					w, _ := s.lock()
					e.limit(v, sh, s, r, tenant, now)
					s.unlock(w)
				}
			}
		}
		sh.mu.Unlock()
	}
}

// tenant returns what a key's text says of the tenant whose plan the limit is, and whether it can tell: a digest cannot.
func (r *rule) tenant(text []byte) (tenant string, known bool) {
	if !r.src.ByPlan {
		return "", true
	}
	return tenantOf(r.dims, text)
}

// names joins the names of shadow rules that would have refused.
func (r *rule) names(so []string) []string {
	if so == nil {
		return r.alone
	}
	return append(slices.Clone(so), r.src.Name)
}

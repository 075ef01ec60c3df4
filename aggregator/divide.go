package aggregator

import (
	"container/heap"
	"context"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/weirhq/weir/schemas"
)

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

// outstanding notes in folds what gateways that ask hold of keys that are kept by grants, and which keys are kept strictly. Of keys with
// few tokens it notes what they had: gateways hold too little of them to tell that of a bucket that the counter makes anew.
func (a *Aggregator) outstanding(folds []Fold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := max(len(a.fleet), 1)
	for i := range folds {
		f := &folds[i]
		e := a.keys[f.Key]
		f.Strict = f.Strict || e != nil && e.consistency == "strict"
		f.Grants = byGrants(f.consistency, f.Limit, n) || e != nil && e.byGrants(f.Limit, n)
		if byOffers(f.Limit, len(a.fleet)) && !f.Strict {
			f.Offered = min(int64(len(a.fleet)), offerDebt)
		}
		if e == nil || !e.byGrants(f.Limit, n) {
			continue
		}
		few := schemas.TooFew(f.Limit.Burst, n)
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

package alerting

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weirhq/weir/schemas"
)

const (
	// window is the seconds of traffic that are kept of a tenant.
	window = 128
	// current is the seconds by which traffic is judged: with one, every burst would be out of the ordinary.
	current = 2
	// minHistory is the seconds of a tenant's traffic that have to be known before any of it is out of the ordinary.
	minHistory = 10
	// idleReset is the pause, in seconds, after which a tenant is as good as new.
	idleReset = 60
	// calm is the seconds over which traffic has to be ordinary again.
	calm = 10
	// refresh is how often, in seconds, what is normal is worked out again.
	refresh = 10
	// adapt is the refreshes over which what goes on becomes normal: 10 minutes.
	adapt = 60
	// madScale makes the median absolute deviation comparable to a standard deviation.
	madScale = 1.4826
	// clearFactor times the normal is ordinary again.
	clearFactor = 2
	// burst is the seconds out of the ordinary that are learnt all the same when ordinary ones surround them.
	burst = 3
	// settle is how long traffic has to be out of the ordinary, never ordinary for calm, to be the new normal.
	settle = 10 * time.Minute
)

// traffic follows how many requests each tenant makes, allowed or refused, over all gateways, by the second of arrival.
// A tenant takes about 830 bytes.
type traffic struct {
	cfg     Config
	m       *Metrics
	tenants map[string]*tenant
	ring    tenant // newer is the one least recently active, older the one most recently
	firing  map[*tenant]struct{}
	judged  int64 // the last second that was judged
	scratch [window]uint32
}

func newTraffic(cfg Config, m *Metrics) *traffic {
	tr := &traffic{cfg: cfg, m: m, tenants: map[string]*tenant{}, firing: map[*tenant]struct{}{}}
	tr.ring.newer, tr.ring.older = &tr.ring, &tr.ring
	return tr
}

// tenant is one tenant's last two minutes.
type tenant struct {
	name         string
	newer, older *tenant

	head   int64          // the newest second counted
	first  int64          // since when it has been active without a long pause
	last   int64          // the newest second in which requests were reported
	counts [window]uint32 // by second modulo window, of the window that ends with head
	odd    [window]bool   // likewise: the second was out of the ordinary, or not all of it was heard

	due       int64   // when normal is worked out next
	rounds    int32   // times that it was
	normal    float32 // requests per second: an average of medians of ordinary seconds that takes 10 minutes to follow
	threshold float32 // 0 while too little is known

	alarm *alarm // nil while there is none
}

// alarm is the state of a tenant's alert.
type alarm struct {
	watch
	sources map[*gateway]struct{} // that reported the tenant since: silence of one of them is not calm
	stays   time.Duration         // since the traffic was last ordinary
	before  float32               // what was normal when it began
}

// spanOf is the time over which the requests of u were made, up to the sealing of r; 0 when that is not known.
func spanOf(r *schemas.Report, u *schemas.Usage) time.Duration {
	return max(0, r.SealedAt.Sub(u.Time))
}

// add counts the requests of u, reported at at, spread evenly over the span that ended late before that.
func (tr *traffic) add(u *schemas.Usage, g *gateway, at time.Time, late, span time.Duration) {
	n := u.Allowed + u.Rejected
	if n == 0 || u.Tenant == "" {
		return
	}
	t := tr.tenant(u.Tenant)
	tr.touch(t)
	end := at.Add(-late)
	s := at.Unix()
	switch {
	case s-t.last > idleReset && t.alarm == nil:
		t.first, t.due, t.rounds, t.normal, t.threshold = s, 0, 0, 0, 0
	case t.first == 0: // Whose alert fires is not new after a pause: it may have been an outage, or the alerter's own.
		t.first = s
	}
	t.last = max(t.last, s)
	t.add(n, end.Add(-span).UnixNano(), end.UnixNano())
	if t.alarm != nil {
		t.alarm.sources[g] = struct{}{}
	}
}

// tenant returns the tenant of that name, in the place of the one least recently active when there are too many.
func (tr *traffic) tenant(name string) *tenant {
	t := tr.tenants[name]
	if t != nil {
		return t
	}
	for range len(tr.firing) + 1 {
		if len(tr.tenants) < tr.cfg.MaxTenants {
			break
		}
		old := tr.ring.newer
		if old.alarm != nil {
			tr.touch(old) // an alert that fires is not forgotten
			continue
		}
		old.unlink()
		delete(tr.tenants, old.name)
		tr.m.Dropped.WithLabelValues(droppedTenant).Inc()
	}
	t = &tenant{name: strings.Clone(name)}
	tr.tenants[t.name] = t
	tr.touch(t)
	return t
}

// touch makes t the one most recently active.
func (tr *traffic) touch(t *tenant) {
	if tr.ring.older == t {
		return
	}
	if t.newer != nil {
		t.unlink()
	}
	t.older, t.newer = tr.ring.older, &tr.ring
	t.older.newer, tr.ring.older = t, t
}

func (t *tenant) unlink() {
	t.older.newer, t.newer.older = t.newer, t.older
}

// watch is the state of a tenant's alert, made when missing.
func (tr *traffic) watch(name string) *watch {
	t := tr.tenant(name)
	if t.alarm == nil {
		tr.raise(t)
	}
	return &t.alarm.watch
}

// recall takes what was the threshold when a fired for what is known of a tenant of which nothing is: what it does in the
// middle of a storm is not its normal.
func (tr *traffic) recall(a *schemas.Alert) {
	if t := tr.tenant(a.Tenant); t.threshold == 0 {
		t.threshold, t.normal = float32(a.Threshold), float32(a.Threshold/tr.cfg.AnomalyFactor)
		t.alarm.before = t.normal
	}
}

func (tr *traffic) raise(t *tenant) {
	t.alarm = &alarm{sources: map[*gateway]struct{}{}, before: t.normal}
	tr.firing[t] = struct{}{}
}

func (tr *traffic) lower(t *tenant) {
	t.alarm = nil
	delete(tr.firing, t)
}

func (tr *traffic) dropSource(g *gateway) {
	for t := range tr.firing {
		delete(t.alarm.sources, g)
	}
}

const second = int64(time.Second)

// add spreads n requests over the time from from to to, in nanoseconds since 1970.
func (t *tenant) add(n uint64, from, to int64) {
	newest := to / second
	t.advance(newest)
	oldest := max(from/second, t.head-window+1)
	// What came before the window is not counted; the rest is rounded so that its sum is right.
	upTo := func(at int64) uint64 {
		switch {
		case at >= to:
			return n
		case at <= from:
			return 0
		}
		return uint64(float64(n) * float64(at-from) / float64(to-from))
	}
	for s := oldest; s <= newest; s++ {
		c := &t.counts[uint64(s)%window]
		*c = uint32(min(uint64(*c)+upTo((s+1)*second)-upTo(s*second), math.MaxUint32))
	}
}

// advance makes s the newest second, if it is newer.
func (t *tenant) advance(s int64) {
	for i := max(t.head+1, s-window+1); i <= s; i++ {
		t.counts[uint64(i)%window], t.odd[uint64(i)%window] = 0, false
	}
	t.head = max(t.head, s)
}

// rate is the mean of the n full seconds before s.
func (t *tenant) rate(s, n int64) float64 {
	var sum uint64
	for i := s - n; i < s; i++ {
		sum += uint64(t.counts[uint64(i)%window])
	}
	return float64(sum) / float64(n)
}

// mark leaves those of the n seconds before s that hold more than above out of what is normal.
func (t *tenant) mark(s, n int64, above float64) {
	for i := max(s-n, t.head-window+1); i < s; i++ {
		if float64(t.counts[uint64(i)%window]) > above {
			t.odd[uint64(i)%window] = true
		}
	}
}

// ordinary appends to samples the seconds of from to to, to excluded, from which the normal is learnt: all but those that were
// out of the ordinary for longer than a burst. What borders on either end may be a part of something longer.
func (t *tenant) ordinary(samples []uint32, from, to int64) []uint32 {
	run := int64(0) // odd seconds before i
	for i := from; i < to; i++ {
		if t.odd[uint64(i)%window] {
			run++
			continue
		}
		since := i
		if run <= burst && i-run > from {
			since -= run
		}
		for k := since; k <= i; k++ {
			samples = append(samples, t.counts[uint64(k)%window])
		}
		run = 0
	}
	return samples
}

// learn works out what is normal for t from the seconds before those by which it is judged at s; with anew from what it does
// of late and nothing else, ordinary or not.
func (tr *traffic) learn(t *tenant, s int64, anew bool) {
	if t.first == 0 {
		return // nothing was heard yet
	}
	if anew {
		clear(t.odd[:])
	}
	// The first second was not a full one. While there are few, those of a minute ago are not missing: they were not.
	samples := t.ordinary(tr.scratch[:0], max(t.first+1, t.head-window+1), s-current)
	if len(samples) < minHistory {
		if t.threshold > 0 {
			t.due = s + refresh // what is known holds
		}
		return
	}
	var sum float64
	for _, n := range samples {
		sum += float64(n)
	}
	mean := sum / float64(len(samples))
	slices.Sort(samples)
	median := float64(samples[len(samples)/2])
	high := float64(samples[len(samples)*95/100])
	for i, n := range samples {
		samples[i] = uint32(math.Abs(float64(n) - median))
	}
	slices.Sort(samples)
	deviation := madScale * float64(samples[len(samples)/2])

	missed := 1.0
	if t.due > 0 {
		missed += float64((s - t.due) / refresh)
	}
	follow := 1 - math.Pow(1-max(1.0/adapt, 1/float64(t.rounds+1)), missed)
	t.rounds, t.due = t.rounds+1, s+refresh
	t.normal += float32(follow) * (float32(median) - t.normal)
	if anew {
		t.normal = float32(max(mean, median)) // whose bursts are the new level
	}
	// Bursts that come in one second of twenty are ordinary too.
	t.threshold = float32(max(tr.cfg.AnomalyFactor*float64(t.normal), median+6*deviation, 2*high, tr.cfg.AnomalyFloor))
}

// judgeTraffic judges each full second once, and tenants whose alert fires always.
func (d *Detector) judgeTraffic(now time.Time, dt time.Duration) {
	tr := d.traffic
	s := now.Unix()
	for t := range tr.firing {
		d.judgeTenant(t, s, dt)
	}
	if s <= tr.judged {
		return
	}
	tr.judged = s
	for t := tr.ring.older; t != &tr.ring && t.last >= s-calm; t = t.older {
		if t.alarm == nil {
			d.judgeTenant(t, s, dt)
		}
	}
}

func (d *Detector) judgeTenant(t *tenant, s int64, dt time.Duration) {
	tr := d.traffic
	t.advance(s)
	rate := t.rate(s, current)
	if t.alarm == nil && rate < d.cfg.AnomalyFloor {
		return
	}
	heard := t.alarm == nil || d.heard(t.alarm)
	anew := t.alarm != nil && t.alarm.stays >= settle
	switch {
	case !heard:
		t.mark(s, int64(d.cfg.Silent/time.Second), -1) // an outage is not the new normal
		t.due = max(t.due, s+1)
	case anew || s >= t.due:
		tr.learn(t, s, anew)
	}
	recent, well := t.rate(s, calm), max(clearFactor*float64(t.normal), d.cfg.AnomalyFloor)
	v := between
	switch {
	case !heard:
		v = unknown
	case t.threshold > 0 && rate > float64(t.threshold):
		v = bad
	case recent <= well:
		v = good
	}
	if t.alarm == nil {
		if v != bad {
			return
		}
		tr.raise(t)
	}
	a := t.alarm
	// The first seconds of a storm, before it was one, are part of it too; and counts may come late.
	t.mark(s, calm, well)
	switch {
	case v == good || anew:
		a.stays = 0
	case v != unknown:
		a.stays += dt
	}
	switch a.step(v, dt, 0) {
	case begins:
		d.begin(&a.watch, schemas.Alert{Name: Anomaly, Severity: schemas.SeverityWarning, Tenant: t.name, Value: rate, Threshold: float64(t.threshold),
			Summary: "tenant " + t.name + " makes " + perSecond(rate) + ", where " + perSecond(float64(t.normal)) + " is normal"})
	case ends:
		if recent > max(clearFactor*float64(a.before), d.cfg.AnomalyFloor) {
			d.resolve(&a.watch, recent, "tenant %s makes %s, which is normal now", t.name, perSecond(recent))
		} else {
			d.resolve(&a.watch, recent, "tenant %s makes %s again, where %s is normal", t.name, perSecond(recent), perSecond(float64(t.normal)))
		}
	}
	if a.firing == nil {
		tr.lower(t)
	}
}

// heard reports whether every gateway that the tenant's traffic came through is heard; every gateway there is, when that
// is not known.
func (d *Detector) heard(a *alarm) bool {
	for g := range a.sources {
		if !g.reporting(&d.cfg) {
			return false
		}
	}
	if len(a.sources) > 0 {
		return true
	}
	some := false
	for _, g := range d.gateways {
		if g.gone || g.boot == "" && g.silent.firing == nil {
			continue
		}
		if !g.reporting(&d.cfg) {
			return false
		}
		some = true
	}
	return some
}

func perSecond(rate float64) string {
	return strconv.FormatFloat(math.Round(rate*10)/10, 'f', -1, 64) + " requests per second"
}

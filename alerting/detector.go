package alerting

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/schemas"
)

// Config says what is worth waking somebody for. A zero field means its default.
type Config struct {
	LowTokens      float64       // a bucket is low under this part of its capacity (0.05) …
	LowTokensClear float64       // … and well again above this one (0.15)
	LowTokensFor   time.Duration // and has to be low for so long (10s)

	Drift      time.Duration // a clock is off by more than this, measuring error taken off (2s) …
	DriftClear time.Duration // … and well again within this (1s)

	AnomalyFactor float64 // traffic is out of the ordinary above so many times the tenant's normal (4)
	AnomalyFloor  float64 // requests per second that are never out of the ordinary (20)

	Silent   time.Duration // a gateway is silent after so long without a sign of life (10s)
	Degraded time.Duration // a gateway may be out of touch with the centre, and a part without what it needs, for so long (3s)

	Hold   time.Duration // a subject has to be well for so long before its alert is resolved; doubled when it flaps (10s)
	Forget time.Duration // a gateway silent for so long is taken to be gone for good (24h)

	MaxTenants int // whose traffic is followed; the one least recently active leaves (100000)
	MaxBuckets int // that are low at one time, or were a moment ago; more are not followed (100000)
	MaxFiring  int // alerts of one name at one time; more are only counted (1000)
}

func (c Config) withDefaults() Config {
	def(&c.LowTokens, 0.05)
	def(&c.LowTokensClear, 0.15)
	def(&c.LowTokensFor, 10*time.Second)
	def(&c.Drift, 2*time.Second)
	def(&c.DriftClear, time.Second)
	def(&c.AnomalyFactor, 4)
	def(&c.AnomalyFloor, 20)
	def(&c.Silent, 10*time.Second)
	def(&c.Degraded, 3*time.Second)
	def(&c.Hold, 10*time.Second)
	def(&c.Forget, 24*time.Hour)
	def(&c.MaxTenants, 100_000)
	def(&c.MaxBuckets, 100_000)
	def(&c.MaxFiring, 1000)
	return c
}

func def[T comparable](v *T, otherwise T) {
	var zero T
	if *v == zero {
		*v = otherwise
	}
}

const (
	// maxStep bounds what one Tick counts: while the alerter sleeps, nobody watches.
	maxStep = 2 * time.Second
	// jitter is how far the stream's clock may go back without having been set.
	jitter = time.Second
)

// Detector turns reports and heartbeats into alerts. It reads no clock and does no I/O: what it says follows from what it
// was told. All its times are the stream's. It is not safe for concurrent use.
//
// Silence is never health: what a subject's gateways do not say leaves its alerts as they are, and GatewaySilent says that
// they are not heard.
type Detector struct {
	cfg Config
	m   *Metrics

	gateways map[string]*gateway
	parts    parts
	buckets  map[bucketKey]*bucket
	traffic  *traffic
	past     map[string]past // by dedup key, of the last hour
	firing   map[string]int  // by name

	shift   time.Duration // added to the stream's time, so that it never goes back here
	ticked  time.Time     // of the last Tick, shifted
	now     time.Time     // of the Tick under way, as the stream says it
	swept   time.Time
	changes []schemas.Alert
}

// New returns a detector that knows nothing yet. m may be nil.
func New(cfg Config, m *Metrics) *Detector {
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	cfg = cfg.withDefaults()
	return &Detector{cfg: cfg, m: m,
		gateways: map[string]*gateway{},
		parts:    parts{instances: map[string]*instance{}, watches: map[string]*watch{}},
		buckets:  map[bucketKey]*bucket{},
		traffic:  newTraffic(cfg, m),
		past:     map[string]past{},
		firing:   map[string]int{},
	}
}

// Observe takes in a report that the stream stored at arrived. A report that was seen before changes nothing.
func (d *Detector) Observe(r *schemas.Report, arrived time.Time) {
	g := d.gateway(r.Gateway)
	if r.Boot == g.boot && r.Seq <= g.seq || r.Seq <= g.past[r.Boot] {
		return
	}
	left := g.left(r, &d.cfg)
	if left {
		g.remember(r.Boot, r.Seq)
	} else {
		d.alive(g, r.Boot)
		g.seq = r.Seq
	}
	g.quiet = 0
	at, late := arrived.Add(d.shift), g.late(r.SealedAt, arrived)
	for i := range r.Usage {
		u := &r.Usage[i]
		d.traffic.add(u, g, at, late, spanOf(r, u))
	}
	if g.gone || left { // its last words are counted, but it holds no tokens any more
		return
	}
	for i := range r.Tokens {
		d.observeTokens(&r.Tokens[i], g, at)
	}
}

// Heartbeat takes in a gateway's sign of life that has just come.
func (d *Detector) Heartbeat(h *schemas.Heartbeat) {
	g := d.gateway(h.Gateway)
	d.alive(g, h.Boot)
	g.heartbeat(h, &d.cfg)
}

// Learn takes in a change that is in the stream already, whoever decided it: after a restart all of them in order, later
// those of another alerter. Nothing is said again about what fires already.
func (d *Detector) Learn(a *schemas.Alert) {
	w := d.subject(a)
	switch {
	case w == nil: // an alert of somebody else's
	case a.Type == schemas.AlertFiring:
		if w.firing == nil {
			d.firing[a.Name]++
			d.past[a.DedupKey] = d.past[a.DedupKey].next(a.StartsAt)
		}
		if a.Name == Anomaly {
			d.traffic.recall(a)
		}
		known := *a
		w.firing, w.good, w.hold = &known, 0, d.past[a.DedupKey].hold(d.cfg.Hold)
	case w.firing != nil:
		d.end(w)
	}
}

// Firing reports whether the alert with that key fires, and since when.
func (d *Detector) Firing(a *schemas.Alert) (since time.Time, ok bool) {
	if w := d.subject(a); w != nil && w.firing != nil {
		return w.firing.StartsAt, true
	}
	return time.Time{}, false
}

// subject is the watch over what a is about, made when missing; nil for an alert that is not ours.
func (d *Detector) subject(a *schemas.Alert) *watch {
	switch a.Name {
	case LowTokens:
		return &d.bucket(bucketKey{a.Rule, a.Key}, a).watch
	case Anomaly:
		return d.traffic.watch(a.Tenant)
	case ClockDrift:
		return &d.gateway(a.Gateway).drift
	case GatewaySilent:
		return &d.gateway(a.Gateway).silent
	case Degraded:
		if a.Part != "" {
			return d.parts.watch(a.Part)
		}
		return &d.gateway(a.Gateway).degraded
	}
	return nil
}

// Tick judges everything at now, by the stream's clock, and returns what changed since the last Tick. It is to be called a
// few times a second, and not while reports cannot be read.
func (d *Detector) Tick(now time.Time) []schemas.Alert {
	at := now.Add(d.shift)
	if back := d.ticked.Sub(at); back > jitter { // the stream's clock was set back
		d.shift += back
	}
	at = later(at, d.ticked)
	dt := min(at.Sub(d.ticked), maxStep)
	if d.ticked.IsZero() {
		dt = 0
	}
	d.ticked, d.now, d.changes = at, now, nil

	reporting := false
	for _, g := range d.gateways {
		g.age(dt)
		reporting = reporting || g.reporting(&d.cfg)
	}
	d.judgeParts(dt)
	for _, g := range d.gateways {
		d.judgeGateway(g, dt)
	}
	for _, b := range d.buckets {
		d.judgeBucket(b, reporting, at, dt)
	}
	d.judgeTraffic(at, dt)
	d.sweep()

	for _, name := range names {
		d.m.Firing.WithLabelValues(name).Set(float64(d.firing[name]))
	}
	slices.SortStableFunc(d.changes, func(a, b schemas.Alert) int { return strings.Compare(a.DedupKey, b.DedupKey) })
	return d.changes
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// begin makes w fire as a, of which name, subject, severity, value, threshold and summary are set.
func (d *Detector) begin(w *watch, a schemas.Alert) {
	if d.firing[a.Name] >= d.cfg.MaxFiring {
		d.m.Dropped.WithLabelValues(droppedFiring).Inc()
		w.bad = 0
		return
	}
	a.Type = schemas.AlertFiring
	a.StartsAt = d.now.UTC().Truncate(time.Millisecond)
	a.DedupKey = dedupKey(&a)
	d.past[a.DedupKey] = d.past[a.DedupKey].next(d.now)
	w.firing, w.good, w.hold = &a, 0, d.past[a.DedupKey].hold(d.cfg.Hold)
	d.firing[a.Name]++
	d.changes = append(d.changes, a)
}

// resolve ends what w fires, with the value and the words that end it.
func (d *Detector) resolve(w *watch, value float64, summary string, args ...any) {
	a := *w.firing
	a.Type, a.Value, a.Summary = schemas.AlertResolved, value, fmt.Sprintf(summary, args...)
	a.EndsAt = later(d.now.UTC().Truncate(time.Millisecond), a.StartsAt)
	d.end(w)
	d.changes = append(d.changes, a)
}

func (d *Detector) end(w *watch) {
	d.firing[w.firing.Name]--
	*w = watch{}
}

// sweep forgets episodes that are too old to count as flapping.
func (d *Detector) sweep() {
	if d.ticked.Sub(d.swept) < time.Minute {
		return
	}
	d.swept = d.ticked
	for key, p := range d.past {
		if d.now.Sub(p.began) > flapWindow {
			delete(d.past, key)
		}
	}
}

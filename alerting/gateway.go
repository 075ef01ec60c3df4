package alerting

import (
	"time"

	"github.com/weirhq/weir/schemas"
)

// modeSynced is the mode of a gateway that hears the centre.
const modeSynced = "synced"

const (
	// stuckAfter is how long reports may be under way before what a gateway last said is taken for old news.
	stuckAfter = 5 * time.Second
	// tombstone is how long a gateway that stopped is remembered, for reports of it that come late.
	tombstone = time.Minute
	// driftHeartbeats in a row have to agree about a clock.
	driftHeartbeats = 2
	// lagWindow is how long reports have to come at the pace of their sealing before their delay is taken for the usual one.
	lagWindow = 10 * time.Second
	// lagReports is how many of them there have to be: between a few, reports may have been kept back.
	lagReports = 5
)

// gateway is what is known of one gateway.
type gateway struct {
	name string
	boot string
	seq  uint64            // of the last report of boot
	past map[string]uint64 // likewise, of boots before: what one of them left behind comes late

	beats   bool // it sends heartbeats
	gone    bool // stopped, or forgotten
	retired bool // and nothing is said of it any more
	mode    string
	pending uint64        // reports that it could not hand over yet
	without []string      // what it does without
	silence time.Duration // since the last sign of life
	quiet   time.Duration // since the last report
	alone   time.Duration // without the centre

	offset, offsetError time.Duration
	clockKnown          bool
	off, on             int // heartbeats in a row that say so

	lag lag

	silent, drift, degraded watch
}

func (d *Detector) gateway(name string) *gateway {
	g := d.gateways[name]
	if g == nil {
		g = &gateway{name: name}
		d.gateways[name] = g
	}
	return g
}

// alive notes a sign of life of a boot of g. With a new boot the buckets of the one before are no more.
func (d *Detector) alive(g *gateway, boot string) {
	if boot != g.boot {
		d.dropParts(g)
		if g.boot != "" {
			g.remember(g.boot, g.seq)
		}
		g.boot, g.seq, g.gone, g.retired = boot, g.past[boot], false, false
		delete(g.past, boot)
	}
	if !g.gone {
		g.silence = 0
	}
}

// maxPast bounds the boots that are remembered of a gateway.
const maxPast = 16

// remember notes the last report of a boot that is over.
func (g *gateway) remember(boot string, seq uint64) {
	if _, known := g.past[boot]; !known && len(g.past) >= maxPast {
		for any := range g.past {
			delete(g.past, any)
			break
		}
	}
	if g.past == nil {
		g.past = map[string]uint64{}
	}
	g.past[boot] = seq
}

// left says whether r is of a boot before the one that is alive: a gateway delivers what its predecessor could not.
func (g *gateway) left(r *schemas.Report, cfg *Config) bool {
	if r.Boot == g.boot {
		return false
	}
	_, known := g.past[r.Boot]
	return known || g.beats && !g.gone && g.silence < cfg.Silent
}

func (g *gateway) heartbeat(h *schemas.Heartbeat, cfg *Config) {
	g.beats, g.mode, g.pending, g.without = true, h.Mode, h.PendingReports, h.Without
	g.gone = g.gone || h.Mode == schemas.ModeStopped
	g.clockKnown, g.offset, g.offsetError = h.ClockKnown, h.ClockOffset, h.ClockError
	if !h.ClockKnown {
		return
	}
	switch {
	case h.ClockOffset.Abs()-h.ClockError > cfg.Drift:
		g.off, g.on = g.off+1, 0
	case h.ClockOffset.Abs() <= cfg.DriftClear && h.ClockError <= cfg.DriftClear:
		g.off, g.on = 0, g.on+1
	default:
		g.off, g.on = 0, 0
	}
}

func (g *gateway) age(dt time.Duration) {
	g.silence += dt
	g.quiet += dt
}

// reporting says whether what g last told is how things are.
func (g *gateway) reporting(cfg *Config) bool {
	return !g.gone && g.boot != "" && g.silence < cfg.Silent && (g.pending == 0 || g.quiet < stuckAfter)
}

// judgeGateway is where a gateway's own alerts change.
func (d *Detector) judgeGateway(g *gateway, dt time.Duration) {
	if g.gone || g.silence >= d.cfg.Forget {
		if !g.retired {
			d.retire(g)
		}
		if g.silence >= tombstone {
			delete(d.gateways, g.name)
		}
		return
	}
	heard := g.beats && g.silence < d.cfg.Silent

	v := unknown
	switch {
	case heard:
		v = good
	case g.beats && d.parts.settle == 0:
		v = bad
	}
	switch g.silent.step(v, dt, 0) {
	case begins:
		d.begin(&g.silent, schemas.Alert{Name: GatewaySilent, Severity: schemas.SeverityCritical, Gateway: g.name,
			Value: g.silence.Seconds(), Threshold: d.cfg.Silent.Seconds(),
			Summary: "gateway " + g.name + " is not heard of: it may be down, or cut off and throttling alone"})
	case ends:
		d.resolve(&g.silent, g.silence.Seconds(), "gateway %s is heard again", g.name)
	}

	v = unknown
	switch {
	case !heard || d.parts.settle > 0:
	case g.mode == modeSynced:
		v, g.alone = good, 0
	case g.mode != "":
		v, g.alone = bad, g.alone+dt
	}
	raise := d.cfg.Degraded
	if d.parts.grace > 0 {
		raise += begun
	}
	switch g.degraded.step(v, dt, raise) {
	case begins:
		d.begin(&g.degraded, schemas.Alert{Name: Degraded, Severity: schemas.SeverityWarning, Gateway: g.name,
			Value: g.alone.Seconds(), Threshold: d.cfg.Degraded.Seconds(),
			Summary: "gateway " + g.name + " throttles without the centre, mode " + g.mode})
	case ends:
		d.resolve(&g.degraded, 0, "gateway %s throttles with the centre again", g.name)
	}

	v = unknown
	switch {
	case !heard || !g.clockKnown:
	case g.off >= driftHeartbeats:
		v = bad
	case g.on >= driftHeartbeats:
		v = good
	default:
		v = between
	}
	switch g.drift.step(v, dt, 0) {
	case begins:
		d.begin(&g.drift, schemas.Alert{Name: ClockDrift, Severity: schemas.SeverityWarning, Gateway: g.name,
			Value: g.offset.Seconds(), Threshold: d.cfg.Drift.Seconds(), Summary: "the clock of gateway " + g.name + " is " + ahead(g.offset)})
	case ends:
		d.resolve(&g.drift, g.offset.Seconds(), "the clock of gateway %s is right again", g.name)
	}
}

// ahead words an offset, which is the centre's clock less the gateway's.
func ahead(offset time.Duration) string {
	if offset < 0 {
		return (-offset).Round(time.Millisecond).String() + " ahead"
	}
	return offset.Round(time.Millisecond).String() + " behind"
}

// retire ends all that is said of a gateway that is gone.
func (d *Detector) retire(g *gateway) {
	why := "gateway %s was stopped"
	if !g.gone {
		why = "gateway %s was not heard of for " + d.cfg.Forget.String() + " and is taken to be gone"
	}
	g.gone, g.retired = true, true
	for _, w := range []*watch{&g.silent, &g.drift, &g.degraded} {
		if w.firing != nil {
			d.resolve(w, w.firing.Value, why, g.name)
		}
	}
	d.dropParts(g)
	d.traffic.dropSource(g)
}

// dropParts takes what g held out of every bucket.
func (d *Detector) dropParts(g *gateway) {
	for _, b := range d.buckets {
		b.drop(g)
	}
}

// lag measures how much later than usual a gateway's reports come, without trusting any clock: arrival less sealing is the
// difference of two clocks plus the delay. Reports that were kept back come faster than they were sealed, until they have
// caught up. Where that difference is large and stays, a clock is off, and it is the usual one from then on. A gateway's boots
// have one lag: what a predecessor left behind is as late as it is.
type lag struct {
	usual time.Duration
	n     int           // reports in this window
	since time.Time     // of this window
	first time.Duration // of this window
	least time.Duration // in this window
	known bool
}

// late is how much later than usual a report came that was sealed at sealed. It is more than a moment when a gateway
// hands over what it kept while it was cut off.
func (g *gateway) late(sealed, arrived time.Time) time.Duration {
	if sealed.IsZero() {
		return 0
	}
	took, l := arrived.Sub(sealed), &g.lag
	switch {
	case !l.known:
		*l = lag{usual: min(took, time.Second), since: arrived, first: took, least: took, known: true}
	case arrived.Sub(l.since).Abs() > lagWindow:
		if l.n >= lagReports && l.least > l.first-time.Second {
			l.usual = l.least
		}
		l.since, l.first, l.least, l.n = arrived, took, took, 0
	}
	l.n++
	l.least, l.usual = min(l.least, took), min(l.usual, took)
	if d := took - l.usual; d > time.Second {
		return d
	}
	return 0
}

package alerting

import (
	"slices"
	"time"

	"github.com/weirhq/weir/schemas"
)

// What a Degraded alert can be about besides a gateway, the parts of schemas and what those do without.
const (
	PartNATS     = "nats"     // the alerter itself does without it
	PartIngest   = "ingest"   // reports of gateways do not get into their stream
	PartConsumer = "consumer" // an aggregator does not get on, and has all its servers
)

const (
	// lateAfter is the silence after which a part that speaks four times a second is missing.
	lateAfter = 750 * time.Millisecond
	// begun is how much longer gateways may be alone once an aggregator was shut down or has just begun.
	begun = 10 * time.Second
	// waitsAfter without a report, a gateway that has some cannot hand them over. It may be so for waitsFor.
	waitsAfter, waitsFor = time.Second, 2 * time.Second
	// settled is how much longer than NATS itself what its absence explains may look bad once it answers again.
	settled = time.Second
	// alerterSooner is how much sooner a missing alerter is an alert than others.
	alerterSooner = time.Second
	// maxInstances bounds the processes that are followed.
	maxInstances = 1000
)

// instance is one process of a part.
type instance struct {
	part    string
	without []string
	fresh   bool          // heard since the last look
	silence time.Duration // at the last look
}

// parts is what is known of all that is no gateway.
type parts struct {
	instances map[string]*instance // by boot
	watches   map[string]*watch    // by what is missing
	grace     time.Duration        // in which gateways may be alone: a centre comes or has said goodbye
	deaf      bool                 // since the last look
	settle    time.Duration        // in which what the absence of NATS explains is not judged
}

// Deaf says that NATS does not answer whoever looks here, before each Tick for as long as that is so. What its absence explains is not
// judged then, nor for a second after: gateways and processes that are silent, gateways that are alone, reports and readers that do not get
// on. What is heard first when it is back was said meanwhile.
func (d *Detector) Deaf() { d.parts.deaf = true }

// explained are the parts that the absence of NATS explains.
var explained = []string{PartNATS, PartIngest, PartConsumer, schemas.PartAggregator, schemas.PartAlerter}

// Health takes in a sign of life that has just come.
func (d *Detector) Health(h *schemas.Health) {
	p := &d.parts
	in := p.instances[h.Boot]
	if h.Part == schemas.PartAggregator && (h.Stopped || in == nil) {
		p.grace = begun
	}
	switch {
	case h.Stopped:
		delete(p.instances, h.Boot)
		return
	case in == nil && len(p.instances) >= maxInstances:
		return
	case in == nil:
		p.replace(h.Part)
		in = &instance{part: h.Part}
		p.instances[h.Boot] = in
	}
	in.fresh, in.without = true, h.Without
}

// replace forgets the one that is missing for longest, in whose place another has begun.
func (p *parts) replace(part string) {
	longest, silence := "", lateAfter
	for boot, in := range p.instances {
		if in.part == part && !in.fresh && in.silence >= silence {
			longest, silence = boot, in.silence
		}
	}
	delete(p.instances, longest)
}

// watch is the state of the alert about a part, made when missing.
func (p *parts) watch(name string) *watch {
	w := p.watches[name]
	if w == nil {
		w = &watch{}
		p.watches[name] = w
	}
	return w
}

// age lets time pass.
func (p *parts) age(dt, forget time.Duration) {
	p.grace, p.settle = max(p.grace-dt, 0), max(p.settle-dt, 0)
	if p.deaf {
		p.settle, p.deaf = settled, false
	}
	for boot, in := range p.instances {
		if in.silence += dt; in.fresh {
			in.silence, in.fresh = 0, false
		}
		if in.silence >= forget {
			delete(p.instances, boot)
		}
	}
}

// judgeParts is where alerts about parts change.
func (d *Detector) judgeParts(dt time.Duration) {
	p := &d.parts
	p.age(dt, d.cfg.Forget)
	live, missing, without := map[string]int{}, map[string]int{}, map[string]bool{}
	for _, in := range p.instances {
		if in.silence >= lateAfter {
			missing[in.part]++
			continue
		}
		live[in.part]++
		for _, name := range in.without {
			without[name] = true
			p.watch(name)
		}
	}
	if missing[schemas.PartAlerter] > 0 && live[schemas.PartAlerter] == 0 { // who looks is one, and does not hear itself: nobody is heard here
		clear(missing)
	}
	for _, part := range []string{schemas.PartAggregator, schemas.PartAlerter} {
		if missing[part] > 0 {
			p.watch(part)
		}
		if d.m.Missing != nil {
			d.m.Missing(part).Set(float64(missing[part]))
		}
	}
	waits, maybeWaits := d.first(func(g *gateway) bool { return g.pending > 0 && g.quiet >= waitsAfter })
	if waits != "" {
		p.watch(PartIngest)
	}
	spoolless, maybeSpoolless := d.first(func(g *gateway) bool { return slices.Contains(g.without, schemas.WithoutSpool) })
	if spoolless != "" {
		p.watch(schemas.WithoutSpool)
	}
	for name, w := range p.watches {
		v, raise, severity, summary := good, d.cfg.Degraded, schemas.SeverityWarning, ""
		switch name {
		case PartNATS: // who looks here has it
		case PartIngest:
			raise, severity, summary = waitsFor, schemas.SeverityCritical, "reports of gateway "+waits+" do not get into the stream: they wait there"
			v = judge(waits != "", maybeWaits)
		case schemas.WithoutSpool:
			severity, summary = schemas.SeverityCritical, "the spool of gateway "+spoolless+" is full, cannot be written, was deleted in use, or holds files of a newer weir: its log says which"
			v = judge(spoolless != "", maybeSpoolless)
		case schemas.PartAggregator, schemas.PartAlerter:
			if name == schemas.PartAlerter { // it may have this very alert in its hand
				raise -= alerterSooner
			}
			summary = "one " + name + " is not heard of, and there is another"
			if live[name] == 0 {
				severity, summary = schemas.SeverityCritical, "no "+name+" is heard of"
			}
			v = judge(missing[name] > 0, live[name] == 0)
		default: // what the aggregator needs
			summary = "the aggregator does without " + name
			v = judge(without[name], live[schemas.PartAggregator] == 0)
		}
		if p.settle > 0 && slices.Contains(explained, name) {
			v = unknown
		}
		switch w.step(v, dt, raise) {
		case begins:
			d.begin(w, schemas.Alert{Name: Degraded, Severity: severity, Part: name, Value: raise.Seconds(), Threshold: raise.Seconds(), Summary: summary})
		case ends:
			d.resolve(w, 0, "%s is there again", name)
		}
		if w.idle() && v != bad {
			delete(p.watches, name)
		}
	}
}

// judge is the verdict on something that is bad, or may be without being seen.
func judge(is, unsure bool) verdict {
	switch {
	case is:
		return bad
	case unsure:
		return unknown
	}
	return good
}

// first names a gateway of which it is true, "" when there is none, and says whether it was true of one that is not heard of.
func (d *Detector) first(is func(*gateway) bool) (name string, unsure bool) {
	for _, g := range d.gateways {
		switch {
		case !g.beats || g.gone || !is(g):
		case g.silence >= d.cfg.Silent:
			unsure = true
		case name == "" || g.name < name:
			name = g.name
		}
	}
	return name, unsure
}

// Away is the alert about a NATS that the alerter has done without since then, and may for so long.
func Away(since time.Time, after time.Duration) *schemas.Alert {
	a := &schemas.Alert{Type: schemas.AlertFiring, Name: Degraded, Severity: schemas.SeverityCritical, Part: PartNATS,
		Value: after.Seconds(), Threshold: after.Seconds(), StartsAt: since.UTC().Truncate(time.Millisecond),
		Summary: "NATS does not answer the alerter: gateways may be throttling alone, and reports wait"}
	a.DedupKey = dedupKey(a)
	return a
}

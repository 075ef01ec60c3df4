package alerting

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/schemas"
)

// process is an aggregator or an alerter that speaks ten times a second.
type process struct {
	part, boot string
	without    []string
	quiet      bool
}

func (w *world) parts(ps ...*process) func() {
	return func() {
		for _, p := range ps {
			if !p.quiet {
				w.d.Health(&schemas.Health{Part: p.part, Boot: p.boot, Without: p.without})
			}
		}
	}
}

// theOne is the only alert that was said.
func (w *world) theOne(said []schemas.Alert, typ, key string) schemas.Alert {
	w.t.Helper()
	if len(said) != 1 || said[0].Type != typ || said[0].DedupKey != key {
		w.t.Fatalf("said %+v, want one %s of %s", said, typ, key)
	}
	return said[0]
}

func TestServersThatTheAggregatorDoesWithout(t *testing.T) {
	w := newWorld(t, Config{})
	a := &process{part: schemas.PartAggregator, boot: "a1"}
	each := w.parts(a, &process{part: schemas.PartAlerter, boot: "w1"})
	w.want(w.run(time.Minute, each), "")
	for range 5 { // a hiccup pages nobody
		a.without = []string{"redis", "clickhouse"}
		w.want(w.run(time.Second, each), "")
		a.without = nil
		w.want(w.run(3*time.Second, each), "")
	}
	a.without = []string{"redis"}
	if got := w.theOne(w.run(4*time.Second, each), schemas.AlertFiring, "degraded/part/redis"); got.Part != "redis" || got.Summary != "the aggregator does without redis" {
		t.Errorf("said %+v", got)
	}
	a.without = []string{"redis", "clickhouse"}
	w.theOne(w.run(4*time.Second, each), schemas.AlertFiring, "degraded/part/clickhouse")
	a.quiet = true // silence is not health
	w.theOne(w.run(time.Minute, each), schemas.AlertFiring, "degraded/part/aggregator")
	a.quiet, a.without = false, nil
	if said := w.run(time.Minute, each); told(said) != "-degraded -degraded -degraded" {
		t.Errorf("said %+v", said)
	}
	if len(w.d.parts.watches) != 0 {
		t.Errorf("remembered: %v", w.d.parts.watches)
	}
}

func TestProcessesThatAreMissing(t *testing.T) {
	missing := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "missing"}, []string{"part"})
	two := func(t *testing.T) (w *world, a, b *process) {
		w = newWorld(t, Config{})
		w.m.Missing = func(part string) prometheus.Gauge { return missing.WithLabelValues(part) }
		a, b = &process{part: schemas.PartAlerter, boot: "a"}, &process{part: schemas.PartAlerter, boot: "b"}
		w.want(w.run(time.Minute, w.parts(a, b)), "")
		return w, a, b
	}
	shows := func(n float64) {
		t.Helper()
		if got := testutil.ToFloat64(missing.WithLabelValues(schemas.PartAlerter)); got != n {
			t.Errorf("%v are shown as missing, want %v", got, n)
		}
	}
	t.Run("one dies, and another comes in its place", func(t *testing.T) {
		w, a, b := two(t)
		a.quiet = true
		w.want(w.run(time.Second, w.parts(a, b)), "")
		shows(1)
		if got := w.theOne(w.run(3*time.Second, w.parts(a, b)), schemas.AlertFiring, "degraded/part/alerter"); got.Severity != schemas.SeverityWarning {
			t.Errorf("said %+v", got)
		}
		w.theOne(w.run(time.Minute, w.parts(b, &process{part: schemas.PartAlerter, boot: "c"})), schemas.AlertResolved, "degraded/part/alerter")
		shows(0)
	})
	t.Run("one hangs and goes on", func(t *testing.T) {
		w, a, b := two(t)
		a.quiet = true
		w.want(w.run(10*time.Second, w.parts(a, b)), "+degraded")
		a.quiet = false
		w.want(w.run(time.Minute, w.parts(a, b)), "-degraded")
	})
	t.Run("one is shut down", func(t *testing.T) {
		w, a, b := two(t)
		a.quiet = true
		w.d.Health(&schemas.Health{Part: a.part, Boot: a.boot, Stopped: true})
		w.want(w.run(time.Hour, w.parts(a, b)), "")
		shows(0)
	})
	t.Run("whoever watched was away", func(t *testing.T) {
		w, a, b := two(t)
		w.now = w.now.Add(time.Hour)
		w.want(w.run(time.Minute, w.parts(a, b)), "")
	})
	t.Run("nobody was ever there", func(t *testing.T) {
		w := newWorld(t, Config{})
		w.want(w.run(time.Hour, nil), "")
	})
}

// An aggregator that is shut down, or that is new and learns, leaves its gateways alone for longer than one that is gone.
func TestARestartOfTheCentreIsNoOutage(t *testing.T) {
	w := newWorld(t, Config{}, "g1")
	g, a := w.gateways[0], &process{part: schemas.PartAggregator, boot: "a1"}
	w.want(w.run(time.Minute, w.parts(a)), "")
	w.d.Health(&schemas.Health{Part: a.part, Boot: a.boot, Stopped: true})
	g.mode = "stale"
	w.want(w.run(8*time.Second, nil), "")
	a.boot = "a2"
	w.want(w.run(4*time.Second, w.parts(a)), "")
	g.mode = modeSynced
	w.want(w.run(time.Minute, w.parts(a)), "")
	g.mode = "isolated"
	w.want(w.run(5*time.Second, w.parts(a)), "+degraded")
}

func TestReportsThatDoNotGetIntoTheStream(t *testing.T) {
	w := newWorld(t, Config{}, "g1", "g2")
	g := w.gateways[0]
	both := func() { w.requests(g, "acme", 1); w.requests(w.gateways[1], "acme", 1) }
	w.want(w.run(time.Minute, both), "")
	g.pending = 3 // under way, as others are
	w.want(w.run(time.Minute, both), "")
	other := func() { w.requests(w.gateways[1], "acme", 1) }
	w.theOne(w.run(4*time.Second, other), schemas.AlertFiring, "degraded/part/ingest")
	g.down = true
	w.want(w.run(time.Minute, other), "+gateway-silent")
	g.down, g.pending = false, 0
	w.want(w.run(time.Minute, both), "-degraded -gateway-silent")
	g.pending = 1 // of one that has few, each heartbeat may find one on its way
	w.want(w.run(time.Second, other), "")
	g.pending = 0
	w.want(w.run(time.Minute, other), "")
}

func TestAGatewayThatCannotKeepUsageOnDisk(t *testing.T) {
	w := newWorld(t, Config{}, "g1", "g2")
	g := w.gateways[1]
	w.want(w.run(time.Minute, nil), "")
	g.without = []string{"something else"}
	w.want(w.run(time.Minute, nil), "")
	g.without = []string{schemas.WithoutSpool}
	w.want(w.run(2*time.Second, nil), "")
	w.theOne(w.run(3*time.Second, nil), schemas.AlertFiring, "degraded/part/spool")
	g.down = true // nobody knows
	w.want(w.run(time.Minute, nil), "+gateway-silent")
	g.down, g.without = false, nil
	w.want(w.run(time.Minute, nil), "-degraded -gateway-silent")
}

// While NATS is away, and when it has just come back, nothing begins that this explains: gateways say late how alone they were. What
// outlives it is told all the same.
func TestWhatTheAbsenceOfNATSExplains(t *testing.T) {
	const promised = 5*time.Second + 2*time.Second // after the return
	for _, c := range []struct {
		name     string
		noticed  time.Duration // until it is known to be away
		watched  time.Duration // until the stream cannot be asked either, and nobody judges
		outage   time.Duration // after that
		recovers bool
		want     string
	}{
		{"it hangs, and all recover", 700 * time.Millisecond, 4 * time.Second, 20 * time.Second, true, ""},
		{"it dies, and all recover", 0, 0, 20 * time.Second, true, ""},
		{"it is slow, and all recover", 700 * time.Millisecond, 20 * time.Second, 0, true, ""},
		{"nothing recovers", 700 * time.Millisecond, 4 * time.Second, 20 * time.Second, false, "degraded/g1 degraded/g2 degraded/part/consumer degraded/part/ingest"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, Config{}, "g1", "g2")
			missing := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "missing"}, []string{"part"})
			w.m.Missing = func(part string) prometheus.Gauge { return missing.WithLabelValues(part) }
			a, self := &process{part: schemas.PartAggregator, boot: "a1"}, &process{part: schemas.PartAlerter, boot: "w1"}
			signs := w.parts(a, self)
			reports := func() { w.requests(w.gateways[0], "acme", 1); w.requests(w.gateways[1], "acme", 1) }
			w.want(w.run(time.Minute, func() { signs(); reports() }), "")

			for _, g := range w.gateways {
				g.down, g.mode, g.pending = true, "isolated", 7
			}
			a.without = []string{PartConsumer}
			w.want(w.run(c.noticed, nil), "")
			w.want(w.run(c.watched-c.noticed, w.d.Deaf), "")
			for _, part := range []string{schemas.PartAggregator, schemas.PartAlerter} {
				if n := testutil.ToFloat64(missing.WithLabelValues(part)); n != 0 {
					t.Errorf("%v of %s are shown as missing by one that does not hear itself", n, part)
				}
			}
			w.d.Deaf()
			w.now = w.now.Add(c.outage)

			for _, g := range w.gateways {
				g.down = false
				w.d.Heartbeat(&schemas.Heartbeat{Gateway: g.name, Boot: "boot1", SentAt: w.now, Mode: g.mode, PendingReports: g.pending})
			}
			w.want(w.run(time.Second, func() { signs(); w.d.Deaf() }), "") // it has to answer for a second
			w.want(w.run(1500*time.Millisecond, signs), "")
			if c.recovers {
				for _, g := range w.gateways {
					g.mode, g.pending = modeSynced, 0
				}
				a.without = nil
				w.want(w.run(time.Minute, func() { signs(); reports() }), "")
				return
			}
			var keys []string
			for _, s := range w.run(promised-2500*time.Millisecond, signs) {
				if s.Type == schemas.AlertFiring {
					keys = append(keys, s.DedupKey)
				}
			}
			slices.Sort(keys)
			if got := strings.Join(keys, " "); got != c.want {
				t.Errorf("%s after the return %q fire, want %q", promised, got, c.want)
			}
		})
	}
}

// What fires when NATS goes away stays so, whatever is heard late, until it has been well for as long as otherwise.
func TestTheAbsenceOfNATSResolvesNothing(t *testing.T) {
	w := newWorld(t, Config{}, "g1")
	g := w.gateways[0]
	w.run(time.Minute, nil)
	g.mode = "isolated"
	w.want(w.run(10*time.Second, nil), "+degraded")
	g.mode = modeSynced
	w.want(w.run(time.Minute, w.d.Deaf), "")
	w.want(w.run(10*time.Second, nil), "")
	w.want(w.run(2*time.Second, nil), "-degraded")
}

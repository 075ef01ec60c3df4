package alerting

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/schemas"
)

// world is gateways and a detector on one simulated clock. Every step is a tenth of a second; each gateway that is up beats
// once a second.
type world struct {
	t        *testing.T
	d        *Detector
	m        *Metrics
	now      time.Time
	steps    int
	skew     time.Duration // what the stream's clock says beyond now
	gateways []*testGateway
	said     []schemas.Alert
}

type testGateway struct {
	name    string
	boot    int
	seq     uint64
	down    bool
	mode    string
	pending uint64
	without []string
	clock   func(*schemas.Heartbeat) // sets the clock's fields
}

func newWorld(t *testing.T, cfg Config, gateways ...string) *world {
	w := &world{t: t, m: NewMetrics(prometheus.NewRegistry()), now: time.Date(2026, 11, 29, 10, 0, 0, 0, time.UTC)}
	w.d = New(cfg, w.m)
	for _, name := range gateways {
		w.gateways = append(w.gateways, &testGateway{name: name, boot: 1, mode: modeSynced})
	}
	return w
}

func (w *world) stream() time.Time { return w.now.Add(w.skew) }

// report sends what r holds, sealed now.
func (w *world) report(g *testGateway, r schemas.Report) {
	g.seq++
	r.Gateway, r.Boot, r.Seq = g.name, fmt.Sprint("boot", g.boot), g.seq
	if r.SealedAt.IsZero() {
		r.SealedAt = w.now
	}
	for i := range r.Usage {
		if r.Usage[i].Time.IsZero() {
			r.Usage[i].Time = r.SealedAt.Add(-step)
		}
	}
	w.d.Observe(&r, w.stream())
}

const step = 100 * time.Millisecond

// run lets d pass. each is called every tenth of a second, before the detector judges.
func (w *world) run(d time.Duration, each func()) []schemas.Alert {
	w.t.Helper()
	before := len(w.said)
	for range d / step {
		w.now = w.now.Add(step)
		w.steps++
		for _, g := range w.gateways {
			if g.down || w.steps%10 != 0 {
				continue
			}
			h := schemas.Heartbeat{Gateway: g.name, Boot: fmt.Sprint("boot", g.boot), SentAt: w.now, Mode: g.mode, PendingReports: g.pending, Without: g.without}
			if g.clock != nil {
				g.clock(&h)
			}
			w.d.Heartbeat(&h)
		}
		if each != nil {
			each()
		}
		w.said = append(w.said, w.d.Tick(w.stream())...)
	}
	return w.said[before:]
}

// level has every gateway of gs report a bucket of 100 with that many tokens left.
func (w *world) level(tokens int64, gs ...*testGateway) func() {
	return func() {
		for _, g := range gs {
			w.report(g, schemas.Report{Tokens: []schemas.Tokens{bucketAt(tokens)}})
		}
	}
}

func bucketAt(tokens int64) schemas.Tokens {
	return schemas.Tokens{Rule: "contract", Layer: "contract", Key: "acme", Tenant: "acme", Mode: "enforce", RateNanos: 1e9, Capacity: 100,
		LimitRateNanos: 1e9, LimitBurst: 100, TokensLast: tokens}
}

// requests has g report n requests of a tenant in this tenth of a second.
func (w *world) requests(g *testGateway, tenant string, n int) {
	if n > 0 {
		w.report(g, schemas.Report{Usage: []schemas.Usage{{Tenant: tenant, Route: "r", Allowed: uint64(n)}}})
	}
}

// traffic has g report that many requests per second of a tenant, in each tenth of a second.
func (w *world) traffic(g *testGateway, tenant string, perSecond int) func() {
	carry := 0
	return func() {
		carry += perSecond
		w.requests(g, tenant, carry/10)
		carry %= 10
	}
}

// told is what was said, one word each, like +anomaly or -anomaly.
func told(all []schemas.Alert) string {
	var words []string
	for _, a := range all {
		sign := "+"
		if a.Type == schemas.AlertResolved {
			sign = "-"
		}
		words = append(words, sign+a.Name)
	}
	return strings.Join(words, " ")
}

func (w *world) want(all []schemas.Alert, want string) {
	w.t.Helper()
	if got := told(all); got != want {
		w.t.Fatalf("%s: said %q, want %q\n%+v", w.now.Format("15:04:05.0"), got, want, all)
	}
}

func TestLowTokens(t *testing.T) {
	w := newWorld(t, Config{}, "g1")
	g := w.gateways[0]
	w.want(w.run(time.Minute, w.level(60, g)), "")
	w.want(w.run(9900*time.Millisecond, w.level(4, g)), "")
	said := w.run(2*step, w.level(4, g))
	w.want(said, "+low-tokens")
	a := said[0]
	if a.Severity != schemas.SeverityWarning || a.DedupKey != "low-tokens/contract/acme" || a.Tenant != "acme" || a.Rule != "contract" || a.Key != "acme" ||
		a.Value != 0.04 || a.Threshold != 0.05 || a.Summary != "acme under rule contract has 4 % of its tokens left" || !a.EndsAt.IsZero() {
		t.Errorf("said %+v", a)
	}
	if got := testutil.ToFloat64(w.m.Firing.WithLabelValues(LowTokens)); got != 1 {
		t.Errorf("weir_alerts_firing{alert=low-tokens} = %v, want 1", got)
	}
	w.want(w.run(time.Minute, w.level(10, g)), "") // neither low nor well
	w.want(w.run(9*time.Second, w.level(16, g)), "")
	w.want(w.run(time.Second, w.level(14, g)), "") // not well for 10 s on end
	w.want(w.run(9*time.Second, w.level(16, g)), "")
	w.want(w.run(step, w.level(4, g)), "")
	w.want(w.run(9900*time.Millisecond, w.level(16, g)), "")
	said = w.run(2*step, w.level(16, g))
	w.want(said, "-low-tokens")
	if b := said[0]; b.StartsAt != a.StartsAt || b.DedupKey != a.DedupKey || !b.EndsAt.Equal(w.now.Add(-step)) || b.Value != 0.16 {
		t.Errorf("said %+v", b)
	}
	if got := testutil.ToFloat64(w.m.Firing.WithLabelValues(LowTokens)); got != 0 {
		t.Errorf("weir_alerts_firing{alert=low-tokens} = %v, want 0", got)
	}
	if len(w.d.buckets) != 0 {
		t.Errorf("%d buckets kept, want none that is well", len(w.d.buckets))
	}
}

func TestLowTokensWhoseAndWhat(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*schemas.Tokens)
		want   string
	}{
		"guard":                  {func(b *schemas.Tokens) { b.Rule, b.Layer, b.Key, b.Tenant = "guard", "guard", "", "" }, "+low-tokens"},
		"route":                  {func(b *schemas.Tokens) { b.Layer = "route" }, "+low-tokens"},
		"in debt":                {func(b *schemas.Tokens) { b.TokensLast = -50 }, "+low-tokens"},
		"shadow":                 {func(b *schemas.Tokens) { b.Mode = "shadow" }, ""},
		"another layer":          {func(b *schemas.Tokens) { b.Layer = "quota" }, ""},
		"denied":                 {func(b *schemas.Tokens) { b.RateNanos, b.Capacity, b.LimitRateNanos, b.LimitBurst = 0, 0, 0, 0 }, ""},
		"rate of nothing":        {func(b *schemas.Tokens) { b.LimitRateNanos = 0 }, ""},
		"unlimited":              {func(b *schemas.Tokens) { b.RateNanos, b.LimitRateNanos = -1, -1 }, ""},
		"no share at this place": {func(b *schemas.Tokens) { b.Capacity = 0 }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Config{}, "g1")
			b := bucketAt(0)
			c.change(&b)
			said := w.run(20*time.Second, func() { w.report(w.gateways[0], schemas.Report{Tokens: []schemas.Tokens{b}}) })
			w.want(said, c.want)
			if name == "guard" && (said[0].Severity != schemas.SeverityCritical || said[0].DedupKey != "low-tokens/guard/") {
				t.Errorf("said %+v, want it critical", said[0])
			}
		})
	}
}

// A bucket is one over all gateways that are heard.
func TestLowTokensOverTheFleet(t *testing.T) {
	w := newWorld(t, Config{}, "g1", "g2", "g3")
	g1, g2, g3 := w.gateways[0], w.gateways[1], w.gateways[2]
	w.want(w.run(time.Minute, func() { w.level(0, g1, g2)(); w.level(40, g3)() }), "") // 13 %
	w.want(w.run(time.Minute, w.level(0, g1, g2, g3)), "+low-tokens")
	w.want(w.run(time.Minute, func() { w.level(0, g1, g2)(); w.level(100, g3)() }), "-low-tokens")
	w.want(w.run(30*time.Second, w.level(0, g1, g2, g3)), "+low-tokens")
	// What a dead gateway had does not count; the others decide.
	g3.down = true
	w.want(w.run(30*time.Second, w.level(0, g1, g2)), "+gateway-silent")
	w.want(w.run(30*time.Second, w.level(90, g1, g2)), "-low-tokens")
}

// low and well are the two sides of the condition of B045.
func TestB045Flapping(t *testing.T) {
	t.Run("three episodes of five minutes", func(t *testing.T) {
		w := newWorld(t, Config{LowTokensFor: time.Minute}, "g1")
		g := w.gateways[0]
		for range 3 {
			w.run(5*time.Minute, w.level(2, g))
			w.run(5*time.Minute, w.level(80, g))
		}
		w.want(w.said, "+low-tokens -low-tokens +low-tokens -low-tokens +low-tokens -low-tokens")
		ids := map[string]bool{}
		for i := range w.said {
			ids[MessageID(&w.said[i])] = true
		}
		if len(ids) != 6 {
			t.Errorf("%d ids of 6 changes", len(ids))
		}
	})
	t.Run("toggling every 10 s for 10 min", func(t *testing.T) {
		w := newWorld(t, Config{LowTokensFor: time.Minute}, "g1")
		g := w.gateways[0]
		for range 30 {
			w.run(10*time.Second, w.level(2, g))
			w.run(10*time.Second, w.level(80, g))
		}
		if n := strings.Count(told(w.said), "+"); n < 1 || n > 3 {
			t.Errorf("%d firing messages, want 1 to 3: %s", n, told(w.said))
		}
	})
	t.Run("at most 16 an hour, whatever the pace", func(t *testing.T) {
		for _, pace := range []time.Duration{11 * time.Second, 15 * time.Second, 30 * time.Second, 45 * time.Second, 100 * time.Second, 3 * time.Minute} {
			w := newWorld(t, Config{LowTokensFor: time.Second}, "g1")
			g := w.gateways[0]
			for w.steps < 36_000 {
				w.run(2*time.Second, w.level(2, g))
				w.run(pace, w.level(80, g))
			}
			if n := strings.Count(told(w.said), "+"); n < 1 || n > 16 {
				t.Errorf("every %s: %d firing messages in an hour, want 1 to 16", pace, n)
			}
		}
	})
}

func TestB046SilenceIsNotHealth(t *testing.T) {
	low := func(t *testing.T) (*world, *testGateway) {
		w := newWorld(t, Config{}, "g1")
		w.want(w.run(time.Minute, w.level(2, w.gateways[0])), "+low-tokens")
		return w, w.gateways[0]
	}
	t.Run("the gateway is cut off for 10 min", func(t *testing.T) {
		w, g := low(t)
		g.down = true
		w.want(w.run(10*time.Minute, nil), "+gateway-silent")
		g.down = false
		w.want(w.run(10*time.Minute, w.level(2, g)), "-gateway-silent")
	})
	t.Run("the gateway is started anew", func(t *testing.T) {
		w, g := low(t)
		g.down = true
		w.want(w.run(10*time.Minute, nil), "+gateway-silent")
		g.down, g.boot, g.seq = false, 2, 0
		w.want(w.run(3*time.Second, nil), "")
		w.want(w.run(10*time.Minute, w.level(2, g)), "-gateway-silent")
	})
	t.Run("the gateway is started anew, and the tenant is gone", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		g, b := w.gateways[0], bucketAt(0)
		b.RateNanos = 1 // a token in 30 years
		w.want(w.run(time.Minute, func() { w.report(g, schemas.Report{Tokens: []schemas.Tokens{b}}) }), "+low-tokens")
		w.want(w.run(10*time.Minute, nil), "")
		g.boot, g.seq = 2, 0 // its buckets are full
		w.want(w.run(time.Minute, nil), "-low-tokens")
	})
	t.Run("its reports are stuck for 10 min", func(t *testing.T) {
		w, g := low(t)
		g.pending = 17
		w.want(w.run(10*time.Minute, nil), "+degraded")
		g.pending = 0
		w.want(w.run(10*time.Minute, w.level(2, g)), "-degraded")
	})
	t.Run("the alerter itself hears nothing for 10 min", func(t *testing.T) {
		w, g := low(t)
		w.now = w.now.Add(10 * time.Minute)
		w.want(w.run(10*time.Minute, w.level(2, g)), "")
	})
	t.Run("the tenant stops: its bucket refills by its rate", func(t *testing.T) {
		w, _ := low(t)
		// From 2 to 15 tokens at 1/s takes 13 s, and 10 s more have to be well.
		w.want(w.run(22*time.Second, nil), "")
		said := w.run(2*time.Second, nil)
		w.want(said, "-low-tokens")
		w.want(w.run(10*time.Minute, nil), "")
	})
	t.Run("an anomaly, cut off for 10 min", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1", "g2")
		g1, g2 := w.gateways[0], w.gateways[1]
		w.want(w.run(time.Minute, func() { w.requests(g1, "acme", 5); w.requests(g2, "other", 5) }), "")
		w.want(w.run(5*time.Second, func() { w.requests(g1, "acme", 50); w.requests(g2, "other", 5) }), "+anomaly")
		g1.down = true
		w.want(w.run(10*time.Minute, func() { w.requests(g2, "other", 5) }), "+gateway-silent")
		g1.down = false
		w.want(w.run(time.Minute, func() { w.requests(g1, "acme", 50); w.requests(g2, "other", 5) }), "-gateway-silent")
		w.want(w.run(time.Minute, func() { w.requests(g1, "acme", 5); w.requests(g2, "other", 5) }), "-anomaly")
	})
	t.Run("an anomaly, the tenant stops", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		g := w.gateways[0]
		w.want(w.run(time.Minute, w.traffic(g, "acme", 50)), "")
		w.want(w.run(5*time.Second, w.traffic(g, "acme", 500)), "+anomaly")
		w.want(w.run(time.Minute, nil), "-anomaly")
	})
}

// The stream's clock is one more wall clock. That it is set must not end, begin or stop anything.
func TestB008StreamClockIsSet(t *testing.T) {
	for _, by := range []time.Duration{-11 * time.Second, -time.Hour, time.Hour} {
		t.Run(by.String(), func(t *testing.T) {
			w := newWorld(t, Config{}, "g1")
			g := w.gateways[0]
			both := func(tokens int64, n int) func() {
				return func() { w.level(tokens, g)(); w.requests(g, "acme", n) }
			}
			w.want(w.run(time.Minute, both(80, 5)), "")
			w.skew += by
			w.want(w.run(30*time.Second, both(80, 5)), "")
			w.want(w.run(30*time.Second, both(2, 5)), "+low-tokens")
			w.skew -= by
			w.want(w.run(30*time.Second, both(2, 5)), "")
			w.skew += by
			w.run(step, both(2, 5))
			w.skew -= by
			w.want(w.run(30*time.Second, both(2, 5)), "")
			w.want(w.run(3*time.Second, both(2, 50)), "+anomaly")
			w.want(w.run(30*time.Second, both(80, 50)), "-low-tokens")
			for _, a := range w.said {
				if a.Type == schemas.AlertResolved && a.EndsAt.Before(a.StartsAt) {
					t.Errorf("said %+v, which ends before it starts", a)
				}
			}
		})
	}
}

func TestB010ClockDrift(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name          string
		offset, bound time.Duration
		want          string
	}{
		{"200 ms each way", 0, 200 * ms, ""},
		{"250 ms off, 5 ms each way", 250 * ms, 5 * ms, "+clock-drift"},
		{"250 ms off the other way", -250 * ms, 5 * ms, "+clock-drift"},
		{"lopsided path", 200 * ms, 200 * ms, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, Config{Drift: 100 * ms, DriftClear: 50 * ms}, "g1")
			w.gateways[0].clock = func(h *schemas.Heartbeat) { h.ClockKnown, h.ClockOffset, h.ClockError = true, c.offset, c.bound }
			w.want(w.run(time.Minute, nil), c.want)
		})
	}
}

func TestClockDrift(t *testing.T) {
	w := newWorld(t, Config{}, "g1")
	off := func(offset, bound time.Duration, known bool) {
		w.gateways[0].clock = func(h *schemas.Heartbeat) { h.ClockKnown, h.ClockOffset, h.ClockError = known, offset, bound }
	}
	off(time.Second, 0, true)
	w.want(w.run(10*time.Second, nil), "")
	off(3*time.Second, 10*time.Millisecond, true)
	w.want(w.run(time.Second, nil), "") // one heartbeat
	said := w.run(time.Second, nil)
	w.want(said, "+clock-drift")
	if a := said[0]; a.Gateway != "g1" || a.DedupKey != "clock-drift/g1" || a.Value != 3 || a.Threshold != 2 || a.Summary != "the clock of gateway g1 is 3s behind" {
		t.Errorf("said %+v", a)
	}
	off(0, 0, false)
	w.want(w.run(time.Minute, nil), "") // not measured is not right
	off(200*time.Millisecond, 5*time.Second, true)
	w.want(w.run(time.Minute, nil), "") // nor is a measurement that says nothing
	off(1500*time.Millisecond, 0, true)
	w.want(w.run(time.Minute, nil), "")
	off(0, 0, true)
	w.want(w.run(5*time.Second, nil), "")
	off(0, 0, false)
	w.want(w.run(time.Minute, nil), "")
	off(1500*time.Millisecond, 0, true)
	w.run(time.Second, nil)
	off(-200*time.Millisecond, 10*time.Millisecond, true)
	w.want(w.run(15*time.Second, nil), "-clock-drift")
}

func TestGatewayLife(t *testing.T) {
	t.Run("silent after 10 s, heard again", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1", "g2")
		w.run(10*time.Second, nil)
		w.gateways[0].down = true
		w.want(w.run(9*time.Second, nil), "")
		said := w.run(2*time.Second, nil)
		w.want(said, "+gateway-silent")
		if a := said[0]; a.Gateway != "g1" || a.Severity != schemas.SeverityCritical || a.Threshold != 10 || a.Value < 10 || a.Value > 11 {
			t.Errorf("said %+v", a)
		}
		w.gateways[0].down = false
		w.want(w.run(12*time.Second, nil), "-gateway-silent")
	})
	t.Run("one that was shut down is not missed", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1", "g2")
		g := w.gateways[0]
		w.want(w.run(20*time.Second, w.level(2, g)), "+low-tokens")
		g.mode = schemas.ModeStopped
		w.run(time.Second, nil)
		g.down = true
		w.level(1, g)() // its last words come late
		w.want(w.run(time.Hour, nil), "-low-tokens")
		if len(w.d.gateways) != 1 {
			t.Errorf("%d gateways known, want 1", len(w.d.gateways))
		}
		g.down, g.boot, g.seq, g.mode = false, 2, 0, modeSynced
		w.run(10*time.Second, nil)
		g.down = true
		w.want(w.run(time.Minute, nil), "+gateway-silent")
	})
	t.Run("one that is gone for a day is forgotten", func(t *testing.T) {
		w := newWorld(t, Config{Forget: time.Hour}, "g1", "g2")
		g := w.gateways[0]
		g.clock = func(h *schemas.Heartbeat) { h.ClockKnown, h.ClockOffset = true, time.Minute }
		w.want(w.run(10*time.Second, nil), "+clock-drift")
		g.down = true
		w.want(w.run(59*time.Minute, nil), "+gateway-silent")
		w.want(w.run(2*time.Minute, nil), "-clock-drift -gateway-silent")
		if len(w.d.gateways) != 1 {
			t.Errorf("%d gateways known, want 1", len(w.d.gateways))
		}
	})
	t.Run("out of touch with the centre", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		g := w.gateways[0]
		w.run(10*time.Second, nil)
		g.mode = "stale"
		w.want(w.run(3*time.Second, nil), "")
		said := w.run(2*time.Second, nil)
		w.want(said, "+degraded")
		if a := said[0]; a.Gateway != "g1" || a.Threshold != 3 || a.Value < 3 || a.Summary != "gateway g1 throttles without the centre, mode stale" {
			t.Errorf("said %+v", a)
		}
		g.mode = "isolated"
		w.want(w.run(time.Minute, nil), "")
		g.mode = modeSynced
		w.want(w.run(12*time.Second, nil), "-degraded")
	})
}

func TestAnomalyFiresWithinTwoSeconds(t *testing.T) {
	for phase := range 10 {
		w := newWorld(t, Config{}, "g1", "g2", "g3")
		each := func(n int) func() {
			return func() {
				for _, g := range w.gateways {
					w.requests(g, "acme", n)
				}
			}
		}
		w.want(w.run(time.Minute+time.Duration(phase)*step, each(2)), "")
		jumped := w.now
		said := w.run(2*time.Second, each(20))
		w.want(said, "+anomaly")
		if a := said[0]; a.Tenant != "acme" || a.DedupKey != "anomaly/acme" || a.Value <= a.Threshold || a.Value > 600 {
			t.Errorf("said %+v", a)
		}
		if took := said[0].StartsAt.Sub(jumped); took > 2*time.Second {
			t.Errorf("phase %d: fired %s after the jump, want within 2s", phase, took)
		}
	}
}

func TestAnomalyStaysQuiet(t *testing.T) {
	for name, each := range map[string]func(w *world, g *testGateway) func(){
		"zero variance, then one more": func(w *world, g *testGateway) func() {
			return func() {
				n := 3
				if w.steps > 900 {
					n = 4
				}
				w.requests(g, "acme", n)
			}
		},
		"three times the normal": func(w *world, g *testGateway) func() {
			return func() {
				n := 3
				if w.steps > 900 {
					n = 9
				}
				w.requests(g, "acme", n)
			}
		},
		"a tiny tenant, ten times its normal": func(w *world, g *testGateway) func() {
			return func() {
				if w.steps%10 == 0 || w.steps > 900 {
					w.requests(g, "acme", 1)
				}
			}
		},
		"first seen at full pace": func(w *world, g *testGateway) func() {
			return func() {
				if w.steps > 900 {
					w.requests(g, "acme", 100)
				}
			}
		},
		"first seen, and faster within its first ten seconds": func(w *world, g *testGateway) func() {
			return func() {
				if w.steps > 900 {
					w.requests(g, "acme", 1+min((w.steps-900)/10, 12)*8)
				}
			}
		},
		"back after a pause": func(w *world, g *testGateway) func() {
			return func() {
				if w.steps < 300 || w.steps > 1200 {
					w.requests(g, "acme", 20)
				}
			}
		},
		"bursts, one second in ten": func(w *world, g *testGateway) func() {
			return func() {
				if w.steps%100 < 10 {
					w.requests(g, "acme", 30)
				}
			}
		},
		"random": func(w *world, g *testGateway) func() {
			r := rand.New(rand.NewPCG(1, 2))
			return func() { w.requests(g, "acme", r.IntN(20)) }
		},
		"a daily rise": func(w *world, g *testGateway) func() {
			return func() { w.requests(g, "acme", 5+w.steps/60) }
		},
		"cold: reported every five seconds": func(w *world, g *testGateway) func() {
			return func() {
				if w.steps%50 == 0 {
					w.report(g, schemas.Report{Usage: []schemas.Usage{{Time: w.now.Add(-4900 * time.Millisecond), Tenant: "acme", Route: "r", Allowed: 250}}})
				}
			}
		},
		"cold, and without a sealing time": func(w *world, g *testGateway) func() {
			return func() {
				if w.steps%50 == 0 {
					g.seq++
					w.d.Observe(&schemas.Report{Gateway: g.name, Boot: "boot1", Seq: g.seq,
						Usage: []schemas.Usage{{Time: w.now.Add(-4900 * time.Millisecond), Tenant: "acme", Route: "r", Allowed: 250}}}, w.stream())
				}
			}
		},
		"reports kept for 30 s come at once": func(w *world, g *testGateway) func() {
			var kept []time.Time
			return func() {
				if kept = append(kept, w.now); w.steps > 900 && w.steps < 1200 {
					return
				}
				for _, at := range kept {
					w.report(g, schemas.Report{SealedAt: at.Add(-time.Hour), Usage: []schemas.Usage{{Tenant: "acme", Route: "r", Allowed: 5}}})
				}
				kept = kept[:0]
			}
		},
		"reports kept for 5 min come within half a minute": func(w *world, g *testGateway) func() {
			var kept []time.Time
			return func() {
				if kept = append(kept, w.now); w.steps > 900 && w.steps < 3900 {
					return
				}
				n := min(10, len(kept))
				for _, at := range kept[:n] {
					w.report(g, schemas.Report{SealedAt: at.Add(time.Hour), Usage: []schemas.Usage{{Tenant: "acme", Route: "r", Allowed: 5}}})
				}
				kept = kept[n:]
			}
		},
		"reports kept for a minute come six times as fast": func(w *world, g *testGateway) func() {
			var kept []time.Time
			return func() {
				if kept = append(kept, w.now); w.steps > 900 && w.steps < 1490 {
					return
				}
				n := min(6, len(kept))
				for _, at := range kept[:n] {
					w.report(g, schemas.Report{SealedAt: at, Usage: []schemas.Usage{{Tenant: "acme", Route: "r", Allowed: 5}}})
				}
				kept = kept[n:]
			}
		},
		"five times the normal of a tenant that is all over the place": func(w *world, g *testGateway) func() {
			r, n := rand.New(rand.NewPCG(3, 4)), 0
			return func() {
				if w.steps%10 == 1 {
					n = r.IntN(20)
				}
				if w.steps > 3000 && w.steps <= 3020 {
					n = 45
				}
				w.requests(g, "acme", n)
			}
		},
		"counts merged for 30 s come at once": func(w *world, g *testGateway) func() {
			var n uint64
			var since time.Time
			return func() {
				if n += 5; n == 5 {
					since = w.now
				}
				if w.steps > 900 && w.steps < 1200 {
					return
				}
				w.report(g, schemas.Report{Usage: []schemas.Usage{{Time: since, Tenant: "acme", Route: "r", Allowed: n}}})
				n = 0
			}
		},
		"a report that comes again and again": func(w *world, g *testGateway) func() {
			return func() {
				w.requests(g, "acme", 5)
				if w.steps > 900 {
					for range 20 {
						g.seq--
						w.requests(g, "acme", 5)
					}
				}
			}
		},
		"no tenant": func(w *world, g *testGateway) func() {
			return func() { w.requests(g, "", 5+w.steps/900*100) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Config{}, "g1")
			w.want(w.run(10*time.Minute, each(w, w.gateways[0])), "")
		})
	}
}

func TestAnomalySpeaks(t *testing.T) {
	t.Run("a tenant first seen 15 s ago", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		w.want(w.run(15*time.Second, w.traffic(w.gateways[0], "acme", 50)), "")
		w.want(w.run(2*time.Second, w.traffic(w.gateways[0], "acme", 500)), "+anomaly")
	})
	t.Run("refused requests count", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		g := w.gateways[0]
		w.want(w.run(time.Minute, w.traffic(g, "acme", 50)), "")
		w.want(w.run(3*time.Second, func() {
			w.report(g, schemas.Report{Usage: []schemas.Usage{{Tenant: "acme", Route: "r", Allowed: 5}, {Tenant: "acme", Route: "r", Rule: "contract", Rejected: 45}}})
		}), "+anomaly")
	})
	t.Run("a tenant that was nearly idle", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		g := w.gateways[0]
		w.want(w.run(2*time.Minute, func() {
			if w.steps%200 == 0 {
				w.requests(g, "acme", 1)
			}
		}), "")
		w.want(w.run(2*time.Second, w.traffic(g, "acme", 300)), "+anomaly")
	})
	t.Run("over, back to normal", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		g := w.gateways[0]
		w.run(time.Minute, w.traffic(g, "acme", 50))
		w.want(w.run(30*time.Second, w.traffic(g, "acme", 500)), "+anomaly")
		w.want(w.run(30*time.Second, w.traffic(g, "acme", 50)), "-anomaly")
	})
	t.Run("a campaign becomes normal, and so does its end", func(t *testing.T) {
		w := newWorld(t, Config{}, "g1")
		g := w.gateways[0]
		w.run(15*time.Minute, w.traffic(g, "acme", 50))
		w.want(w.run(5*time.Minute, w.traffic(g, "acme", 500)), "+anomaly")
		w.want(w.run(10*time.Minute, w.traffic(g, "acme", 500)), "-anomaly")
		w.want(w.run(time.Hour, w.traffic(g, "acme", 500)), "")
		w.want(w.run(time.Hour, w.traffic(g, "acme", 50)), "")
		w.want(w.run(2*time.Second, w.traffic(g, "acme", 500)), "+anomaly")
	})
}

// poisson has all gateways report a tenant's requests, a random number with that mean per second in each tenth of one.
func (w *world) poisson(r *rand.Rand, tenant string, perSecond float64) {
	each := perSecond * step.Seconds() / float64(len(w.gateways))
	for _, g := range w.gateways {
		n := 0
		for p := r.Float64(); p > math.Exp(-each); p *= r.Float64() {
			n++
		}
		w.requests(g, tenant, n)
	}
}

// storms has a tenant make 4 requests per second for calm and 200 for storm, so many times, and counts the seconds of
// storms, without the first two of each, and those of them in which the alert fires.
func (w *world) storms(r *rand.Rand, calm, storm time.Duration, times int) (seconds, alerted float64) {
	firing := strings.Count(told(w.said), "+") > strings.Count(told(w.said), "-")
	look := func(d time.Duration, rate float64, counted func(at time.Duration) bool) {
		for at := step; at <= d; at += step {
			for _, a := range w.run(step, func() { w.poisson(r, "storm", rate) }) {
				firing = a.Type == schemas.AlertFiring
			}
			if counted(at) {
				seconds += step.Seconds()
				if firing {
					alerted += step.Seconds()
				}
			}
		}
	}
	for range times {
		look(calm, 4, func(time.Duration) bool { return false })
		look(storm, 200, func(at time.Duration) bool { return at > 2*time.Second })
	}
	return seconds, alerted
}

// What was out of the ordinary once is not ordinary the next time: retries that come again and again are what weir is for.
func TestAnomalyFiresInEachStorm(t *testing.T) {
	normal := func(t *testing.T, w *world) {
		t.Helper()
		for _, a := range w.said {
			var got float64
			if _, text, ok := strings.Cut(a.Summary, "where "); !ok {
				t.Errorf("%q does not say what is normal", a.Summary)
			} else if _, err := fmt.Sscanf(text, "%g requests per second", &got); err != nil || got < 2 || got > 6 {
				t.Errorf("%q, want a normal of 4: %v", a.Summary, err)
			}
		}
	}
	for phase := range 10 {
		t.Run(fmt.Sprint("the second storm, ", phase), func(t *testing.T) {
			w, r := newWorld(t, Config{}, "g1", "g2", "g3"), rand.New(rand.NewPCG(1, uint64(phase)))
			w.run(time.Duration(phase)*step, nil)
			w.storms(r, 20*time.Second, 15*time.Second, 1)
			w.want(w.said, "+anomaly")
			w.storms(r, 25*time.Second, 15*time.Second, 1)
			w.want(w.said, "+anomaly -anomaly +anomaly")
			normal(t, w)
		})
	}
	for _, c := range []struct {
		before, calm, storm time.Duration
		times               int
	}{
		{0, 20 * time.Second, 30 * time.Second, 12},
		{0, 20 * time.Second, 30 * time.Second, 144},
		{time.Hour, 20 * time.Second, 30 * time.Second, 12},
		{0, 25 * time.Second, 15 * time.Second, 40},
		{0, 40 * time.Second, 20 * time.Second, 20},
		{0, time.Minute, 5 * time.Minute, 1},
		{0, 4 * time.Minute, time.Minute, 24},
		{0, 20 * time.Minute, time.Minute, 6},
	} {
		t.Run(fmt.Sprintf("%s, then %s in %s, %d times", c.before, c.storm, c.calm+c.storm, c.times), func(t *testing.T) {
			w, r := newWorld(t, Config{}, "g1", "g2", "g3"), rand.New(rand.NewPCG(2, 3))
			w.run(c.before, func() { w.poisson(r, "storm", 4) })
			seconds, alerted := w.storms(r, c.calm, c.storm, c.times)
			if alerted < 0.95*seconds {
				t.Errorf("fires in %.0f of %.0f seconds of storms, want 95 %%: %s", alerted, seconds, told(w.said))
			}
			if n := strings.Count(told(w.said), "+"); n > 16 {
				t.Errorf("%d firing messages, want at most 16", n)
			}
			w.want(w.run(time.Hour, func() { w.poisson(r, "storm", 4) }), "-anomaly")
			normal(t, w)
		})
	}
	t.Run("the alerter is started anew, in a storm and between storms", func(t *testing.T) {
		for _, gap := range []time.Duration{0, 5 * time.Second, 15 * time.Second} {
			r := rand.New(rand.NewPCG(4, 5))
			w := newWorld(t, Config{}, "g1", "g2", "g3")
			w.storms(r, 20*time.Second, 30*time.Second, 3)
			w.run(gap, func() { w.poisson(r, "storm", 4) })
			again := New(Config{}, nil)
			for i := range w.said {
				again.Learn(&w.said[i])
			}
			w.d = again
			if gap == 0 {
				w.want(w.run(time.Minute, func() { w.poisson(r, "storm", 200) }), "")
			}
			if seconds, alerted := w.storms(r, 20*time.Second, 30*time.Second, 6); alerted < 0.95*seconds {
				t.Errorf("%s: fires in %.0f of %.0f seconds of storms, want 95 %%: %s", gap, alerted, seconds, told(w.said))
			}
			w.want(w.run(time.Hour, func() { w.poisson(r, "storm", 4) }), "-anomaly")
			normal(t, w)
		}
	})
}

// What a tenant does when the alerter starts in the middle of its storm is not its normal.
func TestAnomalyIsRecalled(t *testing.T) {
	w, r := newWorld(t, Config{}, "g1"), rand.New(rand.NewPCG(1, 1))
	w.run(5*time.Minute, func() { w.poisson(r, "acme", 100) })
	w.want(w.run(30*time.Second, func() { w.poisson(r, "acme", 900) }), "+anomaly")
	w.d = New(Config{}, nil)
	w.d.Learn(&w.said[0])
	w.want(w.run(time.Second, nil), "") // reports come a moment later than heartbeats
	w.want(w.run(5*time.Minute, func() { w.poisson(r, "acme", 900) }), "")
	w.want(w.run(25*time.Second, func() { w.poisson(r, "acme", 100) }), "-anomaly")
	w.want(w.run(5*time.Second, func() { w.poisson(r, "acme", 900) }), "+anomaly")
	w.want(w.run(15*time.Minute, func() { w.poisson(r, "acme", 900) }), "-anomaly")
}

func TestOrdinarySeconds(t *testing.T) {
	for _, c := range []struct{ seconds, want string }{ // a capital was out of the ordinary
		{"abcdefgh", "abcdefgh"},
		{"abCdefgh", "abCdefgh"},
		{"abCDEfgh", "abCDEfgh"},
		{"abCDEFgh", "abgh"},
		{"aBCdEFgh", "aBCdEFgh"},
		{"ABcdefgh", "cdefgh"},
		{"abcdefGH", "abcdef"},
		{"ABCDEFGH", ""},
		{"aBCDEFgHij", "agHij"},
	} {
		const from = 5*window - 3 // round the end of the ring
		tn, to := tenant{}, from+int64(len(c.seconds))
		tn.advance(to)
		for i, letter := range c.seconds {
			at := (from + i) % window
			tn.counts[at], tn.odd[at] = uint32(letter), letter < 'a'
		}
		var got strings.Builder
		for _, n := range tn.ordinary(nil, from, to) {
			got.WriteRune(rune(n))
		}
		if got.String() != c.want {
			t.Errorf("of %s learns from %s, want %s", c.seconds, got.String(), c.want)
		}
	}
}

func TestCampaignBecomesNormal(t *testing.T) {
	for _, c := range []struct {
		name    string
		storms  int
		traffic func(w *world, r *rand.Rand) // five times 50 requests per second on average
		at      time.Duration
	}{
		{"steady", 0, func(w *world, r *rand.Rand) { w.poisson(r, "storm", 250) }, 10 * time.Minute},
		{"after storms", 8, func(w *world, r *rand.Rand) { w.poisson(r, "storm", 250) }, 10 * time.Minute},
		{"with pauses", 0, func(w *world, r *rand.Rand) {
			if w.steps%200 < 170 {
				w.poisson(r, "storm", 300)
			}
		}, 10 * time.Minute},
		{"in bursts", 0, func(w *world, r *rand.Rand) {
			if w.steps%100 < 40 {
				w.poisson(r, "storm", 600)
			}
		}, 10 * time.Minute},
		{"that grows", 0, func(w *world, r *rand.Rand) { w.poisson(r, "storm", 200+float64(w.steps%36_000)/180) }, 10 * time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, r := newWorld(t, Config{}, "g1", "g2", "g3"), rand.New(rand.NewPCG(6, 7))
			ordinary := func() { w.poisson(r, "storm", 50) }
			w.want(w.run(10*time.Minute, ordinary), "")
			for range c.storms {
				w.run(20*time.Second, func() { w.poisson(r, "storm", 600) })
				w.run(90*time.Second, ordinary)
			}
			w.run(10*time.Minute, ordinary)
			w.said = nil
			began := w.now
			w.want(w.run(time.Hour, func() { c.traffic(w, r) }), "+anomaly -anomaly")
			if took := w.said[0].StartsAt.Sub(began); took > 2*time.Second {
				t.Errorf("fired after %s, want within 2s", took)
			}
			// The hold of a tenant that flaps comes on top.
			if took := w.said[1].EndsAt.Sub(began); took < c.at || took > c.at+5*time.Minute+40*time.Second {
				t.Errorf("resolved after %s, want %s and little more", took, c.at)
			}
			if text := w.said[1].Summary; !strings.Contains(text, "which is normal now") {
				t.Errorf("resolved by %q", text)
			}
			w.want(w.run(time.Hour, ordinary), "")
			w.want(w.run(2*time.Second, func() { w.poisson(r, "storm", 500) }), "+anomaly")
		})
	}
}

// Traffic that is ordinary for those who look at it for a while stays so.
func TestAnomalyFollows(t *testing.T) {
	for name, c := range map[string]struct {
		rate func(s float64) float64 // requests per second after s seconds
		d    time.Duration
		want string
	}{
		"doubling in ten minutes":           {func(s float64) float64 { return 40 * math.Exp2(s/600) }, time.Hour, ""},
		"doubling in ten minutes, from ten": {func(s float64) float64 { return 10 * math.Exp2(s/600) }, time.Hour, ""},
		"a day of two minutes, small":       {func(s float64) float64 { return 10 * (1 - 0.6*math.Cos(2*math.Pi*s/120)) }, 30 * time.Minute, ""},
		"a day of two minutes, middle":      {func(s float64) float64 { return 26 * (1 - 0.6*math.Cos(2*math.Pi*s/120)) }, 30 * time.Minute, ""},
		"a day of two minutes, large":       {func(s float64) float64 { return 200 * (1 - 0.6*math.Cos(2*math.Pi*s/120)) }, 30 * time.Minute, ""},
		"a day of ten minutes":              {func(s float64) float64 { return 60 * (1 - 0.6*math.Cos(2*math.Pi*s/600)) }, time.Hour, ""},
		"a day of an hour":                  {func(s float64) float64 { return 60 * (1 - 0.6*math.Cos(2*math.Pi*s/3600)) }, 3 * time.Hour, ""},
		"doubling in five minutes, after a storm": {func(s float64) float64 {
			if s > 300 && s < 480 {
				return 400
			}
			return 40 * math.Exp2(max(0, s-480)/300)
		}, time.Hour, "+anomaly -anomaly"},
		// That it begins is news; that it goes on is not.
		"from then on, a second of 100 in each 12": {func(s float64) float64 {
			if s > 300 && int(s)%12 == 0 {
				return 100
			}
			return 3
		}, time.Hour, "+anomaly -anomaly +anomaly -anomaly"},
		// What lasts longer than a moment is.
		"from then on, five seconds of 100 in each 30": {func(s float64) float64 {
			if s > 300 && int(s)%30 < 5 {
				return 100
			}
			return 3
		}, time.Hour, "+anomaly -anomaly +anomaly"},
	} {
		t.Run(name, func(t *testing.T) {
			w, r := newWorld(t, Config{}, "g1", "g2", "g3"), rand.New(rand.NewPCG(8, 9))
			w.want(w.run(c.d, func() { w.poisson(r, "acme", c.rate(float64(w.steps-1)*step.Seconds())) }), c.want)
		})
	}
}

// A tenant costs less than a kilobyte, and there are no more of them than allowed.
// TestRequestsOfOneMoment: a report that does not say over which time its requests were made counts them in the second that it came in.
func TestRequestsOfOneMoment(t *testing.T) {
	at := time.Unix(1_800_000_000, 250_000_000).UnixNano()
	for _, span := range []int64{0, 1, second / 2, 3 * second} {
		var c tenant
		c.add(85, at-span, at)
		var sum uint32
		for _, n := range c.counts {
			sum += n
		}
		if now := c.counts[uint64(at/second)%window]; sum != 85 || span < second/4 && now != 85 {
			t.Errorf("85 requests over %v make %d, %d of them in this second", time.Duration(span), sum, now)
		}
	}
}

func TestTenantsAreBounded(t *testing.T) {
	const most = 20_000
	w := newWorld(t, Config{MaxTenants: most}, "g1")
	g := w.gateways[0]
	w.run(20*time.Second, w.traffic(g, "loud", 50))
	w.want(w.run(2*time.Second, w.traffic(g, "loud", 500)), "+anomaly")
	used := func() uint64 {
		var s runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	before := used()
	for i := range most {
		w.requests(g, fmt.Sprintf("tenant-%06d", i), 1)
	}
	each := (used() - before) / most
	t.Logf("%d bytes for each tenant", each)
	if each > 1024 {
		t.Errorf("%d bytes for each tenant, want less than 1024", each)
	}
	for i := range most {
		w.requests(g, fmt.Sprintf("next-%06d", i), 1)
	}
	if n := len(w.d.traffic.tenants); n != most {
		t.Errorf("%d tenants kept, want %d", n, most)
	}
	if _, ok := w.d.traffic.tenants["tenant-000000"]; ok {
		t.Error("the tenant least recently active is kept")
	}
	if got := testutil.ToFloat64(w.m.Dropped.WithLabelValues(droppedTenant)); got != most+1 {
		t.Errorf("dropped{tenants} = %v, want %d", got, most+1)
	}
	// One whose alert fires stays.
	w.want(w.run(30*time.Second, w.traffic(g, "loud", 500)), "")
	w.want(w.run(time.Minute, w.traffic(g, "loud", 50)), "-anomaly")
}

func TestBucketsAndAlertsAreBounded(t *testing.T) {
	w := newWorld(t, Config{MaxBuckets: 50, MaxFiring: 20}, "g1")
	w.run(20*time.Second, func() {
		r := schemas.Report{}
		for i := range 60 {
			b := bucketAt(0)
			b.Key, b.Tenant = fmt.Sprint("k", i), ""
			r.Tokens = append(r.Tokens, b)
		}
		w.report(w.gateways[0], r)
	})
	if n := strings.Count(told(w.said), "+low-tokens"); n != 20 {
		t.Errorf("%d alerts, want 20", n)
	}
	if n := len(w.d.buckets); n != 50 {
		t.Errorf("%d buckets, want 50", n)
	}
	for _, reason := range []string{droppedBucket, droppedFiring} {
		if testutil.ToFloat64(w.m.Dropped.WithLabelValues(reason)) == 0 {
			t.Errorf("dropped{%s} = 0, want more", reason)
		}
	}
	if !slices.IsSortedFunc(w.said, func(a, b schemas.Alert) int { return strings.Compare(a.DedupKey, b.DedupKey) }) {
		t.Error("changes of one moment are not in order")
	}
}

// After a restart nothing is said again, and what was said is ended under the name it began with.
func TestLearn(t *testing.T) {
	first := newWorld(t, Config{}, "g1", "g2")
	g1, g2 := first.gateways[0], first.gateways[1]
	off := func(h *schemas.Heartbeat) { h.ClockKnown, h.ClockOffset = true, 10*time.Second }
	g1.clock = off
	busy := func(w *world, g *testGateway, n int) func() {
		return func() { w.level(2, g)(); w.requests(g, "acme", n) }
	}
	first.run(time.Minute, busy(first, g1, 5))
	g2.down = true
	first.run(30*time.Second, busy(first, g1, 50))
	first.want(first.said, "+clock-drift +low-tokens +anomaly +gateway-silent")

	second := newWorld(t, Config{}, "g1", "g2")
	second.now = first.now
	for i := range first.said {
		second.d.Learn(&first.said[i])
	}
	h1, h2 := second.gateways[0], second.gateways[1]
	h1.clock, h1.seq, h2.down = off, g1.seq, true
	second.want(second.run(20*time.Minute, func() { second.level(2, h1)(); second.requests(h1, "acme", 50) })[:0], "")
	for _, a := range second.said {
		if a.Type == schemas.AlertFiring {
			t.Errorf("said again: %+v", a)
		}
	}
	h1.clock, h2.down = func(h *schemas.Heartbeat) { h.ClockKnown = true }, false
	second.run(5*time.Minute, func() { second.level(90, h1)(); second.requests(h1, "acme", 5) })
	ended := map[string]time.Time{}
	for _, a := range second.said {
		if a.Type == schemas.AlertResolved {
			ended[a.DedupKey] = a.StartsAt
		}
	}
	for _, a := range first.said {
		if got, ok := ended[a.DedupKey]; !ok || got != a.StartsAt {
			t.Errorf("%s: ended %t as of %s, want as of %s", a.DedupKey, ok, got, a.StartsAt)
		}
	}

	// What was resolved is not there; somebody else's alert is left alone.
	third := newWorld(t, Config{}, "g1")
	for _, all := range [][]schemas.Alert{first.said, second.said} {
		for i := range all {
			third.d.Learn(&all[i])
		}
	}
	third.d.Learn(&schemas.Alert{Type: schemas.AlertFiring, Name: "ledger-mismatch", DedupKey: "ledger-mismatch/x"})
	third.want(third.run(time.Minute, nil), "")
	if n := third.d.firing; n[LowTokens]+n[Anomaly]+n[ClockDrift]+n[GatewaySilent] != 0 {
		t.Errorf("firing %v, want none", n)
	}
}

// A bucket of which nothing is heard after a restart keeps its alert: it may be one that refills in a month.
func TestLearnedBucketWithoutReports(t *testing.T) {
	w := newWorld(t, Config{}, "g1")
	w.d.Learn(&schemas.Alert{Type: schemas.AlertFiring, Name: LowTokens, DedupKey: "low-tokens/contract/acme", Rule: "contract", Key: "acme", Tenant: "acme",
		StartsAt: w.now.Add(-time.Hour)})
	w.want(w.run(time.Hour, nil), "")
	w.want(w.run(time.Minute, w.level(80, w.gateways[0])), "-low-tokens")
}

func TestNamesOfSubjects(t *testing.T) {
	seen := map[string]string{}
	for _, a := range []schemas.Alert{
		{Name: LowTokens, Rule: "a/b", Key: "c"}, {Name: LowTokens, Rule: "a", Key: "b/c"}, {Name: LowTokens, Rule: "a%2Fb", Key: "c"},
		{Name: LowTokens, Rule: "a", Key: ""}, {Name: LowTokens, Rule: "", Key: "a"}, {Name: Anomaly, Tenant: "a"}, {Name: ClockDrift, Gateway: "a"},
		{Name: Anomaly, Tenant: strings.Repeat("é", 128)}, {Name: Anomaly, Tenant: strings.Repeat("é", 127)}, {Name: Anomaly, Tenant: "日本\n"},
	} {
		key := dedupKey(&a)
		if other, ok := seen[key]; ok {
			t.Errorf("%+v and %s are both %s", a, other, key)
		}
		if len(key) > 255 {
			t.Errorf("%+v has a key of %d characters", a, len(key))
		}
		seen[key] = fmt.Sprintf("%+v", a)
	}
	a := schemas.Alert{DedupKey: "anomaly/acme", Type: schemas.AlertFiring, StartsAt: time.Date(2026, 11, 29, 10, 0, 0, 123e6, time.UTC)}
	b := a
	b.StartsAt, b.Value, b.Summary = a.StartsAt.In(time.FixedZone("", 8*3600)), 7, "other words"
	if MessageID(&a) != MessageID(&b) {
		t.Error("the id depends on more than subject, beginning and type")
	}
	b.Type = schemas.AlertResolved
	if MessageID(&a) == MessageID(&b) {
		t.Error("firing and resolved have one id")
	}
}

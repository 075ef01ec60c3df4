package alerting

import (
	"testing"
	"time"

	"github.com/weirhq/weir/schemas"
)

// kept is n seconds of a gateway's reports of one tenant, sealed from start on, that nobody has taken yet.
func kept(g *testGateway, start time.Time, n, perSecond int) (all []*schemas.Report) {
	for i := range n {
		g.seq++
		at := start.Add(time.Duration(i) * time.Second)
		all = append(all, &schemas.Report{Gateway: g.name, Boot: "boot" + string(rune('0'+g.boot)), Seq: g.seq, SealedAt: at,
			Usage: []schemas.Usage{{Tenant: "acme", Route: "r", Allowed: uint64(perSecond), Time: at.Add(-time.Second)}}})
	}
	return all
}

// What a gateway kept for an hour comes at once: it was ordinary when it was made, and is so when it comes.
func TestReportsOfAnOutageAreNoAnomaly(t *testing.T) {
	const rate = 30
	for _, c := range []struct {
		name    string
		restart bool // the gateway was killed, and another delivers what it left
		known   bool // the alerter knew the gateway before
		beats   bool // it sends heartbeats
		skew    time.Duration
		perTick int // reports that come in a tenth of a second
		stall   bool
	}{
		{name: "the same process", known: true, beats: true, perTick: 200},
		{name: "the same process, which never beats", known: true, perTick: 200},
		{name: "slowly", known: true, beats: true, perTick: 3},
		{name: "after a pause", known: true, beats: true, perTick: 100, stall: true},
		{name: "what another has left", known: true, beats: true, restart: true, perTick: 200},
		{name: "what another has left, to an alerter that is new", beats: true, restart: true, perTick: 200},
		{name: "to an alerter that is new", perTick: 200},
		{name: "to an alerter that is new, after a pause", perTick: 200, stall: true},
		{name: "by a clock that is behind", known: true, beats: true, skew: -40 * time.Second, perTick: 200},
		{name: "by a clock that is ahead", known: true, beats: true, restart: true, skew: 40 * time.Second, perTick: 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, Config{}, "g1", "g2")
			g, g2 := w.gateways[0], w.gateways[1]
			g.down = !c.beats
			report := func(g *testGateway, skew time.Duration) {
				w.report(g, schemas.Report{SealedAt: w.now.Add(skew), Usage: []schemas.Usage{{Tenant: "acme", Route: "r", Allowed: rate / 10, Time: w.now.Add(skew - step)}}})
			}
			each := func() { report(g, c.skew); report(g2, 0) }
			if c.known {
				w.want(w.run(3*time.Minute, each), "")
			} else {
				g.down = true
				w.want(w.run(3*time.Minute, func() { report(g2, 0) }), "")
			}
			outage := w.now
			g.down = true
			w.want(w.run(time.Hour, func() { report(g2, 0) }), map[bool]string{true: "+gateway-silent"}[c.known && c.beats])
			all := kept(g, outage.Add(c.skew), 3600, rate)
			first := *all[0]
			if c.restart {
				g.boot, g.seq = 2, 0
			}
			g.down = !c.beats
			back := func() {
				report(g2, 0)
				for range min(c.perTick, len(all)) {
					w.d.Observe(all[0], w.stream())
					all = all[1:]
				}
			}
			if c.beats {
				w.want(w.run(time.Second, func() { report(g2, 0) }), "")
			}
			if c.stall {
				w.run(step, func() { w.d.Observe(all[0], w.stream()); all = all[1:] })
				w.run(15*time.Second, func() { report(g2, 0) })
			}
			for _, a := range w.run(3*time.Minute, back) {
				if a.Name == Anomaly {
					t.Fatalf("said %+v", a)
				}
			}
			if len(all) > 0 {
				t.Fatalf("%d reports are left", len(all))
			}
			for range 1000 { // again, whoever has delivered it
				w.d.Observe(&first, w.stream())
			}
			for _, a := range w.run(time.Minute, each) {
				if a.Name == Anomaly {
					t.Fatalf("what came again: %+v", a)
				}
			}
			// and a storm is one all the same
			if said := told(w.run(10*time.Second, func() { each(); w.requests(g2, "acme", 100) })); said != "+anomaly" {
				t.Errorf("said %q in a storm", said)
			}
		})
	}
}

// What a predecessor left behind does not make it the one that is alive.
func TestReportsThatWereLeftBehindHoldNoTokens(t *testing.T) {
	w := newWorld(t, Config{}, "g1")
	g := w.gateways[0]
	w.run(time.Second, nil)
	old := &schemas.Report{Gateway: "g1", Boot: "boot0", Seq: 7, SealedAt: w.now, Tokens: []schemas.Tokens{bucketAt(100)}}
	w.want(w.run(time.Minute, func() {
		w.level(0, g)()
		w.d.Observe(old, w.stream())
		old.Seq++
	}), "+low-tokens")
}

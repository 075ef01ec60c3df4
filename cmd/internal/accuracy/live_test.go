package accuracy

import (
	"context"
	"log/slog"
	"testing"
	"time"
)

// TestLive runs a second of traffic over real servers, through every way that needs no rival's code. What comes out depends on the
// machine; that all of it is asked and something is admitted does not.
func TestLive(t *testing.T) {
	sc := scenario{name: "live", gateways: 3, most: 4, keys: 2, tokens: 100, per: time.Second, burst: 100, seconds: 2, to: 2 * time.Second, bin: time.Second,
		happenings: []happening{{s / 2, joins, 3}, {s / 2, redisDown, 0}, {s, redisUp, 0}, {s, centreDown, 0}, {3 * s / 2, centreUp, 0}, {3 * s / 2, leaves, 1}},
		fill: func(sc *scenario, g *generator) {
			for i := range sc.gateways {
				g.flow(i, i%2, sc.perSecond(), 0, 1)
			}
			g.flow(3, 0, sc.perSecond(), 1, 2)
		}}
	p := &prepared{scenario: sc}
	p.prepare(1)
	for _, m := range liveModes(false) {
		admitted, late, err := runLive(t.Context(), LiveConfig{Dir: t.TempDir()}, p, m, 0, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		got := compare(p.arrivals, p.keys, admitted, p.perfect)
		if got.admitted == 0 {
			t.Errorf("%s admitted nothing of %d requests", m.name, len(admitted))
		}
		for i, d := range late {
			if d <= 0 {
				t.Fatalf("%s: request %d was answered %s before it came", m.name, i, -d)
			}
		}
	}
}

func TestLiveStopsWhenTold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p := &prepared{scenario: skewed("x", "", 2, 1)}
	p.most, p.keys, p.tokens, p.per, p.burst, p.to, p.bin = 2, 1, 100, time.Second, 100, time.Second, time.Second
	p.prepare(1)
	if _, _, err := runLive(ctx, LiveConfig{Dir: t.TempDir()}, p, liveModes(false)[1], 0, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a run that was told to stop has no error")
	}
}

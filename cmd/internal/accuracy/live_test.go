package accuracy

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
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
		admitted, late, sent, err := runLive(t.Context(), LiveConfig{Dir: t.TempDir()}, p, m, 0, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		got := compare(p.arrivals, p.keys, admitted, p.perfect)
		if got.admitted == 0 {
			t.Errorf("%s admitted nothing of %d requests", m.name, len(admitted))
		}
		if weir := m.name != "divide-by-n" && m.name != "redis-per-request"; weir && (sent.messages < 10 || sent.bytes < 1000) {
			t.Errorf("%s sent %d messages of %d bytes", m.name, sent.messages, sent.bytes)
		}
		// Of what comes while Redis is there, what asks about each request asks it about each.
		least := map[string]int64{"shared": 5, "lease": 5, "strict": int64(len(admitted)) / 4, "divide-by-n": 0, "redis-per-request": int64(len(admitted)) / 4}
		if min, ok := least[m.name]; !ok || sent.redis < min {
			t.Errorf("%s called Redis %d times, want %d at least of a mode that is known", m.name, sent.redis, min)
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
	if _, _, _, err := runLive(ctx, LiveConfig{Dir: t.TempDir()}, p, liveModes(false)[3], 0, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a run that was told to stop has no error")
	}
}

// TestLiveHasEveryModeOfTheTables: what is measured in virtual time can be asked of real servers.
func TestLiveHasEveryModeOfTheTables(t *testing.T) {
	var want, got []string
	for _, m := range modes {
		want = append(want, m.name)
	}
	for _, m := range liveModes(true) {
		got = append(got, m.name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("live modes %q, want %q", got, want)
	}
}

func TestTrafficThatNobodyCountsIsNull(t *testing.T) {
	p := &prepared{scenario: skewed("x", "", 2, 1)}
	p.most, p.keys, p.tokens, p.per, p.burst, p.to, p.bin = 2, 1, 100, time.Second, 100, time.Second, time.Second
	p.prepare(1)
	j := &job{sc: p}
	j.score(make([]bool, len(p.arrivals)), traffic{messages: unknown, bytes: since(unknown, 5), redis: since(20, 80)})
	b, err := json.Marshal(j.row)
	if err != nil {
		t.Fatal(err)
	}
	if want := `"messages_per_gateway_s":null,"bytes_per_gateway_s":null,"redis_calls_per_s":2`; !strings.Contains(string(b), want) {
		t.Errorf("row %s lacks %s", b, want)
	}
}

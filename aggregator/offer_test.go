package aggregator

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestOffersAreFew: nothing is offered below a token; else somebody has an offer, and so many that two are hardly used at once;
// nobody holds more than its offer.
func TestOffersAreFew(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limit{RateNanos: rapid.Int64Range(1, offerSlow).Draw(t, "rate"), Burst: rapid.Int64Range(1, 100).Draw(t, "burst")}
		level := rapid.Int64Range(-10e6, 1e6*l.Burst).Draw(t, "level")
		wishes := make([]Wish, rapid.IntRange(2, 50).Draw(t, "gateways"))
		for i := range wishes {
			wishes[i] = Wish{Gateway: fmt.Sprint("g", i), PerSecond: rapid.SampledFrom([]float64{0, 0, 0.01, 0.5, 5, 1000}).Draw(t, "asks"),
				Served: rapid.Int64Range(0, 100).Draw(t, "served"), HeldMicros: rapid.Int64Range(0, 2e6).Draw(t, "held")}
		}
		g := Offer(l, level, wishes)
		offers, most, sum, risk := 0, 0.0, int64(0), 0.0
		for _, s := range g.Shares {
			w := wishes[slices.IndexFunc(wishes, func(w Wish) bool { return w.Gateway == s.Gateway })]
			if s.RateNanos != 0 {
				t.Fatalf("%+v earns by itself", s)
			}
			if s.Burst == 0 {
				if s.Grant != 0 {
					t.Fatalf("%+v is granted what it cannot hold", s)
				}
				continue
			}
			if has := min(max(w.HeldMicros, 0)/1e6, s.Burst) + s.Grant; has != s.Burst {
				t.Fatalf("%+v of %+v holds %d", s, w, has)
			}
			offers++
			sum += s.Burst
			most = max(most, w.PerSecond)
			risk += w.PerSecond * offerReach.Seconds()
		}
		switch {
		case level < 1e6 && (offers > 0 || g.Wants != 1e6 || g.Free != level):
			t.Fatalf("%d offers at a level of %d, wants %d and has %d", offers, level, g.Wants, g.Free)
		case level >= 1e6 && (offers == 0 || g.Wants != 0):
			t.Fatalf("%d offers at a level of %d, wants %d", offers, level, g.Wants)
		case sum > max(level/1e6, int64(offers)):
			t.Fatalf("%d tokens in %d offers at a level of %d", sum, offers, level)
		case risk-most*offerReach.Seconds() > offerRisk+1e-9:
			t.Fatalf("%d offers of which %.2f may be used at once", offers, risk-most*offerReach.Seconds())
		case float64(offers)*float64(l.RateNanos)/1e9 > grantsPerSecond+2:
			t.Fatalf("%d offers of %v", offers, l)
		}
	})
}

// TestOffersTakeTurns: of gateways that ask all the time each has its turn, and those that ask seldom have an offer beside.
func TestOffersTakeTurns(t *testing.T) {
	l := Limit{RateNanos: 1e9 / 20, Burst: 1}
	wishes := []Wish{{Gateway: "a", PerSecond: 100}, {Gateway: "b", PerSecond: 50}, {Gateway: "c", PerSecond: 0.01}, {Gateway: "d", PerSecond: 20}}
	var turns []string
	for n := range int64(6) {
		for _, s := range Offer(l, 1e6, wishes).Shares {
			i := slices.IndexFunc(wishes, func(w Wish) bool { return w.Gateway == s.Gateway })
			switch {
			case s.Gateway == "c" && s.Burst != 1:
				t.Errorf("turn %d: nothing is offered to c", n)
			case s.Gateway != "c" && s.Burst > 0:
				turns = append(turns, s.Gateway)
				wishes[i].Served = n + 1
			}
		}
	}
	if fmt.Sprint(turns) != "[a b d a b d]" {
		t.Errorf("turns %v, want each of three in order", turns)
	}
}

package aggregator

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func parts(l Limit) *rapid.Generator[[]Part] {
	return rapid.Custom(func(t *rapid.T) []Part {
		d := demands(l).Draw(t, "demands")
		p := make([]Part, len(d))
		for i := range d {
			p[i] = Part{Demand: d[i], HeldMicros: rapid.Int64Range(-1e6, 3e6*l.Burst).Draw(t, "held")}
			if d[i].RateNanos > 0 {
				p[i].UsedMicros = rapid.Int64Range(0, 2e6*l.Burst).Draw(t, "used")
				p[i].UnsaidMicros = rapid.Int64Range(0, p[i].UsedMicros).Draw(t, "unsaid")
			}
		}
		return p
	})
}

func smallLimits() *rapid.Generator[Limit] {
	return rapid.Custom(func(t *rapid.T) Limit {
		return Limit{RateNanos: rapid.Int64Range(1, 1000e9).Draw(t, "rate"), Burst: rapid.Int64Range(1, 2000).Draw(t, "burst")}
	})
}

// TestDivideConserves: what gateways keep and what they are granted is no more than the bucket has, and no share is fuller than its burst.
func TestDivideConserves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := smallLimits().Draw(t, "limit")
		p := parts(l).Draw(t, "parts")
		level := rapid.Int64Range(-3e6*l.Burst, 1e6*l.Burst).Draw(t, "level")
		shares := Divide(l, level, p)
		held := map[string]*Part{}
		for i := range p {
			held[p[i].Gateway] = &p[i]
		}
		var kept, granted, rate, burst int64
		lacking, room := false, int64(0)
		for i := range shares {
			s := &shares[i]
			k := held[s.Gateway].kept(s)
			kept += k
			granted += s.Grant
			rate += s.RateNanos
			burst += s.Burst
			if s.Grant < 0 || k+1e6*s.Grant > 1e6*s.Burst+held[s.Gateway].UnsaidMicros {
				t.Fatalf("%+v of %+v is more than its burst: %+v", s, p, shares)
			}
			if held[s.Gateway].RateNanos > 0 {
				lacking = true
				room += max(s.Burst-(k+999_999)/1e6, 0)
			}
		}
		if rate > l.RateNanos || burst != l.Burst {
			t.Fatalf("shares of %+v add up to %d and %d: %+v", l, rate, burst, shares)
		}
		if granted > 0 && kept+1e6*granted > level {
			t.Fatalf("level %d, kept %d, granted %d tokens", level, kept, granted)
		}
		if free := level - kept; lacking && free >= l.slackMicros() && granted < min(free/1e6, room) {
			t.Fatalf("%d free, room for %d, granted %d: %+v", free, room, granted, shares)
		}
		if over := kept - level - l.slackMicros(); over > 0 && rate > max(l.Repaying(over).RateNanos, 0) {
			t.Fatalf("gateways hold %d more than there is, and rates add up to %d", over, rate)
		}
	})
}

// TestWhatIsRefusedElsewhereDoesNotLieHere: beside gateways that lack tokens nobody who asks for some keeps many more than it needs, be
// it short of rate or not; where nobody lacks any, room for tokens goes by rate.
func TestWhatIsRefusedElsewhereDoesNotLieHere(t *testing.T) {
	l := Limit{1000e9, 1000}
	part := func(gateway string, demand, held, used int64) Part {
		return Part{Demand: Demand{Gateway: gateway, RateNanos: demand * 1e9}, HeldMicros: held * 1e6, UsedMicros: used * 1e6}
	}
	for _, c := range []struct {
		name  string
		level int64 // tokens
		parts []Part
		want  string // burst+grant
	}{
		{"nobody lacks any", 1000, []Part{part("a", 500, 0, 0), part("b", 100, 80, 0)}, "750+750 250+170"},
		{"one does", 100, []Part{part("a", 5000, 0, 0), part("b", 100, 80, 0)}, "989+89 11+0"},
		{"and one that asks for more than its part has enough for now", 200, []Part{part("a", 5000, 0, 0), part("b", 100, 80, 0), part("c", 600, 100, 0)}, "885+85 21+0 94+0"},
		{"but not when it has used it", 200, []Part{part("a", 5000, 0, 0), part("b", 100, 80, 0), part("c", 600, 100, 60)}, "490+44 21+0 489+35"},
		{"there is enough for a while", 900, []Part{part("a", 5000, 0, 0), part("b", 100, 80, 0)}, "903+804 97+16"},
		{"who asks for nothing has little as it is", 100, []Part{part("a", 5000, 0, 0), part("b", 0, 80, 0)}, "991+91 9+0"},
	} {
		var got []string
		for _, s := range Divide(l, 1e6*c.level, c.parts) {
			got = append(got, fmt.Sprintf("%d+%d", s.Burst, s.Grant))
		}
		if got := strings.Join(got, " "); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestWhatIsNotSaidYetIsNotGivenTwice: what a gateway has used of what it must give back is still in the bucket, and not free.
func TestWhatIsNotSaidYetIsNotGivenTwice(t *testing.T) {
	granted := func(unsaid int64) (sum int64) {
		for _, s := range Divide(Limit{1000e9, 1000}, 200e6, []Part{
			{Demand: Demand{Gateway: "a", RateNanos: 5000e9}},
			{Demand: Demand{Gateway: "b", RateNanos: 100e9}, HeldMicros: 150e6, UsedMicros: 40e6, UnsaidMicros: unsaid},
		}) {
			sum += s.Grant
		}
		return sum
	}
	if all, less := granted(0), granted(40e6); less != all-40 {
		t.Errorf("granted %d, and %d when 40 of what comes back have been used", all, less)
	}
}

// TestGrantConserves: the same of a key kept by grants, where nobody refills by itself, and where no hungry gateway waits while
// another that asks for nothing holds what it needs.
func TestGrantConserves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := smallLimits().Draw(t, "limit")
		p := parts(l).Draw(t, "parts")
		level := rapid.Int64Range(-3e6*l.Burst, 4e6*l.Burst).Draw(t, "level")
		lasting := rapid.SampledFrom([]time.Duration{tinyFor, leaseFor}).Draw(t, "lasting")
		shares := Grant(l, level, p, lasting, rapid.SampledFrom([]string{"", "b", "z"}).Draw(t, "last")).Shares
		held := map[string]*Part{}
		for i := range p {
			held[p[i].Gateway] = &p[i]
		}
		var kept, granted, idle int64
		for i := range shares {
			s := &shares[i]
			if s.RateNanos != 0 || s.Grant < 0 || s.Grant > 0 && held[s.Gateway].RateNanos <= 0 {
				t.Fatalf("%+v of %+v", s, p)
			}
			k := held[s.Gateway].kept(s)
			kept += k
			granted += s.Grant
			if held[s.Gateway].RateNanos <= 0 {
				idle += k
			}
		}
		if granted > 0 && kept+1e6*granted > level {
			t.Fatalf("level %d, kept %d, granted %d tokens: %+v", level, kept, granted, shares)
		}
		for i := range shares {
			if s := &shares[i]; held[s.Gateway].RateNanos > 0 && held[s.Gateway].kept(s)+1e6*s.Grant < 1e6 && idle >= 2e6 && level-kept < 1e6 {
				t.Fatalf("%s has none while %d lie idle: %+v of %+v", s.Gateway, idle, shares, p)
			}
		}
	})
}

// TestBlocksOfALease: a gateway has three quarters of a second's demand in hand, and half of that while more is asked for than there is
// and it asks for less than an even part, for what lies there is refused elsewhere.
func TestBlocksOfALease(t *testing.T) {
	grants := func(held, other int64) (grant int64) {
		p := []Part{{Demand: Demand{Gateway: "a", RateNanos: 100e9}, HeldMicros: held * 1e6}, {Demand: Demand{Gateway: "b", RateNanos: other * 1e9}}}
		return Grant(Limit{RateNanos: 1000e9, Burst: 1000}, 2000e6, p, leaseFor, "").Shares[0].Grant
	}
	for _, c := range []struct{ held, other, want int64 }{
		{76, 800, 0}, {75, 800, 25}, {0, 800, 100},
		{51, 2000, 0}, {26, 2000, 0}, {25, 2000, 25}, {0, 2000, 50},
	} {
		if got := grants(c.held, c.other); got != c.want {
			t.Errorf("a gateway that asks for 100/s of 1000, beside one that asks for %d, has %d in hand and is granted %d, want %d", c.other, c.held, got, c.want)
		}
	}
}

// TestTurns: single tokens go round.
func TestTurns(t *testing.T) {
	p := []Part{{Demand: Demand{Gateway: "a", RateNanos: 1e9}}, {Demand: Demand{Gateway: "b"}}, {Demand: Demand{Gateway: "c", RateNanos: 9e9}}, {Demand: Demand{Gateway: "d", RateNanos: 1}}}
	last, got := "", ""
	for range 7 {
		for _, s := range Grant(Limit{RateNanos: 50e6, Burst: 1}, 1e6, p, tinyFor, last).Shares {
			if s.Grant > 0 {
				got, last = got+fmt.Sprint(s.Gateway, s.Grant, " "), s.Gateway
			}
		}
	}
	if want := "a1 c1 d1 a1 c1 d1 a1 "; got != want {
		t.Errorf("tokens went to %s, want %s", got, want)
	}
}

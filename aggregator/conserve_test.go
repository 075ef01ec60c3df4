package aggregator

import (
	"fmt"
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
		var kept, granted, rate int64
		lacking, room := false, int64(0)
		for i := range shares {
			s := &shares[i]
			k := held[s.Gateway].kept(s)
			kept += k
			granted += s.Grant
			rate += s.RateNanos
			if s.Grant < 0 || k+1e6*s.Grant > 1e6*s.Burst {
				t.Fatalf("%+v of %+v is more than its burst: %+v", s, p, shares)
			}
			if held[s.Gateway].RateNanos > 0 {
				lacking = true
				room += s.Burst - (k+999_999)/1e6
			}
		}
		if rate > l.RateNanos {
			t.Fatalf("rates add up to %d of %d", rate, l.RateNanos)
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

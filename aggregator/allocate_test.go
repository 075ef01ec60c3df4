package aggregator

import (
	"cmp"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func limits() *rapid.Generator[Limit] {
	return rapid.Custom(func(t *rapid.T) Limit {
		return Limit{RateNanos: rapid.OneOf(rapid.Int64Range(0, 100), rapid.Int64Range(1e9, 1000e9), rapid.Int64Range(0, math.MaxInt64)).Draw(t, "rate"),
			Burst: rapid.OneOf(rapid.Int64Range(0, 12), rapid.Int64Range(0, 2e9), rapid.Int64Range(0, math.MaxInt64)).Draw(t, "burst")}
	})
}

func demands(l Limit) *rapid.Generator[[]Demand] {
	return rapid.Custom(func(t *rapid.T) []Demand {
		n := rapid.IntRange(1, 12).Draw(t, "gateways")
		d := make([]Demand, n)
		for i, g := range rapid.Permutation([]string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"}).Draw(t, "names")[:n] {
			d[i] = Demand{Gateway: g, RateNanos: rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, l.RateNanos/int64(n)), rapid.Int64Range(0, l.RateNanos),
				rapid.Int64Range(-5, math.MaxInt64)).Draw(t, "demand"), Since: rapid.Int64Range(1, 5).Draw(t, "since")}
		}
		return d
	})
}

// TestAllocateProperties: what must hold of every division.
func TestAllocateProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limits().Draw(t, "limit")
		d := demands(l).Draw(t, "demands")
		n := int64(len(d))
		shares := Allocate(l, d)

		// one share each, in order, none negative, exact sums
		rate, burst := new(big.Int), new(big.Int)
		byName := make(map[string]Share)
		for i, s := range shares {
			if i > 0 && shares[i-1].Gateway >= s.Gateway {
				t.Fatalf("shares out of order: %+v", shares)
			}
			if s.RateNanos < 0 || s.Burst < 0 {
				t.Fatalf("negative share: %+v", s)
			}
			rate.Add(rate, big.NewInt(s.RateNanos))
			burst.Add(burst, big.NewInt(s.Burst))
			byName[s.Gateway] = s
		}
		if len(byName) != len(d) || rate.Cmp(big.NewInt(l.RateNanos)) != 0 || burst.Cmp(big.NewInt(l.Burst)) != 0 {
			t.Fatalf("shares of %+v add up to %v and %v: %+v", l, rate, burst, shares)
		}

		// the order of demands is nothing
		if again := Allocate(l, rapid.Permutation(d).Draw(t, "order")); fmt.Sprint(again) != fmt.Sprint(shares) {
			t.Fatalf("another order of demands gives\n%+v, not\n%+v", again, shares)
		}

		asks := func(x Demand) int64 { return max(x.RateNanos, 0) }
		if l.Burst >= n {
			for _, s := range shares {
				if s.Burst < 1 || s.RateNanos < l.RateNanos/n/floorPart {
					t.Fatalf("%+v has less than the floor of %+v", s, l)
				}
			}
		} else if l.Burst > 0 { // one token for each of those that asked first
			for _, with := range d {
				for _, without := range d {
					if byName[with.Gateway].Burst > 0 && byName[without.Gateway].Burst == 0 &&
						(asks(with) == 0 && asks(without) > 0 || asks(with) > 0 && asks(without) > 0 && with.Since > without.Since) {
						t.Fatalf("%+v got the token that %+v asked for first: %+v", with, without, shares)
					}
				}
			}
			for _, s := range shares {
				if s.Burst > 1 || s.Burst == 0 && s.RateNanos > 0 {
					t.Fatalf("%+v cannot be used", s)
				}
			}
		}

		// fairness and work conservation, among those who take part; 1/64 is for those who ask for nothing
		slack := l.RateNanos/floorPart + n
		lacking, sum := false, new(big.Int)
		for _, x := range d {
			sum.Add(sum, big.NewInt(asks(x)))
			s := byName[x.Gateway]
			lacking = lacking || s.Burst > 0 && s.RateNanos < asks(x)-slack
		}
		if l.Burst >= n && sum.Cmp(big.NewInt(l.RateNanos)) <= 0 && lacking {
			t.Fatalf("demands fit in %+v and one lacks: %+v of %+v", l, shares, d)
		}
		for _, x := range d {
			for _, y := range d {
				sx, sy := byName[x.Gateway], byName[y.Gateway]
				if sx.Burst == 0 || sy.Burst == 0 {
					continue
				}
				if sx.RateNanos < asks(x)-slack && sy.RateNanos-slack > sx.RateNanos {
					t.Fatalf("%+v lacks, has %d, and %+v has %d", x, sx.RateNanos, y, sy.RateNanos)
				}
				if asks(x) > asks(y) && sx.RateNanos < sy.RateNanos {
					t.Fatalf("%+v asks for more than %+v and has less: %+v", x, y, shares)
				}
				if lacking && sy.RateNanos-slack > asks(y) {
					t.Fatalf("one lacks and %+v has %d: %+v of %+v", y, sy.RateNanos, shares, d)
				}
			}
		}
	})
}

// TestAllocateAgainstWaterLevel: where demands do not fit, the division is the one with the water level found by bisection.
func TestAllocateAgainstWaterLevel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limit{RateNanos: rapid.Int64Range(1e9, 1e15).Draw(t, "rate"), Burst: 1e6}
		n := rapid.IntRange(2, 50).Draw(t, "gateways")
		d := make([]Demand, n)
		d[0] = Demand{Gateway: "g00", RateNanos: l.RateNanos} // with the floor of any other it is too much
		for i := 1; i < n; i++ {
			d[i] = Demand{Gateway: fmt.Sprintf("g%02d", i), RateNanos: rapid.Int64Range(0, 3*l.RateNanos/int64(n)+l.RateNanos/4).Draw(t, "demand")}
		}
		floor := float64(l.RateNanos / (int64(n) * floorPart))
		want := func(x Demand) float64 { return max(float64(x.RateNanos), floor) }
		lo, hi := 0.0, float64(l.RateNanos)
		for range 100 {
			level, total := (lo+hi)/2, 0.0
			for _, x := range d {
				total += min(want(x), level)
			}
			if total < float64(l.RateNanos) {
				lo = level
			} else {
				hi = level
			}
		}
		for i, s := range Allocate(l, d) {
			if w := min(want(d[i]), lo); math.Abs(float64(s.RateNanos)-w) > 1e-9*float64(l.RateNanos)+float64(n) {
				t.Fatalf("share %+v, want %.0f (level %.0f)", s, w, lo)
			}
		}
	})
}

// TestAllocateExamples are divisions with round numbers.
func TestAllocateExamples(t *testing.T) {
	rate := func(n ...int64) (d []Demand) {
		for i, r := range n {
			d = append(d, Demand{Gateway: string(rune('a' + i)), RateNanos: r, Since: int64(i + 1)})
		}
		return d
	}
	for _, tc := range []struct {
		name    string
		limit   Limit
		demands []Demand
		want    string // rate/burst of each
	}{
		{"idle: the even split", Limit{90, 30}, rate(0, 0, 0), "30/10 30/10 30/10"},
		{"little: still the even split", Limit{90, 30}, rate(20, 5, 0), "30/10 30/10 30/10"},
		{"half to spare", Limit{9000, 30}, rate(4000, 1000, 1000), "6000/19 1500/6 1500/5"},
		{"just fit: stretched", Limit{9600, 96}, rate(6000, 1000, 1000), "7200/71 1200/13 1200/12"},
		{"do not fit: fair", Limit{9000, 90}, rate(90000, 9000, 1000), "4000/40 4000/40 1000/10"},
		{"all on one: it has nearly all", Limit{1920, 192}, rate(5000, 0, 0), "1900/188 10/2 10/2"},
		{"a burst of one goes to the one that asks", Limit{30, 1}, rate(0, 5, 0), "0/0 30/1 0/0"},
		{"a burst of one goes to who asked first", Limit{30, 1}, []Demand{{"a", 9, 7}, {"b", 5, 3}, {"c", 0, 0}}, "0/0 30/1 0/0"},
		{"a burst of two among three", Limit{30, 2}, []Demand{{"a", 0, 0}, {"b", 50, 3}, {"c", 50, 4}}, "0/0 15/1 15/1"},
		{"no gateways are more than tokens", Limit{100, 3}, rate(0, 0, 0), "34/1 33/1 33/1"},
		{"nothing to divide", Limit{0, 0}, rate(5, 5), "0/0 0/0"},
		{"one gateway has all", Limit{77, 5}, rate(0), "77/5"},
		{"demands beyond any limit", Limit{math.MaxInt64, math.MaxInt64}, rate(math.MaxInt64, math.MaxInt64), "4611686018427387904/4611686018427387904 4611686018427387903/4611686018427387903"},
	} {
		var got []string
		for _, s := range Allocate(tc.limit, tc.demands) {
			got = append(got, fmt.Sprintf("%d/%d", s.RateNanos, s.Burst))
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: Allocate(%+v, %v) = %s, want %s", tc.name, tc.limit, tc.demands, strings.Join(got, " "), tc.want)
		}
	}
	if Allocate(Limit{1, 1}, nil) != nil {
		t.Error("shares for nobody")
	}
}

// TestAllocateSteady: a demand that moves by a few percent moves no share by more, and what coarse makes the same moves none.
func TestAllocateSteady(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limit{RateNanos: rapid.Int64Range(1e12, 1e15).Draw(t, "rate"), Burst: 1e6}
		d := []Demand{}
		for _, g := range []string{"a", "b", "c", "d"} {
			d = append(d, Demand{Gateway: g, RateNanos: rapid.Int64Range(0, l.RateNanos).Draw(t, "demand")})
		}
		moved := slices.Clone(d)
		for i := range moved {
			moved[i].RateNanos += moved[i].RateNanos / 100 * rapid.Int64Range(-1, 1).Draw(t, "percent")
		}
		a, b := Allocate(l, d), Allocate(l, moved)
		for i := range a {
			if diff := abs(a[i].RateNanos - b[i].RateNanos); diff > l.RateNanos/16 {
				t.Fatalf("demands %v and %v: share %+v became %+v", d, moved, a[i], b[i])
			}
		}
	})
}

func TestRepaying(t *testing.T) {
	l := Limit{RateNanos: 80e9, Burst: 160}
	for _, tc := range []struct{ debt, want int64 }{
		{-5, 80e9}, {0, 80e9}, {1_000_000, 79_500_000_000}, {80_000_000, 40e9}, {139_000_000, 10_500_000_000}, {140_000_000, 10e9}, {1e15, 10e9}, {math.MaxInt64, 10e9},
	} {
		if got := l.Repaying(tc.debt); got.RateNanos != tc.want || got.Burst != 160 {
			t.Errorf("Repaying(%d) = %+v, want %d and the burst", tc.debt, got, tc.want)
		}
	}
	if got := (Limit{RateNanos: 1, Burst: 1}).Repaying(1e6); got.RateNanos != 1 {
		t.Errorf("the slowest rate in debt = %d, want 1", got.RateNanos)
	}

	// 92 % in five seconds: gateways spend what they may, Redis refills at the whole rate
	debt := int64(100e6)
	for range 50 {
		debt -= (l.RateNanos - l.Repaying(debt).RateNanos) / 1e3 / 10
	}
	if debt > 100e6*8/100 {
		t.Errorf("debt after 5 s = %d µtokens of 100e6, want under 8 %%", debt)
	}
}

func TestCoarse(t *testing.T) {
	last := int64(0)
	for n := int64(0); n < 1<<12; n++ {
		c := coarse(n)
		if c < n || c > n+n/8 || c < last {
			t.Fatalf("coarse(%d) = %d, want from %d to %d and not below coarse(%d) = %d", n, c, n, n+n/8, n-1, last)
		}
		last = c
	}
	if c := coarse(MaxRateNanos); c < MaxRateNanos || cmp.Compare(c, MaxRateNanos+MaxRateNanos/8) > 0 {
		t.Errorf("coarse(MaxRateNanos) = %d", c)
	}
}

// BenchmarkAllocate1000 divides between 1000 gateways of mixed demands.
func BenchmarkAllocate1000(b *testing.B) {
	l := Limit{RateNanos: 1e15, Burst: 1e6}
	d := make([]Demand, 1000)
	for i := range d {
		d[i] = Demand{Gateway: fmt.Sprintf("gateway-%03d", i*7%1000), RateNanos: int64(i%10) * 4e11, Since: int64(i)}
	}
	b.ReportAllocs()
	for b.Loop() {
		if n := len(Allocate(l, d)); n != 1000 {
			b.Fatal(n)
		}
	}
}

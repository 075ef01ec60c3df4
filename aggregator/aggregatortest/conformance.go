package aggregatortest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/aggregator"
)

// Counter runs the contract of an aggregator.Counter over what open returns, which must be empty. The limits are so slow that a
// test earns no whole token.
func Counter(t *testing.T, open func(t *testing.T) aggregator.Counter) {
	limit := aggregator.Limit{RateNanos: 1_000_000_000 / 3600, Burst: 100} // 100 an hour at once, then 1 an hour
	key := aggregator.Key{Rule: "contract", Key: "acme"}
	use := func(gateway string, seq, cum, taken uint64) aggregator.Use {
		return aggregator.Use{Gateway: gateway, Boot: "b1", Seq: seq, Cum: cum, From: cum - taken, DemandNanos: 5e9, Span: 100 * time.Millisecond, Window: time.Second}
	}
	one := func(t *testing.T, c aggregator.Counter, k aggregator.Key, l aggregator.Limit, uses ...aggregator.Use) aggregator.KeyState {
		t.Helper()
		states, err := c.Fold(context.Background(), []aggregator.Fold{{Key: k, Limit: l, Uses: uses}})
		if err != nil {
			t.Fatal(err)
		}
		if len(states) != 1 || states[0].Key != k {
			t.Fatalf("Fold = %+v, want one state of %v", states, k)
		}
		return states[0]
	}
	tokens := func(s aggregator.KeyState) int64 { return (s.LevelMicros+900_000_000)/1_000_000 - 900 } // floor
	level := func(t *testing.T, s aggregator.KeyState, want int64) {
		t.Helper()
		if got := tokens(s); got != want {
			t.Errorf("level = %d tokens (%d µ), want %d", got, s.LevelMicros, want)
		}
	}

	t.Run("a key begins full and is charged", func(t *testing.T) {
		c := open(t)
		level(t, one(t, c, key, limit), 100)
		level(t, one(t, c, key, limit, use("g1", 1, 10, 10)), 90)
		level(t, one(t, c, key, limit, use("g1", 2, 15, 5), use("g2", 1, 7, 7)), 78)
	})
	t.Run("what a full bucket earns pays for use that is told behind others", func(t *testing.T) {
		c := open(t)
		fast := aggregator.Limit{RateNanos: 1_000_000_000_000, Burst: 1000}
		told := func(u aggregator.Use) aggregator.Use { u.Lag = 100 * time.Millisecond; return u }
		one(t, c, key, fast, told(use("g1", 1, 0, 0)))
		time.Sleep(200 * time.Millisecond)
		one(t, c, key, fast, told(use("g1", 2, 0, 0)))
		first := one(t, c, key, fast, told(use("g2", 1, 200, 200)))
		level(t, first, 900)
		second := one(t, c, key, fast, told(use("g3", 1, 300, 300))) // once
		level(t, second, 600+(second.At-first.At)/1000)

		granted := aggregator.Key{Rule: "contract", Key: "granted"} // its tokens do not leave the bucket when they are used
		for seq := range uint64(2) {
			s, err := c.Fold(context.Background(), []aggregator.Fold{{Key: granted, Limit: fast, Grants: true, Uses: []aggregator.Use{told(use("g1", seq+1, 0, 0))}}})
			if err != nil {
				t.Fatal(err)
			}
			first = s[0]
			time.Sleep(50 * time.Millisecond)
		}
		last := one(t, c, granted, fast, told(use("g2", 1, 200, 200)))
		level(t, last, 800+min((last.At-first.At)/1000, 100))
	})
	t.Run("repeats, reordering and gaps", func(t *testing.T) {
		c := open(t)
		one(t, c, key, limit, use("g1", 1, 10, 10))
		level(t, one(t, c, key, limit, use("g1", 1, 10, 10)), 90)
		level(t, one(t, c, key, limit, use("g1", 3, 30, 5)), 70) // 2 is missing: what it would have said is in 3
		level(t, one(t, c, key, limit, use("g1", 2, 25, 15)), 70)
		level(t, one(t, c, key, limit, use("g1", 3, 30, 5), use("g1", 3, 30, 5)), 70)
	})
	t.Run("incarnations and boots count on their own", func(t *testing.T) {
		c := open(t)
		one(t, c, key, limit, use("g1", 1, 10, 10))
		next := use("g1", 2, 4, 4)
		next.Incarnation = 1
		level(t, one(t, c, key, limit, next), 86)
		level(t, one(t, c, key, limit, use("g1", 1, 10, 10), next), 86)
		boot := use("g1", 1, 10, 10)
		boot.Boot = "b2"
		level(t, one(t, c, key, limit, boot), 76)
	})
	t.Run("an unknown incarnation is charged what is new", func(t *testing.T) {
		c := open(t)
		level(t, one(t, c, key, limit, use("g1", 900, 1_000_000, 5)), 95)
		level(t, one(t, c, key, limit, use("g1", 901, 1_000_003, 3)), 92)
	})
	t.Run("the newest report counts, also where some was given back", func(t *testing.T) {
		c := open(t)
		one(t, c, key, limit, use("g1", 1, 10, 10))
		level(t, one(t, c, key, limit, use("g1", 3, 7, 0)), 93)
		level(t, one(t, c, key, limit, use("g1", 2, 12, 2)), 93)
		level(t, one(t, c, key, limit, use("g1", 3, 7, 0), use("g1", 3, 9, 0)), 93)
		level(t, one(t, c, key, limit, use("g1", 4, 8, 0)), 92)
		level(t, one(t, c, key, limit, use("g2", 7, 5, 0)), 92) // its tokens were charged in another life of this key
		level(t, one(t, c, key, limit, use("g2", 8, 2, 0)), 95)
		level(t, one(t, c, key, limit, use("g2", 9, 0, 0), use("g1", 5, 0, 0)), 100) // and never above full
	})
	t.Run("a strict key begins full where nothing was ever forgotten", func(t *testing.T) {
		c := open(t)
		states, err := c.Fold(context.Background(), []aggregator.Fold{{Key: key, Limit: limit, Strict: true, Uses: []aggregator.Use{use("g1", 1, 3, 3)}},
			{Key: aggregator.Key{Rule: "contract", Key: "other"}, Limit: limit}})
		if err != nil || !states[0].New {
			t.Fatalf("Fold = %+v, %v, want a new key", states, err)
		}
		level(t, states[0], 97)
		level(t, states[1], 100)
		level(t, one(t, c, key, limit, use("g1", 1, 3, 3)), 97)
	})
	t.Run("settled use is not charged", func(t *testing.T) {
		c := open(t)
		level(t, one(t, c, key, limit, aggregator.Use{Gateway: "g1", Boot: "b1", Cum: 50, From: 50, Settled: 50}), 100)
		level(t, one(t, c, key, limit, aggregator.Use{Gateway: "g1", Boot: "b1", Seq: 4, Cum: 75, From: 70, Settled: 70}), 95)
	})
	t.Run("debt is bounded", func(t *testing.T) {
		c := open(t)
		level(t, one(t, c, key, limit, use("g1", 1, 150, 150)), -50)
		level(t, one(t, c, key, limit, use("g1", 2, 100_000, 100_000-150)), -101) // the burst, and 5 s of the rate
	})
	t.Run("what gateways hold is beyond the brim, also over a look", func(t *testing.T) {
		c := open(t)
		fold := func() int64 {
			states, err := c.Fold(context.Background(), []aggregator.Fold{{Key: key, Limit: aggregator.Limit{RateNanos: 1e9 * 1e6, Burst: 100}, Outstanding: 1000}})
			if err != nil {
				t.Fatal(err)
			}
			return tokens(states[0])
		}
		fold()
		if err := c.Mark(context.Background(), []aggregator.Key{key}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // it earns 20,000
		if got := fold(); got != 1100 {
			t.Errorf("level = %d, want the burst and all that is outstanding", got)
		}
		if live, err := c.Live(context.Background()); err != nil || len(live) != 1 {
			t.Fatalf("Live = %+v, %v", live, err)
		}
		if got := fold(); got != 1100 {
			t.Errorf("level after a look = %d, want 1100 as before", got)
		}
	})
	t.Run("a lower limit cuts the level, a higher one leaves it", func(t *testing.T) {
		c := open(t)
		one(t, c, key, limit, use("g1", 1, 10, 10))
		level(t, one(t, c, key, aggregator.Limit{RateNanos: limit.RateNanos, Burst: 20}), 20)
		level(t, one(t, c, key, limit), 20)
	})
	t.Run("demand rises at once and each report counts once", func(t *testing.T) {
		c := open(t)
		s := one(t, c, key, limit, use("g1", 1, 10, 10))
		if d := demandOf(s, "g1"); d.RateNanos != 5e9 || d.Since != s.At {
			t.Errorf("demand = %+v, want 5e9 since %d", d, s.At)
		}
		old := use("g1", 1, 10, 10)
		old.DemandNanos = 50e9
		if d := demandOf(one(t, c, key, limit, old), "g1"); d.RateNanos != 5e9 {
			t.Errorf("demand after the same report = %d, want 5e9", d.RateNanos)
		}
		high := use("g1", 2, 10, 0)
		high.DemandNanos, high.SureNanos = 60e9, 50e9
		if d := demandOf(one(t, c, key, limit, high), "g1"); d.RateNanos != 50e9 || d.Since != s.At {
			t.Errorf("demand after a higher one = %+v, want 50e9 since %d", d, s.At)
		}
		low := use("g1", 3, 11, 1)
		if d := demandOf(one(t, c, key, limit, low), "g1"); d.RateNanos < 5e9 || d.RateNanos > 50e9 {
			t.Errorf("demand after a lower one = %d, want between", d.RateNanos)
		}
		if d := demandOf(one(t, c, key, limit), "g2"); d.RateNanos != 0 {
			t.Errorf("demand of a gateway that never spoke = %d, want 0", d.RateNanos)
		}
	})
	t.Run("versions only grow", func(t *testing.T) {
		c := open(t)
		last := uint64(0)
		for range 50 {
			s := one(t, c, key, limit, use("g1", 1, 10, 10))
			if s.Version <= last {
				t.Fatalf("version %d after %d", s.Version, last)
			}
			last = s.Version
		}
	})
	t.Run("keys of any bytes, each on its own", func(t *testing.T) {
		c := open(t)
		var keys []aggregator.Key
		var folds []aggregator.Fold
		for _, s := range []string{"u1", "}", "}x", "{vip}", "a}b", "", "日本", "a:b", "%7D", "a b+c", "\x00\xff", strings.Repeat("k", 256)} {
			for _, rule := range []string{"a", "a:b", "{", "規則"} {
				k := aggregator.Key{Rule: rule, Key: s}
				keys = append(keys, k)
				folds = append(folds, aggregator.Fold{Key: k, Limit: limit, Uses: []aggregator.Use{use("g1", 1, uint64(len(keys)), uint64(len(keys)))}})
			}
		}
		if _, err := c.Fold(context.Background(), folds); err != nil {
			t.Fatal(err)
		}
		states, err := c.Fold(context.Background(), folds)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range states {
			if s.Key != keys[i] || tokens(s) != int64(100-i-1) {
				t.Errorf("state of %q = %d tokens of %q, want %d", keys[i], tokens(s), s.Key, 100-i-1)
			}
		}
		if err := c.Mark(context.Background(), keys); err != nil {
			t.Fatal(err)
		}
		live, err := c.Live(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if len(live) != len(keys) {
			t.Errorf("Live = %d keys, want %d", len(live), len(keys))
		}
		for _, s := range live {
			if i := slices.Index(keys, s.Key); i < 0 || tokens(s) != int64(100-i-1) || s.Limit != limit {
				t.Errorf("Live has %+v, want a state like the folded one", s)
			}
		}
	})
	t.Run("many keys and many gateways in one fold", func(t *testing.T) {
		c := open(t)
		var folds []aggregator.Fold
		for i := range 2500 {
			folds = append(folds, aggregator.Fold{Key: aggregator.Key{Rule: "r", Key: fmt.Sprint(i)}, Limit: limit, Uses: []aggregator.Use{use("g1", 1, uint64(i%100), uint64(i%100))}})
		}
		var crowd []aggregator.Use
		for i := range 1500 {
			crowd = append(crowd, aggregator.Use{Gateway: fmt.Sprintf("g%d", i), Boot: "b", Seq: 1, Cum: 1, DemandNanos: 1e9, Window: time.Minute})
		}
		folds[7].Uses = crowd
		folds[7].Limit.Burst = 10_000
		states, err := c.Fold(context.Background(), folds)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range states {
			want := int64(100 - i%100)
			if i == 7 {
				want = 8500
			}
			if tokens(s) != want {
				t.Fatalf("level of key %d = %d, want %d", i, tokens(s), want)
			}
		}
		if n := len(states[7].Demands); n != len(crowd) {
			t.Errorf("%d demands, want %d", n, len(crowd))
		}
	})
	t.Run("a look makes no key", func(t *testing.T) {
		c := open(t)
		if s := one(t, c, key, aggregator.Limit{}); s.Version != 0 {
			t.Errorf("state of an unknown key = %+v, want version 0", s)
		}
		if err := c.Mark(context.Background(), []aggregator.Key{key}); err != nil {
			t.Fatal(err)
		}
		live, err := c.Live(context.Background())
		if err != nil || len(live) != 0 {
			t.Errorf("Live = %v, %v, want none", live, err)
		}
	})
	t.Run("outstanding tokens and bounds", func(t *testing.T) {
		c := open(t)
		level(t, one(t, c, key, limit, use("g1", 1, 130, 130)), -30)
		fold := aggregator.Fold{Key: key, Limit: limit}
		for _, step := range []struct {
			bounds      *aggregator.Bounds
			outstanding int64
			want        int64
		}{
			{&aggregator.Bounds{LeastMicros: 7e6, MostMicros: 9e6}, 0, 7},
			{&aggregator.Bounds{LeastMicros: -5e6, MostMicros: 3e6}, 0, 3},
			{&aggregator.Bounds{LeastMicros: 500e6, MostMicros: 900e6}, 0, 100},
			{&aggregator.Bounds{LeastMicros: 500e6, MostMicros: 900e6}, 25, 125},
			{nil, 25, 125},
			{nil, 5, 105},
			{nil, 0, 100},
		} {
			fold.Bounds, fold.Outstanding = step.bounds, step.outstanding
			states, err := c.Fold(context.Background(), []aggregator.Fold{fold})
			if err != nil {
				t.Fatal(err)
			}
			level(t, states[0], step.want)
		}
	})
	t.Run("a key that is gone goes on from what it had", func(t *testing.T) {
		c := open(t)
		now := one(t, c, key, limit).At
		for i, step := range []struct {
			last aggregator.Level
			want int64
		}{
			{aggregator.Level{Micros: 40e6, At: now}, 30},
			{aggregator.Level{Micros: 40e6 + 500_000, At: now - 5*3600e6}, 35}, // five hours are five tokens
			{aggregator.Level{Micros: -60e6, At: now}, -70},
			{aggregator.Level{Micros: 40e6, At: now - 1e12}, 90}, // full long ago
			{aggregator.Level{Micros: 40e6, At: now + 3600e6}, 30},
			{aggregator.Level{Micros: 500e6, At: now}, 90},
		} {
			fold := aggregator.Fold{Key: aggregator.Key{Rule: "gone", Key: fmt.Sprint(i)}, Limit: limit, Last: &step.last, Uses: []aggregator.Use{use("g1", 1, 10, 10)}}
			for again := range 2 { // the second time it is there
				states, err := c.Fold(context.Background(), []aggregator.Fold{fold})
				if err != nil {
					t.Fatal(err)
				}
				if states[0].New != (again == 0) {
					t.Errorf("step %d: state %+v, want a new one the first time", i, states[0])
				}
				level(t, states[0], step.want)
			}
		}
	})
	t.Run("what was offered to several may be owed", func(t *testing.T) {
		c := open(t)
		for _, step := range []struct{ offered, want int64 }{{0, -100}, {7, -107}, {100, -150}} { // and what five seconds earn, which is no token
			k := aggregator.Key{Rule: "offered", Key: fmt.Sprint(step.offered)}
			states, err := c.Fold(context.Background(), []aggregator.Fold{{Key: k, Limit: limit, Offered: step.offered, Uses: []aggregator.Use{use("g1", 1, 250, 250)}}})
			if err != nil {
				t.Fatal(err)
			}
			if got := states[0].LevelMicros / 1e6; got != step.want {
				t.Errorf("with %d offered the debt is %d, want %d", step.offered, got, step.want)
			}
		}
	})
	t.Run("a key that was not there is new", func(t *testing.T) {
		c := open(t)
		if s := one(t, c, key, limit, use("g1", 1, 10, 10)); !s.New {
			t.Errorf("first state %+v, want a new one", s)
		}
		if s := one(t, c, key, limit, use("g1", 1, 10, 10)); s.New {
			t.Errorf("second state %+v, want none that is new", s)
		}
	})
	t.Run("tokens are taken one request at a time", func(t *testing.T) {
		c := open(t)
		take := func(costs ...int64) []aggregator.Taken {
			t.Helper()
			var takes []aggregator.Take
			for _, n := range costs {
				takes = append(takes, aggregator.Take{Key: key, Limit: limit, Cost: n})
			}
			taken, err := c.Take(context.Background(), takes)
			if err != nil {
				t.Fatal(err)
			}
			return taken
		}
		for i, want := range []struct {
			ok    bool
			level int64
			wait  time.Duration // to the minute
		}{{true, 40, 0}, {false, 40, 20 * time.Hour}, {true, 0, 0}, {false, 0, time.Hour}, {false, 0, -1}, {true, 5, 0}, {true, 0, 0}} {
			got := take([]int64{60, 60, 40, 1, 101, -5, 5}[i])[0]
			wait := got.Wait.Round(time.Minute)
			if got.Wait < 0 {
				wait = -1
			}
			if got.OK != want.ok || (got.LevelMicros+500_000)/1e6 != want.level || wait != want.wait {
				t.Errorf("take %d = %+v, want %+v", i, got, want)
			}
		}
		if all := take(-3, 2, 2); !all[1].OK || all[2].OK {
			t.Errorf("three at once = %+v, want the last refused", all)
		}
		level(t, one(t, c, key, limit, use("g1", 1, 4, 4)), -3)
		if got := take(1)[0]; got.OK {
			t.Errorf("taken from a bucket in debt: %+v", got)
		}
	})
	t.Run("epochs only grow", func(t *testing.T) {
		c := open(t)
		last := uint64(0)
		for range 5 {
			n, err := c.Epoch(context.Background())
			if err != nil || n <= last {
				t.Fatalf("Epoch = %d, %v after %d", n, err, last)
			}
			last = n
		}
	})
	t.Run("largest numbers", func(t *testing.T) {
		c := open(t)
		huge := aggregator.Limit{RateNanos: 1<<63 - 1, Burst: 1<<63 - 1}
		s := one(t, c, key, huge, aggregator.Use{Gateway: "g1", Boot: "b", Seq: 1<<64 - 1, Cum: 1<<53 - 1, DemandNanos: aggregator.MaxRateNanos, Window: 10 * time.Second})
		if s.Limit != huge || s.LevelMicros >= 0 || s.LevelMicros < -4e15 {
			t.Errorf("state = %+v, want that limit and a bounded debt", s)
		}
		if d := demandOf(s, "g1"); d.RateNanos != aggregator.MaxRateNanos {
			t.Errorf("demand = %d, want %d", d.RateNanos, int64(aggregator.MaxRateNanos))
		}
	})
}

func demandOf(s aggregator.KeyState, gateway string) aggregator.Demand {
	for _, d := range s.Demands {
		if d.Gateway == gateway {
			return d
		}
	}
	return aggregator.Demand{}
}

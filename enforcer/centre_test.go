package enforcer_test

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

const nano = 1_000_000_000 // nano-tokens per second

// share is a share of rule c's limit of 90/s, burst 90.
func share(key string, version uint64, rate, burst int64) schemas.Share {
	return schemas.Share{Rule: "c", Key: key, Version: version, RateNanos: rate * nano, Burst: burst, LimitRateNanos: 90 * nano, LimitBurst: 90}
}

func ninety(t *testing.T, key []limits.Dimension, consistency limits.Consistency) *limits.Policy {
	return policy(limits.Rule{Name: "c", Layer: limits.LayerContract, Key: key, Consistency: consistency, Fixed: per(t, 90, 1, time.Second, 90)})
}

// keyed runs a test with a rule by tenant, and with one that has no key.
func keyed(t *testing.T, run func(t *testing.T, dims []limits.Dimension, key string)) {
	t.Run("tenant", func(t *testing.T) { run(t, dims(limits.ByTenant), "a") })
	t.Run("no key", func(t *testing.T) { run(t, nil, "") })
}

func TestWithoutAShareAKeyHasItsPartOfTheFleet(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		e, _ := build(enforcer.Config{Fleet: 3}, ninety(t, d, limits.Shared))
		q := enforcer.Request{Tenant: "a", Cost: 1}
		if got := ask(e, 0, q, 100); got != 30 {
			t.Errorf("one of three: %d allowed, want 30", got)
		}
		if got := ask(e, sec/2, q, 100); got != 15 {
			t.Errorf("half a second later: %d allowed, want 15", got)
		}
		e, _ = build(enforcer.Config{Fleet: 3}, ninety(t, d, limits.Local))
		if got := ask(e, 0, q, 100); got != 90 {
			t.Errorf("local: %d allowed, want 90", got)
		}
		if e.Mode() != enforcer.Local {
			t.Errorf("mode %s, want local", e.Mode())
		}
	})
}

func TestSharesFollowVersionsAndTheLadder(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		e, c := build(enforcer.Config{Fleet: 3, StaleAfter: 2 * time.Second}, ninety(t, d, limits.Shared))
		q := enforcer.Request{Tenant: "a", Cost: 1}
		go100 := func(step string, now int64, want int) {
			t.Helper()
			c.Store(now)
			if got := ask(e, now, q, 100); got != want {
				t.Errorf("%s: %d allowed, want %d", step, got, want)
			}
		}
		mode := func(want string) {
			t.Helper()
			if e.Mode() != want {
				t.Errorf("at %v: mode %s, want %s", time.Duration(c.Load()), e.Mode(), want)
			}
		}
		mode(enforcer.Floor)
		go100("its part of the fleet", 0, 30)
		e.Apply(enforcer.Update{TTL: 10 * time.Second, Shares: []schemas.Share{share(key, 5, 60, 60), {Rule: "nobody", Key: key}}})
		mode(enforcer.Synced)
		go100("the share's rate", sec, 60)
		e.Apply(enforcer.Update{TTL: 10 * time.Second, Shares: []schemas.Share{share(key, 5, 1, 1), share(key, 4, 1, 1)}})
		go100("equal and older versions are ignored", 2*sec, 60)
		e.Apply(enforcer.Update{TTL: 10 * time.Second, Shares: []schemas.Share{{Rule: "c", Key: key, Version: 9, RateNanos: 1, Burst: 1, LimitRateNanos: 7, LimitBurst: 7}}})
		go100("a share of another limit is ignored", 3*sec, 60)
		e.Apply(enforcer.Update{TTL: 10 * time.Second, Shares: []schemas.Share{share(key, 6, 10, 20)}})
		go100("a smaller share", 4*sec, 10)
		go100("its burst", 7*sec, 20)
		mode(enforcer.Stale)
		go100("stale shares hold", 12*sec, 20)
		c.Store(14 * sec)
		mode(enforcer.Isolated)
		go100("isolated: the fleet's part", 16*sec, 30)
		e.Apply(enforcer.Update{TTL: 10 * time.Second})
		mode(enforcer.Synced)
		go100("the share holds again", 18*sec, 20)
		e.Apply(enforcer.Update{TTL: 10 * time.Second, Shares: []schemas.Share{share(key, 7, 90, 90)}})
		go100("all of it", 20*sec, 90)
	})
}

// TestWithoutTheCentreAKeyHasTheLastKnownWeight goes down the ladder and up again, with a key that has a share and one that has none.
func TestWithoutTheCentreAKeyHasTheLastKnownWeight(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		for _, shared := range []bool{false, true} {
			e, c := build(enforcer.Config{Fleet: 3, FloorAfter: time.Minute}, ninety(t, d, limits.Shared))
			q := enforcer.Request{Tenant: "a", Cost: 1}
			at := func(now int64, mode string, want int) {
				t.Helper()
				c.Store(now)
				collect(e, now, false)
				if got := ask(e, now+sec, q, 100); got != want || e.Mode() != mode {
					t.Errorf("share %v, at %v: %d allowed in mode %s, want %d in %s", shared, time.Duration(now), got, e.Mode(), want, mode)
				}
			}
			hear := func(gateways, weight int) {
				e.Apply(enforcer.Update{Gateways: gateways, Weight: weight, TTL: 10 * time.Second})
			}
			synced := 30
			if shared {
				synced = 20
				e.Apply(enforcer.Update{TTL: 10 * time.Second, Shares: []schemas.Share{share(key, 5, 10, 20)}})
			}
			hear(3, 600_000)
			ask(e, 0, q, 100)
			at(5*sec, enforcer.Stale, map[bool]int{false: 30, true: 20}[shared])
			at(20*sec, enforcer.Isolated, 54) // it had a rate of 30 or 10 for ten seconds, then 54
			at(60*sec, enforcer.Isolated, 54)
			at(71*sec, enforcer.Floor, 30)
			c.Store(80 * sec)
			hear(3, 600_000)
			at(85*sec, enforcer.Stale, synced)
			at(95*sec, enforcer.Isolated, 54)
			hear(3, 0) // a centre that has just begun, and does not know the weights yet
			at(106*sec, enforcer.Isolated, 54)
			hear(9, 0) // nor those of another fleet
			at(120*sec, enforcer.Isolated, 10)
			c.Store(130 * sec)
			hear(9, 50_000)
			at(150*sec, enforcer.Isolated, 4)
			at(210*sec, enforcer.Floor, 4) // the weight is less than the even part
		}
	})
}

// TestAFleetAloneKeepsTheLimit: gateways with any weights that add up to the whole, each on a rung of its own, admit no more than
// the limit together, whatever comes, and one token more for each whose part of the burst is less than one.
func TestAFleetAloneKeepsTheLimit(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		rapid.Check(t, func(rt *rapid.T) {
			tokens, burst := rapid.Int64Range(1, 100_000).Draw(rt, "tokens"), rapid.Int64Range(1, 1000).Draw(rt, "burst")
			span := rapid.SampledFrom([]time.Duration{time.Second, time.Minute}).Draw(rt, "per")
			n := rapid.IntRange(1, 12).Draw(rt, "gateways")
			left, small := 1_000_000, int64(0)
			var fleet []*enforcer.Enforcer
			var clocks []*clock
			for i := range n {
				weight := rapid.IntRange(0, left).Draw(rt, "weight")
				left -= weight
				weight = max(weight, 1) // 0 would be an even part
				if burst*int64(weight) < 1_000_000 || burst < int64(n) {
					small++
				}
				e, c := build(enforcer.Config{Fleet: n, Weight: weight, FloorAfter: time.Duration(1+n-i) * time.Second},
					policy(limits.Rule{Name: "c", Layer: limits.LayerContract, Key: d, Fixed: per(t, uint64(tokens), 1, span, burst)}))
				fleet, clocks = append(fleet, e), append(clocks, c)
			}
			admitted := 0
			for now := int64(0); now <= 10*sec; now += sec / 4 {
				for i, e := range fleet {
					clocks[i].Store(now)
					collect(e, now, false)
					admitted += ask(e, now, enforcer.Request{Tenant: "a", Cost: 1}, rapid.IntRange(0, 300).Draw(rt, "asked"))
				}
			}
			if most := tokens*10*sec/int64(span) + 1 + burst + small; int64(admitted) > most {
				rt.Fatalf("%d admitted in ten seconds, want at most %d", admitted, most)
			}
		})
	})
}

// TestAFleetWithoutGrantsKeepsTheLimit: gateways with any weights that add up to the whole, and any shares of a limit that is kept by
// grants, some of which were told that none come and others heard nothing, admit no more than the limit together.
func TestAFleetWithoutGrantsKeepsTheLimit(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		rapid.Check(t, func(rt *rapid.T) {
			tokens, burst := rapid.Int64Range(1, 1000).Draw(rt, "tokens"), rapid.Int64Range(1, 1000).Draw(rt, "burst")
			consistency := rapid.SampledFrom([]limits.Consistency{limits.Lease, limits.Strict}).Draw(rt, "consistency")
			n := rapid.IntRange(1, 12).Draw(rt, "gateways")
			if rapid.Bool().Draw(rt, "tiny") {
				burst, consistency = min(burst, 2*int64(n)-1), limits.Shared
			}
			left, small := 1_000_000, int64(0)
			var fleet []*enforcer.Enforcer
			var clocks []*clock
			var frozen []bool
			for range n {
				weight := rapid.IntRange(0, left).Draw(rt, "weight")
				left -= weight
				weight = max(weight, 1) // 0 would be an even part
				if burst*int64(weight) < 1_000_000 || burst < int64(n) {
					small++
				}
				e, c := build(enforcer.Config{}, policy(limits.Rule{Name: "c", Layer: limits.LayerContract, Key: d, Consistency: consistency, Fixed: per(t, uint64(tokens), 1, time.Second, burst)}))
				u := enforcer.Update{Gateways: n, Weight: weight, TTL: 40 * time.Second}
				share := schemas.Share{Rule: "c", Key: key, Version: 1, LimitRateNanos: tokens * nano, LimitBurst: burst}
				switch rapid.IntRange(0, 2).Draw(rt, "share") {
				case 0:
					share.Burst = burst / int64(n)
					u.Shares = []schemas.Share{share}
				case 1:
					share.RateNanos, share.Burst = tokens*nano/int64(n), max(burst/int64(n), 1)
					u.Shares = []schemas.Share{share}
				}
				e.Apply(u)
				fleet, clocks, frozen = append(fleet, e), append(clocks, c), append(frozen, rapid.Bool().Draw(rt, "frozen"))
			}
			admitted := 0
			for now := int64(0); now <= 21*sec; now += sec / 4 {
				for i, e := range fleet {
					clocks[i].Store(now)
					if frozen[i] {
						e.Apply(enforcer.Update{TTL: 40 * time.Second, Frozen: true})
					}
					collect(e, now, false)
					if now >= 11*sec { // what was heard lapses after ten
						admitted += ask(e, now, enforcer.Request{Tenant: "a", Cost: 1}, rapid.IntRange(0, 300).Draw(rt, "asked"))
					}
				}
			}
			if most := tokens*10 + 1 + burst + small; int64(admitted) > most {
				rt.Fatalf("%d admitted in ten seconds, want at most %d", admitted, most)
			}
		})
	})
}

// TestAGatewayRemembersItsWeight: one that starts while the centre is away has what an earlier life was told.
func TestAGatewayRemembersItsWeight(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		e, c := build(enforcer.Config{Fleet: 3, Weight: 600_000}, ninety(t, d, limits.Shared))
		q := enforcer.Request{Tenant: "a", Cost: 1}
		if got := ask(e, 0, q, 100); got != 54 || e.Mode() != enforcer.Isolated {
			t.Errorf("%d allowed in mode %s, want 54 in isolated", got, e.Mode())
		}
		c.Store(11 * 60 * sec)
		collect(e, c.Load(), false)
		if got := ask(e, c.Load()+sec, q, 100); got != 30 || e.Mode() != enforcer.Floor {
			t.Errorf("after eleven minutes: %d allowed in mode %s, want 30 in floor", got, e.Mode())
		}
	})
}

func TestTheFleetGrows(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		e, c := build(enforcer.Config{}, ninety(t, d, limits.Shared))
		q := enforcer.Request{Tenant: "a", Cost: 1}
		e.Check(0, &q)
		e.Apply(enforcer.Update{Gateways: 9})
		if got := ask(e, 0, q, 100); got != 10 {
			t.Errorf("one of nine: %d allowed, want 10", got)
		}
		c.Store(sec)
		e.Apply(enforcer.Update{Gateways: 3})
		if got := ask(e, 2*sec, q, 100); got != 30 {
			t.Errorf("one of three: %d allowed, want 30", got)
		}
	})
}

func TestAPolicyThatChangesALimitDropsItsShares(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		e, _ := build(enforcer.Config{Fleet: 3}, ninety(t, d, limits.Shared))
		q := enforcer.Request{Tenant: "a", Cost: 1}
		e.Apply(enforcer.Update{TTL: time.Hour, Shares: []schemas.Share{share(key, 1, 60, 60)}})
		e.SetPolicy(ninety(t, d, limits.Shared))
		if got := ask(e, sec, q, 100); got != 60 {
			t.Errorf("the same limit: %d allowed, want 60", got)
		}
		e.SetPolicy(policy(limits.Rule{Name: "c", Layer: limits.LayerContract, Key: d, Fixed: per(t, 30, 1, time.Second, 30)}))
		if got := ask(e, 100*sec, q, 100); got != 10 {
			t.Errorf("another limit: %d allowed, want 10", got)
		}
		// Back again: the share was for a limit that was gone.
		e.SetPolicy(ninety(t, d, limits.Shared))
		if got := ask(e, 200*sec, q, 100); got != 30 {
			t.Errorf("the first limit again: %d allowed, want 30 until the centre speaks", got)
		}
	})
}

func TestAShareFindsEveryKindOfKey(t *testing.T) {
	long := strings.Repeat("x", 1000)
	for _, key := range [][2]string{{"a", "b"}, {"", ""}, {"a|b", "c"}, {"#a", "%"}, {"\xff\x00", "é"}, {long, "b"}} {
		e, _ := build(enforcer.Config{Fleet: 3}, ninety(t, dims(limits.ByTenant, limits.ByUser), limits.Shared))
		q := enforcer.Request{Tenant: key[0], User: key[1], Cost: 1}
		ask(e, 0, q, 1)
		got := collect(e, 0, false)
		if len(got) != 1 {
			t.Fatalf("%q: a key without a share is hot; collected %+v", key, got)
		}
		e.Apply(enforcer.Update{Shares: []schemas.Share{share(got[0].Key, 1, 60, 60)}})
		if n := ask(e, sec, q, 100); n != 60 {
			t.Errorf("%q, reported as %q: %d allowed, want its share of 60", key, got[0].Key, n)
		}
		if got := collect(e, sec, true); len(got) != 1 || got[0].Capacity != 60 || got[0].LimitBurst != 90 || got[0].RateNanos != 60*nano {
			t.Errorf("%q: collected %+v, want one bucket of 60 of 90", key, got)
		}
	}
}

func TestHotIsWhatIsRefusedNearlyEmptyOrWantsAShare(t *testing.T) {
	signalled := func(e *enforcer.Enforcer) bool {
		select {
		case <-e.Hot():
			return true
		default:
			return false
		}
	}
	e, _ := build(enforcer.Config{}, ninety(t, dims(limits.ByTenant), limits.Shared))
	q := enforcer.Request{Tenant: "a", Cost: 1}
	ask(e, 0, q, 60)
	if got := collect(e, 0, false); len(got) != 0 || signalled(e) {
		t.Errorf("two thirds spent, alone: hot %+v", got)
	}
	ask(e, 0, q, 10)
	if got := collect(e, sec/4, false); len(got) != 1 || got[0].Taken != 70 || got[0].TokensMin != 20 || got[0].TokensLast != 42 || got[0].Window != 250*time.Millisecond || signalled(e) {
		t.Errorf("nearly empty: hot %+v", got)
	}
	if got := collect(e, sec/4, true); len(got) != 0 {
		t.Errorf("reported twice: %+v", got)
	}
	ask(e, sec/4, q, 50)
	if !signalled(e) {
		t.Error("no signal at the first refusal")
	}
	ask(e, sec/4, q, 5)
	if signalled(e) {
		t.Error("a signal at the second refusal")
	}
	if got := collect(e, sec/2, false); len(got) != 1 || got[0].Refused != 13 || got[0].Cum != 112 {
		t.Errorf("refused: hot %+v", got)
	}

	e, _ = build(enforcer.Config{Fleet: 3}, ninety(t, dims(limits.ByTenant), limits.Shared))
	ask(e, 0, q, 1)
	if got := collect(e, 0, false); len(got) != 1 || signalled(e) {
		t.Errorf("first seen in a fleet: hot %+v", got)
	}
	ask(e, 0, q, 20)
	if !signalled(e) {
		t.Error("no signal from a key without a share that has spent half")
	}
}

// TestWithoutGrantsAKeyHasTheLastKnownWeight: what lives by grants, or by asking the centre, has this gateway's weight of its limit as soon
// as the centre says that it is without its store, or says nothing for so long that grants lapse; whatever share it had. Other limits
// stay as they are.
func TestWithoutGrantsAKeyHasTheLastKnownWeight(t *testing.T) {
	keyed(t, func(t *testing.T, d []limits.Dimension, key string) {
		for _, c := range []struct {
			consistency limits.Consistency
			tokens      int64 // of the limit, a second; also its burst
			want        int   // a second, of three fifths where it lapses, else of a third
		}{{limits.Lease, 90, 54}, {limits.Strict, 90, 54}, {limits.Shared, 90, 30}, {limits.Shared, 5, 3}} {
			for what, given := range map[string]*schemas.Share{"no share": nil, "grants": {Burst: c.tokens}, "the even share": {RateNanos: c.tokens * nano / 3, Burst: max(c.tokens/3, 1)}} {
				if given != nil && given.RateNanos == 0 && c.want == 30 {
					continue // nobody keeps that limit by grants
				}
				for _, frozen := range []bool{true, false} {
					e, clock := build(enforcer.Config{Fleet: 3, StaleAfter: 750 * time.Millisecond},
						policy(limits.Rule{Name: "c", Layer: limits.LayerContract, Key: d, Consistency: c.consistency, Fixed: per(t, uint64(c.tokens), 1, time.Second, c.tokens)}))
					q := enforcer.Request{Tenant: "a", Cost: 1}
					u := enforcer.Update{Gateways: 3, Weight: 600_000, TTL: 3 * time.Second}
					if given != nil {
						share := *given
						share.Rule, share.Key, share.Version, share.LimitRateNanos, share.LimitBurst = "c", key, 5, c.tokens*nano, c.tokens
						u.Shares = []schemas.Share{share}
					}
					e.Apply(u)
					ask(e, 0, q, 100)
					u.Shares, u.Frozen = nil, true
					until := sec - sec/10
					if frozen {
						until = 2 * sec
					}
					for now := int64(0); now <= until; now += sec / 10 {
						clock.Store(now)
						if frozen {
							e.Apply(u)
						}
						collect(e, now, false)
					}
					ask(e, until, q, 100)
					if got := ask(e, until+sec, q, 100); got != c.want || e.Mode() != enforcer.Stale {
						t.Errorf("%s of %d, %s, frozen %v: %d allowed in mode %s, want %d in stale", c.consistency, c.tokens, what, frozen, got, e.Mode(), c.want)
					}
					u.Weight = 400_000
					clock.Store(until + sec)
					e.Apply(u) // another weight, and still without its store
					if got, want := ask(e, until+2*sec, q, 100), map[int]int{54: 36, 30: 30, 3: 2}[c.want]; got != want {
						t.Errorf("%s of %d, %s, frozen %v: with another weight %d allowed, want %d", c.consistency, c.tokens, what, frozen, got, want)
					}
					u.Frozen = false
					clock.Store(until + 2*sec)
					e.Apply(u)
					want := 0
					if given == nil || given.RateNanos > 0 {
						want = int(c.tokens) * 2 / 9 // a third, for two thirds of a second
					}
					if got := ask(e, until+2*sec+2*sec/3+1, q, 100); got != want {
						t.Errorf("%s of %d, %s, frozen %v: with the store again %d allowed, want %d", c.consistency, c.tokens, what, frozen, got, want)
					}
				}
			}
		}
	})
}

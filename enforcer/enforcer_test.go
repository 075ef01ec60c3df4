package enforcer_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
)

const sec = int64(time.Second)

func per(t testing.TB, num, den uint64, d time.Duration, burst int64) bucket.Limit {
	t.Helper()
	r, err := bucket.NewRate(num, den, d)
	if err != nil {
		t.Fatal(err)
	}
	return bucket.Limit{Rate: r, Burst: burst}
}

func dims(kinds ...limits.DimensionKind) (d []limits.Dimension) {
	for _, k := range kinds {
		d = append(d, limits.Dimension{Kind: k})
	}
	return d
}

func policy(rules ...limits.Rule) *limits.Policy { return &limits.Policy{Rules: rules} }

// clock is a Config.Clock that a test sets.
type clock struct{ atomic.Int64 }

func build(cfg enforcer.Config, p *limits.Policy) (*enforcer.Enforcer, *clock) {
	c := new(clock)
	cfg.Clock = c.Load
	if cfg.Stripes == 0 {
		cfg.Stripes = 1
	}
	e := enforcer.New(cfg)
	if p != nil {
		e.SetPolicy(p)
	}
	return e, c
}

func collect(e *enforcer.Enforcer, now int64, all bool) (out []enforcer.Bucket) {
	e.Collect(now, all, func(b enforcer.Bucket) { out = append(out, b) })
	return out
}

// one asks n times and returns how many were allowed.
func ask(e *enforcer.Enforcer, now int64, q enforcer.Request, n int) (allowed int) {
	for range n {
		if e.Check(now, &q).Allowed {
			allowed++
		}
	}
	return allowed
}

func TestNoPolicyRefuses(t *testing.T) {
	e, _ := build(enforcer.Config{}, nil)
	if d := e.Check(0, &enforcer.Request{Cost: 1}); d.Allowed || d.Reason != enforcer.ReasonNoPolicy || d.RetryIn != bucket.Never {
		t.Errorf("Check = %+v, want a refusal", d)
	}
}

func funnel(t testing.TB) *limits.Policy {
	return policy(
		limits.Rule{Name: "guard", Layer: limits.LayerGuard, Fixed: per(t, 100, 1, time.Second, 100)},
		limits.Rule{Name: "contract", Layer: limits.LayerContract, Key: dims(limits.ByTenant), Fixed: per(t, 1, 1, time.Second, 5)},
		limits.Rule{Name: "export", Layer: limits.LayerRoute, Key: dims(limits.ByRoute), Routes: []string{"export"}, Fixed: per(t, 1, 2, time.Second, 2)},
	)
}

func TestTheFunnelNamesTheFirstRefusalAndARefusalTakesNothing(t *testing.T) {
	e, _ := build(enforcer.Config{}, funnel(t))
	left := func(tenant string) (l []int64) {
		d := e.Check(0, &enforcer.Request{Tenant: tenant, Route: "export"})
		for i := range int(d.N) {
			l = append(l, d.Standing(i).Remaining)
		}
		return l
	}
	want := func(step string, got, want any) {
		t.Helper()
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", step, got, want)
		}
	}
	want("export", ask(e, 0, enforcer.Request{Tenant: "a", Route: "export", Cost: 1}, 2), 2)
	want("left", left("a"), []int64{98, 3, 0})
	d := e.Check(0, &enforcer.Request{Tenant: "b", Route: "export"})
	want("fewest left", []any{d.Allowed, d.Rule, d.Remaining, d.Burst, d.Standing(2).Rule.Name, d.Standing(2).Limit.Burst}, []any{true, "", 0, 2, "export", 2})
	d = e.Check(0, &enforcer.Request{Tenant: "a", Route: "export", Cost: 1})
	want("refused by", []any{d.Allowed, d.Rule, d.Layer, d.Reason, d.RetryIn, d.Remaining, d.Burst},
		[]any{false, "export", "route", enforcer.ReasonLimit, 2 * time.Second, 0, 2})
	want("left after a refusal", left("a"), []int64{98, 3, 0})
	want("elsewhere", ask(e, 0, enforcer.Request{Tenant: "a", Route: "other", Cost: 1}, 9), 3)
	d = e.Check(0, &enforcer.Request{Tenant: "a", Route: "export", Cost: 1})
	want("both are empty", []any{d.Rule, d.RetryIn}, []any{"contract", time.Second})
	d = e.Check(0, &enforcer.Request{Tenant: "b", Route: "x", Cost: 6})
	want("above the burst", []any{d.Rule, d.Reason, d.RetryIn}, []any{"contract", enforcer.ReasonCost, bucket.Never})
	d = e.Check(0, &enforcer.Request{Tenant: "b", Route: "x", Cost: -5})
	want("negative", []any{d.Allowed, d.Rule, d.Reason}, []any{false, "guard", enforcer.ReasonCost})
	want("left of b", left("b"), []int64{95, 5, 0})
}

func TestB055CostZeroIsAPeek(t *testing.T) {
	e, _ := build(enforcer.Config{}, policy(limits.Rule{Name: "c", Key: dims(limits.ByTenant), Fixed: per(t, 1, 1, time.Hour, 10)}))
	for _, want := range []int64{10, 9} {
		for range 100 {
			if d := e.Check(0, &enforcer.Request{Tenant: "a"}); !d.Allowed || d.Remaining != want {
				t.Fatalf("peek = %+v, want %d remaining", d, want)
			}
		}
		e.Check(0, &enforcer.Request{Tenant: "a", Cost: 1})
	}
	if got := collect(e, sec, true); len(got) != 1 || got[0].Taken != 2 {
		t.Errorf("collected %+v, want 2 taken", got)
	}
}

func TestB063TwoRulesForOneUserAreTwoBuckets(t *testing.T) {
	e, _ := build(enforcer.Config{}, policy(
		limits.Rule{Name: "a", Key: dims(limits.ByUser), Routes: []string{"a"}, Fixed: per(t, 10, 1, 30*24*time.Hour, 10)},
		limits.Rule{Name: "b", Key: dims(limits.ByUser), Routes: []string{"b"}, Fixed: per(t, 5, 1, time.Hour, 5)},
	))
	if got := ask(e, 0, enforcer.Request{User: "u", Route: "a", Cost: 1}, 4); got != 4 {
		t.Errorf("a: %d", got)
	}
	if got := ask(e, 0, enforcer.Request{User: "u", Route: "b", Cost: 1}, 6); got != 5 {
		t.Errorf("b: %d allowed, want 5", got)
	}
	if d := e.Check(0, &enforcer.Request{User: "u", Route: "a"}); d.Remaining != 6 {
		t.Errorf("a: %d remaining, want 6", d.Remaining)
	}
}

func TestB021PartsOfAKeyDoNotRunTogether(t *testing.T) {
	e, _ := build(enforcer.Config{}, policy(
		limits.Rule{Name: "c", Key: dims(limits.ByTenant, limits.ByUser), Fixed: per(t, 1, 1, time.Hour, 5)}))
	keys := 0
	for _, sep := range []string{":", "|", "/", ".", "%3A", `\`, "%7C", "#", "\x00", "\xff", "é"} {
		long := strings.Repeat("x", 300)
		for _, p := range [][2]string{{"a" + sep + "b", "c"}, {"a", "b" + sep + "c"}, {"", "a" + sep}, {"a" + sep, ""}, {sep + long, "c"}, {sep, long + "c"}} {
			keys++
			if got := ask(e, 0, enforcer.Request{Tenant: p[0], User: p[1], Cost: 1}, 10); got != 5 {
				t.Errorf("tenant %q user %q: %d allowed, want 5", p[0], p[1], got)
			}
		}
	}
	seen := map[string]bool{}
	for _, b := range collect(e, 0, true) {
		if seen[b.Key] || len(b.Key) > enforcer.MaxKeyBytes || strings.ToValidUTF8(b.Key, "") != b.Key {
			t.Errorf("key %q is doubled, too long or no text", b.Key)
		}
		seen[b.Key] = true
	}
	if len(seen) != keys {
		t.Errorf("%d keys reported, want %d", len(seen), keys)
	}
}

func TestB079AShadowRuleCountsAndNeverRefuses(t *testing.T) {
	rule := limits.Rule{Name: "s", Layer: limits.LayerContract, Mode: limits.Shadow, Key: dims(limits.ByTenant), Fixed: per(t, 1, 1, time.Hour, 1)}
	refused := uint64(0)
	for range 2 { // gateways
		e, _ := build(enforcer.Config{}, policy(rule))
		for i := range 4 {
			d := e.Check(0, &enforcer.Request{Tenant: "a", Cost: 1})
			if !d.Allowed || d.Rule != "" || (len(d.Shadow) == 1) != (i > 0) {
				t.Fatalf("request %d = %+v", i, d)
			}
		}
		for _, b := range collect(e, sec, true) {
			if b.Mode != "shadow" {
				t.Errorf("mode %q", b.Mode)
			}
			refused += b.Refused
		}
	}
	if refused != 6 { // each gateway has the whole limit until the centre is heard
		t.Errorf("would have refused %d, want 3 + 3", refused)
	}
}

func TestShadowTakesOnlyFromWhatIsAdmitted(t *testing.T) {
	e, _ := build(enforcer.Config{}, policy(
		limits.Rule{Name: "s", Mode: limits.Shadow, Key: dims(limits.ByTenant), Fixed: per(t, 1, 1, time.Hour, 5)},
		limits.Rule{Name: "c", Key: dims(limits.ByTenant), Fixed: per(t, 1, 1, time.Hour, 2)},
	))
	ask(e, 0, enforcer.Request{Tenant: "a", Cost: 1}, 10)
	for _, b := range collect(e, 0, true) {
		if b.Rule == "s" && (b.Taken != 2 || b.Refused != 0) {
			t.Errorf("shadow took %d and refused %d, want 2 and 0", b.Taken, b.Refused)
		}
	}
}

func TestB075LimitsChangeOnLiveKeys(t *testing.T) {
	five, two, hundred := per(t, 5, 1, time.Second, 5), per(t, 2, 1, time.Second, 2), per(t, 100, 1, time.Second, 100)
	for name, rule := range map[string]func(bucket.Limit) *limits.Policy{
		"key": func(l bucket.Limit) *limits.Policy {
			return policy(limits.Rule{Name: "c", Key: dims(limits.ByTenant), Fixed: l})
		},
		"no key": func(l bucket.Limit) *limits.Policy { return policy(limits.Rule{Name: "c", Fixed: l}) },
	} {
		t.Run(name, func(t *testing.T) {
			e, c := build(enforcer.Config{}, rule(five))
			q := enforcer.Request{Tenant: "a", Cost: 1}
			e.Check(-sec, &q)
			e.SetPolicy(rule(two))
			if got := ask(e, 0, q, 5); got != 2 {
				t.Errorf("lowered: %d allowed, want 2", got)
			}
			if got := ask(e, sec, q, 5); got != 2 {
				t.Errorf("after a second: %d allowed, want 2", got)
			}
			c.Store(sec)
			e.SetPolicy(rule(hundred))
			if d := e.Check(sec, &q); d.Allowed || d.RetryIn > 10*time.Millisecond {
				t.Errorf("raised: %+v, want a wait of at most 10 ms", d)
			}
			got := 0
			for now := sec; now <= sec+sec/2; now += 10e6 {
				got += ask(e, now, q, 1)
			}
			if got != 50 {
				t.Errorf("raised: %d allowed within 0.5 s, want 50", got)
			}
		})
	}
}

func TestB080CountsGoOnOverReloads(t *testing.T) {
	e, _ := build(enforcer.Config{}, funnel(t))
	q := enforcer.Request{Tenant: "a", Cost: 1}
	ask(e, 0, q, 3)
	for range 20 {
		e.SetPolicy(funnel(t))
	}
	ask(e, 0, q, 3) // one is refused
	for _, b := range collect(e, 0, true) {
		if b.Rule == "contract" && (b.Cum != 5 || b.Taken != 5 || b.Refused != 1 || b.TokensLast != 0) {
			t.Errorf("contract = %+v, want 5 taken, 1 refused", b)
		}
	}
}

func TestARemovedRuleReportsItsLastCounts(t *testing.T) {
	e, _ := build(enforcer.Config{}, funnel(t))
	ask(e, 0, enforcer.Request{Tenant: "a", Cost: 1}, 3)
	p := funnel(t)
	p.Rules = p.Rules[:1]
	e.SetPolicy(p)
	found := false
	for _, b := range collect(e, 0, true) {
		if b.Rule == "contract" {
			found = true
			if b.Cum != 3 || b.Key != "a" || b.Layer != "contract" {
				t.Errorf("contract = %+v", b)
			}
		}
	}
	if !found {
		t.Error("the removed rule said nothing")
	}
}

func TestCheckDoesNotAllocate(t *testing.T) {
	p := funnel(t)
	p.Rules = append(p.Rules, limits.Rule{Name: "s", Mode: limits.Shadow, Key: dims(limits.ByTenant, limits.ByIP), Fixed: per(t, 1, 1, time.Hour, 1)})
	for _, stripes := range []int{1, 4} {
		e, _ := build(enforcer.Config{Stripes: stripes}, p)
		now := int64(0)
		q := enforcer.Request{Tenant: "acme", Route: "export", IP: "198.18.0.1", Cost: 1}
		if n := testing.AllocsPerRun(1000, func() { now += sec / 10; e.Check(now, &q) }); n != 0 {
			t.Errorf("%d stripes: %v allocations a check, want 0", stripes, n)
		}
	}
}

// Never one token more than rate*t + burst, however many ask.
func TestConcurrentChecksNeverOverAdmit(t *testing.T) {
	const burst = 5000
	for name, key := range map[string][]limits.Dimension{"key": dims(limits.ByTenant), "pool": nil} {
		for _, stripes := range []int{1, 4} {
			e, _ := build(enforcer.Config{Stripes: stripes}, policy(limits.Rule{Name: "c", Key: key, Fixed: per(t, 1, 1, time.Second, burst)}))
			var admitted, now atomic.Int64
			admitted.Add(int64(ask(e, 0, enforcer.Request{Tenant: "a", Cost: 1}, 1))) // from here on the bucket refills
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for range 2000 {
						if e.Check(now.Add(sec/1000), &enforcer.Request{Tenant: "a", Cost: 1}).Allowed {
							admitted.Add(1)
						}
					}
				})
			}
			wg.Wait()
			most := burst + now.Load()/sec
			if got := admitted.Load(); got > most || got < most-burst/128-1 || (key != nil && got != most) {
				t.Errorf("%s, %d stripes: admitted %d, want %d", name, stripes, got, most)
			}
		}
	}
}

func TestStripesAreReclaimedBeforeAnythingIsRefused(t *testing.T) {
	const burst = 26000
	e, _ := build(enforcer.Config{Stripes: 8}, policy(limits.Rule{Name: "guard", Fixed: per(t, 0, 1, time.Second, burst)}))
	var admitted atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			admitted.Add(int64(ask(e, 0, enforcer.Request{Cost: 1}, burst/4)))
		})
	}
	wg.Wait()
	if admitted.Load() != burst {
		t.Errorf("admitted %d, want exactly %d", admitted.Load(), burst)
	}
	for _, b := range collect(e, 0, true) {
		if b.Taken != burst || b.Cum != burst || b.Refused != burst || b.TokensLast != 0 || b.TokensMin != 0 {
			t.Errorf("guard = %+v, want %d taken and as many refused", b, burst)
		}
	}
}

// Refusals further down the funnel give the guard's token back, from whichever P.
func TestGivingBackNeverMints(t *testing.T) {
	e, _ := build(enforcer.Config{Stripes: 4}, policy(
		limits.Rule{Name: "guard", Layer: limits.LayerGuard, Fixed: per(t, 0, 1, time.Second, 3000)},
		limits.Rule{Name: "c", Layer: limits.LayerContract, Key: dims(limits.ByTenant), Fixed: per(t, 0, 1, time.Second, 100)}))
	var admitted atomic.Int64
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for range 4000 {
				admitted.Add(int64(ask(e, 0, enforcer.Request{Tenant: fmt.Sprint(rng.IntN(40)), Cost: 1}, 1)))
			}
		})
	}
	wg.Wait()
	if got := admitted.Load(); got != 3000 {
		t.Errorf("admitted %d, want 3000: the guard's limit, with 40 tenants of 100", got)
	}
	for _, b := range collect(e, 0, true) {
		if b.Rule == "guard" && (b.Taken != 3000 || b.Cum != 3000) {
			t.Errorf("guard = %+v", b)
		}
	}
}

func TestUnlimitedAndDeniedTenants(t *testing.T) {
	p, err := limits.Parse("policy.yaml", []byte(`
version: 1
identity: {tenant: {header: X-App-Key}}
plans:
  free: {rate: unlimited}
  none: {rate: 0}
  some: {rate: 1/s, burst: 2}
tenants:
  a: {plan: free}
  b: {plan: none}
  c: {plan: some}
default_plan: deny
rules:
  - {name: guard, layer: guard, key: [], rate: 100000/s, burst: 200000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
`))
	if err != nil {
		t.Fatal(err)
	}
	e, _ := build(enforcer.Config{}, p)
	for tenant, want := range map[string]int{"a": 1000, "b": 0, "c": 2, "nobody": 0} {
		if got := ask(e, 0, enforcer.Request{Tenant: tenant, Cost: 1}, 1000); got != want {
			t.Errorf("%s: %d allowed, want %d", tenant, got, want)
		}
	}
	if d := e.Check(0, &enforcer.Request{Tenant: "b"}); d.Allowed || d.Reason != enforcer.ReasonDenied {
		t.Errorf("a peek of a denied tenant = %+v", d)
	}
	for _, b := range collect(e, 0, true) {
		if b.Key == "a" && (b.Cum != 1000 || b.RateNanos != -1 || b.LimitRateNanos != -1) {
			t.Errorf("unlimited = %+v", b)
		}
	}
}

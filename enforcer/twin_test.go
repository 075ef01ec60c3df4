package enforcer_test

import (
	"fmt"
	"math/big"
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

// naive is the obviously right funnel: a map of buckets in rational numbers, never evicted.
type naive struct {
	rules   []limits.Rule
	buckets map[string]*naiveBucket
}

type naiveBucket struct {
	limit  bucket.Limit
	tokens *big.Rat
	at     int64
	taken  uint64
}

func rat(r bucket.Rate) *big.Rat {
	if r.Num == 0 {
		return new(big.Rat)
	}
	return new(big.Rat).SetFrac(new(big.Int).SetUint64(r.Num), new(big.Int).SetUint64(r.Den))
}

func (b *naiveBucket) refill(now int64) {
	if now <= b.at {
		return
	}
	b.tokens.Add(b.tokens, new(big.Rat).Mul(rat(b.limit.Rate), big.NewRat(now-b.at, 1)))
	if full := big.NewRat(b.limit.Burst, 1); b.tokens.Cmp(full) > 0 {
		b.tokens = full
	}
	b.at = now
}

// resize keeps the fraction of a token, rounded down to the new rate's units.
func (b *naiveBucket) resize(l bucket.Limit, at int64) {
	b.refill(at)
	whole := new(big.Int).Quo(b.tokens.Num(), b.tokens.Denom())
	den := new(big.Int).SetUint64(l.Rate.Den)
	frac := new(big.Rat).Sub(b.tokens, new(big.Rat).SetInt(whole))
	frac.Mul(frac, new(big.Rat).SetInt(den))
	units := new(big.Int).Quo(frac.Num(), frac.Denom())
	b.tokens = new(big.Rat).Add(new(big.Rat).SetInt(whole), new(big.Rat).SetFrac(units, den))
	if full := big.NewRat(l.Burst, 1); b.tokens.Cmp(full) > 0 {
		b.tokens = full
	}
	b.limit = l
}

func (m *naive) set(rules []limits.Rule, now int64) {
	m.rules = rules
	for key, b := range m.buckets {
		for _, r := range rules {
			if strings.HasPrefix(key, r.Name) {
				b.resize(r.Fixed, now)
			}
		}
	}
}

func (m *naive) bucket(r *limits.Rule, q *enforcer.Request, now int64) *naiveBucket {
	key := r.Name
	for _, d := range r.Key {
		switch d.Kind {
		case limits.ByTenant:
			key += fmt.Sprintf("%q", q.Tenant)
		case limits.ByIP:
			key += fmt.Sprintf("%q", q.IP)
		}
	}
	b := m.buckets[key]
	if b == nil {
		b = &naiveBucket{limit: r.Fixed, tokens: big.NewRat(r.Fixed.Burst, 1), at: now}
		m.buckets[key] = b
	}
	b.refill(now)
	return b
}

func (m *naive) check(now int64, q *enforcer.Request) (rule string) {
	n := big.NewRat(q.Cost, 1)
	for i := range m.rules {
		r := &m.rules[i]
		if b := m.bucket(r, q, now); b.tokens.Cmp(n) < 0 {
			return r.Name
		}
	}
	for i := range m.rules {
		b := m.bucket(&m.rules[i], q, now)
		b.tokens.Sub(b.tokens, n)
		b.taken += uint64(q.Cost)
	}
	return ""
}

func randomRules(t *testing.T, rng *rand.Rand, bursts bool) []limits.Rule {
	limit := func(burst int64) bucket.Limit {
		if bursts {
			burst += rng.Int64N(burst)
		}
		pers := []time.Duration{time.Second, time.Minute, time.Hour}
		return per(t, rng.Uint64N(40)+1, rng.Uint64N(13)+1, pers[rng.IntN(len(pers))], burst)
	}
	return []limits.Rule{
		{Name: "guard", Layer: limits.LayerGuard, Fixed: per(t, 1000+rng.Uint64N(100), 1, time.Second, 3000)},
		{Name: "contract", Layer: limits.LayerContract, Key: dims(limits.ByTenant), Fixed: limit(5)},
		{Name: "ip", Layer: limits.LayerContract, Key: dims(limits.ByIP, limits.ByTenant), Fixed: limit(3)},
	}
}

// Random requests, time, policies and reports, beside the naive funnel. With reports buckets are evicted and come back, so bursts
// stay as they are there: a full bucket is then a full bucket under every policy.
func TestTwin(t *testing.T) {
	for _, evict := range []bool{false, true} {
		for range 6 {
			seed := uint64(time.Now().UnixNano())
			rng := rand.New(rand.NewPCG(seed, 2))
			rules := randomRules(t, rng, !evict)
			e, c := build(enforcer.Config{}, policy(rules...))
			m := &naive{rules: rules, buckets: map[string]*naiveBucket{}}
			type life struct {
				rule, key string
				inc       uint32
			}
			cum := map[life]uint64{}
			taken := map[[2]string]uint64{}
			emit := func(b enforcer.Bucket) {
				l := life{b.Rule, b.Key, b.Incarnation}
				cum[l] += b.Taken
				taken[[2]string{b.Rule, b.Key}] += b.Taken
				if b.Cum != cum[l] {
					t.Fatalf("seed %d: %+v says cum %d, the sum of its reports is %d", seed, l, b.Cum, cum[l])
				}
				if b.TokensMin < 0 || b.TokensLast < b.TokensMin || b.TokensLast > b.Capacity {
					t.Fatalf("seed %d: %+v", seed, b)
				}
			}
			now, refused := int64(0), 0
			tenants := 1 + rng.IntN(20_000)
			for step := range 20_000 {
				if rng.IntN(4) == 0 {
					now += rng.Int64N(1 << rng.IntN(34))
				}
				q := enforcer.Request{Tenant: fmt.Sprint(rng.IntN(tenants) >> rng.IntN(16)), IP: fmt.Sprint(rng.IntN(3)), Cost: 1}
				if rng.IntN(10) == 0 {
					q.Cost = 1 + rng.Int64N(3)
				}
				d, want := e.Check(now, &q), m.check(now, &q)
				if d.Rule != want || d.Allowed != (want == "") {
					t.Fatalf("seed %d evict %v, step %d, at %d: %s/%s cost %d refused by %q, want %q (%+v %v)", seed, evict, step, now, q.Tenant, q.IP, q.Cost, d.Rule, want, d, m.rules)
				}
				if !d.Allowed {
					refused++
				}
				switch x := rng.IntN(3000); {
				case x == 0:
					m.set(randomRules(t, rng, !evict), now)
					c.Store(now)
					e.SetPolicy(policy(m.rules...))
				case x < 20 && evict:
					e.Collect(now, x < 8, emit)
				}
			}
			e.Collect(now, true, emit)
			total := uint64(0)
			for _, b := range m.buckets {
				total += b.taken
			}
			reported := uint64(0)
			for _, n := range taken {
				reported += n
			}
			if total != reported || refused == 0 {
				t.Errorf("seed %d: reported %d tokens, %d were taken; %d refusals", seed, reported, total, refused)
			}
		}
	}
}

// A flood of keys grows the table; what is full and reported makes room; who comes back is a new incarnation.
func TestEvictedKeysComeBackAsNewIncarnations(t *testing.T) {
	e, _ := build(enforcer.Config{}, policy(limits.Rule{Name: "c", Key: dims(limits.ByIP), Fixed: per(t, 1, 1, time.Second, 2)}))
	last := map[string]enforcer.Bucket{}
	sums := map[string]uint64{}
	emit := func(b enforcer.Bucket) {
		if old, ok := last[b.Key]; ok {
			if b.Incarnation < old.Incarnation || b.Incarnation == old.Incarnation && b.Cum < old.Cum {
				t.Fatalf("%+v after %+v", b, old)
			}
		}
		last[b.Key] = b
		sums[b.Key] += b.Taken
	}
	reborn := 0
	for round := range int64(8) {
		now := round * 3600 * sec
		for i := range 20_000 {
			q := enforcer.Request{IP: fmt.Sprint(i + int(round)*10_000), Cost: 1}
			if !e.Check(now, &q).Allowed {
				t.Fatal("a fresh key was refused")
			}
		}
		first := enforcer.Request{IP: "0", Cost: 1}
		e.Check(now, &first)
		e.Collect(now, true, emit)
		if last["0"].Incarnation > 0 {
			reborn++
		}
	}
	if reborn == 0 {
		t.Error("no key was evicted and came back")
	}
	for i := range 60_000 {
		if k := fmt.Sprint(i + 10_000); sums[k] != 2 {
			t.Fatalf("key %s: %d tokens reported, want 2", k, sums[k])
		}
	}
}

// Requests, new keys, reports, policies and updates at the same time: nothing is lost, nothing is doubled, nothing is over.
func TestEverythingAtOnce(t *testing.T) {
	rule := func(rate uint64) *limits.Policy {
		return policy(
			limits.Rule{Name: "guard", Layer: limits.LayerGuard, Fixed: per(t, 1, 1, time.Nanosecond, 1e9)},
			limits.Rule{Name: "c", Layer: limits.LayerContract, Key: dims(limits.ByTenant), Fixed: per(t, 0, 1, time.Second, 50)},
			limits.Rule{Name: "s", Layer: limits.LayerContract, Mode: limits.Shadow, Key: dims(limits.ByTenant), Fixed: per(t, rate, 1, time.Hour, 5)},
		)
	}
	e, _ := build(enforcer.Config{Stripes: 4}, rule(1))
	const keys = 3000
	var admitted, asked [keys]atomic.Int64
	var workers, others sync.WaitGroup
	stop := make(chan struct{})
	taken, cums := map[string]uint64{}, map[string]uint64{}
	emit := func(b enforcer.Bucket) {
		if b.Rule == "c" {
			taken[b.Key] += b.Taken
			cums[b.Key] = b.Cum
		}
	}
	others.Go(func() {
		for i := int64(0); ; i++ {
			select {
			case <-stop:
				return
			default:
				e.Collect(i, i%4 == 0, emit)
				time.Sleep(time.Millisecond)
			}
		}
	})
	others.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				e.SetPolicy(rule(uint64(i%3 + 1)))
				e.Apply(enforcer.Update{})
				e.Mode()
				time.Sleep(time.Millisecond)
			}
		}
	})
	for g := range 4 {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 3))
			for range 60_000 {
				k := rng.IntN(keys)
				q := enforcer.Request{Tenant: fmt.Sprint(k), Cost: 1}
				asked[k].Add(1)
				if e.Check(0, &q).Allowed {
					admitted[k].Add(1)
				}
			}
		})
	}
	workers.Wait()
	close(stop)
	others.Wait()
	e.Collect(0, true, emit)
	for k := range keys {
		got := admitted[k].Load()
		if want := min(asked[k].Load(), 50); got != want {
			t.Fatalf("key %d: admitted %d, want %d", k, got, want)
		}
		if key := fmt.Sprint(k); taken[key] != uint64(got) || cums[key] != uint64(got) {
			t.Fatalf("key %d: admitted %d, reported %d, cum %d", k, got, taken[key], cums[key])
		}
	}
}

package redis_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/aggregatortest"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
)

// TestTwin runs random operations against the script on a real Redis and against its twin in Go, which has exact arithmetic:
// reports that come once, again, four times over (T1), late, out of order or never; new boots and incarnations; limits that change;
// an emptied Redis, an emptied script cache (T2), a restart.
func TestTwin(t *testing.T) {
	s := embeddedtest.Redis(t)
	twin(t, s.URL(), 4000, s.Restart)
}

func TestTwinMiniredis(t *testing.T) {
	m := miniredis.RunT(t)
	twin(t, "redis://"+m.Addr(), 500, nil)
}

func twin(t *testing.T, url string, steps int, restart func() error) {
	ctx := context.Background()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	r := raw(t, url)
	c := open(t, redis.Config{URL: url, PerCall: 1 + rng.IntN(5), Timeout: patient})
	m := aggregatortest.NewMemory()
	var at int64
	m.Now = func() time.Time { return time.UnixMicro(at) }

	type life struct{ seq, inc, cum uint64 }
	keys := []aggregator.Key{{Rule: "a", Key: "}"}, {Rule: "b", Key: "}"}, {Rule: "a", Key: "acme"}}
	limits := []aggregator.Limit{{RateNanos: 80e9, Burst: 160}, {RateNanos: 386, Burst: 3}, {RateNanos: 333_333_333_333, Burst: 1000},
		{RateNanos: 10_000_000_000_000_000, Burst: 1_000_000_000}, {RateNanos: 1_234_567_891, Burst: 7}, {RateNanos: 1_000_000_000_123, Burst: 20}}
	lives := make(map[string]*life) // by key and gateway
	boots := map[string]int{}
	var past [][]aggregator.Fold
	inForce := make([]int, len(keys))

	report := func() []aggregator.Fold {
		var folds []aggregator.Fold
		for _, k := range rng.Perm(len(keys))[:1+rng.IntN(len(keys))] {
			f := aggregator.Fold{Key: keys[k], Limit: limits[inForce[k]]}
			switch rng.IntN(10) {
			case 0:
				f.Outstanding = rng.Int64N(2 * f.Limit.Burst)
			case 1:
				least := rng.Int64N(3e6*f.Limit.Burst) - 1e6*f.Limit.Burst
				f.Bounds = &aggregator.Bounds{LeastMicros: least, MostMicros: least + rng.Int64N(1e6*f.Limit.Burst)}
			case 2:
				f.Offered = rng.Int64N(2 * f.Limit.Burst)
			}
			if rng.IntN(2) == 0 {
				f.Last = &aggregator.Level{Micros: rng.Int64N(3e6*f.Limit.Burst) - 1e6*f.Limit.Burst, At: at + rng.Int64N(4e6) - 3e6}
			}
			for g := range []int{1, 2, 3, 9}[rng.IntN(4)] { // nine are folded in another way
				gateway := fmt.Sprint("g", g)
				id := fmt.Sprint(k, gateway)
				l := lives[id]
				if l == nil {
					l = &life{}
					lives[id] = l
				}
				switch rng.IntN(30) {
				case 0:
					boots[id]++
					*l = life{}
				case 1:
					l.inc++
					l.cum = 0
				}
				taken := uint64(rng.IntN(1 + int(min(f.Limit.Burst, 1_000_000))))
				if rng.IntN(3) == 0 {
					taken = 0
				}
				l.seq++
				l.cum += taken
				u := aggregator.Use{Gateway: gateway, Boot: fmt.Sprint("boot", boots[id]), Incarnation: uint32(l.inc), Seq: l.seq, Cum: l.cum, From: l.cum - taken,
					DemandNanos: rng.Int64N(1_000_000_000_000), SureNanos: rng.Int64N(2) * rng.Int64N(1_000_000_000_000),
					Span: time.Duration(rng.IntN(300)) * time.Millisecond, Lag: time.Duration(rng.IntN(100)) * time.Millisecond, Window: time.Duration(rng.IntN(100)) * time.Millisecond}
				switch rng.IntN(20) {
				case 0:
					u.Settled, u.From, u.Seq, u.DemandNanos = l.cum, l.cum, 0, 0 // too old to charge
				case 1:
					u.DemandNanos = 0
				}
				f.Uses = append(f.Uses, u)
			}
			folds = append(folds, f)
		}
		past = append(past, folds)
		return folds
	}
	deliver := func(step int, folds []aggregator.Fold) {
		t.Helper()
		for _, f := range folds { // one by one: the twin needs the time of each
			got, err := c.Fold(ctx, []aggregator.Fold{f})
			if err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			at = got[0].At
			want, err := m.Fold(ctx, []aggregator.Fold{f})
			if err != nil {
				t.Fatal(err)
			}
			compare(t, step, got[0], want[0])
			if total, err := c.Total(ctx, f.Key); err != nil || total != m.Total(f.Key) {
				t.Errorf("step %d: total of %v = %d, %v, want %d", step, f.Key, total, err, m.Total(f.Key))
			}
		}
	}
	for step := range steps {
		switch op := rng.IntN(100); {
		case op < 55:
			deliver(step, report())
		case op < 60:
			report() // lost
		case op < 80 && len(past) > 0:
			deliver(step, past[rng.IntN(len(past))])
		case op < 84 && len(past) > 0:
			again := past[len(past)-1]
			for range 4 {
				deliver(step, again)
			}
		case op < 88:
			k := rng.IntN(len(keys))
			inForce[k] = rng.IntN(len(limits))
		case op < 92:
			if err := r.ScriptFlush(ctx).Err(); err != nil {
				t.Fatal(err)
			}
		case op < 94:
			if err := r.FlushAll(ctx).Err(); err != nil {
				t.Fatal(err)
			}
			m.Flush()
		case op < 96:
			time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
		case op < 97 && restart != nil && rng.IntN(8) == 0:
			if err := restart(); err != nil {
				t.Fatal(err)
			}
			reconnect(t, r)
		default:
			deliver(step, []aggregator.Fold{{Key: keys[rng.IntN(len(keys))]}}) // a look
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

// reconnect waits until every pooled connection of the old server is known to be dead.
func reconnect(t *testing.T, r *goredis.Client) {
	t.Helper()
	for range 100 {
		if r.Ping(context.Background()).Err() == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("redis did not come back")
}

func compare(t *testing.T, step int, got, want aggregator.KeyState) {
	t.Helper()
	sort := func(d []aggregator.Demand) {
		slices.SortFunc(d, func(a, b aggregator.Demand) int { return int(a.Gateway[1]) - int(b.Gateway[1]) })
	}
	sort(got.Demands)
	sort(want.Demands)
	for i := range got.Demands {
		if i < len(want.Demands) { // a power of two is rounded by each machine in its own way
			if d := got.Demands[i].RateNanos - want.Demands[i].RateNanos; d >= -2000 && d <= 2000 {
				got.Demands[i].RateNanos = want.Demands[i].RateNanos
			}
		}
	}
	got.Lost = false
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("step %d: state\n got %+v\nwant %+v", step, got, want)
	}
}

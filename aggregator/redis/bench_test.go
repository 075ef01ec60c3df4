package redis_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	embedded "github.com/weirhq/weir/internal/embedded/redis"
)

// BenchmarkFold folds batches of keys into a real Redis, and shows wall time and Redis' own CPU time per key, and what a key takes of
// its memory. Warm keys are used by one of three gateways in turn, hot ones by all three in each fold, and cold ones once each, by one:
// the first million of them make the key. Figures are in docs/benchmarks.md.
func BenchmarkFold(b *testing.B) {
	for _, bench := range []struct {
		name                        string
		cluster                     bool
		batch, keys, gateways, uses int
	}{
		{"warm keys, many a call", false, 1000, 1000, 3, 1},
		{"warm keys, one a call", true, 1000, 1000, 3, 1},
		{"100 hot keys", false, 100, 100, 3, 3},
		{"1M cold keys", false, 1000, 1_000_000, 1, 1},
	} {
		b.Run(bench.name, func(b *testing.B) {
			benchmarkFold(b, bench.cluster, bench.batch, bench.keys, bench.gateways, bench.uses)
		})
	}
}

func benchmarkFold(b *testing.B, cluster bool, size, keys, gateways, uses int) {
	s, err := embedded.Start(embedded.Config{Dir: b.TempDir(), Real: true}, embeddedtest.Log(b)) // without persistence, as in every published figure
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = s.Stop() })
	c := open(b, redis.Config{URL: s.URL(), Timeout: patient, PerCall: map[bool]int{true: 1}[cluster]})
	r := raw(b, s.URL())
	limit := aggregator.Limit{RateNanos: 80e9, Burst: 160}
	folds := make([]aggregator.Fold, size)
	seq, next := uint64(0), 0
	batch := func() {
		if next%keys == 0 {
			seq++
		}
		for i := range folds {
			folds[i] = aggregator.Fold{Key: aggregator.Key{Rule: "contract", Key: "tenant-" + strconv.Itoa(next%keys)}, Limit: limit, Uses: folds[i].Uses[:0]}
			for u := range uses {
				folds[i].Uses = append(folds[i].Uses, aggregator.Use{Gateway: fmt.Sprint("gateway-", (int(seq)+u)%gateways), Boot: "01J0000000000000000000000A",
					Seq: seq, Cum: seq, From: seq - 1, DemandNanos: 10e9, Window: 100 * time.Millisecond})
			}
			next++
		}
		states, err := c.Fold(context.Background(), folds)
		if err != nil {
			b.Fatal(err)
		}
		if n := len(states[0].Demands); n < uses {
			b.Fatalf("fold %d: %d demands", seq, n)
		}
	}
	for range 2 * gateways {
		batch()
	}
	cpu := redisCPU(b, r)
	b.ResetTimer()
	for b.Loop() {
		batch()
	}
	b.StopTimer()
	updates := float64(b.N * size)
	b.ReportMetric(b.Elapsed().Seconds()*1e6/updates, "µs/key")
	b.ReportMetric((redisCPU(b, r)-cpu)*1e6/updates, "redisµs/key")
	total, err := c.Total(context.Background(), folds[0].Key)
	if err != nil {
		b.Fatal(err)
	}
	if total < int64(seq) { // each gateway counts up to the round that it last had
		b.Fatalf("total %d after %d rounds", total, seq)
	}
	n, err := r.DBSize(context.Background()).Result()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(redisInfo(b, r, "memory", "used_memory")/float64(n), "redisB/key")
}

func redisCPU(b *testing.B, r *goredis.Client) float64 {
	b.Helper()
	return redisInfo(b, r, "cpu", "used_cpu_sys", "used_cpu_user")
}

// redisInfo is the sum of some of the numbers that Redis tells of itself.
func redisInfo(b *testing.B, r *goredis.Client, section string, names ...string) (sum float64) {
	b.Helper()
	info, err := r.Info(context.Background(), section).Result()
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if slices.Contains(names, name) {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				b.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}

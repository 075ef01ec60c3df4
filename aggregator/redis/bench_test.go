package redis_test

import (
	"context"
	"fmt"
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

// BenchmarkFold folds batches of 1000 keys, each used by one of three gateways in turn, into a real Redis, and shows wall time
// and Redis' own CPU time per key. Figures are in ../README.md.
func BenchmarkFold(b *testing.B) {
	for _, cluster := range []bool{false, true} {
		name := "many keys a call"
		if cluster {
			name = "one key a call"
		}
		b.Run(name, func(b *testing.B) { benchmarkFold(b, cluster) })
	}
}

func benchmarkFold(b *testing.B, cluster bool) {
	const keys, gateways = 1000, 3
	s, err := embedded.Start(embedded.Config{Dir: b.TempDir(), Real: true}, embeddedtest.Log(b)) // without persistence, as in every published figure
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = s.Stop() })
	c := open(b, redis.Config{URL: s.URL(), Timeout: patient, PerCall: map[bool]int{true: 1}[cluster]})
	r := raw(b, s.URL())
	limit := aggregator.Limit{RateNanos: 80e9, Burst: 160}
	folds := make([]aggregator.Fold, keys)
	seq := uint64(0)
	batch := func() {
		seq++
		for i := range folds {
			folds[i] = aggregator.Fold{Key: aggregator.Key{Rule: "contract", Key: "tenant-" + strconv.Itoa(i)}, Limit: limit, Uses: append(folds[i].Uses[:0],
				aggregator.Use{Gateway: fmt.Sprint("gateway-", seq%gateways), Boot: "01J0000000000000000000000A", Seq: seq, Cum: seq, From: seq - 1,
					DemandNanos: 10e9, Window: 100 * time.Millisecond})}
		}
		states, err := c.Fold(context.Background(), folds)
		if err != nil {
			b.Fatal(err)
		}
		if n := len(states[0].Demands); n != int(min(seq, gateways)) {
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
	updates := float64(b.N) * keys
	b.ReportMetric(b.Elapsed().Seconds()*1e6/updates, "µs/key")
	b.ReportMetric((redisCPU(b, r)-cpu)*1e6/updates, "redisµs/key")
	total, err := c.Total(context.Background(), folds[0].Key)
	if err != nil {
		b.Fatal(err)
	}
	if total < int64(seq) { // each gateway counts up to the round that it last had
		b.Fatalf("total %d after %d rounds", total, seq)
	}
}

func redisCPU(b *testing.B, r *goredis.Client) float64 {
	b.Helper()
	info, err := r.Info(context.Background(), "cpu").Result()
	if err != nil {
		b.Fatal(err)
	}
	var sum float64
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_sys" || name == "used_cpu_user" {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				b.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}

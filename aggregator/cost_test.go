package aggregator_test

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/aggregatortest"
	"github.com/weirhq/weir/schemas"
)

// BenchmarkDivide divides one key between gateways that all ask, half of them for more than there is.
func BenchmarkDivide(b *testing.B) {
	for _, n := range []int{2, 10, 100, 1000} {
		b.Run(fmt.Sprintf("gateways=%d", n), func(b *testing.B) {
			l := aggregator.Limit{RateNanos: 10_000e9, Burst: 10_000}
			parts := make([]aggregator.Part, n)
			for i := range parts {
				parts[i] = aggregator.Part{Demand: aggregator.Demand{Gateway: fmt.Sprintf("gw-%04d", i), RateNanos: int64(1+i%7) * 3e12 / int64(n)}, HeldMicros: int64(i%5) * 1e6}
			}
			for b.Loop() {
				if shares := aggregator.Divide(l, 9e9, parts); len(shares) != n {
					b.Fatalf("%d shares of %d gateways", len(shares), n)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/gateway")
		})
	}
}

// quiet is a fleet that nobody listens to.
type quiet struct{ shares int }

func (q *quiet) Cast(_ context.Context, _ string, u *schemas.ThrottleUpdate) error {
	q.shares += len(u.Shares)
	return nil
}

// BenchmarkChanges is a report of one gateway about all hot keys: folded in memory, divided between all gateways and told to them.
func BenchmarkChanges(b *testing.B) {
	for _, c := range []struct{ gateways, keys int }{{10, 1000}, {100, 1000}, {1000, 1000}} {
		b.Run(fmt.Sprintf("gateways=%d/keys=%d", c.gateways, c.keys), func(b *testing.B) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			said, ctx := &quiet{}, context.Background()
			a := aggregator.New(aggregator.Config{Learn: -1}, aggregatortest.NewMemory(), said, slog.New(slog.DiscardHandler), nil)
			report := func(gateway int, seq uint64) {
				r := &schemas.Report{Gateway: fmt.Sprintf("gw-%04d", gateway), Boot: "b", Seq: seq}
				for k := range c.keys {
					r.Tokens = append(r.Tokens, schemas.Tokens{Rule: "r", Key: fmt.Sprintf("key-%06d", k), LimitRateNanos: 10_000e9, LimitBurst: 10_000,
						RateNanos: 10e9, Capacity: 10, Taken: 100, Refused: 1000 + 100*(seq%3), Cum: 100 * seq, Window: 100 * time.Millisecond})
				}
				batch := schemas.Batch[*schemas.Report]{Stream: schemas.UsageStream, Items: []schemas.Delivered[*schemas.Report]{{Seq: seq, Arrived: time.Now(), Value: r}}}
				if err := a.Reports(ctx, batch); err != nil {
					b.Fatal(err)
				}
			}
			for g := range c.gateways {
				a.Heartbeat(&schemas.Heartbeat{Gateway: fmt.Sprintf("gw-%04d", g), Boot: "b"}, time.Now())
			}
			report(0, 1)
			runtime.GC()
			runtime.ReadMemStats(&after)
			if said.shares != c.gateways*c.keys {
				b.Fatalf("%d shares told, want one for each gateway and key", said.shares)
			}
			seq := uint64(1)
			for b.Loop() {
				seq++
				report(int(seq)%c.gateways, seq)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(c.keys), "ns/key")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(c.keys*c.gateways), "ns/key/gateway")
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(c.keys*c.gateways), "B/key/gateway")
		})
	}
}

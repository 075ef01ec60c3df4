package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirhq/weir/cmd/internal/rig"
)

// BenchmarkNATSAway takes NATS away for ten minutes (or WEIR_AWAY) from a gateway that answers 5,000 requests a second of
// 10,000 tenants. It says what that costs the gateway in memory and on disk, and how long after the return everything is in the
// stream, and in ClickHouse. It fails when a request has no answer, or is not stored once.
//
//	go test -run '^$' -bench NATSAway -benchtime 1x -timeout 30m ./cmd/e2e
func BenchmarkNATSAway(b *testing.B) {
	const policy = `
version: 1
identity: {tenant: {header: X-App-Key}}
rules:
  - {name: guard, layer: guard, key: [], rate: 100000/s, burst: 100000}
  - {name: contract, layer: contract, key: [tenant], rate: 10/s, burst: 100}
`
	away := 10 * time.Minute
	if v := os.Getenv("WEIR_AWAY"); v != "" {
		var err error
		if away, err = time.ParseDuration(v); err != nil {
			b.Fatal(err)
		}
	}
	for range b.N {
		r := newRig(b, rig.Config{Policy: policy})
		gateway := rig.GatewayName(1)
		metric := func(name string) float64 {
			v, err := r.Metric(gateway, name)
			if err != nil {
				b.Fatal(err)
			}
			return v
		}
		ctx, stop := context.WithCancel(b.Context())
		requests := flood(ctx, "http://"+r.Gateways[gateway][0]+"/", 5000, 10_000)
		time.Sleep(2 * time.Second)
		if err := r.Parts[rig.NATS].Kill(); err != nil {
			b.Fatal(err)
		}
		var memory, disk float64
		for end := time.Now().Add(away); time.Now().Before(end); time.Sleep(time.Second) {
			memory = max(memory, metric("process_resident_memory_bytes"))
			disk = max(disk, metric("weir_spool_bytes"))
		}
		stop()
		asked, unanswered := requests()
		if err := r.Parts[rig.NATS].Restart(); err != nil {
			b.Fatal(err)
		}
		back := time.Now()
		within := func(what string, done func() bool) time.Duration {
			for !done() {
				if time.Since(back) > away+2*time.Minute {
					b.Fatalf("%d requests are not in %s %s after the return", asked, what, time.Since(back))
				}
				time.Sleep(100 * time.Millisecond)
			}
			return time.Since(back)
		}
		published := within("the stream", func() bool { return metric(`weir_usage_units_total{stage="acked"}`) >= float64(asked) })
		var stored uint64
		whole := within("ClickHouse", func() bool {
			rows, err := r.Query("SELECT toString(sum(allowed) + sum(rejected)) FROM usage FINAL")
			if err != nil {
				b.Fatal(err)
			}
			stored, err = strconv.ParseUint(rows[0][0], 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			return stored >= asked
		})
		if stored != asked || unanswered > 0 {
			b.Errorf("%d requests, %d without an answer, %d stored", asked, unanswered, stored)
		}
		b.ReportMetric(float64(asked), "requests")
		b.ReportMetric(memory/1e6, "memory-MB")
		b.ReportMetric(disk/1e6, "disk-MB")
		b.ReportMetric(published.Seconds(), "stream-s")
		b.ReportMetric(whole.Seconds(), "clickhouse-s")
	}
}

// flood asks rate times a second, each time as one of so many tenants, until ctx is done. The result waits for the last answer, and
// says how many requests there were and how many had none.
func flood(ctx context.Context, url string, rate, tenants int) (requests func() (asked, unanswered uint64)) {
	const callers = 16
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: callers}, Timeout: 10 * time.Second}
	var all sync.WaitGroup
	var asked, unanswered atomic.Uint64
	began := time.Now()
	for i := range callers {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for n := 0; ctx.Err() == nil; n++ {
				select { // what was late is made up for
				case <-time.After(time.Until(began.Add(time.Duration(n*callers+i) * time.Second / time.Duration(rate)))):
				case <-ctx.Done():
					return
				}
				asked.Add(1)
				q, err := http.NewRequest(http.MethodGet, url, nil)
				if err != nil {
					panic(err) // a URL of ours
				}
				q.Header.Set("X-App-Key", fmt.Sprintf("tenant-%d", rng.IntN(tenants)))
				resp, err := client.Do(q)
				if err != nil || resp.Body.Close() != nil {
					unanswered.Add(1)
				}
			}
		})
	}
	return func() (uint64, uint64) {
		all.Wait()
		return asked.Load(), unanswered.Load()
	}
}

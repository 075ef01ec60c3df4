package enforcer_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// BenchmarkCheckUnderUpdates decides over 10,000 keys of one enforcer, by turns for a tenth of a second while the centre says nothing
// and while it says a new share and a grant of 1,000 of them a second. One op is a pair of turns. Reported are the medians of both
// in ns a decision, and the median of their ratios.
//
//	go test -run '^$' -bench CheckUnderUpdates -benchtime 100x ./enforcer
func BenchmarkCheckUnderUpdates(b *testing.B) {
	const (
		keys, pressed = 10_000, 1000
		turn, every   = 100 * time.Millisecond, 20 * time.Millisecond
	)
	rate, err := bucket.NewRate(1_000_000, 1, time.Second)
	if err != nil {
		b.Fatal(err)
	}
	whole := bucket.Limit{Rate: rate, Burst: 1_000_000}
	requests := make([]enforcer.Request, keys)
	for i := range requests {
		requests[i] = enforcer.Request{Tenant: fmt.Sprintf("tenant-%05d", i), Cost: 1}
	}
	e := enforcer.New(enforcer.Config{Fleet: 2})
	e.SetPolicy(&limits.Policy{Version: 1, Rules: []limits.Rule{{Name: "contract", Layer: limits.LayerContract,
		Key: []limits.Dimension{{Kind: limits.ByTenant}}, Fixed: whole}}})
	version, grant := uint64(0), uint64(0)
	say := func(first, end int) {
		version++
		grant += 10
		u := enforcer.Update{Gateways: 2, TTL: time.Hour}
		for i := first; i < end; i++ {
			u.Shares = append(u.Shares, schemas.Share{Rule: "contract", Key: requests[i%keys].Tenant, Version: version, RateNanos: rate.Nano() / 2,
				Burst: whole.Burst/2 + int64(version%100), LimitRateNanos: rate.Nano(), LimitBurst: whole.Burst, Grant: grant})
		}
		e.Apply(u)
	}
	say(0, keys)
	at, told := 0, 0
	// decide is one turn. It returns the ns of a decision.
	decide := func(updates bool) float64 {
		done, gone := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(gone)
			tick := time.NewTicker(every)
			defer tick.Stop()
			for n := int(pressed * every / time.Second); ; {
				select {
				case <-done:
					return
				case <-tick.C:
					if updates {
						say(told, told+n)
						told += n
					}
				}
			}
		}()
		n, began := 0, time.Now()
		for time.Since(began) < turn {
			for range 1000 {
				if d := e.Check(enforcer.Monotonic(), &requests[at*7919%keys]); !d.Allowed {
					b.Errorf("refused: %+v", d)
				}
				at++
			}
			n += 1000
		}
		took := time.Since(began)
		close(done)
		<-gone
		return float64(took.Nanoseconds()) / float64(n)
	}
	decide(false) // warm
	var quiet, under, ratio []float64
	for b.Loop() {
		var q, u float64
		if len(ratio)%2 == 0 {
			q, u = decide(false), decide(true)
		} else {
			u, q = decide(true), decide(false)
		}
		quiet, under, ratio = append(quiet, q), append(under, u), append(ratio, u/q)
	}
	if told == 0 {
		b.Error("no share was applied")
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	b.ReportMetric(median(quiet), "quiet-ns")
	b.ReportMetric(median(under), "updates-ns")
	b.ReportMetric(median(ratio), "ratio")
	b.ReportMetric(0, "ns/op") // of a pair of turns: says nothing
}

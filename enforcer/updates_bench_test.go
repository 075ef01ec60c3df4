package enforcer_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// BenchmarkCheckUnderUpdates decides over 10,000 keys while the centre says a new share and a grant of 1,000 of them each second, and
// while it says nothing.
func BenchmarkCheckUnderUpdates(b *testing.B) {
	const keys, pressed, every = 10_000, 1000, 20 * time.Millisecond
	rate, err := bucket.NewRate(1_000_000, 1, time.Second)
	if err != nil {
		b.Fatal(err)
	}
	whole := bucket.Limit{Rate: rate, Burst: 1_000_000}
	policy := &limits.Policy{Version: 1, Rules: []limits.Rule{{Name: "contract", Layer: limits.LayerContract,
		Key: []limits.Dimension{{Kind: limits.ByTenant}}, Fixed: whole}}}
	requests := make([]enforcer.Request, keys)
	for i := range requests {
		requests[i] = enforcer.Request{Tenant: fmt.Sprintf("tenant-%05d", i), Cost: 1}
	}
	for _, updates := range []bool{false, true} {
		b.Run(fmt.Sprintf("updates=%v", updates), func(b *testing.B) {
			e := enforcer.New(enforcer.Config{Fleet: 2})
			e.SetPolicy(policy)
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
			done, gone := make(chan struct{}), make(chan struct{})
			applied := 0
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
							say(applied, applied+n)
							applied += n
						}
					}
				}
			}()
			b.ReportAllocs()
			i, refused := 0, 0
			for b.Loop() {
				if d := e.Check(enforcer.Monotonic(), &requests[i*7919%keys]); !d.Allowed {
					refused++
				}
				i++
			}
			close(done)
			<-gone
			if refused > 0 || updates && b.Elapsed() > time.Second && applied == 0 {
				b.Fatalf("%d of %d refused, %d shares applied", refused, i, applied)
			}
		})
	}
}

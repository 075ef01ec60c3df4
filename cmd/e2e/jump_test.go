package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

// BenchmarkJump measures how long the system takes to follow a tenant that jumps to 10 times its limit over 3 gateways
// (6 : 3 : 1): from the first request of the jump until every gateway enforces its new share, and until the alert is at
// the webhook. It fails when a jump is not followed at all, never because it was slow.
//
//	go test -run '^$' -bench Jump -benchtime 1x ./cmd/e2e
func BenchmarkJump(b *testing.B) {
	const (
		jumps    = 50
		limit    = 20 // requests per second of each tenant
		baseline = 15 * time.Second
		apart    = time.Second
		lasts    = 4 * time.Second
	)
	for range b.N {
		f := newFleet(b, limit)
		var wg sync.WaitGroup
		ctx, stop := context.WithCancel(b.Context())
		for i := range jumps {
			wg.Go(func() { f.send(ctx, tenantName(i), 4) }) // what is normal for it
		}
		time.Sleep(baseline)
		for i := range jumps {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, lasts)
				defer cancel()
				f.jump(tenantName(i))
				f.send(ctx, tenantName(i), 10*limit)
			})
			time.Sleep(apart)
		}
		time.Sleep(lasts)
		stop()
		wg.Wait()
		shares, alerts := f.measured(b, jumps)
		b.ReportMetric(ms(percentile(shares, 50)), "share-p50-ms")
		b.ReportMetric(ms(percentile(shares, 99)), "share-p99-ms")
		b.ReportMetric(ms(percentile(alerts, 50)), "alert-p50-ms")
		b.ReportMetric(ms(percentile(alerts, 99)), "alert-p99-ms")
	}
}

func tenantName(i int) string { return fmt.Sprintf("tenant-%02d", i) }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func percentile(all []time.Duration, p int) time.Duration {
	slices.Sort(all)
	return all[min(len(all)-1, len(all)*p/100)]
}

// weights is how a tenant's traffic is spread over the gateways.
var weights = []int{0, 0, 0, 0, 0, 0, 1, 1, 1, 2}

// fleet is the whole pipeline in this process, and what it did when.
type fleet struct {
	handlers []http.Handler
	oncall   *oncall

	mu      sync.Mutex
	jumped  map[string]time.Time
	applied map[string][3]time.Time // by tenant, the first new share at each gateway after the jump
}

func newFleet(b *testing.B, limit int) *fleet {
	b.Helper()
	log := embeddedtest.Log(b)
	s := app.Servers{NATS: embeddedtest.NATS(b).URL(), Redis: embeddedtest.Redis(b).URL(), ClickHouse: embeddedtest.ClickHouse(b).URL()}
	store, err := clickhouse.Open(s.ClickHouse, log)
	if err != nil {
		b.Fatal(err)
	}
	if err := errors.Join(store.Migrate(b.Context(), func(string) {}), store.Close()); err != nil {
		b.Fatal(err)
	}
	m := app.NewMetrics()
	policy, err := app.NewPolicy(write(b, "policy.yaml", fmt.Sprintf(`
version: 1
identity: {tenant: {header: X-App-Key}}
rules:
  - {name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}
  - {name: contract, layer: contract, key: [tenant], rate: %d/s, burst: %d}
`, limit, limit)), m, log)
	if err != nil {
		b.Fatal(err)
	}
	f := &fleet{oncall: newOncall(b), jumped: map[string]time.Time{}, applied: map[string][3]time.Time{}}
	stack := &run.Stack{}
	b.Cleanup(func() {
		if err := stack.Stop(app.StopTimeout); err != nil {
			b.Error(err)
		}
	})
	connect := func(name string) *nats.Conn {
		nc, err := app.Connect(b.Context(), s.NATS, name, true, m, stack, log)
		if err != nil {
			b.Fatal(err)
		}
		return nc
	}
	if _, err := app.NewAggregator(b.Context(), s, connect("aggregator"), m, stack, log); err != nil {
		b.Fatal(err)
	}
	if _, err := app.NewAlerter(b.Context(), app.AlerterConfig{Webhook: conf.Secret(f.oncall.URL), Secret: secret}, connect("alerter"), m, stack, log); err != nil {
		b.Fatal(err)
	}
	for i := range 3 {
		name := fmt.Sprintf("gateway-%d", i+1)
		g, err := app.NewGateway(app.GatewayConfig{Name: name, Fleet: 3, Applied: func(u schemas.ThrottleUpdate) { f.note(i, u) }}, policy, connect(name), m, stack, log)
		if err != nil {
			b.Fatal(err)
		}
		f.handlers = append(f.handlers, g.Guard.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })))
	}
	return f
}

// send sends that many requests per second of a tenant, spread by weights, until ctx is done.
func (f *fleet) send(ctx context.Context, tenant string, perSecond int) {
	t := time.NewTicker(time.Second / time.Duration(perSecond))
	defer t.Stop()
	for n := 0; ; n++ {
		r := httptest.NewRequest(http.MethodGet, "/orders/1", http.NoBody)
		r.Header.Set("X-App-Key", tenant)
		f.handlers[weights[n*7%len(weights)]].ServeHTTP(httptest.NewRecorder(), r)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (f *fleet) jump(tenant string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.jumped[tenant] = time.Now()
	f.applied[tenant] = [3]time.Time{}
}

func (f *fleet) note(gateway int, u schemas.ThrottleUpdate) {
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range u.Shares {
		at, ok := f.applied[s.Key]
		if ok && s.Rule == "contract" && at[gateway].IsZero() {
			at[gateway] = now
			f.applied[s.Key] = at
		}
	}
}

// measured returns how long each jump took to be followed by all gateways, and to be told to on-call.
func (f *fleet) measured(b *testing.B, jumps int) (shares, alerts []time.Duration) {
	b.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range jumps {
		tenant := tenantName(i)
		from := f.jumped[tenant]
		last := from
		for g, at := range f.applied[tenant] {
			if at.IsZero() {
				b.Errorf("gateway %d got no share of %s", g+1, tenant)
			}
			if at.After(last) {
				last = at
			}
		}
		shares = append(shares, last.Sub(from))
		_, at, ok := f.oncall.find(schemas.AlertFiring, "anomaly", tenant)
		if !ok {
			b.Errorf("on-call was not told of %s", tenant)
			continue
		}
		alerts = append(alerts, at.Sub(from))
	}
	return shares, alerts
}

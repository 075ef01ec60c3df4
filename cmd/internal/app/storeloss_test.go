package app

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/run"
)

// A gateway that nobody asks anything hears that Redis hangs, and that it is back: the first request that comes finds what
// on_store_loss says in force.
func TestRedisIsMissedWithoutTraffic(t *testing.T) {
	ctx, log, m, stack := t.Context(), embeddedtest.Log(t), NewMetrics(), &run.Stack{}
	redis := embeddedtest.Redis(t)
	servers := Servers{NATS: embeddedtest.NATS(t).URL(), Redis: redis.URL(), ClickHouse: embeddedtest.ClickHouse(t).URL()}
	t.Cleanup(func() {
		if err := stack.Stop(StopTimeout); err != nil {
			t.Error(err)
		}
	})
	migrate(t, servers.ClickHouse)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(`version: 1
identity: {tenant: {header: X-App-Key}}
rules:
  - {name: guard, layer: guard, key: [], rate: 1000/s, burst: 1000}
  - {name: costly, layer: contract, key: [tenant], rate: 100/s, burst: 100, on_store_loss: deny}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	policy, err := NewPolicy(file, m, log)
	if err != nil {
		t.Fatal(err)
	}
	nc, err := Connect(ctx, servers.NATS, "test", true, m, stack, log)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewAggregator(ctx, servers, nc, m, stack, log); err != nil {
		t.Fatal(err)
	}
	g, err := NewGateway(GatewayConfig{Name: "g1"}, policy, nc, m, stack, log)
	if err != nil {
		t.Fatal(err)
	}
	mode := func(want string) func() bool { return func() bool { return g.enforcer.Mode() == want } }
	ask := func() enforcer.Reason {
		d := g.enforcer.Check(enforcer.Monotonic(), &enforcer.Request{Tenant: "a", Cost: 1})
		return d.Reason
	}
	within(t, "the centre is heard", mode(enforcer.Synced))
	if got := ask(); got != enforcer.ReasonNone {
		t.Errorf("refused with Redis there: %s", got)
	}
	time.Sleep(2 * time.Second) // the last report was folded
	if err := redis.Pause(); err != nil {
		t.Fatal(err)
	}
	since := time.Now()
	within(t, "stale without Redis and without traffic", mode(enforcer.Stale))
	stale := time.Since(since)
	within(t, "requests are denied", func() bool { return ask() == enforcer.ReasonStoreLoss })
	t.Logf("stale after %v, denied after %v", stale, time.Since(since))
	if err := redis.Resume(); err != nil {
		t.Fatal(err)
	}
	within(t, "the centre is heard with Redis", mode(enforcer.Synced))
	within(t, "requests pass", func() bool { return ask() == enforcer.ReasonNone })
	t.Logf("all is well again after %v", time.Since(since))
}

package app

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

// documented are the permissions of a role as docs/operations.md has them, with G for a gateway's name.
func documented(t *testing.T, role, gateway string) *server.Permissions {
	t.Helper()
	b, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) != 5 || !strings.HasPrefix(strings.TrimSpace(cells[1]), role) {
			continue
		}
		list := func(cell string) *server.SubjectPermission {
			var p server.SubjectPermission
			for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
				subject := m[1]
				if strings.HasSuffix(subject, ".G") {
					subject = strings.TrimSuffix(subject, "G") + gateway
				}
				p.Allow = append(p.Allow, subject)
			}
			return &p
		}
		return &server.Permissions{Publish: list(cells[2]), Subscribe: list(cells[3])}
	}
	t.Fatalf("docs/operations.md has no permissions for %s", role)
	return nil
}

// guarded starts a NATS server that knows an aggregator and the gateway g1, with the documented permissions.
func guarded(t *testing.T) (centre, gateway string) {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
		Users: []*server.User{{Username: "centre", Password: "c", Permissions: documented(t, "aggregator", "")},
			{Username: "g1", Password: "g", Permissions: documented(t, "gateway", "g1")}}})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("NATS is not ready")
	}
	return strings.Replace(s.ClientURL(), "://", "://centre:c@", 1), strings.Replace(s.ClientURL(), "://", "://g1:g@", 1)
}

func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in half a minute: %s", what)
		}
	}
}

// migrate makes the database ready for use.
func migrate(t *testing.T, url string) {
	t.Helper()
	store, err := clickhouse.Open(url, embeddedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	if err := store.Migrate(t.Context(), func(string) {}); err != nil {
		t.Fatal(err)
	}
}

// T5: the permissions in docs/operations.md are all that a gateway and an aggregator need, and with them a gateway cannot stop the
// history, speak for another gateway or remove a stream, whatever it asks and wherever it wants the answer.
func TestT5DocumentedPermissions(t *testing.T) {
	centreURL, gatewayURL := guarded(t)
	ctx, log := t.Context(), embeddedtest.Log(t)
	servers := Servers{NATS: centreURL, Redis: embeddedtest.Redis(t).URL(), ClickHouse: embeddedtest.ClickHouse(t).URL()}
	migrate(t, servers.ClickHouse)
	stack := func() *run.Stack {
		s := &run.Stack{}
		t.Cleanup(func() {
			if err := s.Stop(StopTimeout); err != nil {
				t.Error(err)
			}
		})
		return s
	}
	m, centre := NewMetrics(), stack()
	nc, err := Connect(ctx, servers.NATS, "centre", true, m, centre, log)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewAggregator(ctx, servers, nc, m, centre, log); err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	file := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(file, []byte(`version: 1
identity:
  tenant: {header: X-App-Key}
rules:
  - {name: guard, layer: guard, key: [], rate: 100000/s, burst: 100000}
  - {name: exact, layer: contract, key: [tenant], rate: 100/h, burst: 100, consistency: strict}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	gm, edge := NewMetrics(), stack()
	policy, err := NewPolicy(file, gm, log)
	if err != nil {
		t.Fatal(err)
	}
	gnc, err := Connect(ctx, gatewayURL, "g1", true, gm, edge, log)
	if err != nil {
		t.Fatal(err)
	}
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	to, err := url.Parse(upstream.URL)
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	g, err := NewGateway(GatewayConfig{Name: "g1", Addr: "127.0.0.1:0", Upstream: to, Data: dir}, policy, gnc, gm, edge, log)
	if err != nil {
		t.Fatal(err)
	}
	ask := func() {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+g.Addr+"/x", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-App-Key", "acme")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		asked++
	}
	stored := func() bool {
		return testutil.ToFloat64(m.store.Stored) == float64(asked)
	}
	let := func() bool { // the gateway lets go of what is stored
		_, marks, err := g.published(ctx, t, gnc)
		return err == nil && len(marks.Boots[g.Boot]) > 0
	}
	within(t, "the gateway hears the centre", func() bool { return g.enforcer.Mode() == "synced" })
	for range 20 {
		ask()
	}
	within(t, "usage is stored", stored)
	within(t, "the gateway is told so", let)
	strict, err := schemas.EncodeTakeRequest(schemas.TakeRequest{Rule: "exact", Key: "acme", LimitRateNanos: 1e9, LimitBurst: 100, Cost: 1})
	if err != nil {
		t.Fatal(err)
	}
	within(t, "the centre answers", func() bool {
		_, err := gnc.Request(schemas.StrictPrefix+"g1", strict, time.Second)
		return err == nil
	})
	if n := testutil.ToFloat64(gm.nats.Errors.WithLabelValues("permission")) + testutil.ToFloat64(m.nats.Errors.WithLabelValues("permission")); n > 0 {
		t.Fatalf("%v things were forbidden, want none: %v, %v", n, gnc.LastError(), nc.LastError())
	}

	// A connection of its own: what is forbidden shows there.
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	rogue, err := nats.Connect(gatewayURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(rogue.Close)
	letters := func() uint64 {
		s, err := js.Stream(ctx, schemas.DeadStream)
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.Msgs
	}
	replies := []string{"$KV.weir-history.history", "$KV.weir-history.history-alerts", "$KV.weir-history.leader", "$KV.weir-history.centre", "$KV.weir-stored.history.floor", "$KV.weir-stored.gateway.g1",
		schemas.ThrottlePrefix + "g2", schemas.UsagePrefix + "g2", schemas.AlertPrefix + "critical", schemas.DeadPrefix + "refused",
		"$JS.API.STREAM.DELETE.WEIR_USAGE", "$JS.API.STREAM.DELETE.WEIR_DLQ", "$JS.API.STREAM.PURGE.WEIR_DLQ", "$JS.API.STREAM.DELETE.KV_weir-history",
		"$JS.API.CONSUMER.DELETE.WEIR_USAGE.history", "$JS.API.CONSUMER.RESET.WEIR_USAGE.history"}
	for _, subject := range documented(t, "gateway", "g1").Publish.Allow {
		for _, body := range []string{"", "{}", `{"seq":1}`, `{"last_by_subj":"$KV.weir-stored.history.floor"}`} {
			for _, reply := range replies {
				if err := rogue.PublishRequest(subject, reply, []byte(body)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for _, forbidden := range []string{"$KV.weir-history.history", "$JS.API.STREAM.DELETE.WEIR_USAGE", "$JS.API.DIRECT.GET.KV_weir-stored", schemas.UsagePrefix + "g2", "weir.health.aggregator"} {
		if err := rogue.Publish(forbidden, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := rogue.Flush(); err != nil {
		t.Fatal(err)
	}
	within(t, "rubbish is in the dead letters", func() bool { return letters() > 0 })
	for range 10 {
		ask()
	}
	within(t, "usage is stored all the same", stored)
	within(t, "the position is a position again", func() bool {
		strange, err := jetstream.Misplaced(ctx, js, historyConsumer)
		return err == nil && strange == nil
	})
	for _, name := range []string{schemas.UsageStream, schemas.AlertsStream, schemas.DeadStream, "KV_" + natsx.HistoryBucket, "KV_" + schemas.StoredBucket} {
		if _, err := js.Stream(ctx, name); err != nil {
			t.Errorf("stream %s: %v", name, err)
		}
	}

	// What the doctor says of a position that nobody repairs.
	if err := centre.Stop(StopTimeout); err != nil {
		t.Error(err)
	}
	lone, err := nats.Connect(centreURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(lone.Close)
	if js, err = natsjs.New(lone); err != nil {
		t.Fatal(err)
	}
	kv, err := js.KeyValue(ctx, natsx.HistoryBucket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(ctx, historyConsumer, []byte(`{"stream":"WEIR_USAGE","seq":5}`)); err != nil {
		t.Fatal(err)
	}
	found := Examine(ctx, servers, false, 10*time.Second, log)[0]
	if found.Status != StatusDegraded || !strings.Contains(fmt.Sprint(found.Problems), "position of history was written over") {
		t.Errorf("the doctor says %+v", found)
	}
}

// published reads back what the history says of the gateway's reports.
func (g *Gateway) published(ctx context.Context, t *testing.T, nc *nats.Conn) (schemas.Floor, *schemas.Stored, error) {
	t.Helper()
	p, err := jetstream.NewPublisher(nc, g.Name, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p.Stored(ctx)
}

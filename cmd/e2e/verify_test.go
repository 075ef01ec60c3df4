package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// TestLostEndOfALife: the last reports of a gateway, sealed while the stream took nothing, are missed by what its heartbeats told: late while
// it lives, and while its next life delivers them; lost when it is killed and its spool thrown away. Nothing is said during traffic, nor
// after an orderly restart.
func TestLostEndOfALife(t *testing.T) {
	natsServer, clickhouse := embeddedtest.NATS(t), embeddedtest.ClickHouse(t)
	servers := []string{"--nats", natsServer.URL(), "--redis", embeddedtest.Redis(t).URL(), "--clickhouse", clickhouse.URL(), "--data", t.TempDir()}
	if out, errOut, code := weir(t, nil, "migrate", "--clickhouse", clickhouse.URL()); code != 0 {
		t.Fatalf("migrate exits %d: %s%s", code, out, errOut)
	}
	start(t, `"msg":"lease taken","lease":"leader"`, nil, append([]string{"aggregator", "--metrics-addr", "127.0.0.1:0"}, servers...)...)
	nc, err := nats.Connect(natsServer.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	full := func(yes bool) {
		t.Helper()
		s, err := js.Stream(t.Context(), schemas.UsageStream)
		if err != nil {
			t.Fatal(err)
		}
		cfg := s.CachedInfo().Config
		if cfg.MaxMsgs = -1; yes {
			cfg.MaxMsgs = 1
		}
		if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
	}

	up := upstream(t)
	policy := write(t, "policy.yaml", `
version: 1
identity: {tenant: {header: X-App-Key}}
rules:
  - {name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}
  - {name: contract, layer: contract, key: [tenant], rate: 1000/s, burst: 1000}
`)
	data := t.TempDir()
	gateway := func() *process { return proxied(t, "g", natsServer.URL(), policy, up, data) }
	ask := func(p *process) {
		t.Helper()
		if status, _, _ := get(t, "http://"+listener(t, p)+"/", "acme"); status != http.StatusNoContent {
			t.Fatalf("status %d, want 204", status)
		}
	}
	hour := time.Now().UTC().Truncate(time.Hour)
	verify := func() app.Reconciliation {
		t.Helper()
		out, errOut, _ := weir(t, nil, append([]string{"history", "verify", "--from", hour.Format(time.RFC3339), "--to", hour.Add(3 * time.Hour).Format(time.RFC3339), "-o", "json"}, servers...)...)
		var r app.Reconciliation
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatalf("verify: %v in %q, %s", err, out, errOut)
		}
		return r
	}
	number := func(sql string) uint64 {
		t.Helper()
		n, err := strconv.ParseUint(query(t, clickhouse.URL(), sql), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	// unstored is how many reports heartbeats of a boot have told of that are not stored.
	unstored := func(boot string) uint64 {
		t.Helper()
		told, stored := number("SELECT max(sealed) FROM gateways WHERE boot = '"+boot+"'"), number("SELECT max(seq) FROM reports WHERE boot = '"+boot+"'")
		return told - min(told, stored)
	}
	life := func() string { return query(t, clickhouse.URL(), "SELECT argMax(boot, ts) FROM gateways") }
	// says is how many reports verify names as late, or as lost, by heartbeats. More than that it must not say of reports that are not in flight.
	says := func() string {
		t.Helper()
		causes := map[string]int64{}
		for _, d := range verify().Differences {
			switch {
			case d.Between != "reports" || d.Cause == app.CauseInFlight: // ClickHouse may be a moment behind the stream, or ahead of Redis
			case d.Gateway == "g" && strings.Contains(d.Detail, "by its heartbeats"):
				causes[d.Cause] += d.Want
			default:
				t.Errorf("verify says %+v", d)
			}
		}
		return fmt.Sprint(causes)
	}
	traffic := func(p *process, during time.Duration) {
		t.Helper()
		for end := time.Now().Add(during); time.Now().Before(end); {
			for range 20 {
				ask(p)
			}
			if got := says(); got != "map[]" {
				t.Errorf("all is well, and verify says %s", got)
			}
		}
	}

	// All is well: during traffic, for longer than a heartbeat is too young to be believed, and after an orderly restart.
	g := gateway()
	traffic(g, 3*time.Second)
	eventually(t, "a heartbeat tells what is sealed", func() bool { return number("SELECT max(sealed) FROM gateways") > 0 })
	if code := g.stop(syscall.SIGTERM); code != 0 {
		t.Fatalf("the gateway exits %d", code)
	}
	g = gateway()
	traffic(g, 13*time.Second)

	// The stream is full. What is sealed now is late, and verify says so.
	full(true)
	ask(g)
	var boot string
	missing := func() bool { boot = life(); return unstored(boot) > 0 }
	eventually(t, "a heartbeat tells of a report that is not stored", missing)
	late := func() bool { return says() == fmt.Sprintf("map[late:%d]", unstored(boot)) }
	eventually(t, "it is late", late)

	// Killed, and started again: the next life has it, and delivers it.
	g.stop(syscall.SIGKILL)
	g = gateway()
	if !late() {
		t.Errorf("while the next life has %d reports, verify says %s", unstored(boot), says())
	}
	full(false)
	eventually(t, "nothing is late", func() bool { return says() == "map[]" })

	// Killed again, and this time the spool is thrown away.
	full(true)
	ask(g)
	eventually(t, "a heartbeat tells of a report that is not stored", missing)
	g.stop(syscall.SIGKILL)
	if err := os.RemoveAll(filepath.Join(data, "gateways", "g", "spool")); err != nil {
		t.Fatal(err)
	}
	full(false)
	g = gateway()
	eventually(t, "its last heartbeat is nearly a minute old, which is how long it counts as alive", func() bool {
		return number("SELECT toUInt64(dateDiff('second', max(ts), now64(3))) FROM gateways WHERE boot = '"+boot+"'") > 50
	})
	eventually(t, "it is lost", func() bool { return says() == fmt.Sprintf("map[lost:%d]", unstored(boot)) })
	ask(g)
	if r := verify(); r.Equal {
		t.Errorf("verify = %+v, want it different", r)
	}
}

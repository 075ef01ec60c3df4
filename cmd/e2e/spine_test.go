package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// TestOneRequestEndToEnd follows requests of one tenant through `weir up`: refused at the gateway with everything that a
// caller needs, counted in ClickHouse to the unit, its share pushed back, on-call woken by a signed webhook.
func TestOneRequestEndToEnd(t *testing.T) {
	o := newOncall(t)
	data := t.TempDir()
	policy := write(t, "policy.yaml", `
version: 1
identity: {tenant: {header: X-App-Key}, trusted_proxies: [127.0.0.1]}
plans: {p: {rate: 2/s, burst: 12}}
default_plan: p
rules:
  - {name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
`)
	up := start(t, `"msg":"serving"`, []string{"WEIR_WEBHOOK_SECRET=" + secret}, append([]string{"up", "--data", data, "--policy", policy, "--webhook", o.URL}, anyPorts...)...)
	var e = endpointsOf(t, data)

	sent, refused := 0, 0
	var header http.Header
	var body string
	// A storm on one gateway, until somebody is told.
	eventually(t, "low-tokens is at the webhook", func() bool {
		for range 5 {
			status, h, b := get(t, e.Gateway+"/orders/1?x=1", "acme")
			sent++
			switch status {
			case http.StatusOK:
			case http.StatusTooManyRequests:
				refused++
				header, body = h, b
			default:
				t.Fatalf("status %d: %s", status, b)
			}
		}
		_, _, ok := o.find(schemas.AlertFiring, "low-tokens", "acme")
		return ok
	})

	if after := header.Get("Retry-After"); !regexp.MustCompile(`^[1-9][0-9]*$`).MatchString(after) {
		t.Errorf("Retry-After = %q, want whole seconds of at least 1", after)
	}
	for name, want := range map[string]string{"RateLimit-Policy": `"contract";q=`, "RateLimit": `"contract";r=0;t=`} {
		if got := header.Get(name); !strings.HasPrefix(got, want) {
			t.Errorf("%s = %q, want %s…", name, got, want)
		}
	}
	if got := header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("Content-Type = %q", got)
	}
	var problem struct {
		Type, Title, Detail, Instance string
		Status                        int
		Violated                      []string `json:"violated-policies"`
		RetryAfterMS                  int      `json:"retry_after_ms"`
	}
	if err := json.Unmarshal([]byte(body), &problem); err != nil || problem.Status != 429 || problem.RetryAfterMS < 1 || problem.Detail == "" ||
		problem.Instance == "" || fmt.Sprint(problem.Violated) != "[contract]" {
		t.Errorf("problem = %s (%v), want all members of the contract", body, err)
	}

	// The check API draws on the same bucket as the gateway.
	if status, _, b := get(t, e.Check+"/v1/check", "acme"); status != http.StatusTooManyRequests && status != http.StatusOK {
		t.Errorf("check = %d %s", status, b)
	} else if sent++; status == http.StatusTooManyRequests {
		refused++
	}

	eventually(t, "every request is stored", func() bool {
		return query(t, e.ClickHouse, "SELECT sum(allowed), sum(rejected) FROM usage FINAL WHERE tenant = 'acme'") == fmt.Sprintf("%d\t%d", sent-refused, refused)
	})
	eventually(t, "the share is pushed and recorded", func() bool {
		return query(t, e.ClickHouse, "SELECT count() > 0 FROM throttle_updates WHERE rule = 'contract'") == "1"
	})
	eventually(t, "alerts are rows too", func() bool {
		return query(t, e.ClickHouse, "SELECT count() > 0 FROM alerts FINAL WHERE alert = 'low-tokens' AND tenant = 'acme'") == "1"
	})
	eventually(t, "heartbeats are rows", func() bool {
		return query(t, e.ClickHouse, "SELECT uniqExact(gateway) FROM gateways") == "3"
	})
	if got, _ := strconv.Atoi(query(t, e.ClickHouse, "SELECT count() FROM rejections FINAL WHERE rule = 'contract' AND path = '/orders/1'")); got == 0 {
		t.Error("no refusal was sampled")
	}

	want := []string{fmt.Sprintf(`weir_decisions_total{decision="refused",layer="contract",rule="contract"} %d`, refused)}
	for _, stage := range []string{"admitted", "spooled", "acked", "reconciled", "stored"} {
		want = append(want, fmt.Sprintf(`weir_usage_units_total{stage="%s"} %d`, stage, sent))
	}
	for _, line := range want { // a row is there a moment before it is counted as stored
		eventually(t, "metrics say "+line, func() bool { return strings.Contains(fetch(t, e.Metrics+"/metrics"), line+"\n") })
	}
	for _, path := range []string{"/livez", "/readyz"} {
		if status, _, b := get(t, e.Metrics+path, ""); status != http.StatusOK {
			t.Errorf("%s = %d %s", path, status, b)
		}
	}

	top, _, code := weir(t, nil, "usage", "top", "--data", data, "-o", "json")
	if want := fmt.Sprintf(`[{"tenant":"acme","requests":%d,"allowed":%d,"rejected":%d,"cost":%d}]`+"\n", sent, sent-refused, refused, sent); top != want || code != 0 {
		t.Errorf("usage top = %q (exit %d), want %q", top, code, want)
	}
	if out, errOut, code := weir(t, nil, "doctor", "--data", data); code != 0 || strings.Contains(out, "sync_interval") {
		t.Errorf("doctor exits %d on a healthy pipeline, and says %s%s", code, out, errOut)
	}
	log := write(t, "access.log", `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1`+"\nnonsense\n")
	out, errOut, code := weir(t, nil, "replay", "--data", data, "--log", log, "--policy", policy, "--speed", "max", "-o", "json")
	if code != 0 || !strings.Contains(out, `"by_rule":{"contract":0,"guard":0}`) {
		t.Errorf("replay exits %d: %s, want every rule", code, out)
	}
	for _, want := range []string{log + ":2: not a request", "every request is of tenant anonymous: the policy reads the header X-App-Key"} {
		if !strings.Contains(errOut, want) {
			t.Errorf("replay says %q, want %q", errOut, want)
		}
	}

	if code := up.stop(syscall.SIGINT); code != 0 {
		t.Errorf("Ctrl-C exits %d, want 0", code)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, n := range o.ids {
		if n != 1 {
			t.Errorf("webhook %s came %d times, want once", id, n)
		}
	}
}

// endpointsOf waits for the file.
func endpointsOf(t *testing.T, data string) (e endpointsT) {
	t.Helper()
	eventually(t, "endpoints.json is there", func() bool { return exists(data + "/endpoints.json") })
	return endpoints(t, data)
}

// TestAggregatorMayDie replays a log while the aggregator is killed, and while Redis is away: nothing is lost or doubled.
func TestAggregatorMayDie(t *testing.T) {
	policy := write(t, "policy.yaml", `
version: 1
identity: {tenant: {client_ip: true}}
routes: [{name: presentations, match: {path: /presentations/**}}]
rules:
  - {name: guard, layer: guard, key: [], rate: 3/s, burst: 20}
  - {name: contract, layer: contract, key: [tenant], rate: 1/5s, burst: 5}
  - {name: route, layer: route, key: [route], routes: [presentations], rate: 1/2s, burst: 10}
`)
	log, requests := accessLog(t)
	nats, redis, clickhouse := embeddedtest.NATS(t), embeddedtest.Redis(t), embeddedtest.ClickHouse(t)
	servers := []string{"--nats", nats.URL(), "--redis", redis.URL(), "--clickhouse", clickhouse.URL(), "--data", t.TempDir()}
	if out, errOut, code := weir(t, nil, "migrate", "--clickhouse", clickhouse.URL()); code != 0 {
		t.Fatalf("migrate exits %d: %s%s", code, out, errOut)
	}
	aggregator := func() *process {
		return start(t, `"msg":"serving"`, nil, append([]string{"aggregator", "--metrics-addr", "127.0.0.1:0"}, servers...)...)
	}
	agg := aggregator()
	for _, tt := range []struct {
		name, speed string
		meanwhile   func()
	}{
		{"undisturbed", "max", func() {}},
		{"aggregator killed", "40000", func() {
			for range 3 {
				time.Sleep(time.Second)
				agg.stop(syscall.SIGKILL)
				agg = aggregator()
			}
		}},
		{"Redis away for 10 s", "40000", func() {
			if err := redis.Stop(); err != nil {
				t.Error(err)
			}
			time.Sleep(10 * time.Second)
			if err := redis.Restart(); err != nil {
				t.Error(err)
			}
		}},
		{"aggregator and engine killed", "40000", func() {
			time.Sleep(2 * time.Second)
			if err := clickhouse.Kill(); err != nil {
				t.Error(err)
			}
			agg.stop(syscall.SIGKILL)
			if err := clickhouse.Restart(); err != nil {
				t.Error(err)
			}
			agg = aggregator()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := command(nil, append([]string{"replay", "--log", log, "--policy", policy, "--speed", tt.speed, "-o", "json"}, servers...)...)
			var out, errOut strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &errOut
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			tt.meanwhile()
			if err := cmd.Wait(); err != nil {
				t.Errorf("replay: %v: %s", err, errOut.String())
			}
			var res struct{ Requests, Stored, Lost, Doubled int }
			if err := json.Unmarshal([]byte(out.String()), &res); err != nil {
				t.Fatalf("replay printed %q: %v", out.String(), err)
			}
			t.Logf("replay: %s", out.String())
			if res.Requests != requests || res.Stored != requests || res.Lost != 0 || res.Doubled != 0 {
				t.Errorf("replay = %+v, want %d requests stored once each", res, requests)
			}
		})
	}
	eventually(t, "Redis has what was reported before and after it was away", func() bool {
		return query(t, clickhouse.URL(), "SELECT uniqExact(gateway, boot, seq) = count() FROM reports FINAL") == "1"
	})
}

// TestASecondAggregatorStandsBy has two, and kills the one that keeps the history.
func TestASecondAggregatorStandsBy(t *testing.T) {
	policy := write(t, "policy.yaml", guardOnly+"identity: {tenant: {client_ip: true}}\n")
	log, requests := accessLog(t)
	nats, redis, clickhouse := embeddedtest.NATS(t), embeddedtest.Redis(t), embeddedtest.ClickHouse(t)
	servers := []string{"--nats", nats.URL(), "--redis", redis.URL(), "--clickhouse", clickhouse.URL(), "--data", t.TempDir()}
	if _, errOut, code := weir(t, nil, "migrate", "--clickhouse", clickhouse.URL()); code != 0 {
		t.Fatalf("migrate exits %d: %s", code, errOut)
	}
	aggregator := func(until string) *process {
		return start(t, until, nil, append([]string{"aggregator", "--metrics-addr", "127.0.0.1:0"}, servers...)...)
	}
	first := aggregator(`"lease":"leader"`)
	second := aggregator(`"lease":"leader"`)
	replayed := func() {
		t.Helper()
		out, errOut, code := weir(t, nil, append([]string{"replay", "--log", log, "--policy", policy, "--speed", "max", "-o", "json"}, servers...)...)
		if want := fmt.Sprintf(`"stored":%d,"lost":0,"doubled":0`, requests); code != 0 || !strings.Contains(out, want) {
			t.Errorf("replay exits %d: %s%s, want %s", code, out, errOut, want)
		}
	}
	replayed()
	first.stop(syscall.SIGKILL)
	replayed()
	if code := second.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("SIGTERM exits %d, want 0", code)
	}
}

// TestASignalDuringTheStartIsACleanEnd has an aggregator that still looks for NATS.
func TestASignalDuringTheStartIsACleanEnd(t *testing.T) {
	cmd := command(nil, "aggregator", "--metrics-addr", "127.0.0.1:0", "--data", t.TempDir(), "--nats", "nats://127.0.0.1:1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond) // long enough to be looking, far too short to have given up
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("SIGTERM during the start ends with %v, want 0", err)
	}
}

package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/internal/embedded/clickhouse"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	natsserver "github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/embedded/redis"
	"github.com/weirhq/weir/schemas"
)

const guardOnly = "version: 1\nrules: [{name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}]\n"

// complaint runs weir, which must end with that exit code and one line on standard error that says what and where.
func complaint(t *testing.T, code int, words []string, args ...string) {
	t.Helper()
	out, errOut, got := weir(t, nil, args...)
	if got != code {
		t.Errorf("weir %v exits %d, want %d: %s%s", args, got, code, out, errOut)
	}
	var line string
	for l := range strings.Lines(errOut) {
		if strings.HasPrefix(l, "weir: ") {
			line = l
		}
	}
	for _, w := range words {
		if !strings.Contains(line, w) {
			t.Errorf("weir %v says %q, want %q in it (all: %s)", args, line, w, errOut)
		}
	}
	if strings.Contains(errOut, "goroutine ") || strings.Contains(errOut, "hunter2") {
		t.Errorf("weir %v prints a stack or a secret: %s", args, errOut)
	}
}

func TestUsageMistakes(t *testing.T) {
	for _, tt := range []struct {
		words []string
		args  []string
	}{
		{[]string{`no command "nonsense"`}, []string{"nonsense"}},
		{[]string{"unknown flag: --nonsense"}, []string{"up", "--nonsense"}},
		{[]string{"--log", "--policy", "required"}, []string{"simulate"}},
		{[]string{"--upstream", "required"}, []string{"gateway"}},
		{[]string{"--upstream", "want an address"}, []string{"gateway", "--upstream", "localhost:1", "--policy", "x"}},
		{[]string{`-o "xml"`, "table or json"}, []string{"version", "-o", "xml"}},
		{[]string{"usage of what"}, []string{"usage"}},
		{[]string{"the tenant's name"}, []string{"usage", "tenant"}},
		{[]string{`--speed "fast"`}, []string{"replay", "--log", "x", "--policy", "y", "--speed", "fast"}},
		{[]string{`--from "yesterday"`, "2026-"}, []string{"usage", "top", "--from", "yesterday"}},
		{[]string{"log level"}, []string{"aggregator", "--log-level", "loud"}},
		{[]string{"takes no argument"}, []string{"check", "policy.yaml"}},
	} {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) { complaint(t, 2, tt.words, tt.args...) })
	}
}

// TestBadPolicies has one line for each mistake, with file and line, and exit code 1.
func TestBadPolicies(t *testing.T) {
	for name, tt := range map[string]struct{ policy, want string }{
		"unknown key":      {guardOnly + "burts: 5\n", "policy.yaml:3"},
		"duplicate tenant": {guardOnly + "default_plan: p\nplans: {p: {rate: 1/s, burst: 1}}\ntenants:\n  a: {plan: p}\n  a: {plan: p}\n", "policy.yaml:7"},
		"negative rate":    {strings.Replace(guardOnly, "13000/s", "-5/s", 1), "policy.yaml:2"},
		"NaN rate":         {strings.Replace(guardOnly, "13000/s", "NaN/s", 1), "policy.yaml:2"},
		"no guard":         {"version: 1\nrules: [{name: c, layer: contract, key: [tenant], rate: 1/s, burst: 1}]\n", "guard"},
		"guard in shadow":  {strings.Replace(guardOnly, "burst: 26000", "burst: 26000, mode: shadow", 1), "policy.yaml:2"},
		"tab":              {"version: 1\n\trules: []\n", "policy.yaml:2"},
		"empty":            {"", "policy.yaml"},
		"binary":           {"\x00\x01\xff", "policy.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			file := write(t, "policy.yaml", tt.policy)
			for _, args := range [][]string{{"check", "--policy", file}, {"gateway", "--upstream", "http://127.0.0.1:1", "--policy", file}, {"simulate", "--log", "-", "--policy", file}} {
				_, errOut, code := weir(t, nil, args...)
				if code != 1 || !strings.Contains(errOut, tt.want) {
					t.Errorf("weir %s exits %d and says %q, want 1 and %q in it", args[0], code, errOut, tt.want)
				}
			}
		})
	}
}

// TestServersThatWillNotHaveUs has a wrong password, nobody there, and a database without the schema, for every server.
func TestServersThatWillNotHaveUs(t *testing.T) {
	log := embeddedtest.Log(t)
	n, err := natsserver.Start(natsserver.Config{Dir: t.TempDir(), User: "weir", Password: "right"}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Stop)
	r, err := redis.Start(redis.Config{Dir: t.TempDir(), Password: "right", Real: true}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Stop() })
	c, err := clickhouse.Start(clickhouse.Config{Dir: t.TempDir(), Database: "weir", User: "weir", Password: "right"}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop() })
	as := func(url, password string) string { return strings.Replace(url, "://", "://weir:"+password+"@", 1) }
	redisURL := func(password string) string { return strings.Replace(r.URL(), "://", "://:"+password+"@", 1) }
	data := []string{"--data", t.TempDir()}

	complaint(t, 3, []string{"NATS", "credentials"}, append([]string{"aggregator", "--metrics-addr", "127.0.0.1:0", "--nats", as(n.URL(), "hunter2")}, data...)...)
	complaint(t, 3, []string{"NATS", "unreachable"}, append([]string{"alerter", "--metrics-addr", "127.0.0.1:0", "--nats", "nats://127.0.0.1:1"}, data...)...)
	complaint(t, 3, []string{"ClickHouse", "denied", "password"}, append([]string{"migrate", "--clickhouse", as(c.URL(), "hunter2")}, data...)...)
	complaint(t, 3, []string{"ClickHouse"}, append([]string{"usage", "top", "--clickhouse", "http://127.0.0.1:1/weir"}, data...)...)
	complaint(t, 1, []string{"weir migrate"}, append([]string{"usage", "top", "--clickhouse", as(c.URL(), "right")}, data...)...)
	complaint(t, 1, []string{"weir migrate"}, append([]string{"aggregator", "--metrics-addr", "127.0.0.1:0", "--nats", as(n.URL(), "right"),
		"--redis", redisURL("right"), "--clickhouse", as(c.URL(), "right")}, data...)...)

	out, errOut, code := weir(t, nil, append([]string{"doctor", "--nats", as(n.URL(), "hunter2"), "--redis", redisURL("hunter2"), "--clickhouse", as(c.URL(), "hunter2")}, data...)...)
	if code != 3 || strings.Count(out, "unreachable") < 3 || strings.Contains(out+errOut, "hunter2") {
		t.Errorf("doctor with wrong passwords exits %d: %s%s, want 3, three servers unreachable and no secret", code, out, errOut)
	}

	// Redis may come later, so its wrong password does not end the aggregator: it says so, and the history goes on.
	if _, errOut, code := weir(t, nil, "migrate", "--clickhouse", as(c.URL(), "right")); code != 0 {
		t.Fatalf("migrate: %s", errOut)
	}
	agg := start(t, "wrong or missing password", nil, append([]string{"aggregator", "--metrics-addr", "127.0.0.1:0", "--nats", as(n.URL(), "right"),
		"--redis", redisURL("hunter2"), "--clickhouse", as(c.URL(), "right")}, data...)...)
	if log := strings.Join(agg.lines(), "\n"); strings.Contains(log, "hunter2") {
		t.Errorf("the log has the secret: %s", log)
	}
	if code := agg.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("SIGTERM exits %d, want 0", code)
	}
}

func TestAddressInUse(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	policy, taken := write(t, "policy.yaml", guardOnly), ln.Addr().String()
	args := func(gateway, check, metrics string) []string {
		return []string{"gateway", "--upstream", "http://127.0.0.1:1", "--policy", policy, "--data", t.TempDir(), "--nats", "nats://127.0.0.1:1",
			"--gateway-addr", gateway, "--check-addr", check, "--metrics-addr", metrics}
	}
	const free = "127.0.0.1:0"
	complaint(t, 1, []string{"gateway", taken, "address already in use"}, args(taken, free, free)...)
	complaint(t, 1, []string{"check API", taken, "address already in use"}, args(free, taken, free)...)
	complaint(t, 1, []string{"metrics", taken, "address already in use"}, args(free, free, taken)...)
}

// TestBadInputCostsNobodyElse throws everything bad at a running pipeline, and then counts the good.
func TestBadInputCostsNobodyElse(t *testing.T) {
	data := t.TempDir()
	policy := write(t, "policy.yaml", guardOnly)
	start(t, `"msg":"serving"`, nil, append([]string{"up", "--data", data, "--policy", policy, "--gateways", "1"}, anyPorts...)...)
	e := endpointsOf(t, data)

	good := 0
	send := func(what string, want int, change func(*http.Request)) {
		t.Helper()
		req, err := http.NewRequestWithContext(bounded(t), http.MethodGet, e.Gateway+"/x", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		change(req)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s: status %d, want %d", what, resp.StatusCode, want)
		}
	}
	ok := func() {
		t.Helper()
		send("a good request", http.StatusOK, func(r *http.Request) { r.Header.Set("X-App-Key", "good") })
		good++
	}
	ok()
	send("invalid UTF-8 in a tenant", http.StatusBadRequest, func(r *http.Request) { r.Header["X-App-Key"] = []string{"\xff\xfe"} })
	send("a tenant of 5000 bytes", http.StatusBadRequest, func(r *http.Request) { r.Header.Set("X-App-Key", strings.Repeat("k", 5000)) })
	huge(t, e.Gateway)
	ok()

	nc, err := nats.Connect(e.NATS)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now().UTC().Format(time.RFC3339Nano)
	report := func(tenant, extra string) string {
		return fmt.Sprintf(`{"boot":"elsewhere","seq":1%s,"usage":[{"ts":%q,"tenant":%q,"route":"r","allowed":3}]}`, extra, now, tenant)
	}
	bad := map[string]string{ // by the reason that they must have
		"\xff\xff a body that is not a report": "malformed",
		report("g", `,"surprise":1`):           "malformed",
		report("g", `,"gateway":"me"`):         "gateway",
		`{"boot":"b","seq":0}`:                 "invalid",
		`{"boot":"b","seq":1,"usage":[{"ts":"` + now + `","tenant":"t","route":"r","allowed":-5}]}`:                               "malformed",
		`{"boot":"b","seq":1,"usage":[{"ts":"2300-01-01T00:00:00Z","tenant":"t","route":"r","allowed":1}]}`:                       "time",
		`{"boot":"b","seq":1,"usage":[{"tenant":"t","route":"r","allowed":1}]}`:                                                   "time",
		`{"boot":"b","seq":1,"usage":[{"ts":"` + now + `","tenant":"t","route":"r","rejected":1}]}`:                               "invalid",
		`{"boot":"b","seq":1,"usage":[{"ts":"` + now + `","tenant":"` + strings.Repeat("k", 300) + `","route":"r","allowed":1}]}`: "invalid",
	}
	reasons := map[string]int{}
	for body, reason := range bad {
		if _, err := js.Publish(bounded(t), schemas.UsagePrefix+"other", []byte(body)); err != nil {
			t.Fatal(err)
		}
		reasons[reason]++
	}
	if _, err := js.Publish(bounded(t), schemas.UsagePrefix+"other", make([]byte, 2<<20)); err == nil {
		t.Error("a report of 2 MiB was taken, want an error")
	}
	if _, err := js.Publish(bounded(t), schemas.UsagePrefix+"other", []byte(report("json", ""))); err != nil {
		t.Fatal(err)
	}
	ok()

	const stored = "SELECT tenant, sum(allowed + rejected) FROM usage FINAL GROUP BY tenant ORDER BY tenant"
	eventually(t, "the good is stored, and only the good", func() bool { return query(t, e.ClickHouse, stored) == fmt.Sprintf("good\t%d\njson\t3", good) })
	for reason, want := range reasons {
		eventually(t, fmt.Sprintf("%d dead letters for the reason %s", want, reason), func() bool { return deadLetters(t, js, reason) == want })
	}
}

func deadLetters(t *testing.T, js jetstream.JetStream, reason string) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s, err := js.Stream(ctx, schemas.DeadStream)
	if err != nil {
		t.Fatal(err)
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(schemas.DeadPrefix+reason))
	if err != nil {
		t.Fatal(err)
	}
	return int(info.State.Subjects[schemas.DeadPrefix+reason])
}

// huge sends a header of 10 MB: it is refused long before it has arrived.
func huge(t *testing.T, gateway string) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(gateway, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nX-Big: %s\r\n\r\n", strings.Repeat("x", 10<<20)) // the gateway hangs up meanwhile
	}()
	answer := make([]byte, 64)
	n, err := conn.Read(answer)
	if !strings.HasPrefix(string(answer[:n]), "HTTP/1.1 431") {
		t.Errorf("a header of 10 MB is answered %q (%v), want 431", answer[:n], err)
	}
	_ = conn.Close()
	<-sent
}

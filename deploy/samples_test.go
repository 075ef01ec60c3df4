// Package deploy has no code of its own: its tests run the sample configurations.
package deploy

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/httpguard"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// The sample configurations, run by the real servers. nginx must be there; the others are run where they are.

// sample is a server of others' and our configuration for it.
type sample struct {
	name    string
	binary  string
	down    int // requests to try while weir does not answer
	command func(t *testing.T, binary, dir, listen, weir, app string) *exec.Cmd
}

var samples = []sample{
	{name: "nginx", binary: "nginx", down: 5, command: func(t *testing.T, binary, dir, listen, weir, app string) *exec.Cmd {
		server := adapt(t, "nginx/weir.conf", "listen 80", "listen "+listen, "127.0.0.1:8081", weir, "127.0.0.1:3000", app)
		var temp strings.Builder
		for _, name := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
			fmt.Fprintf(&temp, "    %s_temp_path %s/%s;\n", name, dir, name)
		}
		conf := write(t, dir, "nginx.conf", fmt.Sprintf("daemon off;\nmaster_process off;\npid %s/pid;\nerror_log %s/error.log info;\nevents {}\nhttp {\n    access_log off;\n%s%s\n}\n",
			dir, dir, temp.String(), server))
		return exec.Command(binary, "-p", dir, "-c", conf, "-e", dir+"/error.log")
	}},
	{name: "haproxy", binary: "haproxy", down: 1, command: func(t *testing.T, binary, dir, listen, weir, app string) *exec.Cmd {
		lua := write(t, dir, "weir.lua", adapt(t, "haproxy/weir.lua"))
		conf := write(t, dir, "haproxy.cfg", adapt(t, "haproxy/haproxy.cfg", "/etc/haproxy/weir.lua", lua, "bind :80", "bind "+listen,
			"127.0.0.1:8081", weir, "127.0.0.1:3000", app))
		return exec.Command(binary, "-db", "-f", conf)
	}},
	{name: "caddy", binary: "caddy", down: 5, command: func(t *testing.T, binary, dir, listen, weir, app string) *exec.Cmd {
		conf := write(t, dir, "Caddyfile", "{\n\tadmin off\n}\n"+adapt(t, "caddy/Caddyfile", ":80 {", "http://"+listen+" {",
			"127.0.0.1:8081", weir, "127.0.0.1:3000", app))
		cmd := exec.Command(binary, "run", "--config", conf, "--adapter", "caddyfile")
		cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
		return cmd
	}},
}

// adapt is a sample with its addresses changed. Each old text must be there.
func adapt(t *testing.T, file string, oldnew ...string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s := string(b)
	for i := 0; i < len(oldnew); i += 2 {
		if !strings.Contains(s, oldnew[i]) {
			t.Fatalf("%s has no %q", file, oldnew[i])
		}
		s = strings.ReplaceAll(s, oldnew[i], oldnew[i+1])
	}
	return s
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// run starts the server and returns its address once it answers.
func (s *sample) run(t *testing.T, binary, weir, app string) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listen := ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := s.command(t, binary, dir, listen, strings.TrimPrefix(weir, "http://"), strings.TrimPrefix(app, "http://"))
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Errorf("stop %s: %v", s.name, err)
		}
		_ = cmd.Wait() // some end by the signal, some with 0
		if b, err := os.ReadFile(dir + "/error.log"); err == nil && t.Failed() {
			t.Logf("error.log:\n%s", b)
		}
	})
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		conn, err := net.Dial("tcp", listen)
		if err == nil {
			_ = conn.Close()
			return "http://" + listen
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not listen: %v", s.name, err)
		}
	}
}

func TestB027SampleConfigurations(t *testing.T) {
	for _, s := range samples {
		binary, err := exec.LookPath(s.binary)
		if err != nil {
			binary, err = exec.LookPath("/usr/sbin/" + s.binary)
		}
		if err != nil {
			if s.name == "nginx" {
				t.Fatalf("nginx is not here (%v), and this test is about it: make test installs it", err)
			}
			t.Logf("%s is not here: its sample was not run", s.name)
			continue
		}
		t.Run(s.name, func(t *testing.T) { testSample(t, &s, binary) })
	}
}

func testSample(t *testing.T, s *sample, binary string) {
	var hits atomic.Int64
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hits.Add(1)
		b, _ := io.ReadAll(r.Body)
		switch r.URL.Path {
		case "/app/403":
			w.WriteHeader(403)
		case "/app/500":
			w.WriteHeader(500)
		}
		_, _ = fmt.Fprintf(w, "%s %s %s", r.Method, r.RequestURI, b)
	}))
	defer app.Close()

	e := enforcer.New(enforcer.Config{Stripes: 1})
	e.SetPolicy(parse(t, "1000000/s, burst: 1000000"))
	rec := &record{counts: map[string]int{}}
	log := embeddedtest.Log(t)
	check := httpguard.New(httpguard.Config{}, e, e.Policy, rec, nil, log).CheckHandler()
	weir := httpguard.Server("", check, log)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	weirAddr := ln.Addr().String()
	go func() { _ = weir.Serve(ln) }()
	front := s.run(t, binary, weirAddr, app.URL)

	ask := func(method, target, key string, headers ...string) reply {
		t.Helper()
		var body io.Reader
		if method == "POST" {
			body = strings.NewReader("some body")
		}
		req, err := http.NewRequest(method, front+target, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-App-Key", key)
		for i := 0; i < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if cerr := resp.Body.Close(); err != nil || cerr != nil {
			t.Fatal(err, cerr)
		}
		return reply{resp.StatusCode, resp.Header, string(b)}
	}

	// Limit 5, 10 requests.
	for i := range 10 {
		got := ask("GET", "/v1/%78?a=b&c", "acme")
		h := got.header
		if i < 5 {
			if got.status != 200 || got.body != "GET /v1/%78?a=b&c " {
				t.Errorf("request %d: %d %q, want 200 from the app", i, got.status, got.body)
			}
			if has, want := h.Get("RateLimit"), fmt.Sprintf(`"contract";r=%d, "per-ip";r=%d`, 4-i, 999-i); has != want {
				t.Errorf("request %d: RateLimit %q, want %q", i, has, want)
			}
			continue
		}
		if got.status != 429 || !regexp.MustCompile(`^[1-9][0-9]*$`).MatchString(h.Get("Retry-After")) || h.Get("RateLimit-Policy") != `"contract";q=5;w=18000` ||
			!strings.HasPrefix(h.Get("RateLimit"), `"contract";r=0;t=`) || h.Get("Cache-Control") != "no-store" || h.Get("Content-Type") != "application/problem+json" {
			t.Errorf("request %d: %d %v, want 429 with weir's headers", i, got.status, h)
		}
		if p := problemOf(t, got.body); p.Status != 429 || p.Violated[0] != "contract" {
			t.Errorf("request %d: %s, want weir's problem", i, got.body)
		}
	}
	if n := rec.count(""); n != 10 || hits.Load() != 5 || rec.count("acme/v1//") != 5 || rec.count("acme/v1/contract/contract") != 5 {
		t.Errorf("counted %v (%d), served %d: want each of the 10 requests once and 5 served", rec.counts, n, hits.Load())
	}

	for _, c := range []struct {
		what, method, target, key string
		headers                   []string
		status                    int
		body, count               string
	}{
		{"a body reaches the app", "POST", "/post", "b", nil, 200, "POST /post some body", "b/other//"},
		{"HEAD", "HEAD", "/", "b", nil, 200, "", "b/other//"},
		{"the app's own 403", "GET", "/app/403", "b", nil, 403, "GET /app/403 ", "b/other//"},
		{"the app's own 500", "GET", "/app/500", "b", nil, 500, "GET /app/500 ", "b/other//"},
		{"a key that is no key", "GET", "/", strings.Repeat("k", 300), nil, 400, "", ""},
		{"a refused body", "POST", "/", "acme", nil, 429, "", "acme/other/contract/contract"},
		{"a refused HEAD", "HEAD", "/", "acme", nil, 429, "", "acme/other/contract/contract"},
		{"no caller chooses its route", "GET", "/report/export/1", "c", []string{"X-Forwarded-Uri", "/", "X-Forwarded-Method", "POST"}, 200, "", "c/export//"},
		{"nor by the other name", "GET", "/report/export/2", "c", []string{"X-Original-Uri", "/", "X-Original-Method", "POST"}, 200, "", "c/export//"},
		{"the route's limit", "GET", "/report/export/3", "c", nil, 429, "", "c/export/export/route"},
	} {
		before, was := rec.count(""), rec.count(c.count)
		got := ask(c.method, c.target, c.key, c.headers...)
		if got.status != c.status || c.body != "" && got.body != c.body {
			t.Errorf("%s: %d %q, want %d %q", c.what, got.status, got.body, c.status, c.body)
		}
		want := 1
		if c.count == "" {
			want = 0
		}
		if n := rec.count("") - before; n != want || c.count != "" && rec.count(c.count)-was != 1 {
			t.Errorf("%s: %d requests counted, %v, want one under %s", c.what, n, rec.counts, c.count)
		}
		if c.status == 400 && problemOf(t, got.body).Status != 400 {
			t.Errorf("%s: %s, want weir's problem", c.what, got.body)
		}
	}

	// weir is stopped.
	if err := weir.Close(); err != nil {
		t.Fatal(err)
	}
	before := hits.Load()
	for i := range s.down {
		got := ask("GET", "/", "acme")
		if got.status != 503 || got.header.Get("Retry-After") != "5" || problemOf(t, got.body).Status != 503 {
			t.Errorf("weir down, request %d: %d %v %q, want 503 that says when to come back", i, got.status, got.header, got.body)
		}
	}
	if hits.Load() != before {
		t.Errorf("weir down: %d requests served unmetered", hits.Load()-before)
	}

	// And comes back: nobody waits for it longer than it was away.
	again := httpguard.Server("", check, log)
	ln, err = net.Listen("tcp", weirAddr)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = again.Serve(ln) }()
	defer again.Close()
	if got := ask("GET", "/", "d"); got.status != 200 {
		t.Errorf("weir is back: %d %q, want 200", got.status, got.body)
	}

	// The guard refuses everybody with 503, weir's own.
	e.SetPolicy(parse(t, "1/m, burst: 1"))
	for i := range 3 {
		got := ask("GET", "/", "e")
		if i == 0 {
			continue
		}
		if p := problemOf(t, got.body); got.status != 503 || p.Violated[0] != "guard" || got.header.Get("Retry-After") == "" || got.header.Get("RateLimit") == "" {
			t.Errorf("guard: %d %v %q, want 503 as weir says it", got.status, got.header, got.body)
		}
	}
}

// parse is a policy with the guard's limit given, and limits that a few requests reach.
func parse(t *testing.T, guard string) *limits.Policy {
	t.Helper()
	p, err := limits.Parse("policy.yaml", fmt.Appendf(nil, `
version: 1
identity: {trusted_proxies: [127.0.0.1]}
routes:
  - {name: export, match: {methods: [GET], path: /report/export/**}}
  - {name: v1, match: {path: /v1/x}}
plans: {standard: {rate: 1/h, burst: 5}}
default_plan: standard
rules:
  - {name: guard, layer: guard, key: [], rate: %s}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
  - {name: per-ip, layer: contract, key: [ip], rate: 1/h, burst: 1000}
  - {name: export, layer: route, key: [route], routes: [export], rate: 1/90s, burst: 2}
`, guard))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// reply is an answer that has been read.
type reply struct {
	status int
	header http.Header
	body   string
}

// record remembers what was counted, by tenant/route/rule/layer and, under "", altogether.
type record struct {
	mu     sync.Mutex
	counts map[string]int
}

func (r *record) Count(_ time.Time, tenant, route, rule, layer string, _ int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts[strings.Join([]string{tenant, route, rule, layer}, "/")]++
	r.counts[""]++
}

func (r *record) Reject(schemas.Rejection) {}

func (r *record) count(key string) int { r.mu.Lock(); defer r.mu.Unlock(); return r.counts[key] }

// problem is the part of a problem body that is looked at here.
type problem struct {
	Status   int
	Violated []string `json:"violated-policies"`
}

func problemOf(t *testing.T, body string) problem {
	t.Helper()
	var p problem
	if err := json.Unmarshal([]byte(body), &p); err != nil {
		t.Fatalf("problem body %q: %v", body, err)
	}
	return p
}

// TestTraefikSample reads what no server here can run.
func TestTraefikSample(t *testing.T) {
	var conf struct {
		HTTP struct {
			Routers     map[string]struct{ Middlewares []string }
			Middlewares map[string]struct {
				ForwardAuth *struct {
					Address            string
					TrustForwardHeader bool `yaml:"trustForwardHeader"`
				} `yaml:"forwardAuth"`
				Headers *struct {
					CustomRequestHeaders map[string]string `yaml:"customRequestHeaders"`
				}
			}
		}
	}
	if err := yaml.Unmarshal([]byte(adapt(t, "traefik/weir.yaml")), &conf); err != nil {
		t.Fatal(err)
	}
	auth := conf.HTTP.Middlewares["weir"].ForwardAuth
	if auth == nil || auth.Address != "http://127.0.0.1:8081/v1/check" || auth.TrustForwardHeader {
		t.Errorf("forwardAuth %+v, want weir's check and no trust in callers", auth)
	}
	// Removed before they are believed: the order counts.
	if got := fmt.Sprint(conf.HTTP.Routers["app"].Middlewares); got != "[weir-names weir]" {
		t.Errorf("middlewares %s", got)
	}
	if h := conf.HTTP.Middlewares["weir-names"].Headers; h == nil || len(h.CustomRequestHeaders) != 2 {
		t.Errorf("weir-names %+v, want the two names emptied", h)
	}
}

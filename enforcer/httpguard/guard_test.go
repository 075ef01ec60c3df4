package httpguard

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// rig is a guard over a real enforcer whose clock stands still until the test moves it.
type rig struct {
	*Guard
	enforcer *enforcer.Enforcer
	metrics  *Metrics
	registry *prometheus.Registry
	rec      record

	mu  sync.Mutex
	now time.Duration
}

var noon = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

func newRig(t testing.TB, policy string) *rig {
	t.Helper()
	p := parse(t, policy)
	r := &rig{registry: prometheus.NewRegistry()}
	clock := func() int64 { r.mu.Lock(); defer r.mu.Unlock(); return int64(time.Hour + r.now) }
	r.enforcer = enforcer.New(enforcer.Config{Clock: clock, Stripes: 1})
	r.enforcer.SetPolicy(p)
	r.metrics = NewMetrics(r.registry)
	r.Guard = New(Config{Now: func() time.Time { r.mu.Lock(); defer r.mu.Unlock(); return noon.Add(r.now) }, Clock: clock},
		r.enforcer, r.enforcer.Policy, &r.rec, r.metrics, slog.New(slog.DiscardHandler))
	return r
}

func (r *rig) wait(d time.Duration) { r.mu.Lock(); defer r.mu.Unlock(); r.now += d }

// record remembers what was counted.
type record struct {
	mu       sync.Mutex
	counts   map[string]int64 // tenant/route/rule/layer
	samples  []schemas.Rejection
	requests int
}

func (r *record) Count(_ time.Time, tenant, route, rule, layer string, cost int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts == nil {
		r.counts = map[string]int64{}
	}
	r.counts[strings.Join([]string{tenant, route, rule, layer}, "/")] += cost
	r.requests++
}

func (r *record) Reject(j schemas.Rejection) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.samples = append(r.samples, j)
}

func (r *record) count(key string) int64 { r.mu.Lock(); defer r.mu.Unlock(); return r.counts[key] }

// upstream is the handler behind the guard.
type upstream struct{ served int }

func (u *upstream) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	u.served++
	_, _ = io.WriteString(w, "hello")
}

// edit changes a request before it is sent.
type edit func(*http.Request)

func header(name, value string) edit {
	return func(r *http.Request) {
		r.Header[http.CanonicalHeaderKey(name)] = append(r.Header[http.CanonicalHeaderKey(name)], value)
	}
}
func remote(addr string) edit { return func(r *http.Request) { r.RemoteAddr = addr } }
func basic(user string) edit  { return func(r *http.Request) { r.SetBasicAuth(user, "secret") } }

func do(h http.Handler, method, target string, edits ...edit) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, nil)
	for _, e := range edits {
		e(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// policy is a guard too high to matter and the rules given, tenants by X-App-Key unless identity says otherwise.
func policy(identity, plans, rules string) string {
	if plans == "" {
		plans = "{standard: {rate: 80/s, burst: 160}}"
	}
	return fmt.Sprintf(`
version: 1
identity: {%s}
routes:
  - {name: export, match: {methods: [GET], path: /report/export/**}}
  - {name: v1, match: {path: /v1/x}}
plans: %s
default_plan: standard
rules:
  - {name: guard, layer: guard, key: [], rate: 1000000/s, burst: 1000000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
%s`, identity, plans, rules)
}

func plan(rate string, burst int) string {
	return fmt.Sprintf("{standard: {rate: %s, burst: %d}}", rate, burst)
}

func problemOf(t *testing.T, body string) problem {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	var p problem
	if err := d.Decode(&p); err != nil {
		t.Fatalf("problem body %q: %v", body, err)
	}
	return p
}

func TestAnAdmittedRequestIsServedCountedAndToldWhereItStands(t *testing.T) {
	r := newRig(t, policy("", "", "  - {name: export, layer: route, key: [route], routes: [export], rate: 5/s, burst: 10}"))
	var up upstream
	w := do(r.Wrap(&up), "GET", "/report/export/a?x=1", header("X-App-Key", "acme"))
	if w.Code != 200 || w.Body.String() != "hello" || up.served != 1 {
		t.Fatalf("answer %d %q, served %d times, want 200 hello once", w.Code, w.Body, up.served)
	}
	if got, want := w.Header().Get("RateLimit-Policy"), `"contract";q=160;w=2, "export";q=10;w=2`; got != want {
		t.Errorf("RateLimit-Policy: %s, want %s", got, want)
	}
	if got, want := w.Header().Get("RateLimit"), `"contract";r=159, "export";r=9`; got != want {
		t.Errorf("RateLimit: %s, want %s", got, want)
	}
	if got := w.Header().Get("Retry-After"); got != "" {
		t.Errorf("Retry-After: %s on an admitted request, want none", got)
	}
	if n := r.rec.count("acme/export//"); n != 1 || r.rec.requests != 1 {
		t.Errorf("counted %v, want one request of acme to export", r.rec.counts)
	}
	if n := testutil.ToFloat64(r.metrics.Decisions.WithLabelValues("", "", "allowed")); n != 1 {
		t.Errorf("weir_decisions_total allowed = %v, want 1", n)
	}
}

func TestARefusalSaysWhatWhyAndWhen(t *testing.T) {
	const export = "  - {name: export, layer: route, key: [route], routes: [export], rate: 1/2s, burst: 1}\n"
	for _, c := range []struct {
		name, policy, path string
		status             int
		typ, rule, layer   string
		fields             map[string]string
		retryMS            int64
		detail             string
	}{
		{"the caller's contract", policy("", plan("1/90s", 1), ""), "/a", 429, quotaExceeded, "contract", "contract",
			map[string]string{"Retry-After": "90", "RateLimit-Policy": `"contract";q=1;w=90`, "RateLimit": `"contract";r=0;t=90`}, 90_000,
			"Your limit of 40 requests per hour (bursts of up to 1) is used up. Try again in 90 seconds."},
		{"a fragile interface", policy("", "", export), "/report/export/1", 429, quotaExceeded, "export", "route",
			map[string]string{"Retry-After": "2", "RateLimit-Policy": `"export";q=1;w=2`, "RateLimit": `"export";r=0;t=2`}, 2000,
			"The limit on this interface that all callers share of 30 requests per minute (bursts of up to 1) is used up. Try again in 2 seconds."},
		{"the guard", strings.ReplaceAll(policy("", "", ""), "rate: 1000000/s, burst: 1000000", "rate: 5/s, burst: 1"), "/a", 503, reducedCapacity, "guard", "guard",
			map[string]string{"Retry-After": "1", "RateLimit-Policy": `"guard";q=1;w=1`, "RateLimit": `"guard";r=0;t=1`}, 200,
			"The limit that protects this service as a whole of 5 requests per second (bursts of up to 1) is used up. Try again in 1 second."},
		{"deny all", policy("", plan("0", 1), ""), "/a", 429, quotaExceeded, "contract", "contract",
			map[string]string{"Retry-After": "86400", "RateLimit-Policy": `"contract";q=0`, "RateLimit": `"contract";r=0;t=86400`}, 86_400_000,
			"Your limit does not admit this request, now or later. Waiting does not help; ask the operator of this service for a limit."},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "deny all" {
				c.policy = strings.Replace(c.policy, "{rate: 0, burst: 1}", "{rate: 0}", 1)
			}
			r := newRig(t, c.policy)
			var up upstream
			h := r.Wrap(&up)
			before := int64(0)
			if c.name != "deny all" {
				if w := do(h, "GET", c.path, header("X-App-Key", "acme")); w.Code != 200 {
					t.Fatalf("the first request: %d, want 200", w.Code)
				}
				before = 1
			}
			w := do(h, "GET", c.path+"?secret=1", header("X-App-Key", "acme"), remote("198.51.100.77:1234"))
			if w.Code != c.status || up.served != int(before) {
				t.Fatalf("status %d, served %d, want %d and %d", w.Code, up.served, c.status, before)
			}
			for name, want := range c.fields {
				if got := w.Header().Get(name); got != want {
					t.Errorf("%s: %s, want %s", name, got, want)
				}
			}
			for name, want := range map[string]string{"Content-Type": "application/problem+json", "Cache-Control": "no-store"} {
				if got := w.Header().Get(name); got != want {
					t.Errorf("%s: %s, want %s", name, got, want)
				}
			}
			p := problemOf(t, w.Body.String())
			if p.Type != c.typ || p.Status != c.status || p.Detail != c.detail || p.RetryAfterMS != c.retryMS || len(p.Violated) != 1 || p.Violated[0] != c.rule {
				t.Errorf("problem %+v, want type %s, status %d, rule %s, %d ms and %q", p, c.typ, c.status, c.rule, c.retryMS, c.detail)
			}
			if !regexp.MustCompile(`^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(p.Instance) {
				t.Errorf("instance %q is no UUID", p.Instance)
			}
			route := "other"
			if c.rule == "export" {
				route = "export"
			}
			if n := r.rec.count("acme/" + route + "/" + c.rule + "/" + c.layer); n != 1 || r.rec.requests != int(before)+1 {
				t.Errorf("counted %v, want one refusal by %s", r.rec.counts, c.rule)
			}
			want := schemas.Rejection{Time: noon, Tenant: "acme", Route: route, Rule: c.rule, Layer: c.layer, Method: "GET", Path: c.path,
				Client: "198.51.100.0/24", RetryAfterMS: c.retryMS, Instance: p.Instance}
			if len(r.rec.samples) != 1 || r.rec.samples[0] != want {
				t.Errorf("sample %+v, want %+v", r.rec.samples, want)
			}
			if n := testutil.ToFloat64(r.metrics.Decisions.WithLabelValues(c.layer, c.rule, "refused")); n != 1 {
				t.Errorf("weir_decisions_total refused = %v, want 1", n)
			}
		})
	}
}

func TestHeadIsAnsweredWithoutABody(t *testing.T) {
	r := newRig(t, policy("", plan("1/s", 1), ""))
	srv := httptest.NewServer(r.Wrap(&upstream{}))
	defer srv.Close()
	for i, want := range []int{200, 429} {
		resp, err := http.Head(srv.URL)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if cerr := resp.Body.Close(); err != nil || cerr != nil {
			t.Fatal(err, cerr)
		}
		if resp.StatusCode != want || len(body) != 0 {
			t.Errorf("HEAD %d: %d with %d bytes, want %d with none", i, resp.StatusCode, len(body), want)
		}
	}
	if w := do(r.Wrap(&upstream{}), "HEAD", "/"); w.Code != 429 || w.Body.Len() != 0 || w.Header().Get("Content-Length") == "" {
		t.Errorf("HEAD: %d, %d bytes, Content-Length %q, want 429, none and the length that GET has", w.Code, w.Body.Len(), w.Header().Get("Content-Length"))
	}
}

func TestB026RetryAfterIsAlwaysLongEnough(t *testing.T) {
	whole := regexp.MustCompile(`^[1-9][0-9]*$`)
	for _, c := range []struct {
		rate  string
		after time.Duration
		want  string
	}{{"5/s", 0, "1"}, {"1/90s", 0, "90"}, {"1/s", time.Millisecond, "1"}} {
		r := newRig(t, policy("", plan(c.rate, 1), ""))
		h := r.Wrap(&upstream{})
		do(h, "GET", "/")
		r.wait(c.after)
		w := do(h, "GET", "/")
		if got := w.Header().Get("Retry-After"); got != c.want || !whole.MatchString(got) || w.Code != 429 {
			t.Errorf("%s, again after %s: %d with Retry-After %q, want 429 with %s", c.rate, c.after, w.Code, got, c.want)
		}
	}

	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	refused, obeyed := 0, 0
	for refused < 1000 {
		rate := fmt.Sprintf("%d/%ds", 1+rng.IntN(50), 1+rng.IntN(90))
		burst := 1 + rng.IntN(20)
		r := newRig(t, policy("", plan(rate, burst), ""))
		h := r.Wrap(&upstream{})
		for range 20 {
			r.wait(time.Duration(rng.Int64N(int64(3 * time.Second))))
			w := do(h, "GET", "/")
			if w.Code == 200 {
				continue
			}
			refused++
			after := w.Header().Get("Retry-After")
			s, err := strconv.ParseInt(after, 10, 64)
			if err != nil || !whole.MatchString(after) {
				t.Fatalf("Retry-After %q is not a whole number of at least 1 (seed %d)", after, seed)
			}
			if ms := problemOf(t, w.Body.String()).RetryAfterMS; ms > 1000*s || ms <= 1000*(s-1) && s > 1 {
				t.Errorf("retry_after_ms %d beside Retry-After %d (seed %d)", ms, s, seed)
			}
			if want := fmt.Sprintf(`;t=%d`, s); !strings.HasSuffix(w.Header().Get("RateLimit"), want) {
				t.Errorf("RateLimit %q beside Retry-After %d (seed %d)", w.Header().Get("RateLimit"), s, seed)
			}
			r.wait(time.Duration(s) * time.Second)
			if do(h, "GET", "/").Code == 200 {
				obeyed++
			}
		}
	}
	if obeyed != refused {
		t.Errorf("%d of %d callers who waited as told were admitted, want all (seed %d)", obeyed, refused, seed)
	}
}

func TestB022ForwardedFor(t *testing.T) {
	const proxy, direct = "10.0.0.1:5000", "203.0.113.9:5000"
	ip := "trusted_proxies: [10.0.0.1], tenant: {client_ip: true}"
	for _, c := range []struct {
		name string
		send func(i int) []edit
		key  string
	}{
		{"a: the right-most entry counts", func(i int) []edit {
			return []edit{remote(proxy), header("X-Forwarded-For", fmt.Sprintf("1.2.3.%d, 198.51.100.7", i))}
		}, "198.51.100.7"},
		{"b: a direct caller is not believed", func(i int) []edit {
			return []edit{remote(direct), header("X-Forwarded-For", fmt.Sprintf("1.2.3.%d, 198.51.100.%d", i, i))}
		}, "203.0.113.9"},
		{"c: garbage on the right is not skipped", func(i int) []edit {
			return []edit{remote(proxy), header("X-Forwarded-For", fmt.Sprintf("1.2.3.%d, garbage", i))}
		}, "10.0.0.1"},
		{"d: several lines are one list", func(i int) []edit {
			return []edit{remote(proxy), header("X-Forwarded-For", fmt.Sprintf("1.2.3.%d", i)), header("X-Forwarded-For", "198.51.100.7")}
		}, "198.51.100.7"},
		{"e: a port is no part of an address", func(i int) []edit {
			return []edit{remote(proxy), header("X-Forwarded-For", fmt.Sprintf("198.51.100.7:%d", 4000+i))}
		}, "198.51.100.7"},
		{"IPv6 counts by prefix", func(i int) []edit {
			return []edit{remote(proxy), header("X-Forwarded-For", fmt.Sprintf("[2001:db8:0:7::%x]:443", i))}
		}, "2001:db8:0:7::"},
		{"IPv4 in IPv6 is IPv4", func(i int) []edit { return []edit{remote("[::ffff:203.0.113.9]:99")} }, "203.0.113.9"},
		{"a trusted proxy in the list is skipped", func(i int) []edit {
			return []edit{remote(proxy), header("X-Forwarded-For", fmt.Sprintf("1.2.3.%d, 198.51.100.7, 10.0.0.1", i))}
		}, "198.51.100.7"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, policy(ip, plan("100/m", 100), ""))
			h := r.Wrap(&upstream{})
			allowed := 0
			for i := range 200 {
				if do(h, "GET", "/", c.send(i)...).Code == 200 {
					allowed++
				}
			}
			if allowed != 100 {
				t.Errorf("%d of 200 allowed, want 100", allowed)
			}
			if ok, no := r.rec.count(c.key+"/other//"), r.rec.count(c.key+"/other/contract/contract"); ok != 100 || no != 100 {
				t.Errorf("counted %v, want 100 allowed and 100 refused of %s", r.rec.counts, c.key)
			}
		})
	}
}

func TestTheCheckAPIAnswersAlike(t *testing.T) {
	identity := "trusted_proxies: [127.0.0.1], tenant: {client_ip: true}"
	rules := "  - {name: export, layer: route, key: [route], routes: [export], rate: 1/s, burst: 2}"
	ask := func(h http.Handler, method, uri string, edits ...edit) *httptest.ResponseRecorder {
		return do(h, "GET", "/v1/check", append([]edit{remote("127.0.0.1:7"), header("X-Original-Method", method), header("X-Original-URI", uri),
			header("X-Forwarded-For", "1.1.1.1, 198.51.100.7")}, edits...)...)
	}
	direct, check := newRig(t, policy(identity, plan("1/s", 5), rules)), newRig(t, policy(identity, plan("1/s", 5), rules))
	hd, hc := direct.Wrap(&upstream{}), check.CheckHandler()
	for i, c := range []struct{ method, uri string }{{"GET", "/report/export/1?a=b"}, {"GET", "/report/export/2"}, {"GET", "/report/export/3"},
		{"POST", "/report/export/4"}, {"GET", "/"}, {"GET", "/"}, {"GET", "/"}, {"GET", "/"}, {"HEAD", "/"}} {
		d := do(hd, c.method, c.uri, remote("198.51.100.7:99"))
		k := ask(hc, c.method, c.uri)
		if d.Code != k.Code {
			t.Errorf("request %d: %d as proxy and %d as check", i, d.Code, k.Code)
		}
		for _, name := range []string{"RateLimit", "RateLimit-Policy", "Retry-After"} {
			if d.Header().Get(name) != k.Header().Get(name) || name != "Retry-After" && k.Header().Get(name) == "" {
				t.Errorf("request %d: %s %q as proxy and %q as check", i, name, d.Header().Get(name), k.Header().Get(name))
			}
		}
		if k.Code == 200 && k.Body.Len() > 0 {
			t.Errorf("request %d: an admitting check has a body", i)
		}
	}
	if fmt.Sprint(direct.rec.counts) != fmt.Sprint(check.rec.counts) || len(direct.rec.counts) < 3 {
		t.Errorf("counted %v as proxy and %v as check", direct.rec.counts, check.rec.counts)
	}

	t.Run("any method, other names, another status", func(t *testing.T) {
		r := newRig(t, policy("", plan("1/s", 1), ""))
		h := r.CheckHandler()
		forwarded := []edit{header("X-Forwarded-Method", "POST"), header("X-Forwarded-Uri", "/v1/x?y"), header("X-App-Key", "acme")}
		if w := do(h, "POST", "/v1/check", forwarded...); w.Code != 200 || r.rec.count("acme/v1//") != 1 {
			t.Errorf("X-Forwarded-Uri: %d, counted %v", w.Code, r.rec.counts)
		}
		w := do(h, "GET", "/v1/check?weir-deny=403", forwarded...)
		p := problemOf(t, w.Body.String())
		if w.Code != 403 || w.Header().Get("X-Weir-Status") != "429" || p.Status != 429 || w.Header().Get("Retry-After") != "1" {
			t.Errorf("weir-deny: %d with %v and %+v, want 403, the status 429 in a header and in the body", w.Code, w.Header(), p)
		}
		if w.Header().Get("X-Weir-Problem") != w.Body.String() {
			t.Errorf("X-Weir-Problem %q, want the body %q", w.Header().Get("X-Weir-Problem"), w.Body)
		}
		if w := do(h, "GET", "/v1/check?weir-deny=200", forwarded...); w.Code != 400 {
			t.Errorf("weir-deny=200: %d, want 400", w.Code)
		}
	})

	t.Run("a caller cannot choose its route", func(t *testing.T) {
		// The proxy sets one name; the other one came from the caller.
		r := newRig(t, policy("", "", ""))
		for _, edits := range [][]edit{
			{header("X-Original-URI", "/cheap"), header("X-Forwarded-Uri", "/report/export/1")},
			{header("X-Original-URI", "/cheap"), header("X-Original-URI", "/report/export/1")},
			{header("X-Original-Method", "GET"), header("X-Forwarded-Method", "POST")},
		} {
			if w := do(r.CheckHandler(), "GET", "/v1/check", edits...); w.Code != 400 {
				t.Errorf("contradicting headers: %d, want 400", w.Code)
			}
		}
		if r.rec.requests != 0 {
			t.Errorf("counted %v, want nothing", r.rec.counts)
		}
	})
}

func TestTenants(t *testing.T) {
	for _, c := range []struct {
		identity, target string
		edits            []edit
		tenant           string // "" means 400
	}{
		{"", "/", nil, "anonymous"},
		{"", "/", []edit{header("X-App-Key", "")}, "anonymous"},
		{"", "/", []edit{header("x-app-key", "  acme\t")}, "acme"},
		{"", "/", []edit{header("X-App-Key", "acme"), header("X-App-Key", " acme")}, "acme"},
		{"", "/", []edit{header("X-App-Key", "acme"), header("X-App-Key", "other")}, ""},
		{"tenant: {query: appkey}", "/?x=1&appkey=acme&y", nil, "acme"},
		{"tenant: {query: appkey}", "/?app%6bey=%61cme", nil, "acme"},
		{"tenant: {query: appkey}", "/?appkey=a%20b", nil, "a b"},
		{"tenant: {query: appkey}", "/?appkey=a+b", nil, "a b"},
		{"tenant: {query: appkey}", "/?APPKEY=acme", nil, "anonymous"},
		{"tenant: {query: appkey}", "/?appkey=acme&appkey=other", nil, ""},
		{"tenant: {query: appkey}", "/?appkey=acme&appkey=acme", nil, "acme"},
		{"tenant: {query: appkey}", "/?appkey=%zz", nil, ""},
		{"tenant: {query: appkey}", "/?appkey=%00", nil, ""},
		{"tenant: {query: appkey}", "/?appkey=%ff%fe", nil, ""},
		{"tenant: {basic: user}", "/", nil, "anonymous"},
		{"tenant: {basic: user}", "/", []edit{basic("acme")}, "acme"},
		{"tenant: {basic: user}", "/", []edit{header("Authorization", "bAsIc   YWNtZTpwdw==")}, "acme"},
		{"tenant: {basic: user}", "/", []edit{header("Authorization", "Basic !!!")}, ""},
		{"tenant: {basic: user}", "/", []edit{header("Authorization", "Basic YWNtZQ==")}, ""}, // no colon
		{"tenant: {basic: user}", "/", []edit{header("Authorization", "Bearer x")}, "anonymous"},
		{"tenant: {basic: user}", "/", []edit{basic("acme"), basic("acme")}, "acme"}, // Set, not Add
		{"tenant: {basic: user}", "/", []edit{basic("acme"), header("Authorization", "Basic b3RoZXI6cHc=")}, ""},
		{"tenant: {client_ip: true}", "/", []edit{remote("198.51.100.7:1")}, "198.51.100.7"},
		{"tenant: {client_ip: true}", "/", []edit{remote("@")}, "anonymous"}, // a Unix socket
		{"tenant: {header: Authorization}", "/", []edit{header("Authorization", "Bearer k")}, "k"},
	} {
		r := newRig(t, policy(c.identity, "", ""))
		var up upstream
		w := do(r.Wrap(&up), "GET", c.target, c.edits...)
		want := 200
		if c.tenant == "" {
			want = 400
			if p := problemOf(t, w.Body.String()); p.Status != 400 || p.Type != "about:blank" {
				t.Errorf("%s %s: problem %+v, want a plain 400", c.identity, c.target, p)
			}
		}
		if w.Code != want || up.served != want%400/200 || c.tenant != "" && r.rec.count(c.tenant+"/other//") != 1 {
			t.Errorf("%s %s: %d and counted %v, want %d and %q", c.identity, c.target, w.Code, r.rec.counts, want, c.tenant)
		}
		if want == 400 && r.rec.requests != 0 {
			t.Errorf("%s %s: counted %v though it is nobody's", c.identity, c.target, r.rec.counts)
		}
	}
}

func TestB020KeysOfAllKinds(t *testing.T) {
	r := newRig(t, policy("tenant: {query: k}", "", ""))
	long := strings.Repeat("k", 5000)
	keys := map[string]bool{"a b": true, "a\tb": false, "a\r\nPUB x 0\r\n": false, "a.b": true, "*": true, ">": true, "$JS.API.>": true, "..": true,
		"": true, "ключ": true, "a\x00b": false, long: false}
	for key, ok := range keys {
		w := do(r.Wrap(&upstream{}), "GET", "/?k="+url.QueryEscape(key))
		name := key
		if key == "" {
			name = Anonymous
		}
		if ok {
			if w.Code != 200 || r.rec.count(name+"/other//") != 1 {
				t.Errorf("key %.20q: %d and counted %v, want 200 and the key byte for byte", key, w.Code, r.rec.counts)
			}
			continue
		}
		p := problemOf(t, w.Body.String())
		if w.Code != 400 || !strings.Contains(p.Detail, "query parameter k ") {
			t.Errorf("key %.20q: %d with %q, want 400 that names the parameter", key, w.Code, p.Detail)
		}
		if strings.Contains(w.Body.String(), "PUB") || strings.Contains(w.Body.String(), "kkkk") {
			t.Errorf("key %.20q: the answer %q repeats it", key, w.Body)
		}
	}
}

func TestB021JoinedKeysDoNotCollide(t *testing.T) {
	for _, sep := range []string{":", "|", "/", ".", "%3A", `\`} {
		r := newRig(t, policy("", "", "  - {name: keyed, layer: contract, key: [tenant, header:X-Key], rate: 1/h, burst: 5}"))
		h := r.Wrap(&upstream{})
		for _, pair := range [][2]string{{"a" + sep + "b", "c"}, {"a", "b" + sep + "c"}} {
			allowed := 0
			for range 10 {
				if do(h, "GET", "/", header("X-App-Key", pair[0]), header("X-Key", pair[1])).Code == 200 {
					allowed++
				}
			}
			if allowed != 5 {
				t.Errorf("tenant %q with key %q: %d allowed, want 5", pair[0], pair[1], allowed)
			}
		}
	}
}

func TestB024BadBytesReachNoMetric(t *testing.T) {
	r := newRig(t, policy("", plan("1/s", 2), "  - {name: per-agent, layer: contract, key: [header:User-Agent], rate: 100/s, burst: 100}\n"+
		"  - {name: per-device, layer: contract, key: [device, user], rate: 100/s, burst: 100, mode: shadow}"))
	srv := httptest.NewServer(r.Wrap(&upstream{}))
	defer srv.Close()
	send := func(key, path, agent, device, method string) int {
		req := &http.Request{Method: method, URL: &url.URL{Scheme: "http", Host: srv.Listener.Addr().String(), Opaque: path}, Header: http.Header{
			"X-App-Key": {key}, "User-Agent": {agent}, "X-Device-Id": {device}}}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	for _, c := range []struct {
		key, path, agent, device string
		want                     int
	}{
		{"\xff\xfe", "/", "ok", "ok", 400},
		{"acme", "/", "\xe5\xe5\xe5", "ok", 400},
		{"acme", "/", "ok", "\xc0", 400},
		{"acme", "/%ff.js", "ok", "ok", 200},
		{"acme", "/%ff.js", "ok", "ok", 200},
		{"acme", "/\xff%ff" + strings.Repeat("\xe2\x82\xac", 200), "ok", "ok", 429},
	} {
		if got := send(c.key, c.path, c.agent, c.device, "GET"); got != c.want {
			t.Errorf("%+q %+q: %d, want %d", c.key, c.path, got, c.want)
		}
	}
	for _, j := range r.rec.samples {
		report := &schemas.Report{Boot: "b", Seq: 1, Rejections: []schemas.Rejection{j}}
		if err := report.Validate(noon); err != nil {
			t.Errorf("a sample would spoil its report: %v", err)
		}
	}
	if len(r.rec.samples) != 1 {
		t.Errorf("%d samples, want 1", len(r.rec.samples))
	}
	w := do(promhttp.HandlerFor(r.registry, promhttp.HandlerOpts{}), "GET", "/metrics")
	if w.Code != 200 {
		t.Errorf("/metrics: %d", w.Code)
	}
	for _, line := range strings.Split(w.Body.String(), "\n") {
		if strings.Contains(line, "acme") || !utf8.ValidString(line) {
			t.Errorf("a caller's word in a metric: %s", line)
		}
	}
	if n := testutil.ToFloat64(r.metrics.Decisions.WithLabelValues("", "", "invalid")); n != 3 {
		t.Errorf("%v invalid requests counted, want 3", n)
	}
}

func TestB062SpellingsOfOneCredentialAndPath(t *testing.T) {
	r := newRig(t, policy("tenant: {header: Authorization}", plan("1/h", 3), ""))
	h := r.Wrap(&upstream{})
	codes := map[int]int{}
	paths := []string{"/v1/x", "/v1//x", "/v1/./x", "/v1/%78"}
	for i, auth := range []string{"Bearer k", "bearer k", "Bearer  k", "x1 Bearer k", "BEARER k ", "Bearer k", "bearer\tk", "Bearer k, Bearer j"} {
		w := do(h, "GET", paths[i%len(paths)], header("Authorization", auth))
		codes[w.Code]++
		if want := strings.HasPrefix(strings.ToLower(auth), "bearer ") && !strings.Contains(auth, ","); want != (w.Code != 400) {
			t.Errorf("%q: %d", auth, w.Code)
		}
	}
	if codes[200] != 3 || codes[429] != 2 || codes[400] != 3 {
		t.Errorf("answers %v, want 3 allowed of the 5 that spell one credential, and 400 for the others", codes)
	}
	if r.rec.count("k/v1//") != 3 || r.rec.count("k/v1/contract/contract") != 2 {
		t.Errorf("counted %v, want all of k on route v1", r.rec.counts)
	}
	// /V1/x is another path, of the same credential.
	if w := do(h, "GET", "/V1/x", header("Authorization", "Bearer k")); w.Code != 429 || r.rec.count("k/other/contract/contract") != 1 {
		t.Errorf("/V1/x: %d, counted %v", w.Code, r.rec.counts)
	}
}

func TestB055EveryRequestCostsOne(t *testing.T) {
	r := newRig(t, policy("", plan("1/h", 10), ""))
	h := r.Wrap(&upstream{})
	// No caller sets its own price.
	for i, cost := range []string{"0", "-5", "100", "x"} {
		w := do(h, "GET", "/", header("X-Weir-Cost", cost))
		if got, want := w.Header().Get("RateLimit"), fmt.Sprintf(`"contract";r=%d`, 9-i); got != want {
			t.Errorf("X-Weir-Cost %s: %s, want %s", cost, got, want)
		}
	}
	// Asking takes nothing: burst 10, of which 4 are gone.
	for range 100 {
		d := r.enforcer.Check(int64(time.Hour), &enforcer.Request{Tenant: Anonymous, Route: "other", Cost: 0})
		if !d.Allowed || d.Remaining != 6 {
			t.Fatalf("a question of cost 0: %+v, want 6 remaining", d)
		}
	}
}

func TestB079AShadowRuleCountsWhatItWouldRefuse(t *testing.T) {
	// Two gateways, burst 1 each while no centre divides the limit: 3 + 3.
	shadow := policy("", "", "  - {name: per-ip, layer: contract, key: [ip], rate: 1/h, burst: 1, mode: shadow}")
	var would float64
	var taken, refused uint64
	for range 2 {
		r := newRig(t, shadow)
		h := r.Wrap(&upstream{})
		for i := range 4 {
			w := do(h, "GET", "/", remote("198.51.100.7:1"))
			if w.Code != 200 {
				t.Errorf("request %d: %d, want 200: a shadow refuses nobody", i, w.Code)
			}
		}
		would += testutil.ToFloat64(r.metrics.Decisions.WithLabelValues("contract", "per-ip", "shadow"))
		if n := testutil.ToFloat64(r.metrics.Decisions.WithLabelValues("", "", "allowed")); n != 4 {
			t.Errorf("%v allowed, want 4", n)
		}
		r.enforcer.Collect(int64(time.Hour), true, func(b enforcer.Bucket) {
			if b.Rule == "per-ip" {
				taken, refused = taken+b.Taken, refused+b.Refused
			}
		})
	}
	if would != 6 || refused != 6 || taken != 2 {
		t.Errorf("would have refused %v by the metric and %d by the report (taken %d), want 6, 6 and 2", would, refused, taken)
	}
}

func TestADegradedGatewaySaysSo(t *testing.T) {
	mode := enforcer.Synced
	r := newRig(t, policy("", plan("80/s", 160), ""))
	r.cfg.Mode = func() string { return mode }
	for m, want := range map[string]string{enforcer.Synced: `"contract";q=160;w=2`, enforcer.Local: `"contract";q=160;w=2`,
		enforcer.Stale: `"contract";q=160;w=2;weir-mode="stale"`, enforcer.Isolated: `"contract";q=160;w=2;weir-mode="isolated"`} {
		mode = m
		if got := do(r.Wrap(&upstream{}), "GET", "/").Header().Get("RateLimit-Policy"); got != want {
			t.Errorf("mode %s: RateLimit-Policy %s, want %s", m, got, want)
		}
	}
}

// TestAnOutageIsNotTheCallersFault: a rule that denies while the store is lost says so, and one that allows leaves the guard alone to
// tell of.
func TestAnOutageIsNotTheCallersFault(t *testing.T) {
	lost := func(loss string) (r *rig, h http.Handler) {
		r = newRig(t, policy("", "", "  - {name: per-ip, layer: contract, key: [ip], rate: 1/s, burst: 5, on_store_loss: "+loss+"}"))
		r.cfg.Mode = r.enforcer.Mode
		h = r.Wrap(&upstream{})
		r.enforcer.Apply(schemas.ThrottleUpdate{Gateways: 1, TTL: 3 * time.Second})
		for range 2 {
			if w := do(h, "GET", "/", header("X-App-Key", "acme")); w.Code != 200 {
				t.Fatalf("%s, with the store: %d, want 200", loss, w.Code)
			}
			r.wait(2 * time.Second)
			r.enforcer.Apply(schemas.ThrottleUpdate{Gateways: 1, TTL: 3 * time.Second, Frozen: true})
		}
		return r, h
	}
	r, h := lost("deny")
	w := do(h, "GET", "/", header("X-App-Key", "acme"))
	p := problemOf(t, w.Body.String())
	want := problem{Type: reducedCapacity, Title: "Temporarily reduced capacity", Status: 503, RetryAfterMS: 1000, Instance: p.Instance,
		Detail: "The limit of your address cannot be counted: the gateways of this service have lost the store that they share it by, and admit nothing under it meanwhile. " +
			"It is not used up. Try again in 1 second."}
	if w.Code != 503 || w.Header().Get("Retry-After") != "1" || fmt.Sprint(p) != fmt.Sprint(want) {
		t.Errorf("deny: %d %v\n%+v\nwant 503, Retry-After 1 and\n%+v", w.Code, w.Header(), p, want)
	}
	if got, want := w.Header().Get("RateLimit-Policy"), `"per-ip";q=5;w=5;weir-mode="stale"`; got != want {
		t.Errorf("deny: RateLimit-Policy %s, want %s", got, want)
	}
	if n := r.rec.count("acme/other/per-ip/contract"); n != 1 {
		t.Errorf("deny: %d counted as refused by the rule, want 1", n)
	}
	_, h = lost("allow")
	for range 10 { // more than the burst
		w = do(h, "GET", "/", header("X-App-Key", "acme"))
		if got, want := w.Header().Get("RateLimit-Policy"), `"contract";q=160;w=2;weir-mode="stale"`; w.Code != 200 || got != want {
			t.Errorf("allow: %d, RateLimit-Policy %s, want 200, %s: what was not asked is not told of", w.Code, got, want)
		}
	}
}

// TestStrictRulesThatFallBackAreCounted, and told of once, then summarised.
func TestStrictRulesThatFallBackAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		m := NewMetrics(prometheus.NewRegistry())
		e := enforcer.New(enforcer.Config{Ask: true})
		e.SetPolicy(parse(t, policy("", "", "  - {name: exact, layer: contract, key: [ip], rate: 1000/s, burst: 1000, consistency: strict}")))
		e.Apply(schemas.ThrottleUpdate{Gateways: 1, TTL: time.Hour})
		var missing error
		g := New(Config{Settle: func(ctx context.Context, now int64, q *enforcer.Request, d enforcer.Decision) enforcer.Decision {
			return e.Settle(ctx, now, q, d, func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) {
				return schemas.TakeReply{Allowed: true}, missing
			})
		}}, e, e.Policy, &record{}, m, slog.New(slog.NewTextHandler(&out, nil)))
		h := g.Wrap(&upstream{})
		step := func(what string, requests int, counted float64, lines int, has string) {
			t.Helper()
			for range requests {
				if w := do(h, "GET", "/"); w.Code != 200 {
					t.Errorf("%s: %d, want 200", what, w.Code)
				}
			}
			if n := testutil.ToFloat64(m.Fallback); n != counted {
				t.Errorf("%s: weir_strict_fallback_total %v, want %v", what, n, counted)
			}
			g.fallbacks.mu.Lock()
			defer g.fallbacks.mu.Unlock()
			if s := out.String(); strings.Count(s, "\n") != lines || !strings.Contains(s, has) {
				t.Errorf("%s: told %q, want %d lines with %q", what, s, lines, has)
			}
			out.Reset()
		}
		step("answered", 3, 0, 0, "")
		missing = context.DeadlineExceeded
		step("not answered", 3, 3, 1, "level=WARN")
		time.Sleep(time.Minute + 1)
		synctest.Wait()
		step("a minute later", 0, 3, 1, "requests=2")
		time.Sleep(time.Minute)
		synctest.Wait()
		step("two minutes later", 1, 4, 1, "level=WARN")
		time.Sleep(2 * time.Minute)
		synctest.Wait()
	})
}

func TestAShareOfNothingIsNoLimitOfNothing(t *testing.T) {
	r := newRig(t, policy("", plan("80/s", 160), ""))
	r.enforcer.Apply(schemas.ThrottleUpdate{Gateways: 2, TTL: time.Minute, Shares: []schemas.Share{{Rule: "contract", Key: "acme", Version: 1,
		RateNanos: 0, Burst: 0, LimitRateNanos: 80e9, LimitBurst: 160}}})
	w := do(r.Wrap(&upstream{}), "GET", "/", header("X-App-Key", "acme"))
	if w.Code != 429 || w.Header().Get("Retry-After") != "1" || w.Header().Get("RateLimit-Policy") != `"contract";q=160;w=2` {
		t.Errorf("%d, %v: want 429, Retry-After 1 and the whole limit", w.Code, w.Header())
	}
}

func TestWithoutAPolicyNothingPasses(t *testing.T) {
	e := enforcer.New(enforcer.Config{})
	g := New(Config{}, e, e.Policy, &record{}, nil, slog.New(slog.DiscardHandler))
	var up upstream
	w := do(g.Wrap(&up), "GET", "/")
	if w.Code != 503 || up.served != 0 || w.Header().Get("Retry-After") != "1" || problemOf(t, w.Body.String()).Status != 503 {
		t.Errorf("%d %v %s, want 503 as a problem", w.Code, w.Header(), w.Body)
	}
}

func TestAReloadedPolicyIsFollowedAtOnce(t *testing.T) {
	r := newRig(t, policy("", "", ""))
	h := r.Wrap(&upstream{})
	do(h, "GET", "/", header("X-User", "ann"))
	r.enforcer.SetPolicy(parse(t, policy("tenant: {header: X-Key}", "", "  - {name: per-user, layer: contract, key: [user], rate: 1/h, burst: 1}")))
	for _, c := range []struct {
		user string
		want int
	}{{"ann", 200}, {"ann", 429}, {"bob", 200}, {" bob", 429}, {"\x01", 400}} {
		if w := do(h, "GET", "/", header("X-Key", "k"), header("X-User", c.user)); w.Code != c.want {
			t.Errorf("user %q: %d, want %d", c.user, w.Code, c.want)
		}
	}
	if n := testutil.ToFloat64(r.metrics.Decisions.WithLabelValues("contract", "per-user", "refused")); n != 2 {
		t.Errorf("%v refused by the new rule, want 2", n)
	}
	if r.rec.count("k/other//") != 2 {
		t.Errorf("counted %v, want tenant k by the new header", r.rec.counts)
	}
}

func TestWords(t *testing.T) {
	rate := func(n, d uint64, per time.Duration) bucket.Rate {
		r, err := bucket.NewRate(n, d, per)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for want, r := range map[string]bucket.Rate{
		"1 request per second":            rate(1, 1, time.Second),
		"13000 requests per second":       rate(13000, 1, time.Second),
		"12 requests per minute":          rate(1, 1, 5*time.Second),
		"40 requests per hour":            rate(2, 1, 180*time.Second),
		"1 request every 7 minutes":       rate(1, 7, time.Minute),
		"1 request per day":               rate(1, 1, 24*time.Hour),
		"1 request every 30 days":         rate(1, 1, 30*24*time.Hour),
		"about 1.714 requests per second": rate(12, 7, time.Second),
		"1 request every 400 hours":       rate(60, 1000, 24*time.Hour),
		"about 0.7 requests per day":      rate(7, 10, 24*time.Hour),
		"0 requests":                      {},
	} {
		if got := rateWords(r); got != want {
			t.Errorf("rateWords(%+v) = %q, want %q", r, got, want)
		}
	}
	for s, want := range map[int64]string{1: "1 second", 119: "119 seconds", 120: "2 minutes", 121: "3 minutes", 7200: "2 hours", 86400: "24 hours", 200000: "3 days"} {
		if got := waitWords(s); got != want {
			t.Errorf("waitWords(%d) = %q, want %q", s, got, want)
		}
	}
}

func parse(t testing.TB, text string) *limits.Policy {
	t.Helper()
	p, err := limits.Parse("policy.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

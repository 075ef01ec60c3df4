package httpguard

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// benchPolicy is a funnel as an operator would have it, with limits that nothing reaches.
const benchPolicy = `
version: 1
identity: {tenant: {header: X-App-Key}, trusted_proxies: [127.0.0.1]}
routes:
  - {name: export, match: {methods: [GET], path: /report/export/**}}
  - {name: orders, match: {path: /orders/**}}
plans:
  standard: {rate: 1000000/s, burst: 100000000}
default_plan: standard
rules:
  - {name: guard,    layer: guard,    key: [],       rate: 100000000/s, burst: 1000000000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
  - {name: export,   layer: route,    key: [route],  routes: [export], rate: 5/s, burst: 10}
%s`

// tally is the cheapest recorder there is.
type tally struct{ n atomic.Int64 }

func (c *tally) Count(time.Time, string, string, string, string, int64) { c.n.Add(1) }
func (c *tally) Reject(schemas.Rejection)                               {}

func benchGuard(b *testing.B, rules string) (*Guard, *tally) {
	b.Helper()
	p, err := limits.Parse("policy.yaml", fmt.Appendf(nil, benchPolicy, rules))
	if err != nil {
		b.Fatal(err)
	}
	e := enforcer.New(enforcer.Config{})
	e.SetPolicy(p)
	rec := &tally{}
	return New(Config{Mode: e.Mode}, e, e.Policy, rec, nil, quiet), rec
}

// blank is an answer that nobody reads.
type blank struct {
	h      http.Header
	status int
}

func (b *blank) Header() http.Header         { return b.h }
func (b *blank) Write(p []byte) (int, error) { return len(p), nil }
func (b *blank) WriteHeader(status int)      { b.status = status }

// benchRequests are of 10,000 tenants.
func benchRequests(target string) []*http.Request {
	requests := make([]*http.Request, 10_000)
	for i := range requests {
		r := httptest.NewRequest("GET", target, nil)
		r.RemoteAddr = "198.51.100.7:4711"
		r.Header.Set("X-App-Key", fmt.Sprintf("tenant-%d", i))
		requests[i] = r
	}
	return requests
}

// BenchmarkGuard is what a guard adds to a request.
func BenchmarkGuard(b *testing.B) {
	for _, c := range []struct{ name, rules, target string }{
		{"contract", "", "/orders/17?x=1"},
		{"contract+ip", "  - {name: per-ip, layer: contract, key: [ip], rate: 10000000/s, burst: 1000000000, mode: shadow}", "/orders/17?x=1"},
		{"refused", "", "/report/export/1"},
	} {
		b.Run(c.name, func(b *testing.B) {
			g, rec := benchGuard(b, c.rules)
			var served atomic.Int64
			h := g.Wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served.Add(1) }))
			requests := benchRequests(c.target)
			w := &blank{h: http.Header{}}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				clear(w.h)
				h.ServeHTTP(w, requests[i%len(requests)])
			}
			if rec.n.Load() != int64(b.N) || c.name != "refused" && served.Load() != int64(b.N) {
				b.Fatalf("%d requests: %d counted, %d served", b.N, rec.n.Load(), served.Load())
			}
		})
	}
}

// BenchmarkHTTP is requests over real connections: to a handler and to a proxy before a real upstream, each with a guard and
// without, and to the check API. cpu-us/req is of client, gateway and upstream together, and the figure to compare on a machine
// that has other things to do.
func BenchmarkHTTP(b *testing.B) {
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok")) })
	up := httptest.NewServer(ok)
	defer up.Close()
	u, err := url.Parse(up.URL)
	if err != nil {
		b.Fatal(err)
	}
	g, rec := benchGuard(b, "")
	proxy := Proxy(u, ProxyConfig{}, g.policy, quiet)
	for _, c := range []struct {
		name    string
		h       http.Handler
		counted bool
	}{
		{"handler/bare", ok, false}, {"handler/guarded", g.Wrap(ok), true},
		{"proxy/bare", proxy, false}, {"proxy/guarded", g.Wrap(proxy), true},
		{"check", g.CheckHandler(), true},
	} {
		b.Run(c.name, func(b *testing.B) {
			gw := serve(b, Server("", c.h, quiet))
			client := &http.Transport{MaxIdleConnsPerHost: 64}
			defer client.CloseIdleConnections()
			before := rec.n.Load()
			var next atomic.Int64
			b.SetParallelism(16)
			b.ReportAllocs()
			cpu := cpuTime(b)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					r := request(b, "GET", gw+"/orders/17", nil)
					r.Header.Set("X-App-Key", fmt.Sprintf("tenant-%d", next.Add(1)%10_000))
					resp, err := client.RoundTrip(r)
					if err != nil {
						b.Error(err)
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body) // or the connection cannot be used again
					_ = resp.Body.Close()
					if resp.StatusCode != 200 {
						b.Errorf("status %d", resp.StatusCode)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "req/s")
			b.ReportMetric(float64((cpuTime(b)-cpu).Microseconds())/float64(b.N), "cpu-us/req")
			if n := rec.n.Load() - before; c.counted && n != int64(b.N) {
				b.Fatalf("%d requests, %d counted", b.N, n)
			}
		})
	}
}

// cpuTime is what this process has used of all cores.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

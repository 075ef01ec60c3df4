package httpguard

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

var quiet = slog.New(slog.DiscardHandler)

// gateway serves a proxy to upstream behind a guard with more than enough tokens, as the binary does.
func gateway(t testing.TB, identity, upstream string, cfg ProxyConfig) (*rig, string) {
	t.Helper()
	r := newRig(t, policy(identity, plan("1000000/s", 1000000), ""))
	u, err := url.Parse(upstream)
	if err != nil {
		t.Fatal(err)
	}
	return r, serve(t, Server("", r.Wrap(Proxy(u, cfg, r.enforcer.Policy, quiet)), quiet))
}

// serve runs srv on a free port until the test ends.
func serve(t testing.TB, srv *http.Server) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	t.Cleanup(func() {
		_ = srv.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return "http://" + ln.Addr().String()
}

// reply is an answer that has been read.
type reply struct {
	status int
	header http.Header
	body   string
}

// send does one request.
func send(t testing.TB, r *http.Request) reply {
	t.Helper()
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, resp)
}

func read(t testing.TB, resp *http.Response) reply {
	t.Helper()
	body, err := io.ReadAll(resp.Body)
	if cerr := resp.Body.Close(); err != nil || cerr != nil {
		t.Fatal(err, cerr)
	}
	return reply{resp.StatusCode, resp.Header, string(body)}
}

// receive reads one answer from a connection.
func receive(t testing.TB, conn io.Reader) reply {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, resp)
}

func request(t testing.TB, method, target string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequest(method, target, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestProxyTellsTheUpstreamWhoAsks(t *testing.T) {
	var got http.Request
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { got = *r }))
	defer up.Close()
	for _, c := range []struct {
		name, identity string
		want           map[string][]string
	}{
		{"a caller is not believed", "", map[string][]string{"X-Forwarded-For": {"127.0.0.1"}, "X-Forwarded-Host": {"api.example.com"},
			"X-Forwarded-Proto": {"http"}, "X-Real-Ip": nil, "Forwarded": nil}},
		{"a trusted proxy is continued", "trusted_proxies: [127.0.0.0/8]", map[string][]string{"X-Forwarded-For": {"1.2.3.4, 5.6.7.8, 127.0.0.1"},
			"X-Forwarded-Host": {"outer.example.com"}, "X-Forwarded-Proto": {"https"}, "X-Real-Ip": {"1.2.3.4"}, "Forwarded": nil}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, gw := gateway(t, c.identity, up.URL+"/base", ProxyConfig{})
			r := request(t, "PUT", gw+"/a%2Fb/./c?x=1&y=%20", strings.NewReader("body"))
			r.Host = "api.example.com"
			for name, v := range map[string]string{"X-Forwarded-For": "1.2.3.4, 5.6.7.8", "X-Forwarded-Host": "outer.example.com", "X-Forwarded-Proto": "https",
				"Forwarded": "for=1.2.3.4", "X-Real-Ip": "1.2.3.4", "Connection": "close, X-Hop", "X-Hop": "1", "Te": "trailers", "X-End": "2"} {
				r.Header.Set(name, v)
			}
			if got := send(t, r); got.status != 200 {
				t.Fatalf("status %d", got.status)
			}
			for name, want := range c.want {
				if v := got.Header[name]; strings.Join(v, "|") != strings.Join(want, "|") {
					t.Errorf("%s: %q, want %q", name, v, want)
				}
			}
			if got.Header.Get("X-Hop") != "" || got.Header.Get("X-End") != "2" {
				t.Errorf("headers %v, want X-Hop gone with its hop and X-End kept", got.Header)
			}
			if got.Method != "PUT" || got.Host != "api.example.com" || got.RequestURI != "/base/a%2Fb/./c?x=1&y=%20" {
				t.Errorf("%s %s %s, want the caller's own method, host and spelling", got.Method, got.Host, got.RequestURI)
			}
		})
	}
}

func TestAnUpstreamThatIsDownIsA502AndTheRequestCounts(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := "http://" + ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	rig, gw := gateway(t, "", dead, ProxyConfig{})
	got := send(t, request(t, "GET", gw, nil))
	if p := problemOf(t, got.body); got.status != 502 || p.Status != 502 || got.header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("%+v, want 502 as a problem", got)
	}
	if strings.Contains(got.body, dead[len("http://"):]) {
		t.Errorf("the answer %q tells where the upstream is", got.body)
	}
	if rig.rec.count("anonymous/other//") != 1 {
		t.Errorf("counted %v, want the request that was admitted", rig.rec.counts)
	}
}

func TestAnUpstreamThatHangsIsA504(t *testing.T) {
	stop := make(chan struct{})
	up := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-stop }))
	defer up.Close()
	defer close(stop)
	_, gw := gateway(t, "", up.URL, ProxyConfig{HeaderTimeout: 50 * time.Millisecond})
	got := send(t, request(t, "GET", gw, nil))
	if p := problemOf(t, got.body); got.status != 504 || p.Status != 504 {
		t.Errorf("%+v, want 504 as a problem", got)
	}
}

func TestUpstreamFailuresAreCountedByReason(t *testing.T) {
	hangUp := serve(t, &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := "http://" + ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	hold := make(chan struct{})
	hang := serve(t, &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hold })})
	defer close(hold)
	for reason, upstream := range map[string]string{"refused": nobody, "reset": hangUp, "timeout": hang, "other": "gopher://127.0.0.1:1"} {
		m := NewMetrics(prometheus.NewRegistry())
		_, at := gateway(t, "", upstream, ProxyConfig{HeaderTimeout: 50 * time.Millisecond, Metrics: m})
		for range 2 {
			if got := send(t, request(t, "POST", at+"/x", nil)); got.status != 502 && got.status != 504 {
				t.Errorf("%s: status %d, want 502 or 504", reason, got.status)
			}
		}
		for _, r := range []string{"refused", "timeout", "reset", "other"} {
			if n, want := testutil.ToFloat64(m.Upstream.WithLabelValues(r)), map[bool]float64{true: 2}[r == reason]; n != want {
				t.Errorf("%s: weir_upstream_errors_total{reason=%q} = %v, want %v", reason, r, n, want)
			}
		}
	}
}

// The first failure is told at once, those that follow once a minute with their number, and nothing when there are none.
func TestUpstreamFailuresAreToldOnceThenSummarised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		f := newFailures("http://u", time.Minute, slog.New(slog.NewTextHandler(&out, nil)), NewMetrics(prometheus.NewRegistry()).Upstream)
		told := func() string {
			f.mu.Lock()
			defer f.mu.Unlock()
			defer out.Reset()
			return out.String()
		}
		for range 1000 {
			f.note(syscall.ECONNREFUSED)
		}
		if s := told(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "level=ERROR") || !strings.Contains(s, "refused") {
			t.Errorf("told %q at first, want one line", s)
		}
		time.Sleep(time.Minute + 1)
		synctest.Wait()
		if s := told(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "requests=999") {
			t.Errorf("told %q after a minute, want 999 requests", s)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if s := told(); s != "" {
			t.Errorf("told %q though nothing failed", s)
		}
		f.note(syscall.ECONNREFUSED)
		if s := told(); strings.Count(s, "\n") != 1 {
			t.Errorf("told %q of the next failure, want one line at once", s)
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
	})
}

func TestAStreamArrivesPieceByPiece(t *testing.T) {
	next := make(chan string)
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		for s := range next {
			_, _ = io.WriteString(w, s)
			w.(http.Flusher).Flush()
		}
	}))
	defer up.Close()
	defer close(next)
	_, gw := gateway(t, "", up.URL, ProxyConfig{})
	resp, err := http.Get(gw)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	for i := range 3 {
		want := fmt.Sprintf("data: %d\n", i)
		next <- want // and nothing more until it has arrived
		if got, err := lines.ReadString('\n'); got != want || err != nil {
			t.Fatalf("piece %d: %q, %v", i, got, err)
		}
	}
}

func TestARequestBodyIsStreamed(t *testing.T) {
	seen := make(chan string, 10)
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			seen <- lines.Text()
		}
	}))
	defer up.Close()
	_, gw := gateway(t, "", up.URL, ProxyConfig{})
	body, feed := io.Pipe()
	answered := make(chan int, 1)
	go func() {
		resp, err := http.Post(gw, "text/plain", body)
		if err != nil {
			t.Error(err)
			answered <- 0
			return
		}
		_ = resp.Body.Close()
		answered <- resp.StatusCode
	}()
	for i := range 3 {
		want := fmt.Sprintf("line %d", i)
		if _, err := io.WriteString(feed, want+"\n"); err != nil {
			t.Fatal(err)
		}
		if got := <-seen; got != want {
			t.Fatalf("upstream read %q while the body was still open, want %q", got, want)
		}
	}
	if err := feed.Close(); err != nil {
		t.Fatal(err)
	}
	if code := <-answered; code != 200 {
		t.Errorf("status %d, want 200", code)
	}
}

func TestUpgradedConnectionsPass(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			http.Error(w, "no upgrade", 400)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_ = rw.Flush()
		line, _ := rw.ReadString('\n')
		_, _ = rw.WriteString("echo " + line)
		_ = rw.Flush()
	}))
	defer up.Close()
	rig, gw := gateway(t, "", up.URL, ProxyConfig{})
	conn := dial(t, gw)
	_, _ = io.WriteString(conn, "GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	r := bufio.NewReader(conn)
	for line, err := r.ReadString('\n'); line != "\r\n"; line, err = r.ReadString('\n') {
		if err != nil || strings.HasPrefix(line, "HTTP/1.1 ") && line != "HTTP/1.1 101 Switching Protocols\r\n" {
			t.Fatal(line, err)
		}
	}
	_, _ = io.WriteString(conn, "hello\n")
	if line, err := r.ReadString('\n'); line != "echo hello\n" {
		t.Errorf("through the upgraded connection: %q, %v", line, err)
	}
	if rig.rec.requests != 1 {
		t.Errorf("%d requests counted, want 1", rig.rec.requests)
	}
}

func TestInformationalAnswersPassAndTheFieldsStay(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		_, _ = io.WriteString(w, "hello")
	}))
	defer up.Close()
	_, gw := gateway(t, "", up.URL, ProxyConfig{})
	conn := dial(t, gw)
	_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	b, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	early, final, _ := strings.Cut(string(b), "\r\n\r\n")
	if !strings.HasPrefix(early, "HTTP/1.1 103 ") || !strings.Contains(early, "\r\nLink: </style.css>") {
		t.Errorf("informational answer %q, want 103 with its link", early)
	}
	if !strings.HasPrefix(final, "HTTP/1.1 200 ") || !strings.Contains(final, "\r\nRatelimit: ") || !strings.Contains(final, "\r\nRatelimit-Policy: ") || !strings.HasSuffix(final, "hello") {
		t.Errorf("final answer %q, want 200 with the RateLimit fields", final)
	}
}

func dial(t testing.TB, target string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(target, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestAHeadOf10MBIsRefused(t *testing.T) {
	up := &upstream{}
	r := newRig(t, policy("", "", ""))
	gw := serve(t, Server("", r.Wrap(up), quiet))
	conn := dial(t, gw)
	go func() {
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nX-Big: ")
		chunk := bytes.Repeat([]byte("x"), 64<<10)
		for range 160 {
			if _, err := conn.Write(chunk); err != nil {
				return // the gateway has heard enough
			}
		}
	}()
	if got := receive(t, conn); got.status != 431 {
		t.Fatalf("%+v, want 431", got)
	}
	if up.served != 0 || r.rec.requests != 0 {
		t.Errorf("served %d and counted %v, want nothing", up.served, r.rec.counts)
	}
	// Nobody else is the worse for it, and a large head that is still a head passes.
	req := request(t, "GET", gw, nil)
	req.Header.Set("X-Large", strings.Repeat("x", 60<<10))
	if got := send(t, req); got.status != 200 {
		t.Errorf("60 KB head: %d, want 200", got.status)
	}
}

// Slow callers are tested on a short bound; that Server sets one is checked beside it.
func TestSlowCallersAreCutOff(t *testing.T) {
	srv := Server("", http.NotFoundHandler(), quiet)
	if srv.ReadHeaderTimeout <= 0 || srv.IdleTimeout <= 0 || srv.MaxHeaderBytes != 64<<10 {
		t.Errorf("Server has no bound for heads, idle connections or sizes: %+v", srv)
	}
	echo := func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusRequestTimeout)
			return
		}
		_, _ = w.Write(b)
	}
	const d = 100 * time.Millisecond
	slow := func(h http.HandlerFunc) string {
		s := Server("", http.NotFoundHandler(), quiet)
		s.Handler, s.ReadHeaderTimeout = steadyBody(h, d), d
		return serve(t, s)
	}

	t.Run("a head that stops", func(t *testing.T) {
		conn := dial(t, slow(echo))
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		if _, err := io.ReadAll(conn); err != nil { // ends: the gateway hung up, or answered 408 first
			t.Errorf("the connection did not end: %v", err)
		}
	})
	t.Run("a body that stops", func(t *testing.T) {
		conn := dial(t, slow(echo))
		_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
		if got := receive(t, conn); got.status != 408 {
			t.Errorf("%+v, want 408", got)
		}
	})
	t.Run("a body that stops and nobody reads", func(t *testing.T) {
		conn := dial(t, slow(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }))
		_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
		b, err := io.ReadAll(conn)
		if err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 429") {
			t.Errorf("%q, %v, want 429 and the end of the connection", b, err)
		}
	})
	t.Run("a body that comes slowly but steadily is taken", func(t *testing.T) {
		conn := dial(t, slow(echo))
		_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n")
		for range 8 {
			time.Sleep(d / 3)
			_, _ = io.WriteString(conn, "x")
		}
		if got := receive(t, conn); got.status != 200 {
			t.Errorf("%+v, want 200", got)
		}
	})
	t.Run("a slow answer to a body is no slow body", func(t *testing.T) {
		conn := dial(t, slow(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.ReadAll(r.Body)
			_, _ = r.Body.Read(make([]byte, 1)) // once more, at the end
			select {
			case <-r.Context().Done():
				w.WriteHeader(500)
			case <-time.After(4 * d):
			}
		}))
		_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
		if got := receive(t, conn); got.status != 200 {
			t.Errorf("%+v, want 200", got)
		}
	})
	t.Run("through the proxy a stopped body is the caller's fault", func(t *testing.T) {
		up := httptest.NewServer(http.HandlerFunc(echo))
		defer up.Close()
		u, err := url.Parse(up.URL)
		if err != nil {
			t.Fatal(err)
		}
		r := newRig(t, policy("", "", ""))
		conn := dial(t, slow(r.Wrap(Proxy(u, ProxyConfig{}, r.enforcer.Policy, quiet)).ServeHTTP))
		_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
		if got := receive(t, conn); got.status != 408 {
			t.Errorf("%+v, want 408", got)
		}
	})
}

func TestB051WhatIsServedWhileStoppingIsCounted(t *testing.T) {
	var served atomic.Int64
	release := make(chan struct{})
	inFlight := make(chan struct{}, 1)
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			inFlight <- struct{}{}
			<-release
		}
		served.Add(1)
	}))
	defer up.Close()
	u, err := url.Parse(up.URL)
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, policy("", plan("1000000/s", 1000000), ""))
	srv := Server("", r.Wrap(Proxy(u, ProxyConfig{}, r.enforcer.Policy, quiet)), quiet)
	gw := serve(t, srv)

	idle := dial(t, gw) // keep-alive, held open through the shutdown
	_, _ = io.WriteString(idle, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if got := receive(t, idle); got.status != 200 {
		t.Fatal(got)
	}
	slow := make(chan int, 1)
	go func() {
		resp, err := http.Get(gw + "/slow")
		if err != nil {
			t.Error(err)
			slow <- 0
			return
		}
		_ = resp.Body.Close()
		slow <- resp.StatusCode
	}()
	<-inFlight

	ok := atomic.Int64{}
	ok.Store(1)
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			client := http.Client{Transport: &http.Transport{}}
			for {
				select {
				case <-stop:
					return
				default:
				}
				resp, err := client.Get(gw)
				if err != nil {
					continue // refused at the door
				}
				_ = resp.Body.Close()
				if resp.StatusCode == 200 {
					ok.Add(1)
				}
			}
		})
	}
	for ok.Load() < 100 {
		runtime.Gosched()
	}
	done := make(chan error, 1)
	go func() { done <- srv.Shutdown(context.Background()) }()
	select {
	case err := <-done:
		t.Fatalf("Shutdown returned %v with a request in flight", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	counted := r.rec.count("anonymous/other//") // what the reporter holds when it is told to stop
	close(stop)
	callers.Wait()
	if code := <-slow; code != 200 {
		t.Errorf("the request in flight: %d, want 200", code)
	}
	if total := ok.Load() + 1; counted != served.Load() || counted < total {
		t.Errorf("counted %d, served %d, answered %d: want the first two equal and no answer uncounted", counted, served.Load(), total)
	}
	t.Logf("%d requests served and counted over a shutdown", counted)
}

package httpguard

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/limits"
)

// ProxyConfig says how long a proxy waits for its upstream. A zero field means its default.
type ProxyConfig struct {
	DialTimeout   time.Duration // to connect, TLS included (5s)
	HeaderTimeout time.Duration // from the end of the request to the head of the answer (60s)
	IdleConns     int           // kept open to the upstream (512)
	LogEvery      time.Duration // failures of the upstream are told at once, then summarised this often (1m)
	Metrics       *Metrics      // where they are counted; may be nil
}

// Proxy hands requests to upstream and streams bodies both ways, upgraded connections too. The Host header and the path are
// the caller's, below the path of upstream. X-Forwarded-For, -Host and -Proto are kept and continued when they come from a
// trusted proxy, and begun anew otherwise. An upstream that cannot be reached is a 502, one that does not answer in time a
// 504, both as a problem body, counted in Metrics and logged; the request stays counted, since it was admitted.
func Proxy(upstream *url.URL, cfg ProxyConfig, policy func() *limits.Policy, log *slog.Logger) http.Handler {
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = 5 * time.Second
	}
	if cfg.HeaderTimeout == 0 {
		cfg.HeaderTimeout = time.Minute
	}
	if cfg.IdleConns == 0 {
		cfg.IdleConns = 512
	}
	if cfg.LogEvery == 0 {
		cfg.LogEvery = time.Minute
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(prometheus.NewRegistry())
	}
	failures := newFailures(upstream.Redacted(), cfg.LogEvery, log, cfg.Metrics.Upstream)
	dialer := &net.Dialer{Timeout: cfg.DialTimeout}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			r.Out.Host = r.In.Host
			forward(r, policy())
		},
		Transport: &http.Transport{
			DialContext:           dialer.DialContext,
			TLSHandshakeTimeout:   cfg.DialTimeout,
			ResponseHeaderTimeout: cfg.HeaderTimeout,
			ExpectContinueTimeout: time.Second,
			MaxIdleConns:          cfg.IdleConns,
			MaxIdleConnsPerHost:   cfg.IdleConns,
			IdleConnTimeout:       90 * time.Second,
			DisableCompression:    true, // what the caller asked for is what it gets
			ForceAttemptHTTP2:     true,
		},
		BufferPool:   &buffers{},
		ErrorLog:     slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) { proxyError(w, r, err, failures) },
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		proxy.ServeHTTP(&standing{w, h[policyField], h[limitField]}, r)
	})
}

// standing keeps the RateLimit fields for the final answer: ReverseProxy clears all fields after an informational one.
type standing struct {
	http.ResponseWriter
	policy, limit []string
}

func (s *standing) WriteHeader(code int) {
	if h := s.Header(); code >= 200 && s.limit != nil && h[limitField] == nil {
		h[policyField], h[limitField] = s.policy, s.limit
	}
	s.ResponseWriter.WriteHeader(code)
}

// Unwrap lets the proxy flush and hijack.
func (s *standing) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// forward tells the upstream whom the request is from. ReverseProxy has taken away what the caller said of that.
func forward(r *httputil.ProxyRequest, p *limits.Policy) {
	trusted := p != nil && p.Identity.Trusted(peer(r.In.RemoteAddr))
	if trusted {
		r.Out.Header["X-Forwarded-For"] = r.In.Header["X-Forwarded-For"]
	} else {
		r.Out.Header.Del("X-Real-Ip")
	}
	r.SetXForwarded()
	if trusted {
		for _, name := range []string{"X-Forwarded-Host", "X-Forwarded-Proto"} {
			if v, ok := r.In.Header[name]; ok {
				r.Out.Header[name] = v
			}
		}
	}
}

func proxyError(w http.ResponseWriter, r *http.Request, err error, failures *failures) {
	p := &problem{Type: "about:blank", Title: "Bad Gateway", Status: http.StatusBadGateway,
		Detail: "The service behind this gateway cannot be reached.", Instance: newInstance()}
	switch {
	case bodyStopped(r):
		p.Title, p.Status, p.Detail = "Request Timeout", http.StatusRequestTimeout, "The body of this request did not arrive."
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the caller has gone: nobody is there to be answered
	default:
		if failures.note(err) == failedTimeout {
			p.Title, p.Status, p.Detail = "Gateway Timeout", http.StatusGatewayTimeout, "The service behind this gateway did not answer in time."
		}
	}
	failures.log.Debug("request not proxied", "status", p.Status, "instance", p.Instance, "err", err)
	writeProblem(w, r, p.Status, p)
}

// Reasons why an upstream gave no answer.
const (
	failedRefused = "refused" // nobody listens there
	failedTimeout = "timeout"
	failedReset   = "reset" // it ended the connection
	failedOther   = "other"
)

func failure(err error) string {
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		return failedTimeout
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return failedRefused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return failedReset
	}
	return failedOther
}

// failures tells of requests that the upstream did not answer.
type failures struct {
	recurring
	log    *slog.Logger
	errors *prometheus.CounterVec
}

func newFailures(upstream string, every time.Duration, log *slog.Logger, errors *prometheus.CounterVec) *failures {
	return &failures{log: log, errors: errors, recurring: recurring{every: every, tell: func(requests int, err error) {
		if requests == 0 {
			log.Error("the upstream does not answer", "upstream", upstream, "reason", failure(err), "err", err)
			return
		}
		log.Error("the upstream does not answer", "upstream", upstream, "requests", requests, "for", every, "reason", failure(err), "err", err)
	}}}
}

// note counts a failure and returns its reason.
func (f *failures) note(err error) string {
	reason := failure(err)
	f.errors.WithLabelValues(reason).Inc()
	f.recurring.note(err)
	return reason
}

// recurring tells of what may happen with every request: the first time at once, then how many times more every so often.
type recurring struct {
	every time.Duration
	tell  func(times int, last error) // times is 0 for the first, which has just happened

	mu     sync.Mutex // all below
	quiet  bool       // one was told lately
	untold int
	last   error // of those
}

func (r *recurring) note(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.quiet {
		r.untold++
		r.last = err
		return
	}
	r.quiet = true
	r.tell(0, err)
	time.AfterFunc(r.every, r.summarise)
}

// summarise tells what came since, and comes again until nothing did.
func (r *recurring) summarise() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.untold == 0 {
		r.quiet = false
		return
	}
	r.tell(r.untold, r.last)
	r.untold = 0
	time.AfterFunc(r.every, r.summarise)
}

// buffers lends the proxy its copy buffers.
type buffers struct{ pool sync.Pool }

const bufferBytes = 32 << 10

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[bufferBytes]byte); ok {
		return p[:]
	}
	return make([]byte, bufferBytes)
}

func (b *buffers) Put(p []byte) {
	if len(p) == bufferBytes {
		b.pool.Put((*[bufferBytes]byte)(p))
	}
}

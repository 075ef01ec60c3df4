// Package httpguard asks the enforcer about HTTP requests and answers for it: as a reverse proxy, or to another proxy's check.
package httpguard

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// Checker decides. It is the enforcer.
type Checker interface {
	// Check decides on r at now, in nanoseconds of the bucket clock. It keeps no reference to r.
	Check(now int64, r *enforcer.Request) enforcer.Decision
}

// Recorder counts what was decided. It is the reporter of ingest. Neither method may block.
type Recorder interface {
	// Count counts one request: admitted when rule is empty, else refused by rule.
	Count(now time.Time, tenant, route, rule, layer string, cost int64)
	// Reject offers one refusal as a sample.
	Reject(schemas.Rejection)
}

// Config says how a guard keeps time and what it tells of its mode. A zero field means its default.
type Config struct {
	Now   func() time.Time // wall clock, for what is counted (time.Now)
	Clock func() int64     // the enforcer's clock (enforcer.Monotonic)
	// Settle makes a decision that Check left open because the centre is to be asked: Enforcer.Settle. Needed with enforcer.Config.Ask.
	Settle func(ctx context.Context, now int64, r *enforcer.Request, d enforcer.Decision) enforcer.Decision
	Mode   func() string // the enforcer's rung; stale, isolated and floor show in RateLimit-Policy (enforcer.Synced)
}

// Metrics may be shared by several gateways of one process. Labels are the policy's own words, never a caller's.
type Metrics struct {
	Decisions *prometheus.CounterVec   // layer, rule, decision: allowed, refused, shadow (would have been refused), invalid
	Seconds   prometheus.Observer      // of a decision, sampled
	Remaining *prometheus.HistogramVec // rule: what is left of the burst after a decision, sampled
	Upstream  *prometheus.CounterVec   // reason: refused, timeout, reset, other
	Fallback  prometheus.Counter       // requests that strict rules decided without the centre
}

// sampleEvery is how many requests share one observation of a histogram.
const sampleEvery = 16

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	seconds := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "weir_decision_seconds",
		Help:    "Time that a decision takes, of one request in 16.",
		Buckets: []float64{1e-7, 2.5e-7, 5e-7, 1e-6, 2.5e-6, 5e-6, 1e-5, 1e-4, 1e-3, 1e-2}})
	m := &Metrics{
		Decisions: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_decisions_total",
			Help: "Decisions: allowed (no layer or rule), refused by a rule, shadow (a shadow rule would have refused), invalid (the request says not who it is from)."},
			[]string{"layer", "rule", "decision"}),
		Seconds: seconds,
		Remaining: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "weir_tokens_remaining_ratio",
			Help:    "What is left of a rule's burst after a decision, of one request in 16.",
			Buckets: []float64{0, .01, .05, .1, .25, .5, .75, .9, 1}}, []string{"rule"}),
	}
	m.Upstream = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_upstream_errors_total",
		Help: "Admitted requests that the service behind the gateway did not answer. They stay counted as admitted."}, []string{"reason"})
	for _, reason := range []string{failedRefused, failedTimeout, failedReset, failedOther} {
		m.Upstream.WithLabelValues(reason)
	}
	m.Fallback = prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_strict_fallback_total",
		Help: "Requests for which a rule of consistency strict was decided by the gateway's own part of the limit: the centre gave no answer in time, or was silent or without Redis."})
	reg.MustRegister(m.Decisions, seconds, m.Remaining, m.Upstream, m.Fallback)
	return m
}

// Guard stands before a handler, or answers checks for another proxy. It holds no lock and waits for nothing.
type Guard struct {
	cfg      Config
	checker  Checker
	policy   func() *limits.Policy
	recorder Recorder
	m        *Metrics
	log      *slog.Logger

	allowed, invalid prometheus.Counter
	fallbacks        *recurring
	current          atomic.Pointer[compiled]
	calls            sync.Pool // of *call
}

// New returns a guard for the policy in force, which policy returns. m may be nil.
func New(cfg Config, checker Checker, policy func() *limits.Policy, recorder Recorder, m *Metrics, log *slog.Logger) *Guard {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Clock == nil {
		cfg.Clock = enforcer.Monotonic
	}
	if cfg.Mode == nil {
		cfg.Mode = func() string { return enforcer.Synced }
	}
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	g := &Guard{cfg: cfg, checker: checker, policy: policy, recorder: recorder, m: m, log: log,
		allowed: m.Decisions.WithLabelValues("", "", "allowed"), invalid: m.Decisions.WithLabelValues("", "", "invalid")}
	g.fallbacks = &recurring{every: time.Minute, tell: func(requests int, _ error) {
		if requests == 0 {
			log.Warn("the centre was not asked in time about a request of a strict rule: this gateway's part of the limit decides")
			return
		}
		log.Warn("the centre was not asked in time about requests of strict rules: this gateway's part of the limit decided", "requests", requests, "for", time.Minute)
	}}
	g.calls.New = func() any { return newCall() }
	return g
}

// compiled is what a guard keeps of a policy.
type compiled struct {
	policy           *limits.Policy
	ip, user, device bool     // some rule's key has them, or the tenant is read from them
	headers          []string // that some rule's key has, canonical
	rules            map[string]*ruleMetrics
}

type ruleMetrics struct {
	refused, shadow prometheus.Counter
	remaining       prometheus.Observer
}

func (g *Guard) ruleMetrics(layer, rule string) *ruleMetrics {
	return &ruleMetrics{
		refused:   g.m.Decisions.WithLabelValues(layer, rule, "refused"),
		shadow:    g.m.Decisions.WithLabelValues(layer, rule, "shadow"),
		remaining: g.m.Remaining.WithLabelValues(rule),
	}
}

// compile returns what the guard keeps of the policy in force, nil while there is none. Two requests may do it at once, to
// the same end.
func (g *Guard) compile() *compiled {
	p := g.policy()
	if c := g.current.Load(); p == nil || c != nil && c.policy == p {
		return c
	}
	c := &compiled{policy: p, ip: p.Identity.Tenant == limits.TenantFromClientIP, rules: make(map[string]*ruleMetrics, len(p.Rules))}
	for i := range p.Rules {
		r := &p.Rules[i]
		c.rules[r.Name] = g.ruleMetrics(r.Layer.String(), r.Name)
		for _, d := range r.Key {
			switch d.Kind {
			case limits.ByIP:
				c.ip = true
			case limits.ByUser:
				c.user = true
			case limits.ByDevice:
				c.device = true
			case limits.ByHeader:
				c.headers = append(c.headers, d.Header)
			}
		}
	}
	g.current.Store(c)
	return c
}

// call is one request on its way through a guard. Calls are lent by a pool.
type call struct {
	req    enforcer.Request
	header http.Header
	buf    []byte // of the two RateLimit fields
}

func newCall() *call {
	c := &call{buf: make([]byte, 0, 256)}
	c.req.Header = c.value
	return c
}

// value is the value of a header that a rule's key has; compile has seen to it that admit has checked it.
func (c *call) value(name string) string {
	v, _ := headerValue(c.header, name)
	return v
}

// identify fills c with whom a request is from.
func (c *call) identify(cc *compiled, r *http.Request, target string) (client netip.Addr, err error) {
	p := cc.policy
	c.header = r.Header
	client = p.Identity.ClientIP(peer(r.RemoteAddr), r.Header["X-Forwarded-For"])
	q := &c.req
	q.IP, q.User, q.Device, q.Cost = "", "", "", 1
	if cc.ip && client.IsValid() {
		q.IP = p.Identity.Mask(client).String()
	}
	_, query, _ := strings.Cut(target, "?")
	if q.Tenant, err = tenantOf(&p.Identity, r.Header, query, q.IP); err != nil {
		return client, err
	}
	if cc.user {
		if q.User, err = userOf(r.Header); err != nil {
			return client, err
		}
	}
	if cc.device {
		if q.Device, err = headerValue(r.Header, deviceHeader); err != nil {
			return client, err
		}
	}
	for _, name := range cc.headers {
		if _, err = headerValue(r.Header, name); err != nil {
			return client, err
		}
	}
	return client, nil
}

// Wrap returns a handler that hands admitted requests to next and answers the others. Admitted requests are counted before
// next sees them, whatever becomes of them.
func (g *Guard) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.admit(w, r, r.Method, r.RequestURI, 0) {
			next.ServeHTTP(w, r)
		}
	})
}

// Headers of the check API.
const (
	statusHeader  = "X-Weir-Status"  // the status that a refusal should have, when it was asked to have another
	problemHeader = "X-Weir-Problem" // and its body
	denyParameter = "weir-deny"
)

// CheckHandler answers other proxies' questions about a request: 200 with the RateLimit fields, or the refusal as it should
// go to the caller. Any method will do. The request in question is told by X-Original-Method and X-Original-URI (path and
// query), or by X-Forwarded-Method and X-Forwarded-Uri, and everything else that identifies it by its own headers.
//
// X-Forwarded-For counts as it does in [Guard.Wrap]: the proxy that asks must be one of the policy's trusted proxies, so a
// proxy on the same host needs 127.0.0.1 there.
//
// nginx's auth_request knows no refusals but 401 and 403. With the query parameter weir-deny=403 (or 401) every refusal has
// that status; the right one is then in the header X-Weir-Status, the body in X-Weir-Problem.
func (g *Guard) CheckHandler() http.Handler {
	var untold, unrouted sync.Once
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		deny, err := denyStatus(r)
		method, merr := original(r.Header, "X-Original-Method", "X-Forwarded-Method")
		target, terr := original(r.Header, "X-Original-Uri", "X-Forwarded-Uri")
		if err = cmp.Or(err, merr, terr); err != nil {
			g.refuseBad(w, r, err, deny)
			return
		}
		if target == "" {
			unrouted.Do(func() {
				g.log.Warn("a check came without X-Original-URI: its route cannot be told, and neither can a query")
			})
			target = "/"
		}
		if method == "" {
			method = r.Method
		}
		if _, ok := r.Header["X-Forwarded-For"]; ok && !g.policy().Identity.Trusted(peer(r.RemoteAddr)) {
			untold.Do(func() {
				g.log.Warn("X-Forwarded-For of a check ignored: its sender is not in identity.trusted_proxies, so that all callers have the sender's address", "sender", peer(r.RemoteAddr))
			})
		}
		if !g.admit(w, r, method, target, deny) {
			return
		}
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("Content-Length", "0")
		w.WriteHeader(http.StatusOK)
	})
}

// denyStatus is the status that all refusals are to have, 0 for their own.
func denyStatus(r *http.Request) (int, error) {
	if r.URL.RawQuery == "" {
		return 0, nil
	}
	switch v, err := queryValue(r.URL.RawQuery, denyParameter); {
	case err != nil:
		return 0, err
	case v == "401":
		return http.StatusUnauthorized, nil
	case v == "403":
		return http.StatusForbidden, nil
	case v != "":
		return 0, &badIdentity{"query parameter " + denyParameter, "is neither 401 nor 403"}
	}
	return 0, nil
}

// original is what a proxy says of the request that it asks about, under either name. A proxy overwrites the name that it
// uses and may pass the other one on from the caller, so two that differ are refused.
func original(h http.Header, names ...string) (string, error) {
	v, found := "", false
	for _, name := range names {
		for _, s := range h[name] {
			if found && s != v {
				return "", &badIdentity{"header " + name, "contradicts another one"}
			}
			v, found = s, true
		}
	}
	return v, nil
}

// admit decides on a request and counts it, and answers it unless it is admitted. It sets the RateLimit fields.
func (g *Guard) admit(w http.ResponseWriter, r *http.Request, method, target string, deny int) bool {
	cc := g.compile()
	if cc == nil {
		g.invalid.Inc()
		answer(w, r, noPolicy(), deny)
		return false
	}
	c := g.calls.Get().(*call)
	defer g.release(c)
	client, err := c.identify(cc, r, target)
	if err != nil {
		g.refuseBad(w, r, err, deny)
		return false
	}
	q := &c.req
	q.Route = cc.policy.Route(method, target)

	sampled := rand.Uint32()%sampleEvery == 0
	now := g.cfg.Now()
	d := g.checker.Check(g.cfg.Clock(), q)
	if d.Asks() {
		d = g.cfg.Settle(r.Context(), g.cfg.Clock(), q, d)
	}
	if d.FellBack() {
		g.m.Fallback.Inc()
		g.fallbacks.note(nil)
	}
	if sampled {
		g.sample(cc, &d, now)
	}
	for _, name := range d.Shadow {
		g.of(cc, "", name).shadow.Inc()
	}
	if d.Allowed {
		g.allowed.Inc()
		g.recorder.Count(now, q.Tenant, q.Route, "", "", q.Cost)
		c.setFields(w.Header(), &d, g.cfg.Mode())
		return true
	}
	g.of(cc, d.Layer, d.Rule).refused.Inc()
	g.recorder.Count(now, q.Tenant, q.Route, d.Rule, d.Layer, q.Cost)
	p := g.refuse(w, r, cc, c, &d, deny)
	path, _, _ := strings.Cut(target, "?")
	g.recorder.Reject(schemas.Rejection{Time: now, Tenant: q.Tenant, Route: q.Route, Rule: d.Rule, Layer: d.Layer,
		Method: legible(method), Path: legible(path), Client: redacted(client), RetryAfterMS: p.RetryAfterMS, Instance: p.Instance})
	return false
}

// of is the metrics of a rule. cc may not know it yet, if a new policy came into force after compile.
func (g *Guard) of(cc *compiled, layer, rule string) *ruleMetrics {
	if m, ok := cc.rules[rule]; ok {
		return m
	}
	if m, ok := g.compile().rules[rule]; ok {
		return m
	}
	return g.ruleMetrics(layer, rule)
}

// sample observes how long the decision took and what it left of the rule that it is about: the one that refused, else the
// one with the fewest tokens left.
func (g *Guard) sample(cc *compiled, d *enforcer.Decision, start time.Time) {
	g.m.Seconds.Observe(g.cfg.Now().Sub(start).Seconds())
	if d.Burst <= 0 || d.Remaining > d.Burst {
		return // unlimited, or nothing is admitted
	}
	for i := range int(d.N) {
		s := d.Standing(i)
		if s.Rule.Name == d.Rule || d.Allowed && s.Remaining == d.Remaining {
			g.of(cc, s.Rule.Layer.String(), s.Rule.Name).remaining.Observe(float64(d.Remaining) / float64(d.Burst))
			return
		}
	}
}

// setFields says where the caller stands with each of its rules. The guard's own state is nobody's business until it refuses,
// or unless nothing else applies.
func (c *call) setFields(h http.Header, d *enforcer.Decision, mode string) {
	var room [8]enforcer.Standing
	shown := room[:0]
	for i := range int(d.N) {
		s := d.Standing(i)
		if s.Limit.Unlimited {
			continue
		}
		if len(shown) == 1 && shown[0].Rule.Layer == limits.LayerGuard {
			shown = shown[:0]
		}
		shown = append(shown, s)
	}
	if len(shown) == 0 {
		return
	}
	both := c.buf[:0]
	for i, s := range shown {
		both = appendPolicy(separate(both, i), s.Rule.Name, *s.Limit, mode)
	}
	split := len(both)
	for i, s := range shown {
		both = appendLimit(separate(both, i), s.Rule.Name, s.Remaining, 0)
	}
	c.put(h, both, split)
}

// set sets the fields of one rule.
func (c *call) set(h http.Header, rule string, l bucket.Limit, remaining, reset int64, mode string) {
	both := appendPolicy(c.buf[:0], rule, l, mode)
	split := len(both)
	c.put(h, appendLimit(both, rule, remaining, reset), split)
}

// put sets both fields from one string. The buffer stays with c.
func (c *call) put(h http.Header, both []byte, split int) {
	c.buf = both[:0]
	text := string(both)
	values := &[2]string{text[:split], text[split:]}
	h[policyField] = values[0:1:1]
	h[limitField] = values[1:2:2]
}

func separate(dst []byte, before int) []byte {
	if before > 0 {
		dst = append(dst, ", "...)
	}
	return dst
}

// refuse answers a request that d refused.
func (g *Guard) refuse(w http.ResponseWriter, r *http.Request, cc *compiled, c *call, d *enforcer.Decision, deny int) *problem {
	rule, whole := ruleOf(cc, c, d)
	if rule == nil {
		p := noPolicy()
		answer(w, r, p, deny)
		return p
	}
	wait := d.RetryIn
	if wait == bucket.Never && c.req.Cost <= whole.Burst && whole.Rate.Num > 0 {
		wait = time.Second // this gateway's share admits nothing now, but the limit does
	}
	c.set(w.Header(), rule.Name, whole, d.Remaining, retrySeconds(wait), g.cfg.Mode())
	p := refusal(rule, whole, wait)
	if d.Reason == enforcer.ReasonStoreLoss {
		p = outage(rule, wait)
	}
	answer(w, r, p, deny)
	return p
}

// ruleOf is the rule that refused, with the limit that the policy states.
func ruleOf(cc *compiled, c *call, d *enforcer.Decision) (*limits.Rule, bucket.Limit) {
	for i := range int(d.N) {
		if s := d.Standing(i); s.Rule.Name == d.Rule {
			return s.Rule, *s.Limit
		}
	}
	for i := range cc.policy.Rules {
		if rule := &cc.policy.Rules[i]; rule.Name == d.Rule {
			l, _ := rule.Limit(cc.policy, c.req.Tenant)
			return rule, l
		}
	}
	return nil, bucket.Limit{}
}

// refuseBad answers a request that does not say who it is from. It is no tenant's, and so in no tenant's count.
func (g *Guard) refuseBad(w http.ResponseWriter, r *http.Request, err error, deny int) {
	g.invalid.Inc()
	answer(w, r, badRequest(err), deny)
}

// answer refuses with p, under another status if one is asked for.
func answer(w http.ResponseWriter, r *http.Request, p *problem, deny int) {
	if p.RetryAfterMS > 0 {
		w.Header().Set(retryField, strconv.FormatInt((p.RetryAfterMS+999)/1000, 10))
	}
	status := p.Status
	if deny != 0 {
		status = deny
	}
	writeProblem(w, r, status, p)
}

// legible is as much of a path as a report takes: valid text of at most 256 bytes.
func legible(path string) string {
	path = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(path, "\uFFFD"))
	if len(path) > schemas.MaxTextBytes {
		path = strings.ToValidUTF8(path[:schemas.MaxTextBytes], "")
	}
	return path
}

// release gives c back without the caller's things.
func (g *Guard) release(c *call) {
	header := c.req.Header
	c.req, c.header = enforcer.Request{Header: header}, nil
	g.calls.Put(c)
}

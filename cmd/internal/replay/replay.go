// Package replay sends an access log through gateways of a live pipeline and proves that every request was stored once.
package replay

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/simulate"
	"github.com/weirhq/weir/internal/accesslog"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/limits"
)

// Config says what to replay. Log and Policy are required; another zero field means its default.
type Config struct {
	Log      string
	Policy   string
	Gateways int                              // (3)
	Speed    float64                          // log seconds per second; +Inf is as fast as possible (3600)
	Patience time.Duration                    // how long nothing new may be stored before the rest counts as lost (1m)
	Progress func(stage string, n, total int) // told now and then; may be nil
}

// Result is what became of the log.
type Result struct {
	Requests  int            `json:"requests"` // that the gateways decided about
	Allowed   int            `json:"allowed"`
	Rejected  int            `json:"rejected"`
	ByRule    map[string]int `json:"by_rule"`  // requests refused
	Invalid   int            `json:"invalid"`  // requests whose identity no gateway could read: answered, neither admitted nor refused
	Unparsed  int            `json:"unparsed"` // lines that are no requests
	Stored    int            `json:"stored"`   // requests in ClickHouse
	Lost      int            `json:"lost"`     // decided, but not stored under the same tenant, route and rule
	Doubled   int            `json:"doubled"`  // stored once too often
	ElapsedS  float64        `json:"elapsed_s"`
	GatewayID []string       `json:"gateways"` // names under which ClickHouse has them

	Log      accesslog.Stats `json:"-"` // what could not be read, and why
	Warnings []string        `json:"-"`
}

// Whole says whether every request is stored exactly once.
func (r *Result) Whole() bool { return r.Stored == r.Requests && r.Lost == 0 && r.Doubled == 0 }

// Run replays. The gateways decide by the log's clock, sped up; what they count carries the present time. It returns an
// error when the replay could not be carried out; that requests were lost is not an error but in the result.
func Run(ctx context.Context, cfg Config, servers app.Servers, log *slog.Logger) (res Result, err error) {
	if cfg.Gateways == 0 {
		cfg.Gateways = 3
	}
	if cfg.Speed == 0 {
		cfg.Speed = 3600
	}
	if cfg.Patience == 0 {
		cfg.Patience = time.Minute
	}
	if cfg.Progress == nil {
		cfg.Progress = func(string, int, int) {}
	}
	entries, stats, err := accesslog.Load(ctx, cfg.Log)
	res.Log, res.Unparsed, res.ByRule = stats, stats.Unparsed, map[string]int{}
	if err != nil {
		return res, err
	}
	if len(entries) == 0 {
		return res, fmt.Errorf("%s holds no requests (%d lines could not be read)", cfg.Log, stats.Unparsed)
	}
	store, err := clickhouse.Open(servers.ClickHouse, log)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if err := store.Check(ctx); err != nil {
		return res, err
	}

	started := time.Now()
	var stack run.Stack
	stopped := false
	stop := func() error {
		if stopped {
			return nil
		}
		stopped = true
		return stack.Stop(cfg.Patience)
	}
	defer func() { err = errors.Join(err, stop()) }()
	r := &replay{cfg: cfg, prefix: "replay-" + strings.ToLower(rand.Text()[:8]) + "-", sent: map[clickhouse.Outcome]uint64{}, res: &res, first: entries[0].Time}
	if err := r.start(ctx, entries, servers, &stack, log); err != nil {
		return res, err
	}
	if err := r.send(ctx, entries); err != nil {
		return res, err
	}
	if err := stop(); err != nil { // seals and drains the gateways
		return res, fmt.Errorf("drain the gateways: %w", err)
	}
	if err := r.compare(ctx, store, started); err != nil {
		return res, err
	}
	res.ElapsedS = math.Round(time.Since(started).Seconds()*1000) / 1000
	return res, nil
}

type replay struct {
	cfg      Config
	policy   *app.Policy
	gateways []*app.Gateway
	handlers []http.Handler
	first    time.Time    // of the log
	now      atomic.Int64 // log time since first, in nanoseconds: the buckets' clock
	prefix   string       // of the gateways' names
	sent     map[clickhouse.Outcome]uint64
	res      *Result
}

// start runs the gateways, without listeners: requests are handed to them directly.
func (r *replay) start(ctx context.Context, entries []accesslog.Entry, servers app.Servers, stack *run.Stack, log *slog.Logger) error {
	m := app.NewMetrics()
	policy, err := app.NewPolicy(r.cfg.Policy, m, log)
	if err != nil {
		return err
	}
	r.policy = policy
	r.res.Warnings = simulate.Nameless(policy.Current(), entries)
	rules := policy.Current().Rules
	for i := range rules {
		if rules[i].Mode != limits.Shadow {
			r.res.ByRule[rules[i].Name] = 0
		}
	}
	for i := range r.cfg.Gateways {
		name := fmt.Sprintf("%s%d", r.prefix, i+1)
		nc, err := app.Connect(ctx, servers.NATS, name, true, m, stack, log)
		if err != nil {
			return err
		}
		g, err := app.NewGateway(app.GatewayConfig{Name: name, Fleet: r.cfg.Gateways, Clock: r.now.Load}, policy, nc, m, stack, log)
		if err != nil {
			return err
		}
		r.gateways = append(r.gateways, g)
		r.handlers = append(r.handlers, g.Guard.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })))
		r.res.GatewayID = append(r.res.GatewayID, name)
	}
	return nil
}

// send hands the requests to the gateways in turn, in the order of the log's clock.
func (r *replay) send(ctx context.Context, entries []accesslog.Entry) error {
	start := time.Now()
	for i := range entries {
		e := &entries[i]
		at := e.Time.Sub(r.first)
		if !math.IsInf(r.cfg.Speed, 1) {
			if err := sleepUntil(ctx, start.Add(time.Duration(float64(at)/r.cfg.Speed))); err != nil {
				return err
			}
		}
		r.now.Store(int64(at) + 1)
		if i%500 == 0 {
			r.cfg.Progress("sent", i, len(entries))
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		n := i % len(r.handlers)
		w := answer{header: http.Header{}}
		r.handlers[n].ServeHTTP(&w, request(r.policy.Current(), e))
		if err := r.note(r.gateways[n].Name, &w); err != nil {
			return err
		}
	}
	r.cfg.Progress("sent", len(entries), len(entries))
	return nil
}

func sleepUntil(ctx context.Context, at time.Time) error {
	d := time.Until(at)
	if d <= 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// request is what the client of a logged request would have sent.
func request(p *limits.Policy, e *accesslog.Entry) *http.Request {
	r := &http.Request{Method: e.Method, RequestURI: e.URI, RemoteAddr: e.Client, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, Body: http.NoBody}
	if strings.Contains(e.Client, ":") {
		r.RemoteAddr = "[" + e.Client + "]"
	}
	r.RemoteAddr += ":1"
	for _, name := range headers(p) {
		if v := e.Header(name); v != "" {
			r.Header.Set(name, v)
		}
	}
	if e.Device != "" {
		r.Header.Set("X-Device-Id", e.Device)
	}
	if e.User != "" {
		r.SetBasicAuth(e.User, "")
	}
	if p.Identity.Tenant == limits.TenantFromHeader && e.Tenant != "" {
		r.Header.Set(p.Identity.TenantName, e.Tenant)
	}
	return r
}

// headers are the names that a decision under p may read.
func headers(p *limits.Policy) []string {
	names := []string{"X-User"}
	if p.Identity.Tenant == limits.TenantFromHeader {
		names = append(names, p.Identity.TenantName)
	}
	for i := range p.Rules {
		for _, d := range p.Rules[i].Key {
			if d.Kind == limits.ByHeader {
				names = append(names, d.Header)
			}
		}
	}
	return names
}

// answer is a response writer that keeps the head.
type answer struct {
	header http.Header
	status int
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return len(b), nil
}

// note keeps what a gateway answered: it is what the history is compared with.
func (r *replay) note(gateway string, a *answer) error {
	rule := ""
	switch a.status {
	case http.StatusOK:
		r.res.Allowed++
	case http.StatusBadRequest:
		r.res.Invalid++
		return nil
	default:
		if rule = refusedBy(a.header); rule == "" {
			return fmt.Errorf("gateway %s answered %d and names no rule", gateway, a.status)
		}
		r.res.Rejected++
		r.res.ByRule[rule]++
	}
	r.res.Requests++
	r.sent[clickhouse.Outcome{Gateway: gateway, Rule: rule}]++
	return nil
}

// refusedBy is the rule that the RateLimit field of a refusal names.
func refusedBy(h http.Header) string {
	_, rest, _ := strings.Cut(h.Get("RateLimit"), `"`)
	rule, _, _ := strings.Cut(rest, `"`)
	return rule
}

// pollEvery is how often the history is read while it fills.
const pollEvery = 500 * time.Millisecond

// compare waits until everything is stored, or nothing has been for as long as patience goes, and says what differs.
func (r *replay) compare(ctx context.Context, store *clickhouse.Store, since time.Time) error {
	moved := time.Now()
	for {
		stored, err := store.Outcomes(ctx, r.prefix, since.Add(-time.Minute))
		if err != nil && !errors.Is(err, clickhouse.ErrUnreachable) {
			return err
		}
		if err == nil {
			if before := r.res.Stored; r.judge(stored) != before {
				moved = time.Now()
			}
			r.cfg.Progress("stored", r.res.Stored, r.res.Requests)
		}
		if r.res.Stored >= r.res.Requests && r.res.Lost == 0 {
			return nil
		}
		if time.Since(moved) > r.cfg.Patience {
			return err
		}
		if err := sleepUntil(ctx, time.Now().Add(pollEvery)); err != nil {
			return err
		}
	}
}

// judge compares what is stored with what was answered, by gateway and rule, and returns how much is stored.
func (r *replay) judge(stored map[clickhouse.Outcome]uint64) int {
	r.res.Stored, r.res.Lost, r.res.Doubled = 0, 0, 0
	for o, n := range stored {
		r.res.Stored += int(n)
		r.res.Doubled += int(n - min(n, r.sent[o]))
	}
	for o, n := range r.sent {
		r.res.Lost += int(n - min(n, stored[o]))
	}
	return r.res.Stored
}

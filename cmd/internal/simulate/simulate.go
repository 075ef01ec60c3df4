// Package simulate answers who would have been throttled: the real limiter over the requests and the clock of an access log.
package simulate

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/weirhq/weir/cmd/internal/text"
	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/httpguard"
	"github.com/weirhq/weir/internal/accesslog"
	"github.com/weirhq/weir/limits"
)

// Config says what to simulate. A zero Top means its default.
type Config struct {
	Log      string                // access log, "-" for standard input
	Policy   string                // policy file or folder
	Top      int                   // tenants listed (10)
	Progress func(done, total int) // told every few thousand requests; may be nil
}

// Result is what one gateway, alone in its fleet, would have done. It is exact: equal to rational arithmetic.
type Result struct {
	Requests int            `json:"requests"`
	Allowed  int            `json:"allowed"`
	Rejected int            `json:"rejected"`
	Unparsed int            `json:"unparsed"`         // lines that are no requests
	Tenants  int            `json:"tenants"`          // different ones among the requests
	ByRule   map[string]int `json:"by_rule"`          // requests refused, for every rule in mode enforce
	Shadow   map[string]int `json:"shadow,omitempty"` // requests that were allowed but that a shadow rule would have refused
	Top      []Tenant       `json:"top"`              // the tenants refused most, ties by name

	Log      accesslog.Stats `json:"-"` // what could not be read, and why
	Warnings []string        `json:"-"` // of the policy, and of what it reads that the log has not
	rules    []string        // in funnel order
}

// Tenant is one tenant's part of the refusals.
type Tenant struct {
	Tenant   string `json:"tenant"`
	Rejected int    `json:"rejected"`
}

// Run simulates one log under one policy. Requests are taken in the order of time, those of the same time in the order of the
// file, and each costs one token in every rule that applies.
func Run(ctx context.Context, cfg Config) (Result, error) {
	p, err := limits.Load(cfg.Policy)
	if err != nil {
		return Result{}, err
	}
	entries, stats, err := accesslog.Load(ctx, cfg.Log)
	if err != nil {
		return Result{}, err
	}
	return run(ctx, cfg, p, entries, stats)
}

func run(ctx context.Context, cfg Config, p *limits.Policy, entries []accesslog.Entry, stats accesslog.Stats) (Result, error) {
	res := Result{Requests: len(entries), Unparsed: stats.Unparsed, ByRule: map[string]int{}, Shadow: map[string]int{}, Top: []Tenant{}, Log: stats, Warnings: append(p.Warnings(), Nameless(p, entries)...)}
	for i := range p.Rules {
		r := &p.Rules[i]
		res.rules = append(res.rules, r.Name)
		if r.Mode == limits.Shadow {
			res.Shadow[r.Name] = 0
		} else {
			res.ByRule[r.Name] = 0
		}
	}
	var now int64
	if len(entries) > 0 {
		now = entries[0].Time.UnixNano()
	}
	gateway := enforcer.New(enforcer.Config{Stripes: 1, Fleet: 1, Clock: func() int64 { return now }}) // one stripe is exact
	gateway.SetPolicy(p)
	rejected := map[string]int{} // by tenant, for every tenant seen
	for i := range entries {
		if i%4096 == 0 {
			if err := ctx.Err(); err != nil {
				return Result{}, err
			}
			if cfg.Progress != nil {
				cfg.Progress(i, len(entries))
			}
		}
		e := &entries[i]
		now = e.Time.UnixNano()
		q := request(p, e)
		d := gateway.Check(now, &q)
		if d.Allowed {
			res.Allowed++
			rejected[q.Tenant] += 0
		} else {
			res.Rejected++
			rejected[q.Tenant]++
			res.ByRule[d.Rule]++
		}
		for _, name := range d.Shadow {
			res.Shadow[name]++
		}
	}
	if cfg.Progress != nil {
		cfg.Progress(len(entries), len(entries))
	}
	res.Tenants = len(rejected)
	for tenant, n := range rejected {
		if n > 0 {
			res.Top = append(res.Top, Tenant{tenant, n})
		}
	}
	slices.SortFunc(res.Top, func(x, y Tenant) int {
		return cmp.Or(cmp.Compare(y.Rejected, x.Rejected), cmp.Compare(x.Tenant, y.Tenant))
	})
	res.Top = res.Top[:min(len(res.Top), cmp.Or(cfg.Top, 10))]
	return res, nil
}

// request is what the gateway would have made of a logged request.
func request(p *limits.Policy, e *accesslog.Entry) enforcer.Request {
	ip := e.Client
	if a, ok := limits.ParseAddr(e.Client); ok {
		ip = p.Identity.Mask(a).String()
	}
	return enforcer.Request{
		Tenant: tenant(&p.Identity, e, ip),
		Route:  p.Route(e.Method, e.URI),
		IP:     ip,
		User:   cmp.Or(e.User, e.Header("X-User")),
		Device: cmp.Or(e.Device, e.Header("X-Device-Id")),
		Header: e.Header,
		Cost:   1,
	}
}

// tenant is the request's tenant by the policy's rule. Where the log does not show what that rule reads, the tenant that the log
// names stands in for it.
func tenant(id *limits.Identity, e *accesslog.Entry, ip string) string {
	var t string
	switch id.Tenant {
	case limits.TenantFromClientIP:
		return cmp.Or(ip, httpguard.Anonymous)
	case limits.TenantFromBasic:
		t = e.User
	case limits.TenantFromQuery:
		t = queryValue(e.URI, id.TenantName)
	case limits.TenantFromHeader:
		t = strings.Trim(e.Header(id.TenantName), " \t")
	}
	return cmp.Or(t, e.Tenant, httpguard.Anonymous)
}

// Nameless warns of a log in which no request says whose it is.
func Nameless(p *limits.Policy, entries []accesslog.Entry) []string {
	id := &p.Identity
	for i := range entries {
		if tenant(id, &entries[i], entries[i].Client) != httpguard.Anonymous {
			return nil
		}
	}
	if len(entries) == 0 {
		return nil
	}
	source := "the client's address"
	switch id.Tenant {
	case limits.TenantFromBasic:
		source = "the user of basic authentication"
	case limits.TenantFromQuery:
		source = "the query parameter " + id.TenantName
	case limits.TenantFromHeader:
		source = "the header " + id.TenantName
	}
	return []string{fmt.Sprintf("every request is of tenant %s: the policy reads %s, which this log does not have", httpguard.Anonymous, source)}
}

// queryValue is the first value of a query parameter, "" when there is none or it is malformed.
func queryValue(uri, name string) string {
	_, query, _ := strings.Cut(uri, "?")
	for pair := range strings.SplitSeq(query, "&") {
		key, value, _ := strings.Cut(pair, "=")
		if k, err := url.QueryUnescape(key); err != nil || k != name {
			continue
		}
		v, err := url.QueryUnescape(value)
		if err != nil {
			return ""
		}
		return strings.Trim(v, " \t")
	}
	return ""
}

// WriteJSON writes the result as one JSON document.
func (r *Result) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteTable writes the result for people: totals, then rules in funnel order, then the tenants refused most.
func (r *Result) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(format string, args ...any) { text.Printf(t, format, args...) } // Flush has its errors
	row("REQUESTS\tALLOWED\tREJECTED\tUNPARSED\tTENANTS\n")
	row("%d\t%d\t%d\t%d\t%d\n\n", r.Requests, r.Allowed, r.Rejected, r.Unparsed, r.Tenants)
	row("RULE\tREJECTED\n")
	for _, name := range r.rules {
		if n, ok := r.Shadow[name]; ok {
			row("%s\t%d (shadow)\n", name, n)
		} else {
			row("%s\t%d\n", name, r.ByRule[name])
		}
	}
	if len(r.Top) > 0 {
		row("\nTENANT\tREJECTED\n")
		for _, top := range r.Top {
			row("%s\t%d\n", top.Tenant, top.Rejected)
		}
	}
	return t.Flush()
}

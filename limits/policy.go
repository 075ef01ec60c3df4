// Package limits is the policy: which limit applies to which request. It parses, validates, indexes and hot-swaps policy files.
package limits

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/weirhq/weir/enforcer/bucket"
)

// OtherRoute is the route of a request that no pattern matches.
const OtherRoute = "other"

// Deny is the word that default_plan takes when a tenant without a plan is to be refused.
const Deny = "deny"

// Policy is one validated policy. It never changes once it is built, so any number of goroutines may read it.
type Policy struct {
	Version     uint64 // first 48 bits of SHA-256 over the canonical content: the same on every gateway, whatever the formatting
	Identity    Identity
	Routes      []Route // in policy order: the first match wins
	Plans       map[string]Plan
	Tenants     map[string]Tenant
	DefaultPlan string // plan of a tenant that names none; Deny refuses it; "" when no rule takes its limit from the plan
	Rules       []Rule // in funnel order (guard, contract, route), policy order inside a layer

	defaultLimit bucket.Limit // of DefaultPlan; the zero Limit admits nothing
	warnings     []string
}

// Layer is a rule's place in the funnel.
type Layer uint8

// The layers in funnel order.
const (
	LayerGuard    Layer = iota // protects the whole gateway
	LayerContract              // what a tenant may use
	LayerRoute                 // protects one fragile interface
)

// String is the layer's word in policy files, metrics and tables.
func (l Layer) String() string { return word(layerWords, int(l)) }

// Mode says what a refusal of a rule does.
type Mode uint8

// The modes of a rule.
const (
	Enforce Mode = iota // a refusal refuses the request
	Shadow              // a refusal is only counted
)

// String is the mode's word in policy files, metrics and tables.
func (m Mode) String() string { return word(modeWords, int(m)) }

// Consistency says how the gateways of a fleet keep one limit.
type Consistency uint8

const (
	Shared Consistency = iota // shares handed out by the aggregator add up to the limit
	Local                     // every gateway has the whole limit to itself
	Lease                     // gateways take blocks of tokens from the aggregator ahead of need; none is given twice
	Strict                    // the aggregator is asked about each request, and the gateway's share counts when it does not answer in time
)

// String is the consistency's word in policy files, metrics and tables.
func (c Consistency) String() string { return word(consistencyWords, int(c)) }

// StoreLoss says what a rule does on a gateway that has not heard, for as long as shares hold, from a centre that has its store.
type StoreLoss uint8

// What a rule may do then.
const (
	LossLocal StoreLoss = iota // the gateway keeps to its part of the limit
	LossDeny                   // it refuses
	LossAllow                  // it admits without counting
)

// String is the word in policy files.
func (s StoreLoss) String() string { return word(storeLossWords, int(s)) }

// DimensionKind is the kind of one part of a rule's key.
type DimensionKind uint8

// The parts that a key may have.
const (
	ByTenant DimensionKind = iota
	ByRoute
	ByIP
	ByUser
	ByDevice
	ByHeader
)

// Dimension is one part of a rule's key: requests that agree in all parts share a bucket.
type Dimension struct {
	Kind   DimensionKind
	Header string // canonical header name, for ByHeader only
}

// String is the dimension as a policy file spells it.
func (d Dimension) String() string {
	if d.Kind == ByHeader {
		return headerPrefix + d.Header
	}
	return word(dimensionWords, int(d.Kind))
}

// Rule is one limit and the requests it applies to.
type Rule struct {
	Name        string
	Layer       Layer
	Key         []Dimension // no dimension: one bucket for everything
	Routes      []string    // the routes it applies to; none means every route
	Mode        Mode
	Consistency Consistency
	OnStoreLoss StoreLoss
	ByPlan      bool         // the limit is that of the tenant's plan
	Fixed       bucket.Limit // the limit, unless ByPlan
}

// Applies says whether the rule applies to requests of route.
func (r *Rule) Applies(route string) bool {
	return len(r.Routes) == 0 || slices.Contains(r.Routes, route)
}

// Limit is the limit that the rule puts on tenant. It is false when the tenant has no plan and default_plan is deny; the limit
// is then the zero Limit, which admits nothing. It allocates nothing.
func (r *Rule) Limit(p *Policy, tenant string) (bucket.Limit, bool) {
	if !r.ByPlan {
		return r.Fixed, true
	}
	return p.TenantLimit(tenant)
}

// TenantLimit is the limit of tenant's plan with the tenant's own overrides, or false when there is none: see [Rule.Limit].
func (p *Policy) TenantLimit(tenant string) (bucket.Limit, bool) {
	if t, ok := p.Tenants[tenant]; ok {
		return t.Limit, true
	}
	return p.defaultLimit, p.DefaultPlan != Deny && p.DefaultPlan != ""
}

// Warnings are remarks on a valid policy, in no need of action before it takes effect, one sentence each.
func (p *Policy) Warnings() []string { return slices.Clone(p.warnings) }

// Plan is a limit under a name that tenants refer to.
type Plan struct {
	Limit bucket.Limit
	Quota *Quota // nil: none. Recorded, not enforced by this version
}

// Quota is an amount per calendar period in a time zone.
type Quota struct {
	Limit    int64  // units per period, at least 1
	Per      string // hour, day, week or month
	Timezone string // IANA name; UTC when the policy names none
}

// Tenant is one tenant that the policy names.
type Tenant struct {
	Plan  string       // never empty
	Limit bucket.Limit // the plan's limit, with the tenant's own rate and burst in place of the plan's where it has them
	Owner Owner
}

// Owner is who is told about a tenant.
type Owner struct {
	Webhook string // absolute http or https URL, "" for none. It may hold a credential: do not log it
}

// TenantSource is where a request's tenant is read from.
type TenantSource uint8

// The places a tenant may be read from.
const (
	TenantFromHeader   TenantSource = iota // the header Identity.TenantName
	TenantFromQuery                        // the query parameter Identity.TenantName
	TenantFromBasic                        // the user name of HTTP basic authentication
	TenantFromClientIP                     // the client's address, see [Identity.Mask]
)

// Identity says who a request is from.
type Identity struct {
	Tenant         TenantSource
	TenantName     string         // canonical header name or query parameter, for those two sources
	TrustedProxies []netip.Prefix // whose X-Forwarded-For is believed; nobody's by default
	IPv6Prefix     int            // bits of an IPv6 address that make one client, 1 to 128 (64)
}

// Mask is the address that stands for a client: an IPv4 address itself (also when written as IPv6), and the first
// IPv6Prefix bits of an IPv6 address, without its zone. It is the key of `ip`, and its text is the tenant of client_ip.
func (id *Identity) Mask(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if !a.Is6() || id.IPv6Prefix == 0 {
		return a
	}
	p, err := a.Prefix(id.IPv6Prefix)
	if err != nil {
		return a
	}
	return p.Addr()
}

// Trusted says whether a is one of the trusted proxies.
func (id *Identity) Trusted(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	for _, p := range id.TrustedProxies {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// ClientIP is the client behind a connection from remote whose X-Forwarded-For header lines are forwarded. The lines are one
// list, read from the right: the first address that is not a trusted proxy is the client. A list that does not come from a
// trusted proxy is ignored, and an entry that is no address ends the reading: the last address believed so far is the client.
func (id *Identity) ClientIP(remote netip.Addr, forwarded []string) netip.Addr {
	client := remote
	for _, line := range slices.Backward(forwarded) {
		for line != "" {
			if !id.Trusted(client) {
				return client
			}
			rest, entry := "", line
			if i := strings.LastIndexByte(line, ','); i >= 0 {
				rest, entry = line[:i], line[i+1:]
			}
			line = rest
			a, ok := ParseAddr(strings.TrimSpace(entry))
			if !ok {
				return client
			}
			client = a
		}
	}
	return client
}

// ParseAddr reads an address as proxies and logs write it: bare, in brackets, and with or without a port.
func ParseAddr(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a, true
	}
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr(), true
	}
	if len(s) > 2 && s[0] == '[' && s[len(s)-1] == ']' {
		if a, err := netip.ParseAddr(s[1 : len(s)-1]); err == nil && a.Is6() {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// Error is one mistake in a policy.
type Error struct {
	File  string
	Line  int    // 1-based; 0 when the mistake is in no line
	Field string // path to the value, such as rules[2].rate; "" for the file itself
	Msg   string
}

// Error is "file:line: field: message".
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	b.WriteString(": ")
	if e.Field != "" {
		b.WriteString(e.Field)
		b.WriteString(": ")
	}
	b.WriteString(e.Msg)
	return b.String()
}

// The words of a policy file, in the order of their constants.
var (
	layerWords       = []string{"guard", "contract", "route"}
	modeWords        = []string{"enforce", "shadow"}
	consistencyWords = []string{"shared", "local", "lease", "strict"}
	storeLossWords   = []string{"local", "deny", "allow"}
	dimensionWords   = []string{"tenant", "route", "ip", "user", "device"}
)

const headerPrefix = "header:"

func word(words []string, i int) string {
	if i < len(words) {
		return words[i]
	}
	return fmt.Sprintf("unknown(%d)", i)
}

package limits

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // whether a time zone exists must not depend on the machine
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/weirhq/weir/enforcer/bucket"
)

const (
	maxErrors = 100 // mistakes reported at once
	maxTenant = 256 // bytes of a tenant's name

	defaultTenantHeader = "X-App-Key"
	defaultIPv6Prefix   = 64
)

// Parse reads a policy from the text of one file. Every mistake is reported at once, as joined *[Error] values that begin with
// name and a line number. A policy is strict: unknown keys, duplicates, anchors, aliases and tags are mistakes.
//
// A rate is N/PERIOD, where N is a whole number, a decimal or a fraction (10/13/s is ten thirteenths of a token per second; the
// last slash counts) and PERIOD is s, m, h, d or a number of them (15s, 1h30m, 7d). The rate 0 denies everything, the word
// unlimited nothing; both make the burst of no account. A burst is 1 to 1e9 tokens, and where it is not given, as many as the
// rate gives in a second, rounded up. A tenant's own rate and burst each replace that of its plan.
func Parse(name string, data []byte) (*Policy, error) {
	return build([]source{{name, data}})
}

// builder turns files into a policy and collects the mistakes on the way.
type builder struct {
	policy Policy
	errs   []*Error
	said   map[string]place // what may be said once, by field

	plans, tenants []named
	defaultPlan    place
	rules          []ruleText
}

// named is a plan or a tenant as the file has it, before references are resolved.
type named struct {
	name      string
	place     place
	plan      string // of a tenant
	planPlace place
	limit     limitText
	quota     *Quota
	owner     Owner
}

// limitText is a rate and a burst, each of which may be missing or wrong.
type limitText struct {
	rate      bucket.Rate
	perSecond int64 // the rate's tokens in one second, rounded up: the default burst
	deny      bool  // the rate is 0
	unlimited bool
	hasRate   bool // also when the rate is wrong
	burst     int64
	hasBurst  bool // also when the burst is wrong
}

// limit is the limit that a valid rate and burst make.
func (l limitText) limit() bucket.Limit {
	switch {
	case l.unlimited:
		return bucket.Limit{Unlimited: true}
	case l.deny:
		return bucket.Limit{}
	case !l.hasBurst:
		l.burst = max(l.perSecond, 1)
	}
	return bucket.Limit{Rate: l.rate, Burst: l.burst}
}

// over is l with base's values where l says nothing.
func (l limitText) over(base limitText) limitText {
	if !l.hasRate {
		l.rate, l.perSecond, l.deny, l.unlimited, l.hasRate = base.rate, base.perSecond, base.deny, base.unlimited, base.hasRate
	}
	if !l.hasBurst {
		l.burst, l.hasBurst = base.burst, base.hasBurst
	}
	return l
}

// ruleText is a rule as the file has it.
type ruleText struct {
	rule                        Rule
	place                       place
	keyPlace                    place
	routesAt                    []place // of each of rule.Routes
	limit                       limitText
	limitPlace                  place // of the key limit; its zero value when there is none
	consistencyPlace, lossPlace place // of the keys consistency and on_store_loss
	hasLayer                    bool  // a valid one
	hasKey                      bool  // a valid one
}

func build(sources []source) (*Policy, error) {
	b := &builder{said: map[string]place{}}
	b.policy.Identity = Identity{TenantName: defaultTenantHeader, IPv6Prefix: defaultIPv6Prefix}
	first := place{file: sources[0].name, line: 1}
	whole := true // every file could be read, so that what is missing is missing
	for _, s := range sources {
		if root := b.parseYAML(s); root != nil {
			b.file(place{file: s.name}, root)
		} else {
			whole = false
		}
	}
	if whole {
		b.resolve(first)
	}
	if len(b.errs) > 0 {
		return nil, b.joined(sources)
	}
	b.policy.Version = version(&b.policy)
	return &b.policy, nil
}

func (b *builder) fail(at place, format string, args ...any) {
	b.errs = append(b.errs, &Error{File: at.file, Line: at.line, Field: at.field, Msg: fmt.Sprintf(format, args...)})
}

func (b *builder) warn(format string, args ...any) {
	b.policy.warnings = append(b.policy.warnings, fmt.Sprintf(format, args...))
}

// joined is all mistakes in the order of files and lines.
func (b *builder) joined(sources []source) error {
	order := map[string]int{}
	for i, s := range sources {
		order[s.name] = i
	}
	slices.SortStableFunc(b.errs, func(x, y *Error) int {
		return cmp.Or(cmp.Compare(order[x.File], order[y.File]), cmp.Compare(x.Line, y.Line))
	})
	var errs []error
	for i, e := range b.errs {
		if i == maxErrors {
			errs = append(errs, &Error{File: e.File, Line: e.Line, Msg: fmt.Sprintf("and %d more mistakes from here on", len(b.errs)-i)})
			break
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// file reads one file of the policy.
func (b *builder) file(at place, root *yaml.Node) {
	once := map[string]func(place, *yaml.Node){
		"version": func(at place, n *yaml.Node) {
			if n.Kind != yaml.ScalarNode || n.Value != "1" {
				b.fail(at, "want 1, the only version there is, got %s", kind(n))
			}
		},
		"identity": b.identity,
		"routes": func(at place, n *yaml.Node) {
			b.items(at, n, b.route)
		},
		"plans": func(at place, n *yaml.Node) {
			b.entries(at, n, b.plan)
		},
		"tenants": func(at place, n *yaml.Node) {
			b.entries(at, n, b.tenant)
		},
		"default_plan": func(at place, n *yaml.Node) {
			if b.once("default plan", at) {
				b.policy.DefaultPlan, _ = b.name(at, n)
				b.defaultPlan = at
			}
		},
		"rules": func(at place, n *yaml.Node) {
			b.items(at, n, b.rule)
		},
	}
	for name := range once {
		delete(b.said, name) // a file repeats the headings of another
	}
	for field := range b.said {
		if strings.HasPrefix(field, "routes[") || strings.HasPrefix(field, "rules[") {
			delete(b.said, field) // the numbering starts afresh
		}
	}
	b.fields(at, root, once)
	if _, ok := b.said["version"]; !ok {
		at.line = 1
		b.fail(at, "version is missing: the first line should be version: 1")
	}
}

func (b *builder) identity(at place, n *yaml.Node) {
	b.fields(at, n, map[string]func(place, *yaml.Node){
		"tenant": b.tenantSource,
		"trusted_proxies": func(at place, n *yaml.Node) {
			b.items(at, n, func(at place, n *yaml.Node) {
				if s, ok := b.text(at, n); ok {
					if p, err := parsePrefix(s); err != nil {
						b.fail(at, "%v", err)
					} else {
						b.policy.Identity.TrustedProxies = append(b.policy.Identity.TrustedProxies, p)
					}
				}
			})
		},
		"ipv6_prefix": func(at place, n *yaml.Node) {
			if i, ok := b.integer(at, n, 1, 128); ok {
				b.policy.Identity.IPv6Prefix = int(i)
			}
		},
	})
}

// parsePrefix reads a network or a single address.
func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		return p, fmt.Errorf("%q is neither an address nor a network such as 10.0.0.0/8", s)
	case p.Addr().Is4In6():
		return p, fmt.Errorf("%s: write IPv4 networks as IPv4", s)
	case p != p.Masked():
		return p, fmt.Errorf("%s has bits set beyond its prefix: did you mean %s or %s?", s, p.Masked(), p.Addr())
	}
	return p, nil
}

func (b *builder) tenantSource(at place, n *yaml.Node) {
	id := &b.policy.Identity
	if n.Kind == yaml.MappingNode && len(n.Content) != 2 {
		b.fail(at, "want exactly one of header, query, basic, client_ip")
		return
	}
	b.fields(at, n, map[string]func(place, *yaml.Node){
		"header": func(at place, n *yaml.Node) {
			if s, ok := b.header(at, n); ok {
				id.Tenant, id.TenantName = TenantFromHeader, s
			}
		},
		"query": func(at place, n *yaml.Node) {
			s, ok := b.text(at, n)
			if ok && s == "" {
				b.fail(at, "want the name of a query parameter")
			} else if ok {
				id.Tenant, id.TenantName = TenantFromQuery, s
			}
		},
		"basic": func(at place, n *yaml.Node) {
			if _, ok := b.choice(at, n, []string{"user"}); ok {
				id.Tenant, id.TenantName = TenantFromBasic, ""
			}
		},
		"client_ip": func(at place, n *yaml.Node) {
			if _, ok := b.choice(at, n, []string{"true"}); ok {
				id.Tenant, id.TenantName = TenantFromClientIP, ""
			}
		},
		"claim": func(at place, _ *yaml.Node) {
			b.fail(at, "claim is not supported by this version (supported: header, query, basic, client_ip)")
		},
	})
}

// header is the canonical form of a header name.
func (b *builder) header(at place, n *yaml.Node) (string, bool) {
	s, ok := b.text(at, n)
	if ok && !isToken(s) {
		b.fail(at, "%q is not a header name", s)
		return "", false
	}
	return textproto.CanonicalMIMEHeaderKey(s), ok
}

// isToken says whether s is a token of RFC 9110, which header names and methods are.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if (c|0x20 < 'a' || c|0x20 > 'z') && (c < '0' || c > '9') && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return s != "" && len(s) <= 256
}

func (b *builder) route(at place, n *yaml.Node) {
	var r Route
	start := len(b.errs)
	b.fields(at, n, map[string]func(place, *yaml.Node){
		"name": func(at place, n *yaml.Node) {
			s, ok := b.name(at, n)
			switch {
			case ok && s == OtherRoute:
				b.fail(at, "%s is the name of the requests that match no route", OtherRoute)
			case ok && b.once("route "+s, at):
				r.Name = s
			}
		},
		"match": func(at place, n *yaml.Node) {
			b.fields(at, n, map[string]func(place, *yaml.Node){
				"methods": func(at place, n *yaml.Node) {
					b.items(at, n, func(at place, n *yaml.Node) {
						s, ok := b.text(at, n)
						switch {
						case ok && (!isToken(s) || s != strings.ToUpper(s)):
							b.fail(at, "%q is not a method: want one in capitals, such as GET", s)
						case ok:
							r.Methods = append(r.Methods, s)
						}
					})
					if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
						b.fail(at, "no method: leave methods out to match every method")
					}
				},
				"path": func(at place, n *yaml.Node) {
					if s, ok := b.text(at, n); ok {
						var err error
						if r.path, err = parsePath(s); err != nil {
							b.fail(at, "%v", err)
						}
						r.Path = s
					}
				},
			})
			if n.Kind == yaml.MappingNode {
				b.need(at, "path")
			}
		},
	})
	if n.Kind == yaml.MappingNode {
		b.need(at, "name", "match")
	}
	if len(b.errs) == start {
		b.policy.Routes = append(b.policy.Routes, r)
	}
}

// need reports the keys that a mapping lacks.
func (b *builder) need(at place, names ...string) {
	for _, name := range names {
		if _, ok := b.said[at.key(name).field]; !ok {
			b.fail(at, "%s is missing", name)
		}
	}
}

// limitFields are the two keys that make a limit.
func (b *builder) limitFields(l *limitText) map[string]func(place, *yaml.Node) {
	return map[string]func(place, *yaml.Node){
		"rate": func(at place, n *yaml.Node) {
			l.hasRate = true
			s, ok := b.text(at, n)
			if !ok {
				return
			}
			rate, err := parseRate(s)
			if err != nil {
				b.fail(at, "%v", err)
				return
			}
			l.rate, l.perSecond, l.deny, l.unlimited = rate.rate, rate.perSecond, rate.deny, rate.unlimited
		},
		"burst": func(at place, n *yaml.Node) {
			l.hasBurst = true
			if i, ok := b.integer(at, n, 1, bucket.MaxBurst); ok {
				l.burst = i
			}
		},
	}
}

func (b *builder) plan(name string, at place, n *yaml.Node) {
	if !b.once(at.field, at) {
		return
	}
	if !plainName.MatchString(name) || name == Deny {
		b.fail(at, "name %q: want 1 to 64 of A-Z a-z 0-9 _ -, and not %s", name, Deny)
	}
	p := named{name: name, place: at}
	fields := b.limitFields(&p.limit)
	fields["quota"] = func(at place, n *yaml.Node) {
		q := Quota{Timezone: "UTC"}
		b.fields(at, n, map[string]func(place, *yaml.Node){
			"limit": func(at place, n *yaml.Node) {
				q.Limit, _ = b.integer(at, n, 1, math.MaxInt64)
			},
			"per": func(at place, n *yaml.Node) {
				words := []string{"hour", "day", "week", "month"}
				if i, ok := b.choice(at, n, words); ok {
					q.Per = words[i]
				}
			},
			"timezone": func(at place, n *yaml.Node) {
				if s, ok := b.text(at, n); ok {
					if _, err := time.LoadLocation(s); err != nil || s == "" || s == "Local" {
						b.fail(at, "%q is not a time zone such as Europe/Paris", s)
					}
					q.Timezone = s
				}
			},
		})
		if n.Kind == yaml.MappingNode {
			b.need(at, "limit", "per")
		}
		p.quota = &q
	}
	b.fields(at, n, fields)
	if n.Kind == yaml.MappingNode {
		b.need(at, "rate")
	}
	b.plans = append(b.plans, p)
}

func (b *builder) tenant(name string, at place, n *yaml.Node) {
	if !b.once(at.field, at) {
		return
	}
	if name == "" || len(name) > maxTenant || strings.ContainsFunc(name, unicode.IsControl) {
		b.fail(at, "a tenant's name is 1 to %d bytes without control characters", maxTenant)
	}
	t := named{name: name, place: at}
	fields := b.limitFields(&t.limit)
	fields["plan"] = func(at place, n *yaml.Node) {
		t.plan, _ = b.name(at, n)
		t.planPlace = at
	}
	fields["owner"] = func(at place, n *yaml.Node) {
		b.fields(at, n, map[string]func(place, *yaml.Node){
			"webhook": func(at place, n *yaml.Node) {
				if s, ok := b.text(at, n); ok {
					u, err := url.Parse(s)
					if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
						b.fail(at, "want an absolute http or https URL") // which may hold a credential, hence unsaid
						return
					}
					t.owner.Webhook = s
				}
			},
		})
	}
	b.fields(at, n, fields)
	b.tenants = append(b.tenants, t)
}

func (b *builder) rule(at place, n *yaml.Node) {
	r := ruleText{place: at, keyPlace: at}
	fields := b.limitFields(&r.limit)
	fields["name"] = func(at place, n *yaml.Node) {
		if s, ok := b.name(at, n); ok && b.once("rule "+s, at) {
			r.rule.Name = s
		}
	}
	fields["layer"] = func(at place, n *yaml.Node) {
		var i int
		i, r.hasLayer = b.choice(at, n, layerWords)
		r.rule.Layer = Layer(i)
	}
	fields["key"] = func(at place, n *yaml.Node) {
		start := len(b.errs)
		r.keyPlace = at
		b.items(at, n, func(at place, n *yaml.Node) {
			if d, ok := b.dimension(at, n); ok {
				if slices.Contains(r.rule.Key, d) {
					b.fail(at, "duplicate: %s is in the key already", d)
				}
				r.rule.Key = append(r.rule.Key, d)
			}
		})
		r.hasKey = len(b.errs) == start
	}
	fields["routes"] = func(at place, n *yaml.Node) {
		b.items(at, n, func(at place, n *yaml.Node) {
			if s, ok := b.name(at, n); ok {
				if slices.Contains(r.rule.Routes, s) {
					b.fail(at, "duplicate: %s is listed already", s)
				}
				r.rule.Routes, r.routesAt = append(r.rule.Routes, s), append(r.routesAt, at)
			}
		})
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			b.fail(at, "no route: leave routes out to apply to every route")
		}
	}
	fields["limit"] = func(at place, n *yaml.Node) {
		if _, ok := b.choice(at, n, []string{"plan"}); ok {
			r.rule.ByPlan = true
		}
		r.limitPlace = at
	}
	fields["mode"] = func(at place, n *yaml.Node) {
		i, _ := b.choice(at, n, modeWords)
		r.rule.Mode = Mode(i)
	}
	fields["algorithm"] = func(at place, n *yaml.Node) {
		b.choice(at, n, []string{"token-bucket"}, "leaky-bucket", "sliding-window", "fixed-window", "concurrency")
	}
	fields["consistency"] = func(at place, n *yaml.Node) {
		i, _ := b.choice(at, n, consistencyWords)
		r.rule.Consistency = Consistency(i)
		r.consistencyPlace = at
	}
	fields["on_store_loss"] = func(at place, n *yaml.Node) {
		i, _ := b.choice(at, n, storeLossWords)
		r.rule.OnStoreLoss = StoreLoss(i)
		r.lossPlace = at
	}
	b.fields(at, n, fields)
	if n.Kind != yaml.MappingNode {
		return
	}
	b.need(at, "name", "layer")
	if !r.hasLayer || r.rule.Layer != LayerGuard {
		b.need(at, "key")
	}
	b.ruleLimit(&r)
	b.ruleSharing(&r)
	b.rules = append(b.rules, r)
}

// ruleLimit checks how a rule's limit goes with its layer and its key.
func (b *builder) ruleLimit(r *ruleText) {
	hasLimit := r.limitPlace != place{}
	switch {
	case hasLimit && (r.limit.hasRate || r.limit.hasBurst):
		b.fail(r.limitPlace, "limit: plan and a rate or burst of its own: want one of them")
	case !hasLimit && !r.limit.hasRate:
		b.fail(r.place, "rate is missing (or limit: plan)")
	}
	if r.rule.ByPlan && r.hasKey && !slices.Contains(r.rule.Key, Dimension{Kind: ByTenant}) {
		b.fail(r.limitPlace, "limit: plan needs tenant in the key, or tenants of different plans would share a bucket")
	}
	if !hasLimit {
		r.rule.Fixed = r.limit.limit()
	}
	if !r.hasLayer || r.rule.Layer != LayerGuard {
		return
	}
	if len(r.rule.Key) > 0 || len(r.rule.Routes) > 0 {
		b.fail(r.keyPlace, "a guard protects the whole gateway: its key is [] and it has no routes")
	}
	if r.rule.Mode != Enforce {
		b.fail(r.place, "a guard cannot be switched off: its mode must be enforce")
	}
	if r.rule.Fixed.Unlimited {
		b.fail(r.place, "a guard cannot be switched off: its rate must not be unlimited")
	}
}

// ruleSharing checks how the way in which gateways share a rule's limit goes with its layer and its mode.
func (b *builder) ruleSharing(r *ruleText) {
	loss := r.rule.OnStoreLoss
	if r.hasLayer && r.rule.Layer == LayerGuard {
		switch loss {
		case LossAllow:
			b.fail(r.lossPlace, "a guard cannot be switched off: its on_store_loss must be local, not allow")
		case LossDeny:
			b.fail(r.lossPlace, "a guard's on_store_loss must be local: deny would stop all traffic whenever the store is away")
		}
		if r.rule.Consistency == Strict {
			b.fail(r.consistencyPlace, "a guard is asked about every request and must not wait for the network: its consistency cannot be strict")
		}
		return
	}
	if r.rule.Consistency == Local && loss != LossLocal {
		b.fail(r.lossPlace, "a rule with consistency: local needs no store: its on_store_loss %s would have no effect", loss)
	}
	if r.rule.Mode != Shadow {
		return
	}
	if loss != LossLocal {
		b.warn("rule %s is in mode shadow: its on_store_loss has no effect until mode is enforce", r.rule.Name)
	}
	if r.rule.Consistency == Strict {
		b.warn("rule %s is in mode shadow: it is kept by shares, and strict only when mode is enforce", r.rule.Name)
	}
}

func (b *builder) dimension(at place, n *yaml.Node) (Dimension, bool) {
	s, ok := b.text(at, n)
	if !ok {
		return Dimension{}, false
	}
	if h, ok := strings.CutPrefix(s, headerPrefix); ok {
		if !isToken(h) {
			b.fail(at, "%q is not a header name", h)
			return Dimension{}, false
		}
		return Dimension{ByHeader, textproto.CanonicalMIMEHeaderKey(h)}, true
	}
	i := slices.Index(dimensionWords, s)
	if i < 0 {
		b.fail(at, "%q is not one of %s, %sNAME", s, strings.Join(dimensionWords, ", "), headerPrefix)
		return Dimension{}, false
	}
	return Dimension{Kind: DimensionKind(i)}, true
}

// resolve follows the references between the parts of the policy, and checks it as a whole.
func (b *builder) resolve(first place) {
	p := &b.policy
	p.Plans, p.Tenants = map[string]Plan{}, map[string]Tenant{}
	texts := map[string]limitText{}
	for _, t := range b.plans {
		texts[t.name] = t.limit
		p.Plans[t.name] = Plan{Limit: t.limit.limit(), Quota: t.quota}
		if t.quota != nil {
			b.warn("quota of plan %s is recorded, not enforced by this version", t.name)
		}
	}
	if _, ok := p.Plans[p.DefaultPlan]; !ok && p.DefaultPlan != "" && p.DefaultPlan != Deny {
		b.fail(b.defaultPlan, "there is no plan %q", p.DefaultPlan)
	}
	p.defaultLimit = p.Plans[p.DefaultPlan].Limit
	b.resolveTenants(texts)
	b.resolveRules(first)
	if _, ok := b.said["identity.tenant"]; !ok {
		b.warn("identity.tenant is not given: tenants are read from the header %s", defaultTenantHeader)
	}
}

func (b *builder) resolveTenants(plans map[string]limitText) {
	p := &b.policy
	for _, t := range b.tenants {
		if t.plan == "" && t.planPlace == (place{}) {
			if p.DefaultPlan == "" || p.DefaultPlan == Deny {
				b.fail(t.place, "plan is missing, and there is no default_plan to take its place")
			}
			t.plan = p.DefaultPlan
		} else if _, ok := plans[t.plan]; !ok && t.plan != "" {
			b.fail(t.planPlace, "there is no plan %q", t.plan)
		}
		p.Tenants[t.name] = Tenant{Plan: t.plan, Limit: t.limit.over(plans[t.plan]).limit(), Owner: t.owner}
	}
}

func (b *builder) resolveRules(first place) {
	p := &b.policy
	routes := map[string]bool{OtherRoute: true}
	for field := range b.said {
		if name, ok := strings.CutPrefix(field, "route "); ok {
			routes[name] = true
		}
	}
	guard := false
	var byPlan place
	for _, r := range b.rules {
		for i, name := range r.rule.Routes {
			if !routes[name] {
				b.fail(r.routesAt[i], "there is no route %q", name)
			}
		}
		guard = guard || r.rule.Layer == LayerGuard // also when the layer is wrong, which has been reported
		if r.rule.ByPlan && byPlan == (place{}) {
			byPlan = r.limitPlace
		}
		p.Rules = append(p.Rules, r.rule)
		if r.rule.Layer == LayerGuard && r.limit.deny {
			b.warn("guard %s has rate 0: it refuses every request", r.rule.Name)
		}
	}
	slices.SortStableFunc(p.Rules, func(x, y Rule) int { return cmp.Compare(x.Layer, y.Layer) })
	if at, ok := b.said["rules"]; ok {
		first = at
	}
	if !guard {
		b.fail(first, "no rule has layer: guard; there must be one, in mode enforce and with a rate")
	}
	if _, ok := b.said["default plan"]; !ok && byPlan != (place{}) {
		b.fail(byPlan, "default_plan is missing: name the plan of the tenants that have none of their own, or %s", Deny)
	}
	if byPlan == (place{}) && (len(p.Plans) > 0 || p.DefaultPlan == Deny) {
		b.warn("no rule has limit: plan: the plans have no effect")
	}
}

// version is the first 48 bits of SHA-256 over the policy's content.
func version(p *Policy) uint64 {
	content, err := json.Marshal(p) // maps are sorted by key, and Version is still 0
	if err != nil {
		panic(fmt.Sprintf("limits: policy has no JSON form: %v", err))
	}
	sum := sha256.Sum256(content)
	return binary.BigEndian.Uint64(sum[:8]) >> 16
}

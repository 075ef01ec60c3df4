package httpguard

import (
	"encoding/base64"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// Anonymous is the tenant of a request that names none. A policy gives it a plan like any other tenant, or default_plan.
const Anonymous = "anonymous"

// Headers that identify more than the tenant. A caller sets them freely, so a rule by user or device must stand behind one
// that it cannot choose.
const (
	userHeader   = "X-User"
	deviceHeader = "X-Device-Id"
)

// badIdentity says which part of a request's identity cannot be used and why. It never holds the part itself.
type badIdentity struct{ field, why string }

func (e *badIdentity) Error() string { return e.field + " " + e.why }

// tenantOf reads the tenant that id asks for. All spellings of one credential are one tenant: spaces around it are no part of
// it, and neither is the case of an authentication scheme.
func tenantOf(id *limits.Identity, h http.Header, rawQuery, ip string) (string, error) {
	switch id.Tenant {
	case limits.TenantFromQuery:
		return named(queryValue(rawQuery, id.TenantName))
	case limits.TenantFromBasic:
		return named(basicUser(h))
	case limits.TenantFromClientIP:
		return named(ip, nil)
	default:
		if id.TenantName == "Authorization" {
			return named(credential(h))
		}
		return named(headerValue(h, id.TenantName))
	}
}

func named(tenant string, err error) (string, error) {
	if tenant == "" {
		tenant = Anonymous
	}
	return tenant, err
}

// userOf is the user name of HTTP basic authentication, else the header X-User.
func userOf(h http.Header) (string, error) {
	if user, err := basicUser(h); user != "" || err != nil {
		return user, err
	}
	return headerValue(h, userHeader)
}

// headerValue is the one value of a header, "" when there is none. Two different values are refused: the gateway and the
// server behind it might each believe another one.
func headerValue(h http.Header, name string) (string, error) {
	values := h[name]
	if len(values) == 0 {
		return "", nil
	}
	v := trim(values[0])
	for _, other := range values[1:] {
		if trim(other) != v {
			return "", &badIdentity{"header " + name, "is there more than once, with different values"}
		}
	}
	return v, checkText("header "+name, v)
}

// credential is what an Authorization header proves: the token of a bearer, the user of HTTP basic authentication.
func credential(h http.Header) (string, error) {
	v, err := authorization(h)
	if v == "" || err != nil {
		return "", err
	}
	scheme, rest, _ := strings.Cut(v, " ")
	rest = trim(rest)
	switch {
	case strings.EqualFold(scheme, "Basic"):
		return basicUser(h)
	case strings.EqualFold(scheme, "Bearer") && rest != "" && !strings.ContainsAny(rest, " \t,"):
		return rest, checkText("the token of header Authorization", rest)
	}
	return "", &badIdentity{"header Authorization", "is neither Bearer nor Basic with one credential"}
}

// basicUser is the user name of HTTP basic authentication, "" when the request has none.
func basicUser(h http.Header) (string, error) {
	const field = "the user of header Authorization"
	v, err := authorization(h)
	if err != nil {
		return "", err
	}
	scheme, rest, _ := strings.Cut(v, " ")
	if !strings.EqualFold(scheme, "Basic") {
		return "", nil
	}
	b, err := base64.StdEncoding.DecodeString(trim(rest))
	if err != nil {
		return "", &badIdentity{"header Authorization", "has credentials that are not base64"}
	}
	user, _, ok := strings.Cut(string(b), ":")
	if !ok {
		return "", &badIdentity{"header Authorization", "has credentials without a colon"}
	}
	user = trim(user)
	return user, checkText(field, user)
}

// authorization is the header Authorization. Its length is not limited here: only the part that becomes a name is.
func authorization(h http.Header) (string, error) {
	values := h["Authorization"]
	if len(values) > 1 {
		return "", &badIdentity{"header Authorization", "is there more than once"}
	}
	if len(values) == 0 {
		return "", nil
	}
	return trim(values[0]), nil
}

// queryValue is the one value of a query parameter, "" when there is none; see [headerValue].
func queryValue(raw, name string) (string, error) {
	var v string
	found := false
	for raw != "" {
		var pair string
		pair, raw, _ = strings.Cut(raw, "&")
		key, value, _ := strings.Cut(pair, "=")
		if k, err := url.QueryUnescape(key); err != nil || k != name {
			continue
		}
		value, err := url.QueryUnescape(value)
		if err != nil {
			return "", &badIdentity{"query parameter " + name, "has a malformed escape"}
		}
		if value = trim(value); found && value != v {
			return "", &badIdentity{"query parameter " + name, "is there more than once, with different values"}
		}
		v, found = value, true
	}
	return v, checkText("query parameter "+name, v)
}

// trim takes away the spaces around a value that servers ignore.
func trim(s string) string { return strings.Trim(s, " \t") }

// checkText refuses what cannot be a name in a report, a log or a key.
func checkText(field, s string) error {
	if len(s) > schemas.MaxTextBytes {
		return &badIdentity{field, "is longer than 256 bytes"}
	}
	if !utf8.ValidString(s) {
		return &badIdentity{field, "is not valid UTF-8"}
	}
	if strings.ContainsFunc(s, unicode.IsControl) {
		return &badIdentity{field, "has control characters"}
	}
	return nil
}

// peer is the address at the other end of the connection, the zero Addr when there is none (a Unix socket).
func peer(remote string) netip.Addr {
	a, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap().WithZone("")
}

// redacted is an address without the part that tells one person from another: an IPv4 /24 or an IPv6 /48.
func redacted(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	a = a.Unmap().WithZone("")
	bits := 48
	if a.Is4() {
		bits = 24
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return ""
	}
	return p.String()
}

package httpguard

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
)

// Problem types of a refusal, from the registry that the RateLimit draft adds to.
const (
	quotaExceeded   = "https://iana.org/assignments/http-problem-types#quota-exceeded"
	reducedCapacity = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
)

// problem is an answer of RFC 9457. All of its text is ASCII, so that it can also travel in a header.
type problem struct {
	Type         string   `json:"type"`
	Title        string   `json:"title"`
	Status       int      `json:"status"`
	Detail       string   `json:"detail"`
	Violated     []string `json:"violated-policies,omitempty"`
	RetryAfterMS int64    `json:"retry_after_ms,omitempty"`
	Instance     string   `json:"instance"`
}

// newInstance names one answer, for a caller to quote and an operator to find.
func newInstance() string {
	var id [16]byte
	hi, lo := rand.Uint64(), rand.Uint64()
	for i := range 8 {
		id[i], id[8+i] = byte(hi>>(8*i)), byte(lo>>(8*i))
	}
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // UUID version 4
	text := make([]byte, 0, 45)
	text = append(text, "urn:uuid:"...)
	for i, part := range [][]byte{id[:4], id[4:6], id[6:8], id[8:10], id[10:]} {
		if i > 0 {
			text = append(text, '-')
		}
		text = hex.AppendEncode(text, part)
	}
	return string(text)
}

// writeProblem answers with p. What headers are set already stay. The body is left out for HEAD.
func writeProblem(w http.ResponseWriter, r *http.Request, status int, p *problem) {
	body, err := json.Marshal(p)
	if err != nil {
		panic("httpguard: a problem does not encode: " + err.Error()) // strings and numbers always do
	}
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if status != p.Status {
		// A server such as nginx cannot pass a status and a body of a check on, but it can pass headers on.
		h.Set(statusHeader, strconv.Itoa(p.Status))
		h.Set(problemHeader, string(body))
	}
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // a caller who has gone needs no answer
	}
}

// refusal is the answer to a request that rule refused. The words are for the caller: what limit, whose, when to come back.
func refusal(rule *limits.Rule, l bucket.Limit, wait time.Duration) *problem {
	p := &problem{
		Type:         quotaExceeded,
		Title:        "Request quota exceeded",
		Status:       http.StatusTooManyRequests,
		Violated:     []string{rule.Name},
		RetryAfterMS: retryMillis(wait),
		Instance:     newInstance(),
	}
	if rule.Layer == limits.LayerGuard {
		p.Type, p.Title, p.Status = reducedCapacity, "Temporarily reduced capacity", http.StatusServiceUnavailable
	}
	if wait == bucket.Never {
		p.Detail = whose(rule) + " does not admit this request, now or later. Waiting does not help; ask the operator of this service for a limit."
		return p
	}
	p.Detail = fmt.Sprintf("%s of %s (bursts of up to %d) is used up. Try again in %s.", whose(rule), rateWords(l.Rate), l.Burst, waitWords(retrySeconds(wait)))
	return p
}

// outage is the answer to a request that rule refused because it cannot be counted now. The caller has used up nothing.
func outage(rule *limits.Rule, wait time.Duration) *problem {
	return &problem{
		Type:   reducedCapacity,
		Title:  "Temporarily reduced capacity",
		Status: http.StatusServiceUnavailable,
		Detail: fmt.Sprintf("%s cannot be counted: the gateways of this service have lost the store that they share it by, and admit nothing under it meanwhile. "+
			"It is not used up. Try again in %s.", whose(rule), waitWords(retrySeconds(wait))),
		RetryAfterMS: retryMillis(wait),
		Instance:     newInstance(),
	}
}

// whose names a rule's limit as the caller knows it.
func whose(rule *limits.Rule) string {
	if rule.Layer == limits.LayerGuard {
		return "The limit that protects this service as a whole"
	}
	on := ""
	if len(rule.Routes) > 0 || keyed(rule, limits.ByRoute) {
		on = " on this interface"
	}
	switch {
	case rule.ByPlan || keyed(rule, limits.ByTenant):
		return "Your limit" + on
	case keyed(rule, limits.ByUser):
		return "The limit of this user" + on
	case keyed(rule, limits.ByDevice):
		return "The limit of this device" + on
	case keyed(rule, limits.ByIP):
		return "The limit of your address" + on
	case keyed(rule, limits.ByHeader):
		return "The limit of callers like this one" + on
	}
	return "The limit" + on + " that all callers share"
}

func keyed(rule *limits.Rule, kind limits.DimensionKind) bool {
	for _, d := range rule.Key {
		if d.Kind == kind {
			return true
		}
	}
	return false
}

// rateWords is a rate as a person would say it, exact where a whole number says it.
func rateWords(r bucket.Rate) string {
	if r.Num == 0 {
		return "0 requests"
	}
	units := []struct {
		name string
		per  time.Duration
	}{{"second", time.Second}, {"minute", time.Minute}, {"hour", time.Hour}, {"day", 24 * time.Hour}}
	for _, u := range units {
		if n, rest, ok := perUnit(r, u.per); ok && n > 0 && rest == 0 {
			return plural(n, "request") + " per " + u.name
		}
	}
	if r.Den%r.Num == 0 {
		for i := len(units) - 1; i >= 0; i-- {
			if gap, per := r.Den/r.Num, uint64(units[i].per); gap%per == 0 {
				return "1 request every " + plural(gap/per, units[i].name)
			}
		}
	}
	perSecond := float64(r.Num) / float64(r.Den) * float64(time.Second)
	for _, u := range units {
		if n := perSecond * u.per.Seconds(); n >= 1 {
			return fmt.Sprintf("about %.4g requests per %s", n, u.name)
		}
	}
	return fmt.Sprintf("about %.4g requests per day", perSecond*24*60*60)
}

// perUnit is the number of tokens that come back in per, and what is left of the next one.
func perUnit(r bucket.Rate, per time.Duration) (n, rest uint64, ok bool) {
	hi, lo := bits.Mul64(r.Num, uint64(per))
	if hi >= r.Den {
		return 0, 0, false
	}
	n, rest = bits.Div64(hi, lo, r.Den)
	return n, rest, true
}

// waitWords is a time of whole seconds as a person would say it. It is never less than the seconds.
func waitWords(s int64) string {
	switch {
	case s < 120:
		return plural(uint64(s), "second")
	case s < 2*60*60:
		return plural(uint64(s+59)/60, "minute")
	case s < 48*60*60:
		return plural(uint64(s+3599)/3600, "hour")
	}
	return plural(uint64(s+86399)/86400, "day")
}

func plural(n uint64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.FormatUint(n, 10) + " " + what + "s"
}

// badRequest is the answer to a request that does not say who it is from in a way that can be used.
func badRequest(err error) *problem {
	return &problem{
		Type:     "about:blank",
		Title:    "Bad Request",
		Status:   http.StatusBadRequest,
		Detail:   "This request cannot be attributed to a caller: " + err.Error() + ".",
		Instance: newInstance(),
	}
}

// noPolicy is the answer of a gateway that has no policy to go by.
func noPolicy() *problem {
	return &problem{
		Type:         reducedCapacity,
		Title:        "Temporarily reduced capacity",
		Status:       http.StatusServiceUnavailable,
		Detail:       "This gateway has no limits to go by yet. Try again in 1 second.",
		RetryAfterMS: 1000,
		Instance:     newInstance(),
	}
}

// Package schemas is weir's vocabulary: the messages that its parts exchange, their wire forms and their subjects.
package schemas

import (
	"encoding/hex"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Bounds of a report. What is outside goes to the dead-letter stream with its reason.
const (
	MaxReportBytes = 1 << 20             // a body of more is refused
	MaxTextBytes   = 256                 // tenant, route, rule, key and other texts, which have no control characters
	MaxCount       = math.MaxInt64 >> 10 // tokens of one bucket, reports of a boot
	MaxAhead       = 24 * time.Hour      // a timestamp may be this far after arrival
	MaxBehind      = 366 * 24 * time.Hour
)

// Bounds of what the usage of one report adds up to. Sums of usage are 64 bits wide wherever they are kept, and one that wraps lowers what
// it counts: whoever can publish as a gateway could have another tenant's bill vanish. Within these bounds 1.8 billion reports of
// requests, or 180 million of tokens, make a sum wrap, and half of them make it negative for all to see; the history, which takes
// some ten thousand reports a second at best, would do nothing else for two days, or five hours. A gateway that has more to say says it in
// several reports, as ours do with what an outage gathers; one report is a million requests a second for three hours, or 100 Gbit/s for eight
// seconds where tokens are bytes.
const (
	MaxReportRequests = 10_000_000_000  // allowed and rejected
	MaxReportCost     = 100_000_000_000 // tokens asked for
)

// Report is one sealed flush of one gateway. (Gateway, Boot, Seq) names it for ever, and its content never changes.
type Report struct {
	Gateway       string      `json:"gateway,omitempty"` // from the subject; a body that names another is refused
	Boot          string      `json:"boot"`              // one process life of the gateway, unguessable
	Seq           uint64      `json:"seq"`               // counts the reports of a boot from 1, without gaps
	PolicyVersion uint64      `json:"policy_version,omitempty"`
	SealedAt      time.Time   `json:"sealed_at,omitzero"` // the gateway's wall clock
	Usage         []Usage     `json:"usage,omitempty"`
	Tokens        []Tokens    `json:"tokens,omitempty"`
	Rejections    []Rejection `json:"rejections,omitempty"`
}

// Usage is what one gateway saw for one tenant, route and outcome. Every request is in exactly one Usage.
type Usage struct {
	Time     time.Time `json:"ts"` // of the first request counted, by the gateway's wall clock
	Tenant   string    `json:"tenant"`
	Route    string    `json:"route"`
	Rule     string    `json:"rule,omitempty"`  // the refusing rule, empty when allowed
	Layer    string    `json:"layer,omitempty"` // the refusing rule's layer, empty when allowed
	Allowed  uint64    `json:"allowed,omitempty"`
	Rejected uint64    `json:"rejected,omitempty"`
	Cost     uint64    `json:"cost,omitempty"` // tokens asked for by these requests, refused ones too; absent means one each, and without requests there are none
}

// Tokens is one bucket in one flush: the curve of its level, and what the centre needs to divide its limit.
type Tokens struct {
	Rule           string        `json:"rule"`
	Layer          string        `json:"layer,omitempty"`
	Key            string        `json:"key"`
	Tenant         string        `json:"tenant,omitempty"` // empty where the key has no tenant
	Mode           string        `json:"mode,omitempty"`   // enforce or shadow
	RateNanos      int64         `json:"rate_nanos"`       // enforced here, in billionths of a token per second; -1 is unlimited
	Capacity       int64         `json:"capacity"`         // enforced here, in tokens
	LimitRateNanos int64         `json:"limit_rate_nanos"` // the whole limit that all gateways share
	LimitBurst     int64         `json:"limit_burst"`
	Taken          uint64        `json:"taken,omitempty"`   // since this bucket's last report
	Refused        uint64        `json:"refused,omitempty"` // tokens asked for and refused since then
	Cum            uint64        `json:"cum"`               // all tokens taken in this incarnation
	Incarnation    uint32        `json:"incarnation,omitempty"`
	TokensMin      int64         `json:"tokens_min"`
	TokensLast     int64         `json:"tokens_last"`
	Window         time.Duration `json:"window_ns"`             // time in which Taken and Refused came
	Granted        uint64        `json:"granted,omitempty"`     // sum of the grants that this bucket has taken from the centre
	Consistency    string        `json:"consistency,omitempty"` // shared (or empty), lease, strict or local
}

// Rejection is one sampled refusal, redacted at the gateway: no query, no full address, no credential.
type Rejection struct {
	Time         time.Time `json:"ts"`
	Tenant       string    `json:"tenant"`
	Route        string    `json:"route"`
	Rule         string    `json:"rule"`
	Layer        string    `json:"layer,omitempty"`
	Method       string    `json:"method,omitempty"`
	Path         string    `json:"path,omitempty"`
	Client       string    `json:"client,omitempty"` // IPv4 /24 or IPv6 /48
	RetryAfterMS int64     `json:"retry_after_ms,omitempty"`
	Instance     string    `json:"instance,omitempty"` // the id that the caller was given
}

// Refusal says why a message was not taken. Reason is one of a small set and names the dead-letter subject.
type Refusal struct {
	Reason string // malformed, invalid, time, size, gateway, subject or refused
	Field  string // path of the field, empty for the whole body
	Detail string
}

func (r *Refusal) Error() string {
	if r.Field == "" {
		return r.Reason + ": " + r.Detail
	}
	return r.Reason + ": " + r.Field + ": " + r.Detail
}

// Reasons of a Refusal.
const (
	ReasonMalformed = "malformed" // the body cannot be decoded
	ReasonInvalid   = "invalid"   // a field is out of its range
	ReasonTime      = "time"      // a timestamp is implausible
	ReasonSize      = "size"      // the body is larger than MaxReportBytes
	ReasonGateway   = "gateway"   // the body names another gateway than the subject
	ReasonSubject   = "subject"   // the subject is not one of weir's
	ReasonRefused   = "refused"   // it can be read, and the history would not take it
)

func invalid(field, format string, args ...any) error {
	return &Refusal{Reason: ReasonInvalid, Field: field, Detail: fmt.Sprintf(format, args...)}
}

// Validate checks r against the bounds, at the time it arrived (the stream's clock, not the gateway's).
func (r *Report) Validate(arrived time.Time) error {
	if err := ValidName(r.Boot); err != nil {
		return invalid("boot", "%v", err)
	}
	if r.Seq == 0 {
		return invalid("seq", "is 0 or missing, want 1 or more")
	}
	if r.Seq > MaxCount { // nobody has sealed so many
		return invalid("seq", "is %d, want at most %d", r.Seq, uint64(MaxCount))
	}
	var requests, cost uint64
	for i := range r.Usage {
		if r.Usage[i].validate("", arrived) != nil { // its path only where it is wanted: this is most of a history's input
			return r.Usage[i].validate(fmt.Sprintf("usage[%d]", i), arrived)
		}
		requests += r.Usage[i].Allowed + r.Usage[i].Rejected // of entries within their own bounds: this cannot wrap
		cost += r.Usage[i].Cost
		if requests > MaxReportRequests {
			return invalid(fmt.Sprintf("usage[%d]", i), "brings the requests of the report to %d, want at most %d in one", requests, uint64(MaxReportRequests))
		}
		if cost > MaxReportCost {
			return invalid(fmt.Sprintf("usage[%d].cost", i), "brings the cost of the report to %d, want at most %d in one", cost, uint64(MaxReportCost))
		}
	}
	for i := range r.Tokens {
		if err := r.Tokens[i].validate(fmt.Sprintf("tokens[%d]", i)); err != nil {
			return err
		}
	}
	for i := range r.Rejections {
		if err := r.Rejections[i].validate(fmt.Sprintf("rejections[%d]", i), arrived); err != nil {
			return err
		}
	}
	return nil
}

func (u *Usage) validate(at string, arrived time.Time) error {
	if err := validTime(at+".ts", u.Time, arrived); err != nil {
		return err
	}
	if err := validTexts(at, "tenant", u.Tenant, "route", u.Route, "rule", u.Rule, "layer", u.Layer); err != nil {
		return err
	}
	if u.Rejected > 0 && u.Rule == "" {
		return invalid(at+".rule", "is missing though %d were rejected", u.Rejected)
	}
	if u.Cost > 0 && u.Allowed == 0 && u.Rejected == 0 { // it would be charged, and be in no count of requests
		return invalid(at+".cost", "is %d, of no request", u.Cost)
	}
	return validCounts(at, count{"allowed", u.Allowed, MaxReportRequests}, count{"rejected", u.Rejected, MaxReportRequests}, count{"cost", u.Cost, MaxReportCost})
}

func (t *Tokens) validate(at string) error {
	if t.Rule == "" {
		return invalid(at+".rule", "is missing")
	}
	if t.Mode != "" && t.Mode != "enforce" && t.Mode != "shadow" {
		return invalid(at+".mode", "is %.40q, want enforce or shadow", t.Mode)
	}
	switch t.Consistency {
	case "", "shared", "lease", "strict", "local":
	default:
		return invalid(at+".consistency", "is %.40q, want shared, lease, strict or local", t.Consistency)
	}
	if t.RateNanos < -1 || t.LimitRateNanos < -1 {
		return invalid(at+".rate_nanos", "is negative")
	}
	if t.Capacity < 0 || t.LimitBurst < 0 {
		return invalid(at+".capacity", "is negative")
	}
	if t.Window < 0 {
		return invalid(at+".window_ns", "is negative")
	}
	if err := validTexts(at, "rule", t.Rule, "key", t.Key, "tenant", t.Tenant, "layer", t.Layer); err != nil {
		return err
	}
	if err := validTexts(at, "key", unescaped(t.Key)); err != nil { // what a gateway that is given this key reads in it
		return err
	}
	return validCounts(at, count{"taken", t.Taken, MaxCount}, count{"refused", t.Refused, MaxCount}, count{"cum", t.Cum, MaxCount}, count{"granted", t.Granted, MaxCount})
}

func (j *Rejection) validate(at string, arrived time.Time) error {
	if err := validTime(at+".ts", j.Time, arrived); err != nil {
		return err
	}
	return validTexts(at, "tenant", j.Tenant, "route", j.Route, "rule", j.Rule, "layer", j.Layer,
		"method", j.Method, "path", j.Path, "client", j.Client, "instance", j.Instance)
}

// validTime keeps a wrong clock or a wrong unit from becoming a plausible wrong date.
func validTime(field string, ts, arrived time.Time) error {
	switch d := ts.Sub(arrived); {
	case ts.IsZero():
		return &Refusal{Reason: ReasonTime, Field: field, Detail: "is missing"}
	case d > MaxAhead:
		return &Refusal{Reason: ReasonTime, Field: field, Detail: fmt.Sprintf("is %s, more than %s after its arrival", ts.UTC().Format(time.RFC3339Nano), MaxAhead)}
	case d < -MaxBehind:
		return &Refusal{Reason: ReasonTime, Field: field, Detail: fmt.Sprintf("is %s, more than %d days before its arrival", ts.UTC().Format(time.RFC3339Nano), int(MaxBehind.Hours()/24))}
	}
	return nil
}

func validTexts(at string, pairs ...string) error {
	for i := 0; i < len(pairs); i += 2 {
		switch s := pairs[i+1]; {
		case len(s) > MaxTextBytes:
			return invalid(at+"."+pairs[i], "has %d bytes, want at most %d", len(s), MaxTextBytes)
		case !utf8.ValidString(s):
			return invalid(at+"."+pairs[i], "is not valid UTF-8")
		case strings.ContainsFunc(s, unicode.IsControl):
			return invalid(at+"."+pairs[i], "has control characters")
		}
	}
	return nil
}

// unescaped is a key with its escapes (%XX) resolved.
func unescaped(key string) string {
	if !strings.Contains(key, "%") {
		return key
	}
	b := make([]byte, 0, len(key))
	for i := 0; i < len(key); i++ {
		if key[i] == '%' && i+2 < len(key) {
			if c, err := hex.DecodeString(key[i+1 : i+3]); err == nil {
				b = append(b, c[0])
				i += 2
				continue
			}
		}
		b = append(b, key[i])
	}
	return string(b)
}

type count struct {
	field   string
	n, most uint64
}

func validCounts(at string, counts ...count) error {
	for _, c := range counts {
		if c.n > c.most {
			return invalid(at+"."+c.field, "is %d, want at most %d", c.n, c.most)
		}
	}
	return nil
}

// Requests is the number of requests that r accounts for, of a valid report at most MaxReportRequests.
func (r *Report) Requests() uint64 {
	var n uint64
	for i := range r.Usage {
		n += r.Usage[i].Allowed + r.Usage[i].Rejected
	}
	return n
}

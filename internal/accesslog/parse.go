package accesslog

import (
	"bytes"
	"encoding/json"
	"math/big"
	"regexp"
	"strconv"
	"time"
)

// The time of Common Log Format. A fraction of a second may follow the seconds.
const commonTime = "02/Jan/2006:15:04:05 -0700"

// parseCommon reads
//
//	CLIENT IDENT USER [TIME] "METHOD URI HTTP/VERSION" STATUS SIZE "REFERER" "AGENT"
//
// of which Common Log Format has all up to SIZE. Whatever follows the request may be missing or broken, its closing quote too.
func (r *Reader) parseCommon(line []byte) (Entry, string) {
	head, rest, at, ok := r.splitTime(line)
	if !ok {
		return Entry{}, "no [time] as in Common Log Format, and no JSON"
	}
	if !inRange(at) {
		return Entry{}, "time is not from 1970 to 2261"
	}
	client, head, _ := bytes.Cut(bytes.TrimLeft(head, " "), []byte(" "))
	_, user, ok := bytes.Cut(head, []byte(" ")) // a user name may hold spaces
	if !ok {
		return Entry{}, "want a client, an identity and a user before the time"
	}
	request, rest, ok := quoted(bytes.TrimLeft(rest, " "))
	if !ok {
		return Entry{}, "no request in quotes after the time"
	}
	method, uri, ok := splitRequest(request)
	if !ok {
		return Entry{}, "request is not a method and a path"
	}
	e := Entry{Time: at, Client: r.field(client), User: r.field(user), Method: r.intern(method), URI: r.intern(uri)}
	status, rest, _ := bytes.Cut(bytes.TrimLeft(rest, " "), []byte(" "))
	if n, err := strconv.ParseUint(string(status), 10, 10); err == nil {
		e.Status = int(n)
	}
	_, rest, _ = bytes.Cut(rest, []byte(" ")) // the size
	if referer, rest, ok := quoted(bytes.TrimLeft(rest, " ")); ok {
		e.Referer = r.field(referer)
		if agent, _, ok := quoted(bytes.TrimLeft(rest, " ")); ok {
			e.Agent = r.field(agent)
		}
	}
	return e, ""
}

// splitTime splits a line around the first brackets that hold a time. A user name may hold brackets, too.
func (r *Reader) splitTime(line []byte) (head, rest []byte, at time.Time, ok bool) {
	for from := 0; ; {
		i := bytes.Index(line[from:], []byte(" ["))
		if i < 0 {
			return nil, nil, at, false
		}
		start := from + i + 2
		n := bytes.IndexByte(line[start:], ']')
		if n < 0 {
			return nil, nil, at, false
		}
		if at, ok = r.commonTime(line[start : start+n]); ok {
			return line[:start-2], line[start+n+1:], at, true
		}
		from = start
	}
}

func (r *Reader) commonTime(text []byte) (time.Time, bool) {
	if len(text) > 64 {
		return time.Time{}, false
	}
	if bytes.Equal(text, r.lastTime) {
		return r.last, true
	}
	t, err := time.Parse(commonTime, string(text))
	if err != nil {
		if t, err = time.Parse(time.RFC3339Nano, string(text)); err != nil {
			return time.Time{}, false
		}
	}
	r.lastTime, r.last = append(r.lastTime[:0], text...), t.UTC()
	return r.last, true
}

// field is the text of a field, "" for the dash that stands for none.
func (r *Reader) field(b []byte) string {
	if b = bytes.TrimSpace(b); len(b) == 1 && b[0] == '-' {
		return ""
	}
	return r.intern(b)
}

// quoted is the text in the quotes that b starts with, its escapes resolved, and what follows. A closing quote that is missing
// stands at the end of the line.
func quoted(b []byte) (text, rest []byte, ok bool) {
	if len(b) == 0 || b[0] != '"' {
		return nil, b, false
	}
	b = b[1:]
	escaped := false
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '\\':
			escaped = true
			i++
		case '"':
			text, rest = b[:i], b[i+1:]
			if escaped {
				text = unescape(text)
			}
			return text, rest, true
		}
	}
	if escaped {
		b = unescape(b)
	}
	return b, nil, true
}

// unescape resolves the escapes that servers write: \" \\ \n \r \t \v \xhh. Others stay as they are.
func unescape(b []byte) []byte {
	out := make([]byte, 0, len(b))
	for i := 0; i < len(b); i++ {
		if b[i] != '\\' || i+1 == len(b) {
			out = append(out, b[i])
			continue
		}
		i++
		switch c := b[i]; c {
		case '"', '\\':
			out = append(out, c)
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'v':
			out = append(out, '\v')
		case 'x':
			if i+2 < len(b) {
				if n, err := strconv.ParseUint(string(b[i+1:i+3]), 16, 8); err == nil {
					out = append(out, byte(n))
					i += 2
					continue
				}
			}
			out = append(out, '\\', 'x')
		default:
			out = append(out, '\\', c)
		}
	}
	return out
}

// splitRequest splits a request line. The URI may hold spaces, and its protocol may be missing (HTTP/0.9) or run into what
// followed a lost quote.
func splitRequest(b []byte) (method, uri []byte, ok bool) {
	method, uri, ok = bytes.Cut(b, []byte(" "))
	if !ok || len(method) == 0 || len(method) > 64 {
		return nil, nil, false
	}
	for _, c := range method {
		if c|0x20 < 'a' || c|0x20 > 'z' {
			if c != '-' && c != '_' {
				return nil, nil, false
			}
		}
	}
	if i := bytes.LastIndex(uri, []byte(" HTTP/")); i >= 0 {
		uri = uri[:i]
	} else {
		uri, _, _ = bytes.Cut(uri, []byte(" "))
	}
	uri = bytes.TrimSpace(uri)
	return method, uri, len(uri) > 0
}

// jsonLine is a request as one line of JSON. Of two spellings of a field, the first one wins. Other fields are ignored.
type jsonLine struct {
	TS      json.RawMessage   `json:"ts"` // RFC 3339, or seconds since 1970 with any fraction
	Time    json.RawMessage   `json:"time"`
	IP      string            `json:"ip"`
	Client  string            `json:"client"`
	Method  string            `json:"method"`
	Path    string            `json:"path"` // with or without a query string
	URI     string            `json:"uri"`
	Tenant  string            `json:"tenant"`
	User    string            `json:"user"`
	Device  string            `json:"device"`
	Status  json.Number       `json:"status"`
	Headers map[string]string `json:"headers"`
}

func (r *Reader) parseJSON(line []byte) (Entry, string) {
	var j jsonLine
	if err := json.Unmarshal(line, &j); err != nil {
		return Entry{}, "not valid JSON: " + err.Error()
	}
	when := j.TS
	if len(when) == 0 {
		when = j.Time
	}
	at, reason := jsonTime(when)
	if reason != "" {
		return Entry{}, reason
	}
	e := Entry{Time: at, Client: j.IP, User: j.User, Tenant: j.Tenant, Device: j.Device, Method: j.Method, URI: j.Path, headers: canonicalHeaders(j.Headers)}
	if e.Client == "" {
		e.Client = j.Client
	}
	if e.URI == "" {
		e.URI = j.URI
	}
	if e.URI == "" {
		return Entry{}, "neither path nor uri"
	}
	if n, err := strconv.ParseUint(j.Status.String(), 10, 10); err == nil {
		e.Status = int(n)
	}
	for _, s := range []*string{&e.Client, &e.User, &e.Tenant, &e.Device, &e.Method, &e.URI} {
		*s = r.intern([]byte(*s))
	}
	return e, ""
}

// unixTime is a number of seconds, small enough to be counted exactly.
var unixTime = regexp.MustCompile(`^\d{1,15}(\.\d{1,30})?([eE][+-]?\d{1,2})?$`)

// jsonTime reads a time, or says why it is none.
func jsonTime(raw json.RawMessage) (time.Time, string) {
	if len(raw) == 0 {
		return time.Time{}, "neither ts nor time"
	}
	text := string(raw)
	if raw[0] == '"' {
		if err := json.Unmarshal(raw, &text); err != nil {
			return time.Time{}, "time is not a text"
		}
		if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
			if !inRange(t) {
				return time.Time{}, "time is not from 1970 to 2261"
			}
			return t.UTC(), ""
		}
	}
	if !unixTime.MatchString(text) {
		return time.Time{}, "time is neither RFC 3339 nor seconds since 1970"
	}
	seconds, _ := new(big.Rat).SetString(text)
	ns := new(big.Int).Mul(seconds.Num(), big.NewInt(1e9))
	ns.Quo(ns, seconds.Denom())
	if !ns.IsInt64() || !inRange(time.Unix(0, ns.Int64())) {
		return time.Time{}, "time is not from 1970 to 2261, in seconds"
	}
	return time.Unix(0, ns.Int64()).UTC(), ""
}

package enforcer

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"unicode/utf8"
	"unsafe"

	"github.com/weirhq/weir/limits"
)

// MaxKeyBytes is the longest key, as text. A longer one is replaced by '#' and the first 128 bits of its SHA-256, which is the
// same on every gateway. It equals schemas.MaxTextBytes.
const MaxKeyBytes = 256

// A key's text is its values joined by '|'. In a value '%', '|', control characters and bytes that are no UTF-8 are written
// %XX, and so is a '#' that would be the first character of the text. Text and values map one to one, so that keys of several
// parts never collide and a throttle update finds the bucket that a report named.

// value returns the part of a key that q has for one dimension.
func (q *Request) value(d limits.Dimension) string {
	switch d.Kind {
	case limits.ByTenant:
		return q.Tenant
	case limits.ByRoute:
		return q.Route
	case limits.ByIP:
		return q.IP
	case limits.ByUser:
		return q.User
	case limits.ByDevice:
		return q.Device
	}
	if q.Header == nil {
		return ""
	}
	return q.Header(d.Header)
}

// shortKey is a number of bytes that stays within MaxKeyBytes however it is escaped.
const shortKey = MaxKeyBytes/3 - 8

// hash returns the two halves of the fingerprint of q's key under r. Each value is hashed on its own, with the hash of what went
// before as its seed, so that the place where one ends and the next begins counts. The first seeds are the rule's.
func (e *Enforcer) hash(r *rule, q *Request) (h uint64, h2 uint32) {
	a, b, size := r.seed, r.seed2, 0
	for i := range r.dims {
		s := q.value(r.dims[i])
		size += len(s)
		a, b = hashString(a, s), hashString(b, s)
	}
	if size > shortKey {
		return e.hashLong(r, q, a, b)
	}
	return a, half(b)
}

// fieldOf is where Request has the value of a dimension that is no header.
var fieldOf = [...]uintptr{
	limits.ByTenant: unsafe.Offsetof(Request{}.Tenant),
	limits.ByRoute:  unsafe.Offsetof(Request{}.Route),
	limits.ByIP:     unsafe.Offsetof(Request{}.IP),
	limits.ByUser:   unsafe.Offsetof(Request{}.User),
	limits.ByDevice: unsafe.Offsetof(Request{}.Device),
}

// only returns the one part of q's key, if r is plain.
func (r *rule) only(q *Request) string {
	return *(*string)(unsafe.Add(unsafe.Pointer(q), r.field))
}

// half is the second half of a fingerprint, as slot.word has it.
func half(b uint64) uint32 { return uint32(b>>32) &^ flags }

// hashLong sees to keys that may be too long for their text.
func (e *Enforcer) hashLong(r *rule, q *Request, a, b uint64) (uint64, uint32) {
	var buf [MaxKeyBytes + 64]byte
	text := appendKey(buf[:0], r.dims, q)
	if text[0] == '#' {
		return e.hashText(r, string(text))
	}
	return a, half(b)
}

// hashText is hash for a key of which only the digest is known.
func (e *Enforcer) hashText(r *rule, text string) (uint64, uint32) {
	return ^hashString(r.seed, text), half(^hashString(r.seed2, text))
}

// appendKey appends the text of q's key.
func appendKey(b []byte, dims []limits.Dimension, q *Request) []byte {
	start := len(b)
	for i := range dims {
		if i > 0 {
			b = append(b, '|')
		}
		s := q.value(dims[i])
		if len(s) > MaxKeyBytes {
			return append(b[:start], digest(dims, q)...)
		}
		b = appendEscaped(b, s, len(b) == start)
	}
	if len(b)-start > MaxKeyBytes {
		return append(b[:start], digest(dims, q)...)
	}
	return b
}

func digest(dims []limits.Dimension, q *Request) string {
	h := sha256.New()
	for i := range dims {
		s := q.value(dims[i])
		size := len(s)
		h.Write([]byte{byte(size), byte(size >> 8), byte(size >> 16), byte(size >> 24)})
		h.Write([]byte(s))
	}
	return "#" + hex.EncodeToString(h.Sum(nil)[:16])
}

func appendEscaped(b []byte, s string, first bool) []byte {
	const digits = "0123456789ABCDEF"
	for i := 0; i < len(s); {
		c := s[i]
		size := 1
		plain := c >= 0x20 && c < 0x7f && c != '%' && c != '|' && (c != '#' || !first || i > 0)
		if c >= utf8.RuneSelf {
			var r rune
			r, size = utf8.DecodeRuneInString(s[i:])
			plain = r >= 0xa0 && (r != utf8.RuneError || size > 1)
		}
		if plain {
			b = append(b, s[i:i+size]...)
		} else {
			for _, c := range []byte(s[i : i+size]) {
				b = append(b, '%', digits[c>>4], digits[c&15])
			}
		}
		i += size
	}
	return b
}

// unescape undoes appendEscaped. Text that it did not write gives some value or other.
func unescape(s string) string {
	if strings.IndexByte(s, '%') < 0 {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if c, err := hex.DecodeString(s[i+1 : i+3]); err == nil {
				b = append(b, c[0])
				i += 2
				continue
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}

// tenantOf returns the tenant in a key's text, and whether the text can tell: a digest cannot.
func tenantOf(dims []limits.Dimension, text []byte) (tenant string, known bool) {
	if len(text) > 0 && text[0] == '#' {
		return "", false
	}
	rest := string(text)
	for _, d := range dims {
		var v string
		v, rest, _ = strings.Cut(rest, "|")
		if d.Kind == limits.ByTenant {
			return unescape(v), true
		}
	}
	return "", true
}

// parse returns the request that has text as its key under dims, or false if there is none. A digest gives no values.
func parse(dims []limits.Dimension, text string) (q Request, ok bool) {
	if strings.HasPrefix(text, "#") {
		return q, true
	}
	if strings.Count(text, "|")+1 != len(dims) {
		return q, false
	}
	headers := map[string]string{}
	rest := text
	for _, d := range dims {
		var v string
		v, rest, _ = strings.Cut(rest, "|")
		v = unescape(v)
		switch d.Kind {
		case limits.ByTenant:
			q.Tenant = v
		case limits.ByRoute:
			q.Route = v
		case limits.ByIP:
			q.IP = v
		case limits.ByUser:
			q.User = v
		case limits.ByDevice:
			q.Device = v
		default:
			headers[d.Header] = v
		}
	}
	q.Header = func(name string) string { return headers[name] }
	return q, true
}

package httpguard

import (
	"math/bits"
	"strconv"
	"time"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
)

// The fields of a metered answer, in the form that net/http keys them. RateLimit-Policy and RateLimit follow
// draft-ietf-httpapi-ratelimit-headers-10, and this file is the only one that knows how: structured fields (RFC 9651), one
// list item each, named after the rule. Names of rules need no quoting, the policy file sees to that.
const (
	policyField = "Ratelimit-Policy"
	limitField  = "Ratelimit"
	retryField  = "Retry-After"
)

// forever is the wait that a caller is told when no waiting helps, in seconds: long enough to stop a retry loop, short enough
// to find out that an operator has changed the limit.
const forever = 24 * 60 * 60

// maxInteger is the largest integer of a structured field.
const maxInteger = 999_999_999_999_999

// appendPolicy appends the item of RateLimit-Policy: a burst (q) and the time in which it comes back (w), in whole seconds
// rounded up, so that a caller who keeps to q per w keeps to the limit. A gateway that has lost the centre, or a centre that has lost
// its store, says so, because it may then admit less than the fleet as a whole would.
func appendPolicy(dst []byte, rule string, l bucket.Limit, mode string) []byte {
	dst = append(dst, '"')
	dst = append(dst, rule...)
	dst = append(dst, `";q=`...)
	dst = strconv.AppendInt(dst, l.Burst, 10)
	if w := window(l); w > 0 {
		dst = append(dst, ";w="...)
		dst = strconv.AppendInt(dst, w, 10)
	}
	if enforcer.Alone(mode) {
		dst = append(dst, `;weir-mode="`...)
		dst = append(dst, mode...)
		dst = append(dst, '"')
	}
	return dst
}

// appendLimit appends the item of RateLimit: what remains at this gateway now, and the seconds until there is more (0: not
// said).
func appendLimit(dst []byte, rule string, remaining, reset int64) []byte {
	dst = append(dst, '"')
	dst = append(dst, rule...)
	dst = append(dst, `";r=`...)
	dst = strconv.AppendInt(dst, min(max(remaining, 0), maxInteger), 10)
	if reset > 0 {
		dst = append(dst, ";t="...)
		dst = strconv.AppendInt(dst, min(reset, maxInteger), 10)
	}
	return dst
}

// window is the time in which an empty bucket fills, in seconds rounded up; 0 when it never does.
func window(l bucket.Limit) int64 {
	if l.Rate.Num == 0 || l.Burst <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(l.Burst), l.Rate.Den)
	if hi >= l.Rate.Num {
		return 0 // longer than a uint64 of nanoseconds
	}
	ns, rest := bits.Div64(hi, lo, l.Rate.Num)
	s := int64(ns / uint64(time.Second))
	if rest > 0 || ns%uint64(time.Second) > 0 {
		s++
	}
	return s
}

// retrySeconds is a wait in whole seconds, at least 1 and rounded up: whoever waits so long has waited long enough.
func retrySeconds(wait time.Duration) int64 {
	if wait == bucket.Never {
		return forever
	}
	s := int64(wait / time.Second)
	if wait%time.Second > 0 {
		s++
	}
	return max(s, 1)
}

// retryMillis is the same wait in milliseconds, rounded up and at least 1.
func retryMillis(wait time.Duration) int64 {
	if wait == bucket.Never {
		return forever * 1000
	}
	ms := int64(wait / time.Millisecond)
	if wait%time.Millisecond > 0 {
		ms++
	}
	return max(ms, 1)
}

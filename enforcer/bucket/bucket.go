// Package bucket is the arithmetic of one token bucket: integers only, exact, with time as an argument.
//
// Nothing here reads a clock, takes a lock or allocates. A bucket holds whole tokens, a remainder smaller than one token
// counted in units of 1/Rate.Den, and the instant both are true for. Every product goes through 128 bits, so that a refill
// equals rational arithmetic for every rate and every idle time, in one step or in a million small ones.
package bucket

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"time"
)

// MaxBurst is the largest burst a Limit may have, in tokens.
const MaxBurst = 1_000_000_000

// Never is the RetryIn of a take that no waiting helps, and of one that would have to wait longer than 292 years.
const Never = time.Duration(math.MaxInt64)

// Rate is an exact refill rate of Num/Den tokens per nanosecond, in lowest terms and at most 1. The zero Rate never refills.
type Rate struct{ Num, Den uint64 }

// NewRate returns the rate of num/den tokens per `per`. It is an error if the rate is above one token per nanosecond, or so
// fine that it is no ratio of two 63-bit numbers. num = 0 gives the zero Rate.
func NewRate(num, den uint64, per time.Duration) (Rate, error) {
	if den == 0 {
		return Rate{}, errors.New("rate has denominator 0")
	}
	if per <= 0 {
		return Rate{}, fmt.Errorf("rate is per %v, want a positive duration", per)
	}
	if num == 0 {
		return Rate{}, nil
	}
	g := gcd(num, den)
	n, d := num/g, den/g
	g = gcd(n, uint64(per))
	n, ns := n/g, uint64(per)/g
	hi, lo := bits.Mul64(d, ns)
	if hi != 0 || lo > math.MaxInt64 {
		return Rate{}, fmt.Errorf("rate of %d/%d tokens per %v is too fine", num, den, per)
	}
	if n > lo {
		return Rate{}, fmt.Errorf("rate of %d/%d tokens per %v is too large: more than one token per nanosecond", num, den, per)
	}
	return Rate{Num: n, Den: lo}, nil
}

// FromNano returns the rate of n nano-tokens per second (the unit of reports and throttle updates), n from 0 to 1e18.
func FromNano(n int64) (Rate, error) {
	if n < 0 {
		return Rate{}, fmt.Errorf("rate of %d nano-tokens per second is negative", n)
	}
	return NewRate(uint64(n), 1e9, time.Second)
}

// Nano returns the rate in nano-tokens per second, rounded down: 1e9 is one token per second.
func (r Rate) Nano() int64 {
	if r.Num == 0 {
		return 0
	}
	hi, lo := bits.Mul64(r.Num, 1e18)
	q, _ := bits.Div64(hi, lo, r.Den) // Num <= Den, so the quotient is at most 1e18
	return int64(q)
}

// part returns the rate times num/den with num <= den: exact where it fits, else less than it by at most one part in 2^30
// (a rate below one token in 292 years becomes that).
func (r Rate) part(num, den uint64) Rate {
	if r.Num == 0 || num == 0 {
		return Rate{}
	}
	a, b := r.Num, r.Den
	g := gcd(a, den)
	a, den = a/g, den/g
	g = gcd(num, b)
	num, b = num/g, b/g
	nh, nl := bits.Mul64(a, num)
	dh, dl := bits.Mul64(b, den)
	for nh != 0 || dh != 0 || dl > math.MaxInt64 {
		if nh == 0 && nl < 1<<32 { // a slow rate: 1/ceil(d/n) is close
			return Rate{Num: 1, Den: ceilDiv(dh, dl, nl)}
		}
		odd := dl & 1 // halve both, the numerator down and the denominator up
		nh, nl = nh>>1, nl>>1|nh<<63
		dh, dl = dh>>1, dl>>1|dh<<63
		var carry uint64
		dl, carry = bits.Add64(dl, odd, 0)
		dh += carry
	}
	g = gcd(nl, dl)
	return Rate{Num: nl / g, Den: dl / g}
}

// ceilDiv returns (hi:lo)/d rounded up, at most MaxInt64.
func ceilDiv(hi, lo, d uint64) uint64 {
	if hi >= d {
		return math.MaxInt64
	}
	q, rem := bits.Div64(hi, lo, d)
	if rem != 0 && q < math.MaxInt64 {
		q++
	}
	return min(q, math.MaxInt64)
}

// Exceeds says whether more than n tokens come in elapsed nanoseconds. It is short enough to be inlined.
func (r Rate) Exceeds(elapsed, n uint64) bool {
	hi, lo := bits.Mul64(elapsed, r.Num)
	nhi, nlo := bits.Mul64(n, r.Den)
	_, borrow := bits.Sub64(nlo, lo, 0)
	_, borrow = bits.Sub64(nhi, hi, borrow)
	return borrow != 0
}

// Limit is what a bucket is allowed: a refill rate and a burst of 0 to MaxBurst tokens. The zero Limit denies everything.
// Unlimited allows everything and makes the rest of no account.
type Limit struct {
	Rate      Rate
	Burst     int64
	Unlimited bool
}

// Part returns num/den of the limit, for num <= den: the rate exactly where that fits 63 bits (else just below), the burst
// rounded down but at least 1 where the limit has one, so that a fraction never turns a limit into a refusal of everything.
func (l Limit) Part(num, den uint64) Limit {
	if l.Unlimited || num >= den || l.Burst <= 0 {
		return l
	}
	hi, lo := bits.Mul64(uint64(l.Burst), num)
	q, _ := bits.Div64(hi, lo, den) // num < den, so the quotient fits
	return Limit{Rate: l.Rate.part(num, den), Burst: max(1, int64(q))}
}

// State is everything a bucket remembers. Its remainder is counted in the denominators of the limit it is used with: go from
// one limit to another by Resize. The zero State is empty.
type State struct {
	Tokens int64  // whole tokens held, 0 to Burst
	Rem    uint64 // what is held beyond them, in 1/Rate.Den tokens; below Rate.Den, and 0 when full
	At     int64  // the latest instant a take was admitted at, ns on the caller's monotonic clock
}

// Decision is the answer to one take.
type Decision struct {
	Allowed   bool
	Remaining int64         // whole tokens held after it, never negative
	RetryIn   time.Duration // 0 when allowed; else the shortest wait after which the same take succeeds, rounded up to ns
}

// Full returns a full bucket.
func Full(l Limit, now int64) State { return State{Tokens: l.Burst, At: now} }

// Level returns the bucket refilled to now. An instant before At is read as At: time that was already counted is not counted
// again, and a clock that steps back neither takes tokens away nor, when it comes forward again, gives any twice.
func (s State) Level(l Limit, now int64) State {
	if now <= s.At {
		return s
	}
	elapsed := uint64(now) - uint64(s.At) // right beyond 2^63 too
	s.At = now
	if l.Rate.Num == 0 || s.Tokens >= l.Burst {
		return s
	}
	hi, lo := bits.Mul64(elapsed, l.Rate.Num)
	lo, carry := bits.Add64(lo, s.Rem, 0)
	hi += carry
	if hi == 0 && lo < l.Rate.Den { // less than a token: no division
		s.Rem = lo
		return s
	}
	needHi, needLo := bits.Mul64(uint64(l.Burst-s.Tokens), l.Rate.Den)
	if hi > needHi || hi == needHi && lo >= needLo { // full: no division either
		s.Tokens, s.Rem = l.Burst, 0
		return s
	}
	var whole, rem uint64
	if hi == 0 {
		whole = lo / l.Rate.Den
		rem = lo - whole*l.Rate.Den
	} else {
		whole, rem = bits.Div64(hi, lo, l.Rate.Den) // below Burst-Tokens
	}
	s.Tokens, s.Rem = s.Tokens+int64(whole), rem
	return s
}

// Take spends n tokens at now, or refuses and leaves the bucket as it was. n = 0 is a peek: it takes nothing and is allowed
// unless the limit denies everything. A negative n, an n above the burst and a limit with no burst are refused for ever.
func (s *State) Take(l Limit, now, n int64) Decision {
	if l.Unlimited {
		if n < 0 {
			return Decision{Remaining: math.MaxInt64, RetryIn: Never}
		}
		return Decision{Allowed: true, Remaining: math.MaxInt64}
	}
	t := s.Level(l, now)
	if n < 0 || n > l.Burst || l.Burst <= 0 {
		return Decision{Remaining: max(0, t.Tokens), RetryIn: Never}
	}
	if n > t.Tokens {
		return Decision{Remaining: t.Tokens, RetryIn: t.wait(l, now, n)}
	}
	if n == 0 {
		return Decision{Allowed: true, Remaining: t.Tokens}
	}
	t.Tokens -= n
	*s = t
	return Decision{Allowed: true, Remaining: t.Tokens}
}

// wait returns how long after now the bucket, already brought to now, holds n tokens.
func (s State) wait(l Limit, now, n int64) time.Duration {
	if l.Rate.Num == 0 {
		return Never
	}
	hi, lo := bits.Mul64(uint64(n-s.Tokens), l.Rate.Den)
	lo, borrow := bits.Sub64(lo, s.Rem, 0)
	hi -= borrow
	q := ceilDiv(hi, lo, l.Rate.Num)
	ahead := uint64(s.At) - uint64(now) // the bucket's time may be ahead of a clock that stepped back
	if ahead > math.MaxInt64-q {
		return Never
	}
	return time.Duration(q + ahead)
}

// Put gives back n tokens that a Take at the same instant took. What no longer fits the burst is dropped.
func (s *State) Put(l Limit, n int64) {
	if n <= 0 {
		return
	}
	if n >= l.Burst-s.Tokens {
		s.Tokens, s.Rem = max(l.Burst, 0), 0
		return
	}
	s.Tokens += n
}

// Resize brings the bucket to now under the old limit and goes on under the new one with the tokens it holds, less what no
// longer fits. The fraction of a token is kept, rounded down to the new rate's units.
func (s *State) Resize(old, new Limit, now int64) {
	if old.Unlimited {
		*s = Full(new, max(s.At, now))
		return
	}
	t := s.Level(old, now)
	if t.Tokens >= new.Burst {
		t.Tokens, t.Rem = new.Burst, 0
	} else if new.Rate.Num == 0 || old.Rate.Den == 0 {
		t.Rem = 0
	} else if old.Rate.Den != new.Rate.Den {
		hi, lo := bits.Mul64(t.Rem, new.Rate.Den)
		t.Rem, _ = bits.Div64(hi, lo, old.Rate.Den) // Rem < old.Den, so the quotient is below new.Den
	}
	*s = t
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

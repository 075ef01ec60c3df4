package accuracy

import (
	"math"
	"slices"
	"time"
)

// score is what a fleet admitted beside what a perfect bucket did.
type score struct {
	admitted, perfect int
	over, under       int // above and below it, summed by key and second
}

// compare scores admissions, both in the order of arrivals. A request counts in the second in which it came.
func compare(arrivals []arrival, keys int, admitted, perfect []bool) score {
	var sc score
	diff := make([]int, keys) // of this second
	var touched []int32
	settle := func() {
		for _, k := range touched {
			sc.over += max(0, diff[k])
			sc.under += max(0, -diff[k])
			diff[k] = 0
		}
		touched = touched[:0]
	}
	second := int64(0)
	for i := range arrivals {
		a := &arrivals[i]
		if a.at/s != second {
			settle()
			second = a.at / s
		}
		if admitted[i] {
			sc.admitted++
		}
		if perfect[i] {
			sc.perfect++
		}
		if admitted[i] == perfect[i] {
			continue
		}
		if diff[a.key] == 0 {
			touched = append(touched, a.key) // twice for a key that was even in between, which does no harm
		}
		if admitted[i] {
			diff[a.key]++
		} else {
			diff[a.key]--
		}
	}
	settle()
	return sc
}

// usable returns, for each step, how long after its begin the fleet last lacked more than 5 % of what a perfect bucket had
// admitted since then: 0 when it never did, the whole step when it still does at its end.
func usable(arrivals []arrival, steps []span, admitted, perfect []bool) []time.Duration {
	lags := make([]time.Duration, 0, len(steps))
	for _, step := range steps {
		first, _ := slices.BinarySearchFunc(arrivals, step.from, func(a arrival, at int64) int { return int(min(max(a.at-at, -1), 1)) })
		got, want, lag := 0, 0, int64(0)
		for i := first; i < len(arrivals) && arrivals[i].at < step.to; i++ {
			if admitted[i] {
				got++
			}
			if perfect[i] {
				want++
			}
			if got*100 < want*95 {
				lag = -1
			} else if lag < 0 {
				lag = arrivals[i].at - step.from
			}
		}
		if lag < 0 {
			lag = step.to - step.from
		}
		lags = append(lags, time.Duration(lag))
	}
	return lags
}

// backIn is how long after the return of what was down a fleet may take to be as before.
const backIn = 2 * s

// outage is what a fleet admitted while the centre or Redis was down, and from two seconds after their return, as parts of what the
// perfect bucket did. It is false where nothing was down.
func outage(arrivals []arrival, happenings []happening, admitted, perfect []bool) (down, back float64, ok bool) {
	var from, to int64
	for _, h := range happenings {
		switch h.what {
		case centreDown, redisDown:
			from = h.at
		case centreUp, redisUp:
			to = h.at
		}
	}
	if to <= from {
		return 0, 0, false
	}
	share := func(from, to int64) float64 {
		got, want := 0, 0
		for i := range arrivals {
			if at := arrivals[i].at; at < from || at >= to {
				continue
			}
			if admitted[i] {
				got++
			}
			if perfect[i] {
				want++
			}
		}
		return float64(got) / float64(max(want, 1))
	}
	return share(from, to), share(to+backIn, math.MaxInt64), true
}

// p99 is the 99th percentile by nearest rank, false for none.
func p99(d []time.Duration) (time.Duration, bool) {
	if len(d) == 0 {
		return 0, false
	}
	sorted := slices.Sorted(slices.Values(d))
	return sorted[int(math.Ceil(0.99*float64(len(d))))-1], true
}

// series counts admissions from one time to another by bin, as rates per second.
func series(arrivals []arrival, admitted []bool, from, to, bin time.Duration) []float64 {
	rates := make([]float64, int((to-from)/bin))
	for i := range arrivals {
		if n := int((time.Duration(arrivals[i].at) - from) / bin); admitted[i] && arrivals[i].at >= int64(from) && n < len(rates) {
			rates[n] += 1 / bin.Seconds()
		}
	}
	return rates
}

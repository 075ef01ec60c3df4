// Package clock measures how far this host's clock is from another one, over a network whose delay is not known.
// The arithmetic is that of NTP (RFC 5905, sections 8 and 10).
package clock

import "time"

// Sample is one question and its answer: asked at T1, received at T2, answered at T3, back at T4. T1 and T4 are readings
// of this host's clock as time.Now returns them, T2 and T3 of the other one. How long the exchange took is read from the
// monotonic clock, so that a step of the wall clock in between is no part of it.
type Sample struct{ T1, T2, T3, T4 time.Time }

// Valid reports whether the exchange can have happened: neither side went back in time, and the answer did not take longer
// than the exchange.
func (s Sample) Valid() bool {
	return s.T4.Sub(s.T1) >= 0 && s.T3.Sub(s.T2) >= 0 && s.Delay() >= 0
}

// Offset is the other clock less this one, round trip taken out. It is within Error of the truth.
func (s Sample) Offset() time.Duration {
	t1 := s.T1.Round(0)
	out := s.T2.Sub(t1)
	back := s.T3.Sub(t1.Add(s.T4.Sub(s.T1)))
	return out + (back-out)/2 // the same as (out+back)/2, which could overflow
}

// Delay is the time that the question and the answer were on their way.
func (s Sample) Delay() time.Duration { return s.T4.Sub(s.T1) - s.T3.Sub(s.T2) }

// Error bounds how far Offset is from the truth: by half the delay, when all of it was spent on one way.
func (s Sample) Error() time.Duration { return (s.Delay() + 1) / 2 }

// Estimate is the best that is known of the offset. The truth is in Offset ± Error.
type Estimate struct{ Offset, Error time.Duration }

// Overlaps reports whether both can be true of the same clocks.
func (e Estimate) Overlaps(o Estimate) bool { return (e.Offset - o.Offset).Abs() <= e.Error+o.Error }

const (
	kept = 8 // samples that a Filter holds, the depth of RFC 5905's clock filter

	// step is how far wall and monotonic clock may part between two samples. Slewing moves both alike.
	step = 10 * time.Millisecond
)

// Filter keeps the last eight samples and believes the one with the least delay, because it has the least room for error.
// When a clock was set in between, older samples are of a clock that is no more and are dropped at once: the wall clock
// here moved by other than the monotonic one, or no offset satisfies both an old sample and the new one. The zero Filter is
// ready; it is not safe for concurrent use.
type Filter struct {
	samples []Sample // oldest first
}

// Add takes a sample in. One that is not valid is ignored, and false returned.
func (f *Filter) Add(s Sample) bool {
	var parted time.Duration
	if n := len(f.samples); n > 0 {
		last := f.samples[n-1]
		parted = s.T1.Round(0).Sub(last.T1.Round(0)) - s.T1.Sub(last.T1)
	}
	return f.add(s, parted)
}

// add takes s in after wall and monotonic clock have parted by that much since the sample before.
func (f *Filter) add(s Sample, parted time.Duration) bool {
	if !s.Valid() {
		return false
	}
	if parted.Abs() > step {
		f.samples = f.samples[:0]
	}
	now, held := estimate(s), f.samples[:0]
	for _, old := range f.samples {
		if estimate(old).Overlaps(now) {
			held = append(held, old)
		}
	}
	if len(held) == kept {
		held = append(held[:0], held[1:]...)
	}
	f.samples = append(held, s)
	return true
}

// Estimate is the best estimate, and false while there is none.
func (f *Filter) Estimate() (Estimate, bool) {
	if len(f.samples) == 0 {
		return Estimate{}, false
	}
	best := f.samples[len(f.samples)-1]
	for _, s := range f.samples {
		if s.Delay() < best.Delay() {
			best = s
		}
	}
	return estimate(best), true
}

// Reset forgets every sample, for when another server is asked from now on.
func (f *Filter) Reset() { f.samples = f.samples[:0] }

func estimate(s Sample) Estimate { return Estimate{Offset: s.Offset(), Error: s.Error()} }

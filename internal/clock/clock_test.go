package clock

import (
	"math/rand/v2"
	"testing"
	"time"
)

const ms = time.Millisecond

var noon = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

// exchange is a sample asked at t1 of a clock that is offset ahead, over ways that take that long.
func exchange(t1 time.Time, offset, out, work, back time.Duration) Sample {
	return Sample{T1: t1, T2: t1.Add(out + offset), T3: t1.Add(out + work + offset), T4: t1.Add(out + work + back)}
}

func TestB010RoundTripIsNoDrift(t *testing.T) {
	const threshold = 100 * ms
	for _, c := range []struct {
		name              string
		offset, out, back time.Duration
		min, max          time.Duration // of the reported offset
		minError          time.Duration
		drifted           bool
	}{
		{"in step, 200 ms each way", 0, 200 * ms, 200 * ms, -10 * ms, 10 * ms, 0, false},
		{"250 ms ahead, 5 ms each way", 250 * ms, 5 * ms, 5 * ms, 240 * ms, 260 * ms, 0, true},
		{"250 ms behind, 5 ms each way", -250 * ms, 5 * ms, 5 * ms, -260 * ms, -240 * ms, 0, true},
		{"in step, lopsided path", 0, 400 * ms, 0, 190 * ms, 210 * ms, 200 * ms, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := exchange(noon, c.offset, c.out, 3*ms, c.back)
			if !s.Valid() {
				t.Fatal("Valid() = false, want true")
			}
			if got := s.Offset(); got < c.min || got > c.max {
				t.Errorf("Offset() = %s, want %s to %s", got, c.min, c.max)
			}
			if got := s.Error(); got < c.minError {
				t.Errorf("Error() = %s, want at least %s", got, c.minError)
			}
			if got := s.Offset().Abs()-s.Error() > threshold; got != c.drifted {
				t.Errorf("drifted beyond the error: %t, want %t (offset %s, error %s)", got, c.drifted, s.Offset(), s.Error())
			}
		})
	}
}

// The bound is a promise: whatever the ways are, the truth is within it.
func TestTruthIsWithinTheError(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for range 10_000 {
		offset := time.Duration(r.Int64N(int64(time.Hour))) - 30*time.Minute
		s := exchange(noon, offset, time.Duration(r.Int64N(int64(time.Second))), time.Duration(r.Int64N(1000)), time.Duration(r.Int64N(int64(time.Second))))
		if d := (s.Offset() - offset).Abs(); d > s.Error() {
			t.Fatalf("seed %d: %+v is %s from the truth, want at most %s", seed, s, d, s.Error())
		}
	}
}

func TestOffsetOfYearsDoesNotOverflow(t *testing.T) {
	s := exchange(noon, -200*365*24*time.Hour, 5*ms, 0, 5*ms)
	if got, want := s.Offset(), -200*365*24*time.Hour; got != want {
		t.Errorf("Offset() = %s, want %s", got, want)
	}
}

func TestImpossibleSamplesAreIgnored(t *testing.T) {
	for name, s := range map[string]Sample{
		"back before asked":           {noon, noon, noon, noon.Add(-ms)},
		"answered before received":    {noon, noon.Add(ms), noon, noon.Add(5 * ms)},
		"answer longer than exchange": {noon, noon, noon.Add(9 * ms), noon.Add(5 * ms)},
	} {
		var f Filter
		if f.Add(s) {
			t.Errorf("%s: Add = true, want false", name)
		}
		if e, ok := f.Estimate(); ok {
			t.Errorf("%s: Estimate() = %+v, want none", name, e)
		}
	}
}

func TestFilterBelievesTheQuickestOfTheLastEight(t *testing.T) {
	var f Filter
	at := noon
	add := func(out, back time.Duration) {
		t.Helper()
		at = at.Add(time.Second)
		if !f.Add(exchange(at, 50*ms, out, 0, back)) {
			t.Fatal("Add = false, want true")
		}
	}
	want := func(offset, bound time.Duration) {
		t.Helper()
		if got, ok := f.Estimate(); !ok || got != (Estimate{offset, bound}) {
			t.Fatalf("Estimate() = %+v, %t, want offset %s within %s", got, ok, offset, bound)
		}
	}
	add(100*ms, 0)
	want(100*ms, 50*ms)
	add(1*ms, 1*ms)
	want(50*ms, 1*ms)
	for range kept - 1 {
		add(0, 100*ms)
		want(50*ms, 1*ms)
	}
	add(0, 100*ms) // the quick one is the ninth now
	want(0, 50*ms)
}

// A clock that is set shows with the next sample, however good the old ones were.
func TestStepShowsAtOnce(t *testing.T) {
	quick := func(at time.Time, offset time.Duration) Sample { return exchange(at, offset, ms, 0, ms) }
	t.Run("by offsets that cannot both be true", func(t *testing.T) {
		var f Filter
		for i := range 8 {
			f.Add(quick(noon.Add(time.Duration(i)*time.Second), 0))
		}
		f.Add(exchange(noon.Add(9*time.Second), 3*time.Second, 20*ms, 0, 30*ms))
		if got, _ := f.Estimate(); got != (Estimate{3*time.Second - 5*ms, 25 * ms}) {
			t.Errorf("Estimate() = %+v, want 2.995s within 25ms", got)
		}
	})
	t.Run("by wall and monotonic clock that part, though the path is too slow to tell", func(t *testing.T) {
		var f Filter
		f.Add(quick(noon, 0))
		slow := exchange(noon.Add(time.Second), 300*ms, 400*ms, 0, 400*ms)
		f.add(slow, 0)
		if got, _ := f.Estimate(); got != (Estimate{0, ms}) {
			t.Fatalf("without a step Estimate() = %+v, want the quick sample", got)
		}
		f.add(slow, -300*ms)
		if got, _ := f.Estimate(); got != (Estimate{300 * ms, 400 * ms}) {
			t.Errorf("after a step Estimate() = %+v, want 300ms within 400ms", got)
		}
	})
	t.Run("slewing is no step", func(t *testing.T) {
		var f Filter
		f.Add(quick(noon, 0))
		f.add(exchange(noon.Add(time.Second), 0, 5*ms, 0, 5*ms), 500*time.Microsecond)
		if got, _ := f.Estimate(); got != (Estimate{0, ms}) {
			t.Errorf("Estimate() = %+v, want the quick sample kept", got)
		}
	})
}

package bench

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const million = 1_000_000

// tick moves the coarse clock while a benchmark runs.
func tick(tb testing.TB) {
	coarse.Store(1)
	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		t := time.NewTicker(time.Millisecond)
		defer t.Stop()
		begin := time.Now()
		for {
			select {
			case <-t.C:
				coarse.Store(1 + int64(time.Since(begin)))
			case <-done:
				return
			}
		}
	}()
	tb.Cleanup(func() { close(done); <-stopped })
}

func run(b *testing.B, check Checker, stream []string) {
	var worker, refused atomic.Int64
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		i := int(worker.Add(1)) * len(stream) / 7
		bad := int64(0)
		for pb.Next() {
			if i++; i >= len(stream) {
				i = 0
			}
			if !check(stream[i]) {
				bad++
			}
		}
		refused.Add(bad)
	})
	b.StopTimer()
	if refused.Load() != 0 {
		b.Fatalf("%d of %d were refused", refused.Load(), b.N)
	}
}

func BenchmarkSingle(b *testing.B) {
	tick(b)
	stream := Stream(Keys(1), 1024, Uniform(1))
	for _, l := range Limiters() {
		b.Run(l.Name, func(b *testing.B) { run(b, l.New(1), stream) })
	}
}

func many(b *testing.B, stream []string, keys []string) {
	tick(b)
	for _, l := range Limiters() {
		var check Checker
		b.Run(l.Name, func(b *testing.B) {
			if check == nil {
				check = l.New(len(keys))
				for _, k := range keys {
					check(k)
				}
				runtime.GC()
			}
			run(b, check, stream)
		})
	}
}

func BenchmarkUniform(b *testing.B) {
	keys := Keys(million)
	many(b, Stream(keys, million, Uniform(million)), keys)
}

func BenchmarkZipf(b *testing.B) {
	keys := Keys(million)
	many(b, Stream(keys, million, Zipf(million)), keys)
}

// BenchmarkInsert enters a million new keys an iteration, growth included.
func BenchmarkInsert(b *testing.B) {
	tick(b)
	keys := Keys(million)
	for _, l := range Limiters() {
		b.Run(l.Name, func(b *testing.B) {
			for b.Loop() {
				check := l.New(million)
				for _, k := range keys {
					check(k)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/million, "ns/key")
		})
	}
}

func heap() (bytes, objects uint64) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc, m.HeapObjects
}

// collection returns the shortest of five full collections.
func collection() time.Duration {
	best := time.Hour
	for range 5 {
		begin := time.Now()
		runtime.GC()
		best = min(best, time.Since(begin))
	}
	return best
}

// BenchmarkMemory says what a million live keys cost at rest. Each key is a string of its own, as a request brings it.
func BenchmarkMemory(b *testing.B) {
	tick(b)
	for _, l := range Limiters() {
		b.Run(l.Name, func(b *testing.B) {
			for b.Loop() {
				empty := collection()
				before, objects := heap()
				check := l.New(million)
				for _, k := range Keys(million) {
					check(k)
				}
				after, more := heap()
				b.ReportMetric(float64(after-before)/million, "B/key")
				b.ReportMetric(float64(more-objects)/million, "objects/key")
				b.ReportMetric(float64(collection().Microseconds())/1e3, "gc-ms")
				b.ReportMetric(float64(empty.Microseconds())/1e3, "empty-gc-ms")
				runtime.KeepAlive(check)
			}
		})
	}
}

// BenchmarkNow is recorded beside the ratios: rivals read this clock on every call.
func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		_ = time.Now()
	}
}

// TestSmoke fails when a check costs more than twice the floor, or with a guard before the rule more than two and a half times:
// for one key and for a million asked as traffic asks, by one processor and by two side by side. What a million keys cost that
// are asked alike is only told. Floor and weir take turns of some milliseconds, always the same number. Of one processor the best
// turn counts: a busy machine leaves one alone now and then. Of two it is the middle one, since who has a line when a turn begins
// makes single turns cheap or dear; where they hardly ever ran side by side, they are not judged.
func TestSmoke(t *testing.T) {
	tick(t)
	list := Limiters()[:3] // the floor, weir, and weir with a guard
	keys := Keys(million)
	for _, c := range []struct {
		name   string
		keys   []string
		stream []string
		turn   int // checks
		limits [3]float64
	}{
		{"one key", keys[:1], Stream(keys[:1], 1024, Uniform(1)), 20_000, [3]float64{1, 2, 2.5}},
		{"a million keys, Zipf", keys, Stream(keys, million, Zipf(million)), 50_000, [3]float64{1, 2, 2.5}},
		{"a million keys, uniform", keys, Stream(keys, million, Uniform(million)), 50_000, [3]float64{1, math.Inf(1), math.Inf(1)}},
	} {
		checks := make([]Checker, len(list))
		for i, l := range list {
			checks[i] = l.New(len(c.keys))
			for _, k := range c.keys {
				checks[i](k)
			}
		}
		runtime.GC()
		for procs := 1; procs <= min(2, runtime.GOMAXPROCS(0)); procs++ {
			const rounds = 60
			var turns [3][]float64
			for round := range rounds {
				for i := range list {
					if ns := turn(checks[i], c.stream, round*c.turn, c.turn/procs/procs, procs); !math.IsInf(ns, 1) {
						turns[i] = append(turns[i], ns)
					}
				}
			}
			if few := min(len(turns[0]), len(turns[1]), len(turns[2])); few < rounds/4 {
				t.Logf("%s, %d processors: not judged, too busy: %d turns of %d side by side", c.name, procs, few, rounds)
				continue
			}
			cost := slices.Min[[]float64]
			if procs > 1 {
				cost = median
			}
			floor := cost(turns[0])
			for i, l := range list[1:] {
				ns := cost(turns[i+1])
				t.Logf("%s, %d processors: %s %.1f ns, %s %.1f ns, ratio %.2f", c.name, procs, list[0].Name, floor, l.Name, ns, ns/floor)
				if ns > c.limits[i+1]*floor {
					t.Errorf("%s, %d processors: %s costs %.2f times the floor, want at most %.1f", c.name, procs, l.Name, ns/floor, c.limits[i+1])
				}
			}
		}
	}
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// turn returns the nanoseconds of one check, over n of the stream from at on, while as many processors do the same. It is infinite
// when the others did not keep pace in every part of it: then they did not run side by side.
func turn(check Checker, stream []string, at, n, procs int) float64 {
	var stop atomic.Bool
	var others atomic.Int64
	var wg sync.WaitGroup
	const step, parts = 16, 16
	for p := 1; p < procs; p++ {
		wg.Go(func() {
			for i := at + p*len(stream)/7; !stop.Load(); i += step {
				walk(check, stream, i, step)
				others.Add(step)
			}
		})
	}
	for procs > 1 && others.Load() == 0 {
	}
	before := others.Load()
	last, paced := before, true
	begin := time.Now()
	for i := range parts {
		walk(check, stream, at+i*n/parts, n/parts)
		now := others.Load()
		paced = paced && int(now-last) >= (procs-1)*n/parts/4
		last = now
	}
	took := time.Since(begin) // after the count, so that a pause here makes the turn look long, not short
	stop.Store(true)
	wg.Wait()
	if !paced {
		return math.Inf(1)
	}
	return float64(took.Nanoseconds()) / float64(int64(n)+last-before)
}

func walk(check Checker, stream []string, at, n int) {
	at %= len(stream)
	for range n {
		if at++; at >= len(stream) {
			at = 0
		}
		check(stream[at])
	}
}

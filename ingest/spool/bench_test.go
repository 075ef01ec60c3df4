package spool

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirhq/weir/ingest"
)

func reporter(s *Spool) *ingest.Reporter {
	return ingest.New(ingest.Config{Spool: s}, "gw", "one", noBuckets{}, store{}, quiet, nil)
}

// BenchmarkCount counts where a kill loses nothing.
func BenchmarkCount(b *testing.B) {
	for _, keys := range []int{1, 10_000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			tenants := make([]string, keys)
			for i := range tenants {
				tenants[i] = fmt.Sprint("tenant-", i)
			}
			r := reporter(open(b, Config{}, b.TempDir(), "one", nil))
			now := time.Now()
			for _, t := range tenants {
				r.Count(now, t, "route", "", "", 1)
			}
			var at atomic.Uint32
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				i := at.Add(7919)
				for pb.Next() {
					r.Count(now, tenants[i%uint32(keys)], "route", "", "", 1)
					i += 31
				}
			})
			b.StopTimer()
			if _, n := r.Pending(); n != uint64(b.N+keys) {
				b.Fatalf("counted %d, want %d", n, b.N+keys)
			}
		})
	}
}

// BenchmarkSeal writes the counts of 10,000 keys, in reports of 500, and syncs them.
func BenchmarkSeal(b *testing.B) {
	s := open(b, Config{MaxBytes: 1 << 40}, b.TempDir(), "one", nil)
	var found ingest.Found
	for i := range 10_000 {
		var c ingest.Cell
		c.Begin(time.Now().UnixNano())
		c.Add(1)
		found.Add(&c, fmt.Sprint("tenant-", i), "route", "", "")
	}
	reports, gen := found.Reports("gw", "one", 0), uint32(0)
	for b.Loop() {
		gen++
		add(b, s, gen, reports...)
		s.mu.Lock()
		for s.turn = &s.unsent; len(s.unsent) > 0; {
			s.done(s.pop())
		}
		s.mu.Unlock()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/10_000, "ns/key")
}

// BenchmarkRecover opens a spool in which a killed process left a million counted keys that were not sealed.
func BenchmarkRecover(b *testing.B) {
	const keys = 1_000_000
	dir := b.TempDir()
	s := open(b, Config{MaxBytes: 1 << 40}, dir, "one", nil)
	for i := range keys {
		s.Cell(i%maxLane, 1, time.Now().UnixNano(), fmt.Sprint("tenant-", i), "route", "", "").Add(1)
	}
	if n := s.live.inMemory(); n > 0 {
		b.Fatalf("%d requests did not fit", n)
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	left, err := os.ReadFile(liveName(dir, "one"))
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		b.StopTimer()
		names, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			b.Fatal(err)
		}
		for _, n := range names {
			if err := os.Remove(n); err != nil {
				b.Fatal(err)
			}
		}
		if err := os.WriteFile(liveName(dir, "one"), left, 0o600); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		s := open(b, Config{MaxBytes: 1 << 40}, dir, "two", nil)
		b.StopTimer()
		if _, n := s.Len(); n != keys {
			b.Fatalf("%d requests are recovered, want %d", n, keys)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(len(left))/keys, "bytes/key")
}

func TestCountDoesNotAllocate(t *testing.T) {
	r := reporter(open(t, Config{}, t.TempDir(), "one", nil))
	now := time.Now()
	r.Count(now, "a", "r", "", "", 1)
	if n := testing.AllocsPerRun(1000, func() { r.Count(now, "a", "r", "", "", 1) }); n != 0 {
		t.Errorf("Count allocates %v times, want 0", n)
	}
}

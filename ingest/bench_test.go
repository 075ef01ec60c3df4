package ingest

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"
)

// Count is on the path of every request. The benchmark counts too, and says what it counted.
func BenchmarkCount(b *testing.B) {
	for _, keys := range []int{1, 10_000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			tenants := make([]string, keys)
			for i := range tenants {
				tenants[i] = fmt.Sprint("tenant-", i)
			}
			r := New(Config{}, "gw", "boot", newTable(), &stream{}, quiet, nil)
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

func TestCountDoesNotAllocate(t *testing.T) {
	r := New(Config{}, "gw", "boot", newTable(), &stream{}, quiet, nil)
	now := time.Now()
	r.Count(now, "a", "r", "", "", 1)
	if n := testing.AllocsPerRun(1000, func() { r.Count(now, "a", "r", "", "", 1) }); n != 0 {
		t.Errorf("Count allocates %v times, want 0", n)
	}
}

// BenchmarkFlush gathers, merges and seals the counts of 10,000 tenants.
func BenchmarkFlush(b *testing.B) {
	const keys = 10_000
	tenants := make([]string, keys)
	for i := range tenants {
		tenants[i] = fmt.Sprint("tenant-", i)
	}
	r := New(Config{MaxReports: 1 << 30}, "gw", "boot", newTable(), &stream{}, quiet, nil)
	b.ReportAllocs()
	for b.Loop() {
		for _, t := range tenants {
			r.Count(time.Now(), t, "route", "", "", 1)
		}
		r.flush(true)
		for next, _ := r.spool.Next(); next != nil; next, _ = r.spool.Next() {
			r.spool.Sent(0)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/keys, "ns/key")
}

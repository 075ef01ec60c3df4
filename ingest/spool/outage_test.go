package spool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/internal/disktest"
	"github.com/weirhq/weir/schemas"
)

// switched is a far side that can be away, or hang.
type switched struct {
	away, hang atomic.Bool
	requests   uint64
	sent       map[string]bool
	floor      schemas.Floor
	stored     schemas.Stored
}

func (s *switched) Publish(ctx context.Context, r *schemas.Report) error {
	_, err := s.Put(ctx, r, false)
	return err
}

func (s *switched) Put(ctx context.Context, r *schemas.Report, _ bool) (uint64, error) {
	if s.hang.Load() {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	if s.away.Load() {
		return 0, errors.New("away")
	}
	if id := fmt.Sprint(r.Boot, r.Seq); !s.sent[id] {
		s.sent[id] = true
		s.requests += r.Requests()
	}
	s.floor.Seq++
	return s.floor.Seq, nil
}

func (s *switched) Stored(ctx context.Context) (schemas.Floor, *schemas.Stored, error) {
	if s.hang.Load() {
		<-ctx.Done()
		return schemas.Floor{}, nil, ctx.Err()
	}
	return schemas.Floor{}, &s.stored, nil
}

// start runs a reporter over a spool. The returned function stops it.
func start(t *testing.T, s *Spool, boot string, far ingest.Publisher) (*ingest.Reporter, func() error) {
	r := ingest.New(ingest.Config{Spool: s, DrainTimeout: 4 * time.Second}, "gw", boot, noBuckets{}, far, quiet, nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return r, func() error { cancel(); return <-done }
}

// hanging is a spool, the folder that it is in, and a far side that hangs.
func hanging(t *testing.T) (dir string, far *switched, s *Spool) {
	dir, far = t.TempDir(), &switched{sent: map[string]bool{}}
	far.hang.Store(true)
	s, err := Open(Config{}, dir, "gw", "one", quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	return dir, far, s
}

// Two minutes without NATS at 5,000 requests per second over 10,000 tenants: memory stays where it is, and the disk takes
// less than 100 bytes for each tenant and second in which it was busy. Then everything goes out.
func TestOutageIsOnDisk(t *testing.T) {
	const tenants, perSecond, seconds = 10_000, 5000, 120
	synctest.Test(t, func(t *testing.T) {
		names := make([]string, tenants)
		for i := range names {
			names[i] = fmt.Sprint("tenant-", i)
		}
		far := &switched{sent: map[string]bool{}}
		far.away.Store(true)
		s, err := Open(Config{}, t.TempDir(), "gw", "one", quiet, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		r, stop := start(t, s, "one", far)
		heap := func() uint64 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		var early uint64
		n := 0
		for second := range seconds {
			for range perSecond {
				r.Count(time.Now(), names[(n*7919)%tenants], "route", "", "", 1)
				n++
			}
			time.Sleep(time.Second)
			if second == seconds/4 {
				early = heap()
			}
		}
		synctest.Wait()
		late := heap()
		reports, requests := r.Pending()
		t.Logf("%d requests in %d reports: %d MB on disk, %d bytes for each tenant and second, heap %d MB after a quarter and %d MB at the end",
			requests, reports, s.Bytes()>>20, s.Bytes()/(perSecond*seconds), early>>20, late>>20)
		if requests != perSecond*seconds {
			t.Errorf("%d requests wait, want %d", requests, perSecond*seconds)
		}
		if s.Bytes() > 100*perSecond*seconds {
			t.Errorf("%d bytes on disk", s.Bytes())
		}
		if late > early+8<<20 {
			t.Errorf("the heap grew from %d to %d bytes", early, late)
		}
		far.away.Store(false)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if far.requests != perSecond*seconds {
			t.Errorf("%d requests went out, want %d", far.requests, perSecond*seconds)
		}
	})
}

// A server that hangs does not hold up the end of a gateway, what is left is no error, and the next life delivers it under
// the dead one's name.
func TestStopBeforeAHangingServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, far, s := hanging(t)
		r, stop := start(t, s, "one", far)
		for i := range 1000 {
			r.Count(time.Now(), fmt.Sprint(i%10), "route", "", "", 1)
			time.Sleep(3 * time.Millisecond)
		}
		begun := time.Now()
		if err := stop(); err != nil || time.Since(begun) > 5*time.Second {
			t.Errorf("Run = %v after %s, want nil within 5s", err, time.Since(begun))
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		far.hang.Store(false)
		s, err := Open(Config{}, dir, "gw", "two", quiet, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, stop = start(t, s, "two", far)
		r.Count(time.Now(), "t", "route", "", "", 1)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if !far.sent["one1"] || !far.sent["two1"] || far.requests != 1001 {
			t.Errorf("%d requests of reports %v are delivered, want 1001 of both lives", far.requests, far.sent)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// What was in files that were taken away goes with the process when the stream has not taken it: the end of the gateway is an error with the
// number, whether it was sealed or not.
func TestStopWithoutItsFiles(t *testing.T) {
	files := func(t *testing.T, dir, pattern string) {
		names, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(names) == 0 {
			t.Fatal(names, err)
		}
		for _, name := range names {
			if err := os.Remove(name); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, c := range map[string]struct {
		take func(*testing.T, string)
		lost uint64
	}{
		"reports": {func(t *testing.T, dir string) { files(t, dir, "*.seg") }, 5},
		"counts":  {func(t *testing.T, dir string) { files(t, dir, "live-*") }, 7},
		"all":     {func(t *testing.T, dir string) { files(t, dir, "*") }, 12},
		"the folder, and a file is there": {func(t *testing.T, dir string) {
			if err := errors.Join(os.Rename(dir, dir+".moved"), os.WriteFile(dir, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}, 12},
		"nothing": {func(*testing.T, string) {}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			for _, looked := range []bool{true, false} {
				dir := filepath.Join(t.TempDir(), "spool")
				s := open(t, Config{}, dir, "one", nil)
				add(t, s, 1, report("one", 1, 5))
				count(s, 2, "t", 4)
				for n := range 300 { // more than a chunk
					s.Cell(0, 2, 1, fmt.Sprint("tenant-", n), "r", "", "")
				}
				count(s, 2, "u", 3)
				c.take(t, dir)
				if looked {
					if s.Recover(); s.Troubled() != (c.lost > 0) {
						t.Errorf("trouble %v, want some if anything is lost", s.trouble)
					}
				}
				if n := s.InMemory(); n != c.lost {
					t.Errorf("looked %v: %d requests go with the process, want %d", looked, n, c.lost)
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	t.Run("and a hanging server", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dir, far, s := hanging(t)
			r, stop := start(t, s, "one", far)
			r.Count(time.Now(), "t", "route", "", "", 1)
			time.Sleep(3 * time.Second)
			files(t, dir, "*")
			time.Sleep(3 * time.Second)
			if err := stop(); err == nil || !strings.Contains(err.Error(), "1 of 1 requests are lost") {
				t.Errorf("Run = %v, want the number that is lost", err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	})
}

// After a kill in an outage the counts of each hour are delivered in their hour.
func TestOldCountsKeepTheirHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s, err := Open(Config{MaxBytes: 1}, dir, "gw", "one", quiet, nil) // full after one group: counts merge in their cells
		if err != nil {
			t.Fatal(err)
		}
		far := &switched{sent: map[string]bool{}}
		far.away.Store(true)
		r, stop := start(t, s, "one", far)
		begun := time.Now() // a full hour, in a bubble
		for range 150 {
			r.Count(time.Now(), "t", "route", "", "", 1)
			time.Sleep(time.Minute)
		}
		_ = s.lock.Close() // as the end of the process does
		next, err := Open(Config{}, dir, "gw", "two", quiet, nil)
		if err != nil {
			t.Fatal(err)
		}
		perHour := map[int]uint64{}
		entries := 0
		for rep, _ := next.Next(); rep != nil; rep, _ = next.Next() {
			if rep.Boot != "one" {
				t.Errorf("report of %s", rep.Boot)
			}
			for _, u := range rep.Usage {
				perHour[int(u.Time.Sub(begun)/time.Hour)] += u.Allowed
				entries++
			}
			next.Sent(1)
		}
		if perHour[0] != 60 || perHour[1] != 60 || perHour[2] != 30 || entries > 5 {
			t.Errorf("requests by hour = %v in %d entries, want 60, 60, 30 in a few", perHour, entries)
		}
		_ = stop()
		_ = errors.Join(next.Close(), s.Close())
	})
}

// busy is a bucket that every request takes from, also while it is asked what it has to say.
type busy struct {
	noBuckets
	cum    uint64
	during func()
}

func (b *busy) Collect(_ int64, all bool, emit func(schemas.Tokens)) {
	emit(schemas.Tokens{Rule: "contract", Key: "acme", Cum: b.cum, Taken: 1})
	b.during()
}

// The buckets of a report have given at least what it and all before it have counted, so that a kill leaves no more untold than was
// counted later. While reports wait, buckets keep what they have to say; at the end it is sealed all the same.
func TestBucketsAreNotBehindRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, far, s := hanging(t)
		b := &busy{}
		r := ingest.New(ingest.Config{Spool: s, MaxReports: 2, DrainTimeout: time.Second, PolicyVersion: func() uint64 { return 1 }}, "gw", "one", b, far, quiet, nil)
		b.during = func() {
			b.cum++
			r.Count(time.Now(), "acme", "route", "", "", 1)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := r.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		reports, err := Read(dir, "gw")
		if err != nil {
			t.Fatal(err)
		}
		var counted, cum uint64
		for _, r := range reports {
			if r.PolicyVersion == 0 {
				continue // what is counted and not sealed
			}
			counted += r.Requests()
			for _, tk := range r.Tokens {
				if cum = tk.Cum; cum < counted {
					t.Errorf("report %d: %d taken, and %d counted", r.Seq, cum, counted)
				}
			}
		}
		if counted < 5 || cum < counted {
			t.Errorf("%d counted, and the last word of the bucket is %d", counted, cum)
		}
	})
}

// A gateway whose disk is full goes on as one without a disk: all that it counts and all that its buckets say is in the stream, in
// time; without the stream, it says how much is lost.
func TestAFullDiskIsNoOutage(t *testing.T) {
	for _, tt := range []struct {
		name      string
		away      bool // the far side is
		fromStart bool
	}{{"from the start", false, true}, {"later", false, false}, {"without the far side", true, true}} {
		t.Run(tt.name, func(t *testing.T) {
			dir, fill, empty := disktest.New(t)
			synctest.Test(t, func(t *testing.T) {
				far := &switched{sent: map[string]bool{}}
				far.away.Store(tt.away)
				if tt.fromStart {
					fill()
				}
				in := filepath.Join(dir, "spool")
				s, err := Open(Config{}, in, "gw", "one", quiet, nil)
				if err != nil {
					t.Fatal(err)
				}
				told := 0
				b := &busy{during: func() { told++ }}
				r := ingest.New(ingest.Config{Spool: s, DrainTimeout: 4 * time.Second}, "gw", "one", b, far, quiet, nil)
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan error, 1)
				go func() { done <- r.Run(ctx) }()
				const seconds, tenants = 20, 20_000
				n := uint64(0)
				for second := range seconds {
					switch {
					case second == seconds/3 && !tt.fromStart:
						fill()
					case second == 2*seconds/3 && !tt.fromStart:
						empty()
					}
					for i := range tenants {
						r.Count(time.Now(), fmt.Sprint("tenant-", i), "route", "", "", 1)
						n++
					}
					time.Sleep(time.Second)
				}
				synctest.Wait()
				if _, waits := r.Pending(); !tt.away && waits > 3*tenants {
					t.Errorf("%d requests wait beside a far side that takes all", waits)
				}
				cancel()
				err = <-done
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				if !tt.away {
					if err != nil || far.requests != n || told < 5*seconds {
						t.Errorf("Run = %v, %d of %d requests are in the stream, and buckets told %d times of themselves in %d s", err, far.requests, n, told, seconds)
					}
					return
				}
				empty()
				next, oerr := Open(Config{}, in, "gw", "two", quiet, nil)
				if oerr != nil {
					t.Fatal(oerr)
				}
				_, kept := next.Len()
				if want := fmt.Sprintf("%d of %d requests are lost", n-kept, n); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("Run = %v, want that %s", err, want)
				}
				if err := next.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

package spool

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/internal/disktest"
	"github.com/weirhq/weir/schemas"
)

func report(boot string, seq, n uint64) *schemas.Report {
	return &schemas.Report{Gateway: "gw", Boot: boot, Seq: seq, SealedAt: time.Unix(1.8e9, 0).UTC(),
		Usage: []schemas.Usage{{Time: time.Unix(1.8e9, 0).UTC(), Tenant: fmt.Sprint("t", seq), Route: "r", Allowed: n, Cost: n}}}
}

func open(t testing.TB, cfg Config, dir, boot string, m *Metrics) *Spool {
	t.Helper()
	s, err := Open(cfg, dir, "gw", boot, quiet, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // a second time where the test has closed it
	return s
}

func add(t testing.TB, s *Spool, generation uint32, all ...*schemas.Report) {
	t.Helper()
	for _, r := range all {
		if err := s.Append(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Commit(generation); err != nil {
		t.Fatal(err)
	}
}

// ids sends everything and returns boot-seq of each.
func ids(s *Spool) (all []string) {
	for r, _ := s.Next(); r != nil; r, _ = s.Next() {
		all = append(all, fmt.Sprintf("%s-%d", r.Boot, r.Seq))
		s.Sent(1)
	}
	return all
}

// sent sends what is next.
func sent(s *Spool, place uint64) (first bool) {
	s.Next()
	return s.Sent(place)
}

// later has s ask a disk that has refused as if it had waited long enough.
func later(s *Spool) { s.refused, s.reserveAt, s.lateAt = time.Time{}, time.Time{}, time.Time{} }

func count(s *Spool, gen uint32, tenant string, n int) {
	c := s.Cell(0, gen, time.Unix(1.8e9, 0).UnixNano(), tenant, "r", "", "")
	for range n {
		c.Add(2)
	}
}

// groups makes a segment of groups of 1 to 4 reports, and says how many reports each prefix keeps.
func groups(t *testing.T, seed uint32) (b []byte, kept func(size int) int, ends []int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(7, 7))
	b = appendHeader(nil)
	var counts []int // reports kept when the file ends behind the first commit of a group
	n, seq := 0, uint64(0)
	for range 6 {
		for range rng.IntN(4) + 1 {
			seq++
			n++
			var err error
			if b, err = appendReport(b, seed, report("boot", seq, rng.Uint64N(1000))); err != nil {
				t.Fatal(err)
			}
		}
		ends = append(ends, len(b)+headBytes+6+len("boot"))
		counts = append(counts, n)
		b = appendCommit(b, seed, "boot", uint32(len(counts)))
	}
	return b, func(size int) int {
		k := 0
		for i, end := range ends {
			if size >= end {
				k = counts[i]
			}
		}
		return k
	}, ends
}

// A file that ends anywhere keeps every group whose commit is in it, and nothing of the group that was being written.
func TestCutOffAtEveryByte(t *testing.T) {
	b, kept, _ := groups(t, 99)
	for size := range len(b) + 1 {
		c, err := scan(b[:size], 99)
		if err != nil || len(c.reports) != kept(size) || len(c.damage) != 0 || !c.cut {
			t.Fatalf("of %d bytes: %d reports and damage %v, cut %t, %v, want %d and none", size, len(c.reports), c.damage, c.cut, err, kept(size))
		}
	}
}

// A flipped bit costs at most the report that it lies in, and it is counted; a commit has a second one.
func TestEveryFlippedBit(t *testing.T) {
	whole, kept, _ := groups(t, 99)
	all := kept(len(whole))
	for bit := range len(whole) * 8 {
		b := bytes.Clone(whole)
		b[bit/8] ^= 1 << (bit % 8)
		c, err := scan(b, 99)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range c.reports {
			got, err := readReport(bytes.NewReader(b), 99, r.at, r.size)
			if err != nil || got.Seq != r.seq || got.Requests() != r.requests {
				t.Fatalf("bit %d: report %d is %+v, %v", bit, r.seq, got, err)
			}
		}
		if len(c.reports) < all-1 {
			t.Fatalf("bit %d: %d reports are left of %d", bit, len(c.reports), all)
		}
		if len(c.reports) < all && len(c.damage) == 0 {
			t.Fatalf("bit %d: a report is lost and nothing is counted as damaged", bit)
		}
	}
}

// What a caller chose is never taken for a record: a whole record of this very format, as a tenant, behind damage.
func TestTextIsNoRecord(t *testing.T) {
	forged, err := appendReport(nil, 0, &schemas.Report{Boot: "b", Seq: 9, Usage: []schemas.Usage{{Tenant: "x", Allowed: 1e9}}})
	if err != nil {
		t.Fatal(err)
	}
	const seed = 4242
	r := report("boot", 1, 1)
	b := appendRecord(nil, seed, func(b []byte) []byte { return append(append(b, kindReport), forged...) })
	b[4]++ // the head is damaged, so that the next record is looked for
	if b, err = appendReport(b, seed, r); err != nil {
		t.Fatal(err)
	}
	b = appendCommit(b, seed, "boot", 1)
	if c, err := scan(b, seed); err != nil || len(c.reports) != 1 || c.reports[0].seq != 1 || len(c.damage) == 0 {
		t.Errorf("%+v, want the one report that we wrote", c)
	}
}

// Random damage anywhere in real files never keeps the spool from opening, and never makes a request up.
func TestDamagedFilesOpen(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 60 {
		dir := t.TempDir()
		s := open(t, Config{SegmentBytes: 1 << 10}, dir, "one", nil)
		for seq := uint64(1); seq <= 20; seq++ {
			count(s, uint32(seq), "live", 3)
			add(t, s, uint32(seq), report("one", seq, 10))
		}
		count(s, 21, "live", 5)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		names, err := filepath.Glob(filepath.Join(dir, "*[g1e]"))
		if err != nil || len(names) < 3 {
			t.Fatal(names, err)
		}
		name := names[rng.IntN(len(names))]
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		switch rng.IntN(3) {
		case 0:
			b = b[:rng.IntN(len(b)+1)]
		case 1:
			for range 1 + rng.IntN(10) {
				b[rng.IntN(len(b))] ^= byte(1 << rng.IntN(8))
			}
		case 2:
			clear(b[rng.IntN(len(b)):])
		}
		if strings.Contains(name, "live-") && len(b) > chunkBytes { // the numbers themselves have no checksum
			continue
		}
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		m := NewMetrics(prometheus.NewRegistry())
		s = open(t, Config{}, dir, "two", m)
		if _, n := s.Len(); n > 205 {
			t.Fatalf("%d: damage in %s makes %d requests of 205", i, filepath.Base(name), n)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTwoProcessesDoNotShareAFolder(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{}, dir, "one", nil)
	_, err := Open(Config{}, dir, "gw", "two", quiet, nil)
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprint("process ", os.Getpid())) || strings.Contains(err.Error(), "\n") {
		t.Errorf("Open = %v, want ErrInUse, in one line, with the process", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, Config{}, dir, "two", nil)
}

// A folder that was moved or copied to where another gateway looks is not that one's: what the history has of it would count again. One of an
// older weir, which does not say whose it is, is its first user's.
func TestAFolderIsItsGateways(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "spool")
	if err := open(t, Config{}, dir, "one", nil).Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // each life writes another process
		s := open(t, Config{}, dir, "two", nil)
		add(t, s, 1, report("two", 1, 5))
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		copied := filepath.Join(t.TempDir(), "copied")
		if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		if s, err := Open(Config{}, copied, "other", "three", quiet, nil); s != nil || !errors.Is(err, ErrNotOurs) || !strings.Contains(err.Error(), "usage in it is gw's") || strings.Contains(err.Error(), "\n") {
			t.Errorf("Open under another name = %v, want ErrNotOurs and whose it is, in one line", err)
		}
		if all, err := Read(copied, "other"); err != nil || len(all) != 1 || all[0].Gateway != "gw" {
			t.Errorf("Read = %v, %v, want a report of gw", all, err)
		}
		if got := ids(open(t, Config{}, copied, "three", nil)); len(got) != 1 {
			t.Errorf("its own gateway has %v, want its report", got)
		}
	}
	for _, old := range []string{"", "12345\n", "gateway g"} {
		if err := os.WriteFile(filepath.Join(dir, lockName), []byte(old), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := open(t, Config{}, dir, "three", nil).Close(); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, lockName)); err != nil || string(b) != fmt.Sprintf("gateway gw\n%d\n", os.Getpid()) {
			t.Errorf("the lock of one that said %q says %q, %v", old, b, err)
		}
	}
}

// Whatever lies between seal and trim when the process ends, the next one has exactly what is not sealed and not stored.
func TestEveryCrashPointOfASeal(t *testing.T) {
	for _, point := range []string{"counted", "appended", "written", "synced", "forgotten", "stored"} {
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, Config{}, dir, "one", nil)
			count(s, 1, "t1", 5)
			count(s, 2, "t2", 7) // of the next generation, while the first is sealed
			r := report("one", 1, 5)
			want := []string{"one-1"}
			switch point {
			case "appended":
				if err := s.Append(r); err != nil {
					t.Fatal(err)
				}
			case "written": // and no commit
				if err := errors.Join(s.Append(r), s.write()); err != nil {
					t.Fatal(err)
				}
			case "synced": // and no generation forgotten
				if err := errors.Join(s.Append(r), s.commit("one", 1)); err != nil {
					t.Fatal(err)
				}
				want = []string{"one-1", "one-2"}
			case "forgotten":
				add(t, s, 1, r)
				want = []string{"one-1", "one-2"}
			case "stored":
				add(t, s, 1, r)
				s.Next()
				s.Sent(1)
				s.Stored(schemas.Floor{Stream: "s", Seq: 1}, &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, 1}}}})
				if n := s.Unconfirmed(); n != 0 {
					t.Errorf("%d reports wait for the history, want 0", n)
				}
				want = []string{"one-2"}
			}
			_ = s.lock.Close() // as the end of the process does
			for _, boot := range []string{"two", "three"} {
				next := open(t, Config{}, dir, boot, nil)
				_, requests := next.Len()
				var got []string
				sum := map[string]uint64{}
				for _, e := range slices.Concat(next.unsent, next.behind) {
					rep, err := readReport(e.seg.f, e.seg.seed, e.at, e.size)
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, fmt.Sprintf("%s-%d", rep.Boot, rep.Seq))
					for _, u := range rep.Usage {
						sum[u.Tenant] += u.Allowed
						if !u.Time.Equal(time.Unix(1.8e9, 0)) {
							t.Errorf("usage is of %s", u.Time)
						}
					}
				}
				wantRequests, one := uint64(12), uint64(5)
				if point == "stored" {
					wantRequests, one = 7, 0
				}
				if point == "stored" && requests == 12 { // the file is deleted with the next segment; sending it again is harmless
					got, sum["t1"], requests = got[1:], 0, 7
				}
				if requests != wantRequests || sum["t1"] != one || sum["t2"] != 7 || fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("life %s has %v with %v, want %v", boot, got, sum, want)
				}
				if err := next.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// After a power cut, nobody knows which reports of the dead boot were sent: its counts must not get a name that one of
// these had.
func TestCountsOfAnotherLifeOfTheMachineAreOurs(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{}, dir, "one", nil)
	add(t, s, 0, report("one", 1, 0)) // sent, and lost from this disk
	count(s, 1, "t", 5)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	name := liveName(dir, "one")
	otherMachine(t, name)
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	b[0]++ // the second copy of the header is enough
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{}, dir, "two", nil)
	if got := fmt.Sprint(ids(s)); got != "[two-1 one-1]" || s.Seq() != 1 {
		t.Errorf("reports %s, the last one of ours is %d, want [two-1 one-1] and 1", got, s.Seq())
	}
}

// A report is on disk before it can be sent, and its generation is forgotten after that.
func TestOrderOfAStore(t *testing.T) {
	s := open(t, Config{}, t.TempDir(), "one", nil)
	count(s, 1, "t", 5)
	if err := s.Append(report("one", 1, 5)); err != nil {
		t.Fatal(err)
	}
	if r, _ := s.Next(); r != nil {
		t.Error("a report can be sent before its group is kept")
	}
	name := s.active.f.Name()
	if err := s.active.f.Close(); err != nil { // every write fails from here
		t.Fatal(err)
	}
	if err := s.Commit(1); err == nil {
		t.Fatal("Commit = nil on a closed file")
	}
	if r, _ := s.Next(); r != nil {
		t.Error("a report can be sent though its group is not kept")
	}
	if len(s.live.taken[1]) != 1 {
		t.Error("the counts of a group that is not kept are forgotten")
	}
	later(s)
	add(t, s, 1, report("one", 1, 5)) // into another file
	if s.active == nil || s.active.f.Name() == name {
		t.Error("a file that could not be mended is written to again")
	}
	if got := fmt.Sprint(ids(s)); got != "[one-1]" || len(s.live.taken[1]) != 0 {
		t.Errorf("sent %s with %d chunks of counts left", got, len(s.live.taken[1]))
	}
}

// The history has passed a report and does not have it: it is sent again, soon and then ever less often. One that the
// history has not come to yet is not.
func TestWhatTheHistoryLacksIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := Open(Config{}, t.TempDir(), "gw", "one", quiet, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		for seq := uint64(1); seq <= 3; seq++ {
			add(t, s, uint32(seq), report("one", seq, 5))
			s.Next()
			if first := sent(s, 10*seq); !first {
				t.Error("Sent says that it was sent before")
			}
		}
		has := &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, 1}, {3, 3}}}}
		if n := s.Stored(schemas.Floor{Stream: "s", Seq: 9}, &schemas.Stored{}); n != 0 || s.Unconfirmed() != 3 {
			t.Errorf("%d again and %d wait before the history has come to them", n, s.Unconfirmed())
		}
		if n := s.Stored(schemas.Floor{Stream: "s", Seq: 30}, has); n != 1 {
			t.Fatalf("%d are sent again, want report 2", n)
		}
		r, again := s.Next()
		if r == nil || r.Seq != 2 || !again {
			t.Fatalf("Next = %+v, %v, want report 2 again", r, again)
		}
		if first := sent(s, 40); first {
			t.Error("Sent says that it is the first time")
		}
		if n := s.Stored(schemas.Floor{Stream: "s", Seq: 50}, has); n != 0 {
			t.Error("it is sent a third time at once")
		}
		time.Sleep(2 * time.Minute)
		if n := s.Stored(schemas.Floor{Stream: "s", Seq: 50}, has); n != 1 {
			t.Error("it is not sent a third time after a while")
		}
		s.Next()
		sent(s, 60)
		time.Sleep(time.Hour)
		if n := s.Stored(schemas.Floor{Stream: "another", Seq: 1}, has); n != 1 {
			t.Error("it is not sent again into another stream")
		}
		s.Next()
		sent(s, 70)
		if n := s.Stored(schemas.Floor{Stream: "another", Seq: 1, Lost: 1}, has); n != 1 {
			t.Error("it is not sent again, at once, when the stream has lost something")
		}
		s.Next()
		sent(s, 80)
		if n := s.Stored(schemas.Floor{Stream: "another", Seq: 1, Lost: 1}, has); n != 0 {
			t.Error("it is sent again when nothing was lost since")
		}
		has.Boots["one"] = schemas.Ranges{{1, 3}}
		s.Stored(schemas.Floor{Stream: "another", Seq: 2}, has)
		if n, requests := s.Len(); n != 0 || requests != 0 || s.Unconfirmed() != 0 {
			t.Errorf("%d reports of %d requests are left", n, requests)
		}
	})
}

func ofBuckets(seq uint64) *schemas.Report {
	return &schemas.Report{Boot: "one", Seq: seq, SealedAt: time.Unix(1.8e9, 0).UTC(), Tokens: []schemas.Tokens{{Rule: "r", Key: "k", Cum: seq}}}
}

// Reports of buckets alone wait for the history as all others do, and are let go of first: the oldest, where there are many, and all, where
// the files have half of their size.
func TestBucketsAreLetGoOfFirst(t *testing.T) {
	m := NewMetrics(prometheus.NewRegistry())
	s := open(t, Config{MaxBytes: 4 << 20, sync: func(*os.File) error { return nil }}, t.TempDir(), "one", m)
	seq := uint64(0)
	next := func(requests bool) {
		seq++
		if requests {
			add(t, s, uint32(seq), report("one", seq, 1))
		} else {
			add(t, s, 0, ofBuckets(seq))
		}
	}
	next(true)
	for range keepBuckets + 5 {
		next(false)
		s.Full()
	}
	ids(s)
	if n := s.Unconfirmed(); n != keepBuckets+1 || s.buckets[0].seq != 7 {
		t.Errorf("%d reports wait for the history, those of buckets from %d, want %d and 7", n, s.buckets[0].seq, keepBuckets+1)
	}
	if n := s.Stored(schemas.Floor{Stream: "s", Seq: 1}, &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, seq - 2}}}}); n != 2 {
		t.Errorf("%d are sent again, want the two that the history lacks", n)
	}
	if got := fmt.Sprint(ids(s)); got != fmt.Sprintf("[one-%d one-%d]", seq-1, seq) {
		t.Errorf("sent again: %s", got)
	}
	for s.Bytes() < 2<<20 {
		next(true)
		next(false)
	}
	ids(s)
	if buckets, all := len(s.buckets), s.Unconfirmed(); buckets < 1000 || all < 2*buckets-10 {
		t.Fatalf("%d of %d that wait are of buckets", buckets, all)
	}
	waiting := len(s.waiting)
	if s.Full() || len(s.buckets) != 0 || s.Unconfirmed() != waiting || testutil.ToFloat64(m.Forgotten) != 0 {
		t.Errorf("full %t; %d reports of buckets and %d of requests wait at half the size, want 0 and %d", s.Full(), len(s.buckets), s.Unconfirmed(), waiting)
	}
}

// One that the server will not take does not hold up the others.
func TestTheTooLargeGoesLast(t *testing.T) {
	s := open(t, Config{}, t.TempDir(), "one", nil)
	add(t, s, 1, report("one", 2, 1), report("one", 3, 1))
	s.Next()
	s.Skip()
	if r, again := s.Next(); r.Seq != 3 || again {
		t.Errorf("Next = %d, %v, want 3", r.Seq, again)
	}
	sent(s, 2)
	if r, again := s.Next(); r.Seq != 2 || !again {
		t.Errorf("Next = %d, %v, want 2, again", r.Seq, again)
	}
}

// What this life has to say goes before what earlier ones left, and before what is sent once more: the centre waits for what is so now.
func TestWhatIsSoNowGoesFirst(t *testing.T) {
	dir := t.TempDir()
	one := open(t, Config{}, dir, "one", nil)
	add(t, one, 1, report("one", 1, 1), report("one", 2, 1), report("one", 3, 1))
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	s := open(t, Config{}, dir, "two", nil)
	if n, requests := s.Len(); n != 3 || requests != 3 || s.Own() != 0 {
		t.Errorf("Len = %d, %d, Own = %d, want three of an earlier life", n, requests, s.Own())
	}
	if r, _ := s.Next(); r.Boot != "one" || r.Seq != 1 {
		t.Errorf("Next = %s-%d, want one-1", r.Boot, r.Seq)
	}
	add(t, s, 1, report("two", 1, 1), report("two", 2, 1)) // while that is under way
	s.Sent(1)
	if n, _ := s.Len(); n != 4 || s.Own() != 2 {
		t.Errorf("Len = %d, Own = %d, want one report less of the earlier life", n, s.Own())
	}
	if r, _ := s.Next(); r.Boot != "two" || r.Seq != 1 {
		t.Errorf("Next = %s-%d, want two-1", r.Boot, r.Seq)
	}
	s.Skip() // too large
	if got := fmt.Sprint(ids(s)); got != "[two-2 one-2 one-3 two-1]" {
		t.Errorf("sent %s", got)
	}
	if again := s.Stored(schemas.Floor{Stream: "S", Seq: 9}, &schemas.Stored{}); again != 5 || s.Own() != 0 {
		t.Errorf("%d are sent again, of which %d before others", again, s.Own())
	}
	add(t, s, 2, report("two", 3, 1))
	if r, _ := s.Next(); r.Boot != "two" || r.Seq != 3 {
		t.Errorf("Next = %s-%d, want two-3", r.Boot, r.Seq)
	}
}

// A spool that is full says so once, lets go of what the stream has, and takes reports again when there is room.
func TestFullSpool(t *testing.T) {
	var out bytes.Buffer
	m := NewMetrics(prometheus.NewRegistry())
	dir := t.TempDir()
	s, err := Open(Config{MaxBytes: 1 << 20}, dir, "gw", "one", slog.New(slog.NewTextHandler(&out, nil)), m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	seq := uint64(0)
	fill := func() {
		for !s.Full() {
			seq++
			r := report("one", seq, 1)
			for i := range 200 {
				r.Usage = append(r.Usage, schemas.Usage{Time: r.SealedAt, Tenant: fmt.Sprint("tenant-", i), Route: "route", Allowed: 1})
			}
			add(t, s, uint32(seq), r)
		}
	}
	fill()
	for range 5 {
		s.Full()
	}
	size := int64(0)
	names, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		info, err := os.Stat(n)
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	if size != s.Bytes() || size > 1<<20+64<<10 || testutil.ToFloat64(m.Bytes) != float64(size) {
		t.Errorf("%d bytes on disk, %d known, %v shown", size, s.Bytes(), testutil.ToFloat64(m.Bytes))
	}
	if n := strings.Count(out.String(), "level=ERROR"); n != 1 || testutil.ToFloat64(m.Degraded) != 1 || !s.Troubled() {
		t.Errorf("told %d times with degraded %v, want once and 1:\n%s", n, testutil.ToFloat64(m.Degraded), out.String())
	}
	all := len(s.unsent)
	for range all / 2 {
		s.Next()
		sent(s, 1)
	}
	if s.Full() || testutil.ToFloat64(m.Degraded) != 0 || testutil.ToFloat64(m.Forgotten) == 0 {
		t.Errorf("full %v, degraded %v, forgotten %v after half of it is in the stream", s.Full(), testutil.ToFloat64(m.Degraded), testutil.ToFloat64(m.Forgotten))
	}
	fill()
	ids(s)
	if s.Full() {
		t.Error("full though all is in the stream")
	}
}

// On a disk that is full, counts stay where they are and merge, nothing that was promised is lost, and writing goes on
// when there is room.
func TestFullDisk(t *testing.T) {
	dir, fill, empty := disktest.New(t)
	m := NewMetrics(prometheus.NewRegistry())
	s := open(t, Config{SegmentBytes: 64 << 10}, filepath.Join(dir, "spool"), "one", m)
	fill()
	before := s.Bytes()
	count(s, 1, "t1", 5)
	big := report("one", 1, 5)
	for i := range 3000 {
		big.Usage = append(big.Usage, schemas.Usage{Time: big.SealedAt, Tenant: fmt.Sprint("tenant-", i), Route: "route"})
	}
	err := s.Append(big)
	if err == nil {
		err = s.Commit(1)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("sealing on a full disk = %v, want ENOSPC", err)
	}
	if d, e := testutil.ToFloat64(m.Degraded), testutil.ToFloat64(m.Errors.WithLabelValues("no_space")); d != 1 || e == 0 {
		t.Errorf("degraded %v and %v errors, want 1 and some", d, e)
	}
	if n, _ := s.Len(); n != 0 || s.Bytes() != before {
		t.Errorf("%d reports are kept of a group that was not taken", n)
	}
	for i := range 100_000 { // keys for which there is no room: no signal, no error, only no promise
		count(s, 2, fmt.Sprint("more-", i), 1)
	}
	if s.InMemory() == 0 {
		t.Error("100000 keys fit on a full disk")
	}
	empty()
	later(s)
	s.Recover()
	add(t, s, 2, report("one", 1, 100_005))
	if d, n := testutil.ToFloat64(m.Degraded), s.InMemory(); d != 0 || n != 0 {
		t.Errorf("degraded %v with %d requests in memory only when there is room again, want 0", d, n)
	}
	if got := fmt.Sprint(ids(s)); got != "[one-1]" {
		t.Errorf("sent %s", got)
	}
}

// A disk that has room for something, and not for the group that it has refused, is told of once, and its trouble ends when there is
// room for that one.
func TestADiskWithTooLittleRoom(t *testing.T) {
	dir, fill, empty := disktest.New(t)
	var out bytes.Buffer
	s, err := Open(Config{}, filepath.Join(dir, "spool"), "gw", "one", slog.New(slog.NewTextHandler(&out, nil)), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	room := filepath.Join(dir, "room")
	if err := os.WriteFile(room, make([]byte, 200<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	fill()
	if err := os.Remove(room); err != nil {
		t.Fatal(err)
	}
	large := func(seq uint64) *schemas.Report {
		r := report("one", seq, 5)
		for i := range 20_000 {
			r.Usage = append(r.Usage, schemas.Usage{Time: r.SealedAt, Tenant: fmt.Sprint("tenant-", i), Route: "route"})
		}
		return r
	}
	if err := s.Append(large(1)); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("Append = %v, want ENOSPC", err)
	}
	told := func() string {
		return fmt.Sprint(strings.Count(out.String(), "spool: "+noReports), " ", strings.Count(out.String(), "no longer: "+noReports))
	}
	for seq := uint64(1); seq <= 5; seq++ {
		if err := s.Commit(0); err != nil { // of nothing
			t.Fatal(err)
		}
		later(s)
		s.Recover()
		later(s)
		add(t, s, uint32(seq), report("one", seq, 5)) // for which there is room
		if got := told(); got != "1 0" || !s.Troubled() {
			t.Fatalf("begun and ended %s times, troubled %t, want 1 0 and true:\n%s", got, s.Troubled(), out.String())
		}
	}
	empty()
	later(s)
	s.Recover()
	if got := told(); got != "1 1" || s.Troubled() {
		t.Errorf("begun and ended %s times, troubled %t with room again, want 1 1 and false", got, s.Troubled())
	}
	add(t, s, 6, large(6))
	if got := fmt.Sprint(ids(s)); got != "[one-1 one-2 one-3 one-4 one-5 one-6]" {
		t.Errorf("sent %s", got)
	}
}

// A group of nothing asks the disk nothing, and ends no trouble.
func TestAnEmptyGroupEndsNoTrouble(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "spool")
	s := open(t, Config{}, dir, "one", nil)
	if err := os.Rename(dir, dir+"-away"); err != nil {
		t.Fatal(err)
	}
	if err := s.Append(report("one", 1, 5)); err == nil || !s.Troubled() {
		t.Fatalf("Append = %v in a folder that is gone", err)
	}
	if err := s.Commit(0); err != nil || !s.Troubled() {
		t.Errorf("Commit of nothing = %v, troubled %t, want true", err, s.Troubled())
	}
}

// While the disk takes nothing and nothing waits, a group goes out from memory. What it told of is not found by the next life, also
// not after a power cut, which leaves old counts and what was synced; and what that one finds has another name.
func TestAGroupInMemory(t *testing.T) {
	for _, powerCut := range []bool{false, true} {
		t.Run(fmt.Sprint("power cut ", powerCut), func(t *testing.T) {
			dir := t.TempDir()
			file := liveName(dir, "one")
			asked := 0
			var s *Spool
			var onDisk []byte // what a power cut leaves of the counts
			s = open(t, Config{
				sync: func(*os.File) error { asked++; return syscall.EIO },
				syncHeader: func(mapped []byte) error {
					if r, _ := s.Next(); r != nil && r.Seq == s.live.held.seq {
						t.Errorf("report %d can be sent before that is synced", r.Seq)
					}
					copy(onDisk, mapped)
					return nil
				},
			}, dir, "one", nil)
			seal := func(generation uint32, r *schemas.Report) error {
				if err := s.Append(r); err != nil {
					return err
				}
				return s.Commit(generation)
			}
			count(s, 1, "t1", 5)
			if err := seal(1, report("one", 1, 5)); !errors.Is(err, syscall.EIO) {
				t.Fatalf("the first group = %v, want EIO", err)
			}
			var err error
			if onDisk, err = os.ReadFile(file); err != nil {
				t.Fatal(err)
			}
			if err := seal(1, report("one", 1, 5)); err != nil {
				t.Fatalf("the next group = %v, want it to be in memory", err)
			}
			if n, requests := s.Len(); n != 1 || requests != 5 || s.InMemory() != 5 || asked != 1 {
				t.Errorf("%d reports of %d requests wait, %d in memory, the disk is asked %d times, want 1 of 5, all in memory, and once", n, requests, s.InMemory(), asked)
			}
			if !s.Full() {
				t.Error("a disk that has just refused is asked again while a report waits")
			}
			count(s, 2, "t1", 3)
			if err := seal(2, report("one", 2, 3)); !errors.Is(err, syscall.EIO) {
				t.Errorf("a second group while the first one waits = %v, want EIO", err)
			}
			if r, again := s.Next(); r.Seq != 1 || again {
				t.Errorf("Next = %v, %v", r, again)
			}
			s.Skip() // too large for the server
			if s.Full() {
				t.Error("full for a report that goes after all others")
			}
			if err := seal(2, report("one", 2, 3)); err != nil || s.InMemory() != 8 {
				t.Errorf("a group behind one that cannot go = %v, %d in memory, want 8", err, s.InMemory())
			}
			if !sent(s, 1) || !sent(s, 2) || s.Unconfirmed() != 0 || s.InMemory() != 0 {
				t.Errorf("%d wait for the history and %d are in memory, want none", s.Unconfirmed(), s.InMemory())
			}
			count(s, 3, "t1", 2)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			want := "1 of 2: [one-3]"
			if powerCut { // these came after the last sync
				if err := os.WriteFile(file, onDisk, 0o600); err != nil {
					t.Fatal(err)
				}
				otherMachine(t, file)
				want = "0 of 0: []"
			}
			found, err := Read(dir, "gw")
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range found {
				if id := fmt.Sprint(r.Boot, "-", r.Seq, " ", r.Requests()); id != "one-3 2" || powerCut {
					t.Errorf("Read has %s", id)
				}
			}
			s = open(t, Config{}, dir, "two", nil)
			n, requests := s.Len()
			if got := fmt.Sprintf("%d of %d: %v", n, requests, ids(s)); got != want {
				t.Errorf("the next life has %s, want %s", got, want)
			}
		})
	}
}

// A disk that cannot say what was told from memory is told of, and usage goes out all the same.
func TestAHeaderThatCannotBeSynced(t *testing.T) {
	m := NewMetrics(prometheus.NewRegistry())
	failing := error(syscall.EIO)
	s := open(t, Config{sync: func(*os.File) error { return failing }, syncHeader: func([]byte) error { return failing }}, t.TempDir(), "one", m)
	for range 2 {
		if err := s.Append(report("one", 1, 5)); err != nil {
			t.Fatal(err)
		}
		_ = s.Commit(1) // the first time the disk refuses
	}
	if n, requests := s.Len(); n != 1 || requests != 5 || !s.trouble[noHeld] {
		t.Errorf("%d reports of %d requests can be sent, trouble %v, want 1 of 5 and that it may be told again", n, requests, s.trouble)
	}
	later(s)
	if s.Recover(); !s.trouble[noReports] || !s.refuses() {
		t.Error("nobody has asked the disk")
	}
	failing = nil
	sent(s, 1)
	if s.Recover(); !s.trouble[noReports] {
		t.Error("the disk is asked again at once")
	}
	later(s)
	if s.Recover(); s.trouble[noReports] {
		t.Error("the disk takes all, and shows as one that cannot be written until there is something to write")
	}
	add(t, s, 2, report("one", 2, 5))
	if len(s.trouble) > 0 || testutil.ToFloat64(m.Degraded) != 0 {
		t.Errorf("trouble %v on a disk that takes all", s.trouble)
	}
}

// A folder that cannot be written is an error of Open with its reason; the gateway goes on in memory.
func TestFolderThatCannotBeWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := Open(Config{}, filepath.Join(file, "spool"), "gw", "one", quiet, nil); err == nil || errors.Is(err, ErrInUse) || s != nil {
		t.Errorf("Open = %v, want an error", err)
	}
}

// Memory for counts is given back, and used again, when they are sealed.
func TestChunksAreUsedAgain(t *testing.T) {
	s := open(t, Config{}, t.TempDir(), "one", nil)
	for gen := uint32(1); gen < 200; gen++ {
		for lane := range maxLane {
			s.Cell(lane, gen, 1, "tenant", "route", "", "").Add(1)
		}
		add(t, s, gen, report("one", uint64(gen), maxLane))
	}
	if s.live.size > 4<<20 {
		t.Errorf("the file has %d bytes after many seals of 64 counts", s.live.size)
	}
	var found ingest.Found
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	d, err := openDead(liveName(s.dir, "one"))
	if err != nil {
		t.Fatal(err)
	}
	if damaged, err := d.each(0, func(_ uint32, c *ingest.Cell, x [4]string) { found.Add(c, x[0], x[1], x[2], x[3]) }); err != nil || damaged != 0 {
		t.Errorf("%d damaged, %v", damaged, err)
	}
	if n := len(found.Reports("gw", "b", 0)); n != 0 {
		t.Errorf("%d reports are found where all is sealed", n)
	}
	if err := d.f.Close(); err != nil {
		t.Error(err)
	}
}

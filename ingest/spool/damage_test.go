package spool

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/schemas"
)

// leave makes a spool of one life that has three reports of 500 requests in one file, and 7 requests that are not sealed.
func leave(t *testing.T) (dir, segment string) {
	t.Helper()
	dir = t.TempDir()
	s := open(t, Config{}, dir, "one", nil)
	for seq := uint64(1); seq <= 3; seq++ {
		add(t, s, uint32(seq), report("one", seq, 500))
	}
	count(s, 4, "live", 7)
	segment = s.active.f.Name()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, segment
}

// openNext opens the spool in dir for the next life of the gateway.
func openNext(t *testing.T, dir string) (*Spool, *Metrics, *bytes.Buffer) {
	t.Helper()
	var out bytes.Buffer
	m := NewMetrics(prometheus.NewRegistry())
	s, err := Open(Config{}, dir, "gw", "two", slog.New(slog.NewTextHandler(&out, nil)), m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, m, &out
}

// What cannot be read is told, with its place, counted, and kept aside; what can be is delivered. What a kill leaves behind
// the last commit is none of that.
func TestDamagedSegmentIsKept(t *testing.T) {
	edit := func(f func([]byte) []byte) func(*testing.T, string) {
		return func(t *testing.T, name string) {
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, f(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name     string
		harm     func(*testing.T, string)
		requests uint64
		ordinary bool
	}{
		{"other magic", edit(func(b []byte) []byte {
			var is, other [4]byte
			binary.LittleEndian.PutUint32(is[:], magic)
			binary.LittleEndian.PutUint32(other[:], magic+1)
			return bytes.ReplaceAll(b, is[:], other[:])
		}), 7, false},
		{"other seed", func(t *testing.T, name string) {
			if err := os.Rename(name, filepath.Join(filepath.Dir(name), "0000000000000000-00000001.seg")); err != nil {
				t.Fatal(err)
			}
		}, 7, false},
		{"cut within the last group", edit(func(b []byte) []byte { return b[:len(b)-60] }), 1007, false},
		{"cut behind a commit", edit(func(b []byte) []byte { return b[:(len(b)-segHead)/3*2+segHead] }), 1007, false},
		{"a bit", edit(func(b []byte) []byte { b[segHead+headBytes+30] ^= 1; return b }), 1007, false},
		{"garbage behind", edit(func(b []byte) []byte { return append(b, "garbage"...) }), 1507, false},
		{"zeros behind", edit(func(b []byte) []byte { return append(b, make([]byte, 4096)...) }), 1507, true},
		{"being written", edit(func(b []byte) []byte {
			r, _ := appendReport(nil, seedOf(b), report("one", 4, 7))
			return append(b, r[:len(r)-3]...)
		}), 1507, true},
		{"written and not committed", edit(func(b []byte) []byte {
			r, _ := appendReport(b, seedOf(b), report("one", 4, 7))
			return r
		}), 1507, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, name := leave(t)
			seedNow = name
			c.harm(t, name)
			if c.name == "other seed" {
				name = filepath.Join(dir, "0000000000000000-00000001.seg")
			}
			s, m, out := openNext(t, dir)
			if _, n := s.Len(); n != c.requests {
				t.Errorf("%d requests are there to send, want %d", n, c.requests)
			}
			told := strings.Contains(out.String(), filepath.Base(name)) && strings.Contains(out.String(), "offset=")
			if damaged := testutil.ToFloat64(m.Damaged) > 0; damaged == c.ordinary || told == c.ordinary {
				t.Errorf("damaged: %t, told: %t, want both %t:\n%s", damaged, told, !c.ordinary, out.String())
			}
			s.Stored(schemas.Floor{Stream: "s"}, &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, 100}}}})
			_, err := os.Stat(filepath.Join(dir, aside+filepath.Base(name)))
			if kept := err == nil; kept == c.ordinary {
				t.Errorf("kept aside when all is delivered: %t, want %t", kept, !c.ordinary)
			}
			if _, err := os.Stat(name); err == nil {
				t.Error("the file is still there under its name")
			}
		})
	}
}

// A report whose commit is cut off is missed, whether its life has the number still or was taken over long ago; one that never had
// a commit is cut off once, and no later start takes it for damage.
func TestReportsWithoutTheirCommit(t *testing.T) {
	commits := func(boot string) int { return 2 * (headBytes + 6 + len(boot)) }
	cut := func(name string, n int) {
		t.Helper()
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(name, info.Size()-int64(n)); err != nil {
			t.Fatal(err)
		}
	}
	damaged := func(dir, boot string, do func(*Spool)) float64 {
		t.Helper()
		m := NewMetrics(prometheus.NewRegistry())
		s := open(t, Config{}, dir, boot, m)
		if do != nil {
			do(s)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return testutil.ToFloat64(m.Damaged)
	}

	dir := t.TempDir()
	var name string
	damaged(dir, "one", func(s *Spool) {
		add(t, s, 1, report("one", 1, 500))
		name = s.active.f.Name()
	})
	cut(name, commits("one"))
	if n := damaged(dir, "two", nil); n != 1 {
		t.Errorf("%v damaged where the life says that its report was kept, want 1", n)
	}

	dir, _ = leave(t)
	damaged(dir, "two", func(s *Spool) { name = s.active.f.Name() })
	cut(name, commits("one"))
	if n := damaged(dir, "three", nil); n != 1 {
		t.Errorf("%v damaged where the counts are gone, want 1", n)
	}

	dir, name = leave(t)
	seedNow = name
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if b, err = appendReport(b, seedOf(b), report("one", 4, 7)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, boot := range []string{"two", "three"} {
		if n := damaged(dir, boot, nil); n != 0 {
			t.Errorf("life %s: %v damaged, want none: it was being written", boot, n)
		}
	}
}

// seedNow is the segment whose seed seedOf takes.
var seedNow string

func seedOf([]byte) uint32 {
	_, seed, err := segmentID(seedNow)
	if err != nil {
		panic(err)
	}
	return seed
}

// Files of a newer weir stay as they are, and are told of; those of one before files had a header are read.
func TestOtherVersions(t *testing.T) {
	dir, name := leave(t)
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, whole[segHead:], 0o600); err != nil {
		t.Fatal(err)
	}
	if all, err := Read(dir, "gw"); err != nil || len(all) != 4 {
		t.Errorf("Read of a file without a header = %d reports, %v, want 4", len(all), err)
	}
	binary.LittleEndian.PutUint32(whole[8:], version+1)
	binary.LittleEndian.PutUint32(whole[12:], crc32.Checksum(whole[:12], castagnoli))
	live := liveName(dir, "one")
	counts, err := os.ReadFile(live)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at <= 2048; at += 2048 {
		counts[at+7]++
		binary.LittleEndian.PutUint32(counts[at+124:], crc32.Checksum(counts[at:at+124], castagnoli))
	}
	if err := errors.Join(os.WriteFile(name, whole, 0o600), os.WriteFile(live, counts, 0o600)); err != nil {
		t.Fatal(err)
	}
	s, m, out := openNext(t, dir)
	if n, _ := s.Len(); n != 0 || strings.Count(out.String(), "level=ERROR") != 1 || !strings.Contains(out.String(), filepath.Base(name)) || !strings.Contains(out.String(), "newer weir") {
		t.Errorf("%d reports, want none and one line about it:\n%s", n, out.String())
	}
	if d, e := testutil.ToFloat64(m.Degraded), testutil.ToFloat64(m.Errors.WithLabelValues("version")); d != 1 || e != 2 {
		t.Errorf("degraded %v, %v errors, want 1 and 2", d, e)
	}
	for file, want := range map[string][]byte{name: whole, live: counts} {
		if b, err := os.ReadFile(file); err != nil || !bytes.Equal(b, want) {
			t.Errorf("%s is not what it was: %v", filepath.Base(file), err)
		}
	}
	if _, err := Read(dir, "gw"); !errors.Is(err, errNewer) {
		t.Errorf("Read = %v, want the reason why it cannot tell", err)
	}
}

// Reports are synced before they are handed out and before their counts are forgotten, those of a dead life as well.
func TestSyncedBeforeSent(t *testing.T) {
	dir := t.TempDir()
	var s *Spool
	synced := 0
	cfg := Config{sync: func(f *os.File) error {
		synced++
		if b, err := os.ReadFile(f.Name()); err != nil || len(b) <= segHead {
			t.Errorf("synced before it is written: %d bytes, %v", len(b), err)
		}
		if s == nil { // while it is opened
			if _, err := os.Stat(liveName(dir, "one")); err != nil {
				t.Errorf("the counts of a dead life are gone before their reports are synced: %v", err)
			}
			return syncData(f)
		}
		if r, _ := s.Next(); r != nil {
			t.Errorf("report %d can be sent before it is synced", r.Seq)
		}
		if len(s.live.taken[1]) == 0 {
			t.Error("the counts are forgotten before they are synced")
		}
		return syncData(f)
	}}
	s = open(t, cfg, dir, "one", nil)
	count(s, 1, "t", 5)
	add(t, s, 1, report("one", 1, 5))
	if r, _ := s.Next(); r == nil || synced != 1 || len(s.live.taken[1]) != 0 {
		t.Errorf("synced %d times, report %v, %d chunks left, want once, the report and none", synced, r, len(s.live.taken[1]))
	}
	count(s, 2, "t", 7)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, synced = nil, 0
	s = open(t, cfg, dir, "two", nil)
	if n, _ := s.Len(); synced != 1 || n != 2 {
		t.Errorf("synced %d times with %d reports to send, want 1 and 2", synced, n)
	}
	failing := errors.New("the disk is gone")
	s.cfg.sync = func(*os.File) error { return failing }
	count(s, 1, "t", 9)
	if err := errors.Join(s.Append(report("two", 1, 9)), s.Commit(1)); !errors.Is(err, failing) {
		t.Errorf("Commit = %v, want its cause", err)
	}
	if n, _ := s.Len(); n != 2 || len(s.live.taken[1]) != 1 {
		t.Errorf("%d reports can be sent with %d chunks of counts left, want 2 and 1", n, len(s.live.taken[1]))
	}
}

// Counts of earlier lives that find no room at the start are sealed when there is, once each.
func TestCountsThatFindNoRoomAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, _ := leave(t)
		full := true
		cfg := Config{sync: func(*os.File) error {
			if full {
				return syscall.ENOSPC
			}
			return nil
		}}
		m := NewMetrics(prometheus.NewRegistry())
		s := open(t, cfg, dir, "two", m)
		if _, n := s.Len(); n != 1500 || testutil.ToFloat64(m.Degraded) != 1 {
			t.Errorf("%d requests, degraded %v, want what was sealed, and 1", n, testutil.ToFloat64(m.Degraded))
		}
		time.Sleep(lateEvery)
		if n := s.Recover(); n != 0 || testutil.ToFloat64(m.Degraded) != 1 {
			t.Errorf("Recover on a full disk = %d with degraded %v", n, testutil.ToFloat64(m.Degraded))
		}
		full = false
		if n := s.Recover(); n != 0 {
			t.Error("Recover tries at once again")
		}
		time.Sleep(lateEvery)
		for _, want := range []int{1, 0} {
			if n := s.Recover(); n != want {
				t.Errorf("Recover = %d, want %d", n, want)
			}
			time.Sleep(lateEvery)
		}
		if _, n := s.Len(); n != 1507 || testutil.ToFloat64(m.Degraded) != 0 {
			t.Errorf("%d requests, degraded %v, want 1507 and 0", n, testutil.ToFloat64(m.Degraded))
		}
		if got := fmt.Sprint(ids(s)); got != "[one-1 one-2 one-3 one-4]" {
			t.Errorf("sent %s", got)
		}
		if _, err := os.Stat(liveName(dir, "one")); err == nil {
			t.Error("their file is still there")
		}
	})
}

// A reporter tries them again by itself, whether anybody asks it for anything or not.
func TestReporterDeliversThemWhenThereIsRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, _ := leave(t)
		var full atomic.Bool
		full.Store(true)
		s, err := Open(Config{sync: func(*os.File) error {
			if full.Load() {
				return syscall.ENOSPC
			}
			return nil
		}}, dir, "gw", "two", quiet, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		far := &switched{sent: map[string]bool{}}
		_, stop := start(t, s, "two", far)
		time.Sleep(time.Minute)
		synctest.Wait()
		if far.sent["one4"] || !far.sent["one3"] {
			t.Errorf("sent %v on a full disk, want what was sealed", far.sent)
		}
		full.Store(false)
		time.Sleep(lateEvery + 2*time.Second)
		synctest.Wait()
		if !far.sent["one4"] {
			t.Errorf("sent %v when there was room again", far.sent)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// A running life does not know which numbers of its own are free: what a power cut has left late gets a boot of its own.
func TestLateCountsOfAnotherLifeOfTheMachine(t *testing.T) {
	dir, _ := leave(t)
	otherMachine(t, liveName(dir, "one"))
	failing := syscall.ENOSPC
	cfg := Config{sync: func(*os.File) error {
		if failing != 0 {
			return failing
		}
		return nil
	}}
	s := open(t, cfg, dir, "two", nil)
	failing, s.lateAt = 0, time.Time{}
	add(t, s, 1, report("two", 1, 1))
	if n := s.Recover(); n != 1 {
		t.Fatalf("Recover = %d, want 1", n)
	}
	all := ids(s)
	if last := all[len(all)-1]; len(all) != 5 || strings.HasPrefix(last, "two-") || strings.HasPrefix(last, "one-") || !strings.HasSuffix(last, "-1") {
		t.Errorf("sent %v, want the last one under another boot", all)
	}
}

func otherMachine(t *testing.T, name string) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at <= 2048; at += 2048 {
		copy(b[at+16:], "another life")
		binary.LittleEndian.PutUint32(b[at+124:], crc32.Checksum(b[at:at+124], castagnoli))
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Damaged counts are kept aside as well.
func TestDamagedCountsAreKept(t *testing.T) {
	dir, _ := leave(t)
	name := liveName(dir, "one")
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(b, []byte("liver")) // tenant and route
	if at < 0 {
		t.Fatal("the count is not there")
	}
	b[at]++
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	m := NewMetrics(prometheus.NewRegistry())
	s := open(t, Config{}, dir, "two", m)
	if _, n := s.Len(); n != 1500 || testutil.ToFloat64(m.Damaged) != 1 {
		t.Errorf("%d requests, %v damaged, want 1500 and 1", n, testutil.ToFloat64(m.Damaged))
	}
	if _, err := os.Stat(filepath.Join(dir, aside+filepath.Base(name))); err != nil {
		t.Error(err)
	}
}

// A file of counts that was cut off anywhere is told of and kept aside, and so is one whose header cannot be read; one that was just
// made, or is of before its length was written down, is not.
func TestCountsThatWereCutOff(t *testing.T) {
	cut := func(size int64) func(*testing.T, string) {
		return func(t *testing.T, name string) {
			if err := os.Truncate(name, size); err != nil {
				t.Fatal(err)
			}
		}
	}
	write := func(b []byte) func(*testing.T, string) {
		return func(t *testing.T, name string) {
			if err := os.WriteFile(name, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	clearAt := func(at, n int64) func(*testing.T, string) {
		return func(t *testing.T, name string) {
			f, err := os.OpenFile(name, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt(make([]byte, n), at); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	both := func(all ...func(*testing.T, string)) func(*testing.T, string) {
		return func(t *testing.T, name string) {
			for _, f := range all {
				f(t, name)
			}
		}
	}
	full := func(s *Spool) {
		add(t, s, 1, report("one", 1, 500))
		count(s, 2, "live", 119)
	}
	for _, c := range []struct {
		name     string
		life     func(*Spool)
		harm     func(*testing.T, string)
		ordinary bool
		requests uint64
	}{
		{"whole", full, cut(chunkBytes + 2*slabBytes), true, 619},
		{"longer, a slab was being made", full, cut(chunkBytes + 2*slabBytes + 5000), true, 619},
		{"0", full, cut(0), false, 500},
		{"4096", full, cut(4096), false, 500},
		{"5000", full, cut(5000), false, 500},
		{"16384", full, cut(16384), false, 500},
		{"20000", full, cut(20000), false, 500},
		{"200000", full, cut(200_000), false, 500},
		{"1000000", full, cut(1_000_000), false, 500},
		{"1100000", full, cut(1_100_000), false, 500},
		{"2000000", full, cut(2_000_000), false, 500},
		{"of before", full, both(clearAt(madeAt, 8), cut(1_100_000)), true, 500},
		{"no header", full, clearAt(0, chunkBytes), false, 500},
		{"zeros of a life with reports", full, write(make([]byte, 8192)), false, 500},
		{"0 of a life without reports", func(*Spool) {}, cut(0), false, 0},
		{"zeros of a life without reports", func(*Spool) {}, write(make([]byte, 8192)), false, 0},
		{"a header, just made", func(*Spool) {}, both(clearAt(madeAt, 8), cut(chunkBytes)), true, 0},
		{"a life without reports", func(s *Spool) { count(s, 1, "live", 119) }, cut(5000), false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, Config{}, dir, "one", nil)
			c.life(s)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			name := liveName(dir, "one")
			c.harm(t, name)
			harmed, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			s, m, out := openNext(t, dir)
			if _, n := s.Len(); n != c.requests {
				t.Errorf("%d requests can be sent, want %d", n, c.requests)
			}
			told := strings.Contains(out.String(), "level=ERROR") && strings.Contains(out.String(), aside+filepath.Base(name))
			if damaged := testutil.ToFloat64(m.Damaged); (damaged == 1) == c.ordinary || told == c.ordinary {
				t.Errorf("%v damaged, told %t, ordinary %t:\n%s", damaged, told, c.ordinary, out.String())
			}
			kept, err := os.ReadFile(filepath.Join(dir, aside+filepath.Base(name)))
			if (err == nil) == c.ordinary || err == nil && !bytes.Equal(kept, harmed) {
				t.Errorf("kept aside: %v, want %t", err, !c.ordinary)
			}
			if _, err := os.Stat(name); err == nil {
				t.Error("the file is still there under its name")
			}
		})
	}
}

// A file has its name once it has its beginning: one that is empty has lost something, also when nothing else is left of its life.
func TestAnEmptyFileIsDamaged(t *testing.T) {
	dir, segment := leave(t)
	live := liveName(dir, "one")
	if err := errors.Join(os.Truncate(segment, 0), os.Truncate(live, 0)); err != nil {
		t.Fatal(err)
	}
	files := []string{filepath.Base(segment), filepath.Base(live)}
	s, m, out := openNext(t, dir)
	if n := testutil.ToFloat64(m.Damaged); n != 2 {
		t.Errorf("%v damaged, want 2:\n%s", n, out.String())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, _, next := openNext(t, dir) // which counts from 0 again
	for _, name := range files {
		if !strings.Contains(out.String(), "file="+name) {
			t.Errorf("nothing is told of %s:\n%s", name, out.String())
		}
		if _, err := os.Stat(filepath.Join(dir, aside+name)); err != nil {
			t.Error(err)
		}
		if !strings.Contains(next.String(), aside+name) || strings.Count(next.String(), "level=WARN") != 1 {
			t.Errorf("the next start does not tell of %s in its one warning:\n%s", name, next.String())
		}
	}
}

func TestCreateNamesWhatIsBegun(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "0000000000000000-00000001.seg")
	refused := errors.New("refused")
	for _, want := range []error{refused, nil} {
		f, err := create(name, func(f *os.File) error {
			if _, err := f.WriteString("begun"); err != nil {
				return err
			}
			if _, err := os.Stat(name); err == nil {
				t.Error("it has its name before it is begun")
			}
			if names, err := segmentNames(dir, func(name string) { t.Errorf("%s is taken for a file of ours", name) }); err != nil || len(names) > 0 {
				t.Errorf("names = %v, %v, want none", names, err)
			}
			return want
		})
		if !errors.Is(err, want) {
			t.Fatalf("create = %v, want %v", err, want)
		}
		left, err := os.ReadDir(dir)
		if err != nil || len(left) > 0 != (want == nil) {
			t.Errorf("%v is left, %v, with %v", left, err, want)
		}
		if want == nil {
			if _, err := f.WriteString(" and gone on"); err != nil {
				t.Error(err)
			}
			if b, err := os.ReadFile(f.Name()); err != nil || string(b) != "begun and gone on" || f.Name() != name {
				t.Errorf("%s = %q, %v", f.Name(), b, err)
			}
			_ = f.Close()
		}
	}
	half := filepath.Join(dir, making+"live-one") // a kill
	if err := errors.Join(os.Remove(name), os.WriteFile(half, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, m, out := openNext(t, dir)
	if _, err := os.Stat(half); err == nil || testutil.ToFloat64(m.Damaged) != 0 || out.Len() > 0 {
		t.Errorf("%v damaged, want what a kill has left half made swept away without a word:\n%s", testutil.ToFloat64(m.Damaged), out.String())
	}
}

// What a spool could not read is told to whoever asks, with what of it can be told, from when it is damaged until somebody takes the file
// away, over any number of lives.
func TestDamageIsToldUntilItIsTakenAway(t *testing.T) {
	stored := &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, 100}}}}
	told := func(dir string, want ...string) {
		t.Helper()
		all, err := Damaged(dir)
		if err != nil || len(all) != len(want) {
			t.Fatalf("Damaged = %+v, %v, want %d", all, err, len(want))
		}
		for i, w := range want {
			text := fmt.Sprintf("%s of %s: %s", all[i].File, all[i].Boot, all[i].What)
			for _, part := range strings.Split(w, "|") {
				if !strings.Contains(text, part) {
					t.Errorf("told %q, want %q in it", text, part)
				}
			}
			if all[i].Aside != strings.HasPrefix(w, aside) || all[i].At.IsZero() {
				t.Errorf("aside %t at %s with %q", all[i].Aside, all[i].At, text)
			}
		}
	}
	dir, segment := leave(t)
	live := liveName(dir, "one")
	told(dir)
	info, err := os.Stat(segment)
	if err != nil {
		t.Fatal(err)
	}
	third := (info.Size() - segHead) / 3
	// Cut at a commit, which only the life before knows, and counts cut off behind the header.
	if err := errors.Join(os.Truncate(segment, segHead+2*third), os.Truncate(live, chunkBytes)); err != nil {
		t.Fatal(err)
	}
	told(dir, filepath.Base(segment)+"|of one:|what followed its|reports 1 to 2", "live-one of one|1 places|of 0 requests|"+fmt.Sprint(chunkBytes)+" bytes of")
	asides := []string{aside + filepath.Base(segment) + "|of one:|what followed its|reports 1 to 2", aside + "live-one of one|1 places"}
	for i, boot := range []string{"two", "three", "four"} { // nothing can be sent in the first two
		s := open(t, Config{}, dir, boot, nil)
		if _, n := s.Len(); n != 1000 {
			t.Errorf("life %s has %d requests to send, want 1000", boot, n)
		}
		told(dir, asides...)
		if i == 2 {
			s.Stored(schemas.Floor{Stream: "s"}, stored)
			if _, err := os.Stat(segment); err == nil || s.Bytes() != 0 {
				t.Errorf("%d bytes are kept though all is stored", s.Bytes())
			}
			told(dir, asides...)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	told(dir, asides...)
	names, err := filepath.Glob(filepath.Join(dir, aside+"*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	told(dir)

	dir, segment = leave(t)
	b, err := os.ReadFile(segment)
	if err != nil {
		t.Fatal(err)
	}
	b[segHead+third+headBytes+30] ^= 1 // in the second report
	if err := os.WriteFile(segment, b[:len(b)-60], 0o600); err != nil {
		t.Fatal(err)
	}
	told(dir, filepath.Base(segment)+"|of one:|in 1 places|the first at offset "+fmt.Sprint(segHead+third)+"|reports 1")

	// What the first life has found is as it was, though the second may think that a kill has left it so.
	dir = t.TempDir()
	s := open(t, Config{}, dir, "one", nil)
	add(t, s, 1, report("one", 1, 500))
	add(t, s, 2, report("one", 2, 500))
	segment = s.active.f.Name()
	if err := errors.Join(s.Close(), os.Truncate(segment, segHead+third+50)); err != nil {
		t.Fatal(err)
	}
	for _, boot := range []string{"two", "three"} {
		if err := open(t, Config{}, dir, boot, nil).Close(); err != nil {
			t.Fatal(err)
		}
		told(dir, aside+filepath.Base(segment)+"|50 bytes from offset "+fmt.Sprint(segHead+third)+" |reports 1")
	}
}

// A gateway that counts and seals is not damaged, whenever somebody looks; nor is one that was killed.
func TestARunningGatewayIsNotDamaged(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{SegmentBytes: 64 << 10, sync: func(*os.File) error { return nil }}, dir, "one", nil)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for seq := uint64(1); ; seq++ {
			select {
			case <-stop:
				return
			default:
			}
			count(s, uint32(seq), fmt.Sprint("t", seq), 3)
			err := errors.Join(s.Append(report("one", 2*seq, 3)), s.write(), s.Append(report("one", 2*seq+1, 3)), s.write())
			if seq%7 == 0 {
				s.giveUp()
				continue
			}
			if err = errors.Join(err, s.Commit(uint32(seq))); err != nil {
				t.Error(err)
				return
			}
			if seq%50 == 0 {
				ids(s)
				s.Stored(schemas.Floor{Stream: "s"}, &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, 2*seq - 20}}}})
			}
		}
	}()
	for range 200 {
		if all, err := Damaged(dir); err != nil || len(all) > 0 {
			t.Fatalf("Damaged = %+v, %v, want none", all, err)
		}
	}
	close(stop)
	<-done
	if err := errors.Join(s.Append(report("one", 1<<40, 3)), s.write(), s.lock.Close()); err != nil { // a kill in the middle of a group
		t.Fatal(err)
	}
	if all, err := Damaged(dir); err != nil || len(all) > 0 {
		t.Errorf("Damaged after a kill = %+v, %v, want none", all, err)
	}
}

// What cannot be told from damage at one look is looked at again, in a file that grows; counts that are written just now are not looked at.
func TestWhatARunningGatewayIsWriting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := open(t, Config{}, dir, "one", nil)
		count(s, 1, "live", 7)
		if err := errors.Join(s.Append(report("none", 1, 7)), s.write()); err != nil { // of a life that has no counts on disk
			t.Fatal(err)
		}
		chunk := s.live.taken[1][0]
		chunk[chunkHead+entryBytes]++ // its entry is being replaced
		go func() {
			time.Sleep(lookAgain / 2)
			if err := s.commit("one", 0); err != nil {
				t.Error(err)
			}
		}()
		if all, err := Damaged(dir); err != nil || len(all) > 0 {
			t.Errorf("Damaged = %+v, %v, want none", all, err)
		}
		synctest.Wait()
		if err := errors.Join(s.Append(report("none", 2, 7)), s.write()); err != nil {
			t.Fatal(err)
		}
		if all, err := Damaged(dir); err != nil || len(all) != 1 || !strings.HasSuffix(all[0].File, ".seg") {
			t.Errorf("Damaged = %+v, %v, want the file that stays as it is", all, err)
		}
		_ = s.lock.Close()
		if all, err := Damaged(dir); err != nil || len(all) != 2 || all[1].Boot != "one" {
			t.Errorf("Damaged of a life that has ended = %+v, %v, want its counts as well", all, err)
		}
	})
}

// What is before the cut is delivered, to the last whole entry.
func TestCountsBeforeTheCutAreDelivered(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{}, dir, "one", nil)
	const entry = entryBytes + 16
	const perChunk = (chunkBytes - chunkHead) / entry
	for i := range 2 * slabBytes / chunkBytes * perChunk { // every chunk is full
		count(s, 1, fmt.Sprintf("tenant-%07d", i), 1)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(liveName(dir, "one"), chunkBytes+10*chunkBytes+chunkHead+100*entry+20); err != nil {
		t.Fatal(err)
	}
	s, m, out := openNext(t, dir)
	if _, n := s.Len(); n != 10*perChunk+100 || testutil.ToFloat64(m.Damaged) == 0 {
		t.Errorf("%d requests can be sent, %v damaged, want %d and some:\n%s", n, testutil.ToFloat64(m.Damaged), 10*perChunk+100, out.String())
	}
}

// A file of reports that lost its end is told of and kept aside even when nothing is left in it. One that was just begun is not damaged.
func TestReportsThatWereCutOff(t *testing.T) {
	stored := func(s *Spool, last uint64) {
		ids(s)
		s.Stored(schemas.Floor{Stream: "s", Seq: 1}, &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, last}}}})
	}
	for _, c := range []struct {
		name    string
		life    func(t *testing.T, s *Spool)
		file    int   // which one is cut
		size    int64 // less than 0: not
		damaged float64
	}{
		{"the only one to nothing", func(t *testing.T, s *Spool) { add(t, s, 1, report("one", 1, 1482)) }, 0, 0, 1},
		{"within its header", func(t *testing.T, s *Spool) { add(t, s, 1, report("one", 1, 1482)) }, 0, 10, 1},
		{"behind its header", func(t *testing.T, s *Spool) { add(t, s, 1, report("one", 1, 1482)) }, 0, segHead, 1},
		{"counts of an earlier life", func(t *testing.T, s *Spool) {
			count(s, 1, "live", 7)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			next := open(t, Config{}, s.dir, "next", nil)
			_ = next.lock.Close()
		}, 0, 0, 1},
		{"an older one", func(t *testing.T, s *Spool) {
			add(t, s, 1, report("one", 1, 1482))
			s.cfg.SegmentBytes = 1
			add(t, s, 2, report("one", 2, 1))
		}, 0, 0, 1},
		{"the last of two", func(t *testing.T, s *Spool) {
			add(t, s, 1, report("one", 1, 1482))
			s.cfg.SegmentBytes = 1
			add(t, s, 2, report("one", 2, 1))
		}, 1, 0, 1},
		{"whole", func(t *testing.T, s *Spool) {
			add(t, s, 1, report("one", 1, 1482))
			s.cfg.SegmentBytes = 1
			add(t, s, 2, report("one", 2, 1))
		}, 0, -1, 0},
		{"just begun", func(t *testing.T, s *Spool) {
			if err := s.begin(); err != nil {
				t.Fatal(err)
			}
		}, 0, -1, 0},
		{"just begun behind one that is stored", func(t *testing.T, s *Spool) {
			s.cfg.SegmentBytes = 1
			add(t, s, 1, report("one", 1, 1482))
			stored(s, 1)
			if err := s.begin(); err != nil {
				t.Fatal(err)
			}
		}, 0, -1, 0},
		{"given up", func(t *testing.T, s *Spool) {
			if err := errors.Join(s.append(report("one", 1, 1482)), s.write()); err != nil {
				t.Fatal(err)
			}
			s.giveUp()
		}, 0, -1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, Config{}, dir, "one", nil)
			c.life(t, s)
			_ = s.lock.Close() // as the end of the process does
			names, err := segmentNames(dir, func(string) {})
			if err != nil || len(names) <= c.file {
				t.Fatal(names, err)
			}
			if c.size >= 0 {
				if err := os.Truncate(names[c.file], c.size); err != nil {
					t.Fatal(err)
				}
			}
			_, m, out := openNext(t, dir)
			told := strings.Contains(out.String(), aside+filepath.Base(names[c.file]))
			_, err = os.Stat(filepath.Join(dir, aside+filepath.Base(names[c.file])))
			if n := testutil.ToFloat64(m.Damaged); n != c.damaged || told != (n > 0) || (err == nil) != (n > 0) {
				t.Errorf("%v damaged, told %t, kept aside %v, want %v:\n%s", n, told, err, c.damaged, out.String())
			}
		})
	}
}

// What only has a name like one of ours is told of, and stays as it is: a copy of counts under another name is not another life's, which would
// deliver them again, and a folder keeps nothing from being delivered.
func TestWhatIsNoneOfOurs(t *testing.T) {
	dir, _ := leave(t)
	counts, err := os.ReadFile(liveName(dir, "one"))
	if err != nil {
		t.Fatal(err)
	}
	strays := []string{"live-other", "live-one.bak", "live-", "live-folder", "00000000000000aa-01020304.seg", "x.seg", "new-folder"}
	for _, name := range strays[:3] {
		if err := os.WriteFile(filepath.Join(dir, name), counts, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range strays[3:] {
		if err := os.MkdirAll(filepath.Join(dir, name, "in it"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if all, err := Read(dir, "gw"); err != nil || len(all) != 4 {
		t.Errorf("Read = %v, %v, want 4 reports", all, err)
	}
	if all, err := Damaged(dir); err != nil || len(all) != 0 {
		t.Errorf("Damaged = %v, %v, want nothing", all, err)
	}
	s, m, out := openNext(t, dir)
	if all, want := ids(s), "[one-1 one-2 one-3 one-4]"; fmt.Sprint(all) != want || testutil.ToFloat64(m.Damaged) != 0 || testutil.ToFloat64(m.Recovered) != 7 {
		t.Errorf("sent %v with %v damaged, %v recovered, want %s, none and 7", all, testutil.ToFloat64(m.Damaged), testutil.ToFloat64(m.Recovered), want)
	}
	if n := strings.Count(out.String(), noneOfOurs); n != len(strays)-1 || s.Troubled() {
		t.Errorf("told %d times, want once of each:\n%s", n, out.String())
	}
	for _, name := range strays {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("it did not stay: %v", err)
		}
	}
}

// Counts of before their boot was written down are of the one that their file is named after.
func TestCountsThatDoNotSayTheirBoot(t *testing.T) {
	dir, _ := leave(t)
	name := liveName(dir, "one")
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at <= 2048; at += 2048 {
		clear(b[at+80 : at+112])
		binary.LittleEndian.PutUint32(b[at+124:], crc32.Checksum(b[at:at+124], castagnoli))
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, _, _ := openNext(t, dir); fmt.Sprint(ids(s)) != "[one-1 one-2 one-3 one-4]" {
		t.Error("they are not delivered")
	}
}

// What nobody holds is told, sealed or not; what somebody holds is his.
func TestAbandoned(t *testing.T) {
	dir, _ := leave(t)
	if all, err := Abandoned(dir, "gw"); err != nil || len(all) != 4 || all[0].Requests() != 500 || all[3].Requests() != 7 {
		t.Errorf("Abandoned = %+v, %v, want the reports and the counts", all, err)
	}
	if all, err := Read(dir, "gw"); err != nil || len(all) != 4 || all[3].Seq != 4 || all[3].Boot != "one" || all[3].Requests() != 7 {
		t.Errorf("Read = %+v, %v, want the counts as report 4", all, err)
	}
	s := open(t, Config{}, dir, "two", nil)
	count(s, 1, "t", 3)
	if all, err := Abandoned(dir, "gw"); len(all) != 0 || err != nil {
		t.Errorf("Abandoned of one that is held = %v, %v, want nothing", all, err)
	}
	if all, err := Read(dir, "gw"); err != nil || len(all) != 5 || all[4].Boot != "two" || all[4].Requests() != 3 {
		t.Errorf("Read beside a running gateway = %+v, %v, want its counts too", all, err)
	}
	if err := errors.Join(s.Append(report("two", 1, 3)), s.commit("two", 1)); err != nil { // and the counts not forgotten yet
		t.Fatal(err)
	}
	if all, err := Read(dir, "gw"); err != nil || len(all) != 5 || all[4].Requests() != 3 {
		t.Errorf("Read after the seal = %+v, %v, want them once", all, err)
	}
	if all, err := Abandoned(t.TempDir(), "gw"); len(all) != 0 || err != nil {
		t.Errorf("Abandoned of an empty folder = %v, %v", all, err)
	}
}

// Whoever deletes the files of a gateway that runs is found out: nothing else would tell until a kill. It goes on in new ones, at once for
// reports and from the next seal for counts.
func TestFilesDeletedInUse(t *testing.T) {
	for name, taken := range map[string][]string{"the folder": {""}, "its files": {"*.seg", "live-*"}, "reports": {"*.seg"}, "counts": {"live-*"}} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "spool")
			var out bytes.Buffer
			m := NewMetrics(prometheus.NewRegistry())
			s, err := Open(Config{}, dir, "gw", "one", slog.New(slog.NewTextHandler(&out, nil)), m)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			add(t, s, 1, report("one", 1, 5))
			s.Cell(0, 2, 1, "t", "r", "", "").Add(1)
			if s.Recover(); s.Troubled() {
				t.Fatal("troubled before anything was taken")
			}
			for _, pattern := range taken {
				names, err := filepath.Glob(filepath.Join(dir, pattern))
				if err != nil || len(names) == 0 {
					t.Fatal(names, err)
				}
				for _, name := range names {
					if err := os.RemoveAll(name); err != nil {
						t.Fatal(err)
					}
				}
			}
			s.Recover()
			if n := strings.Count(out.String(), "level=ERROR"); n != 1 || testutil.ToFloat64(m.Degraded) != 1 || testutil.ToFloat64(m.Errors.WithLabelValues("gone")) != 1 {
				t.Errorf("told %d times with degraded %v, want once and 1:\n%s", n, testutil.ToFloat64(m.Degraded), out.String())
			}
			add(t, s, 2, report("one", 2, 7))
			for n := range int64(500) { // more than what is left of a chunk
				s.Cell(0, 3, 1, fmt.Sprint("tenant-", n), "r", "", "").Add(1)
			}
			if r, _ := s.Next(); r == nil || r.Seq != 1 {
				t.Fatalf("Next = %v, want the report that is in a deleted file", r)
			}
			killed := filepath.Join(t.TempDir(), "killed")
			if err := os.CopyFS(killed, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			next, nm, _ := openNext(t, killed)
			want := uint64(507)
			if name == "counts" {
				want += 5 // the first report
			}
			if _, n := next.Len(); n != want || testutil.ToFloat64(nm.Damaged) != 0 {
				t.Errorf("after a kill %d requests, %v damaged, want %d and none", n, testutil.ToFloat64(nm.Damaged), want)
			}
			if s.Recover(); name != "counts" && !s.Troubled() {
				t.Error("no longer troubled, though a kill would lose the first report")
			}
			ids(s)
			s.Stored(schemas.Floor{Stream: "s"}, &schemas.Stored{Boots: map[string]schemas.Ranges{"one": {{1, 2}}}})
			if s.Recover(); s.Troubled() || testutil.ToFloat64(m.Degraded) != 0 {
				t.Errorf("still troubled:\n%s", out.String())
			}
			if strings.Contains(out.String(), "level=WARN") {
				t.Errorf("a file that is gone need not go:\n%s", out.String())
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

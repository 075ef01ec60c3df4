package spool

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/schemas"
)

var quiet = slog.New(slog.DiscardHandler)

// childDir is set in the process that is to be killed.
const childDir = "WEIR_TEST_SPOOL_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		child(dir)
	}
	os.Exit(m.Run())
}

const (
	counters = 4 // goroutines that count
	keys     = 300
)

// journal is the oracle: for each key, how many counts were begun and how many had returned, and their costs. It is a
// file that is mapped by the one process that counts at a time, and read by the parent when that is dead.
type journal []byte

func openJournal(dir string) journal {
	f, err := os.OpenFile(filepath.Join(dir, "journal"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		panic(err)
	}
	if err := f.Truncate(counters * keys * 32); err != nil {
		panic(err)
	}
	b, err := syscall.Mmap(int(f.Fd()), 0, counters*keys*32, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	return b
}

func (j journal) at(g, key, field int) *uint64 { return word(j[((g*keys+key)*4+field)*8:]) }

// store is the far side: a folder with a file for each report. It loses attempts, and answers.
type store struct{ dir string }

func (s store) Publish(ctx context.Context, r *schemas.Report) error {
	_, err := s.Put(ctx, r, false)
	return err
}

func (s store) Put(_ context.Context, r *schemas.Report, _ bool) (uint64, error) {
	dice := mathrand.IntN(8)
	if dice == 0 {
		return 0, errors.New("lost")
	}
	body, err := schemas.EncodeReport(r)
	if err != nil {
		panic(err)
	}
	name := filepath.Join(s.dir, fmt.Sprintf("%s-%d", r.Boot, r.Seq))
	if have, err := os.ReadFile(name); err == nil && string(have) != string(body) {
		_ = os.WriteFile(filepath.Join(s.dir, "changed-"+filepath.Base(name)), body, 0o600)
	}
	if err := os.WriteFile(name+".new", body, 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		panic(err)
	}
	if dice == 1 {
		return 0, errors.New("answer lost")
	}
	return 1, nil
}

func (s store) Stored(context.Context) (schemas.Floor, *schemas.Stored, error) {
	all := &schemas.Stored{Boots: map[string]schemas.Ranges{}}
	names, err := os.ReadDir(s.dir)
	if err != nil {
		panic(err)
	}
	for _, n := range names {
		boot, no, _ := strings.Cut(n.Name(), "-")
		var seq uint64
		if _, err := fmt.Sscanf(no, "%d", &seq); err != nil || strings.HasSuffix(no, ".new") {
			continue
		}
		all.Boots[boot], _ = all.Boots[boot].Add(seq)
	}
	return schemas.Floor{Stream: "s"}, all, nil
}

type noBuckets struct{}

func (noBuckets) Collect(int64, bool, func(schemas.Tokens)) {}
func (noBuckets) Hot() <-chan struct{}                      { return nil }

// child counts until it is killed.
func child(dir string) {
	boot := rand.Text()
	s, err := Open(Config{SegmentBytes: 16 << 10}, filepath.Join(dir, "spool"), "gw", boot, quiet, nil)
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	j := openJournal(dir)
	r := ingest.New(ingest.Config{Spool: s, HotEvery: 2 * time.Millisecond, UsageEvery: 2 * time.Millisecond, MaxEntries: 100, RetryMax: 2 * time.Millisecond},
		"gw", boot, noBuckets{}, store{filepath.Join(dir, "store")}, quiet, nil)
	for g := range counters {
		go func() {
			rng := mathrand.New(mathrand.NewPCG(mathrand.Uint64(), 0))
			for {
				k := rng.IntN(1 + rng.IntN(keys))
				cost := rng.Uint64N(9)
				atomic.AddUint64(j.at(g, k, 0), 1)
				atomic.AddUint64(j.at(g, k, 2), cost)
				r.Count(time.Now(), fmt.Sprintf("g%d-k%d", g, k), "route", "", "", int64(cost))
				atomic.AddUint64(j.at(g, k, 1), 1)
			}
		}()
	}
	if os.Getenv(childDir+"_STOP") != "" {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		_ = r.Run(ctx)
		os.Exit(0) // in the middle of counting
	}
	_ = r.Run(context.Background())
}

// A process that is killed at any time, again and again, loses no count and doubles none: what its lives delivered and
// what the last one left in its spool is what was counted. Each counting goroutine may have been in the middle of one
// count at each kill.
func TestKilledAtAnyTimeNothingIsLost(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "store"), 0o700); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	j := openJournal(dir)
	const kills = 110
	for i := range kills {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), childDir+"="+dir)
		if i%10 == 9 {
			cmd.Env = append(cmd.Env, childDir+"_STOP=1")
		}
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		before := total(j, 0)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(30 * time.Second); total(j, 0) == before; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("the child counts nothing: %s", out.String())
			}
		}
		if i%10 != 9 {
			time.Sleep(time.Duration(mathrand.Int64N(int64(30 * time.Millisecond))))
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmd.Wait(); err != nil && !strings.Contains(err.Error(), "killed") {
			t.Fatalf("child: %v: %s", err, out.String())
		}
	}
	got, cost := drained(t, dir)
	if damaged, err := filepath.Glob(filepath.Join(dir, "spool", aside+"*")); err != nil || len(damaged) > 0 {
		t.Errorf("a kill is taken for damage: %v, %v", damaged, err)
	}
	var n, low, high uint64
	for g := range counters {
		for k := range keys {
			name := fmt.Sprintf("g%d-k%d", g, k)
			begun, done := *j.at(g, k, 0), *j.at(g, k, 1)
			if got[name] < done || got[name] > begun {
				t.Errorf("%s: %d requests are stored, want %d to %d", name, got[name], done, begun)
			}
			if begun == done && cost[name] != *j.at(g, k, 2) {
				t.Errorf("%s: cost %d is stored, want %d", name, cost[name], *j.at(g, k, 2))
			}
			n, low, high = n+got[name], low+done, high+begun
		}
	}
	if n < low || n > high || high-low > kills*counters {
		t.Errorf("%d requests are stored, want %d to %d", n, low, high)
	}
	changed, err := filepath.Glob(filepath.Join(dir, "store", "changed-*"))
	if err != nil || len(changed) > 0 {
		t.Errorf("reports came again with another content: %v, %v", changed, err)
	}
	t.Logf("%d kills: %d requests stored, of which %d were open", kills, n, high-low)
}

func total(j journal, field int) (n uint64) {
	for g := range counters {
		for k := range keys {
			n += atomic.LoadUint64(j.at(g, k, field))
		}
	}
	return n
}

// drained opens the spool once more and adds up what is in the store and in it.
func drained(t *testing.T, dir string) (requests, cost map[string]uint64) {
	t.Helper()
	s, err := Open(Config{}, filepath.Join(dir, "spool"), "gw", "last", quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	far := store{filepath.Join(dir, "store")}
	for r, _ := s.Next(); r != nil; r, _ = s.Next() {
		for {
			if _, err := far.Put(t.Context(), r, false); err == nil {
				break
			}
		}
		s.Sent(1)
	}
	requests, cost = map[string]uint64{}, map[string]uint64{}
	names, err := os.ReadDir(far.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if strings.HasSuffix(n.Name(), ".new") || strings.HasPrefix(n.Name(), "changed") {
			continue
		}
		body, err := os.ReadFile(filepath.Join(far.dir, n.Name()))
		if err != nil {
			t.Fatal(err)
		}
		r, err := schemas.DecodeSealed(body)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range r.Usage {
			requests[u.Tenant] += u.Allowed + u.Rejected
			cost[u.Tenant] += u.Cost
		}
	}
	return requests, cost
}

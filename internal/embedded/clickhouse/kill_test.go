package clickhouse

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A writer that retries with the same token and rows until it is told yes stores no batch twice, and none in part, whenever the server is
// killed. But one may be missing: the server writes the token down before the part is there, and drops the rows that come again when it is
// killed in between. That is some milliseconds of each insert, and why aggregator/clickhouse looks whether the rows are there.
func TestKilledInMidInsert(t *testing.T) {
	const batches, size, kills = 200, 200, 10
	s := start(t, Config{Database: "weir"})
	conn := open(t, s)
	run(t, conn, usage+" SETTINGS non_replicated_deduplication_window = 10000")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))

	var wg sync.WaitGroup
	stored := make(chan struct{})
	wg.Go(func() {
		defer close(stored)
		for b := range batches {
			for {
				if err := insert(context.Background(), conn, rows(size, 3), token(fmt.Sprint(b))); err == nil {
					break
				}
			}
		}
	})
	n := 0
	for done := false; !done && n < kills; n++ {
		select {
		case <-stored:
			done = true
		case <-time.After(time.Duration(random.IntN(60)) * time.Millisecond):
			if err := s.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := s.Restart(); err != nil {
				t.Fatal(err)
			}
		}
	}
	wg.Wait()
	t.Logf("%d kills", n)
	got := number(t, conn, "SELECT count() FROM usage")
	t.Logf("%d batches are missing", batches-got/size)
	if got > batches*size || got%size != 0 || got < (batches-kills)*size {
		t.Fatalf("rows = %d after %d kills, want %d, or %d less for each kill", got, n, batches*size, size)
	}
}

// Under supervision a server that was killed from outside comes back by itself, on the same address and with its data.
func TestSupervisedServerComesBack(t *testing.T) {
	s := start(t, Config{Database: "weir", Supervise: true})
	conn := open(t, s)
	run(t, conn, "CREATE TABLE x (n UInt64) ENGINE = MergeTree ORDER BY n")
	run(t, conn, "INSERT INTO x VALUES (7)")
	old := s.PID()
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for s.PID() == old {
		time.Sleep(10 * time.Millisecond)
	}
	if n := number(t, conn, "SELECT sum(n) FROM x"); n != 7 {
		t.Errorf("sum = %d after the death, want 7", n)
	}
}

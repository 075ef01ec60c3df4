package jetstream

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// While a range is handled the next one is read and decoded, and no more: it is not written down before its turn, so that
// a crash would bring the one in hand alone, and however late its turn comes nothing is left out or comes twice.
func TestLedgerReadsOneRangeAhead(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 50)
	var decoded atomic.Int64
	l, err := NewLedger(Config{Name: "history", MaxMessages: 10, MaxDelay: 20 * time.Millisecond, AckWait: 200 * time.Millisecond}, nc,
		func(subject, contentType string, body []byte, arrived time.Time) (*schemas.Report, error) {
			decoded.Add(1)
			return schemas.DecodeReport(subject, contentType, body, arrived)
		}, embeddedtest.Log(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	j := &journal{}
	run(t, l, func(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
		<-release
		return j.handle(ctx, b)
	})
	eventually(t, "two ranges are decoded", func() bool { return decoded.Load() >= 20 })
	time.Sleep(500 * time.Millisecond) // AckWait runs out for both, and a third range would have come
	if n := decoded.Load(); n != 20 {
		t.Errorf("%d messages are decoded while the first range is in hand, want 20", n)
	}
	if p := floor(t, js); p.Floor != 0 || p.Next != 10 {
		t.Errorf("position is %+v, want 1 to 10 in hand", p)
	}
	close(release)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 50 })
	tile(t, j.batches, 50)
}

// What was read ahead is nobody's when the ledger stops, also when it stops while it reads.
func TestLedgerStopsWithARangeReadAhead(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 30)
	entered := make(chan struct{})
	first := &journal{}
	stop := run(t, ledger(t, nc, Config{MaxMessages: 10}, nil), func(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
		close(entered) // a second call would panic
		<-ctx.Done()
		return first.handle(ctx, b)
	})
	<-entered
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if p := floor(t, js); p.Floor != 10 || p.Next != 10 {
		t.Errorf("position is %+v, want all up to 10 handled and nothing in hand", p)
	}
	j := &journal{}
	run(t, ledger(t, nc, Config{MaxMessages: 10}, nil), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 30 })
	tile(t, append(first.batches, j.batches...), 30)
}

package jetstream

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// T6: in a stream that lets go of what is acknowledged, a repeat after a restart of the server would be a new message. Ours keep
// all for their time: what one consumer has acknowledged is there for the others, and a repeat is known.
func TestT6AcknowledgedReportsStayAndAreKnown(t *testing.T) {
	p, err := nats.StartProcess(nats.Config{Dir: t.TempDir()}, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Stop() })
	nc, js := connect(t, p.URL())
	declare(t, js)
	r := report("boot", 1, 3)
	if err := newPublisher(t, nc, "gw").Publish(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	j := &journal{}
	stop := run(t, source(t, nc, Config{}, nil), j.handle)
	eventually(t, "a consumer has acknowledged it", func() bool {
		c, err := js.Consumer(t.Context(), schemas.UsageStream, "throttle")
		return err == nil && c.CachedInfo().AckFloor.Stream == 1
	})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Kill(), p.Restart()); err != nil {
		t.Fatal(err)
	}
	nc, js = connect(t, p.URL())
	if err := newPublisher(t, nc, "gw").Publish(t.Context(), r); err != nil { // as a gateway that has not heard the answer
		t.Fatal(err)
	}
	if n := messages(t, js, schemas.UsageStream); n != 1 {
		t.Errorf("%d messages, want the one", n)
	}
	j = &journal{}
	run(t, ledger(t, nc, Config{}, nil), j.handle)
	eventually(t, "another consumer has it", func() bool { return j.distinct() == 1 })
}

// T8: a message that is refused often is skipped without a word where MaxDeliver says so. Here it comes until it is taken, and
// none after it is acknowledged before.
func TestT8AMessageIsDeliveredUntilItIsTaken(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 3)
	for name, c := range map[string]consumer{"throttle": source(t, nc, Config{MaxMessages: 1, AckWait: 200 * time.Millisecond, RetryMin: time.Millisecond, RetryMax: time.Millisecond}, nil),
		"history": ledger(t, nc, Config{MaxMessages: 1, RetryMin: time.Millisecond, RetryMax: time.Millisecond}, nil)} {
		var tries atomic.Int64
		j := &journal{fail: func(b schemas.Batch[*schemas.Report]) error {
			if b.First == 2 && tries.Add(1) <= 200 {
				return errors.New("not now")
			}
			return nil
		}}
		run(t, c, j.handle)
		eventually(t, name+" has all", func() bool { return j.distinct() == 3 })
		if n := tries.Load(); n != 201 {
			t.Errorf("%s: tried %d times, want 201", name, n)
		}
		info, err := js.Consumer(t.Context(), schemas.UsageStream, name)
		if err != nil {
			t.Fatal(err)
		}
		if n := info.CachedInfo().Config.MaxDeliver; n != -1 {
			t.Errorf("%s: max_deliver = %d, want -1", name, n)
		}
	}
}

// T9: what happened to a report whose acknowledgement is lost with the connection is unknown. It is published again, and stored
// once.
func TestT9OnlyAnAcknowledgementCounts(t *testing.T) {
	url, _, js := start(t)
	px := newProxy(t, url)
	nc, _ := connect(t, px.url())
	p := newPublisher(t, nc, "gw")
	for seq := uint64(1); seq <= 10; seq++ {
		px.deaf.Store(seq%2 == 0) // the server stores it, and nobody hears of it
		px.mute.Store(seq%3 == 0) // or never hears of it
		again := 0
		for {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			err := p.Publish(ctx, report("boot", seq, 1))
			cancel()
			if err == nil {
				break
			}
			px.deaf.Store(false)
			px.mute.Store(false)
			px.cut()
			if again++; again > 100 {
				t.Fatal(err)
			}
			eventually(t, "the connection is back", nc.IsConnected)
		}
		if n := messages(t, js, schemas.UsageStream); n != seq {
			t.Fatalf("%d messages after report %d", n, seq)
		}
	}
}

// T10: a repeat that has both a message id and an expected sequence is a conflict and no duplicate. Reports have no id; a
// conflict is looked into, and one that is ours is success.
func TestT10AConflictIsLookedInto(t *testing.T) {
	_, nc, js := start(t)
	p := newPublisher(t, nc, "gw")
	for seq := uint64(1); seq <= 2; seq++ {
		if err := p.Publish(t.Context(), report("boot", seq, 1)); err != nil {
			t.Fatal(err)
		}
	}
	p.last, p.seq = 1, 1 // as if the answer to the second had been lost
	if err := p.Publish(t.Context(), report("boot", 2, 1)); err != nil {
		t.Errorf("Publish of what is stored = %v", err)
	}
	if err := p.Publish(t.Context(), report("boot", 3, 1)); err != nil {
		t.Error(err)
	}
	if n := messages(t, js, schemas.UsageStream); n != 3 {
		t.Errorf("%d messages, want 3", n)
	}
	stream, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	msg, err := stream.GetMsg(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	if id := msg.Header.Get(jetstream.MsgIDHeader); id != "" {
		t.Errorf("a report has the message id %q, which another could take", id)
	}
}

// T19: a full stream refuses a report and removes none that is unread. With room it takes the same report.
func TestT19AFullStreamRefusesAndRemovesNothing(t *testing.T) {
	_, nc, js := start(t)
	size := func(bytes int64) {
		t.Helper()
		if err := natsx.Declare(t.Context(), js, natsx.Storage{UsageMaxBytes: bytes}); err != nil {
			t.Fatal(err)
		}
	}
	size(20_000)
	p := newPublisher(t, nc, "gw")
	var stored uint64
	for ; ; stored++ {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err := p.Publish(ctx, report("boot", stored+1, make([]uint64, 20)...))
		cancel()
		if err != nil {
			break
		}
	}
	j := &journal{}
	run(t, ledger(t, nc, Config{}, nil), j.handle)
	eventually(t, "all that was acknowledged is read", func() bool { return uint64(j.distinct()) == stored })
	size(1 << 20)
	if err := p.Publish(t.Context(), report("boot", stored+1, make([]uint64, 20)...)); err != nil {
		t.Error(err)
	}
	eventually(t, "the refused one is read", func() bool { return uint64(j.distinct()) == stored+1 })
	if stored < 3 {
		t.Errorf("only %d reports fitted: the test has not tested much", stored)
	}
}

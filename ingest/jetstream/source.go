package jetstream

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/schemas"
)

// Source delivers the messages of a stream at least once, in no order that may be relied on. Several processes may read
// with one name: each message goes to one of them, and to another when that one dies. Messages are acknowledged one by
// one, for an acknowledgement of "all up to here" would cover what another reader still holds.
//
// What cannot be read is counted and left out: the Ledger of the same stream writes it to the dead-letter stream.
type Source[T any] struct {
	*reader[T]
	floor   atomic.Uint64 // all up to here was acknowledged, a few seconds ago
	created time.Time     // when the stream was made
}

// NewSource returns a source. It touches no network. m may be nil.
func NewSource[T any](cfg Config, nc *nats.Conn, decode Decoder[T], log *slog.Logger, m *Metrics) (*Source[T], error) {
	cfg, err := cfg.withDefaults(500, 16<<20, 20*time.Millisecond, 10*time.Second)
	if err != nil {
		return nil, fmt.Errorf("source %q: %w", cfg.Name, err)
	}
	r, err := newReader(cfg, nc, decode, log, m)
	if err != nil {
		return nil, fmt.Errorf("source %q: %w", cfg.Name, err)
	}
	return &Source[T]{reader: r}, nil
}

// Consume calls handle with one batch after another until ctx is done, and then returns nil. A batch is acknowledged
// when handle returns nil; otherwise handle gets the same batch again after a pause, and nothing new is read meanwhile.
// First and Last of a batch are the least and the greatest of its messages; others between them may be with another
// reader. It may be called once.
func (s *Source[T]) Consume(ctx context.Context, handle func(context.Context, schemas.Batch[T]) error) error {
	defer s.watchLag(s.readFloor)()
	defer s.t.stopped(nil)
	for {
		if s.consumer == nil && !s.until(ctx, "position", func() error { return s.position(ctx) }) {
			return nil
		}
		all, err := s.gather(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			s.lost(ctx, "fetch", err)
			continue
		}
		s.t.over()
		if len(all) == 0 {
			s.oldest.Store(0)
			continue
		}
		s.holds(all)
		if !s.deliver(ctx, all, handle) {
			return nil
		}
		s.handled(all)
	}
}

// position binds the consumer. What a reader that has died still holds comes again at once and not after AckWait, and
// a consumer that was deleted starts where it was.
func (s *Source[T]) position(ctx context.Context) error {
	stream, err := s.stream(ctx)
	if err != nil {
		return err
	}
	if at := stream.CachedInfo().Created; !at.Equal(s.created) {
		s.created = at
		s.floor.Store(0)
	}
	info, err := s.bind(ctx, jetstream.AckExplicitPolicy)
	if err != nil {
		return err
	}
	if floor := s.floor.Load(); info.NumAckPending > 0 || info.AckFloor.Stream < floor {
		if info.AckFloor.Stream < floor {
			s.log.Warn("consumer was gone, made anew", "from", floor+1)
		}
		return s.reset(ctx, max(info.AckFloor.Stream, floor)+1)
	}
	return nil
}

func (s *Source[T]) readFloor(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	// By name, for s.consumer belongs to Consume. An error shows in Consume as well.
	if c, err := s.js.Consumer(ctx, s.cfg.Stream, s.cfg.Name); err == nil {
		if at := c.CachedInfo().AckFloor.Stream; at > s.floor.Load() {
			s.floor.Store(at)
		}
	}
}

// deliver calls handle until it returns nil, and acknowledges. All the while the server is told that we are at it.
func (s *Source[T]) deliver(ctx context.Context, all []message, handle func(context.Context, schemas.Batch[T]) error) bool {
	items, bad := s.decodeAll(all)
	for i := range bad {
		s.m.Refused.WithLabelValues(s.cfg.Name, bad[i].Reason).Inc()
	}
	batch := schemas.Batch[T]{Stream: streamName(s.cfg.Stream, s.created, 0), First: all[0].seq, Last: all[0].seq, Waiting: all[len(all)-1].waiting, Items: items}
	for i := range all {
		batch.First, batch.Last = min(batch.First, all[i].seq), max(batch.Last, all[i].seq)
	}
	if len(items) > 0 {
		stop := s.hold(all)
		ok := s.until(ctx, "handle", func() error { return handle(ctx, batch) })
		stop()
		if !ok {
			return false
		}
	}
	// An acknowledgement that is lost brings the message again, which the handler can take. The last one waits for the
	// server's answer and shows by it that the others have gone out too.
	for i := range all[:len(all)-1] {
		_ = all[i].ack.Ack()
	}
	ack, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	_ = all[len(all)-1].ack.DoubleAck(ack)
	return true
}

// hold keeps the messages ours for longer than AckWait, until the returned function is called.
func (s *Source[T]) hold(all []message) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(max(s.cfg.AckWait/3, time.Millisecond))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				for i := range all {
					_ = all[i].ack.InProgress()
				}
			case <-done:
				return
			}
		}
	})
	return func() { close(done); wg.Wait() }
}

// streamName names one life of a stream: a stream that is deleted and made anew numbers other messages from 1.
func streamName(name string, created time.Time, epoch int) string {
	if epoch > 0 {
		return fmt.Sprintf("%s@%x.%d", name, created.UnixNano(), epoch)
	}
	return fmt.Sprintf("%s@%x", name, created.UnixNano())
}

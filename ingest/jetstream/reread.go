package jetstream

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/schemas"
)

// Floor asks the server up to which message all were handled, by whichever reader, and of which life of the stream, as a Batch names it.
func (s *Source[T]) Floor(ctx context.Context) (stream string, seq uint64, err error) {
	is, err := s.js.Stream(ctx, s.cfg.Stream) // first, so that no number is of a later life than it says
	if err != nil {
		return "", 0, fmt.Errorf("stream %s: %w", s.cfg.Stream, err)
	}
	c, err := s.js.Consumer(ctx, s.cfg.Stream, s.cfg.Name)
	if err != nil {
		return "", 0, fmt.Errorf("consumer %s: %w", s.cfg.Name, err)
	}
	return streamName(s.cfg.Stream, is.CachedInfo().Created, 0), c.CachedInfo().AckFloor.Stream, nil
}

// Reread calls handle with what the stream has from message first to last, whether it was handled or not, in order and in batches, until handle
// returns an error. It returns how many messages it has handled. What arrived before oldest is left out, and what cannot be read. It
// may be called while Consume runs.
func (s *Source[T]) Reread(ctx context.Context, first, last uint64, oldest time.Time, handle func(context.Context, schemas.Batch[T]) error) (n int, err error) {
	if first > last {
		return 0, nil
	}
	var all []message
	size := 0
	flush := func() error {
		if len(all) == 0 {
			return nil
		}
		items, _ := s.decodeAll(all) // Consume has counted the others
		if err := handle(ctx, schemas.Batch[T]{Stream: s.cfg.Stream, First: all[0].seq, Last: all[len(all)-1].seq, Items: items}); err != nil {
			return err
		}
		n, all, size = n+len(items), nil, 0
		return nil
	}
	older := false
	read := func(m message) (bool, error) {
		if older = m.arrived.Before(oldest); older || m.seq > last {
			return false, nil
		}
		all, size = append(all, m), size+len(m.body)
		if len(all) < s.cfg.MaxMessages && size < s.cfg.MaxBytes/2 {
			return m.seq < last, nil
		}
		return m.seq < last, flush()
	}
	err = look(ctx, s.js, s.cfg.Stream, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: first}, read)
	if older && err == nil {
		err = look(ctx, s.js, s.cfg.Stream, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &oldest}, read)
	}
	if err == nil {
		err = flush()
	}
	if err != nil {
		return n, fmt.Errorf("read messages %d to %d of %s again: %w", first, last, s.cfg.Stream, err)
	}
	return n, nil
}

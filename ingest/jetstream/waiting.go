package jetstream

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// Waiting returns the messages of the usage stream that the ledger of that name has not handled, the oldest first and at
// most n of them; what cannot be read is left out. It disturbs nobody.
func Waiting[T any](ctx context.Context, nc *nats.Conn, name string, n int, decode Decoder[T]) ([]schemas.Delivered[T], error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("look at what waits for %s: %w", name, err)
	}
	fail := func(err error) error {
		if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) {
			err = errors.Join(natsx.ErrUnreachable, err)
		}
		return fmt.Errorf("look at what waits for %s: %w", name, err)
	}
	var pos kept
	kv, err := js.KeyValue(ctx, natsx.HistoryBucket)
	if err == nil {
		pos, err = lastPosition(ctx, kv, name)
	}
	if err != nil && !errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, fail(err)
	}
	c, err := js.OrderedConsumer(ctx, schemas.UsageStream, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: pos.Floor + 1})
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fail(err)
	}
	var out []schemas.Delivered[T]
	left := c.CachedInfo().NumPending
	messages, err := c.Messages()
	if err != nil {
		return nil, fail(err)
	}
	defer messages.Stop()
	for ; left > 0 && len(out) < n; left-- {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fail(err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return nil, fail(err)
		}
		if v, err := decode(msg.Subject(), msg.Headers().Get(headerContentType), msg.Data(), meta.Timestamp); err == nil {
			out = append(out, schemas.Delivered[T]{Seq: meta.Sequence.Stream, Arrived: meta.Timestamp, Value: v})
		}
		if meta.NumPending == 0 {
			break
		}
	}
	return out, nil
}

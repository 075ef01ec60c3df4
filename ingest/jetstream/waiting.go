package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"

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
	var out []schemas.Delivered[T]
	from := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: pos.Floor + 1}
	err = look(ctx, js, schemas.UsageStream, from, func(m message) (bool, error) {
		if v, err := decode(m.subject, m.contentType, m.body, m.arrived); err == nil {
			out = append(out, schemas.Delivered[T]{Seq: m.seq, Arrived: m.arrived, Value: v})
		}
		return len(out) < n, nil
	})
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fail(err)
	}
	return out, nil
}

const lookWait = 10 * time.Second // for the next message, which is there

// look calls f with each message that a stream has now, in order, until f returns false. It disturbs nobody.
func look(ctx context.Context, js jetstream.JetStream, stream string, from jetstream.OrderedConsumerConfig, f func(message) (bool, error)) error {
	c, err := js.OrderedConsumer(ctx, stream, from)
	if err != nil {
		return err
	}
	left := c.CachedInfo().NumPending
	messages, err := c.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	for ; left > 0; left-- {
		wait, cancel := context.WithTimeout(ctx, lookWait)
		msg, err := messages.Next(jetstream.NextContext(wait))
		cancel()
		if err != nil {
			return err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return err
		}
		more, err := f(message{subject: msg.Subject(), contentType: msg.Headers().Get(headerContentType), seq: meta.Sequence.Stream, arrived: meta.Timestamp, body: msg.Data()})
		if err != nil || !more || meta.NumPending == 0 {
			return err
		}
	}
	return nil
}

package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// DeadLetter is a message that somebody would not take, as it came, and why.
type DeadLetter struct {
	ID          uint64    `json:"id"` // its sequence number in the dead-letter stream
	Time        time.Time `json:"ts"` // when it was put there
	Reason      string    `json:"reason"`
	Detail      string    `json:"detail"`
	Subject     string    `json:"subject"` // where it was published
	Stream      string    `json:"stream"`
	Seq         uint64    `json:"seq"` // in that stream
	Arrived     time.Time `json:"arrived,omitzero"`
	ContentType string    `json:"content_type,omitempty"`
	Bytes       int       `json:"bytes"`               // of the body as it came
	Truncated   bool      `json:"truncated,omitempty"` // only the beginning of the body was kept
	Body        []byte    `json:"body,omitempty"`      // nil in a list
}

var (
	// ErrNoLetter is in the chain of the error about a dead letter that is not there, or not any more.
	ErrNoLetter = errors.New("there is no such dead letter")
	// ErrTruncated is in the chain of the error for a letter that cannot be replayed because its body was cut.
	ErrTruncated = errors.New("only the beginning of its body was kept")
)

// DeadLetters are the messages in the dead-letter stream. A letter leaves it when it was replayed or dropped, and frees its
// space; its number is never used again.
type DeadLetters struct {
	nc *nats.Conn
	js jetstream.JetStream
}

// NewDeadLetters touches no network.
func NewDeadLetters(nc *nats.Conn) (*DeadLetters, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("dead letters: %w", err)
	}
	return &DeadLetters{nc: nc, js: js}, nil
}

func (d *DeadLetters) stream(ctx context.Context) (jetstream.Stream, error) {
	s, err := d.js.Stream(ctx, schemas.DeadStream)
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) {
		err = errors.Join(natsx.ErrUnreachable, err)
	}
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return nil, fmt.Errorf("stream %s is not there, the aggregator makes it: %w", schemas.DeadStream, err)
	case err != nil:
		return nil, fmt.Errorf("stream %s: %w", schemas.DeadStream, err)
	}
	return s, nil
}

// Counts says how many letters there are for each reason.
func (d *DeadLetters) Counts(ctx context.Context) (map[string]uint64, error) {
	s, err := d.stream(ctx)
	if err != nil {
		return nil, err
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(schemas.DeadPrefix+">"))
	if err != nil {
		return nil, fmt.Errorf("count dead letters: %w", err)
	}
	counts := map[string]uint64{}
	for subject, n := range info.State.Subjects {
		counts[strings.TrimPrefix(subject, schemas.DeadPrefix)] = n
	}
	return counts, nil
}

// List returns the oldest letters without their bodies, at most n of them, of one reason unless it is empty. It sees none
// that come in while it reads.
func (d *DeadLetters) List(ctx context.Context, reason string, n int) ([]DeadLetter, error) {
	if reason == "" {
		reason = "*"
	}
	if _, err := d.stream(ctx); err != nil {
		return nil, err
	}
	all := []DeadLetter{}
	c, err := d.js.OrderedConsumer(ctx, schemas.DeadStream, jetstream.OrderedConsumerConfig{FilterSubjects: []string{schemas.DeadPrefix + reason}, HeadersOnly: true})
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	left := c.CachedInfo().NumPending
	messages, err := c.Messages()
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	defer messages.Stop()
	for ; left > 0 && len(all) < n; left-- {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fmt.Errorf("list dead letters: %w", err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return nil, fmt.Errorf("list dead letters: %w", err)
		}
		l := letter(msg.Subject(), msg.Headers())
		l.ID, l.Time = meta.Sequence.Stream, meta.Timestamp.UTC()
		if l.Bytes == 0 {
			l.Bytes, _ = strconv.Atoi(msg.Headers().Get("Nats-Msg-Size"))
		}
		all = append(all, l)
		if meta.NumPending == 0 {
			break // some were removed while we read
		}
	}
	return all, nil
}

// Get returns one letter with its body.
func (d *DeadLetters) Get(ctx context.Context, id uint64) (DeadLetter, error) {
	s, err := d.stream(ctx)
	if err != nil {
		return DeadLetter{}, err
	}
	msg, err := s.GetMsg(ctx, id)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return DeadLetter{}, fmt.Errorf("dead letter %d: %w", id, ErrNoLetter)
	}
	if err != nil {
		return DeadLetter{}, fmt.Errorf("read dead letter %d: %w", id, err)
	}
	l := letter(msg.Subject, msg.Header)
	l.ID, l.Time, l.Body = id, msg.Time.UTC(), msg.Data
	if l.Bytes == 0 {
		l.Bytes = len(msg.Data)
	}
	return l, nil
}

func letter(subject string, h nats.Header) DeadLetter {
	l := DeadLetter{Reason: strings.TrimPrefix(subject, schemas.DeadPrefix), Detail: h.Get(HeaderDetail), Subject: h.Get(HeaderSubject),
		Stream: h.Get(HeaderStream), ContentType: h.Get(headerContentType)}
	l.Seq, _ = strconv.ParseUint(h.Get(HeaderSequence), 10, 64)
	l.Arrived, _ = time.Parse(time.RFC3339Nano, h.Get(HeaderArrived))
	l.Bytes, _ = strconv.Atoi(h.Get(HeaderTruncated))
	l.Truncated = l.Bytes > 0
	return l
}

// Report reads the body as a report.
func (l *DeadLetter) Report() (*schemas.Report, error) {
	return schemas.DecodeReport(l.Subject, l.ContentType, l.Body, l.Arrived)
}

// Replay publishes a letter's body where it came from, and takes the letter out once the stream has stored that. A replay that
// died between the two is repeated: the stream has the report twice then, and the history, which knows reports by their names,
// once. The message has no id, which anybody who may publish there could have used up beforehand. A message that still cannot
// be taken becomes a new letter, with a number of its own.
func (d *DeadLetters) Replay(ctx context.Context, id uint64) error {
	l, err := d.Get(ctx, id)
	if err != nil {
		return err
	}
	if l.Truncated {
		return fmt.Errorf("replay dead letter %d: %w (%d of %d bytes)", id, ErrTruncated, len(l.Body), l.Bytes)
	}
	msg := &nats.Msg{Subject: l.Subject, Data: l.Body, Header: nats.Header{}}
	if l.ContentType != "" {
		msg.Header.Set(headerContentType, l.ContentType)
	}
	ack, err := d.js.PublishMsg(ctx, msg, jetstream.WithExpectStream(l.Stream))
	if err == nil && ack.Duplicate {
		err = errors.New("the stream says that it is a duplicate and has not stored it")
	}
	if err != nil {
		return fmt.Errorf("replay dead letter %d to %s: %w", id, l.Subject, err)
	}
	return d.Drop(ctx, id)
}

// Drop takes a letter out for good. One that is gone already is no error.
func (d *DeadLetters) Drop(ctx context.Context, id uint64) error {
	s, err := d.stream(ctx)
	if err != nil {
		return err
	}
	if s.CachedInfo().Config.DenyDelete {
		return fmt.Errorf("drop dead letter %d: stream %s has deny_delete: its letters can only expire; make it anew", id, schemas.DeadStream)
	}
	if err := s.DeleteMsg(ctx, id); err != nil {
		if _, get := s.GetMsg(ctx, id); errors.Is(get, jetstream.ErrMsgNotFound) {
			return nil
		}
		return fmt.Errorf("drop dead letter %d: %w", id, err)
	}
	return nil
}

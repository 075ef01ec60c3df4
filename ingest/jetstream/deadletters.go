package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
	"github.com/weirhq/weir/schemas/weirpb"
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
	all := []DeadLetter{}
	_, err := d.read(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: []string{schemas.DeadPrefix + reason}, HeadersOnly: true}, n, 500,
		func(l *DeadLetter) { all = append(all, *l) })
	if err != nil {
		return nil, err
	}
	return all, nil
}

// Each calls f with the oldest letters and their bodies, at most n of them, and returns how many more there are.
func (d *DeadLetters) Each(ctx context.Context, n int, f func(*DeadLetter)) (more uint64, err error) {
	const atOnce = 32 // a body has up to the server's max_payload
	return d.read(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: []string{schemas.DeadPrefix + "*"}}, n, atOnce, f)
}

func (d *DeadLetters) read(ctx context.Context, cfg jetstream.OrderedConsumerConfig, n, atOnce int, f func(*DeadLetter)) (more uint64, err error) {
	if _, err := d.stream(ctx); err != nil {
		return 0, err
	}
	c, err := d.js.OrderedConsumer(ctx, schemas.DeadStream, cfg)
	if err != nil {
		return 0, fmt.Errorf("list dead letters: %w", err)
	}
	left := c.CachedInfo().NumPending
	messages, err := c.Messages(jetstream.PullMaxMessages(atOnce))
	if err != nil {
		return 0, fmt.Errorf("list dead letters: %w", err)
	}
	defer messages.Stop()
	for ; left > 0 && n > 0; left, n = left-1, n-1 {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return 0, fmt.Errorf("list dead letters: %w", err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return 0, fmt.Errorf("list dead letters: %w", err)
		}
		l := letter(msg.Subject(), msg.Headers())
		l.ID, l.Time = meta.Sequence.Stream, meta.Timestamp.UTC()
		switch {
		case !cfg.HeadersOnly:
			l.Body = msg.Data()
			l.Bytes = max(l.Bytes, len(l.Body))
		case l.Bytes == 0:
			l.Bytes, _ = strconv.Atoi(msg.Headers().Get("Nats-Msg-Size"))
		}
		f(&l)
		if meta.NumPending == 0 {
			return 0, nil // some may have been removed while we read
		}
	}
	return left, nil
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

// Claim is what a letter says of the report in it, whatever is wrong with that. Nothing of it is checked but whose it is.
type Claim struct {
	Gateway  string // of the subject, which is the only one that it could publish to; empty when that names none
	Boot     string // with Seq, which of the gateway's reports it is; empty when it does not say
	Seq      uint64
	Requests uint64
	Counted  bool // Requests is known
}

// Claim reads as much of the body as can be read.
func (l *DeadLetter) Claim() Claim {
	var c Claim
	if bytes.HasPrefix(bytes.TrimSpace(l.Body), []byte("{")) {
		c = claimOfJSON(l.Body)
	} else {
		c = claimOfProto(l.Body)
	}
	c.Gateway, _ = schemas.Gateway(schemas.UsagePrefix, l.Subject) // an empty one is no gateway's
	if c.Seq == 0 || schemas.ValidName(c.Boot) != nil {
		c.Boot, c.Seq = "", 0
		c.Counted = c.Counted && c.Requests > 0 // it may be no report at all
	}
	return c
}

func claimOfProto(body []byte) (c Claim) {
	var p weirpb.Report
	c.Counted = proto.Unmarshal(body, &p) == nil
	c.Boot, c.Seq = p.Boot, p.Seq // they come first, and are there though what follows cannot be read
	for _, u := range p.Usage {
		c.count(u.Allowed, u.Rejected)
	}
	return c
}

// claimOfJSON reads an object as far as it goes. Of a name that is there twice it knows nothing.
func claimOfJSON(body []byte) (c Claim) {
	d := json.NewDecoder(bytes.NewReader(body))
	if _, err := d.Token(); err != nil {
		return c
	}
	seen := map[string]bool{}
	c.Counted = true
	for d.More() {
		token, err := d.Token()
		key, ok := token.(string)
		if err != nil || !ok {
			c.Counted = false
			return c
		}
		if key = strings.ToLower(key); seen[key] { // as the decoder of reports does
			return Claim{}
		}
		seen[key] = true
		var into any = new(json.RawMessage)
		var usage []struct{ Allowed, Rejected uint64 }
		switch key {
		case "boot":
			into = &c.Boot
		case "seq":
			into = &c.Seq
		case "usage":
			into = &usage
		}
		var wrong *json.UnmarshalTypeError
		if err := d.Decode(into); errors.As(err, &wrong) {
			c.Counted = c.Counted && key != "usage"
		} else if err != nil {
			c.Counted = false
			return c
		}
		for _, u := range usage {
			c.count(u.Allowed, u.Rejected)
		}
	}
	if _, err := d.Token(); err != nil { // it was cut
		c.Counted = false
	}
	return c
}

// count adds requests, unless there are more than there can be in a report.
func (c *Claim) count(allowed, rejected uint64) {
	if allowed > schemas.MaxReportRequests || rejected > schemas.MaxReportRequests || c.Requests+allowed+rejected > schemas.MaxReportRequests {
		c.Counted = false
		return
	}
	c.Requests += allowed + rejected
}

// Replay publishes a letter's body where it came from, and takes the letter out once the stream has stored that: killed between
// the two, nothing is lost, as it would be the other way about. The message's id is the letter's, so that of several who replay
// a letter at once, or again after such a death, one is stored and the others hear which it was: a message that still cannot be
// taken becomes one new letter, with a number of its own, not several. Ids are everybody's, and who may publish there could have
// used this one up: the letter goes only when what is stored under its id is its message, which otherwise is stored without an
// id. Outside the stream's duplicate window it may be there twice; the history knows reports by their names and counts one.
func (d *DeadLetters) Replay(ctx context.Context, id uint64) error {
	l, err := d.Get(ctx, id)
	if err != nil {
		return err
	}
	if l.Truncated {
		return fmt.Errorf("replay dead letter %d: %w (%d of %d bytes)", id, ErrTruncated, len(l.Body), l.Bytes)
	}
	if err := d.publish(ctx, &l); err != nil {
		return fmt.Errorf("replay dead letter %d to %s: %w", id, l.Subject, err)
	}
	return d.Drop(ctx, id)
}

// publish stores a letter's message where it came from, or finds that it has been.
func (d *DeadLetters) publish(ctx context.Context, l *DeadLetter) error {
	message := func() *nats.Msg {
		msg := &nats.Msg{Subject: l.Subject, Data: l.Body, Header: nats.Header{}}
		if l.ContentType != "" {
			msg.Header.Set(headerContentType, l.ContentType)
		}
		return msg
	}
	ack, err := d.js.PublishMsg(ctx, message(), jetstream.WithExpectStream(l.Stream), jetstream.WithMsgID(l.replayID()))
	if err != nil || !ack.Duplicate {
		return err
	}
	s, err := d.js.Stream(ctx, ack.Stream)
	if err != nil {
		return err
	}
	switch there, err := s.GetMsg(ctx, ack.Sequence); {
	case err == nil && there.Subject == l.Subject && bytes.Equal(there.Data, l.Body) && there.Header.Get(headerContentType) == l.ContentType:
		return nil
	case err != nil && !errors.Is(err, jetstream.ErrMsgNotFound):
		return fmt.Errorf("look for the message that it is said to be a duplicate of: %w", err)
	}
	_, err = d.js.PublishMsg(ctx, message(), jetstream.WithExpectStream(l.Stream))
	return err
}

// replayID is the letter's own, also if its stream was made anew and numbers begin again.
func (l *DeadLetter) replayID() string { return fmt.Sprintf("dlq-%d-%d", l.ID, l.Time.UnixNano()) }

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

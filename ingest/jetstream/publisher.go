// Package jetstream carries usage reports over NATS JetStream: a publisher that stores each report exactly once, and
// two ways to read a stream.
package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/schemas"
)

// Headers of a report.
const (
	headerContentType = "Content-Type"
	headerBoot        = "Weir-Boot" // with Weir-Seq, what a publisher knows its own report by
	headerSeq         = "Weir-Seq"
)

// ErrTooLarge is in the chain of the error for a report that the server would not take at any time.
var ErrTooLarge = ingest.ErrTooLarge

// Publisher stores the reports of one gateway.
//
// Each message says which message must be the last one of the gateway's subject. A repeat of a stored report is
// therefore refused, at any time later, and tells us that it is stored; no message ids, and no window in which they
// are remembered, are involved (FACTS 1.4). It needs one message in flight per gateway, so Publish takes turns, and
// a gateway's name must belong to one process at a time.
type Publisher struct {
	nc      *nats.Conn
	js      jetstream.JetStream
	gateway string
	subject string
	m       *Metrics
	most    atomic.Int64 // bytes of a message, as the server said last

	mu    sync.Mutex // held over a Publish
	known bool
	last  uint64 // stream sequence of our subject's last message, when known
	boot  string // with seq, the last report that we know to be stored
	seq   uint64

	before struct { // the same, of the life whose last words were there before ours
		boot string
		seq  uint64
	}

	lost       uint64 // times that the stream no longer had our subject's last message
	reconnects uint64 // of nc, when we last looked whether it had
}

// NewPublisher returns a publisher for gateway. It touches no network. m may be nil.
func NewPublisher(nc *nats.Conn, gateway string, m *Metrics) (*Publisher, error) {
	if err := schemas.ValidName(gateway); err != nil {
		return nil, fmt.Errorf("publish usage: %w", err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("publish usage of %s: %w", gateway, err)
	}
	p := &Publisher{nc: nc, js: js, gateway: gateway, subject: schemas.UsagePrefix + gateway, m: m.orPrivate()}
	p.most.Store(nc.MaxPayload())
	return p, nil
}

// MaxPayload is how many bytes a message may have, as the server said by the last Publish, 0 while it has not. It never waits: the
// connection may, for a server that hangs. It may be called from any goroutine.
func (p *Publisher) MaxPayload() int64 { return p.most.Load() }

// Publish returns nil once r is stored, now or earlier. After any other outcome r may be stored or not: call again with
// the same r. Reports of a boot must come in the order of their sequence numbers. Those of earlier boots may come between them: they are
// stored again where the last of all did not tell that they are there.
func (p *Publisher) Publish(ctx context.Context, r *schemas.Report) error {
	_, err := p.Put(ctx, r, false)
	return err
}

// Put is Publish, and returns a position in the stream that r's is not above. With again, r is stored behind what is
// there, whatever was stored before; a reader must know it by its boot and sequence number. Order does not matter then.
func (p *Publisher) Put(ctx context.Context, r *schemas.Report, again bool) (at uint64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !again && p.has(r) {
		return p.last, nil
	}
	if err := p.publish(ctx, r, again); err != nil {
		p.m.PublishErrors.WithLabelValues(p.reason(err)).Inc()
		return 0, fmt.Errorf("publish report %d of boot %s on %s: %w", r.Seq, r.Boot, p.subject, err)
	}
	switch {
	case again || p.has(r):
	case r.Boot == p.before.boot:
		p.before.seq = r.Seq
	default:
		p.boot, p.seq = r.Boot, r.Seq
	}
	return p.last, nil
}

func (p *Publisher) publish(ctx context.Context, r *schemas.Report, again bool) error {
	body, err := schemas.EncodeReport(r)
	if err != nil {
		return err
	}
	p.most.Store(p.nc.MaxPayload())
	if !p.known {
		stored, err := p.lookUp(ctx, r)
		if err != nil || stored && !again {
			return err
		}
	}
	// Two conflicts cannot happen to one process alone; a few leave room for a predecessor's last words.
	for range 4 {
		msg := &nats.Msg{Subject: p.subject, Data: body, Header: nats.Header{
			headerContentType: {schemas.ContentProtobuf},
			headerBoot:        {r.Boot},
			headerSeq:         {strconv.FormatUint(r.Seq, 10)},
		}}
		if most := p.nc.MaxPayload(); most > 0 && int64(msg.Size()) > most {
			return fmt.Errorf("%w: it has %d bytes with %d entries, the server takes %d", ErrTooLarge, msg.Size(), len(r.Usage)+len(r.Tokens)+len(r.Rejections), most)
		}
		ack, err := p.js.PublishMsg(ctx, msg, jetstream.WithExpectStream(schemas.UsageStream),
			jetstream.WithExpectLastSequencePerSubject(p.last), jetstream.WithRetryAttempts(0))
		if err == nil {
			p.last = ack.Sequence
			return nil
		}
		if !wrongLast(err) {
			return err
		}
		p.m.PublishErrors.WithLabelValues("conflict").Inc()
		stored, err := p.lookUp(ctx, r)
		if err != nil || stored {
			return err
		}
	}
	return errors.New("other messages keep coming in on this subject: does another process run as this gateway?")
}

// lookUp finds out whether r is stored and what the subject's last message is. Once the last one was known it reads all
// that came after it, so that r is found even when somebody else's message is behind it.
func (p *Publisher) lookUp(ctx context.Context, r *schemas.Report) (stored bool, err error) {
	stream, err := p.js.Stream(ctx, schemas.UsageStream)
	if err != nil {
		return false, fmt.Errorf("look up the last report: %w", err)
	}
	if p.known {
		for at := p.last; ; {
			msg, err := stream.GetMsg(ctx, at+1, jetstream.WithGetMsgSubject(p.subject))
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				break
			}
			if err != nil {
				return false, fmt.Errorf("look up reports after %d: %w", at, err)
			}
			at = msg.Sequence
			boot, seq := reportIn(msg.Header)
			stored = stored || (boot == r.Boot && seq == r.Seq)
		}
	}
	msg, err := stream.GetLastMsgForSubject(ctx, p.subject)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound): // none yet, or all have expired
		p.behind(0)
		p.last, p.known = 0, true
		return stored, nil
	case err != nil:
		return false, fmt.Errorf("look up the last report: %w", err)
	}
	if !p.known { // our predecessor's last words
		p.before.boot, p.before.seq = reportIn(msg.Header)
		stored = p.has(r)
	}
	p.behind(msg.Sequence)
	p.last, p.known = msg.Sequence, true
	return stored, nil
}

// behind notes that our subject's last message is the one at a position, which may be under the one that we knew.
func (p *Publisher) behind(at uint64) {
	if p.known && at < p.last {
		p.lost++
	}
}

// losses counts how often the stream has lost our last message: it came back from an older copy, whatever the history says, which may
// have come back too; or all has expired. A message that it takes behind our last one shows that it has that one. When nothing is sent
// we look, after a reconnect and when the whole stream is shorter.
func (p *Publisher) losses(ctx context.Context) (uint64, error) {
	p.mu.Lock()
	last, lost, looked := p.last, p.lost, p.reconnects
	p.mu.Unlock()
	reconnects := p.nc.Stats().Reconnects
	stream, err := p.js.Stream(ctx, schemas.UsageStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) || err == nil && stream.CachedInfo().State.LastSeq >= last && reconnects == looked {
		return lost, nil
	}
	if err != nil {
		return 0, err
	}
	var at uint64
	msg, err := stream.GetLastMsgForSubject(ctx, p.subject)
	if err == nil {
		at = msg.Sequence
	} else if !errors.Is(err, jetstream.ErrMsgNotFound) {
		return 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reconnects = reconnects
	if p.last == last && at < last { // nothing was sent meanwhile: that would have found out
		p.behind(at)
		p.last = at
	}
	return p.lost, nil
}

// has reports whether r is known to be stored: the reports of a boot are stored in order.
func (p *Publisher) has(r *schemas.Report) bool {
	return r.Boot == p.boot && r.Seq <= p.seq || r.Boot == p.before.boot && r.Seq <= p.before.seq
}

// reportIn says which report a message with these headers is. One that no Publisher wrote has seq 0.
func reportIn(h nats.Header) (boot string, seq uint64) {
	seq, err := strconv.ParseUint(h.Get(headerSeq), 10, 64)
	if err != nil {
		return "", 0
	}
	return h.Get(headerBoot), seq
}

func wrongLast(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) &&
		(api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

// API error codes for which nats.go has no name.
const (
	codeInsufficientResources jetstream.ErrorCode = 10023
	codeStorageExceeded       jetstream.ErrorCode = 10047
	codeStoreFailed           jetstream.ErrorCode = 10077 // a full stream says so, with "maximum messages/bytes exceeded"
)

// reasons that a report is not stored, as labels.
var reasons = []string{"full", "no_stream", "disconnected", "permission", "timeout", "too_large", "conflict", "other"}

func (p *Publisher) reason(err error) string {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, ErrTooLarge):
		return "too_large"
	case errors.As(err, &api):
		switch api.ErrorCode {
		case codeInsufficientResources, codeStorageExceeded, codeStoreFailed:
			return "full"
		case jetstream.JSErrCodeStreamNotFound:
			return "no_stream"
		}
		return "other"
	case errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrNoResponders):
		return "no_stream"
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionReconnecting), errors.Is(err, nats.ErrDisconnected):
		return "disconnected"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		// A forbidden publish shows as a time-out here; the reason came to the connection (FACTS T7).
		if last := p.nc.LastError(); errors.Is(last, nats.ErrPermissionViolation) && strings.Contains(last.Error(), p.subject) {
			return "permission"
		}
		return "timeout"
	}
	return "other"
}

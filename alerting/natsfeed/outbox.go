package natsfeed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/schemas"
)

// outbox stores changes of alerts in their stream, each once. A change is decided when it is stored: until then it exists
// only in memory, and after a crash the detector comes to it again. Storing says which message of the stream it follows, so
// that it fails when there is one that this outbox does not know: a change of another alerter, or this very change, whose
// acknowledgement was lost.
type outbox struct {
	js      jetstream.JetStream
	det     *alerting.Detector
	direct  *courier
	timeout time.Duration
	log     *slog.Logger
	m       *alerting.Metrics

	seq     uint64                   // of the last message known
	firing  map[string]schemas.Alert // as the stream has it, by dedup key
	pending []schemas.Alert          // to be stored, in order
	failing time.Time                // since when the stream takes nothing; zero while it does
	tried   time.Time                // and when that was last tried
}

// storeTimeout bounds one attempt to store an alert, and is the pause after one that failed: on-call waits for it.
const storeTimeout = time.Second

// add makes an alert pending that the detector does not know, unless another alerter has stored it meanwhile.
func (o *outbox) add(a *schemas.Alert) {
	if _, fires := o.det.Firing(a); fires {
		o.direct.leave(a)
		return
	}
	o.det.Learn(a)
	o.pending = append(o.pending, *a)
}

// free reports whether there may be more that is pending: what the stream does not take goes past it.
func (o *outbox) free() bool {
	return len(o.pending) == 0 || o.direct.to != nil && len(o.pending) < maxLetters
}

// learn reads what others stored since, or everything at the start.
func (o *outbox) learn(ctx context.Context) error {
	cons, err := o.js.OrderedConsumer(ctx, schemas.AlertsStream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: o.seq + 1})
	if err != nil {
		return fmt.Errorf("read %s: %w", schemas.AlertsStream, err)
	}
	if cons.CachedInfo().NumPending == 0 {
		return o.check(ctx)
	}
	messages, err := cons.Messages()
	if err != nil {
		return fmt.Errorf("read %s: %w", schemas.AlertsStream, err)
	}
	defer messages.Stop()
	for {
		next, cancel := context.WithTimeout(ctx, o.timeout)
		msg, err := messages.Next(jetstream.NextContext(next))
		cancel()
		if err != nil {
			return fmt.Errorf("read %s: %w", schemas.AlertsStream, err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("read %s: %w", schemas.AlertsStream, err)
		}
		o.seq = meta.Sequence.Stream
		if a, err := schemas.DecodeAlert(msg.Data()); err != nil {
			o.log.Warn("alert in the stream ignored", "subject", msg.Subject(), "seq", o.seq, "err", err)
		} else {
			o.note(a)
			o.det.Learn(a)
		}
		if meta.NumPending == 0 {
			break
		}
	}
	o.settle()
	return nil
}

// check notes where a stream ends that has nothing new for us: its messages may have expired, or it is another one of that
// name.
func (o *outbox) check(ctx context.Context) error {
	stream, err := o.js.Stream(ctx, schemas.AlertsStream)
	if err != nil {
		return fmt.Errorf("read %s: %w", schemas.AlertsStream, err)
	}
	if last := stream.CachedInfo().State.LastSeq; last < o.seq || stream.CachedInfo().State.Msgs == 0 {
		o.seq = last
	}
	return nil
}

// settle drops what is said already, or is not so any more after what was learned. The detector has learned the same.
func (o *outbox) settle() {
	left := o.pending[:0]
	for _, a := range o.pending {
		stored, isStored := o.firing[a.DedupKey]
		since, fires := o.det.Firing(&a)
		switch {
		case a.Type == schemas.AlertFiring && !isStored && fires && since.Equal(a.StartsAt):
		case a.Type == schemas.AlertResolved && isStored && stored.StartsAt.Equal(a.StartsAt) && !fires:
		default:
			continue
		}
		left = append(left, a)
	}
	o.pending = left
}

func (o *outbox) note(a *schemas.Alert) {
	if a.Type == schemas.AlertFiring {
		o.firing[a.DedupKey] = *a
	} else {
		delete(o.firing, a.DedupKey)
	}
}

// lowSince is the beginning of the oldest episode of low tokens that lasts.
func (o *outbox) lowSince() (since time.Time, ok bool) {
	for _, a := range o.firing {
		if a.Name == alerting.LowTokens && (!ok || a.StartsAt.Before(since)) {
			since, ok = a.StartsAt, true
		}
	}
	return since, ok
}

// flush stores what is pending, in order. What it could not store stays.
func (o *outbox) flush(ctx context.Context) (err error) {
	for len(o.pending) > 0 {
		if !o.failing.IsZero() && time.Since(o.tried) < storeTimeout {
			err = errors.New("the stream of alerts takes nothing")
			break
		}
		began := time.Now()
		if err = o.store(ctx, &o.pending[0]); err != nil {
			o.tried = time.Now()
			if o.failing.IsZero() {
				o.failing = began
			}
			break
		}
		o.failing = time.Time{}
	}
	if err != nil && time.Since(o.failing) >= unstoredFor {
		for i := range o.pending {
			o.direct.send(&o.pending[i])
		}
	}
	return err
}

// store stores a, the first one pending, or learns that it is stored.
func (o *outbox) store(ctx context.Context, a *schemas.Alert) error {
	body, err := schemas.EncodeAlert(a)
	if err != nil {
		return fmt.Errorf("store alert %s: %w", a.DedupKey, err)
	}
	ctx, cancel := context.WithTimeout(ctx, min(o.timeout, storeTimeout))
	defer cancel()
	msg := &nats.Msg{Subject: schemas.AlertPrefix + a.Severity, Data: body, Header: nats.Header{"Content-Type": {schemas.ContentJSON}}}
	if o.direct.has(a) {
		msg.Header.Set(headerSent, o.direct.name)
	}
	ack, err := o.js.PublishMsg(ctx, msg, jetstream.WithMsgID(alerting.MessageID(a)), jetstream.WithExpectLastSequence(o.seq))
	switch {
	case isWrongSequence(err):
		return o.learn(ctx)
	case err != nil:
		return fmt.Errorf("store alert %s: %w", a.DedupKey, err)
	}
	o.seq = ack.Sequence
	o.note(a)
	o.direct.leave(a)
	kind := strings.TrimPrefix(a.Type, "weir.alert.")
	o.m.Changes.WithLabelValues(a.Name, kind).Inc()
	level := slog.LevelWarn
	if kind == "resolved" {
		level = slog.LevelInfo
	}
	o.log.Log(ctx, level, "alert "+kind, "alert", a.Name, "severity", a.Severity, "tenant", a.Tenant, "rule", a.Rule, "key", a.Key, "gateway", a.Gateway,
		"summary", a.Summary, "value", a.Value, "threshold", a.Threshold, "since", a.StartsAt, "id", alerting.MessageID(a))
	o.pending = o.pending[1:]
	return nil
}

// isWrongSequence reports whether the stream has messages that the publisher does not know.
func isWrongSequence(err error) bool {
	e, ok := errors.AsType[*jetstream.APIError](err)
	return ok && (e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

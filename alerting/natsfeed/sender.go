package natsfeed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/schemas"
)

// SenderConfig is tuning. A zero field means its default.
type SenderConfig struct {
	Name     string        // of the receiver, and of its durable consumer ("webhook")
	Backlog  time.Duration // a receiver that is new gets the alerts of this time (1h)
	RetryMin time.Duration // before another attempt, doubled each time … (1s)
	RetryMax time.Duration // … up to this (30s)
	GiveUp   time.Duration // an alert this old is not tried again; it goes to the dead letters (24h)
}

const (
	// sendTimeout bounds one attempt; a Receiver has its own, shorter one.
	sendTimeout = 20 * time.Second
	// ackWait is how long a process may be silent about an alert before another takes it. One that is at it says so meanwhile.
	ackWait = time.Second
	// answerWait bounds how long an answer of the server is waited for.
	answerWait = 30 * time.Second
	// reopenAfter is the pause before a consumer that broke is looked for again.
	reopenAfter = time.Second

	deadSubject = schemas.DeadPrefix + "webhook"
)

// Headers of a dead letter, as everywhere in weir.
const (
	headerReason   = "Weir-Reason"
	headerDetail   = "Weir-Detail"
	headerSubject  = "Weir-Subject"
	headerStream   = "Weir-Stream"
	headerSequence = "Weir-Sequence"
	headerArrived  = "Weir-Arrived"
	headerReceiver = "Weir-Receiver"
)

// Outcomes of a delivery.
const (
	delivered = "delivered"
	retried   = "retried"
	dead      = "dead"
	disabled  = "disabled"
	direct    = "direct" // past the stream, which did not take it
)

// Sender takes alerts from their stream to one receiver, one at a time and in their order. An alert is acknowledged when
// the receiver took it or never will, and comes again otherwise, also after a crash: at least once, under the same id.
// Senders are independent of each other: what a receiver does or fails to do delays nobody else. Several processes may run
// a sender of the same name; they take turns.
type Sender struct {
	cfg SenderConfig
	js  jetstream.JetStream
	to  alerting.Receiver
	log *slog.Logger
	m   *alerting.Metrics

	last   uint64 // the last message that the receiver took, or never will
	unsent bool
}

// NewSender returns a sender to that receiver. m may be nil.
func NewSender(cfg SenderConfig, js jetstream.JetStream, to alerting.Receiver, log *slog.Logger, m *alerting.Metrics) *Sender {
	if m == nil {
		m = alerting.NewMetrics(prometheus.NewRegistry())
	}
	cfg.Name = cmp.Or(cfg.Name, "webhook")
	cfg.Backlog = cmp.Or(cfg.Backlog, time.Hour)
	cfg.RetryMin = cmp.Or(cfg.RetryMin, time.Second)
	cfg.RetryMax = cmp.Or(cfg.RetryMax, 30*time.Second)
	cfg.GiveUp = cmp.Or(cfg.GiveUp, 24*time.Hour)
	for _, outcome := range []string{delivered, retried, dead, disabled, direct} {
		m.Deliveries.WithLabelValues(cfg.Name, outcome)
	}
	return &Sender{cfg: cfg, js: js, to: to, log: log.With("receiver", cfg.Name), m: m}
}

// errGone says that the receiver wants no more.
var errGone = errors.New("the receiver is gone")

// Run delivers until ctx is done; an attempt under way is finished first. After a receiver said that it is gone nothing more
// is sent until the next start.
func (s *Sender) Run(ctx context.Context) error {
	defer s.close()
	told := false
	for {
		began := time.Now()
		err := s.session(ctx)
		told = told && time.Since(began) < time.Minute
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errGone):
			<-ctx.Done()
			return nil
		case !told:
			told = true
			s.log.Error("alerts are not delivered until the stream can be read", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(reopenAfter):
		}
	}
}

// session delivers until ctx is done or the consumer breaks.
func (s *Sender) session(ctx context.Context) error {
	cons, err := s.open(ctx)
	if err != nil {
		return fmt.Errorf("consumer %s of %s: %w", s.cfg.Name, schemas.AlertsStream, err)
	}
	messages, err := cons.Messages(jetstream.PullMaxMessages(1))
	if err != nil {
		return fmt.Errorf("consumer %s of %s: %w", s.cfg.Name, schemas.AlertsStream, err)
	}
	defer messages.Stop()
	for {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return fmt.Errorf("consumer %s of %s: %w", s.cfg.Name, schemas.AlertsStream, err)
		}
		// An attempt that has begun is finished: to break it off would leave its outcome unknown.
		if err := s.deliver(context.WithoutCancel(ctx), msg); err != nil {
			return err
		}
	}
}

// open finds the receiver's consumer, or makes it where deliveries ended.
func (s *Sender) open(ctx context.Context) (jetstream.Consumer, error) {
	cons, err := s.js.Consumer(ctx, schemas.AlertsStream, s.cfg.Name)
	if err == nil && cons.CachedInfo().Config.AckWait != ackWait { // made by an older weir
		cfg := cons.CachedInfo().Config
		cfg.AckWait = ackWait
		return s.js.UpdateConsumer(ctx, schemas.AlertsStream, cfg)
	}
	if !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return cons, err
	}
	cfg := jetstream.ConsumerConfig{
		Durable:       s.cfg.Name,
		Description:   "alerts that a receiver has taken",
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       ackWait,
		MaxDeliver:    -1,
		MaxAckPending: 1, // keeps the order, over restarts and between processes too
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:   s.last + 1,
	}
	stream, err := s.js.Stream(ctx, schemas.AlertsStream)
	if err != nil {
		return nil, err
	}
	if s.last == 0 || stream.CachedInfo().State.LastSeq < s.last { // new, or another stream of that name
		from := time.Now().Add(-s.cfg.Backlog)
		cfg.DeliverPolicy, cfg.OptStartSeq, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, 0, &from
	}
	return s.js.CreateConsumer(ctx, schemas.AlertsStream, cfg)
}

// deliver makes one attempt with msg. Its error ends the session.
func (s *Sender) deliver(ctx context.Context, msg jetstream.Msg) error {
	meta, err := msg.Metadata()
	if err != nil {
		return fmt.Errorf("deliver alert: %w", err)
	}
	seq := meta.Sequence.Stream
	if seq == s.last && meta.NumDelivered > 1 { // delivered, but the acknowledgement was lost
		return s.ack(ctx, msg, seq)
	}
	id, err := idOf(msg)
	if err != nil {
		return s.bury(ctx, msg, meta, "malformed", err)
	}
	if msg.Headers().Get(headerSent) == s.cfg.Name { // when the stream did not take it
		return s.ack(ctx, msg, seq)
	}
	err = s.attempt(ctx, id, msg)
	if err == nil {
		s.m.Deliveries.WithLabelValues(s.cfg.Name, delivered).Inc()
		s.log.Debug("alert delivered", "id", id, "seq", seq, "attempt", meta.NumDelivered)
		s.sent()
		return s.ack(ctx, msg, seq)
	}
	e, ok := errors.AsType[*alerting.DeliveryError](err)
	if !ok {
		e = &alerting.DeliveryError{Err: err}
	}
	age := time.Since(meta.Timestamp)
	switch {
	case e.Gone:
		if err := s.bury(ctx, msg, meta, "gone", e); err != nil {
			return err
		}
		s.notSent()
		s.m.Deliveries.WithLabelValues(s.cfg.Name, disabled).Inc()
		s.log.Error("the receiver is gone: no more alerts are sent to it until the next start; they stay in the stream", "id", id, "err", e)
		return errGone
	case e.Permanent:
		return s.bury(ctx, msg, meta, "refused", e)
	case age > s.cfg.GiveUp:
		return s.bury(ctx, msg, meta, "expired", fmt.Errorf("not taken for %s: %w", age.Round(time.Second), e))
	}
	wait := s.backoff(meta.NumDelivered, e.After)
	s.m.Deliveries.WithLabelValues(s.cfg.Name, retried).Inc()
	if !s.unsent { // once an outage
		s.log.Warn("alert not delivered, trying again", "id", id, "seq", seq, "attempt", meta.NumDelivered, "in", wait.Round(time.Millisecond), "err", e)
	}
	s.notSent()
	if err := msg.NakWithDelay(wait); err != nil {
		return fmt.Errorf("deliver alert %s: put off: %w", id, err)
	}
	return nil
}

// attempt sends msg once, and tells the server meanwhile that somebody is at it.
func (s *Sender) attempt(ctx context.Context, id string, msg jetstream.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	var telling sync.WaitGroup
	defer telling.Wait()
	defer cancel()
	telling.Go(func() {
		tick := time.NewTicker(ackWait / 4)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				_ = msg.InProgress() // what is lost comes again, under the same id
			}
		}
	})
	return s.to.Send(ctx, id, msg.Data())
}

// backoff is the wait before attempt n+1: twice the one before, and up to a fifth more at random, so that each is longer than
// the last; not before the receiver asked for it.
func (s *Sender) backoff(n uint64, after time.Duration) time.Duration {
	wait := s.cfg.RetryMax
	if n = max(n, 1); n < 30 {
		wait = min(s.cfg.RetryMin<<(n-1), s.cfg.RetryMax)
	}
	if after > 0 {
		wait = after
	}
	return wait + rand.N(wait/5+1)
}

// idOf is the id under which an alert was stored; one that others stored without is given its own.
func idOf(msg jetstream.Msg) (string, error) {
	a, err := schemas.DecodeAlert(msg.Data())
	if err != nil {
		return "", err
	}
	return cmp.Or(msg.Headers().Get(jetstream.MsgIDHeader), alerting.MessageID(a)), nil
}

func (s *Sender) ack(ctx context.Context, msg jetstream.Msg, seq uint64) error {
	s.last = seq
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	if err := msg.DoubleAck(ctx); err != nil {
		return fmt.Errorf("acknowledge alert %d: %w", seq, err)
	}
	return nil
}

// bury puts msg with the dead letters, and acknowledges it only then.
func (s *Sender) bury(ctx context.Context, msg jetstream.Msg, meta *jetstream.MsgMetadata, reason string, cause error) error {
	seq := meta.Sequence.Stream
	letter := &nats.Msg{Subject: deadSubject, Data: msg.Data(), Header: nats.Header{
		headerReason: {reason}, headerDetail: {cause.Error()}, headerSubject: {msg.Subject()}, headerStream: {schemas.AlertsStream},
		headerSequence: {strconv.FormatUint(seq, 10)}, headerArrived: {meta.Timestamp.UTC().Format(time.RFC3339Nano)}, headerReceiver: {s.cfg.Name}}}
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	id := fmt.Sprintf("%s-%s-%d-%d", schemas.AlertsStream, s.cfg.Name, seq, meta.Timestamp.UnixNano())
	if _, err := s.js.PublishMsg(ctx, letter, jetstream.WithMsgID(id)); err != nil {
		return errors.Join(fmt.Errorf("bury alert %d: %w", seq, err), msg.NakWithDelay(s.cfg.RetryMax))
	}
	s.m.Deliveries.WithLabelValues(s.cfg.Name, dead).Inc()
	s.log.Error("alert will not be delivered, it is with the dead letters", "seq", seq, "subject", deadSubject, "reason", reason, "err", cause)
	return s.ack(ctx, msg, seq)
}

// notSent and sent tell of a receiver that takes nothing, once each.
func (s *Sender) notSent() {
	if !s.unsent {
		s.unsent = true
		s.m.Unsent.Inc()
	}
}

func (s *Sender) sent() {
	if s.unsent {
		s.log.Info("alerts are delivered again")
	}
	s.close()
}

// close takes this sender out of the shared gauge.
func (s *Sender) close() {
	if s.unsent {
		s.unsent = false
		s.m.Unsent.Dec()
	}
}

// Package natscast is the aggregator's line to the gateways over core NATS: throttle updates go out; heartbeats, requests for
// snapshots and for the time come in.
package natscast

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/schemas"
)

const (
	// maxBytes bounds one update on the wire. A larger one goes out in parts.
	maxBytes = 256 << 10
	// shareBytes is what the numbers, tags and lengths of one share take at most, beside its rule, key and reason.
	shareBytes = 80
	// waiting bounds the messages of one subject that wait to be handled. What is beyond is lost, and comes again.
	waiting = 4096
	// together is how many requests for tokens are one call of the counter, and takers how many calls there are at once.
	together, takers = 256, 4
	// takeTimeout bounds such a call. The gateway waits no longer than a few milliseconds.
	takeTimeout = 20 * time.Millisecond
	// beatEvery is how often the server looks whether its process runs, and asleep how long it did not when what was asked meanwhile is
	// not answered any more.
	beatEvery, asleep = 50 * time.Millisecond, 250 * time.Millisecond
	// snapshotTimeout bounds the work on one request. The gateway asks again.
	snapshotTimeout = 5 * time.Second
)

// Caster publishes throttle updates. It may be used from any goroutine.
type Caster struct{ nc *nats.Conn }

var _ aggregator.Caster = (*Caster)(nil)

// New returns a caster over nc.
func New(nc *nats.Conn) *Caster { return &Caster{nc: nc} }

// Cast publishes u, in parts when it is large. While the connection is down it is an error at once: shares that are sent late are
// of no use.
func (c *Caster) Cast(_ context.Context, gateway string, u *schemas.ThrottleUpdate) error {
	if err := schemas.ValidName(gateway); err != nil {
		return fmt.Errorf("cast: %w", err)
	}
	if !c.nc.IsConnected() {
		return fmt.Errorf("cast to %s: %w", gateway, nats.ErrConnectionReconnecting)
	}
	for _, part := range split(u) {
		b, err := schemas.EncodeThrottleUpdate(part)
		if err != nil {
			return fmt.Errorf("cast to %s: %w", gateway, err)
		}
		if err := c.nc.Publish(schemas.ThrottlePrefix+gateway, b); err != nil {
			return fmt.Errorf("cast to %s: %w", gateway, err)
		}
	}
	return nil
}

// split cuts u into updates below maxBytes; only the first is a snapshot if u is.
func split(u *schemas.ThrottleUpdate) []*schemas.ThrottleUpdate {
	var parts []*schemas.ThrottleUpdate
	first, size := 0, 0
	for i := range u.Shares {
		s := &u.Shares[i]
		n := shareBytes + len(s.Rule) + len(s.Key) + len(s.Reason)
		if size+n > maxBytes {
			parts = append(parts, part(u, first, i))
			first, size = i, 0
		}
		size += n
	}
	return append(parts, part(u, first, len(u.Shares)))
}

func part(u *schemas.ThrottleUpdate, first, end int) *schemas.ThrottleUpdate {
	p := *u
	p.Snapshot, p.Shares = u.Snapshot && first == 0, u.Shares[first:end]
	return &p

}

// Centre answers gateways. It is satisfied by aggregator.Aggregator.
type Centre interface {
	Heartbeat(h *schemas.Heartbeat, arrived time.Time)
	Snapshot(ctx context.Context, gateway string) (*schemas.ThrottleUpdate, error)
	Take(ctx context.Context, asked []schemas.TakeRequest) ([]schemas.TakeReply, error)
}

// Metrics is what the server counts.
type Metrics struct {
	Bad       *prometheus.CounterVec // messages that were ignored, by reason: subject, malformed or reply (no inbox)
	Snapshots *prometheus.CounterVec // by result: ok or failed
}

// NewMetrics makes and registers the metrics.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Bad: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_aggregator_bad_messages_total",
			Help: "Messages from gateways that could not be read, or want an answer elsewhere than in an inbox."}, []string{"reason"}),
		Snapshots: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_aggregator_snapshots_total",
			Help: "Requests for snapshots."}, []string{"result"}),
	}
	reg.MustRegister(m.Bad, m.Snapshots)
	return m
}

// Server hears gateways and answers them. It is of the one aggregator that is the centre: one that is frozen, and was replaced, takes
// no requests from it.
type Server struct {
	nc     *nats.Conn
	centre Centre
	log    *slog.Logger
	m      *Metrics

	beat atomic.Pointer[time.Time] // when the process was seen to run last

	mu   sync.Mutex      // guards told
	told map[string]bool // reasons that were logged
}

// NewServer returns a server; m may be nil. It starts nothing.
func NewServer(nc *nats.Conn, centre Centre, log *slog.Logger, m *Metrics) *Server {
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	return &Server{nc: nc, centre: centre, log: log, m: m, told: make(map[string]bool)}
}

// Run serves until ctx is done, over every reconnect.
func (s *Server) Run(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, sub := range []struct {
		subject string
		handle  func(context.Context, *nats.Msg)
	}{
		{schemas.HeartbeatPrefix + "*", s.heartbeat},
		{schemas.SnapshotPrefix + "*", s.snapshot},
		{schemas.ClockSubject, s.clock},
	} {
		messages := make(chan *nats.Msg, waiting)
		n, err := s.nc.ChanSubscribe(sub.subject, messages)
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", sub.subject, err)
		}
		defer func() {
			if e := n.Unsubscribe(); e != nil && !errors.Is(e, nats.ErrConnectionClosed) {
				err = errors.Join(err, fmt.Errorf("unsubscribe from %s: %w", sub.subject, e))
			}
		}()
		running.Go(func() { // one for each subject: a slow snapshot delays nobody's clock
			for {
				select {
				case msg := <-messages:
					sub.handle(ctx, msg)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	asked := make(chan *nats.Msg, waiting)
	n, err := s.nc.ChanSubscribe(schemas.StrictPrefix+"*", asked)
	if err != nil {
		return fmt.Errorf("subscribe to %s*: %w", schemas.StrictPrefix, err)
	}
	defer func() {
		if e := n.Unsubscribe(); e != nil && !errors.Is(e, nats.ErrConnectionClosed) {
			err = errors.Join(err, fmt.Errorf("unsubscribe from %s*: %w", schemas.StrictPrefix, e))
		}
	}()
	s.beats()
	running.Go(func() { s.watch(ctx, asked) })
	for range takers {
		running.Go(func() { s.takes(ctx, asked) })
	}
	<-ctx.Done()
	return nil
}

// takes answers requests for tokens: what waits is answered together. What cannot be answered is left alone: its gateway decides
// by itself.
func (s *Server) takes(ctx context.Context, asked <-chan *nats.Msg) {
	for {
		var msgs []*nats.Msg
		var requests []schemas.TakeRequest
		add := func(msg *nats.Msg) {
			q, err := schemas.DecodeTakeRequest(msg.Data)
			if err == nil {
				q.Gateway, err = schemas.Gateway(schemas.StrictPrefix, msg.Subject)
			}
			if err != nil {
				s.bad("malformed", err)
				return
			}
			if !s.inbox(msg) {
				return
			}
			msgs, requests = append(msgs, msg), append(requests, q)
		}
		select {
		case msg := <-asked:
			add(msg)
		case <-ctx.Done():
			return
		}
		for more := true; more && len(msgs) < together; {
			select {
			case msg := <-asked:
				add(msg)
			default:
				more = false
			}
		}
		if len(msgs) == 0 || s.slept() {
			continue
		}
		timeout, cancel := context.WithTimeout(ctx, takeTimeout)
		replies, err := s.centre.Take(timeout, requests)
		cancel()
		if err != nil {
			s.log.Debug("requests for tokens not answered", "requests", len(requests), "err", err)
			continue
		}
		for i := range replies {
			b, err := schemas.EncodeTakeReply(replies[i])
			if err == nil {
				err = msgs[i].Respond(b)
			}
			if err != nil {
				s.log.Debug("tokens not handed over", "err", err)
			}
		}
	}
}

func (s *Server) beats() {
	now := time.Now()
	s.beat.Store(&now)
}

// slept says whether the process has not run for a while, and may have old requests before it.
func (s *Server) slept() bool { return time.Since(*s.beat.Load()) > asleep }

// watch finds out whether the process was frozen, and leaves alone what gateways asked for meanwhile: they have decided without it, and
// tokens taken for them would be lost.
func (s *Server) watch(ctx context.Context, asked <-chan *nats.Msg) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(beatEvery):
		}
		if s.slept() {
			_ = s.nc.FlushTimeout(time.Second) // whatever was asked before its answer is here, or will not come soon
			for {
				select {
				case <-asked:
					continue
				default:
				}
				break
			}
		}
		s.beats()
	}
}

func (s *Server) heartbeat(_ context.Context, msg *nats.Msg) {
	arrived := time.Now()
	if _, err := schemas.Gateway(schemas.HeartbeatPrefix, msg.Subject); err != nil {
		s.bad("subject", err)
		return
	}
	h, err := schemas.DecodeHeartbeat(msg.Subject, msg.Data)
	if err != nil {
		s.bad("malformed", err)
		return
	}
	s.centre.Heartbeat(h, arrived)
}

// snapshot answers with the first part of the snapshot; a gateway hears the other parts as updates. A request that cannot be
// answered is left alone, and comes again.
func (s *Server) snapshot(ctx context.Context, msg *nats.Msg) {
	gateway, err := schemas.Gateway(schemas.SnapshotPrefix, msg.Subject)
	if err != nil {
		s.bad("subject", err)
		return
	}
	if !s.inbox(msg) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	if err := s.answer(ctx, gateway, msg.Reply); err != nil {
		s.m.Snapshots.WithLabelValues("failed").Inc()
		s.log.Debug("snapshot not answered", "gateway", gateway, "err", err)
		return
	}
	s.m.Snapshots.WithLabelValues("ok").Inc()
}

func (s *Server) answer(ctx context.Context, gateway, reply string) error {
	u, err := s.centre.Snapshot(ctx, gateway)
	if err != nil {
		return err
	}
	for _, part := range split(u) {
		b, err := schemas.EncodeThrottleUpdate(part)
		if err != nil {
			return err
		}
		subject := reply
		if !part.Snapshot {
			subject = schemas.ThrottlePrefix + gateway
		}
		if err := s.nc.Publish(subject, b); err != nil {
			return err
		}
	}
	return nil
}

// clock answers with the time of receipt and the time of sending. Both come from one reading of the wall clock, so that a step
// of it between them does no harm.
func (s *Server) clock(_ context.Context, msg *nats.Msg) {
	received := time.Now()
	if !s.inbox(msg) {
		return
	}
	b, err := schemas.EncodeClockReply(schemas.ClockReply{Received: received, Sent: received.Add(time.Since(received))})
	if err == nil {
		err = msg.Respond(b)
	}
	if err != nil {
		s.log.Debug("time not told", "err", err)
	}
}

// inbox says whether a request wants its answer in an inbox. NATS does not ask whether the one who asks might publish on the
// reply subject, and we may publish on nearly all of them: an answer on any other subject would be its message with our rights.
func (s *Server) inbox(msg *nats.Msg) bool {
	if strings.HasPrefix(msg.Reply, nats.InboxPrefix) {
		return true
	}
	s.bad("reply", fmt.Errorf("request on %s wants its answer on %q, which is no inbox", msg.Subject, msg.Reply))
	return false
}

// bad counts a message that cannot be read, and logs the first of its kind.
func (s *Server) bad(reason string, err error) {
	s.m.Bad.WithLabelValues(reason).Inc()
	s.mu.Lock()
	first := !s.told[reason]
	s.told[reason] = true
	s.mu.Unlock()
	if first {
		s.log.Warn("message ignored; more of its kind are only counted", "reason", reason, "err", err)
	}
}

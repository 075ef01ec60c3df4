// Package natsfeed is a gateway's line to the centre: throttle updates come in, signs of life and clock measurements go out.
package natsfeed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/internal/clock"
	"github.com/weirhq/weir/schemas"
)

// Config names the gateway and says how often it speaks. A zero field means its default.
type Config struct {
	Gateway string // last token of its subjects; required
	Boot    string // of this process life; required
	Version string // of weir, for heartbeats

	Heartbeat  time.Duration // between heartbeats (1s); a change of mode goes out at once
	Look       time.Duration // between looks at the mode (100ms)
	Calm       time.Duration // the centre has to be heard for so long before all is well again (1s)
	ClockEvery time.Duration // between measurements of the clock (5s)
	Timeout    time.Duration // of a request to the centre (2s)
	RetryMin   time.Duration // before asking again for a snapshot, doubled each time … (100ms)
	RetryMax   time.Duration // … up to this (5s)
	Resync     time.Duration // a snapshot is asked for this often even if nothing seems missing (1m)

	Grace    time.Duration // after the start: that a centre was not heard yet shows, and is no line in the log (3s)
	TakeWait time.Duration // for an answer about one request (5ms)

	Silent    func()           // called when shares have outlived their time to live, from the goroutine that calls apply; may be nil
	FleetFile string           // where what is known of the fleet is kept over a restart; "" keeps it nowhere
	Now       func() time.Time // the gateway's wall clock (time.Now)
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.Heartbeat, time.Second}, {&c.Look, 100 * time.Millisecond}, {&c.Calm, time.Second}, {&c.ClockEvery, 5 * time.Second}, {&c.Timeout, 2 * time.Second},
		{&c.RetryMin, 100 * time.Millisecond}, {&c.RetryMax, 5 * time.Second}, {&c.Resync, time.Minute}, {&c.Grace, 3 * time.Second}, {&c.TakeWait, 5 * time.Millisecond},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.Silent == nil {
		c.Silent = func() {}
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

// Status is what a heartbeat says of its gateway.
type Status struct {
	Mode          string // synced, stale, isolated, floor or local
	PolicyVersion uint64
	Pending       uint64   // reports sealed and not yet acknowledged
	Without       []string // what the gateway does without: schemas.WithoutSpool
	Sealed        uint64   // number of the newest report with requests that is sealed; 0 when there is none
	Weight        int      // millionths of each limit that it keeps to without the centre
}

// queue is how many messages may wait to be applied. What does not fit is dropped, noticed and asked for.
const queue = 4096

// Metrics may be shared by several gateways of one process.
type Metrics struct {
	Updates  *prometheus.CounterVec // kind: update, snapshot, malformed
	Asked    prometheus.Counter     // requests for a snapshot
	Degraded prometheus.Gauge       // raised while a gateway is stale, isolated or on the floor; the wiring puts weir_degraded{part} here
}

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Updates: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_throttle_updates_received_total",
			Help: "Throttle updates that gateways received from the centre."}, []string{"kind"}),
		Asked: prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_throttle_snapshots_asked_total",
			Help: "Requests of gateways for all their shares: at start, after each reconnect and now and then."}),
		Degraded: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_throttle_degraded", Help: "Gateways that do not hear the centre, or hear one that is without Redis."}),
	}
	for _, kind := range []string{"update", "snapshot", "malformed"} {
		m.Updates.WithLabelValues(kind)
	}
	reg.MustRegister(m.Updates, m.Asked)
	return m
}

// Feed is one gateway's line to the centre. Nothing that it does can make a decision wait.
type Feed struct {
	cfg    Config
	nc     *nats.Conn
	apply  func(schemas.ThrottleUpdate)
	status func() Status
	m      *Metrics
	log    *slog.Logger

	mu    sync.Mutex // clock
	clock clock.Filter
}

// New returns a feed of nc. apply is called with every update, from one goroutine; it sorts out by version what is late.
// status is called once a heartbeat. m may be nil.
func New(cfg Config, nc *nats.Conn, apply func(schemas.ThrottleUpdate), status func() Status, m *Metrics, log *slog.Logger) (*Feed, error) {
	cfg = cfg.withDefaults()
	if err := errors.Join(schemas.ValidName(cfg.Gateway), schemas.ValidName(cfg.Boot)); err != nil {
		return nil, fmt.Errorf("feed of gateway %.80q: %w", cfg.Gateway, err)
	}
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	return &Feed{cfg: cfg, nc: nc, apply: apply, status: status, m: m, log: log.With("gateway", cfg.Gateway)}, nil
}

// Run listens and speaks until ctx is done, whether the server is there or not.
func (f *Feed) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var side sync.WaitGroup
	defer side.Wait()
	defer cancel()

	fleet := make(chan Fleet, 1)
	side.Go(func() { f.keepFleet(ctx, fleet) })
	side.Go(func() { f.measure(ctx) })
	return f.listen(ctx, fleet)
}

// listen is the loop of updates, snapshots and heartbeats.
func (f *Feed) listen(ctx context.Context, fleet chan Fleet) (err error) {
	// Both subscriptions fill one channel: updates are applied in the order in which they came.
	messages := make(chan *nats.Msg, queue)
	inbox := f.nc.NewInbox()
	var subs []*nats.Subscription
	for _, subject := range []string{schemas.ThrottlePrefix + f.cfg.Gateway, inbox} {
		sub, err := f.nc.ChanSubscribe(subject, messages)
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", subject, err)
		}
		subs = append(subs, sub)
		defer func() { _ = sub.Unsubscribe() }() // fails only when the connection is closed, which ends it too
	}
	connections := f.nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer f.nc.RemoveStatusListener(connections)

	var (
		heartbeat = time.NewTicker(f.cfg.Heartbeat)
		ask       = time.NewTimer(0) // when to ask for a snapshot next
		wait      = f.cfg.RetryMin   // after that one
		silent    = time.NewTimer(0) // when shares have outlived their time
		lost      int                // messages that found the channel full
		mode      = modeLog{log: f.log, degraded: f.m.Degraded, quiet: time.Now().Add(f.cfg.Grace), calm: f.cfg.Calm}
		look      = time.NewTicker(f.cfg.Look)
		known     Fleet
	)
	if f.cfg.FleetFile != "" {
		known, _ = ReadFleet(f.cfg.FleetFile) // whoever started us has said what was wrong with it
	}
	defer heartbeat.Stop()
	defer look.Stop()
	defer ask.Stop()
	defer silent.Stop()
	defer mode.close()
	f.beat()
	for {
		select {
		case <-ctx.Done():
			last := f.status()
			last.Mode = schemas.ModeStopped // its silence from now on is no reason to worry
			f.say(last)
			return nil
		case s := <-connections:
			if s == nats.CLOSED {
				return errors.New("throttle feed: the connection to NATS is closed")
			}
			wait = f.cfg.RetryMin
			ask.Reset(0)
		case <-ask.C:
			f.ask(inbox)
			ask.Reset(wait + rand.N(wait/4+1))
			wait = min(2*wait, f.cfg.RetryMax)
		case msg := <-messages:
			u := f.decode(msg)
			if u == nil {
				continue
			}
			f.apply(*u)
			silent.Reset(u.TTL + time.Millisecond)
			if u.Snapshot {
				wait = f.cfg.RetryMin
				ask.Reset(f.cfg.Resync + rand.N(f.cfg.Resync/4+1))
			}
			select { // only the newest waits to be kept
			case <-fleet:
			default:
			}
			known = fleetOf(u, known)
			fleet <- known
		case <-silent.C:
			f.cfg.Silent()
		case <-look.C:
			if s := f.status(); mode.see(s) {
				f.say(s)
			}
		case <-heartbeat.C:
			f.beat()
			if n := dropped(subs); n > lost {
				lost, wait = n, f.cfg.RetryMin
				ask.Reset(0)
			}
		}
	}
}

// dropped is how many messages this process was too slow for.
func dropped(subs []*nats.Subscription) (n int) {
	for _, sub := range subs {
		if d, err := sub.Dropped(); err == nil {
			n += d
		}
	}
	return n
}

// ask asks for all shares of this gateway. What comes back arrives in listen, and an answer that does not come is asked for
// again: a centre that starts later, or a request that was lost, needs no other care.
func (f *Feed) ask(inbox string) {
	if !f.nc.IsConnected() {
		return
	}
	if err := f.nc.PublishRequest(schemas.SnapshotPrefix+f.cfg.Gateway, inbox, nil); err == nil {
		f.m.Asked.Inc()
	}
}

// Take asks the centre for tokens, and waits no longer than TakeWait. It is an enforcer.Taker.
func (f *Feed) Take(ctx context.Context, q schemas.TakeRequest) (schemas.TakeReply, error) {
	if !f.nc.IsConnected() {
		return schemas.TakeReply{}, fmt.Errorf("ask for tokens: %w", nats.ErrConnectionReconnecting)
	}
	b, err := schemas.EncodeTakeRequest(q)
	if err != nil {
		return schemas.TakeReply{}, fmt.Errorf("ask for tokens: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, f.cfg.TakeWait)
	defer cancel()
	msg, err := f.nc.RequestWithContext(ctx, schemas.StrictPrefix+f.cfg.Gateway, b)
	if err != nil {
		return schemas.TakeReply{}, fmt.Errorf("ask for tokens: %w", err)
	}
	return schemas.DecodeTakeReply(msg.Data)
}

// decode reads an update. It is nil for what is none: the server's word that nobody listens, or a mistake.
func (f *Feed) decode(msg *nats.Msg) *schemas.ThrottleUpdate {
	if len(msg.Data) == 0 && msg.Header.Get("Status") != "" {
		return nil // no responders
	}
	u, err := schemas.DecodeThrottleUpdate(msg.Data)
	if err != nil {
		f.m.Updates.WithLabelValues("malformed").Inc()
		f.log.Debug("throttle update ignored", "bytes", len(msg.Data), "err", err)
		return nil
	}
	kind := "update"
	if u.Snapshot {
		kind = "snapshot"
	}
	f.m.Updates.WithLabelValues(kind).Inc()
	return u
}

// beat sends a heartbeat and returns what it said. One that cannot go out now is not sent late: the next one says more.
func (f *Feed) beat() Status {
	s := f.status()
	f.say(s)
	return s
}

// say sends a heartbeat.
func (f *Feed) say(s Status) {
	if !f.nc.IsConnected() {
		return
	}
	h := &schemas.Heartbeat{Gateway: f.cfg.Gateway, Boot: f.cfg.Boot, SentAt: f.cfg.Now(), PolicyVersion: s.PolicyVersion,
		Mode: s.Mode, PendingReports: s.Pending, Version: f.cfg.Version, Without: s.Without, Sealed: s.Sealed, Weight: s.Weight}
	h.ClockOffset, h.ClockError, h.ClockKnown = f.Clock()
	b, err := schemas.EncodeHeartbeat(h)
	if err == nil {
		err = f.nc.Publish(schemas.HeartbeatPrefix+f.cfg.Gateway, b)
	}
	if err != nil {
		f.log.Debug("heartbeat not sent", "err", err)
	}
}

// modeLog tells once of each change of mode.
type modeLog struct {
	log      *slog.Logger
	degraded prometheus.Gauge
	last     string
	quiet    time.Time // until then it is no line in the log that the centre was not heard yet
	calm     time.Duration
	well     time.Time // since when the centre is heard again; zero before
	since    time.Time
	raised   bool
}

// see notes the mode, and reports whether it is news.
func (l *modeLog) see(s Status) bool {
	now := time.Now()
	switch {
	case s.Mode == l.last:
		l.well = time.Time{}
		return false
	case l.last == "" && enforcer.Alone(s.Mode) && now.Before(l.quiet):
		l.raise()
		return false
	case enforcer.Alone(l.last) && !enforcer.Alone(s.Mode):
		if l.well.IsZero() {
			l.well = now
		}
		if now.Sub(l.well) < l.calm {
			return false
		}
	}
	was, lasted := l.last, now.Sub(l.since).Round(time.Millisecond)
	first := was == ""
	l.last, l.since, l.well = s.Mode, now, time.Time{}
	switch {
	case enforcer.Alone(s.Mode):
		l.raise()
	case l.raised:
		l.raised = false
		l.degraded.Dec()
	}
	switch {
	case s.Mode == enforcer.Stale:
		l.log.Warn("throttling with the last shares: the centre is not heard, or is without Redis", "mode", s.Mode)
	case enforcer.Alone(s.Mode) && first:
		l.log.Error("throttling without the centre: this gateway keeps to its own part of each limit", "mode", s.Mode)
	case enforcer.Alone(s.Mode):
		l.log.Error("throttling without the centre: this gateway keeps to its own part of each limit", "mode", s.Mode, "was", was, "for", lasted)
	case s.Mode == enforcer.Local:
		l.log.Info("throttling without a centre: no limit of the policy is shared", "mode", s.Mode)
	case first:
		l.log.Info("throttling with the centre", "mode", s.Mode)
	default:
		l.log.Warn("throttling with the centre again", "mode", s.Mode, "was", was, "for", lasted)
	}
	return true
}

// raise shows that this gateway is alone.
func (l *modeLog) raise() {
	if !l.raised {
		l.raised = true
		l.degraded.Inc()
	}
}

// close takes this gateway out of the shared gauge.
func (l *modeLog) close() {
	if l.raised {
		l.degraded.Dec()
	}
}

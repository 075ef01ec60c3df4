// Package natsfeed is alerting's line to NATS: reports and heartbeats in, alerts into their stream, and from there to the
// receivers, one durable consumer each.
package natsfeed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/internal/clock"
	"github.com/weirhq/weir/schemas"
)

// Config is tuning. A zero field means its default.
type Config struct {
	Tick     time.Duration // between judgements (200ms)
	ReadBack time.Duration // of reports at the start, to know again what is normal (3m)
	Poll     time.Duration // between looks at the stream's clock and end (2s)
	Timeout  time.Duration // of a request to the server (2s)
	Retry    time.Duration // before reading is tried again (1s)
	Away     time.Duration // NATS may be away for so long until that is an alert (3s)
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.Tick, 200 * time.Millisecond}, {&c.ReadBack, 3 * time.Minute}, {&c.Poll, 2 * time.Second},
		{&c.Timeout, 2 * time.Second}, {&c.Retry, time.Second}, {&c.Away, 3 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	return c
}

const (
	// maxReadBack bounds how far back a bucket whose alert fires is looked for.
	maxReadBack = time.Hour
	// stalledAfter is how long no report may come while the stream has some, before reading starts anew.
	stalledAfter = 30 * time.Second
	// backlog is the reports and heartbeats held while one is worked on. When it is full, the server holds the reports.
	backlog = 1024
)

// Feed runs a detector on what NATS brings. The stream of alerts is all the state there is: at the start it says what fires,
// and a change is made by storing it there. Several feeds may run at once, in one process or many: a change is stored only
// by a feed that knows all those before it, so that each is stored once, whoever sees it first.
type Feed struct {
	cfg    Config
	nc     *nats.Conn
	js     jetstream.JetStream
	det    *alerting.Detector
	outbox *outbox
	direct *courier
	nats   *absence
	log    *slog.Logger
	m      *alerting.Metrics

	clock  clock.Filter // the stream's clock
	here   time.Time    // a reading of this host's clocks …
	there  time.Time    // … and what time the stream had then
	seq    uint64       // of the last report read
	read   time.Time    // when it was stored
	target uint64       // reports up to here must have been read, or the feed is behind
	newest uint64       // the stream's last report, as last polled
	lost   error        // why the stream could not be asked; nil when it could
	blind  time.Time    // since when nothing is judged, zero while all is well
	told   bool         // of that
}

// New returns a feed of det, which is the feed's alone from then on. The streams must be declared before reports come.
// m may be nil.
func New(cfg Config, nc *nats.Conn, js jetstream.JetStream, det *alerting.Detector, log *slog.Logger, m *alerting.Metrics) *Feed {
	if m == nil {
		m = alerting.NewMetrics(prometheus.NewRegistry())
	}
	cfg = cfg.withDefaults()
	direct := &courier{log: log, wake: make(chan struct{}, 1)}
	return &Feed{cfg: cfg, nc: nc, js: js, det: det, log: log, m: m, direct: direct, nats: newAbsence(nc, cfg.Away, direct.send, log),
		outbox: &outbox{js: js, det: det, direct: direct, timeout: cfg.Timeout, log: log, m: m, firing: map[string]schemas.Alert{}}}
}

// Direct names the receiver of the alerts that the stream does not take, and of the one about NATS itself: they go there under
// the id that they are stored with later, and the Sender of that name passes them over then. It is to be called before Run.
func (f *Feed) Direct(name string, to alerting.Receiver) {
	f.direct.name, f.direct.to = name, to
	f.direct.sent = f.m.Deliveries.WithLabelValues(name, direct)
}

// Run feeds the detector until ctx is done, whether the server is there or not.
func (f *Feed) Run(ctx context.Context) error {
	heartbeats := make(chan *nats.Msg, backlog)
	for _, prefix := range []string{schemas.HeartbeatPrefix, schemas.HealthPrefix} {
		sub, err := f.nc.ChanSubscribe(prefix+"*", heartbeats)
		if err != nil {
			return fmt.Errorf("alerting: subscribe to %s*: %w", prefix, err)
		}
		defer func() { _ = sub.Unsubscribe() }() // fails only when the connection is closed, which ends it too
	}
	ctx, cancel := context.WithCancel(ctx)
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	beside.Go(func() { f.nats.run(ctx) })
	if f.direct.to != nil {
		beside.Go(func() { f.direct.run(ctx) })
	}
	defer f.close()
	for {
		err := f.session(ctx, heartbeats)
		if ctx.Err() != nil {
			return nil
		}
		if f.nc.IsClosed() {
			return errors.New("alerting: the connection to NATS is closed")
		}
		f.det.Deaf()
		f.see(err.Error())
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(f.cfg.Retry):
		}
	}
}

// poll is an answer about the streams.
type poll struct {
	sample clock.Sample
	last   uint64 // report
	alerts uint64 // the last one
	err    error
}

// session reads until ctx is done or reading breaks, and then says why.
func (f *Feed) session(ctx context.Context, heartbeats <-chan *nats.Msg) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := f.outbox.learn(ctx); err != nil {
		return err
	}
	messages, err := f.open(ctx)
	if err != nil {
		return err
	}
	defer messages.Stop()
	reports, broken := make(chan jetstream.Msg, backlog), make(chan error, 1)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		for {
			msg, err := messages.Next()
			if err != nil {
				broken <- fmt.Errorf("read %s: %w", schemas.UsageStream, err)
				return
			}
			select {
			case reports <- msg:
			case <-ctx.Done():
				return
			}
		}
	}()
	polls := make(chan poll)
	polled := make(chan struct{})
	go func() { defer close(polled); f.poll(ctx, polls) }()
	defer func() { // wait for both
		cancel()
		messages.Stop()
		<-polled
		<-reading
	}()

	tick := time.NewTicker(f.cfg.Tick)
	defer tick.Stop()
	progress := time.Now()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-broken:
			return err
		case msg := <-heartbeats:
			f.hear(msg)
		case msg := <-reports:
			progress = time.Now()
			f.observe(msg)
		case p := <-polls:
			if f.lost = p.err; p.err == nil {
				f.setClock(p.sample)
				f.target, f.newest = f.newest, p.last
				if p.alerts > f.outbox.seq { // of another alerter
					if err := f.outbox.learn(ctx); err != nil {
						return err
					}
				}
			}
		case <-tick.C:
			if f.seq < f.target && time.Since(progress) > stalledAfter {
				return fmt.Errorf("read %s: nothing came for %s", schemas.UsageStream, stalledAfter)
			}
			for waiting := true; waiting; { // who has spoken is not silent, however long the last look took
				select {
				case msg := <-heartbeats:
					f.hear(msg)
				default:
					waiting = false
				}
			}
			f.judge(ctx)
		}
	}
}

// hear takes in a sign of life.
func (f *Feed) hear(msg *nats.Msg) {
	if strings.HasPrefix(msg.Subject, schemas.HealthPrefix) {
		h, err := schemas.DecodeHealth(msg.Subject, msg.Data)
		if err != nil {
			f.log.Debug("health ignored", "subject", msg.Subject, "err", err)
			return
		}
		f.det.Health(h)
		return
	}
	h, err := schemas.DecodeHeartbeat(msg.Subject, msg.Data)
	if err != nil {
		f.log.Debug("heartbeat ignored", "subject", msg.Subject, "err", err)
		return
	}
	f.det.Heartbeat(h)
}

// open starts reading the reports: at the start from a while ago, then after the last one read.
func (f *Feed) open(ctx context.Context) (jetstream.MessagesContext, error) {
	p := f.ask(ctx)
	if p.err != nil {
		return nil, p.err
	}
	f.clock.Reset()
	f.setClock(p.sample)
	f.lost, f.newest, f.target = nil, p.last, p.last
	cfg := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: f.seq + 1}
	if f.seq == 0 || f.seq > p.last { // the first time, or another stream of that name
		from := p.sample.T2.Add(-f.cfg.ReadBack)
		if since, ok := f.outbox.lowSince(); ok && since.Before(from) {
			from = since
		}
		if earliest := p.sample.T2.Add(-maxReadBack); from.Before(earliest) {
			from = earliest
		}
		cfg = jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &from}
		f.seq = 0
	}
	cons, err := f.js.OrderedConsumer(ctx, schemas.UsageStream, cfg)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", schemas.UsageStream, err)
	}
	if cons.CachedInfo().NumPending == 0 { // nothing to catch up with
		f.seq = max(f.seq, f.newest)
	}
	messages, err := cons.Messages()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", schemas.UsageStream, err)
	}
	return messages, nil
}

// poll asks about the streams every now and then, until ctx is done.
func (f *Feed) poll(ctx context.Context, out chan<- poll) {
	every := time.NewTicker(f.cfg.Poll)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
		select {
		case <-ctx.Done():
			return
		case out <- f.ask(ctx):
		}
	}
}

// ask asks where the streams end, and what time it is there.
func (f *Feed) ask(ctx context.Context) poll {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.Timeout)
	defer cancel()
	sent := time.Now()
	stream, err := f.js.Stream(ctx, schemas.UsageStream)
	if err != nil {
		return poll{err: fmt.Errorf("ask about %s: %w", schemas.UsageStream, err)}
	}
	info := stream.CachedInfo()
	p := poll{last: info.State.LastSeq, sample: clock.Sample{T1: sent, T2: info.TimeStamp, T3: info.TimeStamp, T4: time.Now()}}
	alerts, err := f.js.Stream(ctx, schemas.AlertsStream)
	if err != nil {
		return poll{err: fmt.Errorf("ask about %s: %w", schemas.AlertsStream, err)}
	}
	p.alerts = alerts.CachedInfo().State.LastSeq
	return p
}

// setClock takes in a sample of the stream's clock.
func (f *Feed) setClock(s clock.Sample) {
	f.clock.Add(s)
	if e, ok := f.clock.Estimate(); ok {
		f.here, f.there = s.T1, s.T1.Round(0).Add(e.Offset)
	}
}

func (f *Feed) observe(msg jetstream.Msg) {
	meta, err := msg.Metadata()
	if err != nil {
		f.log.Debug("report ignored", "subject", msg.Subject(), "err", err)
		return
	}
	f.seq, f.read = meta.Sequence.Stream, meta.Timestamp
	r, err := schemas.DecodeReport(msg.Subject(), msg.Headers().Get("Content-Type"), msg.Data(), meta.Timestamp)
	if err != nil { // the aggregator has put it with the dead letters
		f.log.Debug("report ignored", "subject", msg.Subject(), "seq", f.seq, "err", err)
		return
	}
	f.det.Observe(r, meta.Timestamp)
}

// judge has the detector look at things as they are now, by the stream's clock. While the feed cannot know how they are,
// nothing is judged: silence here is not silence there.
func (f *Feed) judge(ctx context.Context) {
	now := f.there.Add(time.Since(f.here)) // by the monotonic clock from the last sample on
	if f.nats.away() {
		f.det.Deaf()
	}
	why, lag := "", 0.0
	switch {
	case !f.nc.IsConnected():
		why = "not connected to NATS"
	case f.lost != nil:
		why = f.lost.Error()
	case f.here.IsZero():
		why = "the stream's clock is not known"
	case f.seq < f.target:
		why = "reports are read late"
		if !f.read.IsZero() {
			lag = max(0, now.Sub(f.read).Seconds())
		}
	}
	f.m.Lag.Set(lag)
	if why == "" {
		if a := f.nats.over(); a != nil {
			f.outbox.add(a)
		}
		if f.outbox.free() {
			f.outbox.pending = append(f.outbox.pending, f.det.Tick(now)...)
		}
	}
	if err := f.outbox.flush(ctx); err != nil && why == "" {
		why = err.Error()
	}
	f.see(why)
}

// see tells of blindness when it lasts, and when it is over. Catching up after a start is none.
func (f *Feed) see(why string) {
	const grace = 5 * time.Second
	switch now := time.Now(); {
	case why == "" && f.blind.IsZero():
	case why == "":
		if f.told {
			f.log.Info("alerting sees again", "after", now.Sub(f.blind).Round(time.Second))
			f.m.Degraded.Dec()
		}
		f.blind, f.told = time.Time{}, false
	case f.blind.IsZero():
		f.blind = now
	case now.Sub(f.blind) > grace && !f.told:
		f.told = true
		f.log.Error("alerting is blind: alerts stay as they are", "err", why)
		f.m.Degraded.Inc()
	}
}

// close takes this feed out of the shared gauge.
func (f *Feed) close() {
	if f.told {
		f.told = false
		f.m.Degraded.Dec()
	}
}

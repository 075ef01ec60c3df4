package app

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/natscast"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/pulse"
	"github.com/weirhq/weir/schemas"
)

// Timing of the lease of the centre. One that is frozen is replaced after centreExpiry; one that has died, as soon as NATS knows.
const (
	centreEvery  = 500 * time.Millisecond
	centreExpiry = 3 * time.Second
)

// throttleDelay is how long a batch of reports waits for more. A gateway that has run out of its share waits as long for the next.
const throttleDelay = 5 * time.Millisecond

// throttleRetry is the longest wait before a batch that was not folded comes again: so soon after the counter is back shares move.
const throttleRetry = 500 * time.Millisecond

// catchUp is how long NATS has to answer again until the reports that it kept are here, and limits are divided.
const catchUp = 500 * time.Millisecond

// divider is what one aggregator at a time does: it divides limits between gateways. What it remembers of them ends with its lease.
// Two at once do no harm, for gateways follow the one that took over last, but half of the reports would move nothing.
type divider struct {
	nc       *nats.Conn
	counter  *redis.Counter
	silent   func() time.Duration // of the counter, for aggregator.Config
	recorder *clickhouse.Recorder
	declare  func(context.Context) error
	m        *Metrics
	log      *slog.Logger

	mu      sync.Mutex // guards reports
	reports *jetstream.Source[*schemas.Report]
}

// keep is the centre until ctx is done.
func (d *divider) keep(ctx context.Context, sure func() bool) error {
	reports, err := jetstream.NewSource(jetstream.Config{Name: throttleConsumer, MaxDelay: throttleDelay, RetryMax: throttleRetry, Declare: d.declare}, d.nc, decodeReport, d.log, d.m.streams)
	if err != nil {
		return err
	}
	hears := &pulse.Pulse{Server: "NATS", Ask: d.hears, Healthy: catchUp, Log: slog.New(slog.DiscardHandler)} // that of the process tells the operator
	agg := aggregator.New(aggregator.Config{OnPush: recordPushes(d.recorder), Silent: d.silent, Deaf: func() bool { return hears.Away() > 0 }}, d.counter, natscast.New(d.nc), d.log, d.m.aggregator)
	defer agg.Close()
	d.read(reports)
	defer d.read(nil)
	mark := newBookmark(d.counter, reports, agg, d.log)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return hears.Run(ctx) })
	g.Go(func() error { return agg.Run(ctx) })
	g.Go(func() error { return reports.Consume(ctx, mark.noting(agg.Reports)) })
	g.Go(func() error { return mark.run(ctx) })
	g.Go(func() error {
		return natscast.NewServer(d.nc, servingCentre{agg, d.recorder, sure}, d.log, d.m.cast).Run(ctx)
	})
	return g.Wait()
}

// hears asks whether NATS carries reports to us. Without them all demand would seem to end, and what is said meanwhile a server that
// hangs carries to gateways when it wakes up.
func (d *divider) hears(ctx context.Context) error {
	if !d.nc.IsConnected() {
		return nats.ErrConnectionReconnecting
	}
	return natsx.Ask(ctx, d.nc)
}

// gone says whether no process is the centre: nobody would answer a gateway that asks for the time.
func (d *divider) gone(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, centreEvery)
	defer cancel()
	_, err := d.nc.RequestWithContext(ctx, schemas.ClockSubject, nil)
	return errors.Is(err, nats.ErrNoResponders)
}

func (d *divider) read(reports *jetstream.Source[*schemas.Report]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reports = reports
}

// ready says what keeps the centre from dividing. One that stands by is ready to take over.
func (d *divider) ready() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reports == nil {
		return nil
	}
	return d.reports.Ready()
}

// servingCentre keeps every heartbeat for the history, and takes no tokens in doubt whether it is the centre still.
type servingCentre struct {
	*aggregator.Aggregator
	recorder *clickhouse.Recorder
	sure     func() bool
}

var errReplaced = errors.New("another process may be the centre by now")

// Take leaves alone what was asked while the process was frozen: nobody waits for these tokens any more.
func (c servingCentre) Take(ctx context.Context, asked []schemas.TakeRequest) ([]schemas.TakeReply, error) {
	if !c.sure() {
		return nil, errReplaced
	}
	return c.Aggregator.Take(ctx, asked)
}

func (c servingCentre) Heartbeat(h *schemas.Heartbeat, arrived time.Time) {
	c.Aggregator.Heartbeat(h, arrived)
	c.recorder.Gateway(clickhouse.GatewaySample{Time: arrived, Heartbeat: *h})
}

// recordPushes keeps every changed share for the history.
func recordPushes(recorder *clickhouse.Recorder) func([]aggregator.PushedShare) {
	return func(pushed []aggregator.PushedShare) {
		for _, p := range pushed {
			recorder.Throttle(clickhouse.ThrottleSample{Time: p.At, Gateway: p.Gateway,
				ThrottleUpdate: &schemas.ThrottleUpdate{Shares: []schemas.Share{p.Share}}})
		}
	}
}

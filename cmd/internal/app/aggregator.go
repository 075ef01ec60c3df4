package app

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/pulse"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

// Names of the durable consumers.
const (
	throttleConsumer = "throttle"
	historyConsumer  = "history"
	alertsConsumer   = "history-alerts"
)

// Aggregator is throttling over Redis and history over ClickHouse, neither waiting for the other. Of several aggregators one is the
// centre, and one keeps the history.
type Aggregator struct {
	divider *divider
	history *history

	mu     sync.Mutex       // guards leases
	leases map[string]error // why one cannot be read
}

// NewAggregator starts the centre on the stack. NATS must be there; Redis and ClickHouse may come later, but a wrong
// password or a missing schema ends the process with one line that says so.
func NewAggregator(ctx context.Context, s Servers, nc *nats.Conn, m *Metrics, stack *run.Stack, log *slog.Logger) (*Aggregator, error) {
	js, err := natsjs.New(nc)
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	declare := func(ctx context.Context) error { return natsx.Declare(ctx, js, natsx.Storage{}) }
	if err := declare(ctx); err != nil {
		return nil, err
	}
	counter, err := redis.New(redis.Config{URL: s.Redis, Forgot: func() {
		log.Error("Redis has forgotten everything: buckets of strict rules begin empty, those of tenants that it never knew too, and earn from now on. " +
			"Others are rebuilt from reports. Have it keep its data: appendonly yes")
	}})
	if err != nil {
		return nil, err
	}
	store, err := clickhouse.Open(s.ClickHouse, log)
	if err != nil {
		return nil, errors.Join(err, counter.Close())
	}
	store.Metrics = m.store
	stack.Defer("Redis client", counter.Close)
	stack.Defer("ClickHouse client", store.Close)
	redisPulse := &pulse.Pulse{Server: "Redis", Ask: counter.Ping, Raised: m.aggregator.Degraded}
	for _, p := range []*pulse.Pulse{
		redisPulse,
		{Server: "ClickHouse", Ask: store.Ping, Raised: m.store.Degraded},
	} {
		p.Log = log
		stack.Go("pulse of "+p.Server, p.Run)
	}
	recorder := clickhouse.NewRecorder(clickhouse.RecorderConfig{}, store, m.store, log)

	stack.Go("health", func(ctx context.Context) error { return sayHealth(ctx, schemas.PartAggregator, nc, m.without, log) })
	marks, err := jetstream.NewMarks(nc, declare, log)
	if err != nil {
		return nil, err
	}
	kv, err := js.KeyValue(ctx, natsx.HistoryBucket)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", natsx.HistoryBucket, err)
	}
	h := &history{nc: nc, store: store, marks: marks, declare: declare, streams: m.streams, log: log,
		auditor: newAuditor(js, log, func(ctx context.Context, from, to time.Time) (Reconciliation, error) {
			return Reconcile(ctx, Books{NATS: nc, Counter: counter, Store: store}, from, to)
		}),
		account: newAccountant(store, js, m.overshoot, log)}
	d := &divider{nc: nc, counter: counter, silent: redisPulse.Silent, recorder: recorder, declare: declare, m: m, log: log}
	a := &Aggregator{divider: d, history: h, leases: map[string]error{}}
	lease := func(l natsx.Lease) natsx.Lease {
		l.Owner, l.Log, l.Declare = rand.Text(), log, declare
		l.Told = func(err error) {
			step := 1.0
			if err == nil {
				step = -1
			}
			m.streams.Degraded.Add(step)
			a.mu.Lock()
			defer a.mu.Unlock()
			a.leases[l.Key] = err
		}
		return l
	}
	stack.Go("marks of stored reports", marks.Run)
	stack.Go("recorder", func(ctx context.Context) error { recorder.Run(ctx); return nil })
	stack.Go("history", func(ctx context.Context) error {
		if err := await(ctx, "ClickHouse", log, m.store.Degraded, store.Check, clickhouse.ErrUnreachable); err != nil {
			return ignoreCancel(err)
		}
		return lease(natsx.Lease{KV: kv, Key: "leader"}).Hold(ctx, h.keep)
	})
	stack.Go("centre", func(ctx context.Context) error {
		remarks, err := counter.Check(ctx)
		if err != nil {
			log.Warn("Redis does not answer yet: gateways keep their last shares", "err", err)
		}
		for _, r := range remarks {
			log.Warn("Redis", "remark", r)
		}
		return lease(natsx.Lease{KV: kv, Key: "centre", Every: centreEvery, Expiry: centreExpiry, Gone: d.gone}).Hold(ctx, d.keep)
	})
	return a, nil
}

// Ready says whether the centre reads its streams, and what keeps it from doing so.
func (a *Aggregator) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(a.leases["centre"], a.leases["leader"], a.divider.ready(), a.history.ready())
}

// history is what one aggregator at a time does: it keeps the ledger and the history of alerts, reconciles
// the accounts every hour, and measures the accuracy.
// The others stand by.
type history struct {
	nc      *nats.Conn
	store   *clickhouse.Store
	marks   *jetstream.Marks
	auditor *auditor
	account *accountant
	declare func(context.Context) error
	streams *jetstream.Metrics
	log     *slog.Logger

	mu      sync.Mutex // guards readers
	readers []interface{ Ready() error }
}

// keep keeps the history until ctx is done or another process has taken over, which is no error: this one stands by then.
func (h *history) keep(ctx context.Context, _ func() bool) error {
	h.store.Doubt() // who kept it before may have left a batch half done
	reports, err := jetstream.NewLedger(jetstream.Config{Name: historyConsumer, Declare: h.declare, Settled: h.marks.Settled}, h.nc, decodeReport, h.log, h.streams)
	if err != nil {
		return err
	}
	alerts, err := jetstream.NewLedger(jetstream.Config{Name: alertsConsumer, Stream: schemas.AlertsStream, Declare: h.declare}, h.nc, decodeAlert, h.log, h.streams)
	if err != nil {
		return err
	}
	h.read(reports, alerts)
	defer h.read()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return reports.Consume(ctx, h.marks.After(h.store.Reports)) })
	g.Go(func() error { return alerts.Consume(ctx, h.store.Alerts) })
	g.Go(func() error { return h.auditor.run(ctx) })
	g.Go(func() error { return h.account.run(ctx) })
	if err := g.Wait(); !errors.Is(err, jetstream.ErrFenced) {
		return err
	}
	h.log.Warn("history: another aggregator has taken over")
	return nil
}

func (h *history) read(by ...interface{ Ready() error }) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.readers = by
}

// ready says what keeps the history from being kept. One that stands by is ready to take over.
func (h *history) ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, r := range h.readers {
		errs = append(errs, r.Ready())
	}
	return errors.Join(errs...)
}

func decodeReport(subject, contentType string, body []byte, arrived time.Time) (*schemas.Report, error) {
	return schemas.DecodeReport(subject, contentType, body, arrived)
}

func decodeAlert(_, _ string, body []byte, _ time.Time) (*schemas.Alert, error) {
	a, err := schemas.DecodeAlert(body)
	if err != nil {
		return nil, &schemas.Refusal{Reason: schemas.ReasonMalformed, Detail: err.Error()}
	}
	return a, nil
}

// awaitEvery is how often a server that is not there yet is looked for.
const awaitEvery = 2 * time.Second

// await calls check until it succeeds, as long as its error is retryable, and returns any other error. degraded is raised by one
// meanwhile.
func await(ctx context.Context, what string, log *slog.Logger, degraded prometheus.Gauge, check func(context.Context) error, retryable error) error {
	for first := true; ; first = false {
		err := check(ctx)
		switch {
		case err == nil:
			if !first {
				log.Info(what + " is there now")
			}
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, clickhouse.ErrSchemaNewer), errors.Is(err, clickhouse.ErrSchemaIncomplete):
			log.Warn(what+" has not the schema of this weir, going on", "err", err)
			return nil
		case !errors.Is(err, retryable):
			return err
		case first:
			degraded.Inc()
			defer degraded.Dec()
			log.Error(what+" is not there yet, trying on", "every", awaitEvery, "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(awaitEvery):
		}
	}
}

func ignoreCancel(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

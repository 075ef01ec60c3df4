package clickhouse

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/weirhq/weir/schemas"
)

// GatewaySample is a heartbeat as it arrived.
type GatewaySample struct {
	Time time.Time // arrival, by the aggregator's clock
	schemas.Heartbeat
}

// ThrottleSample is a throttle update as it was pushed.
type ThrottleSample struct {
	Time    time.Time // by the aggregator's clock
	Gateway string    // the receiver
	*schemas.ThrottleUpdate
}

type pushed struct {
	*ThrottleSample
	*schemas.Share
}

var gatewaysTable = table[GatewaySample]{"gateways", []column[GatewaySample]{
	col("ts", instant, func(r *GatewaySample) time.Time { return r.Time }),
	col("gateway", low, func(r *GatewaySample) string { return r.Gateway }),
	col("boot", "String", func(r *GatewaySample) string { return r.Boot }),
	col("sent", instant, func(r *GatewaySample) time.Time { return plausible(r.SentAt, time.UnixMilli(0)) }),
	col("policy_version", "UInt64", func(r *GatewaySample) uint64 { return r.PolicyVersion }),
	col("mode", low, func(r *GatewaySample) string { return r.Mode }),
	col("clock_offset_ns", "Nullable(Int64)", func(r *GatewaySample) *int64 {
		if !r.ClockKnown {
			return nil
		}
		ns := r.ClockOffset.Nanoseconds()
		return &ns
	}),
	col("clock_error_ns", "Int64", func(r *GatewaySample) int64 { return r.ClockError.Nanoseconds() }),
	col("pending_reports", "UInt64", func(r *GatewaySample) uint64 { return r.PendingReports }),
	col("version", low, func(r *GatewaySample) string { return r.Version }),
	col("sealed", "UInt64", func(r *GatewaySample) uint64 { return r.Sealed }),
}}

var throttleTable = table[pushed]{"throttle_updates", []column[pushed]{
	col("ts", instant, func(r *pushed) time.Time { return r.Time }),
	col("gateway", low, func(r *pushed) string { return r.Gateway }),
	col("rule", low, func(r *pushed) string { return r.Rule }),
	col("key", "String", func(r *pushed) string { return r.Key }),
	col("version", "UInt64", func(r *pushed) uint64 { return r.Version }),
	col("rate_nanos", "Int64", func(r *pushed) int64 { return r.RateNanos }),
	col("burst", "Int64", func(r *pushed) int64 { return r.Burst }),
	col("limit_rate_nanos", "Int64", func(r *pushed) int64 { return r.LimitRateNanos }),
	col("limit_burst", "Int64", func(r *pushed) int64 { return r.LimitBurst }),
	col("reason", low, func(r *pushed) string { return r.Reason }),
	col("level", "Int64", func(r *pushed) int64 { return r.Level }),
	col("gateways", "UInt32", func(r *pushed) uint32 { return uint32(r.Gateways) }),
	col("ttl_ms", "UInt64", func(r *pushed) uint64 { return uint64(r.TTL.Milliseconds()) }),
	col("snapshot", "Bool", func(r *pushed) bool { return r.Snapshot }),
}}

// Gateways stores heartbeats, best effort: after an error they may be stored or not, and are not to be sent again.
func (s *Store) Gateways(ctx context.Context, samples []GatewaySample) error {
	return s.explain("store heartbeats", insert(ctx, s, gatewaysTable, "", samples))
}

// ThrottleUpdates stores the shares that were pushed, one row each, best effort like Gateways.
func (s *Store) ThrottleUpdates(ctx context.Context, samples []ThrottleSample) error {
	var rows []pushed
	for i := range samples {
		for j := range samples[i].Shares {
			rows = append(rows, pushed{&samples[i], &samples[i].Shares[j]})
		}
	}
	return s.explain("store throttle updates", insert(ctx, s, throttleTable, "", rows))
}

// RecorderConfig bounds a Recorder. A zero field means its default.
type RecorderConfig struct {
	MaxSamples int           // heartbeats, and shares, held before the newest are dropped (20000 of each)
	Every      time.Duration // one insert per table this often (1s)
}

// SampleStore is what a Recorder writes to: a *Store.
type SampleStore interface {
	Gateways(context.Context, []GatewaySample) error
	ThrottleUpdates(context.Context, []ThrottleSample) error
}

// Recorder gathers best-effort rows, so that whoever has one never waits for ClickHouse. What does not fit, and what
// ClickHouse does not take, is dropped and counted.
type Recorder struct {
	cfg   RecorderConfig
	store SampleStore
	drop  func(rows int)
	log   *slog.Logger

	mu         sync.Mutex // guards what follows
	heartbeats []GatewaySample
	updates    []ThrottleSample
	shares     int // in updates
	failing    bool
	dropped    int // since it began to fail
}

// NewRecorder returns a Recorder that writes while Run runs. metrics may be nil.
func NewRecorder(cfg RecorderConfig, store SampleStore, metrics *Metrics, log *slog.Logger) *Recorder {
	if cfg.MaxSamples == 0 {
		cfg.MaxSamples = 20_000
	}
	if cfg.Every == 0 {
		cfg.Every = time.Second
	}
	r := &Recorder{cfg: cfg, store: store, drop: func(int) {}, log: log}
	if metrics != nil && metrics.Dropped != nil {
		r.drop = func(n int) { metrics.Dropped.Add(float64(n)) }
	}
	return r
}

// Gateway records a heartbeat. It never blocks.
func (r *Recorder) Gateway(g GatewaySample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.heartbeats) >= r.cfg.MaxSamples {
		r.lost(1)
		return
	}
	r.heartbeats = append(r.heartbeats, g)
}

// Throttle records a throttle update, which the caller no longer changes. It never blocks. An update without shares is
// only a sign of life and leaves no row.
func (r *Recorder) Throttle(t ThrottleSample) {
	if len(t.Shares) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shares+len(t.Shares) > r.cfg.MaxSamples {
		r.lost(len(t.Shares))
		return
	}
	r.updates = append(r.updates, t)
	r.shares += len(t.Shares)
}

// lost counts rows that will not be stored. mu is held.
func (r *Recorder) lost(rows int) {
	r.dropped += rows
	r.drop(rows)
}

// Run writes until ctx is done, then writes what is left.
func (r *Recorder) Run(ctx context.Context) {
	tick := time.NewTicker(r.cfg.Every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.write(ctx)
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			r.write(last)
			return
		}
	}
}

func (r *Recorder) write(ctx context.Context) {
	r.mu.Lock()
	heartbeats, updates, shares := r.heartbeats, r.updates, r.shares
	r.heartbeats, r.updates, r.shares = nil, nil, 0
	r.mu.Unlock()

	var first error
	var rows int
	if len(heartbeats) > 0 {
		if err := r.store.Gateways(ctx, heartbeats); err != nil {
			first, rows = err, len(heartbeats)
		}
	}
	if len(updates) > 0 {
		if err := r.store.ThrottleUpdates(ctx, updates); err != nil {
			rows += shares
			if first == nil {
				first = err
			}
		}
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost(rows)
	switch {
	case first != nil && !r.failing:
		r.failing = true
		r.log.Warn("heartbeats and throttle updates are not stored", "err", first)
	case first == nil && r.failing && len(heartbeats)+len(updates) > 0:
		r.log.Info("heartbeats and throttle updates are stored again", "dropped", r.dropped)
		r.failing, r.dropped = false, 0
	}
}

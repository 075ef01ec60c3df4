package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/internal/clock"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

// Diagnosis is what the doctor found at one server.
type Diagnosis struct {
	Server   string   `json:"server"` // nats, redis, clickhouse or aggregator
	Address  string   `json:"address,omitempty"`
	Status   string   `json:"status"` // ok, degraded or unreachable
	Version  string   `json:"version,omitempty"`
	Problems []string `json:"problems"`
	Notes    []string `json:"notes,omitempty"` // for a person to look at: they cannot be checked from here
	OffsetMS *float64 `json:"clock_offset_ms"` // the server's clock less ours, round trip taken out; null when it has none to ask
	ErrorMS  *float64 `json:"clock_error_ms"`  // the offset is within this
}

// Statuses of a Diagnosis.
const (
	StatusOK          = "ok"
	StatusDegraded    = "degraded"
	StatusUnreachable = "unreachable"
)

// maxOffset is the clock offset that the doctor complains about: the one that alerts.
const maxOffset = 2 * time.Second

// Examine looks at every server, one after the other, each within the timeout. embedded says that NATS is the server of a running
// `weir up`.
func Examine(ctx context.Context, s Servers, embedded bool, timeout time.Duration, log *slog.Logger) []Diagnosis {
	all := []Diagnosis{
		{Server: "nats", Address: conf.Redact(s.NATS)}, {Server: "redis", Address: conf.Redact(s.Redis)},
		{Server: "clickhouse", Address: conf.Redact(s.ClickHouse)}, {Server: "aggregator"},
	}
	for i, look := range []func(context.Context, *Diagnosis) error{
		func(ctx context.Context, d *Diagnosis) error { return examineNATS(ctx, s.NATS, embedded, d, log) },
		func(ctx context.Context, d *Diagnosis) error { return examineRedis(ctx, s.Redis, d) },
		func(ctx context.Context, d *Diagnosis) error { return examineClickHouse(ctx, s.ClickHouse, d, log) },
		func(ctx context.Context, d *Diagnosis) error { return examineAggregator(ctx, s.NATS, d, log) },
	} {
		d := &all[i]
		d.Problems = []string{}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		err := look(ctx, d)
		cancel()
		switch {
		case err != nil && (Unreachable(err) || errors.Is(err, errSilent)):
			d.Status = StatusUnreachable
			d.Problems = append(d.Problems, err.Error())
		case err != nil:
			d.Status = StatusDegraded
			d.Problems = append(d.Problems, err.Error())
		case len(d.Problems) > 0:
			d.Status = StatusDegraded
		default:
			d.Status = StatusOK
		}
	}
	return all
}

// clock notes the offset of the server's clock.
func (d *Diagnosis) clock(s clock.Sample) {
	offset, within := float64(s.Offset())/1e6, float64(s.Error())/1e6
	d.OffsetMS, d.ErrorMS = &offset, &within
	if s.Offset().Abs()-s.Error() > maxOffset {
		d.Problems = append(d.Problems, fmt.Sprintf("its clock is %s from ours", s.Offset().Round(time.Millisecond)))
	}
}

func examineNATS(ctx context.Context, url string, embedded bool, d *Diagnosis, log *slog.Logger) error {
	var stack run.Stack
	defer func() { _ = stack.Stop(time.Second) }()
	nc, err := Connect(ctx, url, "doctor", true, NewMetrics(), &stack, log)
	if err != nil {
		return err
	}
	d.Version = nc.ConnectedServerVersion()
	js, err := natsjs.New(nc)
	if err != nil {
		return fmt.Errorf("open JetStream: %w", err)
	}
	problems, err := natsx.Problems(ctx, nc, js, embedded)
	for _, p := range problems {
		if p.Note {
			d.Notes = append(d.Notes, p.String())
		} else {
			d.Problems = append(d.Problems, p.String())
		}
	}
	if err != nil {
		return err
	}
	for _, name := range []string{historyConsumer, alertsConsumer} {
		strange, err := jetstream.Misplaced(ctx, js, name)
		if err != nil {
			return err
		}
		if strange != nil {
			d.Problems = append(d.Problems, fmt.Sprintf("the position of %s was written over by somebody who does not keep it (the next aggregator goes on from an earlier one): %v", name, strange))
		}
	}
	return nil
}

func examineRedis(ctx context.Context, url string, d *Diagnosis) (err error) {
	c, err := redis.New(redis.Config{URL: url, Timeout: time.Second, Dial: time.Second})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	remarks, err := c.Check(ctx)
	if err != nil {
		return err
	}
	d.Problems = append(d.Problems, remarks...)
	sent := time.Now()
	version, now, err := c.About(ctx)
	if err != nil {
		return err
	}
	d.Version = version
	d.clock(clock.Sample{T1: sent, T2: now, T3: now, T4: time.Now()})
	return nil
}

func examineClickHouse(ctx context.Context, url string, d *Diagnosis, log *slog.Logger) (err error) {
	s, err := clickhouse.Open(url, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if d.Version, err = s.Version(ctx); err != nil {
		return err
	}
	sent := time.Now()
	now, err := s.Now(ctx)
	if err != nil {
		return err
	}
	d.clock(clock.Sample{T1: sent, T2: now, T3: now, T4: time.Now()})
	d.Problems = append(d.Problems, s.Problems(ctx)...)
	return nil
}

// errSilent says that nobody answers for the centre.
var errSilent = errors.New("no aggregator answers on " + schemas.ClockSubject)

func examineAggregator(ctx context.Context, url string, d *Diagnosis, log *slog.Logger) error {
	var stack run.Stack
	defer func() { _ = stack.Stop(time.Second) }()
	nc, err := Connect(ctx, url, "doctor", true, NewMetrics(), &stack, log)
	if err != nil {
		return fmt.Errorf("%w: %w", errSilent, err)
	}
	sent := time.Now()
	msg, err := nc.RequestWithContext(ctx, schemas.ClockSubject, nil)
	back := time.Now()
	if err != nil {
		return errSilent
	}
	reply, err := schemas.DecodeClockReply(msg.Data)
	if err != nil {
		return err
	}
	d.clock(clock.Sample{T1: sent, T2: reply.Received, T3: reply.Sent, T4: back})
	return nil
}

package app

import (
	"context"
	"crypto/rand"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/weirhq/weir/schemas"
)

const (
	// healthEvery is how often an aggregator or an alerter says how it is.
	healthEvery = 250 * time.Millisecond
	// goodbye bounds how long its last word may take.
	goodbye = time.Second
)

// sayHealth says until ctx is done what a part does without, and then that it was shut down: alerters hear it. While NATS is away
// nothing is said.
func sayHealth(ctx context.Context, part string, nc *nats.Conn, without func() []string, log *slog.Logger) error {
	boot := rand.Text()
	say := func(stopped bool) {
		if !nc.IsConnected() {
			return
		}
		b, err := schemas.EncodeHealth(&schemas.Health{Part: part, Boot: boot, Without: without(), Stopped: stopped})
		if err == nil {
			err = nc.Publish(schemas.HealthPrefix+part, b)
		}
		if err != nil {
			log.Debug("health not told", "part", part, "err", err)
		}
	}
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	for {
		say(false)
		select {
		case <-tick.C:
		case <-ctx.Done():
			say(true)
			if nc.IsConnected() {
				_ = nc.FlushTimeout(goodbye) // else its silence is noticed
			}
			return nil
		}
	}
}

// without is which servers an aggregator does without now. A reader of the streams that does not get on is news only where no
// server explains it.
func (m *Metrics) without() []string {
	if out := m.shared.Raised("redis", "clickhouse"); len(out) > 0 {
		return out
	}
	return m.shared.Raised("consumer")
}

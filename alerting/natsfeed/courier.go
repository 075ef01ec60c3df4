package natsfeed

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/pulse"
	"github.com/weirhq/weir/schemas"
)

// headerSent names the receiver that has taken a message before it was stored.
const headerSent = "Weir-Sent"

const (
	// unstoredFor is how long the stream may not take an alert before it goes past the stream.
	unstoredFor = time.Second
	// courierRetry is the pause after an attempt that failed.
	courierRetry = time.Second
	// maxLetters bounds what waits for the receiver, and what is remembered of what it took.
	maxLetters = 1000
)

// courier takes alerts that the stream does not take straight to the receiver, in order. What it has delivered is stored later
// under the same id, with a word that it was sent.
type courier struct {
	name string
	to   alerting.Receiver // nil takes nothing
	log  *slog.Logger
	sent prometheus.Counter

	mu    sync.Mutex // guards what follows
	queue []letter
	took  []string // ids that the receiver took
	wake  chan struct{}
}

type letter struct {
	id   string
	body []byte
}

// send queues a, unless it was queued or taken before.
func (c *courier) send(a *schemas.Alert) {
	id := alerting.MessageID(a)
	body, err := schemas.EncodeAlert(a)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || c.to == nil || len(c.queue) >= maxLetters || slices.Contains(c.took, id) || slices.ContainsFunc(c.queue, func(l letter) bool { return l.id == id }) {
		return
	}
	c.queue = append(c.queue, letter{id, body})
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// has reports whether the receiver has taken a.
func (c *courier) has(a *schemas.Alert) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Contains(c.took, alerting.MessageID(a))
}

// leave gives a up to the stream, which has it: what still waits here is not sent any more.
func (c *courier) leave(a *schemas.Alert) {
	id := alerting.MessageID(a)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = slices.DeleteFunc(c.queue, func(l letter) bool { return l.id == id })
}

// run delivers until ctx is done.
func (c *courier) run(ctx context.Context) {
	for {
		c.mu.Lock()
		var next letter
		if len(c.queue) > 0 {
			next = c.queue[0]
		}
		c.mu.Unlock()
		if next.id == "" {
			select {
			case <-ctx.Done():
				return
			case <-c.wake:
			}
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, sendTimeout)
		err := c.to.Send(attempt, next.id, next.body)
		cancel()
		e, _ := errors.AsType[*alerting.DeliveryError](err)
		final := err == nil || e != nil && e.Permanent
		c.mu.Lock()
		if final {
			c.queue = slices.DeleteFunc(c.queue, func(l letter) bool { return l.id == next.id })
		}
		if err == nil {
			c.took = append(c.took[max(0, len(c.took)-maxLetters+1):], next.id)
		}
		c.mu.Unlock()
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			c.sent.Inc()
			c.log.Warn("alert sent past the stream, which does not take it", "id", next.id)
		case final:
			c.log.Error("alert refused by the receiver; the stream does not take it either", "id", next.id, "err", err)
		default:
			c.log.Warn("alert not delivered, trying again", "id", next.id, "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(courierRetry):
			}
		}
	}
}

// absence notices that NATS is away, and makes that an alert, which no other alerter can be told of meanwhile.
type absence struct {
	pulse *pulse.Pulse
	after time.Duration
	send  func(*schemas.Alert)

	mu    sync.Mutex
	alert *schemas.Alert // of the outage; nil while there is none, and once the stream has it
	told  bool           // of this outage
}

func newAbsence(nc *nats.Conn, after time.Duration, send func(*schemas.Alert), log *slog.Logger) *absence {
	return &absence{after: after, send: send, pulse: &pulse.Pulse{Server: "NATS of alerting", Log: log, Ask: func(ctx context.Context) error {
		if !nc.IsConnected() {
			return nats.ErrDisconnected
		}
		return natsx.Ask(ctx, nc)
	}}}
}

// run looks until ctx is done.
func (b *absence) run(ctx context.Context) {
	var pulsing sync.WaitGroup
	defer pulsing.Wait()
	pulsing.Go(func() { _ = b.pulse.Run(ctx) })
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			b.look()
		}
	}
}

func (b *absence) look() {
	away := b.pulse.Away()
	b.mu.Lock()
	defer b.mu.Unlock()
	if away < b.after {
		b.told = b.told && away > 0
		return
	}
	if b.told {
		return
	}
	b.told = true
	if b.alert == nil {
		b.alert = alerting.Away(time.Now().Add(-away), b.after)
	}
	b.send(b.alert)
}

// away says whether NATS does not answer, or has not for long.
func (b *absence) away() bool { return b.pulse.Away() > 0 }

// over returns the alert about the outage that is over, once.
func (b *absence) over() *schemas.Alert {
	if b.away() {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.alert
	b.alert = nil
	return a
}

// Package pulse asks a server now and then whether it answers, so that one that hangs shows as soon as one that is gone.
package pulse

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Pulse is how a server is asked. A zero field means its default.
type Pulse struct {
	Server string                          // its name, for the log; required
	Ask    func(ctx context.Context) error // asks it something that costs little, or says ErrTold; required
	Raised prometheus.Gauge                // raised by one while it is not well; may be nil
	Log    *slog.Logger                    // required

	Every   time.Duration // between questions (250ms)
	Late    time.Duration // a question that has run for so long is not answered; it goes on (500ms)
	GiveUp  time.Duration // a question that has run for so long is asked anew (5s)
	Healthy time.Duration // it has to answer for so long before it counts as well again (1s)

	mu       sync.Mutex // guards what follows
	since    time.Time  // it was not well; zero while it is
	answered time.Time  // when it answered last, in time or late
}

// ErrTold says that the server is away, which somebody else tells of: it is not asked, and no more is said of it here.
var ErrTold = errors.New("told elsewhere")

// Away is how long the server has not been well, 0 while it is. It may be called from any goroutine.
func (p *Pulse) Away() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		return 0
	}
	return max(time.Since(p.since), 1)
}

// Silent is how long ago the server answered last, if it is not well, and 0 while it is. It may be called from any goroutine.
func (p *Pulse) Silent() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		return 0
	}
	return time.Since(p.answered)
}

// Run asks until ctx is done.
func (p *Pulse) Run(ctx context.Context) error {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&p.Every, 250 * time.Millisecond}, {&p.Late, 500 * time.Millisecond}, {&p.GiveUp, 5 * time.Second}, {&p.Healthy, time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	defer p.stop()
	var healthy time.Time // since when it answers; zero while it does not
	for ctx.Err() == nil {
		asked := time.Now()
		err := p.ask(ctx, asked)
		switch now := time.Now(); {
		case ctx.Err() != nil:
		case errors.Is(err, ErrTold):
			healthy = time.Time{}
			p.stop()
		case err != nil || now.Sub(asked) >= p.Late:
			healthy = time.Time{}
			p.set(asked, err)
		case healthy.IsZero():
			healthy = now
		case now.Sub(healthy) >= p.Healthy:
			p.set(time.Time{}, nil)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Until(asked.Add(p.Every))):
		}
	}
	return nil
}

// ask asks once. While the answer is late, the server is not well.
func (p *Pulse) ask(ctx context.Context, asked time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, p.GiveUp)
	defer cancel()
	late := time.AfterFunc(p.Late, func() {
		if ctx.Err() == nil {
			p.set(asked, context.DeadlineExceeded)
		}
	})
	defer late.Stop()
	err := p.Ask(ctx)
	if err == nil {
		p.mu.Lock()
		p.answered = time.Now()
		p.mu.Unlock()
	}
	return err
}

// set notes since when the server is not well, zero for one that is. It tells of each change once.
func (p *Pulse) set(since time.Time, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.since.IsZero() == since.IsZero():
	case since.IsZero():
		p.Log.Info("the server is well again", "server", p.Server, "after", time.Since(p.since).Round(time.Millisecond))
		p.clear()
	default:
		p.Log.Warn("the server is not well", "server", p.Server, "err", err)
		p.since = since
		if p.Raised != nil {
			p.Raised.Inc()
		}
	}
}

// clear ends that the server is not well. mu is held.
func (p *Pulse) clear() {
	p.since = time.Time{}
	if p.Raised != nil {
		p.Raised.Dec()
	}
}

// stop says no more of the server, well or not.
func (p *Pulse) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.since.IsZero() {
		p.clear()
	}
}

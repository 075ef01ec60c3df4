package natsfeed

import (
	"context"
	"time"

	"github.com/weirhq/weir/internal/clock"
	"github.com/weirhq/weir/schemas"
)

// quick is how many measurements follow one another closely at the start, so that the best of them is good soon.
const (
	quick      = 4
	quickEvery = 250 * time.Millisecond
)

// measure asks the centre for the time, again and again, until ctx is done.
func (f *Feed) measure(ctx context.Context) {
	tick := time.NewTimer(0)
	defer tick.Stop()
	for taken := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		every := f.cfg.ClockEvery
		if f.sample(ctx) {
			taken++
		}
		if taken < quick {
			every = min(every, quickEvery)
		}
		tick.Reset(every)
	}
}

// sample is one measurement. It is false when there was no answer, which is nothing to report: the mode says so.
func (f *Feed) sample(ctx context.Context) bool {
	if !f.nc.IsConnected() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, f.cfg.Timeout)
	defer cancel()
	sent := f.cfg.Now()
	msg, err := f.nc.RequestWithContext(ctx, schemas.ClockSubject, nil)
	back := f.cfg.Now()
	if err != nil {
		return false
	}
	reply, err := schemas.DecodeClockReply(msg.Data)
	if err != nil {
		f.log.Debug("clock reply ignored", "err", err)
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clock.Add(clock.Sample{T1: sent, T2: reply.Received, T3: reply.Sent, T4: back})
}

// Clock is the centre's clock less this gateway's, within err of the truth. known is false until it has been measured.
func (f *Feed) Clock() (offset, err time.Duration, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e, ok := f.clock.Estimate()
	return e.Offset, e.Error, ok
}

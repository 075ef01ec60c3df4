package app

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/schemas"
)

const (
	placeEvery = time.Second      // Redis is told how far reports are folded, and asked whether it went back
	rereadMost = 30 * time.Minute // reports that are older are not folded again: after an hour without use Redis drops a count, and would count it twice
)

// bookmark keeps in Redis how far reports are folded. A Redis that was restored from a copy, or whose failover forgot the last second,
// shows by it that it went back: what it may lack is read from the stream again and folded once more, which changes nothing of the rest.
// Without it the counts of a gateway that has ended meanwhile, and of keys that nobody uses any more, would stay as they were.
type bookmark struct {
	counter *redis.Counter
	reports *jetstream.Source[*schemas.Report]
	agg     *aggregator.Aggregator
	log     *slog.Logger
	wake    chan struct{}

	mu    sync.Mutex // guards what follows, and lets one at a time make a note
	last  uint64     // report that was folded
	doubt bool       // Redis may lack reports beyond the place that is noted
	back  bool       // it does, for it went back
}

// newBookmark returns a bookmark in doubt: nobody looked before this process did.
func newBookmark(counter *redis.Counter, reports *jetstream.Source[*schemas.Report], agg *aggregator.Aggregator, log *slog.Logger) *bookmark {
	return &bookmark{counter: counter, reports: reports, agg: agg, log: log, wake: make(chan struct{}, 1), doubt: true}
}

// noting returns what folds with fold, and has the note grow afterwards: what is lost with it shows.
func (b *bookmark) noting(fold func(context.Context, schemas.Batch[*schemas.Report]) error) func(context.Context, schemas.Batch[*schemas.Report]) error {
	return func(ctx context.Context, batch schemas.Batch[*schemas.Report]) error {
		if err := fold(ctx, batch); err != nil {
			return err
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.last = max(b.last, batch.Last)
		if _, err := b.note(ctx, redis.Place{}); err == nil && b.back {
			select {
			case b.wake <- struct{}{}:
			default:
			}
		}
		return nil // what could not be noted is in doubt
	}
}

// note makes a note. mu is held.
func (b *bookmark) note(ctx context.Context, at redis.Place) (before redis.Place, err error) {
	before, back, err := b.counter.Note(ctx, at)
	b.back = b.back || back
	b.doubt = b.doubt || back || err != nil
	return before, err
}

// run looks whether Redis went back until ctx is done.
func (b *bookmark) run(ctx context.Context) error {
	tick := time.NewTicker(placeEvery)
	defer tick.Stop()
	for {
		b.look(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-b.wake:
		}
	}
}

// look moves the bookmark on, or folds again what lies behind it. While NATS or Redis is away, which others tell, it does neither.
func (b *bookmark) look(ctx context.Context) {
	var at redis.Place
	var err error
	if at.Stream, at.Seq, err = b.reports.Floor(ctx); err != nil {
		return
	}
	b.mu.Lock()
	to := at
	if b.doubt {
		to = redis.Place{}
	}
	from, err := b.note(ctx, to)
	doubt, back, last := b.doubt, b.back, max(at.Seq, b.last)
	if err == nil {
		b.doubt, b.back = false, false // from here on anew
	}
	b.mu.Unlock()
	if err != nil || !doubt || from.Stream != at.Stream { // of another stream, or of none: what gateways hold tells the levels
		return
	}
	n, err := b.reports.Reread(ctx, from.Seq+1, last, time.Now().Add(-rereadMost), b.noting(b.agg.Again))
	switch {
	case ctx.Err() != nil:
	case err != nil:
		b.mu.Lock()
		b.doubt, b.back = true, b.back || back
		b.mu.Unlock()
		b.log.Warn("reports that Redis may lack were not all folded again, trying again", "reports", n, "err", err)
	case back:
		b.log.Warn("Redis went back: the reports that it may lack were folded again", "reports", n, "from", from.Seq+1, "to", last, "no_older_than", rereadMost)
	case n > 0:
		b.log.Info("the last reports were folded again, in case Redis has lost them", "reports", n)
	}
}

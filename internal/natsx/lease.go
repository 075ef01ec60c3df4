package natsx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/schemas"
)

// Lease lets one of several processes at a time do what must not be done twice. It is a key whose holder writes it again
// and again; who sees no write for Expiry, by its own monotonic clock, may take it. A holder that cannot write stops
// before that time is over. Two holders at once are possible all the same (a process that was frozen): what they do has to
// be fenced by itself, and the lease only keeps them from fighting.
type Lease struct {
	KV     jetstream.KeyValue
	Key    string
	Owner  string        // of this process, unlike every other; a name as schemas.ValidName has it
	Every  time.Duration // between writes (1s)
	Expiry time.Duration // without a write, until another may take it (5 × Every)
	Log    *slog.Logger

	// Gone says whether it is known that nobody holds the lease, whoever wrote it last. Then it is taken at the second look and not
	// when it expires. Nil never knows.
	Gone func(context.Context) bool
	// Declare makes the bucket anew where it is lost. It is called while the key cannot be read; nil makes none.
	Declare func(context.Context) error
	// Told is told the reason when the key cannot be read, and nil when it can again; it may be nil.
	Told func(error)
}

// giveBack bounds how long giving a lease back may take.
const giveBack = time.Second

// released is the value of a lease that its holder has given back.
const released = "-"

// Hold waits for the lease, calls f while it holds it, and again after each loss or return, until ctx is done or f returns an
// error. f's context ends when the lease is lost; sure is false sooner: as soon as a write is late, so that a process that was frozen
// learns from it at once that another may hold the lease by now. Hold returns nil once ctx is done.
func (l Lease) Hold(ctx context.Context, f func(ctx context.Context, sure func() bool) error) error {
	l.Every = or(l.Every, time.Second)
	l.Expiry = or(l.Expiry, 5*l.Every)
	for {
		revision, err := l.acquire(ctx)
		if err != nil {
			return nil // ctx is done
		}
		l.Log.Info("lease taken", "lease", l.Key)
		if err := l.while(ctx, revision, f); err != nil || ctx.Err() != nil {
			return err
		}
		l.Log.Warn("lease lost or given up, standing by", "lease", l.Key)
		if !sleep(ctx, l.Every) {
			return nil
		}
	}
}

// acquire waits until the lease is ours. Its error is that of ctx.
func (l Lease) acquire(ctx context.Context) (revision uint64, err error) {
	var seen uint64 // revision at the last look
	var since time.Time
	var blind bool
	tell := func(err error) {
		if blind == (err != nil) {
			return
		}
		if blind = err != nil; blind {
			l.Log.Warn("nobody knows who holds the lease, trying again until it can be read", "lease", l.Key, "err", err)
		} else {
			l.Log.Info("the lease can be read again", "lease", l.Key)
		}
		if l.Told != nil {
			l.Told(err)
		}
	}
	defer tell(nil)
	for told, gone := false, false; ; {
		was := gone
		entry, err := l.KV.Get(ctx, l.Key)
		gone = err == nil && entry.Revision() == seen && l.Gone != nil && l.Gone(ctx)
		missing := errors.Is(err, jetstream.ErrKeyNotFound)
		if err == nil || missing {
			tell(nil)
		}
		switch {
		case err != nil && !missing && ctx.Err() == nil:
			tell(err)
			if l.Declare != nil {
				if err := l.Declare(ctx); err != nil {
					l.Log.Debug("what the lease needs cannot be made", "lease", l.Key, "err", err)
				}
			}
		case missing:
			if revision, err = l.KV.Create(ctx, l.Key, []byte(l.Owner)); err == nil {
				return revision, nil
			}
		case err == nil:
			if entry.Revision() != seen {
				seen = entry.Revision()
				if since.IsZero() || !strange(entry) {
					since = time.Now()
				}
			}
			if v := string(entry.Value()); v == released || v == l.Owner || time.Since(since) > l.Expiry || gone && was {
				if revision, err = l.KV.Update(ctx, l.Key, []byte(l.Owner), seen); err == nil {
					return revision, nil
				}
			} else if !told {
				told = true
				l.Log.Info("another process holds the lease, standing by", "lease", l.Key, "holder", string(entry.Value()))
			}
		}
		if !sleep(ctx, l.Every) {
			return 0, ctx.Err()
		}
	}
}

// while calls f and keeps the lease meanwhile.
func (l Lease) while(ctx context.Context, revision uint64, f func(context.Context, func() bool) error) error {
	held, cancel := context.WithCancel(ctx)
	defer cancel()
	var written atomic.Pointer[time.Time]
	now := time.Now()
	written.Store(&now)
	kept := make(chan uint64, 1)
	go func() {
		defer cancel()
		kept <- l.keep(held, revision, &written)
	}()
	err := f(held, func() bool { return time.Since(*written.Load()) <= 3*l.Every })
	cancel()
	// What is given back need not expire. It is the last thing that happens, so ctx may be done by now.
	give, done := context.WithTimeout(context.WithoutCancel(ctx), giveBack)
	defer done()
	if last := <-kept; last != 0 {
		if _, giveErr := l.KV.Update(give, l.Key, []byte(released), last); giveErr != nil {
			l.Log.Debug("lease not given back, it will expire", "lease", l.Key, "err", giveErr)
		}
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// keep writes the lease until ctx is done, and returns its revision then, or 0 when it is not ours any more. written is when it last did.
func (l Lease) keep(ctx context.Context, revision uint64, written *atomic.Pointer[time.Time]) uint64 {
	for {
		if !sleep(ctx, l.Every) {
			return revision
		}
		at := time.Now()
		try, cancel := context.WithTimeout(ctx, l.Every)
		next, err := l.KV.Update(try, l.Key, []byte(l.Owner), revision)
		cancel()
		switch {
		case err == nil:
			revision = next
			written.Store(&at)
		case errors.Is(err, jetstream.ErrKeyExists): // another revision: the answer to an earlier write was lost, or another process
			entry, err := l.KV.Get(ctx, l.Key)
			if err != nil || string(entry.Value()) != l.Owner && !strange(entry) {
				return 0
			}
			revision = entry.Revision() // and over what is strange we write again
		}
		if time.Since(*written.Load()) > l.Expiry-2*l.Every {
			l.Log.Warn("lease cannot be kept", "lease", l.Key, "err", fmt.Sprint(err))
			return 0
		}
	}
}

// strange says whether no process that holds leases can have written entry: a server writes its answers on any subject that it is
// told to, keys included.
func strange(entry jetstream.KeyValueEntry) bool {
	v := string(entry.Value())
	return v != released && schemas.ValidName(v) != nil
}

// sleep is false when ctx is done first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

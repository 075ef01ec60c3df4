package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/schemas"
)

// Config says how a stream is read. A zero field means its default, for a Source and for a Ledger where they differ.
type Config struct {
	Stream        string        // (WEIR_USAGE)
	Name          string        // of the durable consumer; required
	MaxMessages   int           // of a batch (500 · 2000)
	MaxBytes      int           // of a batch, of which a Ledger holds two, and more than the server's max_payload (16 MiB · 64 MiB)
	MaxDelay      time.Duration // a batch waits no longer for more messages (20ms · 1s)
	AckWait       time.Duration // after this the messages of a reader that has died go to another (10s · 1m)
	MaxAckPending int           // in the hands of all readers, never below MaxMessages (4 × MaxMessages)
	RetryMin      time.Duration // wait after a failure, doubling (50ms)
	RetryMax      time.Duration // up to this (5s)
	LogEvery      time.Duration // a failure is told once, then summarised this often (1m)

	// Declare makes the stream and buckets when they are gone. Nil waits until somebody else has.
	Declare func(context.Context) error

	// Settled is told by a Ledger of each range that is written down as handled: all of it is in the store, or in the
	// dead-letter stream as buried. It must not wait for anybody. Nil tells nobody.
	Settled func(stream string, last uint64, buried []Buried)
}

func (c Config) withDefaults(messages, bytes int, delay, ackWait time.Duration) (Config, error) {
	if c.Stream == "" {
		c.Stream = schemas.UsageStream
	}
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	num(&c.MaxMessages, messages)
	num(&c.MaxBytes, bytes)
	num(&c.MaxAckPending, 4*c.MaxMessages)
	def(&c.MaxDelay, delay)
	def(&c.AckWait, ackWait)
	def(&c.RetryMin, 50*time.Millisecond)
	def(&c.RetryMax, 5*time.Second)
	def(&c.LogEvery, time.Minute)
	var all []error
	if err := schemas.ValidName(c.Name); err != nil {
		all = append(all, err)
	}
	if c.MaxMessages < 1 {
		all = append(all, fmt.Errorf("MaxMessages is %d, want 1 or more", c.MaxMessages))
	}
	if c.MaxMessages > c.MaxAckPending {
		all = append(all, fmt.Errorf("MaxMessages %d is above MaxAckPending %d: a batch could never fill", c.MaxMessages, c.MaxAckPending))
	}
	if c.MaxBytes < 2*schemas.MaxReportBytes {
		all = append(all, fmt.Errorf("MaxBytes is %d, want at least %d: a single message must fit", c.MaxBytes, 2*schemas.MaxReportBytes))
	}
	return c, errors.Join(all...)
}

// Decoder reads one message. It depends on nothing but its arguments: a batch that comes again decodes the same.
// arrived is by the stream's clock. An error that is a *schemas.Refusal says why it cannot be read; any other counts as
// malformed.
type Decoder[T any] func(subject, contentType string, body []byte, arrived time.Time) (T, error)

// message is a message of the stream. ack is nil when it was read without the consumer.
type message struct {
	subject, contentType string
	seq                  uint64
	arrived              time.Time
	body                 []byte
	boot                 string // of a report that a Publisher wrote, with its number; else empty and 0
	report               uint64
	waiting              uint64 // messages behind it
	ack                  jetstream.Msg
}

// reader is what a Source and a Ledger have in common. All but Ready and the lag are one goroutine's.
type reader[T any] struct {
	cfg    Config
	nc     *nats.Conn
	js     jetstream.JetStream
	decode Decoder[T]
	log    *slog.Logger
	m      *Metrics
	t      trouble

	consumer jetstream.Consumer // nil until bound
	busy     bool               // the last fetch had messages

	oldest atomic.Int64 // arrival of the oldest message that we know to be unhandled, ns since 1970; 0 is none
}

func newReader[T any](cfg Config, nc *nats.Conn, decode Decoder[T], log *slog.Logger, m *Metrics) (*reader[T], error) {
	// A question that a restarting server has not heard is asked again after this.
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(2*time.Second))
	if err != nil {
		return nil, err
	}
	m = m.orPrivate()
	log = log.With("consumer", cfg.Name)
	r := &reader[T]{cfg: cfg, nc: nc, js: js, decode: decode, log: log, m: m}
	r.t = trouble{cfg: cfg, log: log, m: m, err: errors.New("has not started")}
	m.Lag.WithLabelValues(cfg.Name)
	return r, nil
}

// Ready returns nil while messages are read and handled, or there are none, and otherwise what is in the way.
func (r *reader[T]) Ready() error {
	r.t.mu.Lock()
	defer r.t.mu.Unlock()
	if r.t.err != nil {
		return fmt.Errorf("consumer %s: %w", r.cfg.Name, r.t.err)
	}
	return nil
}

// stream returns the stream, which is made if it is gone and we may.
func (r *reader[T]) stream(ctx context.Context) (jetstream.Stream, error) {
	s, err := r.js.Stream(ctx, r.cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) && r.cfg.Declare != nil {
		r.log.Error("stream is gone, making it anew: what was in it and not handled is lost", "stream", r.cfg.Stream)
		if err := r.cfg.Declare(ctx); err != nil {
			return nil, err
		}
		s, err = r.js.Stream(ctx, r.cfg.Stream)
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", r.cfg.Stream, err)
	}
	return s, nil
}

// bind makes or finds the durable consumer.
func (r *reader[T]) bind(ctx context.Context, ack jetstream.AckPolicy) (*jetstream.ConsumerInfo, error) {
	c, err := r.js.CreateOrUpdateConsumer(ctx, r.cfg.Stream, jetstream.ConsumerConfig{
		Durable:       r.cfg.Name,
		DeliverPolicy: jetstream.DeliverAllPolicy, // a reset may then go anywhere
		AckPolicy:     ack,
		AckWait:       r.cfg.AckWait,
		MaxDeliver:    -1,
		ReplayPolicy:  jetstream.ReplayInstantPolicy,
		MaxAckPending: r.cfg.MaxAckPending,
		MaxWaiting:    64,
	})
	if err != nil {
		return nil, fmt.Errorf("consumer %s: %w", r.cfg.Name, err)
	}
	r.consumer, r.busy = c, true
	return c.CachedInfo(), nil
}

// reset moves the consumer so that from is next. Messages that somebody holds unacknowledged come again.
func (r *reader[T]) reset(ctx context.Context, from uint64) error {
	if _, err := r.js.ResetConsumerToSequence(ctx, r.cfg.Stream, r.cfg.Name, from); err != nil {
		r.consumer = nil
		return fmt.Errorf("move consumer %s to message %d: %w", r.cfg.Name, from, err)
	}
	r.m.Rebuilt.WithLabelValues(r.cfg.Name).Inc()
	return nil
}

const (
	idleWait      = 5 * time.Second
	idleHeartbeat = time.Second // a server that is silent for twice this is not there
)

// gather waits for messages and returns a batch of them: what comes within MaxDelay, up to MaxMessages and MaxBytes.
// It may return none. There is no request left open behind it, or what comes for it is given back, so that the server hands out nothing
// that is not taken: memory holds what was gathered, and no AckWait runs down on messages in a buffer.
func (r *reader[T]) gather(ctx context.Context) ([]message, error) {
	var all []message
	var err error
	if !r.busy {
		if all, err = r.fetch(ctx, all, 1, idleWait, jetstream.FetchHeartbeat(idleHeartbeat)); err != nil || len(all) == 0 {
			return nil, err
		}
	}
	if left := r.cfg.MaxMessages - len(all); left > 0 {
		size := 0
		for i := range all {
			size += len(all[i].body)
		}
		all, err = r.fetch(ctx, all, left, r.cfg.MaxDelay, jetstream.FetchMaxBytes(r.cfg.MaxBytes-size))
	}
	r.busy = len(all) > 0
	if r.busy {
		return all, nil // an error will be there again
	}
	return nil, err
}

func (r *reader[T]) fetch(ctx context.Context, all []message, n int, wait time.Duration, opts ...jetstream.FetchOpt) ([]message, error) {
	// The server ends the request, which waits for its word a second longer: what is on its way when the time is over is taken.
	batch, err := r.consumer.Fetch(n, append(opts, jetstream.FetchMaxWait(wait))...)
	if err != nil {
		return all, fmt.Errorf("fetch: %w", err)
	}
	in := batch.Messages()
	for {
		select {
		case msg, ok := <-in:
			if !ok {
				if err := batch.Error(); err != nil {
					return all, fmt.Errorf("fetch: %w", err)
				}
				return all, nil
			}
			meta, err := msg.Metadata()
			if err != nil {
				return all, fmt.Errorf("fetch: %w", err)
			}
			m := message{subject: msg.Subject(), contentType: msg.Headers().Get(headerContentType),
				seq: meta.Sequence.Stream, arrived: meta.Timestamp, waiting: meta.NumPending, body: msg.Data(), ack: msg}
			m.boot, m.report = reportIn(msg.Headers())
			all = append(all, m)
		case <-ctx.Done():
			giveBack(all)
			go func() { // what still comes for the request
				for msg := range in {
					_ = msg.Nak()
				}
			}()
			return nil, ctx.Err()
		}
	}
}

// giveBack lets another reader have messages at once that this one will not handle.
func giveBack(all []message) {
	for i := range all {
		if all[i].ack != nil {
			_ = all[i].ack.Nak() // else after AckWait
		}
	}
}

// refused is a message that cannot be read.
type refused struct {
	message
	*schemas.Refusal
	cut    bool // only the beginning of its body is in the dead-letter stream
	unkept bool // it is not there at all: there was no room
}

// decodeAll reads messages in order.
func (r *reader[T]) decodeAll(all []message) (items []schemas.Delivered[T], bad []refused) {
	items = make([]schemas.Delivered[T], 0, len(all))
	for i := range all {
		m := &all[i]
		v, err := r.decode(m.subject, m.contentType, m.body, m.arrived)
		if err != nil {
			var why *schemas.Refusal
			if !errors.As(err, &why) {
				why = &schemas.Refusal{Reason: schemas.ReasonMalformed, Detail: err.Error()}
			}
			bad = append(bad, refused{message: *m, Refusal: why})
			continue
		}
		items = append(items, schemas.Delivered[T]{Seq: m.seq, Arrived: m.arrived, Value: v})
	}
	return items, bad
}

// until calls f again and again until it returns nil, and returns true, or until ctx is done, and returns false. That we
// have a position is no sign yet that messages can be read: trouble with it is over with the next fetch.
func (r *reader[T]) until(ctx context.Context, reason string, f func() error) bool {
	for n := 0; ; n++ {
		if ctx.Err() != nil {
			return false
		}
		err := f()
		if err == nil {
			if reason != "position" {
				r.t.over()
			}
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		r.oldest.CompareAndSwap(0, time.Now().UnixNano()) // something may wait behind it
		r.t.is(reason, err)
		r.pause(ctx, n)
	}
}

// lost notes that messages cannot be read. The consumer is bound anew after a pause.
func (r *reader[T]) lost(ctx context.Context, reason string, err error) {
	r.oldest.CompareAndSwap(0, time.Now().UnixNano()) // we cannot see what waits
	r.pause(ctx, r.t.is(reason, err))
	r.consumer = nil
}

func (r *reader[T]) pause(ctx context.Context, n int) {
	wait := min(r.cfg.RetryMax, r.cfg.RetryMin<<min(n, 20))
	select {
	case <-time.After(wait/2 + rand.N(wait/2+1)):
	case <-ctx.Done():
	}
}

// watchLag keeps the lag current, also while a batch is stuck. It returns a function that ends it.
func (r *reader[T]) watchLag(every func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for n := 0; ; n++ {
			lag := 0.0
			if at := r.oldest.Load(); at != 0 {
				lag = max(0, time.Since(time.Unix(0, at)).Seconds())
			}
			r.m.Lag.WithLabelValues(r.cfg.Name).Set(lag)
			if every != nil && n%5 == 4 {
				every(ctx)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	return func() { cancel(); done.Wait() }
}

// holds notes that these messages are in hand.
func (r *reader[T]) holds(all []message) { r.oldest.Store(all[0].arrived.UnixNano()) }

// handled notes that these messages are done: if more wait, they came after the last of them.
func (r *reader[T]) handled(all []message) {
	last := &all[len(all)-1]
	at := int64(0)
	if last.waiting > 0 {
		at = last.arrived.UnixNano()
	}
	r.oldest.Store(at)
	r.m.Messages.WithLabelValues(r.cfg.Name).Add(float64(len(all)))
}

// trouble tells of what is in the way of a reader: loud once, then summarised.
type trouble struct {
	cfg Config
	log *slog.Logger
	m   *Metrics

	mu          sync.Mutex // the fields below
	err         error      // nil when all is well
	n           int
	since, told time.Time
}

// is tells of err, and returns how many came before it in a row.
func (t *trouble) is(reason string, err error) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.m.Failures.WithLabelValues(t.cfg.Name, reason).Inc()
	t.err = err
	switch t.n++; {
	case t.n == 1:
		t.since, t.told = time.Now(), time.Now()
		t.m.Degraded.Inc()
		t.log.Warn("consumer does not get on, trying again until it does", "reason", reason, "err", err)
	case time.Since(t.told) >= t.cfg.LogEvery:
		t.told = time.Now()
		t.log.Warn("consumer still does not get on", "reason", reason, "for", time.Since(t.since).Round(time.Second), "attempts", t.n, "err", err)
	}
	return t.n - 1
}

func (t *trouble) over() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err = nil
	if t.n == 0 {
		return
	}
	t.m.Degraded.Dec()
	t.log.Info("consumer gets on again", "after", time.Since(t.since).Round(time.Millisecond), "attempts", t.n)
	t.n = 0
}

// stopped is the end of a reader's work.
func (t *trouble) stopped(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n > 0 {
		t.m.Degraded.Dec()
		t.n = 0
	}
	if t.err = err; err == nil {
		t.err = errors.New("has stopped")
	}
}

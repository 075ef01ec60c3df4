package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// ErrFenced is in the chain of the error when another process has taken over a Ledger.
var ErrFenced = errors.New("another process has taken over")

// Headers of a dead letter. Its body is the message as it came.
const (
	HeaderReason    = "Weir-Reason"
	HeaderDetail    = "Weir-Detail"
	HeaderSubject   = "Weir-Subject"
	HeaderStream    = "Weir-Stream"
	HeaderSequence  = "Weir-Sequence"
	HeaderArrived   = "Weir-Arrived"   // RFC 3339
	HeaderTruncated = "Weir-Truncated" // the body's whole length, when it would not fit with these headers
)

// Ledger delivers every message of a stream in ranges that never change: before handle is called with a range, the
// range is written down, and after an error, a crash or a restart exactly that range comes again until handle has
// returned nil. Who gives each range's name to its store as a deduplication token stores each message exactly once.
//
// One process at a time reads with a name. Positions live in the bucket weir-history under that name, and every write
// names the revision that it follows: of two processes the one that started later goes on, and the other stops with
// ErrFenced before it acknowledges anything more.
//
// What cannot be read goes to the dead-letter stream before its range is handled, and what handle names in an error that
// is a schemas.Refused after it: the rest of that range counts as handled. While that is impossible, the ledger waits; only where that
// stream is full it goes on without. A message is written there once, also when its range comes again within the stream's duplicate window.
type Ledger[T any] struct {
	*reader[T]
	kv       jetstream.KeyValue
	owner    string
	pos      position
	revision uint64 // of pos in the bucket; 0 before the first write
	created  time.Time
	filter   string // the stream's subjects
	toldFull time.Time
}

// position is how far a ledger has come: all up to Floor is handled, and if Next is greater, (Floor, Next] is in hand.
type position struct {
	Stream string `json:"stream"` // which life of the stream
	Epoch  int    `json:"epoch,omitempty"`
	Floor  uint64 `json:"floor"`
	Next   uint64 `json:"next"`
	Owner  string `json:"owner"`
}

// kept is what the bucket has under a ledger's name.
type kept struct {
	position        // the newest one there is
	revision uint64 // of what is there now; 0 when nothing is
	strange  error  // not nil when that is no position, but what somebody else wrote; position is then an older one, or zero
}

// lastPosition reads the position of the ledger of that name. What cannot be one is passed over: a server answers on whatever
// subject it is told to, so that anybody who may ask it something can have its answer written there.
func lastPosition(ctx context.Context, kv jetstream.KeyValue, name string) (kept, error) {
	entry, err := kv.Get(ctx, name)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return kept{}, nil
	}
	if err != nil {
		return kept{}, fmt.Errorf("read position of %s: %w", name, err)
	}
	have := kept{revision: entry.Revision()}
	have.position, have.strange = decodePosition(entry.Value())
	if have.strange == nil {
		return have, nil
	}
	have.strange = fmt.Errorf("bucket %s, key %s, revision %d: %w", natsx.HistoryBucket, name, have.revision, have.strange)
	older, err := kv.History(ctx, name)
	if err != nil {
		return kept{}, fmt.Errorf("read earlier positions of %s: %w", name, err)
	}
	for _, e := range slices.Backward(older) {
		if p, err := decodePosition(e.Value()); err == nil {
			have.position = p
			break
		}
	}
	return have, nil
}

func decodePosition(b []byte) (position, error) {
	var p position
	if err := json.Unmarshal(b, &p); err != nil {
		return position{}, fmt.Errorf("%.80q is no position: %w", b, err)
	}
	if p.Stream == "" || p.Owner == "" {
		return position{}, fmt.Errorf("%.80q is no position: it names no stream or no owner", b)
	}
	return p, nil
}

// Misplaced says what is wrong with the position of the ledger of that name: nil when nothing is, or when there is none yet.
func Misplaced(ctx context.Context, js jetstream.JetStream, name string) (strange, err error) {
	kv, err := js.KeyValue(ctx, natsx.HistoryBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at bucket %s: %w", natsx.HistoryBucket, err)
	}
	have, err := lastPosition(ctx, kv, name)
	return have.strange, err
}

// NewLedger returns a ledger. It touches no network. m may be nil.
func NewLedger[T any](cfg Config, nc *nats.Conn, decode Decoder[T], log *slog.Logger, m *Metrics) (*Ledger[T], error) {
	cfg, err := cfg.withDefaults(2000, 64<<20, time.Second, time.Minute)
	if err != nil {
		return nil, fmt.Errorf("ledger %q: %w", cfg.Name, err)
	}
	r, err := newReader(cfg, nc, decode, log, m)
	if err != nil {
		return nil, fmt.Errorf("ledger %q: %w", cfg.Name, err)
	}
	return &Ledger[T]{reader: r, owner: rand.Text()}, nil
}

// Consume calls handle with one range after another until ctx is done, and then returns nil, or until another process
// has taken over, and then returns an error with ErrFenced in its chain. When handle returns an error it gets the same
// range again after a pause. While a range is handled the next one is read and decoded, and no more. A range without a readable message is not handled. It may be
// called once.
func (l *Ledger[T]) Consume(ctx context.Context, handle func(context.Context, schemas.Batch[T]) error) (err error) {
	defer l.watchLag(nil)()
	defer func() { l.t.stopped(err) }()
	ctx, cancel := context.WithCancel(ctx)
	var next ahead[T]
	defer next.drop()
	defer cancel()
	for {
		in, ok := next.take()
		if !ok {
			if l.consumer == nil {
				if ok, err := l.start(ctx, handle); !ok {
					return err
				}
			}
			in = l.read(ctx, l.pos.Floor)
		}
		if ctx.Err() != nil {
			return nil
		}
		if in.err != nil {
			l.lost(ctx, in.reason, in.err)
			continue
		}
		l.t.over()
		if len(in.all) == 0 {
			if in.none {
				l.oldest.Store(0)
			}
			continue
		}
		intent := l.pos
		intent.Next = in.all[len(in.all)-1].seq
		if ok, err := l.fenced(ctx, "position", func() error { return l.write(ctx, intent) }); !ok {
			return err
		}
		if l.consumer != nil {
			next.start(func() taken[T] { return l.read(ctx, intent.Next) })
		}
		if ok, err := l.settle(ctx, in, handle); !ok {
			return err
		}
	}
}

// start finds our position, handles what was in hand there when somebody stopped, and goes on behind it.
func (l *Ledger[T]) start(ctx context.Context, handle func(context.Context, schemas.Batch[T]) error) (ok bool, err error) {
	var all []message
	if ok, err := l.fenced(ctx, "position", func() (err error) { all, err = l.open(ctx); return err }); !ok {
		return false, err
	}
	if l.pos.Next > l.pos.Floor {
		l.log.Info("handling again what was in hand", "first", l.pos.Floor+1, "last", l.pos.Next)
		if ok, err := l.settle(ctx, l.decoded(all), handle); !ok {
			return false, err
		}
	}
	return l.fenced(ctx, "position", func() error { return l.follow(ctx) })
}

// taken is a range as it was read, or why it was not.
type taken[T any] struct {
	all    []message
	items  []schemas.Delivered[T]
	bad    []refused
	none   bool // nothing waits in the stream
	reason string
	err    error
}

// read waits for messages and returns those that follow after without a hole, decoded.
func (l *Ledger[T]) read(ctx context.Context, after uint64) taken[T] {
	all, err := l.gather(ctx)
	if err != nil {
		return taken[T]{reason: "fetch", err: err}
	}
	if len(all) == 0 {
		return taken[T]{none: true}
	}
	if all, err = l.inStep(ctx, all, after); err != nil {
		return taken[T]{reason: "position", err: err}
	}
	return l.decoded(all)
}

func (l *Ledger[T]) decoded(all []message) taken[T] {
	items, bad := l.decodeAll(all)
	return taken[T]{all: all, items: items, bad: bad}
}

// ahead is the range behind the one in hand, read and decoded while that one is handled: one, never more. It is only
// read: it is written down when its turn comes, so that a crash knows nothing of it. Between start and take the consumer
// is the reading goroutine's. The zero ahead reads nothing.
type ahead[T any] struct{ read chan taken[T] }

func (a *ahead[T]) start(read func() taken[T]) {
	came := make(chan taken[T], 1)
	a.read = came
	go func() { came <- read() }()
}

// take waits for the range, or returns false when none is being read.
func (a *ahead[T]) take() (taken[T], bool) {
	if a.read == nil {
		return taken[T]{}, false
	}
	in := <-a.read
	a.read = nil
	return in, true
}

// drop waits for the range, and lets another reader have it.
func (a *ahead[T]) drop() {
	in, _ := a.take()
	giveBack(in.all)
}

// fenced is until, ended by ErrFenced as well.
func (l *Ledger[T]) fenced(ctx context.Context, reason string, f func() error) (ok bool, err error) {
	ok = l.until(ctx, reason, func() error {
		if err = f(); errors.Is(err, ErrFenced) {
			return nil
		}
		return err
	})
	if ok && err != nil {
		return false, err
	}
	return ok, nil
}

// open finds our position and makes it ours. If a range is in hand it returns its messages, read one by one so that they
// are what they were, whatever a consumer has to say.
func (l *Ledger[T]) open(ctx context.Context) ([]message, error) {
	stream, err := l.stream(ctx)
	if err != nil {
		return nil, err
	}
	if l.kv, err = l.js.KeyValue(ctx, natsx.HistoryBucket); errors.Is(err, jetstream.ErrBucketNotFound) && l.cfg.Declare != nil {
		if err := l.cfg.Declare(ctx); err != nil {
			return nil, err
		}
		l.kv, err = l.js.KeyValue(ctx, natsx.HistoryBucket)
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", natsx.HistoryBucket, err)
	}
	info := stream.CachedInfo()
	l.created, l.filter = info.Created, info.Config.Subjects[0]
	if l.revision == 0 { // our first look
		have, err := lastPosition(ctx, l.kv, l.cfg.Name)
		if err != nil {
			return nil, err
		}
		if have.strange != nil {
			l.m.Failures.WithLabelValues(l.cfg.Name, "position").Inc()
			from := "an earlier one"
			if have.position == (position{}) {
				from = "what the consumer has acknowledged"
				if have.position, err = l.acknowledged(ctx); err != nil {
					return nil, err
				}
			}
			l.log.Error("somebody has written over our position, going on from "+from, "floor", have.Floor, "next", have.Next, "err", have.strange)
		}
		l.pos, l.revision = have.position, have.revision
	}
	next := l.pos
	next.Owner = l.owner
	switch {
	case l.pos.Stream == "":
		next.Stream = streamName(l.cfg.Stream, l.created, 0)
	case l.pos.Stream != streamName(l.cfg.Stream, l.created, 0):
		l.log.Error("this is another stream than the one we read: starting at its beginning", "was", l.pos.Stream, "floor", l.pos.Floor, "next", l.pos.Next)
		next = position{Stream: streamName(l.cfg.Stream, l.created, 0), Owner: l.owner}
	case max(l.pos.Floor, l.pos.Next) > info.State.LastSeq:
		l.log.Error("the stream has lost messages that we have seen, and will use their numbers again", "floor", l.pos.Floor, "next", l.pos.Next, "last", info.State.LastSeq)
		next.Epoch++
		next.Floor = min(l.pos.Floor, info.State.LastSeq)
		next.Next = next.Floor
	}
	if err := l.write(ctx, next); err != nil {
		return nil, err
	}
	var all []message
	for at := l.pos.Floor + 1; at <= l.pos.Next; at++ {
		msg, err := stream.GetMsg(ctx, at, jetstream.WithGetMsgSubject(l.filter))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read message %d of %s: %w", at, l.cfg.Stream, err)
		}
		if msg.Sequence > l.pos.Next {
			break
		}
		at = msg.Sequence
		m := message{subject: msg.Subject, contentType: msg.Header.Get(headerContentType), seq: at, arrived: msg.Time, body: msg.Data}
		m.boot, m.report = reportIn(msg.Header)
		all = append(all, m)
	}
	if missing := l.pos.Next - l.pos.Floor - uint64(len(all)); missing > 0 {
		l.missing(missing, l.pos.Floor+1)
	}
	return all, nil
}

// follow makes the consumer go on after Floor.
func (l *Ledger[T]) follow(ctx context.Context) error {
	info, err := l.bind(ctx, jetstream.AckAllPolicy)
	if err != nil {
		return err
	}
	if info.AckFloor.Stream == l.pos.Floor && info.NumAckPending == 0 {
		return nil
	}
	return l.reset(ctx, l.pos.Floor+1)
}

// inStep returns the part of all that follows after without a hole. A hole that is in the stream itself is told and
// passed over.
func (l *Ledger[T]) inStep(ctx context.Context, all []message, after uint64) ([]message, error) {
	want := after + 1
	kept := all[:0]
	for i := range all {
		m := all[i]
		if m.seq < want { // delivered again
			continue
		}
		if m.seq > want {
			stream, err := l.js.Stream(ctx, l.cfg.Stream)
			if err != nil {
				return nil, err
			}
			next, err := stream.GetMsg(ctx, want, jetstream.WithGetMsgSubject(l.filter))
			if err != nil {
				return nil, fmt.Errorf("look for message %d: %w", want, err)
			}
			if next.Sequence != m.seq {
				if len(kept) > 0 { // the rest comes again
					l.consumer = nil
					return kept, nil
				}
				return nil, fmt.Errorf("message %d came, and %d is next", m.seq, next.Sequence)
			}
			l.missing(m.seq-want, want)
		}
		kept = append(kept, m)
		want = m.seq + 1
	}
	return kept, nil
}

func (l *Ledger[T]) missing(n, first uint64) {
	l.m.Missing.WithLabelValues(l.cfg.Name).Add(float64(n))
	l.log.Error("messages were removed or expired before they were handled", "messages", n, "first", first)
}

// settle handles the range that is in hand and moves Floor behind it.
func (l *Ledger[T]) settle(ctx context.Context, in taken[T], handle func(context.Context, schemas.Batch[T]) error) (bool, error) {
	all, items, bad := in.all, in.items, in.bad
	if len(all) > 0 {
		l.holds(all)
	}
	if !l.buryAll(ctx, bad) {
		return false, nil
	}
	batch := schemas.Batch[T]{Stream: streamName(l.cfg.Stream, l.created, l.pos.Epoch), First: l.pos.Floor + 1, Last: l.pos.Next, Items: items}
	var not schemas.Refused
	if len(items) > 0 && !l.until(ctx, "handle", func() error {
		if err := handle(ctx, batch); !errors.As(err, &not) {
			return err
		}
		return nil
	}) {
		return false, nil
	}
	late := refusedOf(all, not)
	if !l.buryAll(ctx, late) {
		return false, nil
	}
	done := l.pos
	done.Floor = done.Next
	// Also when ctx was done while handle finished, for a moment: it saves handling the range again.
	save := ctx
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		save, cancel = context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
	}
	if ok, err := l.fenced(save, "position", func() error { return l.write(save, done) }); !ok {
		return false, err
	}
	if l.cfg.Settled != nil {
		l.cfg.Settled(batch.Stream, batch.Last, buriedOf(append(bad, late...)))
	}
	if len(all) > 0 {
		if last := all[len(all)-1].ack; last != nil { // for whoever looks at the consumer; we go by Floor
			ack, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second) // also when ctx ends now
			_ = last.DoubleAck(ack)
			cancel()
		}
		l.handled(all)
	}
	return true, nil
}

// buryAll writes messages to the dead-letter stream, or returns false because ctx is done. While that stream is full nobody waits
// for it, or one gateway's rubbish would hold up the usage of all: a message that is not written there is not let go of by its
// gateway, which sends it again, ever less often, and stays where it came from for as long as that stream keeps it.
func (l *Ledger[T]) buryAll(ctx context.Context, bad []refused) bool {
	return len(bad) == 0 || l.until(ctx, "dead_letter", func() error {
		unkept := 0
		for len(bad) > 0 {
			switch err := l.bury(ctx, &bad[0]); {
			case errors.Is(err, errFull):
				bad[0].unkept = true
				unkept++
				l.m.Unkept.WithLabelValues(l.cfg.Name).Inc()
			case err != nil:
				return err
			}
			l.m.Refused.WithLabelValues(l.cfg.Name, bad[0].Reason).Inc()
			bad = bad[1:]
		}
		if unkept > 0 && time.Since(l.toldFull) >= l.cfg.LogEvery {
			l.toldFull = time.Now()
			l.log.Error("the dead-letter stream is full: messages that cannot be taken are in no letter, their gateways keep them. Look at them with weir dlq list, replay or drop them", "messages", unkept)
		}
		return nil
	})
}

// errFull says that the dead-letter stream has no room for a letter.
var errFull = errors.New("the dead-letter stream is full")

// full reports whether err, of storing a letter of so many bytes, is for want of room in its stream, which only a person can make.
func (l *Ledger[T]) full(ctx context.Context, err error, size int) bool {
	var api *jetstream.APIError
	if !errors.As(err, &api) || api.ErrorCode != codeStoreFailed {
		return false
	}
	stream, err := l.js.Stream(ctx, schemas.DeadStream)
	if err != nil {
		return false
	}
	const overhead = 1024 // of a stored message, at most
	info := stream.CachedInfo()
	return info.Config.MaxBytes > 0 && info.State.Bytes+uint64(size)+overhead >= uint64(info.Config.MaxBytes)
}

// Buried is a message that is in the dead-letter stream, whole.
type Buried struct {
	Subject string // where it came from
	Boot    string // of the report, as its Publisher said; empty for a message that none wrote
	Seq     uint64 // of the report
}

func buriedOf(bad []refused) []Buried {
	var all []Buried
	for i := range bad {
		if !bad[i].cut && !bad[i].unkept {
			all = append(all, Buried{bad[i].subject, bad[i].boot, bad[i].report})
		}
	}
	return all
}

// refusedOf are the messages that a handler refused.
func refusedOf(all []message, not schemas.Refused) []refused {
	var bad []refused
	for _, r := range not {
		for i := range all {
			if all[i].seq == r.Seq {
				bad = append(bad, refused{message: all[i], Refusal: &schemas.Refusal{Reason: schemas.ReasonRefused, Detail: r.Detail}})
			}
		}
	}
	return bad
}

// write makes next our position, unless somebody else has written since.
func (l *Ledger[T]) write(ctx context.Context, next position) error {
	value, err := json.Marshal(next)
	if err != nil {
		return err
	}
	revision, err := l.put(ctx, value)
	if err != nil {
		if !errors.Is(err, jetstream.ErrKeyExists) && !wrongLast(err) {
			return fmt.Errorf("write position of %s: %w", l.cfg.Name, err)
		}
		// Somebody else, or we ourselves in an attempt whose answer was lost.
		have, get := lastPosition(ctx, l.kv, l.cfg.Name)
		switch {
		case get != nil:
			return get
		case have.revision == 0: // the bucket is new: what we know is all there is
			l.revision = 0
			return fmt.Errorf("position of %s is gone from bucket %s, writing it again", l.cfg.Name, natsx.HistoryBucket)
		case have.strange != nil && (have.position == position{} || have.position == l.pos || have.Owner == l.owner):
			l.revision = have.revision
			return fmt.Errorf("somebody has written over our position, writing it again: %w", have.strange)
		case have.position != next:
			return fmt.Errorf("ledger %s: %w (it is %s and we are %s)", l.cfg.Name, ErrFenced, have.Owner, l.owner)
		}
		revision = have.revision
	}
	l.pos, l.revision = next, revision
	return nil
}

// acknowledged is the position that the consumer knows: behind ours at most, since a range is acknowledged when it is written
// down as handled. Which range was in hand it does not know, so that one is not redone but cut anew; a store that knows its
// messages by their names takes each once all the same.
func (l *Ledger[T]) acknowledged(ctx context.Context) (position, error) {
	at := position{Stream: streamName(l.cfg.Stream, l.created, 0)}
	c, err := l.js.Consumer(ctx, l.cfg.Stream, l.cfg.Name)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return at, nil
	}
	if err != nil {
		return at, fmt.Errorf("ask consumer %s how far it has come: %w", l.cfg.Name, err)
	}
	at.Floor = c.CachedInfo().AckFloor.Stream
	at.Next = at.Floor
	return at, nil
}

func (l *Ledger[T]) put(ctx context.Context, value []byte) (uint64, error) {
	if l.revision == 0 {
		return l.kv.Create(ctx, l.cfg.Name, value)
	}
	return l.kv.Update(ctx, l.cfg.Name, value, l.revision)
}

// bury writes a message that cannot be read to the dead-letter stream. Only a ledger does: every consumer of a stream
// meets the same message.
func (l *Ledger[T]) bury(ctx context.Context, bad *refused) error {
	msg := &nats.Msg{Subject: schemas.DeadPrefix + bad.Reason, Data: bad.body, Header: nats.Header{
		headerContentType: {header(bad.contentType)},
		HeaderReason:      {header(bad.Reason)},
		HeaderDetail:      {header(bad.Refusal.Error())},
		HeaderSubject:     {header(bad.subject)},
		HeaderStream:      {l.cfg.Stream},
		HeaderSequence:    {strconv.FormatUint(bad.seq, 10)},
		HeaderArrived:     {bad.arrived.UTC().Format(time.RFC3339Nano)},
	}}
	if most := int(l.nc.MaxPayload()); most > 0 && msg.Size()+512 > most {
		bad.cut = true
		msg.Header.Set(HeaderTruncated, strconv.Itoa(len(bad.body)))
		msg.Data = bad.body[:max(0, min(len(bad.body), len(bad.body)-(msg.Size()+512-most)))]
	}
	id := streamName(l.cfg.Stream, l.created, l.pos.Epoch) + "-" + strconv.FormatUint(bad.seq, 10)
	if _, err := l.js.PublishMsg(ctx, msg, jetstream.WithMsgID(id), jetstream.WithExpectStream(schemas.DeadStream), jetstream.WithRetryAttempts(0)); err != nil {
		if l.full(ctx, err, msg.Size()) {
			err = errors.Join(errFull, err)
		}
		return fmt.Errorf("write message %d to the dead-letter stream: %w", bad.seq, err)
	}
	l.log.Warn("message cannot be taken, it is in the dead-letter stream", "subject", bad.subject, "seq", bad.seq, "err", bad.Refusal)
	return nil
}

// header is s as a header's value may be: one line of at most 500 bytes.
func header(s string) string {
	if len(s) > 500 {
		s = s[:500]
	}
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return '?'
		}
		return r
	}, s))
}

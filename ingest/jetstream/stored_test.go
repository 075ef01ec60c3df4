package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/ingest/spool"
	embedded "github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// begin runs f until the test ends.
func begin(t testing.TB, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func newPublisher(t testing.TB, nc *nats.Conn, gateway string) *Publisher {
	t.Helper()
	p, err := NewPublisher(nc, gateway, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// mark is what a ledger does with one report that is stored.
func mark(t testing.TB, k *Marks, stream string, at uint64, gateway, boot string, seq uint64) {
	t.Helper()
	stored := k.After(func(context.Context, schemas.Batch[*schemas.Report]) error { return nil })
	if err := stored(t.Context(), schemas.Batch[*schemas.Report]{Stream: stream, First: at, Last: at, Items: []schemas.Delivered[*schemas.Report]{
		{Seq: at, Value: &schemas.Report{Gateway: gateway, Boot: boot, Seq: seq}}}}); err != nil {
		t.Fatal(err)
	}
	k.Settled(stream, at, nil)
}

// The way of a report: into the stream, through the ledger into the history, and back as a mark.
func TestGatewaysLearnWhatTheHistoryHas(t *testing.T) {
	_, nc, js := start(t)
	p, other := newPublisher(t, nc, "gw"), newPublisher(t, nc, "other")
	if f, s, err := p.Stored(t.Context()); err != nil || f.Stream != "" || s.Has("b", 1) {
		t.Fatalf("Stored = %v, %v, %v before there is a history", f, s, err)
	}
	var last uint64
	for seq := uint64(1); seq <= 3; seq++ {
		at, err := p.Put(t.Context(), report("b", seq, 1), false)
		if err != nil {
			t.Fatal(err)
		}
		last = at
	}
	if _, err := other.Put(t.Context(), report("c", 7, 1), false); err != nil {
		t.Fatal(err)
	}
	marks, err := NewMarks(nc, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	stop := begin(t, marks.Run)
	away := true
	var mu sync.Mutex
	ledger, err := NewLedger(Config{Name: "history", MaxDelay: 10 * time.Millisecond, Settled: marks.Settled}, nc, func(subject, contentType string, body []byte, arrived time.Time) (*schemas.Report, error) {
		return schemas.DecodeReport(subject, contentType, body, arrived)
	}, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	tried := make(chan struct{}, 100)
	begin(t, func(ctx context.Context) error {
		return ledger.Consume(ctx, marks.After(func(context.Context, schemas.Batch[*schemas.Report]) error {
			mu.Lock()
			defer mu.Unlock()
			select {
			case tried <- struct{}{}:
			default:
			}
			if away {
				return errors.New("ClickHouse is away")
			}
			return nil
		}))
	})
	<-tried
	if _, s, err := p.Stored(t.Context()); err != nil || s.Has("b", 1) {
		t.Fatalf("Stored = %v, %v while the history stores nothing", s, err)
	}
	mu.Lock()
	away = false
	mu.Unlock()
	eventually(t, "the gateway is told", func() bool {
		f, s, err := p.Stored(t.Context())
		return err == nil && s.Has("b", 1) && s.Has("b", 2) && s.Has("b", 3) && f.Seq >= last && f.Stream != ""
	})
	if _, s, err := p.Stored(t.Context()); err != nil || s.Has("b", 4) || s.Has("c", 7) {
		t.Errorf("Stored = %v, %v, want nothing of others", s, err)
	}
	// Another process goes on from what was written; the bucket may be gone in between.
	stop()
	next, err := NewMarks(nc, func(ctx context.Context) error { return natsx.Declare(ctx, js, natsx.Storage{}) }, quiet)
	if err != nil {
		t.Fatal(err)
	}
	begin(t, next.Run)
	mark(t, next, "s", 5, "gw", "b", 5)
	eventually(t, "both are there", func() bool {
		_, s, err := p.Stored(t.Context())
		return err == nil && s.Has("b", 3) && !s.Has("b", 4) && s.Has("b", 5)
	})
	if err := js.DeleteKeyValue(t.Context(), schemas.StoredBucket); err != nil {
		t.Fatal(err)
	}
	mark(t, next, "s", 6, "gw", "d", 1)
	eventually(t, "all is there again", func() bool {
		f, s, err := p.Stored(t.Context())
		return err == nil && s.Has("b", 3) && s.Has("b", 5) && s.Has("d", 1) && f.Seq == 6
	})
}

// What is marked is stored: a report whose store fails, or is still at work, is not told to its gateway, nor that the history has come
// past it, whatever else is told meanwhile.
func TestMarksComeAfterTheStore(t *testing.T) {
	_, nc, _ := start(t)
	p, other := newPublisher(t, nc, "gw"), newPublisher(t, nc, "other")
	marks, err := NewMarks(nc, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	begin(t, marks.Run)
	batch := schemas.Batch[*schemas.Report]{Stream: "s", First: 9, Last: 9, Items: []schemas.Delivered[*schemas.Report]{
		{Seq: 9, Value: &schemas.Report{Gateway: "gw", Boot: "b", Seq: 1}}}}
	untold := func(round uint64) {
		t.Helper()
		mark(t, marks, "s", 4, "other", "c", round)
		eventually(t, "the other is told", func() bool {
			f, s, err := other.Stored(t.Context())
			return err == nil && s.Has("c", round) && f.Seq > 0
		})
		if f, s, err := p.Stored(t.Context()); err != nil || s.Has("b", 1) || f.Seq != 4 {
			t.Errorf("Stored = %v, %v, %v of a report that is not stored, want nothing, and 4", f, s, err)
		}
	}
	away := errors.New("away")
	for round, result := range []error{away, nil} {
		err := marks.After(func(context.Context, schemas.Batch[*schemas.Report]) error {
			untold(uint64(2*round + 1)) // while it is at work
			return result
		})(t.Context(), batch)
		if !errors.Is(err, result) {
			t.Fatalf("After = %v, want %v", err, result)
		}
		if result != nil {
			untold(uint64(2*round + 2))
		}
	}
	marks.Settled("s", 9, nil)
	eventually(t, "the gateway is told", func() bool {
		f, s, err := p.Stored(t.Context())
		return err == nil && s.Has("b", 1) && f.Seq == 9
	})
}

// A gateway that has crashed again and again while NATS was away delivers all of its lives at once, and sends none of them twice.
func TestMarksOfManyLives(t *testing.T) {
	marks, err := NewMarks(&nats.Conn{}, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	const lives = 50
	for boot := range lives {
		mark(t, marks, "s", 0, "gw", fmt.Sprint(boot), 1)
	}
	for boot := range lives {
		if !marks.gateways["gw"].Has(fmt.Sprint(boot), 1) {
			t.Errorf("the report of life %d is not told", boot)
		}
	}
}

// A gateway that crashes all the time must not make its mark grow for ever.
func TestMarksAreBounded(t *testing.T) {
	marks, err := NewMarks(&nats.Conn{}, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	for boot := range 200 {
		for range 1000 {
			mark(t, marks, "s", 0, "gw", fmt.Sprint(boot), 1+rand.Uint64N(1e6))
		}
	}
	s := marks.gateways["gw"]
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Boots) != maxBoots || s.Boots["199"] == nil || len(s.Boots["199"]) > maxRanges || len(b) > 512<<10 {
		t.Errorf("%d boots, %d ranges of the last, %d bytes", len(s.Boots), len(s.Boots["199"]), len(b))
	}
}

// T4: the stream has lost what it acknowledged. The same report is stored behind what is there, whichever boot it is of, once
// for each time that it is asked for, also when the answer is lost.
func TestT4PutAgain(t *testing.T) {
	_, nc, js := start(t)
	p := newPublisher(t, nc, "gw")
	for _, r := range []*schemas.Report{report("old", 1, 1), report("old", 2, 1), report("new", 1, 1)} {
		if err := p.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if at, err := p.Put(t.Context(), report("old", 2, 1), true); err != nil || at != 4 {
		t.Fatalf("Put = %d, %v, want message 4", at, err)
	}
	if at, err := p.Put(t.Context(), report("new", 1, 1), false); err != nil || at != 4 || messages(t, js, schemas.UsageStream) != 4 {
		t.Fatalf("Put = %d, %v with %d messages, want a position that is not under it, and no message", at, err, messages(t, js, schemas.UsageStream))
	}
	if at, err := p.Put(t.Context(), report("new", 2, 1), false); err != nil || at != 5 {
		t.Fatalf("Put = %d, %v, want message 5", at, err)
	}
	p.last = 4 // as if the answer to a repeat had been lost
	if at, err := p.Put(t.Context(), report("new", 2, 1), true); err != nil || at != 5 {
		t.Fatalf("Put = %d, %v, want message 5, found", at, err)
	}
	// A process that knows nothing and has the spool of another.
	p = newPublisher(t, nc, "gw")
	if at, err := p.Put(t.Context(), report("old", 1, 1), true); err != nil || at != 6 {
		t.Fatalf("Put = %d, %v, want message 6", at, err)
	}
}

// T4: a server that comes back with an older copy of its store has lost reports that it acknowledged, some of which have no requests. All
// of them come again, and the history has each once, also when nobody sends anything new, though what the history has noted came back
// from the copy too.
func TestT4AnOlderCopyOfTheStream(t *testing.T) {
	for _, c := range []struct {
		name       string
		goesOn     bool // the gateway has new reports
		hadHistory bool // the copy has what the history had noted by then
		othersGoOn bool // another gateway has, and the stream outgrows its old numbers
	}{{"gateways go on", true, false, false}, {"no new traffic", false, false, false}, {"no new traffic, and a history", false, true, false}, {"no new traffic of this one", false, true, true}} {
		t.Run(c.name, func(t *testing.T) { olderCopy(t, c.goesOn, c.hadHistory, c.othersGoOn) })
	}
}

func olderCopy(t *testing.T, goesOn, hadHistory, othersGoOn bool) {
	cfg := embedded.Config{Dir: filepath.Join(t.TempDir(), "store")}
	srv, err := embedded.Start(cfg, quiet)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Port, err = strconv.Atoi(u.Port()); err != nil {
		t.Fatal(err)
	}
	restart := func(between func() error) {
		t.Helper()
		srv.Stop()
		if err := between(); err != nil {
			t.Fatal(err)
		}
		if srv, err = embedded.Start(cfg, quiet); err != nil {
			t.Fatal(err)
		}
	}
	defer func() { srv.Stop() }()
	nc, js := connect(t, srv.URL())
	declare(t, js)
	p := newPublisher(t, nc, "gw")
	kept, err := spool.Open(spool.Config{}, t.TempDir(), "gw", "boot", quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kept.Close() })
	seq := uint64(0)
	seal := func(allowed ...uint64) {
		t.Helper()
		seq++
		r := report("boot", seq, allowed...)
		if len(allowed) == 0 {
			r.Tokens = []schemas.Tokens{{Rule: "contract", Key: "k", Tenant: "k", Mode: "enforce", RateNanos: 1e9, Capacity: 10, LimitRateNanos: 1e9, LimitBurst: 10, Taken: 1, Cum: seq, Window: time.Second}}
		}
		if err := errors.Join(kept.Append(r), kept.Commit(0)); err != nil {
			t.Fatal(err)
		}
	}
	send := func() {
		t.Helper()
		for r, again := kept.Next(); r != nil; r, again = kept.Next() {
			eventually(t, "it is acknowledged", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				at, err := p.Put(ctx, r, again)
				if err == nil {
					kept.Sent(at)
				}
				return err == nil
			})
		}
	}
	var mu sync.Mutex
	has := map[uint64]int{}
	history := func() (stop func()) {
		marks, err := NewMarks(nc, nil, quiet)
		if err != nil {
			t.Fatal(err)
		}
		l, err := NewLedger(Config{Name: "history", MaxDelay: 10 * time.Millisecond, Settled: marks.Settled}, nc, schemas.DecodeReport, quiet, nil)
		if err != nil {
			t.Fatal(err)
		}
		handle := marks.After(func(_ context.Context, b schemas.Batch[*schemas.Report]) error {
			mu.Lock()
			defer mu.Unlock()
			for _, it := range b.Items {
				if it.Value.Gateway == "gw" {
					has[it.Value.Seq]++
				}
			}
			return nil
		})
		stopMarks := begin(t, marks.Run)
		stopLedger := begin(t, func(ctx context.Context) error { return l.Consume(ctx, handle) })
		return func() { stopLedger(); stopMarks() }
	}
	confirm := func() (unconfirmed int) {
		if f, stored, err := p.Stored(t.Context()); err == nil {
			kept.Stored(f, stored)
		}
		return kept.Unconfirmed()
	}
	seal(1)
	send()
	if hadHistory {
		stop := history()
		eventually(t, "the gateway knows that the history has it", func() bool { return confirm() == 0 })
		stop()
	}
	copied := filepath.Join(t.TempDir(), "copy")
	restart(func() error { return os.CopyFS(copied, os.DirFS(cfg.Dir)) })
	seal()
	seal(1)
	seal()
	seal()
	send()
	restart(func() error { return errors.Join(os.RemoveAll(cfg.Dir), os.Rename(copied, cfg.Dir)) })
	eventually(t, "the stream is there", func() bool {
		_, err := js.Stream(t.Context(), schemas.UsageStream)
		return err == nil
	})
	if n := messages(t, js, schemas.UsageStream); n != 1 {
		t.Fatalf("the older copy has %d reports, want 1", n)
	}
	if othersGoOn {
		other := newPublisher(t, nc, "other")
		for n := range uint64(9) {
			if err := other.Publish(t.Context(), report("boot", n+1, 1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if othersGoOn {
		eventually(t, "the gateway sees that its last message is not there, without the word of a history", func() bool {
			confirm()
			n, _ := kept.Len()
			return n > 0
		})
	}
	history()
	eventually(t, "the history has all, and the gateway knows", func() bool {
		if goesOn {
			seal(1)
		}
		send()
		left := confirm()
		send()
		mu.Lock()
		defer mu.Unlock()
		return has[1] > 0 && has[2] > 0 && has[3] > 0 && has[4] > 0 && has[5] > 0 && (goesOn || left == 0)
	})
	mu.Lock()
	defer mu.Unlock()
	for n, times := range has {
		if lost := n > 1 && n <= 5; times > 2 || times > 1 && (lost || hadHistory) { // which of the others it has the gateway cannot know: the table of reports does
			t.Errorf("report %d came %d times", n, times)
		}
	}
}

// T5: what operations.md lets a gateway do is enough for it, and not enough to say what the history has of anybody.
func TestT5PermissionsOfAGateway(t *testing.T) {
	gateway := &server.Permissions{
		Publish: &server.SubjectPermission{Allow: []string{schemas.UsagePrefix + "gw", "$JS.API.STREAM.INFO.WEIR_USAGE", "$JS.API.STREAM.MSG.GET.WEIR_USAGE",
			"$JS.API.STREAM.INFO.KV_weir-stored", "$JS.API.STREAM.MSG.GET.KV_weir-stored"}},
		Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
	}
	url := custom(t, server.Options{Users: []*server.User{{Username: "centre", Password: "c"}, {Username: "gw", Password: "g", Permissions: gateway}}})
	centre, js := connect(t, strings.Replace(url, "://", "://centre:c@", 1))
	declare(t, js)
	nc, _ := connect(t, strings.Replace(url, "://", "://gw:g@", 1))
	p := newPublisher(t, nc, "gw")
	if err := p.Publish(t.Context(), report("b", 1, 1)); err != nil {
		t.Fatal(err)
	}
	marks, err := NewMarks(centre, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	begin(t, marks.Run)
	mark(t, marks, "s", 1, "gw", "b", 1)
	eventually(t, "the gateway is told", func() bool {
		_, s, err := p.Stored(t.Context())
		return err == nil && s.Has("b", 1)
	})
	kv, err := js.KeyValue(t.Context(), schemas.StoredBucket)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{schemas.StoredPrefix + "gw", schemas.StoredPrefix + "other", schemas.FloorKey} {
		if err := nc.Publish("$KV."+schemas.StoredBucket+"."+key, []byte(`{"boots":{"b":[[1,99]]},"stream":"s","seq":99}`)); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, s, err := p.Stored(t.Context()); err != nil || s.Has("b", 2) {
		t.Errorf("Stored = %v, %v: a gateway has written it", s, err)
	}
	if _, err := kv.Get(t.Context(), schemas.StoredPrefix+"other"); !errors.Is(err, jetstream.ErrKeyNotFound) {
		t.Errorf("another gateway's mark: %v, want none", err)
	}
}

// The number of a buried report is what a header says: one that no gateway has come to is not marked, for the ranges that such
// numbers are in are counted through.
func TestMarksOfNoNumberThatWas(t *testing.T) {
	_, nc, _ := start(t)
	k, err := NewMarks(nc, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	k.Settled("s", 3, []Buried{{Subject: schemas.UsagePrefix + "gw", Boot: "b", Seq: 1<<64 - 1}, {Subject: schemas.UsagePrefix + "gw", Boot: "b", Seq: 7}})
	if got := k.gateways["gw"].Boots["b"]; len(got) != 1 || !got.Has(7) {
		t.Errorf("marked %v, want 7", got)
	}
}

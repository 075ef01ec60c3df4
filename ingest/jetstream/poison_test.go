package jetstream

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/ingest/spool"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// Reports that cannot be read, or that the history refuses, are in a gateway's spool until they are dead letters, and no
// longer: they are not published again and again. What they hold comes back by being replayed, however often.
func TestDeadLettersLeaveTheSpool(t *testing.T) {
	url, _, js := start(t)
	if err := js.DeleteStream(t.Context(), schemas.DeadStream); err != nil { // no letter can be written yet
		t.Fatal(err)
	}
	near, _ := connect(t, url)
	pub, err := NewPublisher(near, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	kept, err := spool.Open(spool.Config{}, t.TempDir(), "gw", "boot", quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kept.Close() })
	reporter := ingest.New(ingest.Config{Spool: kept, HotEvery: 5 * time.Millisecond, UsageEvery: 5 * time.Millisecond},
		"gw", "boot", noBuckets{}, pub, embeddedtest.Log(t), nil)
	begin(t, reporter.Run)

	nc, _ := connect(t, url)
	marks, err := NewMarks(nc, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	begin(t, marks.Run)
	var mu sync.Mutex
	stored := map[string]uint64{} // requests by tenant, each report once
	seen := map[uint64]bool{}
	var healed atomic.Bool
	has := func(r *schemas.Report, tenant string) bool {
		return slices.ContainsFunc(r.Usage, func(u schemas.Usage) bool { return u.Tenant == tenant })
	}
	decode := func(subject, contentType string, body []byte, arrived time.Time) (*schemas.Report, error) {
		r, err := schemas.DecodeReport(subject, contentType, body, arrived)
		if err == nil && has(r, "unreadable") && !healed.Load() {
			return nil, &schemas.Refusal{Reason: schemas.ReasonInvalid, Detail: "made up"}
		}
		return r, err
	}
	l, err := NewLedger(Config{Name: "history", MaxDelay: 10 * time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 50 * time.Millisecond, Settled: marks.Settled}, nc, decode, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	run(t, l, marks.After(func(_ context.Context, b schemas.Batch[*schemas.Report]) error {
		mu.Lock()
		defer mu.Unlock()
		var not schemas.Refused
		for _, it := range b.Items {
			if has(it.Value, "unstorable") && !healed.Load() {
				not = append(not, schemas.RefusedMessage{Seq: it.Seq, Detail: "made up"})
				continue
			}
			if seen[it.Value.Seq] { // as the table reports would say
				continue
			}
			seen[it.Value.Seq] = true
			for _, u := range it.Value.Usage {
				stored[u.Tenant] += u.Allowed
			}
		}
		if len(not) > 0 {
			return not
		}
		return nil
	}))
	for range 10 {
		for _, tenant := range []string{"fine", "unreadable", "unstorable"} {
			reporter.Count(time.Now(), tenant, "r", "", "", 1)
			time.Sleep(12 * time.Millisecond) // most are in reports of their own
		}
	}
	eventually(t, "the ledger cannot write a letter", func() bool { return l.Ready() != nil })
	if kept.Unconfirmed() == 0 {
		t.Fatal("the spool has let go of what is nowhere else")
	}
	declare(t, js)
	eventually(t, "the spool is empty", func() bool { n, _ := kept.Len(); return n == 0 && kept.Unconfirmed() == 0 })

	d, err := NewDeadLetters(nc)
	if err != nil {
		t.Fatal(err)
	}
	letters, err := d.List(t.Context(), "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	counted := map[string]uint64{}
	for _, x := range letters {
		whole, err := d.Get(t.Context(), x.ID)
		if err != nil {
			t.Fatal(err)
		}
		r, err := whole.Report()
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range r.Usage {
			counted[u.Tenant] += u.Allowed
		}
	}
	mu.Lock()
	for tenant, n := range stored {
		counted[tenant] += n
	}
	mu.Unlock()
	for _, tenant := range []string{"fine", "unreadable", "unstorable"} {
		if counted[tenant] != 10 {
			t.Errorf("%d requests of %s are stored or in letters, want 10", counted[tenant], tenant)
		}
	}
	healed.Store(true)
	for range 2 {
		for _, x := range letters {
			if err := d.Replay(t.Context(), x.ID); err != nil && !errors.Is(err, ErrNoLetter) {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "all are stored", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return stored["fine"] == 10 && stored["unreadable"] == 10 && stored["unstorable"] == 10
	})
}

// A letter that holds only the beginning of its report is no replacement for it: its gateway keeps the report.
func TestACutLetterIsNotAllThereIs(t *testing.T) {
	nc, js := connect(t, custom(t, server.Options{MaxPayload: 4096}))
	declare(t, js)
	p := newPublisher(t, nc, "gw")
	big := report("boot", 1)
	for { // as large as the server takes: with the headers of a letter it is too large
		more := *big
		more.Usage = append(slices.Clone(big.Usage), schemas.Usage{Time: time.Now(), Tenant: "t", Route: "r", Allowed: 1})
		if body, err := schemas.EncodeReport(&more); err != nil {
			t.Fatal(err)
		} else if len(body) > 4096-200 {
			break
		}
		big = &more
	}
	for _, r := range []*schemas.Report{big, report("boot", 2, 1)} {
		if err := p.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	settled := make(chan []Buried, 10)
	l := ledger(t, nc, Config{Settled: func(_ string, last uint64, buried []Buried) {
		settled <- buried
		if last == 2 {
			close(settled)
		}
	}}, nil)
	l.decode = func(string, string, []byte, time.Time) (*schemas.Report, error) { return nil, errors.New("made up") }
	run(t, l, (&journal{}).handle)
	var all []Buried
	for b := range settled {
		all = append(all, b...)
	}
	if want := []Buried{{Subject: schemas.UsagePrefix + "gw", Boot: "boot", Seq: 2}}; !slices.Equal(all, want) {
		t.Errorf("buried %v, want %v", all, want)
	}
	if n := messages(t, js, schemas.DeadStream); n != 2 {
		t.Errorf("%d letters, want 2", n)
	}
}

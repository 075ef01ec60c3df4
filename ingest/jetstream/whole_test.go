package jetstream

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

type noBuckets struct{}

func (noBuckets) Collect(int64, bool, func(schemas.Tokens)) {}
func (noBuckets) Hot() <-chan struct{}                      { return nil }

// Three gateways behind connections that are cut, deafened and muted all the time, read by a history that is cut as
// well: every request that was counted is handled once.
func TestCountedIsHandledOverBadConnections(t *testing.T) {
	url, _, js := start(t)
	var proxies []*proxy
	var reporters []*ingest.Reporter
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 3)
	for i := range 3 {
		px := newProxy(t, url)
		nc, _ := connect(t, px.url())
		name := fmt.Sprint("gw-", i)
		pub, err := NewPublisher(nc, name, nil)
		if err != nil {
			t.Fatal(err)
		}
		r := ingest.New(ingest.Config{HotEvery: 5 * time.Millisecond, UsageEvery: 5 * time.Millisecond, MaxReports: 3, PublishTimeout: 100 * time.Millisecond,
			RetryMin: 5 * time.Millisecond, RetryMax: 50 * time.Millisecond, DrainTimeout: patience}, name, "boot-"+name, noBuckets{}, pub, embeddedtest.Log(t), nil)
		go func() { ended <- r.Run(ctx) }()
		proxies, reporters = append(proxies, px), append(reporters, r)
	}
	px := newProxy(t, url)
	nc, _ := connect(t, px.url())
	proxies = append(proxies, px)
	var mu sync.Mutex
	handled := map[string]uint64{}
	reports := map[string]int{}
	run(t, ledger(t, nc, Config{MaxMessages: 20, MaxDelay: 10 * time.Millisecond}, nil), func(_ context.Context, b schemas.Batch[*schemas.Report]) error {
		mu.Lock()
		defer mu.Unlock()
		for _, it := range b.Items {
			reports[fmt.Sprint(it.Value.Boot, "/", it.Value.Seq)]++
			for _, u := range it.Value.Usage {
				handled[it.Value.Gateway+"/"+u.Tenant+"/"+u.Rule] += u.Allowed + u.Rejected
			}
		}
		return nil
	})
	counted := map[string]uint64{}
	for i := range 600 {
		for g, r := range reporters {
			tenant, rule := fmt.Sprint("t", i%7), ""
			if i%5 == 0 {
				rule = "contract"
			}
			r.Count(time.Now(), tenant, "r", rule, rule, 1)
			counted[fmt.Sprint("gw-", g, "/", tenant, "/", rule)]++
		}
		if p := proxies[i%len(proxies)]; i%20 == 0 {
			p.deaf.Store(i%40 == 0) // answers, or questions, are lost until the cut
			p.mute.Store(i%40 != 0)
		} else if i%20 == 10 {
			for _, p := range proxies {
				p.cut()
				p.deaf.Store(false)
				p.mute.Store(false)
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
	for _, p := range proxies {
		p.cut()
		p.deaf.Store(false)
		p.mute.Store(false)
	}
	cancel()
	for range reporters {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	last := messages(t, js, schemas.UsageStream)
	eventually(t, "the history has all", func() bool { return floor(t, js).Floor == last })
	mu.Lock()
	defer mu.Unlock()
	for k, n := range counted {
		if handled[k] != n {
			t.Errorf("%s: handled %d, want %d", k, handled[k], n)
		}
	}
	if len(handled) != len(counted) {
		t.Errorf("handled %d keys, want %d", len(handled), len(counted))
	}
	for k, n := range reports {
		if n != 1 {
			t.Errorf("report %s is in the stream or was handled %d times", k, n)
		}
	}
	if len(reports) < 20 {
		t.Errorf("only %d reports: the test has not tested much", len(reports))
	}
}

// BenchmarkPublish stores reports of 500 entries one by one, each on disk before it is acknowledged.
func BenchmarkPublish(b *testing.B) {
	_, nc, js := start(b)
	p, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		b.Fatal(err)
	}
	r := report("boot", 0, make([]uint64, 500)...)
	for b.Loop() {
		r.Seq++
		if err := p.Publish(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(500*float64(b.N)/b.Elapsed().Seconds(), "entries/s")
	if n := messages(b, js, schemas.UsageStream); n != uint64(b.N) {
		b.Fatalf("stored %d, want %d", n, b.N)
	}
}

// BenchmarkLedger reads and decodes reports of 500 entries.
func BenchmarkLedger(b *testing.B) {
	_, nc, js := start(b)
	body, err := schemas.EncodeReport(report("boot", 1, make([]uint64, 500)...))
	if err != nil {
		b.Fatal(err)
	}
	const n = 2000
	for range n {
		raw(b, js, schemas.UsagePrefix+"gw", body)
	}
	for i := range b.N {
		l, err := NewLedger(Config{Name: fmt.Sprint("history-", i), MaxMessages: 500, MaxDelay: 50 * time.Millisecond}, nc, schemas.DecodeReport, quiet, nil)
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.Context())
		got := 0
		if err := l.Consume(ctx, func(_ context.Context, batch schemas.Batch[*schemas.Report]) error {
			if got += len(batch.Items); got == n {
				cancel()
			}
			return nil
		}); err != nil {
			b.Fatal(err)
		}
		cancel()
		if got != n {
			b.Fatalf("handled %d, want %d", got, n)
		}
	}
	b.ReportMetric(float64(b.N)*n*500/b.Elapsed().Seconds(), "entries/s")
}

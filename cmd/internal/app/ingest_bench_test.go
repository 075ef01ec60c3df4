package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	embedded "github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// BenchmarkIngest offers usage to the stream at a rate and says how far behind ClickHouse is, how many parts of usage a second inserts make, and what
// processor time a record costs each process, its start included: reports of 500 records of 8 gateways
// and 10,000 tenants, as the history of an aggregator reads and stores them. The servers are processes of their own; the stream
// syncs every message. WEIR_INGEST_RATE is in records a second (200000), WEIR_INGEST_SECONDS how long (20).
//
//	go test -run '^$' -bench Ingest -benchtime 1x ./cmd/internal/app
func BenchmarkIngest(b *testing.B) {
	setting := func(name string, otherwise int) int {
		v, ok := os.LookupEnv(name)
		if !ok {
			return otherwise
		}
		n, err := strconv.Atoi(v)
		if err != nil {
			b.Fatal(err)
		}
		return n
	}
	const entries, gateways = 500, 8
	rate, seconds := setting("WEIR_INGEST_RATE", 200_000), setting("WEIR_INGEST_SECONDS", 20)
	log := slog.New(slog.DiscardHandler)
	server, err := embedded.StartProcess(embedded.Config{Dir: b.TempDir()}, log)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = server.Stop() })
	database := embeddedtest.ClickHouse(b)
	store, err := clickhouse.Open(database.URL(), log)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = store.Close() })
	if err := store.Migrate(b.Context(), func(string) {}); err != nil {
		b.Fatal(err)
	}
	connect := func() (*nats.Conn, natsjs.JetStream) {
		nc, err := natsx.ConnectCheck(b.Context(), natsx.Config{URL: server.URL()}, log, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(nc.Close)
		js, err := natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(256))
		if err != nil {
			b.Fatal(err)
		}
		return nc, js
	}
	nc, js := connect()
	if err := natsx.Declare(b.Context(), js, natsx.Storage{}); err != nil {
		b.Fatal(err)
	}
	marks, err := jetstream.NewMarks(nc, nil, log)
	if err != nil {
		b.Fatal(err)
	}
	ledger, err := jetstream.NewLedger(jetstream.Config{Name: historyConsumer, Settled: marks.Settled}, nc, decodeReport, log, nil)
	if err != nil {
		b.Fatal(err)
	}
	reports := rate * seconds / entries
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	var work sync.WaitGroup
	work.Go(func() { _ = marks.Run(ctx) })
	var worst time.Duration
	stored, batches := 0, 0
	done := make(chan struct{})
	work.Go(func() {
		handle := marks.After(store.Reports)
		if err := ledger.Consume(ctx, func(ctx context.Context, batch schemas.Batch[*schemas.Report]) error {
			if err := handle(ctx, batch); err != nil {
				return err
			}
			worst = max(worst, time.Since(batch.Items[0].Arrived))
			batches++
			if stored += len(batch.Items); stored == reports {
				close(done)
			}
			return nil
		}); err != nil {
			b.Error(err)
		}
	})

	_, out := connect()
	b.ResetTimer()
	start := time.Now()
	for n := range reports {
		if wait := time.Until(start.Add(time.Duration(n) * time.Duration(entries) * time.Second / time.Duration(rate))); wait > 0 {
			time.Sleep(wait)
		}
		now := time.Now()
		r := &schemas.Report{Boot: "boot", Seq: uint64(n/gateways + 1), SealedAt: now, Usage: make([]schemas.Usage, entries)}
		for i := range r.Usage {
			u := rand.Float64()
			r.Usage[i] = schemas.Usage{Time: now, Tenant: "tenant-" + strconv.Itoa(int(10_000*u*u*u)), Route: "route-" + strconv.Itoa(i%20), Allowed: 1 + uint64(i%97), Cost: 1 + uint64(i%97)}
			if i%16 == 0 {
				r.Usage[i].Rule, r.Usage[i].Layer, r.Usage[i].Rejected, r.Usage[i].Allowed = "contract", "contract", r.Usage[i].Allowed, 0
			}
		}
		body, err := schemas.EncodeReport(r)
		if err != nil {
			b.Fatal(err)
		}
		msg := &nats.Msg{Subject: schemas.UsagePrefix + fmt.Sprint("gw-", n%gateways), Data: body, Header: nats.Header{"Content-Type": {schemas.ContentProtobuf}}}
		for {
			if _, err = out.PublishMsgAsync(msg); !errors.Is(err, natsjs.ErrTooManyStalledMsgs) {
				break
			}
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	offered := time.Since(start)
	select {
	case <-done:
	case <-time.After(5 * time.Minute):
		b.Fatal("not everything is stored in time")
	}
	took := time.Since(start)
	b.StopTimer()
	cancel()
	work.Wait()
	records := float64(reports * entries)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(records/offered.Seconds(), "offered/s")
	b.ReportMetric(records/took.Seconds(), "stored/s")
	b.ReportMetric(worst.Seconds(), "worst-lag-s")
	b.ReportMetric(float64(batches)/took.Seconds(), "batches/s")
	b.ReportMetric(usageParts(b, database.URL())/took.Seconds(), "parts/s")
	for name, pid := range map[string]int{"weir": os.Getpid(), "clickhouse": database.PID(), "nats": server.PID()} {
		b.ReportMetric(float64(processorTime(b, pid).Nanoseconds())/1000/records, name+"-µs/record")
	}
	total, err := store.Totals(b.Context(), start.Add(-time.Hour), time.Now().Add(time.Hour))
	if err != nil {
		b.Fatal(err)
	}
	if total.Requests == 0 {
		b.Fatal("nothing is stored")
	}
}

// usageParts is how many parts inserts have made of usage: each has a number, and a part that a merge made spans theirs.
func usageParts(b *testing.B, engine string) float64 {
	b.Helper()
	at, err := url.Parse(engine)
	if err != nil {
		b.Fatal(err)
	}
	at.RawQuery = url.Values{"database": {strings.Trim(at.Path, "/")}, "query": {"SELECT sum(max_block_number - min_block_number + 1) FROM system.parts WHERE table = 'usage' AND database = currentDatabase() AND active"}}.Encode()
	at.Path = "/"
	res, err := http.Get(at.String())
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		b.Fatal(err)
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(string(body)), 64)
	if err != nil {
		b.Fatalf("parts: %s", body)
	}
	return n
}

// processorTime is what a process has used so far, in ticks of 10 ms as Linux counts them for everybody.
func processorTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatal(err)
	}
	_, fields, _ := strings.Cut(string(stat), ") ")
	var ticks int
	for _, f := range strings.Fields(fields)[11:13] { // utime and stime
		n, err := strconv.Atoi(f)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

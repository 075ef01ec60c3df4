package clickhouse

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// acrossMonths is a report of n usage entries, half of them in October and half in November, with a bucket and a refusal.
func acrossMonths(gw string, seq uint64, n int) *schemas.Report {
	r := reportAt(gw, seq, time.Date(2026, 11, 1, 0, 0, -n/2, 0, time.UTC), n)
	r.Tokens = []schemas.Tokens{{Rule: "contract", Key: "tenant-1", Tenant: "tenant-1", RateNanos: 5e9, Capacity: 10, TokensLast: 4, Taken: 3, Cum: 3 * seq}}
	r.Rejections = []schemas.Rejection{{Time: r.Usage[0].Time, Tenant: "tenant-1", Route: "orders", Rule: "contract", Method: "GET", Path: "/orders", RetryAfterMS: 1500}}
	return r
}

func wantEntries(t *testing.T, s *Store, n uint64) {
	t.Helper()
	for _, table := range []string{"tokens", "rejections", "reports"} {
		for _, final := range []string{"", " FINAL"} {
			if got := number(t, s, "(SELECT count() FROM "+table+final+")"); got != n {
				t.Errorf("%s%s has %d rows, want %d", table, final, got, n)
			}
		}
	}
}

// B034: whatever the moment at which the connection of an insert is cut, the same range again makes it whole, once.
func TestB034CutConnections(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	direct := open(t, server.URL())
	p, through := newProxy(t, server.URL())
	s := unmigrated(t, through)
	s.Metrics = &Metrics{Stored: prometheus.NewCounter(prometheus.CounterOpts{Name: "stored"}), Degraded: prometheus.NewGauge(prometheus.GaugeOpts{Name: "degraded"})}
	metrics := func(degraded, stored float64) {
		t.Helper()
		if d, n := testutil.ToFloat64(s.Metrics.Degraded), testutil.ToFloat64(s.Metrics.Stored); d != degraded || n != stored {
			t.Errorf("degraded %v, stored %v, want %v, %v", d, n, degraded, stored)
		}
	}
	var n uint64
	for _, table := range []string{"usage", "tokens", "rejections", "reports"} {
		for _, f := range []fault{beforeData, midBlock, beforeReply} {
			n++
			b := batchOf(2*n-1, acrossMonths("a", n, 500), acrossMonths("b", n, 500))
			p.cutNext(f, table, nil)
			if err := s.Reports(t.Context(), b); !errors.Is(err, ErrUnreachable) {
				t.Errorf("Reports with the insert into %s cut %s = %v, want ErrUnreachable", table, f, err)
			}
			metrics(1, float64(n-1)*3000)
			if _, cuts := p.state(); cuts != int(n) {
				t.Fatalf("the proxy made %d cuts, want %d", cuts, n)
			}
			for range 2 { // and once more, as after a crash before the acknowledgement
				store(t, s, b)
				metrics(0, float64(n)*3000)
			}
			wantUsage(t, direct, n*1000, n*3000)
			wantEntries(t, direct, 2*n)
			if t.Failed() {
				t.Fatalf("after the insert into %s was cut %s", table, f)
			}
		}
	}
}

// B034: a hundred cuts leave neither connections nor goroutines behind.
func TestB034CutsLeakNothing(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	direct := open(t, server.URL())
	p, through := newProxy(t, server.URL())
	s := unmigrated(t, through)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10)))
	before := runtime.NumGoroutine()
	for i := range uint64(100) {
		b := batchOf(i+2, reportAt("a", i+2, noon, 10))
		p.cutNext(fault(i%3), "usage", nil)
		if err := s.Reports(t.Context(), b); err == nil {
			t.Fatal("Reports = nil though it was cut")
		}
		store(t, s, b)
	}
	wantUsage(t, direct, 1010, 3030)
	if open := s.conn.Stats().Open; open != 0 {
		t.Errorf("%d connections of the driver are in use, want 0", open)
	}
	// What a cut left to die needs a moment to do so.
	for range 3000 {
		if runtime.NumGoroutine() <= before {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if after := runtime.NumGoroutine(); after > before {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines, %d before 100 cuts:\n%s", after, before, buf[:runtime.Stack(buf, true)])
	}
	if open, _ := p.state(); open > 1 {
		t.Errorf("%d connections are open, want the pooled one", open)
	}
}

// The engine is killed while it stores, as it answers, and in between; started again, the range is made whole, once.
func TestKilledServer(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	direct := open(t, server.URL())
	p, through := newProxy(t, server.URL())
	s := unmigrated(t, through)
	var n uint64
	for _, table := range []string{"usage", "tokens", "reports"} {
		for _, after := range []time.Duration{-1, 0, 2 * time.Millisecond, 10 * time.Millisecond} {
			n++
			b := batchOf(2*n-1, acrossMonths("a", n, 500), acrossMonths("b", n, 500))
			f := whileStoring
			if after < 0 {
				f = beforeReply // it has stored it
			}
			killed := make(chan struct{})
			p.cutNext(f, table, func() {
				time.Sleep(max(after, 0))
				if err := server.Kill(); err != nil {
					t.Error(err)
				}
				close(killed)
			})
			err := s.Reports(t.Context(), b)
			<-killed
			if after < 0 && !errors.Is(err, ErrUnreachable) {
				t.Errorf("Reports = %v though the answer was lost, want ErrUnreachable", err)
			}
			if err := server.Restart(); err != nil {
				t.Fatal(err)
			}
			store(t, s, b)
			wantUsage(t, direct, n*1000, n*3000)
			wantEntries(t, direct, 2*n)
			if t.Failed() {
				t.Fatalf("after a kill %s into the insert into %s", after, table)
			}
		}
	}
}

// B070: four times the same batch is once, in the ledger and in every roll-up, also when others came between.
func TestB070SameBatchAgain(t *testing.T) {
	s := fresh(t)
	m := NewMetrics(prometheus.NewRegistry())
	m.Stored, m.Degraded = prometheus.NewCounter(prometheus.CounterOpts{Name: "stored"}), prometheus.NewGauge(prometheus.GaugeOpts{Name: "degraded"})
	s.Metrics = m
	b := batchOf(1, acrossMonths("a", 1, 333))
	for i := range uint64(4) {
		store(t, s, b)
		store(t, s, batchOf(i+2, acrossMonths("b", i+1, 10)))
		store(t, s, batchOf(i+2, acrossMonths("b", i+1, 10)))
	}
	wantUsage(t, s, 333+40, 999+120)
	wantEntries(t, s, 5)
	run(t, s, "OPTIMIZE TABLE usage FINAL")
	run(t, s, "OPTIMIZE TABLE usage_1d FINAL")
	wantUsage(t, s, 333+40, 999+120)
	if got := testutil.ToFloat64(m.Stored); got < 999+120 { // a batch that is done again after another is counted again
		t.Errorf("stored = %v", got)
	}
	if got := testutil.ToFloat64(m.Degraded); got != 0 {
		t.Errorf("degraded = %v, want 0", got)
	}
}

// The tokens do their part alone: without the row that says "this report is stored" (a crash before it), the inserts
// that were made are not made again.
func TestTokensAloneMakeARedoHarmless(t *testing.T) {
	s := fresh(t)
	b := batchOf(1, acrossMonths("a", 1, 300), acrossMonths("b", 1, 300))
	for range 3 {
		store(t, s, b)
		run(t, s, "TRUNCATE TABLE reports")
	}
	store(t, s, b)
	wantUsage(t, s, 600, 1800)
}

// The row that says "this report is stored" does its part alone: a redo outside of every window is harmless too.
func TestRedoOutsideTheWindow(t *testing.T) {
	s := fresh(t)
	for _, table := range ledgerTables {
		run(t, s, "ALTER TABLE "+table+" MODIFY SETTING non_replicated_deduplication_window = 1")
	}
	for i := range uint64(5) {
		store(t, s, batchOf(i+1, acrossMonths("a", i+1, 100)))
	}
	store(t, s, batchOf(1, acrossMonths("a", 1, 100)))
	wantUsage(t, s, 500, 1500)
	wantEntries(t, s, 5)
}

// A crash of the server between the ledger and a roll-up: the redo reaches the roll-up that was left out.
func TestRedoReachesTheRollupsLeftOut(t *testing.T) {
	for _, rollup := range []string{"usage_1m", "usage_1h", "usage_1d"} {
		s := fresh(t)
		store(t, s, batchOf(1, acrossMonths("a", 1, 100)))
		run(t, s, "ALTER TABLE "+rollup+" ADD CONSTRAINT broken CHECK cost > 1000000000")
		b := batchOf(2, acrossMonths("a", 2, 100))
		if err := s.Reports(t.Context(), b); err == nil {
			t.Fatalf("Reports = nil though %s takes nothing", rollup)
		}
		run(t, s, "ALTER TABLE "+rollup+" DROP CONSTRAINT broken")
		store(t, s, b)
		wantUsage(t, s, 200, 600)
	}
}

// B028: a report that the stream holds twice is counted once, everywhere, hours later and in the same batch too.
func TestB028SameReportInAnotherBatch(t *testing.T) {
	s := fresh(t)
	s.Metrics = NewMetrics(prometheus.NewRegistry())
	e := func() *schemas.Report { return acrossMonths("a", 1, 30) }
	store(t, s, batchOf(1, e(), e(), acrossMonths("b", 1, 30)))
	for _, first := range []uint64{60, 121, 180, 3600, 82800} {
		b := batchOf(first, e(), acrossMonths("b", first, 30))
		store(t, s, b)
		store(t, s, b)
		store(t, s, batchOf(first+2, e())) // nothing but what is stored
	}
	wantUsage(t, s, 30+6*30, 90+6*90)
	wantEntries(t, s, 7)
	if got := testutil.ToFloat64(s.Metrics.Duplicates); got < 11 {
		t.Errorf("duplicates = %v, want at least 11", got)
	}
}

// T12: a token is a pure function of the range, and no other range has it: not even the same numbers in a stream that
// was made anew, whose usage would be dropped without a word.
func TestT12TokenNamesARange(t *testing.T) {
	a := batchOf(5, acrossMonths("a", 1, 3), acrossMonths("a", 2, 3))
	if token(a) != token(batchOf(5, acrossMonths("a", 1, 3), acrossMonths("a", 2, 3))) {
		t.Error("the same range has two tokens")
	}
	seen := map[string]bool{token(a): true}
	b := batchOf(5, acrossMonths("a", 1, 3), acrossMonths("a", 2, 3), acrossMonths("a", 3, 3))
	c := batchOf(4, acrossMonths("a", 1, 3), acrossMonths("a", 2, 3))
	d := batchOf(5, acrossMonths("a", 1, 3), acrossMonths("a", 2, 3))
	d.Stream = "OTHER"
	anew := batchOf(5, acrossMonths("c", 1, 3), acrossMonths("c", 2, 3))
	for i := range anew.Items {
		anew.Items[i].Arrived = anew.Items[i].Arrived.Add(time.Hour)
	}
	for _, o := range []schemas.Batch[*schemas.Report]{b, c, d, anew} {
		if seen[token(o)] {
			t.Errorf("token %s names two ranges", token(o))
		}
		seen[token(o)] = true
	}
	s := fresh(t)
	store(t, s, a)
	store(t, s, anew)
	wantUsage(t, s, 12, 36)
}

// B074: a retry across the end of a month belongs to the month of the request, once.
func TestB074RetryAcrossTheMonth(t *testing.T) {
	s := fresh(t)
	at := time.Date(2025, 1, 31, 23, 59, 50, 0, time.UTC)
	for i, arrived := range []time.Time{at, at.Add(20 * time.Second)} {
		r := reportAt("a", 1, at, 1)
		r.Usage[0].Allowed = 1
		b := batchOf(uint64(i+1), r)
		b.Items[0].Arrived = arrived
		store(t, s, b)
	}
	february := time.Date(2025, 2, 1, 0, 0, 0, 0, time.UTC)
	for range 2 {
		for _, tt := range []struct {
			from, to time.Time
			want     int64
		}{{february.AddDate(0, -1, 0), february, 1}, {february, february.AddDate(0, 1, 0), 0}} {
			got, err := s.Totals(t.Context(), tt.from, tt.to)
			if err != nil || got.Requests != tt.want {
				t.Errorf("Totals(%s) = %d, %v, want %d", tt.from.Month(), got.Requests, err, tt.want)
			}
		}
		run(t, s, "OPTIMIZE TABLE usage FINAL")
	}
	wantUsage(t, s, 1, 1)
}

// A batch larger than one insert is cut at the same rows every time.
func TestLargeBatchIsSeveralInserts(t *testing.T) {
	s := fresh(t)
	var reports []*schemas.Report
	for i := range uint64(9) {
		reports = append(reports, reportAt("a", i+1, noon, 50_000))
	}
	b := batchOf(1, reports...)
	store(t, s, b)
	run(t, s, "TRUNCATE TABLE reports")
	store(t, s, b)
	wantUsage(t, s, 450_000, 1_350_000)
}

// A batch without anything, and reports that are all text and no usage, are stored like any other.
func TestEmptyBatchesAndReports(t *testing.T) {
	s := fresh(t)
	store(t, s, schemas.Batch[*schemas.Report]{Stream: schemas.UsageStream, First: 1, Last: 9})
	store(t, s, batchOf(10, &schemas.Report{Gateway: "a", Boot: "b", Seq: 1}))
	wantUsage(t, s, 0, 0)
	if got := number(t, s, "(SELECT count() FROM reports)"); got != 1 {
		t.Errorf("reports has %d rows, want 1", got)
	}
	if err := s.Alerts(t.Context(), schemas.Batch[*schemas.Alert]{}); err != nil {
		t.Error(err)
	}
}

// An implausible clock in a report moves nothing to another century: the flush takes its arrival.
func TestImplausibleSealedAt(t *testing.T) {
	s := fresh(t)
	for i, at := range []time.Time{{}, time.Date(2300, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(1900, 1, 1, 0, 0, 0, 0, time.UTC), time.Unix(0, 0)} {
		r := acrossMonths("a", uint64(i+1), 1)
		r.SealedAt = at
		store(t, s, batchOf(uint64(i+1), r))
	}
	if got := number(t, s, "(SELECT countIf(ts = received) FROM tokens)"); got != 4 {
		t.Errorf("%d of 4 flushes have the time of their arrival", got)
	}
}

func TestAlerts(t *testing.T) {
	s := fresh(t)
	batch := func(first uint64, alerts ...*schemas.Alert) schemas.Batch[*schemas.Alert] {
		b := schemas.Batch[*schemas.Alert]{Stream: schemas.AlertsStream, First: first, Last: first + uint64(len(alerts)) - 1}
		for i, a := range alerts {
			b.Items = append(b.Items, schemas.Delivered[*schemas.Alert]{Seq: first + uint64(i), Arrived: noon.Add(time.Duration(first) * time.Minute), Value: a})
		}
		return b
	}
	firing := &schemas.Alert{Type: schemas.AlertFiring, Name: "low-tokens", Severity: schemas.SeverityWarning, DedupKey: "low-tokens/acme", Tenant: "acme",
		Rule: "contract", Gateway: "gw-1", Summary: "acme has 4 % left", Value: 0.04, Threshold: 0.05, StartsAt: noon}
	resolved := *firing
	resolved.Type, resolved.EndsAt = schemas.AlertResolved, noon.Add(5*time.Minute)
	for range 2 {
		for _, b := range []schemas.Batch[*schemas.Alert]{batch(1, firing), batch(2, &resolved), batch(3, firing)} {
			if err := s.Alerts(t.Context(), b); err != nil {
				t.Fatal(err)
			}
		}
	}
	var got []string
	if err := s.each(t.Context(), "SELECT type, concat_ws('|', alert, severity, dedup_key, tenant, rule, gateway, summary, value, threshold, starts_at, ifNull(toString(ends_at), '')) FROM alerts FINAL ORDER BY type", func(typ, rest string) {
		got = append(got, typ+"|"+rest)
	}); err != nil {
		t.Fatal(err)
	}
	common := "|low-tokens|warning|low-tokens/acme|acme|contract|gw-1|acme has 4 % left|0.04|0.05|2026-11-15 12:00:00.000"
	want := []string{schemas.AlertFiring + common + "|", schemas.AlertResolved + common + "|2026-11-15 12:05:00.000"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("alerts = %q, want %q", got, want)
	}
	if got := number(t, s, "(SELECT count() FROM alerts)"); got != 4 {
		t.Errorf("%d alert rows without FINAL, want 4: one for each message of the stream, and the first batch again, which was put in doubt", got)
	}
	if err := s.conn.Exec(t.Context(), "ALTER TABLE alerts DELETE WHERE 1 SETTINGS mutations_sync = 2"); err != nil {
		t.Fatal(err)
	}
	s.Doubt() // the server was killed between the token and the rows, and another process does the batch again
	if err := s.Alerts(t.Context(), batch(3, firing)); err != nil {
		t.Fatal(err)
	}
	if got := number(t, s, "(SELECT count() FROM alerts)"); got != 1 {
		t.Errorf("%d alert rows after their server has lost them, want 1", got)
	}
}

// A gateway that begins again under an old boot counts from 1 under names that are stored: its reports are refused one by one, which
// makes dead letters of them, and never passed over as if they were the old ones sent again.
func TestAnotherReportOfAKnownNameIsRefused(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10), reportAt("a", 2, noon, 10)))
	more, later := reportAt("a", 1, noon, 20), reportAt("a", 2, noon.Add(time.Hour), 10) // other requests; as many, but others
	again, within := reportAt("a", 2, noon, 10), reportAt("b", 1, noon, 7)
	b := batchOf(3, more, again, later, reportAt("b", 1, noon, 5), within)
	for range 2 { // and when the range comes again
		err := s.Reports(t.Context(), b)
		var not schemas.Refused
		if !errors.As(err, &not) || len(not) != 3 || not[0].Seq != 3 || not[1].Seq != 5 || not[2].Seq != 7 ||
			!strings.Contains(not[0].Detail, "report 1 of boot boot-a is stored already, with 30 requests, and this is another one, with 60") {
			t.Fatalf("Reports = %v, want that 3, 5 and 7 are refused", err)
		}
		wantUsage(t, s, 25, 75)
	}
	// As stored by an earlier version, or by one whose column was dropped: the ledger knows. What it has not all of is taken for the same.
	run(t, s, "ALTER TABLE reports UPDATE content = 0 WHERE 1 SETTINGS mutations_sync = 2")
	for _, b := range []schemas.Batch[*schemas.Report]{batchOf(8, later), batchOf(10, reportAt("b", 1, noon, 5), later, again)} {
		err := s.Reports(t.Context(), b)
		var not schemas.Refused
		if !errors.As(err, &not) || len(not) != 1 || !strings.Contains(not[0].Detail, "report 2 of boot boot-a is stored already") {
			t.Errorf("Reports = %v, want that the other one is refused", err)
		}
		wantUsage(t, s, 25, 75)
	}
	run(t, s, "DELETE FROM usage WHERE gateway = 'a' AND seq = 2 AND entry = 3 SETTINGS mutations_sync = 2")
	store(t, s, batchOf(50, again, later))
}

// T12: a token that is known drops its rows without a word, so it must not come again with other rows. The stream has lost its end
// and was filled again: the same range, from the same first message on, holds another report.
func TestT12SameRangeOtherReports(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(5, reportAt("a", 1, noon, 10), reportAt("a", 2, noon, 10)))
	store(t, s, batchOf(5, reportAt("a", 1, noon, 10), reportAt("b", 1, noon, 10)))
	wantUsage(t, s, 30, 90)
	store(t, s, batchOf(7, reportAt("c", 1, noon, 10)))
	store(t, s, batchOf(7, reportAt("d", 1, noon, 10)))
	wantUsage(t, s, 50, 150)
}

// A server that is killed after it wrote a token down and before the part is there drops the rows when they come again, and says that all
// is well. The rows are stored under another token, and roll-ups, whether they had them or had lost them too, have them once.
func TestTokenOfRowsThatAreNotThere(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	s := open(t, server.URL())
	at := time.Now().UTC().Truncate(time.Hour)
	reports := []*schemas.Report{reportAt("a", 1, at, 50), reportAt("b", 1, at, 50)}
	for _, r := range reports {
		r.SealedAt = at.Add(time.Second)
		r.Tokens = []schemas.Tokens{{Rule: "contract", Key: "tenant-1", Tenant: "tenant-1", RateNanos: 5e9, Capacity: 10, Taken: 3, Cum: 3}}
		r.Rejections = []schemas.Rejection{{Time: at, Tenant: "tenant-1", Route: "orders", Rule: "contract", Method: "GET", Path: "/orders"}}
	}
	b := batchOf(1, reports...)
	tables := []struct {
		name string
		want uint64
	}{{"usage", 100}, {"tokens", 2}, {"rejections", 2}, {"reports", 2}}
	for _, gone := range []struct{ rows, tables string }{
		{"gateway = 'a'", "usage tokens rejections reports"}, {"1", "usage tokens rejections reports"}, {"1", "usage_1m reports"},
		{"1", "usage_1h reports"}, {"1", "usage_1d"}, {"1", "usage usage_1m reports"},
	} {
		if err := s.Reports(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		for _, table := range strings.Fields(gone.tables) {
			if err := s.conn.Exec(t.Context(), "ALTER TABLE "+table+" DELETE WHERE "+gone.rows+" SETTINGS mutations_sync = 2"); err != nil {
				t.Fatal(err)
			}
		}
		s = open(t, server.URL()) // another process, which does the range again
		if err := s.Reports(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		for _, table := range tables {
			if got := number(t, s, "(SELECT count() FROM "+table.name+" FINAL)"); got != table.want {
				t.Errorf("%s: %s has %d rows, want %d", gone, table.name, got, table.want)
			}
		}
		ledger := number(t, s, "(SELECT sum(allowed + rejected) FROM usage FINAL)")
		for _, table := range []string{"usage_1m", "usage_1h", "usage_1d"} {
			if got := number(t, s, "(SELECT sum(allowed + rejected) FROM "+table+")"); got != ledger {
				t.Errorf("%s: %s has %d requests, the ledger %d", gone, table, got, ledger)
			}
		}
	}
}

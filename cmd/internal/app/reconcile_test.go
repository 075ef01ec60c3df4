package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/ingest/spool"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

const patience = 30 * time.Second

// centre is an aggregator over real servers, and the books to look into.
type centre struct {
	t     *testing.T
	on    Servers
	nc    *nats.Conn
	js    natsjs.JetStream
	sql   ch.Conn
	books Books
	hour  time.Time // in which everything happens: the one before this
}

func newCentre(t *testing.T) *centre {
	t.Helper()
	c := newBooks(t, embeddedtest.Redis(t).URL())
	c.aggregator(slog.New(slog.DiscardHandler))
	return c
}

// newBooks is a centre without an aggregator.
func newBooks(t *testing.T, redisURL string) *centre {
	t.Helper()
	s := Servers{NATS: embeddedtest.NATS(t).URL(), Redis: redisURL, ClickHouse: embeddedtest.ClickHouse(t).URL()}
	log := slog.New(slog.DiscardHandler)
	var stack run.Stack
	t.Cleanup(func() {
		if err := stack.Stop(StopTimeout); err != nil {
			t.Error(err)
		}
	})
	nc, err := Connect(t.Context(), s.NATS, "test", true, NewMetrics(), &stack, log)
	if err != nil {
		t.Fatal(err)
	}
	store, err := clickhouse.Open(s.ClickHouse, log)
	if err != nil {
		t.Fatal(err)
	}
	stack.Defer("store", store.Close)
	if err := store.Migrate(t.Context(), func(string) {}); err != nil {
		t.Fatal(err)
	}
	opt, err := ch.ParseDSN(s.ClickHouse)
	if err != nil {
		t.Fatal(err)
	}
	sql, err := ch.Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	stack.Defer("sql", sql.Close)
	counter, err := redis.New(redis.Config{URL: s.Redis})
	if err != nil {
		t.Fatal(err)
	}
	stack.Defer("counter", counter.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return &centre{t: t, on: s, nc: nc, js: js, sql: sql, books: Books{NATS: nc, Counter: counter, Store: store}, hour: time.Now().UTC().Truncate(time.Hour)}
}

// aggregator runs one until the test ends, or until it is stopped.
func (c *centre) aggregator(log *slog.Logger) (stop func()) {
	c.t.Helper()
	var stack run.Stack
	nc, err := Connect(c.t.Context(), c.on.NATS, "test", true, NewMetrics(), &stack, log)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := NewAggregator(c.t.Context(), c.on, nc, NewMetrics(), &stack, log); err != nil {
		c.t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		if err := stack.Stop(StopTimeout); err != nil {
			c.t.Error(err)
		}
	})
	c.t.Cleanup(stop)
	return stop
}

// afterKill is the report of what gw had counted when it was killed, as the next process seals it.
const afterKill = 9

// report is report seq of gateway gw, which took 2 tokens since the one before.
func (c *centre) report(seq uint64) *schemas.Report {
	now := time.Now().UTC()
	r := &schemas.Report{Gateway: "gw", Boot: "boot", Seq: seq, PolicyVersion: 7, SealedAt: now,
		Usage:  []schemas.Usage{{Time: now, Tenant: "acme", Route: "orders", Allowed: 2, Cost: 2}},
		Tokens: []schemas.Tokens{{Rule: "contract", Key: "acme", Tenant: "acme", Mode: "enforce", RateNanos: 1e9, Capacity: 1000, LimitRateNanos: 1e9, LimitBurst: 1000, Taken: 2, Cum: 2 * seq, Window: time.Second}}}
	if seq == afterKill {
		r.PolicyVersion, r.Tokens = 0, nil
	}
	return r
}

func (c *centre) publish(seqs ...uint64) {
	c.t.Helper()
	for _, seq := range seqs {
		c.send(c.report(seq))
	}
}

func (c *centre) send(r *schemas.Report) {
	c.t.Helper()
	body, err := schemas.EncodeReport(r)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.js.PublishMsg(c.t.Context(), &nats.Msg{Subject: schemas.UsagePrefix + r.Gateway, Data: body, Header: nats.Header{"Content-Type": {schemas.ContentProtobuf}}}); err != nil {
		c.t.Fatal(err)
	}
}

// keeps puts reports into the spool of the gateway whose state is under data, which becomes a journal.
func (c *centre) keeps(data string, seqs ...uint64) {
	c.t.Helper()
	kept, err := spool.Open(spool.Config{}, filepath.Join(data, "gateways", "gw", "spool"), "gw", "boot", slog.New(slog.DiscardHandler), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = kept.Close() })
	for _, seq := range seqs {
		err = errors.Join(err, kept.Append(c.report(seq)))
	}
	if err := errors.Join(err, kept.Commit(1)); err != nil {
		c.t.Fatal(err)
	}
	if c.books.Journals, err = Journals(data); err != nil {
		c.t.Fatal(err)
	}
}

func (c *centre) exec(sql string) {
	c.t.Helper()
	if err := c.sql.Exec(c.t.Context(), sql); err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
}

// becomes waits until the differences are these: "between cause have/want" each, repetitions left out.
func (c *centre) becomes(want string) Reconciliation {
	c.t.Helper()
	var got string
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		r, err := Reconcile(c.t.Context(), c.books, c.hour, c.hour.Add(2*time.Hour))
		if err != nil {
			c.t.Fatal(err)
		}
		var all []string
		for _, d := range r.Differences {
			if one := fmt.Sprintf("%s %s %d/%d", d.Between, d.Cause, d.Have, d.Want); len(all) == 0 || all[len(all)-1] != one {
				all = append(all, one)
			}
		}
		if got = strings.Join(all, ", "); got == want {
			if r.Equal != (want == "") {
				c.t.Errorf("Equal = %t with %q", r.Equal, want)
			}
			return r
		}
		if time.Now().After(end) {
			c.t.Fatalf("differences are %q, want %q", got, want)
		}
	}
}

func TestReconcile(t *testing.T) {
	c := newCentre(t)
	c.publish(1, 2, 3)
	c.becomesStored(3)
	r := c.becomes("")
	for end := time.Now().Add(patience); r.Counts == 0 && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		r = c.becomes("") // Redis may hear of it a little later
	}
	if r.Requests != 6 || r.Counts != 1 {
		t.Errorf("reconciliation = %+v, want 6 requests and a count in Redis", r)
	}
	c.publish(5) // and 4 is nowhere
	c.becomesStored(4)
	c.becomes("reports lost 0/1, tokens lost 2/4")
	// Its gateway has it still.
	data := t.TempDir()
	if _, err := Journals(data); err == nil {
		t.Error("Journals of an empty folder = nil, want an error")
	}
	c.keeps(data, 3, 4)
	if r := c.becomes("reports late 0/2, tokens late 2/4"); r.Journals != 1 {
		t.Errorf("journals = %d, want 1", r.Journals)
	}
	c.publish(4)
	c.becomesStored(5)
	c.becomes("")
	// The history refuses one; it is replayed, twice.
	c.exec("ALTER TABLE usage ADD CONSTRAINT never CHECK seq != 6")
	c.publish(6, 7)
	c.becomesStored(6)
	c.becomes("reports refused 0/2")
	c.exec("ALTER TABLE usage DROP CONSTRAINT never")
	letters, err := jetstream.NewDeadLetters(c.nc)
	if err != nil {
		t.Fatal(err)
	}
	six, err := letters.Get(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := letters.Replay(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	c.becomesStored(7)
	if _, err := c.js.PublishMsg(t.Context(), &nats.Msg{Subject: six.Subject, Data: six.Body, Header: nats.Header{"Content-Type": {six.ContentType}}}); err != nil { // as a replay outside the duplicate window
		t.Fatal(err)
	}
	c.publish(8)
	c.becomesStored(8)
	if r := c.becomes(""); r.Requests != 16 {
		t.Errorf("requests = %d, want 16", r.Requests)
	}
	c.publish(afterKill)
	c.becomesStored(9)
	r = c.becomes("")
	if want := (Untold{Gateway: "gw", Boot: "boot", Tenants: 1, Tokens: 2}); len(r.Killed) == 1 {
		if want.Hour = r.Killed[0].Hour; r.Killed[0] != want || !want.Hour.Equal(want.Hour.Truncate(time.Hour)) {
			t.Errorf("killed: %+v, want %+v", r.Killed[0], want)
		}
	} else {
		t.Errorf("killed: %+v, want one", r.Killed)
	}

	c.exec("INSERT INTO usage_1m SELECT * FROM usage_1m LIMIT 1")
	c.becomesLike("usage_1m lost or doubled")
	if r, err := c.books.Store.Rebuild(t.Context(), c.hour, c.hour.Add(2*time.Hour), nil); err != nil || !r.Equal {
		t.Errorf("Rebuild = %+v, %v", r, err)
	}
	c.becomes("")
	c.exec("INSERT INTO usage SELECT * REPLACE (99 AS entry) FROM usage WHERE seq = 2 LIMIT 1")
	c.becomesLike("usage doubled 4/2")
	// What is lost beside it does not make up for it; and a roll-up has tokens of no request.
	c.exec("DELETE FROM usage WHERE seq = 3 SETTINGS mutations_sync = 2")
	c.becomesLike("usage lost 0/2")
	c.becomesLike("usage doubled 4/2")
	c.exec("INSERT INTO usage_1h SELECT * REPLACE ('another' AS route, toUInt64(0) AS allowed, toUInt64(0) AS rejected, toUInt64(5) AS cost) FROM usage_1h LIMIT 1")
	if d := c.find("usage_1h lost or doubled 0/-5"); d == nil || !strings.Contains(d.Detail, "(allowed +0, rejected +0, cost -5)") {
		t.Errorf("difference = %+v, want 5 tokens too many in usage_1h", d)
	}
}

// What a gateway had and cannot read is lost, whatever the accounts of the others say, until somebody has taken the file away; a gateway
// that writes into its journal has lost nothing.
func TestReconcileTellsOfADamagedJournal(t *testing.T) {
	c := newCentre(t)
	data, log := t.TempDir(), slog.New(slog.DiscardHandler)
	dir := filepath.Join(data, "gateways", "gw", "spool")
	kept, err := spool.Open(spool.Config{}, dir, "gw", "boot", log, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kept.Close() })
	for seq := uint64(1); seq <= 3; seq++ {
		if err := errors.Join(kept.Append(c.report(seq)), kept.Commit(uint32(seq))); err != nil {
			t.Fatal(err)
		}
	}
	if c.books.Journals, err = Journals(data); err != nil {
		t.Fatal(err)
	}
	c.publish(1)
	c.becomesStored(1)
	c.becomes("reports late 0/2")
	if err := kept.Close(); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"*.seg", "live-*"} {
		names, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(names) != 1 {
			t.Fatal(names, err)
		}
		info, err := os.Stat(names[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(names[0], info.Size()*2/3); err != nil {
			t.Fatal(err)
		}
	}
	c.becomes("journals lost 0/0, reports late 0/2") // one that no gateway has found: both files
	if kept, err = spool.Open(spool.Config{}, dir, "gw", "next", log, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kept.Close() })
	c.publish(2) // what could be read, and 3 is nowhere
	c.becomesStored(2)
	kept.Stored(schemas.Floor{Stream: "s"}, &schemas.Stored{Boots: map[string]schemas.Ranges{"boot": {{1, 2}}}})
	r := c.becomes("journals lost 0/0")
	if len(r.Differences) != 2 {
		t.Fatalf("differences = %+v, want two", r.Differences)
	}
	for i, part := range []string{".seg: |reports 1 to 2", "damaged-live-boot: "} {
		d := r.Differences[i]
		for _, p := range append(strings.Split(part, "|"), "damaged-", "operations.md") {
			if !strings.Contains(d.Detail, p) {
				t.Errorf("detail %q, want %q in it", d.Detail, p)
			}
		}
		if d.Gateway != "gw" || d.Boot != "boot" || !d.Hour.Equal(time.Now().UTC().Truncate(time.Hour)) && !d.Hour.Equal(c.hour) {
			t.Errorf("difference = %+v", d)
		}
	}
	names, err := filepath.Glob(filepath.Join(dir, "damaged-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	c.becomes("")
}

// Reports that a live gateway has yet explain, without its journal, what Redis has and ClickHouse has not, in hours that are over too;
// those of one that is gone do not.
func TestReconcileTakesHeartbeatsForACause(t *testing.T) {
	c := newCentre(t)
	told := time.Now().UTC().Add(-2 * settling)
	c.hour = told.Truncate(time.Hour)
	for seq := uint64(1); seq <= 3; seq++ {
		r := c.report(seq)
		r.SealedAt = c.hour.Add(-30 * time.Minute)
		r.Usage[0].Time = r.SealedAt
		c.send(r)
	}
	c.becomesStored(3)
	over := func(want string) {
		t.Helper()
		c.hour = c.hour.Add(-2 * time.Hour)
		c.becomes(want)
		c.hour = c.hour.Add(2 * time.Hour)
	}
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		r, err := Reconcile(t.Context(), c.books, c.hour.Add(-time.Hour), c.hour)
		if err != nil {
			t.Fatal(err)
		}
		if r.Counts == 1 && r.Equal {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%+v, want a count in Redis", r)
		}
	}
	c.exec("ALTER TABLE tokens DELETE WHERE seq = 3 SETTINGS mutations_sync = 2")
	over("redis lost 4/6")
	beat := func(at time.Time, mode string) {
		t.Helper()
		if err := c.books.Store.Gateways(t.Context(), []clickhouse.GatewaySample{{Time: at, Heartbeat: schemas.Heartbeat{Gateway: "gw", Boot: "boot", Mode: mode, Sealed: 4, PendingReports: 1}}}); err != nil {
			t.Fatal(err)
		}
	}
	beat(told, "synced")
	beat(time.Now(), "synced")
	over("redis in flight 4/6")
	c.becomes("reports late 0/1")
	beat(time.Now().Add(time.Millisecond), schemas.ModeStopped)
	over("redis lost 4/6")
	c.becomes("reports lost 0/1")
}

// However many lives a gateway's heartbeats make up, they are a few lines, and a number that no life comes to is none.
func TestReconcileSumsUpManyLives(t *testing.T) {
	c := newCentre(t)
	var beats []clickhouse.GatewaySample
	beat := func(boot string, sealed uint64) {
		beats = append(beats, clickhouse.GatewaySample{Time: c.hour, Heartbeat: schemas.Heartbeat{Gateway: "gw", Boot: boot, Mode: "synced", Sealed: sealed}})
	}
	for i := range uint64(500) {
		beat(fmt.Sprintf("life-%03d", i), 7)
		beat(fmt.Sprintf("absurd-%03d", i), 1<<53-1)
	}
	c.hour = c.hour.Add(-time.Hour)
	if err := c.books.Store.Gateways(t.Context(), beats); err != nil {
		t.Fatal(err)
	}
	r := c.becomes("reports lost 0/3430, reports lost 0/7")
	if len(r.Differences) != 1+fewLives {
		t.Fatalf("%d differences, want %d", len(r.Differences), 1+fewLives)
	}
	if d := r.Differences[0]; d.Gateway != "gw" || d.Boot != "" || !strings.HasPrefix(d.Detail, "reports of 490 more lives of this gateway, by its heartbeats, ") {
		t.Errorf("difference = %+v, want the rest of them", d)
	}
}

// Rows that no report tells of are a difference, and so is a life of which only the roll-ups know. What there is nothing to
// compare with is said.
func TestReconcileWithoutReports(t *testing.T) {
	c := newCentre(t)
	c.publish(1, 2, 3)
	c.becomesStored(3)
	if r := c.becomes(""); fmt.Sprint(r.Unseen) != "[journals]" && fmt.Sprint(r.Unseen) != "[redis journals]" { // Redis may hear of it a little later
		t.Errorf("unseen = %v, want journals", r.Unseen)
	}
	c.exec("INSERT INTO usage SELECT * REPLACE ('copied' AS boot) FROM usage")
	c.becomesLike("usage in flight 6/0") // its report may be on its way
	// Neither are rows explained by another report, which their gateway has not published yet.
	data := t.TempDir()
	c.keeps(data, 3, 4)
	c.exec("ALTER TABLE reports DELETE WHERE seq <= 2 SETTINGS mutations_sync = 2")
	c.becomesLike("reports late 0/2")
	for end := time.Now().Add(patience); c.find("usage doubled or half stored 6/0") == nil || c.find("usage doubled or half stored 4/0") == nil; time.Sleep(time.Second) {
		if time.Now().After(end) {
			t.Fatal("rows without a report are no difference")
		}
	}
	for _, table := range []string{"usage", "reports", "tokens"} {
		c.exec("ALTER TABLE " + table + " DELETE WHERE gateway = 'gw' SETTINGS mutations_sync = 2")
	}
	c.becomesLike("usage_1m lost or doubled")
	d := c.find("usage_1m lost or doubled")
	if d == nil || strings.Contains(d.Detail, "rebuild makes") || !strings.Contains(d.Detail, "lost from the ledger, or doubled in the roll-up") {
		t.Errorf("difference = %+v, want both causes, and no advice that removes the last trace", d)
	}
}

// A history whose table was dropped says which it is, and goes on as soon as the table is made again, beside it and without a restart.
func TestHistoryGoesOnWhenATableIsMadeAgain(t *testing.T) {
	c := newCentre(t)
	c.publish(1, 2)
	c.becomesStored(2)
	for n, table := range []string{"usage_1d", "usage"} {
		c.exec("DROP TABLE " + table)
		c.publish(uint64(3 + 2*n))
		for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
			if lines := c.books.Store.Problems(t.Context()); len(lines) == 1 && strings.Contains(lines[0], "lacks "+table+": run weir migrate") {
				break
			} else if time.Now().After(end) {
				t.Fatalf("Problems without %s = %q", table, lines)
			}
		}
		if err := c.books.Store.Migrate(t.Context(), func(string) {}); err != nil {
			t.Fatal(err)
		}
		c.publish(uint64(4 + 2*n))
		c.becomesStored(uint64(4 + 2*n))
	}
	r, err := c.books.Store.Rebuild(t.Context(), c.hour, c.hour.Add(2*time.Hour), nil)
	if err != nil || r.Equal || len(r.Short) != 1 || r.Short[0].Reports != 4 || r.Short[0].Requests != 8 {
		t.Errorf("Rebuild = %+v, %v, want what was in the ledger that was dropped left in the roll-ups", r, err)
	}
}

// A gateway that never names a policy is not killed by that.
func TestReportsWithoutAPolicyAreNoKill(t *testing.T) {
	c := newCentre(t)
	for seq := uint64(1); seq <= 3; seq++ {
		body := fmt.Sprintf(`{"boot":"b","seq":%d,"usage":[{"ts":%q,"tenant":"t%d","route":"r","allowed":1}]}`, seq, time.Now().UTC().Format(time.RFC3339Nano), seq)
		if _, err := c.js.PublishMsg(t.Context(), &nats.Msg{Subject: schemas.UsagePrefix + "small", Data: []byte(body), Header: nats.Header{"Content-Type": {schemas.ContentJSON}}}); err != nil {
			t.Fatal(err)
		}
	}
	c.publish(1, afterKill-1, afterKill)
	c.becomesStored(6)
	r, err := Reconcile(t.Context(), c.books, c.hour, c.hour.Add(2*time.Hour))
	if err != nil || len(r.Killed) != 1 || r.Killed[0].Gateway != "gw" {
		t.Errorf("killed: %+v, %v, want the one of gw", r.Killed, err)
	}
}

// Every report that is a dead letter is told as one, whatever its reason, and what nobody has as lost, apart from it. No letter
// explains what another gateway has lost.
func TestReconcileKnowsEveryDeadLetter(t *testing.T) {
	c := newCentre(t)
	send := func(gateway, body string) {
		t.Helper()
		if _, err := c.js.PublishMsg(t.Context(), &nats.Msg{Subject: schemas.UsagePrefix + gateway, Data: []byte(body), Header: nats.Header{"Content-Type": {schemas.ContentJSON}}}); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now().UTC()
	body := func(boot string, seq uint64, at time.Time, requests int) string {
		return fmt.Sprintf(`{"boot":%q,"seq":%d,"usage":[{"ts":%q,"tenant":"acme","route":"orders","allowed":%d}]}`, boot, seq, at.Format(time.RFC3339), requests)
	}
	late := now.Add(48 * time.Hour)
	for seq := uint64(1); seq <= 3; seq++ { // a boot of which nothing is stored
		send("gwclock", body("C1", seq, late, 100))
	}
	send("gwhole", body("H", 1, now, 1))
	send("gwhole", body("H", 3, late, 5))
	send("gwhole", strings.Replace(body("H", 4, now, 6), "{", `{"gateway":"gwother",`, 1))
	send("gwhole", body("H", 7, now, 1))
	send("gwother", body("H", 1, now, 1))
	send("gwother", body("H", 5, now, 1)) // and 2 to 4 are lost, whatever gwhole says
	send("gwrubbish", `{"boot":`)
	send("gwrubbish", `{"seq":1,"usage":[{"allowed":7}]}`)
	send("gwrubbish", body("R", 2, now, 1))
	send("gwrubbish", body("R", 1<<64-1, now, 9))
	if _, err := c.js.Publish(t.Context(), schemas.DeadPrefix+"webhook", []byte("an alert")); err != nil {
		t.Fatal(err)
	}
	c.becomesStored(5)
	want := []string{
		"gwclock/C1 refused 100: report 1: dead letter 1, time",
		"gwclock/C1 refused 100: report 2: dead letter 2, time",
		"gwclock/C1 refused 100: report 3: dead letter 3, time",
		"gwhole/H lost 1: report 2",
		"gwhole/H lost 2: reports 5 to 6",
		"gwhole/H refused 5: report 3: dead letter 4, time",
		"gwhole/H refused 6: report 4: dead letter 5, gateway",
		"gwother/H lost 3: reports 2 to 4",
		"gwrubbish/ refused 0: 1 dead letters, malformed, that do not say which reports they are, 1 of them not of how many requests",
		"gwrubbish/ refused 7: 1 dead letters, invalid, that do not say which reports they are",
		"gwrubbish/R lost 1: report 1, unless among the 2 dead letters of this gateway that do not say which they are",
		"gwrubbish/R refused 9: report 18446744073709551615: dead letter 9, invalid",
	}
	r, err := Reconcile(t.Context(), c.books, c.hour, c.hour.Add(2*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range r.Differences {
		if d.Between == "reports" {
			got = append(got, fmt.Sprintf("%s/%s %s %d: %s", d.Gateway, d.Boot, d.Cause, d.Want, regexp.MustCompile(`dead letter \d+`).ReplaceAllString(d.Detail, "dead letter N")))
		}
	}
	for i := range want {
		want[i] = regexp.MustCompile(`dead letter \d+`).ReplaceAllString(want[i], "dead letter N")
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("differences are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if r, err := Reconcile(t.Context(), c.books, c.hour.Add(47*time.Hour), c.hour.Add(50*time.Hour)); err != nil || !r.Equal {
		t.Errorf("the time that the letters speak of: %+v, %v, want nothing: they arrived now", r.Differences, err)
	}
	// What an earlier weir has stored under the last of all numbers is a long hole, and no negative one.
	c.exec("INSERT INTO reports SELECT * REPLACE (toUInt64(18446744073709551615) AS seq) FROM reports WHERE gateway = 'gwother' LIMIT 1")
	if d := c.find(fmt.Sprintf("reports lost 0/%d", math.MaxInt64)); d == nil || d.Detail != "reports 6 to 18446744073709551614" {
		t.Errorf("difference = %+v, want the hole", d)
	}
}

// Reports that add up to nearly 2^64 would take away what a tenant has used: they are refused, nothing changes, and it is told.
func TestReportsThatWouldMakeSumsWrap(t *testing.T) {
	c := newCentre(t)
	c.publish(1, 2)
	c.becomesStored(2)
	forged := func(gateway string, entries int, u schemas.Usage) {
		t.Helper()
		u.Time, u.Tenant, u.Route = time.Now().UTC(), "acme", "orders"
		body, err := schemas.EncodeReport(&schemas.Report{Boot: "forged", Seq: 1, Usage: slices.Repeat([]schemas.Usage{u}, entries)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.js.PublishMsg(t.Context(), &nats.Msg{Subject: schemas.UsagePrefix + gateway, Data: body, Header: nats.Header{"Content-Type": {schemas.ContentProtobuf}}}); err != nil {
			t.Fatal(err)
		}
	}
	part := uint64(math.MaxUint64)/2049 - 1 // which was in the bounds of an entry
	forged("gwallowed", 2049, schemas.Usage{Allowed: part})
	forged("gwcost", 2049, schemas.Usage{Allowed: 1, Cost: part})
	forged("gwmany", 10_000, schemas.Usage{Allowed: schemas.MaxReportRequests}) // each of which is in them now
	c.publish(3)
	c.becomesStored(3)
	for _, table := range []string{"usage FINAL", "usage_1m", "usage_1h", "usage_1d", "corrected_1h"} {
		var requests, cost int64
		if err := c.sql.QueryRow(t.Context(), "SELECT toInt64(sum(allowed + rejected)), toInt64(sum(cost)) FROM "+table).Scan(&requests, &cost); err != nil || requests != 6 || cost != 6 {
			t.Errorf("%s has %d requests of cost %d, %v, want 6 of 6", table, requests, cost, err)
		}
	}
	top, err := c.books.Store.Top(t.Context(), c.hour, c.hour.Add(2*time.Hour), 10, clickhouse.ByCost)
	if err != nil || len(top) != 1 || top[0].Requests != 6 || top[0].Cost != 6 {
		t.Errorf("Top = %+v, %v, want 6 requests of acme", top, err)
	}
	r, err := Reconcile(t.Context(), c.books, c.hour, c.hour.Add(2*time.Hour))
	if err != nil || r.Equal || r.Requests != 6 {
		t.Errorf("equal %t with %d requests, %v, want differences", r.Equal, r.Requests, err)
	}
	var got []string
	for _, d := range r.Differences {
		got = append(got, fmt.Sprintf("%s %s %d", d.Gateway, d.Cause, d.Want))
	}
	slices.Sort(got)
	if want := []string{"gwallowed refused 0", "gwcost refused 2049", "gwmany refused 0"}; !slices.Equal(got, want) {
		t.Errorf("differences are %q, want %q", got, want)
	}
}

// A letter that has the name of a report that is stored is refused all the same when it is another one; the same one is not.
func TestReconcileTellsAnotherReportOfTheSameName(t *testing.T) {
	c := newCentre(t)
	now := time.Now().UTC().Format(time.RFC3339)
	send := func(header nats.Header, subject, tenant string, allowed int) {
		t.Helper()
		header.Set("Content-Type", schemas.ContentJSON)
		body := fmt.Sprintf(`{"boot":"L1","seq":1,"usage":[{"ts":%q,"tenant":%q,"route":"r","allowed":%d}]}`, now, tenant, allowed)
		if _, err := c.js.PublishMsg(t.Context(), &nats.Msg{Subject: subject, Data: []byte(body), Header: header}); err != nil {
			t.Fatal(err)
		}
	}
	letter := func(tenant string, allowed int) {
		send(nats.Header{jetstream.HeaderSubject: {schemas.UsagePrefix + "f4"}, jetstream.HeaderArrived: {now}}, schemas.DeadPrefix+schemas.ReasonRefused, tenant, allowed)
	}
	send(nats.Header{}, schemas.UsagePrefix+"f4", "acme", 15)
	c.becomesStored(1)
	letter("acme", 15) // the stored one, as one that was replayed
	c.becomes("")
	send(nats.Header{}, schemas.UsagePrefix+"f4", "acme", 1_000_000)
	r := c.becomes("reports refused 0/1000000")
	if d := r.Differences[0]; !strings.HasSuffix(d.Detail, "; another one of this name is stored") {
		t.Errorf("difference = %+v, want it to say that it is another one", d)
	}
	letter("other", 15) // as many requests, of somebody else
	letter("other", 15) // counts once, however often it is there
	if r := c.becomes("reports refused 0/15, reports refused 0/1000000"); len(r.Differences) != 2 {
		t.Errorf("differences = %+v, want two", r.Differences)
	}
}

// find is a difference that begins so, as becomesLike tells it.
func (c *centre) find(want string) *Difference {
	c.t.Helper()
	r, err := Reconcile(c.t.Context(), c.books, c.hour, c.hour.Add(2*time.Hour))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, d := range r.Differences {
		if strings.HasPrefix(fmt.Sprintf("%s %s %d/%d", d.Between, d.Cause, d.Have, d.Want), want) {
			return &d
		}
	}
	return nil
}

func (c *centre) becomesStored(n uint64) {
	c.t.Helper()
	var got uint64
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if err := c.sql.QueryRow(c.t.Context(), "SELECT count() FROM reports FINAL").Scan(&got); err != nil {
			c.t.Fatal(err)
		}
		if got == n {
			return
		}
		if time.Now().After(end) {
			c.t.Fatalf("%d reports are stored, want %d", got, n)
		}
	}
}

func (c *centre) becomesLike(want string) {
	c.t.Helper()
	r, err := Reconcile(c.t.Context(), c.books, c.hour, c.hour.Add(2*time.Hour))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, d := range r.Differences {
		if strings.HasPrefix(fmt.Sprintf("%s %s %d/%d", d.Between, d.Cause, d.Have, d.Want), want) {
			return
		}
	}
	c.t.Errorf("differences are %+v, want %q among them", r.Differences, want)
}

// besideAlerter is a NATS with an alerter of its own, which must leave the alerts of others alone, and what stops with it at the end of the test.
func besideAlerter(t *testing.T, cfg AlerterConfig, log *slog.Logger) (natsjs.JetStream, *run.Stack) {
	t.Helper()
	var stack run.Stack
	t.Cleanup(func() { _ = stack.Stop(StopTimeout) })
	nc, err := Connect(t.Context(), embeddedtest.NATS(t).URL(), "test", true, NewMetrics(), &stack, log)
	if err != nil {
		t.Fatal(err)
	}
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewAlerter(t.Context(), cfg, nc, NewMetrics(), &stack, log); err != nil {
		t.Fatal(err)
	}
	return js, &stack
}

// An hour that does not add up fires once, whoever looks and however often, and is resolved when it does.
func TestAuditorTellsOnce(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	js, _ := besideAlerter(t, AlerterConfig{}, log)
	now := time.Date(2026, 11, 29, 12, 6, 0, 0, time.UTC)
	bad := now.Truncate(time.Hour).Add(-2 * time.Hour)
	var differences []Difference
	var failing error
	reconcile := func(_ context.Context, from, to time.Time) (Reconciliation, error) {
		var r Reconciliation
		for _, d := range differences {
			if !d.Hour.Before(from) && d.Hour.Before(to) {
				r.Differences = append(r.Differences, d)
			}
		}
		return r, failing
	}
	one, two := newAuditor(js, log, reconcile), newAuditor(js, log, reconcile)
	want := func(n uint64, text string) *schemas.Alert {
		t.Helper()
		return alertNumber(t, js, n, text)
	}
	audit := func(a *auditor, at time.Time) {
		t.Helper()
		if err := a.audit(t.Context(), at); err != nil {
			t.Fatal(err)
		}
	}
	audit(one, now)
	want(0, "equal")
	differences = []Difference{{Between: "reports", Cause: CauseLost, Gateway: "gw", Hour: bad, Want: 5, Have: 2},
		{Between: "redis", Cause: CauseInFlight, Hour: bad.Add(time.Hour), Want: 1},
		{Between: "reports", Cause: CauseLost, Hour: now.Truncate(time.Hour), Want: 1}} // not over
	audit(one, now)
	a := want(1, "an hour is different")
	if a.Type != schemas.AlertFiring || a.Name != AlertReconciliation || a.DedupKey != "reconciliation/2026-11-29T10" || a.Value != 3 || a.Severity != schemas.SeverityCritical ||
		!strings.Contains(a.Summary, "1 lost") || !strings.Contains(a.Summary, "--from 2026-11-29T10:00:00Z") {
		t.Errorf("alert = %+v", a)
	}
	audit(one, now)
	audit(two, now)
	audit(newAuditor(js, log, reconcile), now.Add(time.Minute))
	want(1, "looked at again")
	failing = errors.New("ClickHouse is away")
	if err := one.audit(t.Context(), now); !errors.Is(err, failing) {
		t.Errorf("audit = %v, want its cause", err)
	}
	want(1, "no data is not resolved")
	failing, differences = nil, nil
	audit(two, now.Add(40*time.Hour)) // also when the hour is long past
	if r := want(2, "equal again"); r.Type != schemas.AlertResolved || r.DedupKey != a.DedupKey || !r.StartsAt.Equal(a.StartsAt) || r.EndsAt.IsZero() {
		t.Errorf("resolved = %+v", r)
	}
	audit(one, now)
	want(2, "and told once")

	one.pause = 0
	arrives := 0 // with this look
	one.reconcile = func(context.Context, time.Time, time.Time) (Reconciliation, error) {
		if arrives--; arrives <= 0 {
			return Reconciliation{}, nil
		}
		return Reconciliation{Differences: []Difference{{Between: "reports", Cause: CauseInFlight, Gateway: "gw", Hour: bad, Want: 5}}}, nil
	}
	arrives = auditLooks
	audit(one, now.Add(time.Minute))
	want(2, "a report that was on its way, and arrived")
	arrives = auditLooks + 1
	audit(one, now.Add(2*time.Minute))
	if a := want(3, "a report that is on its way for long"); a.Type != schemas.AlertFiring || !strings.Contains(a.Summary, "1 in flight") {
		t.Errorf("alert = %+v", a)
	}
}

// What gets worse while it fires is told once more, by whoever sees it first, and reaches on-call as news of its own; what stays or gets
// better is not.
func TestAuditorTellsWhatGetsWorse(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	type news struct {
		id, kind, key string
		value         float64
	}
	onCall := make(chan news, 100)
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		a, bad := schemas.DecodeAlert(body)
		if err != nil || bad != nil {
			t.Error(err, bad)
			return
		}
		onCall <- news{r.Header.Get("webhook-id"), a.Type, a.DedupKey, a.Value}
	}))
	t.Cleanup(hook.Close)
	js, _ := besideAlerter(t, AlerterConfig{Webhook: conf.Secret(hook.URL)}, log)
	now := time.Date(2026, 11, 29, 12, 6, 0, 0, time.UTC)
	hour := now.Truncate(time.Hour).Add(-2 * time.Hour)
	var differences []Difference
	reconcile := func(context.Context, time.Time, time.Time) (Reconciliation, error) {
		return Reconciliation{Differences: differences}, nil
	}
	one, two := newAuditor(js, log, reconcile), newAuditor(js, log, reconcile)
	is := func(cause string, want, have int64) Difference {
		return Difference{Between: "reports", Cause: cause, Hour: hour, Want: want, Have: have}
	}
	n, known := uint64(0), map[string]bool{}
	for i, step := range []struct {
		what string
		are  []Difference
		told float64 // 0 is not at all
	}{
		{"one is lost", []Difference{is(CauseLost, 1, 0)}, 1},
		{"the same", []Difference{is(CauseLost, 1, 0)}, 0},
		{"millions more are late", []Difference{is(CauseLost, 1, 0), is(CauseLate, 4e6, 0)}, 4e6 + 1},
		{"they come in", []Difference{is(CauseLost, 1, 0), is(CauseInFlight, 5e6, 0)}, 0},
		{"and are late again", []Difference{is(CauseLost, 1, 0), is(CauseLate, 4e6, 0)}, 0},
		{"they are lost", []Difference{is(CauseLost, 1, 0), is(CauseLost, 4e6, 0)}, 4e6 + 1},
		{"some were not", []Difference{is(CauseLost, 1, 0), is(CauseLost, 3e6, 0), is(CauseLate, 1e6, 0)}, 0},
		{"all were", []Difference{is(CauseLost, 1, 0), is(CauseLost, 4e6, 0)}, 0},
		{"fewer, and one is doubled", []Difference{is(CauseLost, 1, 0), is(CauseDoubled, 1, 2)}, 2},
		{"a letter of unknown size", []Difference{is(CauseLost, 1, 0), is(CauseDoubled, 1, 2), is(CauseRefused, 0, 0)}, 3},
		{"the same, beyond what floats count", []Difference{is(CauseLost, math.MaxInt64, 0), is(CauseLost, 3, 0), is(CauseDoubled, 1, 2)}, math.MaxInt64},
		{"in another order", []Difference{is(CauseLost, 3, 0), is(CauseDoubled, 1, 2), is(CauseLost, math.MaxInt64, 0)}, 0},
	} {
		differences = step.are
		at := now.Add(time.Duration(i) * time.Hour)
		for _, a := range []*auditor{one, two, newAuditor(js, log, reconcile)} {
			a.pause = 0
			if err := a.audit(t.Context(), at); err != nil {
				t.Fatal(err)
			}
			at = at.Add(time.Minute)
		}
		if step.told == 0 {
			alertNumber(t, js, n, step.what)
			continue
		}
		n++
		if a := alertNumber(t, js, n, step.what); !a.StartsAt.Equal(now) {
			t.Errorf("%s: it began at %s, want %s", step.what, a.StartsAt, now)
		}
		select {
		case got := <-onCall:
			if got.kind != schemas.AlertFiring || got.key != auditKey(hour) || got.value != step.told || known[got.id] {
				t.Errorf("%s: on-call gets %+v, want %v under a new id", step.what, got, step.told)
			}
			known[got.id] = true
		case <-time.After(patience):
			t.Fatalf("%s: nothing reaches on-call", step.what)
		}
	}
	differences = nil
	if err := one.audit(t.Context(), now.Add(24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if a := alertNumber(t, js, n+1, "equal again"); a.Type != schemas.AlertResolved || a.Causes != nil {
		t.Errorf("resolved = %+v", a)
	}
	// What an older weir told has no causes.
	old := &schemas.Alert{Value: 5}
	if worse(old, map[string]float64{CauseLost: 5}) || !worse(old, map[string]float64{CauseLost: 6}) {
		t.Error("an older weir's alert is worse by its value alone")
	}
}

// A schema that a newer weir has migrated is warned of, and does not stop the older one; one of which a part is gone does not stop
// what works without.
func TestAwaitGoesOnWithASchemaThatIsNewerOrIncomplete(t *testing.T) {
	for _, kind := range []error{clickhouse.ErrSchemaNewer, clickhouse.ErrSchemaIncomplete} {
		var out strings.Builder
		err := await(t.Context(), "ClickHouse", slog.New(slog.NewTextHandler(&out, nil)), NewMetrics().store.Degraded, func(context.Context) error {
			return &clickhouse.Error{Kind: kind, Line: "which it is", Err: kind}
		}, clickhouse.ErrUnreachable)
		if err != nil || !strings.Contains(out.String(), "which it is") {
			t.Errorf("await = %v, log %q", err, out.String())
		}
	}
	if err := await(t.Context(), "ClickHouse", slog.New(slog.DiscardHandler), NewMetrics().store.Degraded, func(context.Context) error { return clickhouse.ErrSchema }, clickhouse.ErrUnreachable); !errors.Is(err, clickhouse.ErrSchema) {
		t.Errorf("await of an older schema = %v, want its error", err)
	}
}

// alertNumber is the last one in the stream of alerts, which has n of them; nil for none.
func alertNumber(t *testing.T, js natsjs.JetStream, n uint64, text string) *schemas.Alert {
	t.Helper()
	s, err := js.Stream(t.Context(), schemas.AlertsStream)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.CachedInfo().State.Msgs; got != n {
		t.Fatalf("%s: %d alerts, want %d", text, got, n)
	}
	if n == 0 {
		return nil
	}
	msg, err := s.GetMsg(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	a, err := schemas.DecodeAlert(msg.Data)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

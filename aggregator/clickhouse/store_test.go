package clickhouse

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"

	embedded "github.com/weirhq/weir/internal/embedded/clickhouse"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// open returns a store at url, with weir's schema.
func open(t testing.TB, url string) *Store {
	t.Helper()
	s := unmigrated(t, url)
	if err := s.Migrate(t.Context(), func(string) {}); err != nil {
		t.Fatal(err)
	}
	return s
}

func unmigrated(t testing.TB, url string) *Store {
	t.Helper()
	s, err := Open(url, embeddedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// fresh is a store on a server of its own.
func fresh(t testing.TB) *Store { return open(t, embeddedtest.ClickHouse(t).URL()) }

// number asks for one number.
func number(t testing.TB, s *Store, sql string) uint64 {
	t.Helper()
	var n uint64
	if err := s.conn.QueryRow(t.Context(), "SELECT toUInt64("+sql+")").Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

func run(t testing.TB, s *Store, sql string) {
	t.Helper()
	if err := s.conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// wantUsage checks the number of usage rows and of requests in every table that holds them, with and without FINAL.
func wantUsage(t testing.TB, s *Store, rows, requests uint64) {
	t.Helper()
	for sql, want := range map[string]uint64{
		"(SELECT count() FROM usage)":                                              rows,
		"(SELECT uniqExact(gateway, boot, seq, entry) FROM usage)":                 rows,
		"(SELECT count() FROM usage FINAL)":                                        rows,
		"(SELECT sum(allowed + rejected) FROM usage)":                              requests,
		"(SELECT sum(allowed + rejected) FROM usage FINAL)":                        requests,
		"(SELECT sum(allowed + rejected) FROM usage_1m)":                           requests,
		"(SELECT sum(allowed + rejected) FROM usage_1h)":                           requests,
		"(SELECT sum(allowed + rejected) FROM usage_1d)":                           requests,
		"(SELECT sum(requests) FROM reports)":                                      requests,
		"(SELECT sum(cost) FROM usage_1d) - (SELECT sum(cost) FROM usage)":         0,
		"(SELECT sum(rejected) FROM usage_1m) - (SELECT sum(rejected) FROM usage)": 0,
	} {
		if got := number(t, s, sql); got != want {
			t.Errorf("%s = %d, want %d", sql, got, want)
		}
	}
}

var noon = time.Date(2026, 11, 15, 12, 0, 0, 0, time.UTC)

// reportAt is report seq of gateway gw with n usage entries from start on, a second apart: 3 requests each on average.
func reportAt(gw string, seq uint64, start time.Time, n int) *schemas.Report {
	r := &schemas.Report{Gateway: gw, Boot: "boot-" + gw, Seq: seq, PolicyVersion: 7, SealedAt: start.Add(time.Minute)}
	for i := range n {
		u := schemas.Usage{Time: start.Add(time.Duration(i) * time.Second), Tenant: fmt.Sprintf("tenant-%d", i%7), Route: "orders", Allowed: 3, Cost: 4}
		if i%3 == 2 {
			u.Rule, u.Layer, u.Allowed, u.Rejected = "contract", "contract", 0, 3
		}
		r.Usage = append(r.Usage, u)
	}
	return r
}

// batchOf is the range of the stream that begins at first and holds reports, which arrive a second apart.
func batchOf(first uint64, reports ...*schemas.Report) schemas.Batch[*schemas.Report] {
	b := schemas.Batch[*schemas.Report]{Stream: schemas.UsageStream, First: first, Last: first + uint64(len(reports)) - 1}
	for i, r := range reports {
		seq := first + uint64(i)
		b.Items = append(b.Items, schemas.Delivered[*schemas.Report]{Seq: seq, Arrived: noon.Add(time.Hour + time.Duration(seq)*time.Second), Value: r})
	}
	return b
}

func store(t testing.TB, s *Store, b schemas.Batch[*schemas.Report]) {
	t.Helper()
	if err := s.Reports(t.Context(), b); err != nil {
		t.Fatal(err)
	}
}

func TestMigrateIsIdempotentAndChecked(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	s := unmigrated(t, strings.TrimSuffix(server.URL(), "weir")+"elsewhere")
	ctx := t.Context()

	err := s.Check(ctx) // no database
	if !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), "run weir migrate") || strings.Contains(err.Error(), "\n") {
		t.Errorf("Check without database = %v, want one line with ErrSchema", err)
	}
	if err := s.Reports(ctx, batchOf(1, reportAt("a", 1, noon, 1))); !errors.Is(err, ErrSchema) {
		t.Errorf("Reports without database = %v, want ErrSchema", err)
	}
	if err := s.createDatabase(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(ctx); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), "run weir migrate") {
		t.Errorf("Check of an empty database = %v, want ErrSchema", err)
	}

	var said []string
	for range 2 {
		if err := s.Migrate(ctx, func(line string) { said = append(said, line) }); err != nil {
			t.Fatal(err)
		}
	}
	if want := "applying 0001_usage|applying 0002_rollups|applying 0003_tokens|applying 0004_events|applying 0005_corrections|applying 0006_by_time|applying 0007_accuracy|applying 0008_accuracy_level|applying 0009_report_content|applying 0010_sealed|applying 0011_correction_refs|the schema is at 11|the schema is at 11"; strings.Join(said, "|") != want {
		t.Errorf("Migrate twice said %q, want %q", strings.Join(said, "|"), want)
	}
	if err := s.Check(ctx); err != nil {
		t.Errorf("Check after Migrate = %v", err)
	}
	store(t, s, batchOf(1, reportAt("a", 1, noon, 2)))
	wantUsage(t, s, 2, 6)

	// A crash between the statements of a migration and the note that it was applied.
	run(t, s, "DELETE FROM schema_migrations WHERE version = 11 SETTINGS mutations_sync = 2")
	if err := s.Check(ctx); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), "is at 10 and this weir wants 11: run weir migrate") {
		t.Errorf("Check of an older schema = %v", err)
	}
	if err := s.Migrate(ctx, func(string) {}); err != nil {
		t.Errorf("Migrate again after a crash = %v", err)
	}

	run(t, s, "INSERT INTO schema_migrations (version, name, checksum) VALUES (12, '0012_future', 'x')")
	if err := s.Check(ctx); !errors.Is(err, ErrSchemaNewer) || !errors.Is(err, ErrSchema) {
		t.Errorf("Check of a newer schema = %v, want ErrSchemaNewer", err)
	}
	run(t, s, "DELETE FROM schema_migrations WHERE version >= 11 SETTINGS mutations_sync = 2")
	run(t, s, "INSERT INTO schema_migrations (version, name, checksum) VALUES (11, '0011_correction_refs', 'x')")
	if err := s.Check(ctx); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), "0011_correction_refs was applied with other text") {
		t.Errorf("Check of a changed migration = %v", err)
	}
	if err := s.Migrate(ctx, func(string) {}); !errors.Is(err, ErrSchema) {
		t.Errorf("Migrate over a changed migration = %v, want ErrSchema", err)
	}
}

// Every migration can be repeated: each statement makes something that is not there yet, or makes it what it is.
func TestMigrationsAreIdempotentStatements(t *testing.T) {
	all, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		for _, sql := range m.statements {
			var code []string
			for line := range strings.Lines(sql) {
				if !strings.HasPrefix(line, "--") {
					code = append(code, line)
				}
			}
			text := strings.Join(code, "")
			creates := strings.HasPrefix(text, "CREATE ") && strings.Contains(text, " IF NOT EXISTS ") && strings.Count(text, "CREATE ") == 1
			alters := strings.HasPrefix(text, "ALTER TABLE ") && (strings.Contains(text, " IF NOT EXISTS ") || strings.Contains(text, " MODIFY SETTING ") || strings.Contains(text, " MATERIALIZE "))
			if !creates && !alters {
				t.Errorf("%s: %.60q is not one idempotent statement", m.name, text)
			}
		}
	}
}

// Whatever of the schema is gone, Check names it, Migrate makes it again as it was, and says so; inserts go on, and a rebuild makes the
// roll-ups equal again. The names are those of the migrations.
func TestMigrateMakesAgainWhatIsGone(t *testing.T) {
	s := fresh(t)
	schema := func() map[string]string {
		t.Helper()
		out := map[string]string{}
		if err := s.each(t.Context(), "SELECT name, create_table_query FROM system.tables WHERE database = currentDatabase()", func(name, create string) { out[name] = create }); err != nil {
			t.Fatal(err)
		}
		return out
	}
	whole := schema()
	all, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	drops := map[string]string{} // by what Check is to name
	later := map[string]bool{}   // what is not in the first text of its table
	for _, m := range all {
		for _, sql := range m.statements {
			switch o := objectOf(sql); {
			case o.table == "":
				t.Errorf("%s: nobody knows what %.60q makes", m.name, sql)
			case o.kind != "":
				later[o.String()] = true
				drops[o.String()] = "ALTER TABLE " + o.table + " DROP " + o.kind + " " + o.column
			default:
				drops[o.String()] = "DROP TABLE " + o.table
			}
		}
	}
	if want := len(whole) - 1 + 7; len(drops) != want { // less schema_migrations, and 5 columns and 2 projections
		t.Errorf("the migrations make %d things, want %d", len(drops), want)
	}
	var columns, known []string // of all tables; a few stand for the rest
	if err := s.each(t.Context(), `SELECT c.table, c.name FROM system.columns AS c JOIN system.tables AS t ON t.database = c.database AND t.name = c.table
		WHERE c.database = currentDatabase() AND t.engine LIKE '%MergeTree' AND c.table != 'schema_migrations'`, func(table, column string) { columns = append(columns, table+"."+column) }); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		for _, sql := range m.again() {
			if o := objectOf(sql); o.kind == "COLUMN" {
				known = append(known, o.String())
			}
		}
	}
	if slices.Sort(columns); !slices.Equal(columns, slices.Sorted(slices.Values(known))) {
		t.Errorf("tables have the columns\n%q, and Check knows\n%q", columns, known)
	}
	for _, name := range []string{"usage.policy_version", "usage.received", "reports.position", "tokens.rate", "corrections.reason", "alerts.ts"} {
		table, column, _ := strings.Cut(name, ".")
		drops[name] = "ALTER TABLE " + table + " DROP COLUMN " + column
	}
	lost := regexp.MustCompile(`^([a-z]+|correction_refs|policy_changes|throttle_updates)(\.[a-z_]+)?$`)
	seq := uint64(0)
	insert := func() error {
		seq++
		r := reportAt("a", seq, noon, 10)
		r.Tokens = []schemas.Tokens{{Rule: "contract", Key: "k", Taken: 1, Cum: seq}}
		return s.Reports(t.Context(), batchOf(seq, r))
	}
	for _, name := range slices.Sorted(maps.Keys(drops)) {
		if err := insert(); err != nil {
			t.Fatal(err)
		}
		run(t, s, drops[name]+" SETTINGS mutations_sync = 2")
		err := s.Check(t.Context())
		if !errors.Is(err, ErrSchemaIncomplete) || !errors.Is(err, ErrSchema) || !strings.HasSuffix(err.Error(), "lacks "+name+": run weir migrate") {
			t.Errorf("Check without %s = %v", name, err)
		}
		if lines := s.Problems(t.Context()); err != nil && !slices.Contains(lines, err.Error()) {
			t.Errorf("Problems without %s = %q", name, lines)
		}
		var said []string
		if err := s.Migrate(t.Context(), func(line string) { said = append(said, line) }); err != nil {
			t.Fatalf("Migrate without %s = %v", name, err)
		}
		if text := strings.Join(said, "\n"); !strings.Contains(text, "making "+name+" again") || strings.Contains(text, "history rebuild") != (strings.HasPrefix(name, "usage_") && !strings.HasSuffix(name, "by_time")) {
			t.Errorf("Migrate without %s says %q", name, text)
		}
		if text := said[0]; strings.Contains(text, "what it held is lost") != (lost.MatchString(name) && name != "tokens.rate") || strings.Contains(text, "invoices lack it") != (name == "corrections") {
			t.Errorf("Migrate without %s says %q of what is lost", name, text)
		}
		if err := s.Check(t.Context()); err != nil {
			t.Errorf("Check = %v", err)
		}
		for table, create := range schema() {
			if create != whole[table] && !later[name] { // such a column comes back as the last one
				t.Errorf("%s was\n%s, and is now\n%s", table, whole[table], create)
			}
		}
		if err := insert(); err != nil {
			t.Errorf("Reports after %s was made again = %v", name, err)
		}
		if name == "usage" || name == "reports" { // with them goes what nothing else has: begin anew
			for _, table := range []string{"usage", "usage_1m", "usage_1h", "usage_1d", "reports"} {
				run(t, s, "TRUNCATE TABLE "+table)
			}
		}
		if err := insert(); err != nil {
			t.Fatal(err)
		}
		if r, err := s.Rebuild(t.Context(), noon, noon.Add(time.Hour), nil); err != nil || !r.Equal || r.Half != 0 {
			t.Errorf("Rebuild after %s was made again = %+v, %v", name, r, err)
		}
		n := number(t, s, "(SELECT count() FROM usage)")
		wantUsage(t, s, n, 3*n)
	}
	if n := number(t, s, "(SELECT count() FROM usage)"); n < 100 {
		t.Errorf("%d rows, want those of the whole test", n)
	}
}

// What the inserts say of a column's type is what the migrations made of it, and the names that users hold on to are there.
func TestColumnsAreThoseOfTheSchema(t *testing.T) {
	s := fresh(t)
	types := map[string]string{}
	if err := s.each(t.Context(), "SELECT table || '.' || name, type FROM system.columns WHERE database = currentDatabase()", func(name, typ string) { types[name] = typ }); err != nil {
		t.Fatal(err)
	}
	check := func(table, name, typ string) {
		t.Helper()
		if got := types[table+"."+name]; got != typ {
			t.Errorf("column %s.%s is %q, want %q", table, name, got, typ)
		}
	}
	checkAll(check, usageTable)
	checkAll(check, tokensTable)
	checkAll(check, rejectionsTable)
	checkAll(check, reportsTable)
	checkAll(check, alertsTable)
	checkAll(check, gatewaysTable)
	checkAll(check, throttleTable)
	checkAll(check, correctionsTable)
	checkAll(check, refsTable)
	check("tokens", "rate", "Float64")
	for _, rollup := range rollups {
		for name, typ := range map[string]string{"ts": instant, "tenant": "String", "route": low, "rule": low, "allowed": "UInt64", "rejected": "UInt64", "cost": "UInt64"} {
			check(rollup.name, name, typ)
		}
	}
	check("policy_changes", "ts", instant)
}

func checkAll[R any](check func(table, name, typ string), t table[R]) {
	for _, c := range t.columns {
		check(t.name, c.name, c.typ)
	}
}

func TestOpenTouchesNoNetworkAndKeepsSecrets(t *testing.T) {
	for _, tt := range []struct {
		url, database string
		protocol      ch.Protocol
	}{
		{"clickhouse://u:secret@192.0.2.1:9000/weir", "weir", ch.Native},
		{"clickhouse://192.0.2.1:9000", "weir", ch.Native},
		{"http://192.0.2.1:8123/other", "other", ch.HTTP},
		{"https://192.0.2.1:8443", "weir", ch.HTTP},
	} {
		s, err := Open(tt.url, embeddedtest.Log(t))
		if err != nil {
			t.Errorf("Open(%s) = %v", tt.url, err)
			continue
		}
		if s.opt.Auth.Database != tt.database || s.opt.Protocol != tt.protocol || s.opt.ReadTimeout != readTimeout || s.opt.DialTimeout != dialTimeout {
			t.Errorf("Open(%s): database %s, protocol %s, timeouts %s %s", tt.url, s.opt.Auth.Database, s.opt.Protocol, s.opt.DialTimeout, s.opt.ReadTimeout)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "secret", "clickhouse://u:secret@", "clickhouse://u:sec/ret@h:9000", "http://u:secret@h:port/", "mysql://u:secret@h/weir", "clickhouse://u:secret%zz@h"} {
		if _, err := Open(bad, embeddedtest.Log(t)); err == nil || strings.Contains(err.Error(), "sec") || strings.Contains(err.Error(), "\n") {
			t.Errorf("Open(%q) = %v, want one line without the password", bad, err)
		}
	}
}

func TestErrorsAreOneClearTypedLine(t *testing.T) {
	server, err := embedded.Start(embedded.Config{Dir: t.TempDir(), Password: "right-horse"}, embeddedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	}()
	host := strings.TrimSuffix(strings.TrimPrefix(server.URL(), "http://"), "/")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}

	for _, tt := range []struct {
		name, url string
		kind      error
		says      string
	}{
		{"wrong password", "http://default:battery@" + host + "/weir", ErrDenied, "check the user and the password"},
		{"no database", "http://default:right-horse@" + host + "/weir", ErrSchema, "run weir migrate"},
		{"unreachable http", "http://default:right-horse@" + closed + "/weir", ErrUnreachable, "connection refused"},
		{"unreachable native", "clickhouse://default:right-horse@" + closed + "/weir", ErrUnreachable, "connection refused"},
		{"native to the HTTP port", "clickhouse://default:right-horse@" + host + "/weir?dial_timeout=300ms", ErrUnreachable, "no answer in time"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := unmigrated(t, tt.url)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			for doing, f := range map[string]func() error{
				"Check":   func() error { return s.Check(ctx) },
				"Reports": func() error { return s.Reports(ctx, batchOf(1, reportAt("a", 1, noon, 1))) },
				"Totals":  func() error { _, err := s.Totals(ctx, noon, noon.Add(time.Hour)); return err },
			} {
				err := f()
				if !errors.Is(err, tt.kind) || !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "\n") || len(err.Error()) > 400 {
					t.Errorf("%s = %v, want one line of kind %q that says %q", doing, err, tt.kind, tt.says)
				}
				for _, secret := range []string{"battery", "horse"} {
					if err != nil && strings.Contains(err.Error(), secret) {
						t.Errorf("%s = %v: it tells the password", doing, err)
					}
				}
				if !errors.Is(tt.kind, ErrUnreachable) && errors.Is(err, ErrUnreachable) {
					t.Errorf("%s = %v: is also ErrUnreachable", doing, err)
				}
			}
			if problems := s.Problems(ctx); !errors.Is(tt.kind, ErrSchema) && len(problems) != 1 {
				t.Errorf("Problems = %q, want one", problems)
			}
		})
	}
}

// forbidding is a store on the server at rawURL by a user that lacks the right to what, and how often that was refused.
func forbidding(t *testing.T, rawURL, what string) (s *Store, refused *atomic.Int64) {
	t.Helper()
	to, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	refused = &atomic.Int64{}
	pass := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: to.Scheme, Host: to.Host})
	pass.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	through := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		if strings.Contains(r.URL.Query().Get("query")+string(body), what) {
			refused.Add(1)
			w.Header().Set("X-ClickHouse-Exception-Code", "497")
			http.Error(w, "Code: 497. DB::Exception: weir: Not enough privileges. (ACCESS_DENIED)", http.StatusForbidden)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(through.Close)
	return unmigrated(t, strings.Replace(rawURL, to.Host, strings.TrimPrefix(through.URL, "http://"), 1)), refused
}

// A user that may not look at disks is told whether the server answers, no more.
func TestPingWithoutARightToSeeDisks(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	s, refused := forbidding(t, server.URL(), "system.disks")
	if err := s.Ping(t.Context()); err != nil || refused.Load() != 1 {
		t.Errorf("Ping = %v after %d refused questions, want nil after 1", err, refused.Load())
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Ping(t.Context()); err == nil {
		t.Error("Ping = nil of a server that is gone")
	}
}

// What the server refuses for good is named; what may pass comes again.
func TestRefusedForGoodAndTooManyParts(t *testing.T) {
	s := fresh(t)
	run(t, s, "ALTER TABLE usage ADD CONSTRAINT no_devil CHECK tenant != 'devil'")
	bad := reportAt("a", 1, noon, 1)
	bad.Usage[0].Tenant = "devil"
	wantRefused(t, s.Reports(t.Context(), batchOf(1, bad)), 1)

	// B038: code 252 passes; the caller keeps the batch, and the count is exact in the end.
	run(t, s, "SYSTEM STOP MERGES usage")
	store(t, s, batchOf(2, reportAt("b", 1, noon, 2)))
	run(t, s, "ALTER TABLE usage MODIFY SETTING parts_to_throw_insert = 1, parts_to_delay_insert = 1000")
	b := batchOf(3, reportAt("b", 2, noon, 2))
	err := s.Reports(t.Context(), b)
	if ex, ok := errors.AsType[*ch.Exception](err); !ok || ex.Code != 252 || errors.Is(err, ErrRefused) || errors.Is(err, ErrUnreachable) {
		t.Errorf("Reports with too many parts = %v, want code 252 and no kind", err)
	}
	run(t, s, "ALTER TABLE usage MODIFY SETTING parts_to_throw_insert = 3000")
	store(t, s, b)
	wantUsage(t, s, 4, 12)
}

// What somebody has made another of the schema is named, with what it is, what it should be, and the statement for it. Migrate runs it where
// nothing is held, and is an error that says it elsewhere.
func TestWhatIsNotAsItWasMade(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10)))
	alter := regexp.MustCompile(`(?:ALTER|ATTACH|DROP) TABLE .*$`)
	migrate := func() (string, error) {
		var said []string
		err := s.Migrate(t.Context(), func(line string) { said = append(said, line) })
		return strings.Join(said, "\n"), err
	}
	for _, tt := range []struct{ done, says string }{
		{"ALTER TABLE corrections MODIFY COLUMN allowed Int8", "corrections.allowed is Int8 and should be Int64: ALTER TABLE corrections MODIFY COLUMN allowed Int64"},
		{"ALTER TABLE usage MODIFY COLUMN allowed UInt16", "usage.allowed is UInt16 and should be UInt64: ALTER TABLE usage MODIFY COLUMN allowed UInt64 CODEC(T64, ZSTD(1))"},
		{"ALTER TABLE gateways MODIFY COLUMN sealed String", "gateways.sealed is String and should be UInt64: ALTER TABLE gateways MODIFY COLUMN sealed UInt64 DEFAULT 0 COMMENT 'number of"},
		{"ALTER TABLE alerts MODIFY COLUMN ends_at Nullable(DateTime64(6, 'UTC'))", "alerts.ends_at is Nullable(DateTime64(6, 'UTC')) and should be Nullable(DateTime64(3, 'UTC')): ALTER TABLE alerts MODIFY COLUMN"},
		{"DETACH TABLE corrections", "corrections is detached, with all that it holds: ATTACH TABLE corrections"},
		{"DROP TABLE usage_1d_mv|CREATE MATERIALIZED VIEW usage_1d_mv TO usage_1h AS SELECT ts, tenant, route, rule, allowed, rejected, cost FROM usage", "usage_1d_mv is no view of the kind that it was: see what it holds, DROP TABLE usage_1d_mv"},
	} {
		for sql := range strings.SplitSeq(tt.done, "|") {
			run(t, s, sql)
		}
		err := s.Check(t.Context())
		if !errors.Is(err, ErrSchemaIncomplete) || !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "lacks") || strings.Contains(err.Error(), "\n") {
			t.Fatalf("Check after %s = %v, want %s", tt.done, err, tt.says)
		}
		if lines := s.Problems(t.Context()); len(lines) != 1 || lines[0] != err.Error() {
			t.Errorf("Problems after %s = %q, want what Check says", tt.done, lines)
		}
		if said, again := migrate(); again == nil || again.Error() != err.Error() || said != "" {
			t.Errorf("Migrate after %s = %v and says %q, want what Check says", tt.done, again, said)
		}
		cure := strings.TrimSuffix(alter.FindString(err.Error()), ", and run weir migrate")
		run(t, s, cure)
		if said, err := migrate(); err != nil || strings.Contains(said, "again") != strings.HasPrefix(cure, "DROP") {
			t.Errorf("Migrate after %s = %v and says %q", cure, err, said)
		}
		if err := s.Check(t.Context()); err != nil {
			t.Errorf("Check after %s = %v", cure, err)
		}
	}
	if n := number(t, s, "(SELECT count() FROM usage)"); n != 10 {
		t.Errorf("%d rows of usage, want 10", n)
	}

	// Views hold nothing.
	seq := uint64(1)
	for name, sql := range map[string]string{
		"corrected_1h": "CREATE OR REPLACE VIEW corrected_1h AS SELECT ts, tenant, route, rule, toInt64(allowed) AS allowed, toInt64(rejected) AS rejected, toInt64(cost) AS cost FROM usage_1h",
		"usage_1h_mv":  "CREATE MATERIALIZED VIEW usage_1h_mv TO usage_1h AS SELECT toDateTime64(toStartOfHour(u.ts, 'UTC'), 3, 'UTC') AS ts, u.tenant AS tenant, u.route AS route, u.rule AS rule, sum(u.allowed) AS allowed, sum(u.rejected) AS rejected FROM usage AS u GROUP BY ts, tenant, route, rule",
	} {
		run(t, s, "DROP TABLE "+name)
		run(t, s, sql)
		if err := s.Check(t.Context()); !errors.Is(err, ErrSchemaIncomplete) || !strings.HasSuffix(err.Error(), name+" selects something else than it did: run weir migrate") {
			t.Errorf("Check of another %s = %v", name, err)
		}
		seq++
		store(t, s, batchOf(seq, reportAt("a", seq, noon, 10)))
		if said, err := migrate(); err != nil || !strings.Contains(said, "making "+name+" again, which selected something else") || strings.Contains(said, "usage_1h lacks") != (name == "usage_1h_mv") {
			t.Errorf("Migrate after another %s = %v and says %q", name, err, said)
		}
		if err := s.Check(t.Context()); err != nil {
			t.Errorf("Check after %s was made again = %v", name, err)
		}
		seq++
		store(t, s, batchOf(seq, reportAt("a", seq, noon, 10)))
		if r, err := s.Rebuild(t.Context(), noon, noon.Add(time.Hour), nil); err != nil || !r.Equal || (r.Rows > 0) != (name == "usage_1h_mv") {
			t.Errorf("Rebuild after %s was made again = %+v, %v", name, r, err)
		}
	}
	if _, err := s.Correct(t.Context(), Correction{Hour: noon, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: 5, Cost: 7, Reason: "lost", Author: "kim"}); err != nil {
		t.Fatal(err)
	}
	if n := number(t, s, "(SELECT sum(cost) FROM corrected_1h)"); n != 40*seq+7 {
		t.Errorf("a cost of %d is to be invoiced, want %d", n, 40*seq+7)
	}

	// Comments are anybody's.
	for _, sql := range []string{"ALTER TABLE corrected_1h MODIFY COMMENT 'it\\'s mine'", "ALTER TABLE usage_1d_mv MODIFY COMMENT 'mine'", "ALTER TABLE usage MODIFY COMMENT 'kept: TTL of 5 years'",
		"ALTER TABLE usage COMMENT COLUMN gateway 'no TTL here'", "ALTER TABLE corrections COMMENT COLUMN route 'before `allowed` UInt8, said it''s TTL'"} {
		run(t, s, sql)
	}
	if lines := s.Problems(t.Context()); len(lines) != 0 {
		t.Errorf("problems with comments: %q", lines)
	}
	if said, err := migrate(); err != nil || said != "the schema is at 11" {
		t.Errorf("Migrate with comments = %v and says %q", err, said)
	}

	// A newer weir may have meant it.
	run(t, s, "ALTER TABLE gateways MODIFY COLUMN sealed String")
	run(t, s, "INSERT INTO schema_migrations (version, name, checksum) VALUES (12, '0012_future', 'x')")
	if err := s.Check(t.Context()); !errors.Is(err, ErrSchemaNewer) {
		t.Errorf("Check of a newer schema = %v, want ErrSchemaNewer", err)
	}
	if _, err := migrate(); err != nil {
		t.Errorf("Migrate of a newer schema = %v", err)
	}
}

// A name that has to be quoted is taken out of a view's text as well.
func TestViewsOfADatabaseWithAnyName(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	s := open(t, strings.TrimSuffix(server.URL(), "weir")+"we-ir")
	if err := s.Check(t.Context()); err != nil {
		t.Errorf("Check = %v", err)
	}
}

// A table whose rows are never to go is named when they go by age; one that only moves to another disk is not.
func TestTTLOfTheLedger(t *testing.T) {
	s := fresh(t)
	for _, tt := range []struct{ done, says string }{
		{"ALTER TABLE usage MODIFY TTL toDateTime(ts) + INTERVAL 30 YEAR", "table usage has TTL toDateTime(ts) + toIntervalYear(30): its rows are deleted by age: ALTER TABLE usage REMOVE TTL"},
		{"ALTER TABLE corrections MODIFY TTL toDateTime(ts) + INTERVAL 1 DAY RECOMPRESS CODEC(ZSTD(9)), toDateTime(ts) + INTERVAL 30 YEAR", "table corrections has TTL"},
		{"ALTER TABLE usage_1d MODIFY COLUMN cost UInt64 TTL toDateTime(ts) + INTERVAL 30 YEAR", "column cost of table usage_1d has TTL toDateTime(ts) + toIntervalYear(30): what it holds is lost by age: ALTER TABLE usage_1d MODIFY COLUMN cost REMOVE TTL"},
		{"ALTER TABLE reports MODIFY TTL toDateTime(received) + INTERVAL 1 DAY RECOMPRESS CODEC(ZSTD(9))", ""},
		{"ALTER TABLE tokens MODIFY TTL toDateTime(received) + INTERVAL 10 DAY", ""},
	} {
		run(t, s, tt.done)
		lines := s.Problems(t.Context())
		var said []string
		if err := s.Migrate(t.Context(), func(line string) { said = append(said, line) }); err != nil {
			t.Fatal(err)
		}
		if tt.says == "" {
			if len(lines) != 0 || len(said) != 1 {
				t.Errorf("after %s: Problems = %q, Migrate says %q, want nothing", tt.done, lines, said)
			}
			continue
		}
		if len(lines) != 1 || !strings.HasPrefix(lines[0], tt.says) || said[0] != "warning: "+lines[0] {
			t.Fatalf("after %s: Problems = %q, Migrate says %q, want %s", tt.done, lines, said, tt.says)
		}
		run(t, s, lines[0][strings.Index(lines[0], "ALTER TABLE"):])
		if lines := s.Problems(t.Context()); len(lines) != 0 {
			t.Errorf("Problems after REMOVE TTL = %q", lines)
		}
	}
}

// A column that somebody has made too narrow takes nothing: ClickHouse would cut the numbers without a word. What is refused waits, and is
// no dead letter, and is stored when the column is what it was, by the same store.
func TestAColumnOfAnotherTypeCutsNothing(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 2)))
	big := reportAt("a", 2, noon, 1)
	big.Usage[0].Allowed = 70000
	b := batchOf(2, big)
	run(t, s, "ALTER TABLE usage MODIFY COLUMN allowed UInt16 SETTINGS mutations_sync = 2") // beside a store that has just inserted
	for range 2 {
		if err := s.Reports(t.Context(), b); !errors.Is(err, ErrSchema) || errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "UInt64 to UInt16") || !strings.Contains(err.Error(), "weir migrate") {
			t.Errorf("Reports into a narrow column = %v, want ErrSchema", err)
		}
	}
	wantUsage(t, s, 2, 6)
	run(t, s, "ALTER TABLE usage MODIFY COLUMN allowed UInt64 CODEC(T64, ZSTD(1)) SETTINGS mutations_sync = 2")
	store(t, s, b)
	wantUsage(t, s, 3, 70006)

	run(t, s, "ALTER TABLE corrections MODIFY COLUMN allowed Int8 SETTINGS mutations_sync = 2")
	c := Correction{Ref: "ticket-1", Hour: noon, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: 1000, Reason: "lost", Author: "kim"}
	if _, err := s.Correct(t.Context(), c); !errors.Is(err, ErrSchema) || strings.Contains(err.Error(), "unknown") {
		t.Errorf("Correct into a narrow column = %v, want ErrSchema and no doubt", err)
	}
	if n := number(t, s, "(SELECT count() FROM corrections)"); n != 0 {
		t.Errorf("%d corrections are stored, want 0", n)
	}
	run(t, s, "ALTER TABLE corrections MODIFY COLUMN allowed Int64 SETTINGS mutations_sync = 2")
	if _, err := s.Correct(t.Context(), c); err != nil {
		t.Errorf("Correct after the column is what it was = %v", err)
	}
}

func TestProblems(t *testing.T) {
	s := fresh(t)
	if got := s.Problems(t.Context()); len(got) != 0 {
		t.Errorf("Problems of a good server = %q, want none", got)
	}
	run(t, s, "ALTER TABLE usage_1h MODIFY SETTING non_replicated_deduplication_window = 0")
	run(t, s, "ALTER TABLE usage RESET SETTING fsync_after_insert")
	run(t, s, "ALTER TABLE gateways ADD COLUMN seen DateTime")
	run(t, s, "DELETE FROM schema_migrations WHERE version = 5 SETTINGS mutations_sync = 2")
	want := []string{"run weir migrate", "table usage has no fsync_after_insert", "table usage_1h has no non_replicated_deduplication_window", "column gateways.seen is DateTime"}
	got := s.Problems(t.Context())
	if len(got) != len(want) {
		t.Fatalf("Problems = %q, want %d", got, len(want))
	}
	for i := range want {
		if !strings.Contains(got[i], want[i]) {
			t.Errorf("Problems[%d] = %q, want %q in it", i, got[i], want[i])
		}
	}
}

// The settings that decide whether a redo is harmless are known to this engine, so that they are sent.
func TestEverySettingIsSent(t *testing.T) {
	s := fresh(t)
	got, err := s.settings(t.Context(), "token")
	if err != nil {
		t.Fatal(err)
	}
	for name := range insertSettings {
		if _, ok := got[name]; !ok {
			t.Errorf("setting %s is unknown to the engine and not sent", name)
		}
	}
	if got["async_insert"] != 0 || got["insert_deduplication_token"] != "token" || got["deduplicate_blocks_in_dependent_materialized_views"] != 1 {
		t.Errorf("settings = %v", got)
	}
	if _, err := json.Marshal(got); err != nil {
		t.Error(err)
	}
}

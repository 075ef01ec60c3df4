package clickhouse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"
)

func start(t testing.TB, cfg Config) *Server {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	s, err := Start(cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func open(t testing.TB, s *Server, change ...func(*clickhouse.Options)) driver.Conn {
	t.Helper()
	opts, err := clickhouse.ParseDSN(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(opts)
	}
	conn, err := clickhouse.Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func run(t testing.TB, conn driver.Conn, sql string, args ...any) {
	t.Helper()
	if err := conn.Exec(context.Background(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func number(t testing.TB, conn driver.Conn, sql string, args ...any) uint64 {
	t.Helper()
	var n uint64
	if err := conn.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// post sends a statement without clickhouse-go, as curl would.
func post(t testing.TB, s *Server, params url.Values, body io.Reader, change ...func(*http.Request)) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+s.addr+"/?"+params.Encode(), body)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(req)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, res.Header, string(text)
}

type row struct {
	ts             time.Time
	tenant, route  string
	allowed, extra uint64
}

func rows(n int, month time.Month) []row {
	out := make([]row, n)
	for i := range out {
		out[i] = row{time.Date(2026, month, 1, 0, 0, 0, i%1000*1e6, time.UTC), fmt.Sprintf("tenant-%d", i%500), "export", uint64(i), 1}
	}
	return out
}

const usage = `CREATE TABLE usage (ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)), tenant String, route LowCardinality(String), allowed UInt64, extra Nullable(UInt64))
	ENGINE = MergeTree PARTITION BY toYYYYMM(ts) ORDER BY (tenant, ts)`

// insert sends rows as one batch with settings of its own.
func insert(ctx context.Context, conn driver.Conn, rows []row, settings clickhouse.Settings) error {
	settings["async_insert"] = 0
	b, err := conn.PrepareBatch(clickhouse.Context(ctx, clickhouse.WithSettings(settings)), "INSERT INTO usage (ts, tenant, route, allowed, extra)")
	if err != nil {
		return err
	}
	for _, r := range rows {
		if err := b.Append(r.ts, r.tenant, r.route, r.allowed, &r.extra); err != nil {
			return errors.Join(err, b.Abort())
		}
	}
	return b.Send()
}

func token(s string) clickhouse.Settings {
	return clickhouse.Settings{"insert_deduplication_token": s}
}

func mustInsert(t testing.TB, conn driver.Conn, rows []row, settings clickhouse.Settings) {
	t.Helper()
	if err := insert(context.Background(), conn, rows, settings); err != nil {
		t.Fatal(err)
	}
}

func TestWhatAClientDoes(t *testing.T) {
	ctx := context.Background()
	s := start(t, Config{Database: "weir"})
	for name, compression := range map[string]*clickhouse.Compression{
		"plain": nil,
		"lz4":   {Method: clickhouse.CompressionLZ4},
		"zstd":  {Method: clickhouse.CompressionZSTD},
		"gzip":  {Method: clickhouse.CompressionGZIP, Level: 1},
	} {
		t.Run(name, func(t *testing.T) {
			conn := open(t, s, func(o *clickhouse.Options) { o.Compression = compression })
			if err := conn.Ping(ctx); err != nil {
				t.Fatal(err)
			}
			run(t, conn, "DROP TABLE IF EXISTS usage")
			run(t, conn, usage)
			want := rows(20_000, 3)
			mustInsert(t, conn, want, clickhouse.Settings{})
			got, err := conn.Query(ctx, "SELECT ts, tenant, route, allowed, extra FROM usage ORDER BY allowed")
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for ; got.Next(); n++ {
				var r row
				var extra *uint64
				if err := got.Scan(&r.ts, &r.tenant, &r.route, &r.allowed, &extra); err != nil {
					t.Fatal(err)
				}
				r.extra = *extra
				if r.ts = r.ts.UTC(); r != want[n] {
					t.Fatalf("row %d = %+v, want %+v", n, r, want[n])
				}
			}
			if err := got.Err(); err != nil || n != len(want) {
				t.Fatalf("rows = %d, %v, want %d", n, err, len(want))
			}
		})
	}
}

func TestEveryTypeThatTheSchemaMayUse(t *testing.T) {
	s := start(t, Config{})
	conn := open(t, s)
	const types = `SELECT toUInt8(1), toInt32(-1), 1.5::Float64, true, 'a\'b\n', toFixedString('ab', 4), toLowCardinality('lc'), toDate('2026-11-29'),
		toDateTime('2026-11-29 10:00:00', 'Asia/Shanghai'), toDateTime64(1.25, 6, 'UTC'), NULL::Nullable(String), [1, 2]::Array(UInt16),
		map('k', 1)::Map(String, UInt64), (1, 'x')::Tuple(UInt8, String), 'b'::Enum8('a' = 1, 'b' = 2), toDecimal64(1.25, 4), toIPv6('::1'),
		toUUID('01234567-89ab-cdef-0123-456789abcdef'), toLowCardinality(NULL::Nullable(String)) FROM numbers(3)`
	r, err := conn.Query(context.Background(), types)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for r.Next() {
		n++
		dest := make([]any, len(r.Columns()))
		for i, c := range r.ColumnTypes() {
			dest[i] = reflect.New(c.ScanType()).Interface()
		}
		if err := r.Scan(dest...); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Err(); err != nil || n != 3 {
		t.Fatalf("rows = %d, %v, want 3", n, err)
	}
	// A result without rows still names its columns or is empty, and is no error.
	if r, err = conn.Query(context.Background(), "SELECT 1 AS one WHERE 0"); err != nil || r.Next() || r.Err() != nil {
		t.Fatalf("empty result: %v, %v", err, r)
	}
}

func TestSettingsParametersAndDatabaseBelongToOneRequest(t *testing.T) {
	ctx := context.Background()
	s := start(t, Config{Database: "weir"})
	conn := open(t, s)
	const threads = "SELECT toUInt64(value) FROM system.settings WHERE name = 'max_block_size'"
	usual := number(t, conn, threads)
	set := clickhouse.Context(ctx, clickhouse.WithSettings(clickhouse.Settings{"max_block_size": 123}))
	var n uint64
	if err := conn.QueryRow(set, threads).Scan(&n); err != nil || n != 123 {
		t.Fatalf("max_block_size with a setting = %d, %v, want 123", n, err)
	}
	for range 2 * sessions { // whichever session serves it
		if got := number(t, conn, threads); got != usual {
			t.Fatalf("max_block_size of the next request = %d, want %d: the setting leaked", got, usual)
		}
	}

	var text string
	nasty := "it's \\ \t\n `x` {a:String} ; DROP TABLE usage --"
	if err := conn.QueryRow(clickhouse.Context(ctx, clickhouse.WithParameters(clickhouse.Parameters{"a": "7"})), "SELECT {a:UInt64} + 1").Scan(&n); err != nil || n != 8 {
		t.Fatalf("parameter = %d, %v, want 8", n, err)
	}
	if err := conn.QueryRow(ctx, "SELECT {a:String}", clickhouse.Named("a", nasty)).Scan(&text); err != nil || text != nasty {
		t.Fatalf("parameter = %q, %v, want %q", text, err, nasty)
	}
	if err := conn.QueryRow(ctx, "SELECT currentDatabase()").Scan(&text); err != nil || text != "weir" {
		t.Fatalf("currentDatabase() = %q, %v", text, err)
	}

	// A connection without a database can make one; one to a database that is not there is told so.
	bare := open(t, s, func(o *clickhouse.Options) { o.Auth.Database = "" })
	run(t, bare, "CREATE DATABASE other")
	other := func(name string) func(*clickhouse.Options) {
		return func(o *clickhouse.Options) { o.Auth.Database = name }
	}
	if err := open(t, s, other("other")).QueryRow(ctx, "SELECT currentDatabase()").Scan(&text); err != nil || text != "other" {
		t.Fatalf("currentDatabase() = %q, %v", text, err)
	}
	var ex *clickhouse.Exception
	if err := open(t, s, other("nowhere")).Ping(ctx); !errors.As(err, &ex) || ex.Code != 81 {
		t.Fatalf("Ping of a database that is not there = %v, want code 81", err)
	}
}

func TestErrorsAreThoseOfAServer(t *testing.T) {
	s := start(t, Config{Database: "weir"})
	for _, tt := range []struct {
		params       string
		body         string
		status, code int
		text         string
	}{
		{"", "SELECT * FROM nope", 404, 60, "Code: 60. DB::Exception: "},
		{"", "SELEKT 1", 400, 62, "(SYNTAX_ERROR)"},
		{"", "SELECT 1; SELECT 2", 400, 62, "Multi-statements are not allowed"},
		{"database=nowhere", "SELECT 1", 404, 81, "(UNKNOWN_DATABASE)"},
		{"no_such_setting=1", "SELECT 1", 404, 115, "(UNKNOWN_SETTING)"},
		{"max_threads%3D1,readonly=1", "SELECT 1", 404, 115, "(UNKNOWN_SETTING)"},
		{"max_threads=x", "SELECT 1", 400, 27, "Cannot parse"},
		{"session_id=1", "SELECT 1", 501, 48, "session_id"},
		{"max_execution_time=0.2", "SELECT sleepEachRow(0.1) FROM numbers(100) SETTINGS max_block_size = 1", 408, 159, "(TIMEOUT_EXCEEDED)"},
		{"", "SELECT throwIf(number = 5) FROM numbers(10)", 500, 395, "FUNCTION_THROW_IF"},
		{"query=INSERT+INTO+nope+FORMAT+Native", "xx", 404, 60, "(UNKNOWN_TABLE)"},
		{"decompress=1", "SELECT 1, this body is not compressed at all", 400, 33, "Read request body"},
		{"param_a=x", "SELECT {a:UInt64}", 400, 457, "(BAD_QUERY_PARAMETER)"},
	} {
		params, err := url.ParseQuery(tt.params)
		if err != nil {
			t.Fatal(err)
		}
		status, head, text := post(t, s, params, strings.NewReader(tt.body))
		if status != tt.status || head.Get("X-ClickHouse-Exception-Code") != fmt.Sprint(tt.code) || !strings.Contains(text, tt.text) || !strings.Contains(text, "(version ") {
			t.Errorf("%s %q = %d, code %s, %q; want %d, code %d, …%s…", tt.params, tt.body, status, head.Get("X-ClickHouse-Exception-Code"), text, tt.status, tt.code, tt.text)
		}
	}
	if status, _, text := post(t, s, nil, strings.NewReader("SELECT 1")); status != 200 || text != "1\n" {
		t.Fatalf("SELECT 1 after all that = %d %q", status, text)
	}
}

func TestStatementsInURLBodyAndBoth(t *testing.T) {
	s := start(t, Config{Database: "weir"})
	conn := open(t, s)
	run(t, conn, "CREATE TABLE j (a UInt64, s String) ENGINE = MergeTree ORDER BY a")
	in := func(query string) url.Values { return url.Values{"database": {"weir"}, "query": {query}} }
	for _, tt := range []struct {
		params url.Values
		body   string
	}{
		{in("INSERT INTO j FORMAT JSONEachRow"), "{\"a\":1,\"s\":\"x\"}\n\n{\"a\":2,\"s\":\"; FORMAT x\"}\n"},
		{url.Values{"database": {"weir"}}, "INSERT INTO j (a, s) FORMAT JSONEachRow\n{\"a\":3,\"s\":\"x\"}\n\n{\"a\":4}"},
		{in("INSERT INTO j (a, s) VALUES"), "(5, 'x'), (6, 'FORMAT TSV ')"},
		{in(""), "INSERT INTO j (a, s) VALUES (7, 'x'),\n\n(8, 'y')"},
		{in("INSERT INTO j SELECT number + 9, 'SELECT' FROM numbers(2)"), ""},
		{in("INSERT INTO j FORMAT TSV"), "11\tx\n12\ty\n"},
	} {
		if status, _, text := post(t, s, tt.params, strings.NewReader(tt.body)); status != 200 || text != "" {
			t.Errorf("%v %q = %d %q", tt.params, tt.body, status, text)
		}
	}
	if got := number(t, conn, "SELECT groupBitXor(a) * 1000 + count() FROM j"); got != 12*1000+12 { // 1^2^…^12 = 12
		t.Errorf("rows stored: %d, want 1 to 12 once each", got)
	}
	status, head, text := post(t, s, in("SELECT count() AS n FROM j FORMAT JSONEachRow"), nil)
	if status != 200 || text != "{\"n\":12}\n" || head.Get("X-ClickHouse-Format") != "JSONEachRow" {
		t.Errorf("SELECT in the URL = %d %q %q", status, text, head)
	}
}

// The rows of an insert whose body did not arrive whole are not stored, none of them.
func TestAHalfReceivedInsertStoresNothing(t *testing.T) {
	s := start(t, Config{Database: "weir"})
	conn := open(t, s)
	run(t, conn, "CREATE TABLE h (a UInt64) ENGINE = MergeTree ORDER BY a")
	for range 20 {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		body := strings.Repeat("1\n", 50_000)
		if _, err := fmt.Fprintf(c, "POST /?query=INSERT+INTO+weir.h+FORMAT+TSV HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", 2*len(body), body); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	// A body that ends where its sender lost its way is whole to HTTP, and wrong to the engine.
	if status, _, text := post(t, s, url.Values{"query": {"INSERT INTO weir.h FORMAT Native"}}, strings.NewReader("\x01\x02\x01a\x06UInt64\x00\x00")); status == 200 {
		t.Errorf("half a Native block was taken: %d %q", status, text)
	}
	if got := number(t, conn, "SELECT count() FROM h"); got != 0 {
		t.Fatalf("rows = %d, want 0", got)
	}
	if got := number(t, conn, "SELECT 1::UInt64"); got != 1 {
		t.Fatal("the server does not serve any more")
	}
}

func TestManyClientsAtOnce(t *testing.T) {
	s := start(t, Config{Database: "weir"})
	conn := open(t, s, func(o *clickhouse.Options) { o.MaxOpenConns = 16 })
	run(t, conn, usage)
	const clients, batches, size = 16, 8, 500
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for b := range batches {
				if err := insert(context.Background(), conn, rows(size, 3), token(fmt.Sprint(c, "/", b))); err != nil {
					t.Error(err)
				}
				var n uint64
				if err := conn.QueryRow(context.Background(), "SELECT count() FROM usage WHERE tenant = {t:String}", clickhouse.Named("t", "tenant-1")).Scan(&n); err != nil || n == 0 {
					t.Errorf("count = %d, %v", n, err)
				}
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(b)*time.Millisecond) // and some leave
				_ = conn.Exec(ctx, "SELECT sum(sipHash64(number)) FROM numbers(1000000)")
				cancel()
			}
		})
	}
	wg.Wait()
	if got := number(t, conn, "SELECT count() FROM usage"); got != clients*batches*size {
		t.Fatalf("rows = %d, want %d", got, clients*batches*size)
	}
}

func TestDataAndTokensSurviveSIGKILL(t *testing.T) {
	dir := t.TempDir()
	s := start(t, Config{Dir: dir, Database: "weir"})
	conn := open(t, s)
	run(t, conn, usage+" SETTINGS non_replicated_deduplication_window = 100")
	mustInsert(t, conn, rows(1000, 3), token("1-1000"))
	addr := s.URL()
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := conn.Ping(context.Background()); err == nil {
		t.Fatal("a killed server answered")
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	if s.URL() != addr {
		t.Fatalf("URL() = %s after Restart, want %s", s.URL(), addr)
	}
	mustInsert(t, conn, rows(1000, 3), token("1-1000")) // the retry of one that was stored
	mustInsert(t, conn, rows(1000, 3), token("1001-2000"))
	if got := number(t, conn, "SELECT count() FROM usage"); got != 2000 {
		t.Fatalf("rows = %d, want 2000", got)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if got := number(t, open(t, start(t, Config{Dir: dir, Database: "weir"})), "SELECT count() FROM usage"); got != 2000 {
		t.Fatalf("rows after a clean stop = %d, want 2000", got)
	}
}

// The traps of plain MergeTree that the history writer must know, as facts of the engine it runs on.

func TestT11WithoutAWindowTokensDoNothing(t *testing.T) {
	conn := open(t, start(t, Config{Database: "weir"}))
	run(t, conn, usage)
	for range 2 {
		mustInsert(t, conn, rows(10, 3), token("a"))
	}
	if got := number(t, conn, "SELECT count() FROM usage"); got != 20 {
		t.Errorf("rows = %d, want 20: the default window is 0", got)
	}
	run(t, conn, "ALTER TABLE usage MODIFY SETTING non_replicated_deduplication_window = 100")
	for range 2 {
		mustInsert(t, conn, rows(10, 3), token("b"))
	}
	if got := number(t, conn, "SELECT count() FROM usage"); got != 30 {
		t.Errorf("rows = %d, want 30: with a window the second insert is dropped", got)
	}
}

func TestT12SameTokenOtherRowsAreDroppedSilently(t *testing.T) {
	conn := open(t, start(t, Config{Database: "weir"}))
	run(t, conn, usage+" SETTINGS non_replicated_deduplication_window = 100")
	mustInsert(t, conn, rows(10, 3), token("a"))
	mustInsert(t, conn, rows(25, 3), token("a"))
	if got := number(t, conn, "SELECT count() FROM usage"); got != 10 {
		t.Fatalf("rows = %d, want 10", got)
	}
}

func TestT13WithoutATokenEqualBlocksAreOne(t *testing.T) {
	conn := open(t, start(t, Config{Database: "weir"}))
	run(t, conn, usage+" SETTINGS non_replicated_deduplication_window = 100")
	for range 2 {
		mustInsert(t, conn, rows(10, 3), clickhouse.Settings{})
	}
	if got := number(t, conn, "SELECT count() FROM usage"); got != 10 {
		t.Fatalf("rows = %d, want 10: two honest equal inserts count once", got)
	}
	for _, tok := range []string{"a", "b"} {
		mustInsert(t, conn, rows(10, 3), token(tok))
	}
	if got := number(t, conn, "SELECT count() FROM usage"); got != 30 {
		t.Fatalf("rows = %d, want 30: tokens tell them apart", got)
	}
}

func TestT15TokensAreCheckedPerPartition(t *testing.T) {
	conn := open(t, start(t, Config{Database: "weir"}))
	run(t, conn, usage+" SETTINGS non_replicated_deduplication_window = 100")
	mustInsert(t, conn, rows(10, 3), token("a"))
	mustInsert(t, conn, append(rows(10, 3), rows(10, 4)...), token("a"))
	if got := number(t, conn, "SELECT count() * 1000 + countIf(toMonth(ts) = 4) FROM usage"); got != 20*1000+10 {
		t.Fatalf("rows*1000 + April = %d, want 20010: March is dropped, April is stored", got)
	}
}

func TestAWholeBatchIsOneBlockToItsToken(t *testing.T) {
	conn := open(t, start(t, Config{Database: "weir"}))
	run(t, conn, usage+" SETTINGS non_replicated_deduplication_window = 1")
	for range 2 {
		mustInsert(t, conn, rows(100_000, 3), token("a"))
	}
	if got := number(t, conn, "SELECT count() FROM usage"); got != 100_000 {
		t.Fatalf("rows = %d, want 100000: more than one block per batch outgrows a window of 1", got)
	}
}

func TestPasswordIsAskedFor(t *testing.T) {
	s := start(t, Config{Database: "weir", Password: "right"})
	as := func(password string) func(*clickhouse.Options) {
		return func(o *clickhouse.Options) { o.Auth.Username, o.Auth.Password = "default", password }
	}
	var ex *clickhouse.Exception
	if err := open(t, s, as("wrong")).Ping(context.Background()); !errors.As(err, &ex) || ex.Code != 516 {
		t.Fatalf("Ping with a wrong password = %v, want code 516", err)
	}
	if err := open(t, s, as("right")).Ping(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func TestAddressInUseIsOneClearError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, err = Start(Config{Dir: t.TempDir(), Port: l.Addr().(*net.TCPAddr).Port}, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "address already in use") || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Fatalf("Start on a taken port = %v, want an error that says so and names %s", err, l.Addr())
	}
}

func TestTwoServersOnOneFolderIsOneClearError(t *testing.T) {
	dir := t.TempDir()
	start(t, Config{Dir: dir})
	_, err := Start(Config{Dir: dir}, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "another process") {
		t.Fatalf("Start on a folder in use = %v, want an error that says so and names it", err)
	}
}

func TestMissingLibraryNamesTheWaysOut(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv(LibraryEnv, "")
	_, err := Start(Config{Dir: t.TempDir()}, slog.New(slog.DiscardHandler))
	for _, want := range []string{filepath.Join(cache, "weir", "libchdb-"+LibraryVersion(), "libchdb.so"), LibraryEnv, "make libchdb"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Start without the library = %v, want an error that names %s", err, want)
		}
	}
	bad := filepath.Join(cache, "bad.so")
	if err := os.WriteFile(bad, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv(LibraryEnv, bad)
	if _, err := Start(Config{Dir: t.TempDir()}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), bad) {
		t.Errorf("Start with a bad library = %v, want an error that names it", err)
	}
}

func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		s := start(b, Config{Database: "weir"})
		b.StopTimer()
		if err := s.Stop(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

func BenchmarkQuery(b *testing.B) {
	conn := open(b, start(b, Config{Database: "weir"}))
	for b.Loop() {
		number(b, conn, "SELECT 1::UInt64")
	}
}

func BenchmarkInsert20k(b *testing.B) {
	conn := open(b, start(b, Config{Database: "weir"}))
	run(b, conn, usage+" SETTINGS non_replicated_deduplication_window = 100000")
	batch := rows(20_000, 3)
	n := 0
	for b.Loop() {
		n++
		mustInsert(b, conn, batch, token(fmt.Sprint(n)))
	}
	if got := number(b, conn, "SELECT count() FROM usage"); got != uint64(n*len(batch)) {
		b.Fatalf("rows = %d, want %d", got, n*len(batch))
	}
}

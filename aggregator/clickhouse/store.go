// Package clickhouse keeps weir's history in ClickHouse: it owns the schema, the inserts and the queries.
//
// Usage is money. A batch is inserted with one insert per table under a deduplication token that is a pure function of
// the batch's range, so that the answer to every doubt (a cut connection, a crash on either side) is to do the same
// range again. The row that says "this report is stored" is written last.
package clickhouse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
	"github.com/prometheus/client_golang/prometheus"
)

// Store is a ClickHouse database with weir's schema. Its methods may be called from any goroutine; batches of one stream
// are to be handled one after the other, in order.
type Store struct {
	Metrics *Metrics // set before the first use; nil counts nothing

	opt  *ch.Options
	conn ch.Conn
	log  *slog.Logger

	mu       sync.Mutex
	known    map[string]bool // settings that the server knows; nil until asked and after a failure
	counted  string          // token of the last batch counted as stored
	degraded bool            // the last batch was not stored
	sure     bool            // it was: no attempt at the next one was made before
	alerted  bool            // the same of batches of alerts
}

// Metrics are what a Store counts. A nil field counts nothing.
type Metrics struct {
	Stored     prometheus.Counter // weir_usage_units_total{stage="stored"}: requests of batches that are stored
	Degraded   prometheus.Gauge   // weir_degraded{part="clickhouse"}: 1 while batches do not store
	Duplicates prometheus.Counter // reports left out because another batch had stored them
	Dropped    prometheus.Counter // best-effort rows (heartbeats, throttle updates) that were not stored
}

// NewMetrics registers the counters that belong to this package alone. Stored and Degraded are shared with other
// packages, and are the caller's to fill.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Duplicates: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "weir_history_duplicate_reports_total", Help: "Reports left out of the history because an earlier batch had stored them."}),
		Dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "weir_history_dropped_rows_total", Help: "Heartbeats and throttle updates that were not written to the history."}),
	}
	reg.MustRegister(m.Duplicates, m.Dropped)
	return m
}

const (
	dialTimeout  = 5 * time.Second
	readTimeout  = 10 * time.Second
	maxOpenConns = 8

	maxLine = 300 // bytes of a server's words in an error

	// insertTimeout bounds one insert, also in its writing, which readTimeout does not.
	insertTimeout = 30 * time.Second
	queryTimeout  = 30 * time.Second

	// defaultDatabase is used when the URL names none.
	defaultDatabase = "weir"
)

// Open returns the store at rawURL: clickhouse://user:password@host:9000/database, or http:// and https:// with the HTTP
// port. The database is weir when the URL names none. Open touches no network; options of the driver may follow as a
// query (secure=true, dial_timeout=1s, compress=lz4). No error contains the password.
func Open(rawURL string, log *slog.Logger) (*Store, error) {
	opt, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	if opt.Auth.Database == "" {
		opt.Auth.Database = defaultDatabase
	}
	if opt.DialTimeout == 0 {
		opt.DialTimeout = dialTimeout
	}
	if opt.ReadTimeout == 0 {
		opt.ReadTimeout = readTimeout
	}
	if opt.MaxOpenConns == 0 {
		opt.MaxOpenConns = maxOpenConns
	}
	if opt.Compression == nil && opt.Protocol == ch.Native {
		opt.Compression = &ch.Compression{Method: ch.CompressionLZ4}
	}
	// A redo on another host is only safe where hosts share their deduplication log: stay with the first that answers.
	opt.ConnOpenStrategy = ch.ConnOpenInOrder
	conn, err := ch.Open(opt)
	if err != nil {
		return nil, fmt.Errorf("open ClickHouse %s: %w", strings.Join(opt.Addr, ","), err)
	}
	return &Store{opt: opt, conn: conn, log: log}, nil
}

// parseURL leaves the reason out of its errors: it could contain a part of the password.
func parseURL(rawURL string) (*ch.Options, error) {
	bad := errors.New("ClickHouse URL cannot be read, want clickhouse://user:password@host:9000/weir or http://host:8123/weir")
	u, err := url.Parse(rawURL)
	if err != nil || u.Host == "" {
		return nil, bad
	}
	switch q := u.Query(); u.Scheme {
	case "clickhouse", "http":
	case "https":
		if !q.Has("secure") { // without it the driver refuses https
			q.Set("secure", "true")
			u.RawQuery = q.Encode()
		}
	default:
		return nil, bad
	}
	opt, err := ch.ParseDSN(u.String())
	if err != nil {
		return nil, bad
	}
	return opt, nil
}

// Close releases the connections.
func (s *Store) Close() error { return s.conn.Close() }

// Version asks the server for its version, which is also the cheapest proof that it answers.
func (s *Store) Version(ctx context.Context) (string, error) {
	var v string
	if err := s.conn.QueryRow(ctx, "SELECT version()").Scan(&v); err != nil {
		return "", s.explain("ask for the version", err)
	}
	return v, nil
}

// Ping asks the server for a sign of life, and whether it has room for an insert. One that it does not answer ends with ctx.
func (s *Store) Ping(ctx context.Context) error {
	var room uint64
	err := s.conn.QueryRow(ch.Context(ctx, ch.WithSettings(ch.Settings{"log_queries": 0})), roomSQL).Scan(&room)
	switch ex, _ := errors.AsType[*ch.Exception](err); {
	case ex != nil && ex.Code == notGranted:
		err = s.conn.Ping(ctx)
	case err == nil && room < insertRoom:
		return &Error{Line: "ping: ClickHouse at " + strings.Join(s.opt.Addr, ",") + " has no room on its disk, and stores nothing"}
	}
	return s.explain("ping", err)
}

const (
	insertRoom = 1 << 20 // bytes that ClickHouse reserves for the smallest insert
	notGranted = 497     // its code for a user that lacks a right

	// roomSQL asks for the room on the disk of the ledger that has most of it. Without a ledger there is none to look at.
	roomSQL = `SELECT ifNull(maxOrNull(unreserved_space), 18446744073709551615) FROM system.disks WHERE name IN (
		SELECT arrayJoin(disks) FROM system.storage_policies WHERE policy_name IN (
			SELECT storage_policy FROM system.tables WHERE database = currentDatabase() AND name = 'usage'))`
)

// What an error is about, for errors.Is. An error that is none of these is the server's, and may pass: too many parts,
// no memory, no disk space, shutting down.
var (
	ErrUnreachable = errors.New("ClickHouse is unreachable")
	ErrDenied      = errors.New("ClickHouse denied access")
	ErrSchema      = errors.New("the schema is not the one of this weir")
	ErrRefused     = errors.New("ClickHouse refused the data") // for good: the same rows will be refused again
)

// Error is one clear line about a server that did not do what was asked.
type Error struct {
	Kind error // one of the Err values, nil for anything else
	Line string
	Err  error // the driver's
}

func (e *Error) Error() string { return e.Line }

// Unwrap gives both, the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Kind == nil {
		return []error{e.Err}
	}
	return []error{e.Kind, e.Err}
}

// kinds are the server's exception codes that mean something to a caller.
var kinds = map[int32]error{
	192: ErrDenied, 193: ErrDenied, 194: ErrDenied, 497: ErrDenied, 516: ErrDenied,
	8: ErrSchema, 10: ErrSchema, 16: ErrSchema, 47: ErrSchema, 53: ErrSchema, 60: ErrSchema, 81: ErrSchema,
	6: ErrRefused, 26: ErrRefused, 27: ErrRefused, 43: ErrRefused, 69: ErrRefused, 70: ErrRefused, 117: ErrRefused,
	131: ErrRefused, 349: ErrRefused, 407: ErrRefused, 469: ErrRefused,
}

// explain says in one line what the driver's err means for what we were doing.
func (s *Store) explain(doing string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return &Error{Kind: e.Kind, Line: doing + ": " + e.Line, Err: err}
	}
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	at := strings.Join(s.opt.Addr, ",")
	if ex, ok := errors.AsType[*ch.Exception](err); ok {
		e := &Error{Kind: kinds[ex.Code], Err: err}
		text := oneLine(ex.Message)
		switch {
		case errors.Is(e.Kind, ErrDenied):
			e.Line = fmt.Sprintf("%s: ClickHouse at %s denied access to user %q: check the user and the password in its URL (code %d)", doing, at, s.user(), ex.Code)
			if ex.Code == notGranted {
				e.Line = fmt.Sprintf("%s: ClickHouse at %s: user %q lacks a right: %s", doing, at, s.user(), text)
			}
		case errors.Is(e.Kind, ErrSchema):
			e.Line = fmt.Sprintf("%s: ClickHouse at %s has no schema of weir in database %q, not all of it, or another: run weir migrate (code %d: %s)", doing, at, s.opt.Auth.Database, ex.Code, text)
		default:
			e.Line = fmt.Sprintf("%s: ClickHouse at %s: code %d: %s", doing, at, ex.Code, text)
		}
		return e
	}
	if !unreachable(err) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return &Error{Kind: ErrUnreachable, Line: fmt.Sprintf("%s: ClickHouse at %s is unreachable: %s", doing, at, reason(err)), Err: err}
}

// unreachable says that err is of the way to the server, not of the server.
func unreachable(err error) bool {
	for _, e := range []error{context.DeadlineExceeded, ch.ErrAcquireConnTimeout, ch.ErrConnectionClosed, io.EOF, io.ErrUnexpectedEOF, syscall.EPIPE, syscall.ECONNRESET} {
		if errors.Is(err, e) {
			return true
		}
	}
	if _, ok := errors.AsType[*ch.HTTPError](err); ok { // it answers, but is no ClickHouse
		return true
	}
	_, ok := errors.AsType[net.Error](err)
	return ok
}

// reason is the innermost text that helps: the URL that the HTTP client adds is long, and says nothing new.
func reason(err error) string {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op
	}
	n, _ := errors.AsType[net.Error](err)
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, ch.ErrAcquireConnTimeout), n != nil && n.Timeout():
		return "no answer in time"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "it closed the connection"
	}
	return oneLine(err.Error())
}

// oneLine is the start of s, without line breaks and without the server's version.
func oneLine(s string) string {
	s, _, _ = strings.Cut(s, " (version ")
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxLine {
		s = strings.ToValidUTF8(s[:maxLine], "") + "…"
	}
	return s
}

func (s *Store) user() string {
	if s.opt.Auth.Username == "" {
		return "default"
	}
	return s.opt.Auth.Username
}

// insertSettings say how a batch is inserted. Defaults moved over the years, and may differ per user, so every one that
// decides whether a redo is harmless is said each time.
var insertSettings = ch.Settings{
	"async_insert":          0, // we batch ourselves; an answer means stored
	"wait_for_async_insert": 1,
	"insert_deduplicate":    1,
	"deduplicate_insert":    "enable", // 26.x: has the last word over insert_deduplicate
	"deduplicate_blocks_in_dependent_materialized_views": 1, // a redo reaches the roll-ups that a crash left out
	"materialized_views_ignore_errors":                   0,
	"parallel_view_processing":                           1, // the roll-ups cost more than the ledger; a redo makes up for any subset
	"optimize_on_insert":                                 0, // rows of equal key meet in merges and under FINAL, and a view's rows have none
	"group_by_two_level_threshold":                       0, // the views group one block on one core
	"group_by_two_level_threshold_bytes":                 0,
	"max_insert_block_size":                              1 << 20, // above maxRows: one block, so one token
	"min_insert_block_size_rows":                         1 << 20,
	"min_insert_block_size_bytes":                        0,
	"min_insert_block_size_rows_for_materialized_views":  0,
	"min_insert_block_size_bytes_for_materialized_views": 0,
	"max_partitions_per_insert_block":                    100, // a report spans at most 14 months
	"input_format_native_allow_types_conversion":         0,   // a column of another type is refused, not filled with what is left of the numbers
	"insert_deduplication_token":                         "",
}

// settings are insertSettings for a token, less those that the server is too old to know. Errors are the driver's.
func (s *Store) settings(ctx context.Context, token string) (ch.Settings, error) {
	s.mu.Lock()
	known := s.known
	s.mu.Unlock()
	if known == nil {
		var err error
		if known, err = s.ask(ctx); err != nil {
			return nil, err
		}
		s.mu.Lock()
		s.known = known
		s.mu.Unlock()
	}
	out := ch.Settings{}
	for name, value := range insertSettings {
		if known[name] {
			out[name] = value
		}
	}
	if token != "" {
		out["insert_deduplication_token"] = token
		return out, nil
	}
	out["insert_deduplicate"] = 0
	if known["deduplicate_insert"] {
		out["deduplicate_insert"] = "disable"
	}
	return out, nil
}

// ask which of insertSettings the server knows.
func (s *Store) ask(ctx context.Context) (map[string]bool, error) {
	known := map[string]bool{}
	err := s.each(ctx, "SELECT name, '' FROM system.settings WHERE name IN {names:Array(String)}",
		func(name, _ string) { known[name] = true }, ch.Named("names", settingNames()))
	return known, err
}

func settingNames() []string { return slices.Sorted(maps.Keys(insertSettings)) }

// forget makes the next insert ask again: by then the server may be another one.
func (s *Store) forget() {
	s.mu.Lock()
	s.known = nil
	s.mu.Unlock()
}

// settled keeps weir_degraded and says once that batches do not store, and once that they do again.
func (s *Store) settled(err error) {
	s.mu.Lock()
	was := s.degraded
	s.degraded, s.sure = err != nil, err == nil
	s.mu.Unlock()
	if was == (err != nil) {
		return
	}
	step := 1.0
	if err == nil {
		step = -1
		s.log.Info("history stores again")
	}
	if s.Metrics != nil && s.Metrics.Degraded != nil {
		s.Metrics.Degraded.Add(step)
	}
}

// count counts a batch that is stored, once however often it is done again by this process.
func (s *Store) count(token string, requests uint64, duplicates int) {
	s.mu.Lock()
	again := s.counted == token
	s.counted = token
	s.mu.Unlock()
	if again || s.Metrics == nil {
		return
	}
	if s.Metrics.Stored != nil {
		s.Metrics.Stored.Add(float64(requests))
	}
	if s.Metrics.Duplicates != nil {
		s.Metrics.Duplicates.Add(float64(duplicates))
	}
}

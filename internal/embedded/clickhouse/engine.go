package clickhouse

import (
	"fmt"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
)

// The C interface of libchdb that we use. Results and streams are opaque handles; a connection is a handle to a handle.
var (
	chdbSetSignals    func(enabled int32)
	chdbConnect       func(argc int32, argv **byte) **byte
	chdbClose         func(conn **byte)
	chdbClassify      func(conn *byte, sql *byte, n uintptr, db *byte, dbN uintptr, out *analysis) int32
	chdbQuery         func(conn *byte, sql *byte, n uintptr, format *byte, formatN uintptr, names **byte, nameN *uintptr, values **byte, valueN *uintptr, count uintptr) *byte
	chdbInsert        func(conn *byte, sql *byte, n uintptr, format *byte, formatN uintptr, names **byte, nameN *uintptr, values **byte, valueN *uintptr, count uintptr) *byte
	chdbInsertError   func(stream *byte) string
	chdbAppend        func(stream *byte, data *byte, n uintptr) int32
	chdbInsertDone    func(stream *byte) *byte
	chdbDestroyInsert func(stream *byte)
	chdbDestroy       func(result *byte)
	chdbError         func(result *byte) string
	chdbBuffer        func(result *byte) *byte
	chdbLength        func(result *byte) uintptr
	chdbRows          func(result *byte) uint64
	chdbReadRows      func(result *byte) uint64
	chdbReadBytes     func(result *byte) uint64
	chdbWrittenRows   func(result *byte) uint64
	chdbWrittenBytes  func(result *byte) uint64
)

// analysis is chdb_query_analysis_v1.
type analysis struct {
	size       uint32 // of this struct, told to the engine
	statements uint32
	_, _       uint32 // flags, class
}

func load(library string) error {
	lib, err := purego.Dlopen(library, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return fmt.Errorf("load the ClickHouse engine: %w", err)
	}
	for _, f := range []struct {
		name string
		fn   any
	}{
		{"chdb_set_signal_handlers_enabled", &chdbSetSignals},
		{"chdb_connect", &chdbConnect},
		{"chdb_close_conn", &chdbClose},
		{"chdb_classify_query_n", &chdbClassify},
		{"chdb_query_with_params_n", &chdbQuery},
		{"chdb_stream_insert_with_params_n", &chdbInsert},
		{"chdb_stream_insert_error", &chdbInsertError},
		{"chdb_stream_append", &chdbAppend},
		{"chdb_stream_done", &chdbInsertDone},
		{"chdb_destroy_insert_stream", &chdbDestroyInsert},
		{"chdb_destroy_query_result", &chdbDestroy},
		{"chdb_result_error", &chdbError},
		{"chdb_result_buffer", &chdbBuffer},
		{"chdb_result_length", &chdbLength},
		{"chdb_result_rows_read", &chdbRows},
		{"chdb_result_storage_rows_read", &chdbReadRows},
		{"chdb_result_storage_bytes_read", &chdbReadBytes},
		{"chdb_result_rows_written", &chdbWrittenRows},
		{"chdb_result_bytes_written", &chdbWrittenBytes},
	} {
		sym, err := purego.Dlsym(lib, f.name)
		if err != nil {
			return fmt.Errorf("load the ClickHouse engine: %w (%s is another version than %s)", err, library, LibraryVersion())
		}
		purego.RegisterFunc(f.fn, sym)
	}
	return nil
}

// Exception is an error of the engine, as a ClickHouse server words it.
type Exception struct {
	Code int
	Text string // "Code: 60. DB::Exception: … (UNKNOWN_TABLE)"
}

func (e *Exception) Error() string { return e.Text }

func exceptionf(code int, name, format string, v ...any) *Exception {
	return &Exception{Code: code, Text: fmt.Sprintf("Code: %d. DB::Exception: %s. (%s)", code, fmt.Sprintf(format, v...), name)}
}

var codeText = regexp.MustCompile(`^Code: (\d+)\.`)

func exception(text string) error {
	if text == "" {
		return nil
	}
	code := 1002 // UNKNOWN_EXCEPTION
	if m := codeText.FindStringSubmatch(text); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			code = n
		}
	}
	return &Exception{Code: code, Text: strings.TrimSpace(text)}
}

// engine is the one ClickHouse of this process. Sessions run beside one another, each with one statement at a time.
type engine struct {
	args []string
	base **byte     // keeps the engine up while there is no session
	open sync.Mutex // connections are opened and closed one at a time
}

// openEngine starts the engine on dir. It is called once per process.
func openEngine(library, dir string) (*engine, error) {
	if err := load(library); err != nil {
		return nil, err
	}
	chdbSetSignals(0) // the Go runtime has its own handlers
	e := &engine{args: []string{"clickhouse", "--path=" + dir}}
	if e.base = e.connect(); e.base == nil {
		return nil, fmt.Errorf("open ClickHouse data in %s: refused; another process may be using it", dir)
	}
	return e, nil
}

func (e *engine) connect() **byte {
	e.open.Lock()
	defer e.open.Unlock()
	argv := make([]*byte, len(e.args))
	for i, a := range e.args {
		argv[i] = unsafe.StringData(a + "\x00")
	}
	conn := chdbConnect(int32(len(argv)), &argv[0])
	runtime.KeepAlive(argv)
	return conn
}

// close flushes and stops the engine.
func (e *engine) close() { chdbClose(e.base) }

// session is a connection for one request: what SET and USE do to it dies with it.
type session struct {
	e    *engine
	conn **byte
}

func (e *engine) session() (*session, error) {
	conn := e.connect()
	if conn == nil {
		return nil, exceptionf(1002, "UNKNOWN_EXCEPTION", "The embedded engine gave no connection")
	}
	return &session{e: e, conn: conn}, nil
}

func (s *session) close() {
	s.e.open.Lock()
	defer s.e.open.Unlock()
	chdbClose(s.conn)
}

// parameters are the values of {name:Type} placeholders, in ClickHouse's escaped (TSV) text form.
type parameters struct {
	names, values []*byte
	nameN, valueN []uintptr
}

func (p *parameters) add(name, value string) {
	p.names, p.nameN = append(p.names, unsafe.StringData(name)), append(p.nameN, uintptr(len(name)))
	p.values, p.valueN = append(p.values, unsafe.StringData(value)), append(p.valueN, uintptr(len(value)))
}

func first[T any](s []T) *T { return unsafe.SliceData(s) }

// result is what a statement gave, copied out of the engine.
type result struct {
	data                                           []byte
	rows                                           uint64 // in data
	readRows, readBytes, writtenRows, writtenBytes uint64
	elapsed                                        time.Duration
}

// statements says how many statements sql holds; 0 when it does not parse.
func (s *session) statements(sql string) int {
	a := analysis{size: uint32(unsafe.Sizeof(analysis{}))}
	if chdbClassify(*s.conn, unsafe.StringData(sql), uintptr(len(sql)), nil, 0, &a) != 0 {
		return 0
	}
	return int(a.statements)
}

// query runs one statement and gives its rows in format, unless the statement names a format of its own.
func (s *session) query(sql, format string, p *parameters) (*result, error) {
	start := time.Now()
	r := chdbQuery(*s.conn, unsafe.StringData(sql), uintptr(len(sql)), unsafe.StringData(format), uintptr(len(format)),
		first(p.names), first(p.nameN), first(p.values), first(p.valueN), uintptr(len(p.names)))
	runtime.KeepAlive(p)
	return take(r, start)
}

// insert runs an INSERT without a FORMAT clause on data, which is in format.
func (s *session) insert(sql, format string, p *parameters, data []byte) (*result, error) {
	start := time.Now()
	stream := chdbInsert(*s.conn, unsafe.StringData(sql), uintptr(len(sql)), unsafe.StringData(format), uintptr(len(format)),
		first(p.names), first(p.nameN), first(p.values), first(p.valueN), uintptr(len(p.names)))
	runtime.KeepAlive(p)
	if stream == nil {
		return nil, exceptionf(1002, "UNKNOWN_EXCEPTION", "The embedded engine gave no insert stream")
	}
	defer chdbDestroyInsert(stream)
	if err := exception(chdbInsertError(stream)); err != nil {
		return nil, err
	}
	if len(data) > 0 {
		chdbAppend(stream, first(data), uintptr(len(data))) // what fails here is told by done
	}
	return take(chdbInsertDone(stream), start)
}

func take(r *byte, start time.Time) (*result, error) {
	if r == nil {
		return nil, exceptionf(1002, "UNKNOWN_EXCEPTION", "The embedded engine gave no result")
	}
	defer chdbDestroy(r)
	if err := exception(chdbError(r)); err != nil {
		return nil, err
	}
	res := &result{
		rows: chdbRows(r), readRows: chdbReadRows(r), readBytes: chdbReadBytes(r),
		writtenRows: chdbWrittenRows(r), writtenBytes: chdbWrittenBytes(r), elapsed: time.Since(start),
	}
	if n := chdbLength(r); n > 0 {
		res.data = append(res.data, unsafe.Slice(chdbBuffer(r), n)...)
	}
	return res, nil
}

func (e *engine) version() (string, error) {
	s, err := e.session()
	if err != nil {
		return "", err
	}
	defer s.close()
	r, err := s.query("SELECT version()", "TSV", &parameters{})
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(r.data)), nil
}

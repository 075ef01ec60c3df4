package clickhouse

import (
	"compress/gzip"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ClickHouse/ch-go/compress"
)

// maxBody bounds one request, in bytes: it is held in memory until it is complete, so that half an insert stores nothing.
const maxBody = 1 << 30

// handler speaks the ClickHouse HTTP interface over an engine.
type handler struct {
	engine         *engine
	version        string        // of the engine
	user, password string        // password "" lets everybody in
	slots          chan struct{} // one per session that may run at a time
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/ping" {
		_, _ = io.WriteString(w, "Ok.\n")
		return
	}
	if r.URL.Path != "/" && r.URL.Path != "" {
		http.Error(w, "There is no handle "+r.URL.Path+"\nUse / or /ping for health checks.", http.StatusNotFound)
		return
	}
	w.Header().Set("X-ClickHouse-Server-Display-Name", "weir embedded")
	w.Header().Set("X-ClickHouse-Query-Id", r.URL.Query().Get("query_id"))
	req, err := h.parse(r)
	if err == nil {
		var res *result
		if res, err = h.run(r, req); err == nil {
			err = h.reply(w, req, res)
		}
	}
	if err != nil {
		h.refuse(w, err)
	}
}

// request is a statement with what belongs to it.
type request struct {
	sql      string // one statement; without its FORMAT clause when data is not nil
	data     []byte // rows of an INSERT, in format
	format   string // of data, else of the answer unless the statement names one
	database string
	params   parameters
	settings []setting
	revision uint64 // of Native blocks in the answer
	compress compress.Method
	squeeze  bool // the answer is compressed with compress
}

type setting struct{ name, value string }

// notSettings are the URL parameters that are no settings and need nothing from us: answers are always complete
// before they are sent (wait_end_of_query, buffer_size), and there are neither quotas nor stack traces.
var notSettings = []string{"query", "query_id", "user", "password", "quota_key", "default_format", "database", "compress", "decompress",
	"client_protocol_version", "wait_end_of_query", "buffer_size", "stacktrace"}

var (
	settingName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.]*$`)

	// insertFormat finds the FORMAT clause of an INSERT whose rows follow in that format: there is no VALUES and no
	// SELECT before it, and nothing but a table, columns and settings.
	insertFormat = regexp.MustCompile(`(?is)^\s*INSERT\s+INTO\s+(.*?)\s+FORMAT\s+(\w+)[ \t]*;?[ \t]*(?:\r?\n|$|[ \t])`)
	notPlain     = regexp.MustCompile(`(?i)\b(VALUES|SELECT)\b`)

	// lastFormat is a FORMAT clause at the end of a query.
	lastFormat = regexp.MustCompile(`(?is)\sFORMAT\s+(\w+)\s*;?\s*$`)
)

func (h *handler) parse(r *http.Request) (*request, error) {
	q := r.URL.Query()
	if !h.knows(r, q) {
		return nil, exceptionf(516, "AUTHENTICATION_FAILED", "%s: Authentication failed: password is incorrect, or there is no user with such name", h.user)
	}
	if q.Has("session_id") {
		return nil, exceptionf(48, "NOT_IMPLEMENTED", "The embedded server keeps no sessions (session_id)")
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "multipart/") {
		return nil, exceptionf(48, "NOT_IMPLEMENTED", "The embedded server takes no external tables (%s)", r.Header.Get("Content-Type"))
	}
	body, err := readBody(r, q)
	if err != nil {
		return nil, err
	}

	req := &request{database: q.Get("database"), format: r.Header.Get("X-ClickHouse-Format")}
	if q.Has("default_format") {
		req.format = q.Get("default_format")
	}
	if req.database == "" {
		req.database = r.Header.Get("X-ClickHouse-Database")
	}
	if v := q.Get("client_protocol_version"); v != "" {
		if req.revision, err = strconv.ParseUint(v, 10, 32); err != nil {
			return nil, exceptionf(36, "BAD_ARGUMENTS", "client_protocol_version: %s", err)
		}
	}
	if q.Get("compress") == "1" {
		req.squeeze, req.compress = true, compress.LZ4
		if strings.EqualFold(q.Get("network_compression_method"), "zstd") {
			req.compress = compress.ZSTD
		}
	}
	for name, values := range q {
		value := values[len(values)-1]
		if p, ok := strings.CutPrefix(name, "param_"); ok {
			req.params.add(p, value)
		} else if slices.Contains(notSettings, name) {
			continue
		} else if settingName.MatchString(name) {
			req.settings = append(req.settings, setting{name, value})
		} else {
			return nil, exceptionf(115, "UNKNOWN_SETTING", "Unknown setting '%s'", name)
		}
	}
	req.take(q.Get("query"), body)
	return req, nil
}

// take splits the statement from the rows that follow it. As on a server, a statement may stand in the URL, in the
// body, or in both, one after the other.
func (req *request) take(query string, body []byte) {
	head := query
	if query == "" { // the statement is at the start of the body; no clause of interest is longer than this
		head = string(body[:min(len(body), 64<<10)])
	}
	m := insertFormat.FindStringSubmatchIndex(head)
	if m == nil || notPlain.MatchString(head[m[2]:m[3]]) {
		req.sql = query
		if len(body) > 0 {
			req.sql = strings.TrimPrefix(query+"\n"+string(body), "\n")
		}
		if m := lastFormat.FindStringSubmatch(req.sql); m != nil {
			req.format = m[1]
		}
		if req.format == "" {
			req.format = "TabSeparated"
		}
		return
	}
	req.sql, req.format = "INSERT INTO "+head[m[2]:m[3]], head[m[4]:m[5]]
	if query == "" {
		req.data = body[m[1]:]
	} else {
		req.data = append([]byte(query[m[1]:]), body...)
	}
	if req.data == nil {
		req.data = []byte{}
	}
}

func (h *handler) knows(r *http.Request, q url.Values) bool {
	if h.password == "" {
		return true
	}
	user, password, ok := r.BasicAuth()
	if !ok {
		if user, password = r.Header.Get("X-ClickHouse-User"), r.Header.Get("X-ClickHouse-Key"); user == "" {
			user, password = q.Get("user"), q.Get("password")
		}
	}
	return user == h.user && subtle.ConstantTimeCompare([]byte(password), []byte(h.password)) == 1
}

// readBody reads the whole body: what the client did not finish sending is an error, and nothing of it is used.
func readBody(r *http.Request, q url.Values) ([]byte, error) {
	var in io.Reader = http.MaxBytesReader(nil, r.Body, maxBody)
	switch enc := r.Header.Get("Content-Encoding"); enc {
	case "":
	case "gzip":
		gz, err := gzip.NewReader(in)
		if err != nil {
			return nil, exceptionf(354, "ZLIB_INFLATE_FAILED", "gzip body: %s", err)
		}
		in = io.LimitReader(gz, maxBody)
	default:
		return nil, exceptionf(48, "NOT_IMPLEMENTED", "The embedded server does not know Content-Encoding %s", enc)
	}
	read := io.ReadAll
	if q.Get("decompress") == "1" {
		read = unsqueeze
	}
	body, err := read(in)
	if err != nil {
		return nil, exceptionf(33, "CANNOT_READ_ALL_DATA", "Read request body: %s", err)
	}
	return body, nil
}

func (h *handler) run(r *http.Request, req *request) (*result, error) {
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	s, err := h.engine.session()
	if err != nil {
		return nil, err
	}
	defer s.close()

	// What the request says about its session is said in statements of their own, so that their errors are the engine's.
	none := &parameters{}
	for _, set := range req.settings {
		if _, err := s.query("SET "+set.name+" = '"+escape.Replace(set.value)+"'", "Null", none); err != nil {
			return nil, err
		}
	}
	if req.database != "" {
		if _, err := s.query("USE `"+escapeName.Replace(req.database)+"`", "Null", none); err != nil {
			return nil, err
		}
	}
	if req.data != nil {
		return s.insert(req.sql, req.format, &req.params, req.data)
	}
	if n := s.statements(req.sql); n > 1 { // the engine would run them all; a server does not
		return nil, exceptionf(62, "SYNTAX_ERROR", "Syntax error (Multi-statements are not allowed): there are %d", n)
	}
	return s.query(req.sql, req.format, &req.params)
}

var (
	escape     = strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	escapeName = strings.NewReplacer(`\`, `\\`, "`", "\\`")
)

func (h *handler) reply(w http.ResponseWriter, req *request, res *result) error {
	data := res.data
	var err error
	if strings.EqualFold(req.format, "Native") {
		if data, err = recode(data, req.revision); err != nil {
			return err
		}
	}
	if req.squeeze {
		if data, err = squeeze(data, req.compress); err != nil {
			return err
		}
	}
	head := w.Header()
	head.Set("X-ClickHouse-Summary", fmt.Sprintf(
		`{"read_rows":"%d","read_bytes":"%d","written_rows":"%d","written_bytes":"%d","total_rows_to_read":"0","result_rows":"%d","result_bytes":"%d","elapsed_ns":"%d"}`,
		res.readRows, res.readBytes, res.writtenRows, res.writtenBytes, res.rows, len(res.data), res.elapsed.Nanoseconds()))
	if req.data == nil {
		head.Set("X-ClickHouse-Format", req.format)
	}
	head.Set("Content-Type", "application/octet-stream")
	if strings.HasPrefix(req.format, "T") { // TabSeparated, TSV, …
		head.Set("Content-Type", "text/tab-separated-values; charset=UTF-8")
	}
	head.Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data) // the client has left: nothing to tell it
	return nil
}

// statusOf is the HTTP status of an exception code, as a server chooses it; every other code is 500.
var statusOf = map[int]int{
	516: http.StatusForbidden, 497: http.StatusForbidden, 291: http.StatusForbidden, // authentication, access
	194: http.StatusUnauthorized,                                                                                                           // REQUIRED_PASSWORD
	6:   http.StatusBadRequest, 26: http.StatusBadRequest, 27: http.StatusBadRequest, 32: http.StatusBadRequest, 33: http.StatusBadRequest, // cannot parse or read
	36: http.StatusBadRequest, 38: http.StatusBadRequest, 41: http.StatusBadRequest, 43: http.StatusBadRequest, 53: http.StatusBadRequest,
	62: http.StatusBadRequest, 69: http.StatusBadRequest, 70: http.StatusBadRequest, 72: http.StatusBadRequest, 457: http.StatusBadRequest,
	15: http.StatusNotFound, 16: http.StatusNotFound, 46: http.StatusNotFound, 47: http.StatusNotFound, 50: http.StatusNotFound, // unknown things
	56: http.StatusNotFound, 60: http.StatusNotFound, 73: http.StatusNotFound, 81: http.StatusNotFound, 115: http.StatusNotFound, 139: http.StatusNotFound,
	159: http.StatusRequestTimeout,
	48:  http.StatusNotImplemented,
	439: http.StatusServiceUnavailable,
}

func (h *handler) refuse(w http.ResponseWriter, err error) {
	var ex *Exception
	if !errors.As(err, &ex) {
		ex = exceptionf(1002, "UNKNOWN_EXCEPTION", "%s", err)
	}
	status, ok := statusOf[ex.Code]
	if !ok {
		status = http.StatusInternalServerError
	}
	text := ex.Text
	if !strings.Contains(text, "(version ") {
		text += " (version " + h.version + ")"
	}
	w.Header().Set("Content-Type", "text/plain; charset=UTF-8")
	w.Header().Set("X-ClickHouse-Exception-Code", strconv.Itoa(ex.Code))
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n")
}

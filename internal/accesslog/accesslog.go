// Package accesslog reads requests from access logs: Common and Combined Log Format and JSON lines, plain or gzipped.
package accesslog

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/textproto"
	"os"
	"slices"
	"strings"
	"time"
)

const (
	maxLine     = 1 << 20 // bytes of a line, without its end
	maxProblems = 10      // unreadable lines whose reason is kept
	maxInterned = 1 << 16 // distinct texts remembered

	gzipMagic = "\x1f\x8b\x08" // with the one method of compression that there is
)

// Entry is one request.
type Entry struct {
	Line    int       // 1-based, in the decompressed log
	Time    time.Time // to the nanosecond where the log has it
	Client  string    // address or host name as logged; "" when unknown
	User    string    // authenticated user; "" when there is none
	Tenant  string    // JSON lines only
	Device  string    // JSON lines only
	Method  string
	URI     string // request target as sent, with its query string
	Status  int    // answer given; 0 when unknown
	Referer string // Combined Log Format only
	Agent   string // Combined Log Format only
	headers map[string]string
}

// Header is the value of a request header, if the log has it: Combined Log Format has Referer and User-Agent, a JSON line what
// it has under "headers". The name must be in canonical form.
func (e *Entry) Header(name string) string {
	switch {
	case name == "Referer" && e.Referer != "":
		return e.Referer
	case name == "User-Agent" && e.Agent != "":
		return e.Agent
	}
	return e.headers[name]
}

// Stats says what was read.
type Stats struct {
	Lines    int       // that were not blank
	Requests int       // lines that are requests
	Unparsed int       // the other ones
	Problems []Problem // the first few of those
	CutOff   bool      // the log ends in the middle of a line or of its compressed data
}

// Problem is a line that could not be read.
type Problem struct {
	Line   int
	Reason string
}

// Reader reads one log. It is for one goroutine.
type Reader struct {
	src      *bufio.Reader
	name     string    // of the log, for errors
	file     io.Closer // of Open, nil without one
	line     int
	stats    Stats
	buf      []byte
	interned map[string]string
	lastTime []byte // of the last line, for the next one is often of the same second
	last     time.Time
}

// Open reads a log file, or standard input for the name "-". Compression is found by the first bytes of the file.
func Open(path string) (*Reader, error) {
	if path == "-" {
		return NewReader(os.Stdin)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	r, err := newReader(f, path)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	r.file = f
	return r, nil
}

// NewReader reads a log from src, which it decompresses if it starts as gzip does.
func NewReader(src io.Reader) (*Reader, error) { return newReader(src, "standard input") }

func newReader(src io.Reader, name string) (*Reader, error) {
	r := &Reader{src: bufio.NewReaderSize(src, 64<<10), name: name, interned: map[string]string{}}
	if magic, err := r.src.Peek(3); err == nil && string(magic) == gzipMagic {
		switch z, err := gzip.NewReader(r.src); {
		case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF):
			r.stats.CutOff = true
			r.src.Reset(strings.NewReader(""))
		case err != nil:
			return nil, fmt.Errorf("read log %s: %w", name, err)
		default:
			r.src = bufio.NewReaderSize(z, 64<<10)
		}
	}
	if bom, err := r.src.Peek(3); err == nil && string(bom) == "\ufeff" {
		_, err = r.src.Discard(3)
		if err != nil {
			return nil, fmt.Errorf("read log %s: %w", name, err)
		}
	}
	return r, nil
}

// Close closes the file of Open.
func (r *Reader) Close() error {
	if r.file == nil {
		return nil
	}
	return r.file.Close()
}

// Stats says what has been read so far.
func (r *Reader) Stats() Stats {
	s := r.stats
	s.Problems = slices.Clone(s.Problems)
	return s
}

// Entries are the requests in the order of the file. Lines that are not requests are counted in Stats and left out; a line that
// is cut off but says who asked for what is a request. An error ends the sequence: it means that the file could not be read.
func (r *Reader) Entries() iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for {
			line, whole, err := r.next()
			if err != nil && !errors.Is(err, io.EOF) {
				if errors.Is(err, io.ErrUnexpectedEOF) {
					r.stats.CutOff = true
				} else {
					yield(Entry{}, fmt.Errorf("read log %s after line %d: %w", r.name, r.line, err))
					return
				}
			}
			r.line++
			if len(bytes.TrimSpace(line)) > 0 {
				r.stats.Lines++
				e, reason := r.parse(line)
				switch reason {
				case "":
					r.stats.Requests++
					e.Line = r.line
					if !yield(e, nil) {
						return
					}
				default:
					r.stats.CutOff = r.stats.CutOff || !whole
					r.stats.Unparsed++
					if len(r.stats.Problems) < maxProblems {
						r.stats.Problems = append(r.stats.Problems, Problem{r.line, reason})
					}
				}
			}
			if err != nil {
				return
			}
		}
	}
}

// next is the next line without its end, and whether it had one. A line that is too long is cut right behind the limit. The
// line may come with the error that ended it.
func (r *Reader) next() (line []byte, whole bool, err error) {
	r.buf = r.buf[:0]
	for {
		part, err := r.src.ReadSlice('\n')
		if room := maxLine + 2 - len(r.buf); len(part) > room {
			r.buf = append(r.buf, part[:room]...)
		} else {
			r.buf = append(r.buf, part...)
		}
		switch {
		case err == nil:
			return bytes.TrimSuffix(bytes.TrimSuffix(r.buf, []byte("\n")), []byte("\r")), true, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return r.buf, false, err
		}
	}
}

// parse reads one line, or says why it cannot be read.
func (r *Reader) parse(line []byte) (Entry, string) {
	if len(line) > maxLine {
		return Entry{}, fmt.Sprintf("line is longer than %d MiB", maxLine>>20)
	}
	if start := bytes.TrimLeft(line, " \t"); start[0] == '{' {
		return r.parseJSON(start)
	}
	return r.parseCommon(line)
}

// intern is b as a string, the same one for the same text as long as there are not too many.
func (r *Reader) intern(b []byte) string {
	if s, ok := r.interned[string(b)]; ok {
		return s
	}
	if len(r.interned) >= maxInterned {
		clear(r.interned)
	}
	s := string(b)
	r.interned[s] = s
	return s
}

// inRange says whether t can be counted in nanoseconds since 1970.
func inRange(t time.Time) bool { return t.Unix() >= 0 && t.Year() < 2262 }

// Load reads a whole log and sorts it by time, with requests of the same time in the order of the file.
func Load(ctx context.Context, path string) (entries []Entry, stats Stats, err error) {
	r, err := Open(path)
	if err != nil {
		return nil, Stats{}, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	for e, err := range r.Entries() {
		if err != nil {
			return nil, r.Stats(), err
		}
		if len(entries)%4096 == 0 && ctx.Err() != nil {
			return nil, r.Stats(), ctx.Err()
		}
		entries = append(entries, e)
	}
	slices.SortStableFunc(entries, func(x, y Entry) int {
		return cmp.Compare(x.Time.UnixNano(), y.Time.UnixNano())
	})
	return entries, r.Stats(), nil
}

func canonicalHeaders(in map[string]string) map[string]string {
	if len(in) == 0 {
		return nil
	}
	out := make(map[string]string, len(in))
	for name, value := range in {
		out[textproto.CanonicalMIMEHeaderKey(name)] = value
	}
	return out
}

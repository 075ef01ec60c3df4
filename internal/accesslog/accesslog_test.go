package accesslog

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func read(t testing.TB, src io.Reader) ([]Entry, Stats) {
	t.Helper()
	r, err := NewReader(src)
	if err != nil {
		t.Fatal(err)
	}
	var entries []Entry
	for e, err := range r.Entries() {
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, e)
	}
	return entries, r.Stats()
}

func at(s string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		panic(err)
	}
	return t.UTC()
}

func TestLines(t *testing.T) {
	day := at("2015-05-17T10:05:03Z")
	for _, c := range []struct {
		name, line string
		want       Entry
	}{
		{"common", `198.18.0.1 - - [17/May/2015:10:05:03 +0000] "GET /a?b=c HTTP/1.1" 200 203023`,
			Entry{Time: day, Client: "198.18.0.1", Method: "GET", URI: "/a?b=c", Status: 200}},
		{"combined", `198.18.0.1 - alice [17/May/2015:12:05:03 +0200] "POST /a HTTP/1.0" 404 - "http://x/" "curl/8 (x; y)"`,
			Entry{Time: day, Client: "198.18.0.1", User: "alice", Method: "POST", URI: "/a", Status: 404, Referer: "http://x/", Agent: "curl/8 (x; y)"}},
		{"no referer", `2001:db8::1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/2.0" 200 5 "-" "-"`,
			Entry{Time: day, Client: "2001:db8::1", Method: "GET", URI: "/", Status: 200}},
		{"agent without its closing quote", `198.18.4.44 - - [17/May/2015:10:05:03 +0000] "GET /s HTTP/1.1" 200 235 "-" "Mozilla/5.0 (compatible; x`,
			Entry{Time: day, Client: "198.18.4.44", Method: "GET", URI: "/s", Status: 200, Agent: "Mozilla/5.0 (compatible; x"}},
		{"referer without its closing quote", `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /s HTTP/1.1" 200 235 "http://x/ `,
			Entry{Time: day, Client: "1.1.1.1", Method: "GET", URI: "/s", Status: 200, Referer: "http://x/"}},
		{"request without its closing quote", `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /s HTTP/1.1 200 235 "-" "curl"`,
			Entry{Time: day, Client: "1.1.1.1", Method: "GET", URI: "/s"}},
		{"request without any closing quote", `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /s HTTP/1.1 200 235`,
			Entry{Time: day, Client: "1.1.1.1", Method: "GET", URI: "/s"}},
		{"cut in the path", `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /s/some`,
			Entry{Time: day, Client: "1.1.1.1", Method: "GET", URI: "/s/some"}},
		{"escapes", `1.1.1.1 - a\"b [17/May/2015:10:05:03 +0000] "GET /q?s=\"x\\\x41\x4\z HTTP/1.1" 200 1 "-" "a \"b\""`,
			Entry{Time: day, Client: "1.1.1.1", User: `a\"b`, Method: "GET", URI: `/q?s="x\A\x4\z`, Status: 200, Agent: `a "b"`}},
		{"spaces in user and path", `1.1.1.1 - John [x] Smith [17/May/2015:10:05:03 +0000] "GET /a b HTTP/1.1" 200 1`,
			Entry{Time: day, Client: "1.1.1.1", User: "John [x] Smith", Method: "GET", URI: "/a b", Status: 200}},
		{"no protocol", `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /a" 200 1`,
			Entry{Time: day, Client: "1.1.1.1", Method: "GET", URI: "/a", Status: 200}},
		{"fraction and zone", `1.1.1.1 - - [17/May/2015:18:05:03.123456789 +0800] "GET /a HTTP/1.1" 200 1`,
			Entry{Time: day.Add(123456789), Client: "1.1.1.1", Method: "GET", URI: "/a", Status: 200}},
		{"RFC 3339 in brackets", `1.1.1.1 - - [2015-05-17T12:05:03.5+02:00] "GET /a HTTP/1.1" 200 1`,
			Entry{Time: day.Add(5e8), Client: "1.1.1.1", Method: "GET", URI: "/a", Status: 200}},
		{"host name", `crawler.example.com - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1`,
			Entry{Time: day, Client: "crawler.example.com", Method: "GET", URI: "/a", Status: 200}},
		{"JSON", `{"ts":"2015-05-17T12:05:03.000000001+02:00","ip":"1.1.1.1","method":"GET","path":"/a?b","tenant":"acme","user":"u","device":"d","status":200,"headers":{"x-team":"blue"},"more":[1]}`,
			Entry{Time: day.Add(1), Client: "1.1.1.1", Method: "GET", URI: "/a?b", Tenant: "acme", User: "u", Device: "d", Status: 200, headers: map[string]string{"X-Team": "blue"}}},
		{"JSON by other names", `  {"time":1431857103.000000001,"client":"1.1.1.1","uri":"/a","status":"200"}`,
			Entry{Time: day.Add(1), Client: "1.1.1.1", URI: "/a", Status: 200}},
		{"JSON whole seconds", `{"ts":1431857103,"path":"/"}`, Entry{Time: day, URI: "/"}},
		{"JSON seconds as text", `{"ts":"1431857103.5","path":"/"}`, Entry{Time: day.Add(5e8), URI: "/"}},
		{"JSON exponent", `{"ts":1.4318571035e9,"path":"/"}`, Entry{Time: day.Add(5e8), URI: "/"}},
	} {
		for _, end := range []string{"", "\n", "\r\n"} {
			entries, stats := read(t, strings.NewReader(c.line+end))
			c.want.Line = 1
			if len(entries) != 1 || !reflect.DeepEqual(entries[0], c.want) {
				t.Errorf("%s, end %q: got %+v\nwant %+v\nstats %+v", c.name, end, entries, c.want, stats)
			}
			if want := (Stats{Lines: 1, Requests: 1}); !reflect.DeepEqual(stats, want) {
				t.Errorf("%s, end %q: stats %+v, want %+v", c.name, end, stats, want)
			}
		}
	}
}

func TestUnreadableLinesAreCounted(t *testing.T) {
	const good = `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1` + "\n"
	bad := []struct{ line, want string }{
		{"garbage", "no [time]"},
		{"\x00\xff\xfe [17/May/2015", "no [time]"},
		{`1.1.1.1 - - [99/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1`, "no [time]"},
		{`1.1.1.1 - - [17/May/1815:10:05:03 +0000] "GET /a HTTP/1.1" 200 1`, "time is not from 1970"},
		{`1.1.1.1 - - [17/May/2015:10:05:03 +0000] "-" 408 0`, "request is not"},
		{`1.1.1.1 - - [17/May/2015:10:05:03 +0000] "\x16\x03\x01 x" 400 0`, "request is not"},
		{`1.1.1.1 - - [17/May/2015:10:05:03 +0000] GET /a 400 0`, "no request in quotes"},
		{`1.1.1.1 [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1`, "want a client"},
		{`{"ts":1431857103,"path":"/"`, "not valid JSON"},
		{`{"ts":1431857103}`, "neither path nor uri"},
		{`{"path":"/"}`, "neither ts nor time"},
		{`{"ts":"yesterday","path":"/"}`, "time is neither"},
		{`{"ts":-5,"path":"/"}`, "time is neither"},
		{`{"ts":1431857103000,"path":"/"}`, "in seconds"},
		{`{"ts":1e99,"path":"/"}`, "in seconds"},
		{`{"ts":1e999999999,"path":"/"}`, "time is neither"},
		{`{"ts":true,"path":"/"}`, "time is neither"},
		{`{"ts":1,"path":7}`, "not valid JSON"},
		{strings.Repeat("x", maxLine+1), "longer than 1 MiB"},
		{strings.Repeat("x", 5*maxLine), "longer than 1 MiB"},
	}
	for n, c := range bad {
		entries, stats := read(t, strings.NewReader(good+c.line+"\n\n \t\n"+good))
		if len(entries) != 2 || entries[1].Line != 5 || stats.Lines != 3 || stats.Unparsed != 1 || stats.CutOff {
			t.Errorf("case %d: %d entries, stats %+v", n, len(entries), stats)
		}
		if len(stats.Problems) != 1 || stats.Problems[0].Line != 2 || !strings.Contains(stats.Problems[0].Reason, c.want) {
			t.Errorf("case %d: problems %+v, want %q in line 2", n, stats.Problems, c.want)
		}
	}
	_, stats := read(t, strings.NewReader(strings.Repeat("garbage\n", 1000)))
	if stats.Unparsed != 1000 || len(stats.Problems) != maxProblems {
		t.Errorf("%d unparsed, %d problems, want 1000 and %d", stats.Unparsed, len(stats.Problems), maxProblems)
	}
}

func TestLongestLine(t *testing.T) {
	head, tail := `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /`, ` HTTP/1.1" 200 1`
	path := strings.Repeat("x", maxLine-len(head)-len(tail))
	for _, end := range []string{"", "\n", "\r\n"} {
		entries, stats := read(t, strings.NewReader(head+path+tail+end))
		if len(entries) != 1 || entries[0].URI != "/"+path {
			t.Errorf("end %q: %d entries, stats %+v, want the whole line", end, len(entries), stats)
		}
	}
}

// A log that is still being written, or was cut, gives every request up to there.
func TestCutOff(t *testing.T) {
	line := `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /abc HTTP/1.1" 200 1`
	for n := range len(line) {
		entries, stats := read(t, strings.NewReader(line+"\n"+line[:n]))
		readable := n > strings.Index(line, "/abc")
		want := Stats{Lines: 2, Requests: 1, Unparsed: 1, CutOff: true}
		switch {
		case n == 0:
			want = Stats{Lines: 1, Requests: 1}
		case readable:
			want = Stats{Lines: 2, Requests: 2}
		}
		stats.Problems = nil
		if !reflect.DeepEqual(stats, want) || len(entries) != want.Requests {
			t.Errorf("cut after %d bytes (%s): stats %+v, want %+v", n, line[:n], stats, want)
		}
	}
	_, stats := read(t, strings.NewReader(`{"ts":1431857103,"path":"/"}`+"\n"+`{"ts":14318`))
	if stats.Requests != 1 || stats.Unparsed != 1 || !stats.CutOff {
		t.Errorf("JSON: stats %+v", stats)
	}

	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	for n := range 5000 {
		_, err := fmt.Fprintf(w, "1.1.%d.%d - - [17/May/2015:10:05:03 +0000] \"GET /%d HTTP/1.1\" 200 1\n", n/256, n%256, n*7919)
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	entries, stats := read(t, bytes.NewReader(z.Bytes()[:z.Len()/2]))
	if len(entries) < 1000 || len(entries) > 4000 || !stats.CutOff || stats.Unparsed > 1 {
		t.Errorf("half of the compressed log: %d entries, stats %+v", len(entries), stats)
	}
}

func TestCompression(t *testing.T) {
	const text = `1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1` + "\n"
	var z bytes.Buffer
	for range 2 { // two members, as of a log that was appended to
		w := gzip.NewWriter(&z)
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	for name, data := range map[string]string{
		"plain.log": text + text, "log.gz": z.String(), "log": z.String(), "plain.gz": text + text, "bom.log": "\ufeff" + text + text,
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
		entries, stats, err := Load(context.Background(), path)
		if err != nil || len(entries) != 2 || stats.Unparsed != 0 {
			t.Errorf("%s: %d entries, stats %+v, %v", name, len(entries), stats, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "empty.gz"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if entries, stats, err := Load(context.Background(), filepath.Join(dir, "empty.gz")); err != nil || len(entries) != 0 || stats.Lines != 0 {
		t.Errorf("empty: %d entries, stats %+v, %v", len(entries), stats, err)
	}
	broken := z.Bytes()
	broken[len(broken)-6] ^= 1
	if err := os.WriteFile(filepath.Join(dir, "broken.gz"), broken, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Load(context.Background(), filepath.Join(dir, "broken.gz")); !errors.Is(err, gzip.ErrChecksum) {
		t.Errorf("broken: %v, want %v", err, gzip.ErrChecksum)
	}
	if _, _, err := Load(context.Background(), filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}

// A compressed log that was cut anywhere, in its header too, gives every request up to there, and is not an error.
func TestCutOffGzip(t *testing.T) {
	var plain, z bytes.Buffer
	for i := range 2000 {
		fmt.Fprintf(&plain, "1.1.1.1 - - [17/May/2015:10:05:%02d +0000] \"GET /%d HTTP/1.1\" 200 1\n", i%60, i*i*7919)
	}
	w := gzip.NewWriter(&z)
	w.Name = "access.log"
	if _, err := w.Write(plain.Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "cut.gz")
	last := 0
	for _, n := range []int{3, 5, 10, 15, 20, 30, 100, z.Len() / 2, z.Len() - 9, z.Len() - 1} {
		if err := os.WriteFile(path, z.Bytes()[:n], 0o644); err != nil {
			t.Fatal(err)
		}
		entries, stats, err := Load(context.Background(), path)
		if err != nil || !stats.CutOff || stats.Unparsed > 1 || len(entries) < last {
			t.Errorf("%d bytes: %d entries, stats %+v, %v; want no error and CutOff", n, len(entries), stats, err)
		}
		last = len(entries)
	}
	if last != 2000 {
		t.Errorf("%d entries without the last byte of the checksum, want 2000", last)
	}
	// What only begins like gzip, or not at all, is a log of lines that cannot be read.
	for _, text := range []string{"\x1f", "\x1f\x8b", "\x1f\x8b\x77\x03 is no gzip header", "\x91\x8b\x08\x00\x01\x02\x03\x04\x05\x06\x07\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13"} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if entries, stats, err := Load(context.Background(), path); err != nil || len(entries) != 0 || stats.Unparsed != 1 {
			t.Errorf("%q: %d entries, stats %+v, %v; want one line that is no request", text, len(entries), stats, err)
		}
	}
}

// What cannot be read is said with the file's name.
func TestErrorsNameTheFile(t *testing.T) {
	dir := t.TempDir()
	for name, data := range map[string]string{"header.gz": "\x1f\x8b\x08\x02\x00\x00\x00\x00\x00\x00\x99\x99 wrong checksum of the header", "data.gz": "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\xff\xff"} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Load(context.Background(), path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want an error that names it", name, err)
		}
	}
	for _, path := range []string{dir, filepath.Join(dir, "none")} {
		if _, _, err := Load(context.Background(), path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want an error that names it", path, err)
		}
	}
}

func TestReadErrorIsReported(t *testing.T) {
	broken := errors.New("disk on fire")
	src := io.MultiReader(strings.NewReader(`{"ts":1,"path":"/"}`+"\n"), iotest.ErrReader(broken))
	r, err := NewReader(src)
	if err != nil {
		t.Fatal(err)
	}
	requests, last := 0, error(nil)
	for _, err := range r.Entries() {
		if last = err; err == nil {
			requests++
		}
	}
	if requests != 1 || !errors.Is(last, broken) {
		t.Errorf("%d requests, %v, want 1 and %v", requests, last, broken)
	}
}

func TestLoadSortsStably(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	lines := `{"ts":5,"path":"/1"}
{"ts":"1970-01-01T00:00:05.000000001Z","path":"/2"}
1.1.1.1 - - [01/Jan/1970:01:00:05 +0100] "GET /3 HTTP/1.1" 200 1
{"ts":3,"path":"/4"}
{"ts":5,"path":"/5"}
`
	if err := os.WriteFile(path, []byte(lines), 0o644); err != nil {
		t.Fatal(err)
	}
	entries, _, err := Load(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.URI)
	}
	if want := []string{"/4", "/1", "/3", "/5", "/2"}; !reflect.DeepEqual(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := Load(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("Load after cancel = %v", err)
	}
}

func TestHeader(t *testing.T) {
	e := Entry{Referer: "r", Agent: "a", headers: map[string]string{"X-Team": "blue", "User-Agent": "j"}}
	for name, want := range map[string]string{"Referer": "r", "User-Agent": "a", "X-Team": "blue", "X-None": ""} {
		if got := e.Header(name); got != want {
			t.Errorf("Header(%s) = %q, want %q", name, got, want)
		}
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte(`1.1.1.1 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1 "-" "x\"` + "\n" + `{"ts":1,"path":"/"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := NewReader(bytes.NewReader(data))
		if err != nil {
			return
		}
		n := 0
		for e, err := range r.Entries() {
			if err == nil {
				n++
				if e.URI == "" || e.Time.UnixNano() < 0 {
					t.Errorf("entry %+v", e)
				}
			}
		}
		if s := r.Stats(); s.Requests != n || s.Requests+s.Unparsed != s.Lines {
			t.Errorf("%d entries, stats %+v", n, s)
		}
	})
}

package limits

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// Route names the requests that have one of Methods and a path that matches Path: `/x` is that path and nothing else, `*`
// stands for one whole segment, and a last `/**` for the path before it and everything below.
type Route struct {
	Name    string
	Methods []string // upper case, compared exactly; none means every method
	Path    string

	path pathPattern
}

// Route is the name of the first route that matches, or OtherRoute. The path is the request's own spelling, as in its request
// line (escaped, with or without the query string): it is normalised first, so that no spelling of a path escapes its limit.
// It allocates nothing for a path of up to 1 KiB.
func (p *Policy) Route(method, path string) string {
	var room [1024]byte
	clean := appendNormal(room[:0], path)
	for i := range p.Routes {
		r := &p.Routes[i]
		if (len(r.Methods) == 0 || slices.Contains(r.Methods, method)) && r.path.match(clean) {
			return r.Name
		}
	}
	return OtherRoute
}

// pathPattern is a compiled path pattern: segments from the left, then, if deep, anything below.
type pathPattern struct {
	segments []string // "*" stands for any one segment that is not empty
	deep     bool
}

// parsePath compiles the Path of a [Route], which must be written in the normal form that requests are compared in.
func parsePath(s string) (pathPattern, error) {
	if !strings.HasPrefix(s, "/") {
		return pathPattern{}, fmt.Errorf("path %q must start with /", s)
	}
	if strings.ContainsRune(s, '?') {
		return pathPattern{}, fmt.Errorf("path %q: the query string is no part of a path", s)
	}
	if n := string(appendNormal(nil, s)); n != s {
		return pathPattern{}, fmt.Errorf("path %q is never seen: requests are compared in their normal form, which is %q here", s, n)
	}
	var p pathPattern
	rest := s
	if strings.HasSuffix(s, "/**") {
		p.deep, rest = true, strings.TrimSuffix(s, "/**")
	}
	if rest == "" {
		return p, nil
	}
	p.segments = strings.Split(rest[1:], "/")
	for _, seg := range p.segments {
		if seg == "**" {
			return pathPattern{}, fmt.Errorf("path %q: ** must be the last segment", s)
		}
		if seg != "*" && strings.Contains(seg, "*") {
			return pathPattern{}, fmt.Errorf("path %q: * stands for a whole segment, not for a part of one", s)
		}
	}
	return p, nil
}

// match says whether path, in normal form, matches.
func (p *pathPattern) match(path []byte) bool {
	if len(path) == 0 || path[0] != '/' {
		return false
	}
	rest, more := path[1:], true // more: there is a segment at rest, possibly an empty one
	for _, want := range p.segments {
		if !more {
			return false
		}
		seg := rest
		if i := bytes.IndexByte(rest, '/'); i >= 0 {
			seg, rest = rest[:i], rest[i+1:]
		} else {
			more = false
		}
		if want == "*" {
			if len(seg) == 0 {
				return false
			}
		} else if string(seg) != want {
			return false
		}
	}
	return p.deep || !more
}

// appendNormal appends the normal form of a request target to dst: the path alone, without a query string or a scheme and
// host; escapes decoded once (all of them, %2F too, as the servers behind a gateway do; none if one of them is malformed);
// repeated slashes joined; `.` and `..` resolved and never above the root. Case is kept. A target that is no path (`*`) stays.
func appendNormal(dst []byte, target string) []byte {
	path := target
	if i := strings.IndexByte(path, '?'); i >= 0 {
		path = path[:i]
	}
	if !strings.HasPrefix(path, "/") {
		if i := strings.Index(path, "://"); i > 0 {
			path = path[i+len("://"):]
			if i = strings.IndexByte(path, '/'); i < 0 {
				i = len(path)
			}
			path = path[i:]
		} else if path != "" {
			return append(dst, path...)
		}
	}
	if path == "" {
		path = "/"
	}
	start := len(dst)
	dst = appendUnescaped(dst, path)
	return dst[:start+cleanPath(dst[start:])]
}

// appendUnescaped appends s with its escapes decoded, or s itself if an escape is malformed.
func appendUnescaped(dst []byte, s string) []byte {
	start := len(dst)
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '%' {
			if i+2 >= len(s) {
				return append(dst[:start], s...)
			}
			hi, lo := unhex(s[i+1]), unhex(s[i+2])
			if hi < 0 || lo < 0 {
				return append(dst[:start], s...)
			}
			c = byte(hi<<4 | lo)
			i += 2
		}
		dst = append(dst, c)
	}
	return dst
}

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// cleanPath resolves the segments of an absolute path in place and returns its new length. What it has written is at all times
// shorter than what it has read.
func cleanPath(p []byte) int {
	if len(p) == 0 {
		return 0
	}
	w := 0 // p[:w] is clean: empty, or segments each with its leading slash
	for r := 0; r < len(p); {
		r++ // the slash
		end := len(p)
		if i := bytes.IndexByte(p[r:], '/'); i >= 0 {
			end = r + i
		}
		last := end == len(p)
		seg := p[r:end]
		switch {
		case string(seg) == "..":
			w = max(bytes.LastIndexByte(p[:w], '/'), 0)
		case len(seg) == 0, string(seg) == ".":
		default:
			p[w] = '/'
			w += 1 + copy(p[w+1:], seg)
			last = false
		}
		if last { // ends in a slash, or in a dot segment, which stands for a directory
			p[w] = '/'
			w++
		}
		r = end
	}
	return w
}

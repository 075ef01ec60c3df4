// Package text prints names that come from somewhere else so that a terminal shows them and does nothing else.
package text

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable is s, quoted as in Go if any of it would not show as it is: control and bidi characters, line ends, what is no
// UTF-8. A text that begins with a quote is quoted too, so that two texts never look alike.
func Printable(s string) string {
	if strings.HasPrefix(s, `"`) || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

// Lines is s with each of its lines printable.
func Lines(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		lines[i] = Printable(l)
	}
	return strings.Join(lines, "\n")
}

// Printf is fmt.Fprintf with every text among the arguments made printable: strings, and what has a String or Error method.
// Its error is left to the writer's Flush.
func Printf(w io.Writer, format string, args ...any) {
	for i, a := range args {
		switch v := a.(type) {
		case string:
			args[i] = Printable(v)
		case error:
			args[i] = Printable(v.Error())
		case fmt.Stringer:
			args[i] = Printable(v.String())
		}
	}
	_, _ = fmt.Fprintf(w, format, args...)
}

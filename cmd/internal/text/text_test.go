package text

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestPrintable(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"acme", "acme"},
		{`a\nb "c"`, `a\nb "c"`},
		{"Ünïted 株式会社 😀", "Ünïted 株式会社 😀"},
		{"a\nb", `"a\nb"`},
		{"a\tb", `"a\tb"`},
		{"\x1b]0;owned\a", `"\x1b]0;owned\a"`},
		{"a\x00b", `"a\x00b"`},
		{"\u009b31m", `"\u009b31m"`},             // CSI in one character
		{"abc\u202edcb", `"abc\u202edcb"`},       // right-to-left override
		{"a\u2066b\u2069", `"a\u2066b\u2069"`},   // isolates
		{"zero\u200bwidth", `"zero\u200bwidth"`}, // looks like another name
		{"a\xffb", `"a\xffb"`},
		{`"a\nb"`, `"\"a\\nb\""`},
	} {
		if got := Printable(c.in); got != c.want {
			t.Errorf("Printable(%q) = %s, want %s", c.in, got, c.want)
		}
	}
	if got, want := Lines("one\ntwo \x1b[2J\nthree"), "one\n\"two \\x1b[2J\"\nthree"; got != want {
		t.Errorf("Lines = %q, want %q", got, want)
	}
}

func TestPrintf(t *testing.T) {
	var b strings.Builder
	Printf(&b, "%s\t%d\t%v\t%s\n", "a\x1bb", 7, errors.New("no\r"), time.Second)
	if got, want := b.String(), "\"a\\x1bb\"\t7\t\"no\\r\"\t1s\n"; got != want {
		t.Errorf("Printf wrote %q, want %q", got, want)
	}
}

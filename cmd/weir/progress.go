package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/term"
)

// progress shows how far long work has come: one line that renews itself on a terminal, a plain line now and then elsewhere.
type progress struct {
	w        io.Writer
	terminal bool
	last     time.Time
	open     bool // a line on the terminal waits for its end
}

func newProgress(w io.Writer) *progress {
	f, ok := w.(*os.File)
	return &progress{w: w, terminal: ok && term.IsTerminal(int(f.Fd())), last: time.Now()}
}

func (p *progress) show(what string, n, total int) {
	every := 5 * time.Second
	if p.terminal {
		every = 100 * time.Millisecond
	}
	if time.Since(p.last) < every {
		return
	}
	p.last = time.Now()
	if p.terminal {
		p.open = true
		fmt.Fprintf(p.w, "\r%s %d of %d\033[K", what, n, total)
		return
	}
	fmt.Fprintf(p.w, "%s %d of %d\n", what, n, total)
}

// end finishes the line on a terminal.
func (p *progress) end() {
	if p.open {
		fmt.Fprintln(p.w)
		p.open = false
	}
}

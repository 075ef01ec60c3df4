// Package obstest has what tests need to read a log.
package obstest

import (
	"bytes"
	"sync"
)

// Lines is what was logged so far. It may be read while it is written, by any goroutines; the zero Lines is empty.
type Lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write takes part of the log.
func (l *Lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String is all of it.
func (l *Lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

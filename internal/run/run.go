// Package run starts the parts of a process in order and stops them in the reverse order, one after the other.
package run

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Stack is the parts of one process. Later parts may use earlier ones until they have stopped. The zero Stack is ready;
// Go and Defer are called by one goroutine, before Wait.
type Stack struct {
	parts  []*part
	failed chan *part
	once   sync.Once
	err    error
	began  atomic.Pointer[time.Time] // to stop
}

type part struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error // of a part that ran, valid once done is closed
}

func (s *Stack) init() {
	if s.failed == nil {
		s.failed = make(chan *part, 1)
	}
}

// Go starts f. When its turn to stop comes, its context is cancelled and f must return; nil then means a clean stop.
// A part that returns earlier with an error ends the process.
func (s *Stack) Go(name string, f func(ctx context.Context) error) {
	s.init()
	ctx, cancel := context.WithCancel(context.Background())
	p := &part{name: name, cancel: cancel, done: make(chan struct{})}
	s.parts = append(s.parts, p)
	go func() {
		p.err = f(ctx)
		close(p.done)
		if p.err != nil && ctx.Err() == nil {
			select {
			case s.failed <- p:
			default: // another part failed first
			}
		}
	}()
}

// Defer has f called when the parts above it have stopped.
func (s *Stack) Defer(name string, f func() error) {
	s.Go(name, func(ctx context.Context) error {
		<-ctx.Done()
		return f()
	})
}

// Wait blocks until ctx is done or a part fails, then stops every part within the timeout. It returns the errors of all
// parts and the names of those that did not stop in time.
func (s *Stack) Wait(ctx context.Context, timeout time.Duration) error {
	s.init()
	select {
	case <-ctx.Done():
	case <-s.failed:
	}
	return s.Stop(timeout)
}

func (s *Stack) stopAll(timeout time.Duration) error {
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	var errs []error
	expired := false
	for i := len(s.parts) - 1; i >= 0; i-- {
		p := s.parts[i]
		p.cancel()
		if expired { // no time left: tell every part to stop, wait for none
			continue
		}
		select {
		case <-p.done:
			if p.err != nil && !errors.Is(p.err, context.Canceled) {
				errs = append(errs, p.err)
			}
		case <-deadline.C:
			expired = true
			errs = append(errs, fmt.Errorf("%s did not stop within %s", p.name, timeout))
		}
	}
	return errors.Join(errs...)
}

// Stop stops the parts, the last one first. It may be called again, and then returns the same.
func (s *Stack) Stop(timeout time.Duration) error {
	s.once.Do(func() {
		now := time.Now()
		s.began.Store(&now)
		s.err = s.stopAll(timeout)
	})
	return s.err
}

// Stopping is for how long the stack has been stopping, 0 before: a part that may take its time knows by it how much those before it have
// left. It may be called from any goroutine.
func (s *Stack) Stopping() time.Duration {
	began := s.began.Load()
	if began == nil {
		return 0
	}
	return time.Since(*began)
}

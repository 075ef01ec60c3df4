package rig

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/weirhq/weir/internal/embedded/child"
)

// Part is a process that things happen to: a server or a weir.
type Part interface {
	Kill() error
	Pause() error
	Resume() error
	Restart() error // starts it again, after Kill or instead of it
}

// stopWithin is how long a weir may take to end on SIGTERM, with some room for a busy machine.
const stopWithin = 15 * time.Second

// Weir is one process of the weir binary, under a supervisor that starts it again when it ends by itself. Its methods may be
// called from any goroutine.
type Weir struct {
	name string
	cmd  func() *exec.Cmd
	log  *os.File
	note func(string) // of what nobody should see

	mu    sync.Mutex // guards what follows
	child *child.Process
	ec    *exec.Cmd
	want  bool // it should be running
	watch sync.WaitGroup
}

// start runs it. mu is held.
func (w *Weir) start() error {
	w.ec = w.cmd()
	fmt.Fprintf(w.log, "--- %s starts\n", time.Now().UTC().Format(time.RFC3339Nano))
	c, err := child.Start(w.ec, func(line string) {
		fmt.Fprintln(w.log, line)
		for _, bad := range []string{"panic:", "fatal error:", "WARNING: DATA RACE"} {
			if strings.HasPrefix(line, bad) {
				w.note(w.name + ": " + line)
			}
		}
	})
	if err != nil {
		return err
	}
	c.Ready()
	w.child, w.want = c, true
	w.watch.Go(func() { w.supervise(c) })
	return nil
}

// supervise starts it again, as an init system would, when nobody has asked it to end.
func (w *Weir) supervise(c *child.Process) {
	<-c.Done()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.child != c || !w.want {
		return
	}
	fmt.Fprintf(w.log, "--- %s ended by itself: %s\n", time.Now().UTC().Format(time.RFC3339Nano), w.ec.ProcessState)
	time.Sleep(200 * time.Millisecond)
	if err := w.start(); err != nil {
		w.note(fmt.Sprintf("%s: %v", w.name, err))
	}
}

// Restart starts it, unless it runs.
func (w *Weir) Restart() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.want {
		return nil
	}
	return w.start()
}

// Kill ends it as a crash would (SIGKILL).
func (w *Weir) Kill() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.want = false
	if w.child == nil {
		return nil
	}
	return w.child.Kill()
}

// Pause freezes it (SIGSTOP).
func (w *Weir) Pause() error { return w.signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (w *Weir) Resume() error { return w.signal(syscall.SIGCONT) }

func (w *Weir) signal(s syscall.Signal) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.child == nil {
		return nil
	}
	return w.child.Signal(s)
}

var errUnstoppable = errors.New("did not end on SIGTERM")

// Term asks it to end and returns its exit code. One that does not end in time is killed.
func (w *Weir) Term() (code int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.want = false
	if w.child == nil {
		return 0, nil
	}
	if err := w.child.Signal(syscall.SIGTERM); err != nil {
		return 0, err
	}
	select {
	case <-w.child.Done():
		return w.ec.ProcessState.ExitCode(), nil
	case <-time.After(stopWithin):
		return 0, errors.Join(fmt.Errorf("%s %w within %s", w.name, errUnstoppable, stopWithin), w.child.Kill())
	}
}

// close ends it for good.
func (w *Weir) close() {
	if err := w.Kill(); err != nil {
		w.note(fmt.Sprintf("%s: %v", w.name, err))
	}
	w.watch.Wait()
	_ = w.log.Close()
}

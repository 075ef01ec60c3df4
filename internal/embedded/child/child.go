// Package child runs a server as a child process that cannot outlive this one.
package child

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is a running child. Its methods may be called from any goroutine, also after it has ended.
type Process struct {
	cmd    *exec.Cmd
	output *tail
	done   chan struct{} // closed once the child is reaped
	err    error         // how it ended; read after done
}

// Start runs cmd. The kernel kills the child when this process dies, however it dies, and a Ctrl-C at the terminal
// reaches only this process, which stops the child when it has drained. The child's output goes line by line to
// line once Ready has been called; until then it is kept, so that a failed start can say why.
func Start(cmd *exec.Cmd, line func(string)) (*Process, error) {
	p := &Process{cmd: cmd, output: &tail{line: line}, done: make(chan struct{})}
	r, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL

	drained := make(chan struct{})
	go func() { p.output.drain(r); close(drained) }()
	started := make(chan error, 1)
	go func() {
		// Pdeathsig fires when the *thread* that forked ends (golang.org/issue/27505), so it must live as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
		_ = w.Close()
		<-drained
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

// PID is the child's process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ready says that the child has started well: from now on its output goes to the line function.
func (p *Process) Ready() { p.output.ready() }

// Failure describes how an ended child ended, with the last lines it said.
func (p *Process) Failure() error {
	<-p.done
	err := p.err
	if err == nil {
		err = errors.New("exit status 0")
	}
	if said := p.output.String(); said != "" {
		return fmt.Errorf("%w: %s", err, said)
	}
	return err
}

// Signal sends sig; an ended child is no error.
func (p *Process) Signal(sig syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	if err := p.cmd.Process.Signal(sig); err != nil {
		select {
		case <-p.done:
			return nil
		case <-time.After(time.Second):
			return fmt.Errorf("signal %s: %w", sig, err)
		}
	}
	return nil
}

// Kill ends the child without asking it, as a crash would, and returns when it is gone.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

// Stop asks the child to end and kills it when it has not after grace. It may be called twice.
func (p *Process) Stop(grace time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := p.Signal(syscall.SIGCONT); err != nil { // a paused child cannot hear SIGTERM
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(grace):
		return p.Kill()
	}
}

// tail keeps the last lines of an output until it is told to pass them on.
type tail struct {
	mu     sync.Mutex
	last   []string
	passOn bool
	line   func(string)
}

const tailLines = 10

func (t *tail) drain(r io.Reader) {
	br := bufio.NewReader(r)
	for {
		s, err := br.ReadString('\n')
		if s = strings.TrimSpace(s); s != "" {
			t.add(s)
		}
		if err != nil {
			return
		}
	}
}

func (t *tail) add(s string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.passOn {
		t.line(s)
		return
	}
	if t.last = append(t.last, s); len(t.last) > tailLines {
		t.last = t.last[1:]
	}
}

func (t *tail) ready() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.passOn, t.last = true, nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.last, "; ")
}

// Await returns when the process answers, and it is Ready then. An error says how it died, or that it took longer than timeout
// and was killed.
func (p *Process) Await(timeout time.Duration, answers func() bool) error {
	for deadline := time.Now().Add(timeout); !answers(); {
		select {
		case <-p.Done():
			return p.Failure()
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("no answer after %s", timeout), p.Kill())
		}
	}
	p.Ready()
	return nil
}

// Main is for an init function: it makes this process the child that serves, when the environment says so, and ends it then.
func Main(env string, serve func(conf string) error) {
	conf, ok := os.LookupEnv(env)
	if !ok {
		return
	}
	if err := serve(conf); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

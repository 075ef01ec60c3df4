package nats

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/weirhq/weir/internal/embedded/child"
)

const (
	stopGrace = 10 * time.Second

	// childEnv makes this executable the server: its value is a Config.
	childEnv = "WEIR_EMBEDDED_NATS"
)

// Process is a NATS server in a process of its own, so that tests can kill it and freeze it. The child is this executable, run
// again: an init function of this package sees its environment variable and serves, in test binaries too. Its methods may be
// called from any goroutine.
type Process struct {
	cfg  Config
	log  *slog.Logger
	addr string

	mu      sync.Mutex // guards process
	process *child.Process
}

// StartProcess is Start in a child process.
func StartProcess(cfg Config, log *slog.Logger) (*Process, error) {
	if cfg.Dir == "" {
		return nil, errors.New("embedded NATS: Dir is empty")
	}
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", cfg.Port))
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	addr := l.Addr().(*net.TCPAddr)
	if err := l.Close(); err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	cfg.Port = addr.Port
	p := &Process{cfg: cfg, log: log, addr: addr.String()}
	if err := p.start(); err != nil {
		return nil, err
	}
	return p, nil
}

// URL is nats://127.0.0.1:port, without credentials. It stays the same over a Restart.
func (p *Process) URL() string { return "nats://" + p.addr }

// start runs the child. mu is held, or p not yet shared.
func (p *Process) start() error {
	conf, err := json.Marshal(p.cfg)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("embedded NATS: %w", err)
	}
	cmd := exec.Command(self)
	cmd.Args[0] = "weir-nats"
	cmd.Env = append(os.Environ(), childEnv+"="+string(conf))
	c, err := child.Start(cmd, func(line string) { p.log.Warn("nats: " + line) })
	if err != nil {
		return fmt.Errorf("embedded NATS: %w", err)
	}
	for deadline := time.Now().Add(startTimeout); !greets(p.addr); {
		select {
		case <-c.Done():
			return fmt.Errorf("embedded NATS on %s: %w", p.addr, c.Failure())
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("embedded NATS on %s: no answer after %s", p.addr, startTimeout), c.Kill())
		}
	}
	c.Ready()
	p.process = c
	return nil
}

// greets tells whether a NATS server accepts connections at addr: it speaks first. Its streams are there by then.
func greets(addr string) bool {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return false
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return false
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	return err == nil && strings.HasPrefix(line, "INFO ")
}

// Stop closes every connection, flushes the streams and ends the server. It may be called twice.
func (p *Process) Stop() error {
	return p.end(func(c *child.Process) error { return c.Stop(stopGrace) })
}

// Kill ends the server as a crash would (SIGKILL). What was acknowledged is there after a Restart.
func (p *Process) Kill() error { return p.end((*child.Process).Kill) }

func (p *Process) end(how func(*child.Process) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return nil
	}
	c := p.process
	p.process = nil
	if err := how(c); err != nil {
		return fmt.Errorf("end embedded NATS: %w", err)
	}
	return nil
}

// Pause freezes the server (SIGSTOP): connections stay open and nothing is answered until Resume.
func (p *Process) Pause() error { return p.signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (p *Process) Resume() error { return p.signal(syscall.SIGCONT) }

func (p *Process) signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return errors.New("embedded NATS is not running")
	}
	return p.process.Signal(sig)
}

// Restart runs the server again on the same address and streams, after Kill or Stop or instead of them.
func (p *Process) Restart() error {
	if err := p.Stop(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.start()
}

func init() {
	conf, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := serve(conf); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve is the child: a server until SIGTERM.
func serve(conf string) error {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	var cfg Config
	if err := json.Unmarshal([]byte(conf), &cfg); err != nil {
		return fmt.Errorf("read %s: %w", childEnv, err)
	}
	srv, err := Start(cfg, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		return err
	}
	<-term
	srv.Stop()
	return nil
}

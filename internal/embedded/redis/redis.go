// Package redis runs a Redis server for `weir up` and for tests: a redis-server child, or miniredis where none is installed.
package redis

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/weirhq/weir/internal/embedded/child"
)

// Config says where the server listens and what it keeps. Dir is required.
type Config struct {
	Dir        string // working directory, made when missing; holds the append-only file
	Port       int    // on 127.0.0.1; 0 means any free one
	Password   string // "" lets everybody in
	AppendOnly bool   // keep the data over a restart; without it every start is empty
	Real       bool   // a missing redis-server is an error, not a reason for miniredis (tests)
}

const (
	startTimeout = 15 * time.Second
	stopGrace    = 10 * time.Second
)

// ErrNotReal is returned by what only a redis-server child can do.
var ErrNotReal = errors.New("embedded Redis is miniredis: install redis-server")

// Server is a running Redis. Its methods may be called from any goroutine.
type Server struct {
	cfg  Config
	log  *slog.Logger
	path string // of redis-server; "" means miniredis
	addr string

	mu      sync.Mutex // guards what follows
	process *child.Process
	mini    *miniredis.Miniredis
	ticking chan struct{} // closed to stop miniredis' clock
}

// Start runs a server and returns once it answers PING. Evictions are off (maxmemory-policy noeviction): a full Redis
// refuses writes and never forgets a key. One line of log says which Redis it is.
func Start(cfg Config, log *slog.Logger) (*Server, error) {
	if cfg.Dir == "" {
		return nil, errors.New("embedded Redis: Dir is empty")
	}
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("embedded Redis: %w", err)
	}
	s := &Server{cfg: cfg, log: log}
	path, err := exec.LookPath("redis-server")
	switch {
	case err == nil:
		s.path = path
	case cfg.Real:
		return nil, fmt.Errorf("embedded Redis: %w (Debian: apt-get install redis-server)", err)
	}
	if s.addr, err = freeAddr(cfg.Port); err != nil {
		return nil, fmt.Errorf("embedded Redis: %w", err)
	}
	if err := s.start(); err != nil {
		return nil, err
	}
	if s.path == "" {
		log.Warn("redis: no redis-server on PATH, running miniredis: nothing is kept over a restart", "addr", s.addr)
	} else {
		log.Info("redis: running redis-server", "path", s.path, "addr", s.addr, "pid", s.process.PID())
	}
	return s, nil
}

// freeAddr is 127.0.0.1:port, or a port that was free a moment ago when port is 0. A taken one is an error.
func freeAddr(port int) (string, error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String(), nil
}

// URL is redis://127.0.0.1:port, without the password.
func (s *Server) URL() string { return "redis://" + s.addr }

// IsReal tells a redis-server child from miniredis.
func (s *Server) IsReal() bool { return s.path != "" }

// start runs the server on s.addr. mu is held, or s not yet shared.
func (s *Server) start() error {
	if s.path == "" {
		return s.startMini()
	}
	_, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		return err
	}
	appendOnly := "no"
	if s.cfg.AppendOnly {
		appendOnly = "yes"
	}
	args := []string{
		"--bind", "127.0.0.1", "--port", port, "--dir", s.cfg.Dir, "--daemonize", "no", "--loglevel", "warning", "--save", "",
		"--appendonly", appendOnly, "--appendfsync", "everysec", "--maxmemory-policy", "noeviction",
	}
	cmd := exec.Command(s.path, append(args, "-")...) // the password comes on standard input: arguments are public
	cmd.Stdin = strings.NewReader("")
	if s.cfg.Password != "" {
		cmd.Stdin = strings.NewReader("requirepass " + strconv.Quote(s.cfg.Password) + "\n")
	}
	p, err := child.Start(cmd, func(line string) { s.log.Warn("redis: " + line) })
	if err != nil {
		return fmt.Errorf("embedded Redis: %w", err)
	}
	for deadline := time.Now().Add(startTimeout); !answers(s.addr); {
		select {
		case <-p.Done():
			return fmt.Errorf("embedded Redis on %s: %w", s.addr, p.Failure())
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("embedded Redis on %s: no answer after %s", s.addr, startTimeout), p.Kill())
		}
	}
	p.Ready()
	s.process = p
	return nil
}

// answers tells whether a Redis that has loaded its data answers at addr. One that asks for a password has.
func answers(addr string) bool {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return false
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return false
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return false
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	return err == nil && (strings.HasPrefix(line, "+PONG") || strings.HasPrefix(line, "-NOAUTH"))
}

func (s *Server) startMini() error {
	m := miniredis.NewMiniRedis()
	if s.cfg.Password != "" {
		m.RequireAuth(s.cfg.Password)
	}
	if err := m.StartAddr(s.addr); err != nil {
		return fmt.Errorf("embedded Redis on %s: %w", s.addr, err)
	}
	s.mini, s.ticking = m, make(chan struct{})
	go func(done <-chan struct{}) { // miniredis expires keys only when it is told that time has passed
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for last := time.Now(); ; {
			select {
			case now := <-tick.C:
				m.FastForward(now.Sub(last))
				last = now
			case <-done:
				return
			}
		}
	}(s.ticking)
	return nil
}

// Stop ends the server; what AppendOnly keeps is on disk. It may be called twice.
func (s *Server) Stop() error {
	return s.end(func(p *child.Process) error { return p.Stop(stopGrace) })
}

// Kill ends the server as a crash would (SIGKILL).
func (s *Server) Kill() error { return s.end((*child.Process).Kill) }

func (s *Server) end(how func(*child.Process) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mini != nil {
		close(s.ticking)
		s.mini.Close()
		s.mini = nil
	}
	if s.process == nil {
		return nil
	}
	p := s.process
	s.process = nil
	if err := how(p); err != nil {
		return fmt.Errorf("end embedded Redis: %w", err)
	}
	return nil
}

// Pause freezes the server (SIGSTOP): connections stay open and nothing is answered until Resume.
func (s *Server) Pause() error { return s.signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (s *Server) Resume() error { return s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return ErrNotReal
	}
	return s.process.Signal(sig)
}

// Restart runs the server again on the same address, after Kill or Stop or instead of them.
func (s *Server) Restart() error {
	if err := s.Stop(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.start()
}

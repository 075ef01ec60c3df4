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
	"time"

	"github.com/weirhq/weir/internal/embedded/child"
)

// Config says where the server listens and what it keeps. Dir is required.
type Config struct {
	Dir        string // working directory, made when missing; holds the append-only file
	Port       int    // on 127.0.0.1; 0 means any free one
	Password   string // "" lets everybody in
	AppendOnly bool   // keep the data over a restart; without it every start is empty
	Real       bool   // a missing redis-server is an error, not a reason for miniredis (tests)
	Supervise  bool   // a child that dies by itself is started again, and that is logged
}

const (
	startTimeout = 15 * time.Second
	stopGrace    = 10 * time.Second
)

// ErrNotReal is returned by what only a redis-server child can do.
var ErrNotReal = errors.New("embedded Redis is miniredis: install redis-server")

// Server is a running Redis. Its methods may be called from any goroutine.
type Server struct {
	backend
	cfg  Config
	log  *slog.Logger
	path string // of redis-server; "" means miniredis
	addr string
}

// backend is a redis-server child, or miniredis.
type backend interface {
	// Stop ends the server; what AppendOnly keeps is on disk. It may be called twice.
	Stop() error
	// Kill ends the server as a crash would (SIGKILL).
	Kill() error
	// Pause freezes the server (SIGSTOP): connections stay open and nothing is answered until Resume.
	Pause() error
	// Resume ends a Pause.
	Resume() error
	// Restart runs the server again on the same address, after Kill or Stop or instead of them.
	Restart() error
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
	if s.path == "" {
		if s.backend, err = startMini(s.addr, cfg.Password); err != nil {
			return nil, err
		}
		log.Warn("redis: no redis-server on PATH, running miniredis: nothing is kept over a restart", "addr", s.addr)
		return s, nil
	}
	server, err := child.Serve(child.Config{Name: "embedded Redis", Grace: stopGrace, Supervise: cfg.Supervise}, s.start, log)
	if err != nil {
		return nil, err
	}
	s.backend = server
	log.Info("redis: running redis-server", "path", s.path, "addr", s.addr, "pid", server.PID())
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

// start runs redis-server on s.addr, and returns once it answers.
func (s *Server) start() (*child.Process, error) {
	_, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		return nil, err
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
		return nil, fmt.Errorf("embedded Redis: %w", err)
	}
	if err := p.Await(startTimeout, func() bool { return answers(s.addr) }); err != nil {
		return nil, fmt.Errorf("embedded Redis on %s: %w", s.addr, err)
	}
	return p, nil
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

// Package clickhouse runs the ClickHouse engine for `weir up` and for tests, behind ClickHouse's own HTTP interface:
// libchdb.so, loaded by a child process, so that a crash of the engine is not ours and a SIGKILL is a fair test.
//
// The child is this executable, run again: an init function of this package sees its environment variable, serves, and
// exits, in test binaries too. What a client of a server may rely on holds here: settings, parameters and the database
// belong to one request; an insert whose body does not arrive whole stores nothing; errors carry code, status and text.
// Requests run beside one another, at most eight at a time. Not there: sessions, external tables, the native protocol.
// A statement runs to its end though its client has left; max_execution_time bounds it.
package clickhouse

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/weirhq/weir/internal/embedded/child"
)

// Config says where the server listens and keeps its data. Dir is required.
type Config struct {
	Dir      string // the data; made when missing, reused when there; one server at a time
	Port     int    // on 127.0.0.1; 0 means any free one
	Database string // made by Start when missing, and part of URL; "" makes none
	User     string // who may come in, if there is a Password ("default")
	Password string // "" lets everybody in

	Supervise bool // a child that dies by itself is started again, and that is logged
}

const (
	startTimeout = 60 * time.Second // the first load of half a gigabyte from a cold disk
	stopGrace    = 20 * time.Second
	sessions     = 8 // requests that run at a time

	// childEnv makes this executable the server: its value is a childConfig. The listener is file descriptor 3.
	childEnv = "WEIR_EMBEDDED_CLICKHOUSE"
)

// childConfig is what the parent tells the child.
type childConfig struct{ Library, Dir, User, Password string }

// Server is a running ClickHouse. Its methods may be called from any goroutine. Stop lets running statements end, and flushes.
type Server struct {
	*child.Server
	cfg     Config
	log     *slog.Logger
	library string
	addr    string
}

// Start runs a server and returns once it answers. The engine is found as Library says. What the child prints goes to log.
func Start(cfg Config, log *slog.Logger) (*Server, error) {
	if cfg.Dir == "" {
		return nil, errors.New("embedded ClickHouse: Dir is empty")
	}
	if cfg.User == "" {
		cfg.User = "default"
	}
	library, err := Library()
	if err != nil {
		return nil, err
	}
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, fmt.Errorf("embedded ClickHouse: %w", err)
	}
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("embedded ClickHouse: %w", err)
	}
	s := &Server{cfg: cfg, log: log, library: library, addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(cfg.Port))}
	if s.Server, err = child.Serve(child.Config{Name: "embedded ClickHouse", Grace: stopGrace, Supervise: cfg.Supervise}, s.start, log); err != nil {
		return nil, err
	}
	log.Info("clickhouse: running the embedded engine", "addr", s.addr, "pid", s.PID())
	return s, nil
}

// URL is http://127.0.0.1:port/database, without credentials.
func (s *Server) URL() string { return "http://" + s.addr + "/" + s.cfg.Database }

// start runs the child on s.addr, and returns once it answers.
func (s *Server) start() (*child.Process, error) {
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		return nil, fmt.Errorf("embedded ClickHouse: %w", err)
	}
	defer func() { _ = l.Close() }() // the child has its own; while it is down, connections are refused
	s.addr = l.Addr().String()
	file, err := l.(*net.TCPListener).File()
	if err != nil {
		return nil, fmt.Errorf("embedded ClickHouse: %w", err)
	}
	defer func() { _ = file.Close() }()
	conf, err := json.Marshal(childConfig{Library: s.library, Dir: s.cfg.Dir, User: s.cfg.User, Password: s.cfg.Password})
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("embedded ClickHouse: %w", err)
	}
	cmd := exec.Command(self)
	cmd.Args[0] = "weir-clickhouse"
	cmd.Env = append(os.Environ(), childEnv+"="+string(conf))
	cmd.ExtraFiles = []*os.File{file}
	p, err := child.Start(cmd, func(line string) { s.log.Warn("clickhouse: " + line) })
	if err != nil {
		return nil, fmt.Errorf("embedded ClickHouse: %w", err)
	}
	if err := s.await(p); err != nil {
		return nil, errors.Join(fmt.Errorf("embedded ClickHouse on %s: %w", s.addr, err), p.Kill())
	}
	p.Ready()
	return p, nil
}

// await returns when the child answers and the database is there.
func (s *Server) await(p *child.Process) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	go func() {
		select {
		case <-p.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	err := s.post(ctx, "")
	if err == nil && s.cfg.Database != "" {
		err = s.post(ctx, "CREATE DATABASE IF NOT EXISTS `"+escapeName.Replace(s.cfg.Database)+"`")
	}
	select {
	case <-p.Done():
		return p.Failure()
	default:
		return err
	}
}

// post runs a statement, or pings when there is none. The listener is there before the child is: the wait is in the connection.
func (s *Server) post(ctx context.Context, sql string) error {
	path := "/ping"
	if sql != "" {
		path = "/"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.addr+path, strings.NewReader(sql))
	if err != nil {
		return err
	}
	req.URL.User = url.UserPassword(s.cfg.User, s.cfg.Password)
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(res.Body, 4096))
		return errors.Join(fmt.Errorf("%s: %s", res.Status, strings.TrimSpace(string(text))), err)
	}
	return nil
}

func init() { child.Main(childEnv, serve) }

// serve is the child: it serves until SIGTERM, then lets what runs end, flushes, and returns.
func serve(conf string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var cfg childConfig
	if err := json.Unmarshal([]byte(conf), &cfg); err != nil {
		return fmt.Errorf("read %s: %w", childEnv, err)
	}
	l, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		return err
	}
	e, err := openEngine(cfg.Library, cfg.Dir)
	if err != nil {
		return err
	}
	defer e.close()
	h := &handler{engine: e, user: cfg.User, password: cfg.Password, slots: make(chan struct{}, sessions)}
	if h.version, err = e.version(); err != nil {
		return err
	}

	srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopGrace/2)
	defer cancel()
	if err := srv.Shutdown(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

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
// called from any goroutine. Stop closes every connection and flushes the streams.
type Process struct {
	*child.Server
	cfg  Config
	log  *slog.Logger
	addr string
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
	if p.Server, err = child.Serve(child.Config{Name: "embedded NATS", Grace: stopGrace}, p.start, log); err != nil {
		return nil, err
	}
	return p, nil
}

// URL is nats://127.0.0.1:port, without credentials. It stays the same over a Restart.
func (p *Process) URL() string { return "nats://" + p.addr }

// start runs the child, and returns once it answers.
func (p *Process) start() (*child.Process, error) {
	conf, err := json.Marshal(p.cfg)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	cmd := exec.Command(self)
	cmd.Args[0] = "weir-nats"
	cmd.Env = append(os.Environ(), childEnv+"="+string(conf))
	c, err := child.Start(cmd, func(line string) { p.log.Warn("nats: " + line) })
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	if err := c.Await(startTimeout, func() bool { return greets(p.addr) }); err != nil {
		return nil, fmt.Errorf("embedded NATS on %s: %w", p.addr, err)
	}
	return c, nil
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

func init() { child.Main(childEnv, serve) }

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

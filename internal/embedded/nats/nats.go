// Package nats runs a NATS server with JetStream inside this process, for `weir up` and for tests.
package nats

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Config says where the server listens and keeps its streams. Dir is required.
type Config struct {
	Dir      string // JetStream's store; made when missing, reused when there
	Port     int    // on 127.0.0.1; 0 means any free one
	User     string // "" lets everybody in
	Password string // of User
}

// startTimeout bounds how long a server may take to recover its streams and accept connections.
const startTimeout = 30 * time.Second

// Server is a running NATS server. Its methods may be called from any goroutine.
type Server struct {
	srv *server.Server
	url string
}

// Start runs a server and returns once it accepts connections. JetStream fsyncs before it acknowledges
// (sync_interval: always), so what a publisher was told is stored survives a crash. Warnings and errors go to log.
func Start(cfg Config, log *slog.Logger) (*Server, error) {
	if cfg.Dir == "" {
		return nil, errors.New("embedded NATS: Dir is empty")
	}
	port := cfg.Port
	if port == 0 {
		port = server.RANDOM_PORT
	}
	srv, err := server.NewServer(&server.Options{
		Host:       "127.0.0.1",
		Port:       port,
		Username:   cfg.User,
		Password:   cfg.Password,
		JetStream:  true,
		StoreDir:   cfg.Dir,
		SyncAlways: true,
		NoSigs:     true,
	})
	if err != nil {
		return nil, fmt.Errorf("embedded NATS in %s: %w", cfg.Dir, err)
	}
	l := &logger{log: log, fatal: make(chan error, 1)}
	srv.SetLogger(l, false, false)
	srv.Start()

	if err := l.await(srv); err != nil {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, fmt.Errorf("embedded NATS on 127.0.0.1:%d: %w", cfg.Port, err)
	}
	addr := srv.Addr().(*net.TCPAddr)
	return &Server{srv: srv, url: "nats://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(addr.Port))}, nil
}

// URL is nats://127.0.0.1:port, without credentials.
func (s *Server) URL() string { return s.url }

// Stop closes every connection and flushes the streams. It may be called twice.
func (s *Server) Stop() {
	s.srv.Shutdown()
	s.srv.WaitForShutdown()
}

// logger passes warnings and errors on. The server means to exit after a fatal one; we hand the first to Start instead.
type logger struct {
	log   *slog.Logger
	fatal chan error
	once  sync.Once
}

func (l *logger) Noticef(string, ...any) {}
func (l *logger) Debugf(string, ...any)  {}
func (l *logger) Tracef(string, ...any)  {}

func (l *logger) Warnf(format string, v ...any)  { l.log.Warn("nats: " + fmt.Sprintf(format, v...)) }
func (l *logger) Errorf(format string, v ...any) { l.log.Error("nats: " + fmt.Sprintf(format, v...)) }
func (l *logger) Fatalf(format string, v ...any) {
	l.once.Do(func() { l.fatal <- fmt.Errorf(format, v...) })
}

// await returns once srv accepts connections, or with the error that keeps it from ever doing so.
func (l *logger) await(srv *server.Server) error {
	for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); {
		ready := srv.ReadyForConnections(100 * time.Millisecond)
		select {
		case err := <-l.fatal:
			return err
		default:
		}
		if ready {
			return nil
		}
	}
	return fmt.Errorf("not ready after %s", startTimeout)
}

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/pulse"
	"github.com/weirhq/weir/internal/run"
)

// EndpointsFile is the file in the data folder that says where a running `weir up` listens.
const EndpointsFile = "endpoints.json"

// Endpoints are the addresses of a running `weir up`.
type Endpoints struct {
	Gateway    string   `json:"gateway"`  // the first one
	Gateways   []string `json:"gateways"` // all of them
	Check      string   `json:"check"`
	Metrics    string   `json:"metrics"`
	NATS       string   `json:"nats"`
	Redis      string   `json:"redis"`
	ClickHouse string   `json:"clickhouse"`
}

// Write puts e into the data folder, whole or not at all.
func (e Endpoints) Write(data string) error {
	b, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return fmt.Errorf("write endpoints: %w", err)
	}
	file := filepath.Join(data, EndpointsFile)
	if err := os.WriteFile(file+".new", append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write endpoints: %w", err)
	}
	return os.Rename(file+".new", file)
}

// Unreachable tells whether err says that a server could not be reached or let nobody in.
func Unreachable(err error) bool {
	return errors.Is(err, natsx.ErrUnreachable) || errors.Is(err, redis.ErrUnreachable) ||
		errors.Is(err, clickhouse.ErrUnreachable) || errors.Is(err, clickhouse.ErrDenied)
}

// connectTimeout is how long a process that needs NATS waits for it at its start.
const connectTimeout = 10 * time.Second

// Connect returns a connection that stops with the stack. With must, NATS has to be there within a bounded time.
func Connect(ctx context.Context, address, name string, must bool, m *Metrics, stack *run.Stack, log *slog.Logger) (*nats.Conn, error) {
	cfg := natsx.Config{URL: address, Name: name}
	var nc *nats.Conn
	var err error
	if must {
		timeout, cancel := context.WithTimeout(ctx, connectTimeout)
		defer cancel()
		nc, err = natsx.ConnectCheck(timeout, cfg, log, m.nats)
	} else {
		nc, err = natsx.Connect(cfg, log, m.nats)
	}
	if err != nil {
		return nil, err
	}
	stack.Defer("connection to NATS", func() error {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			nc.Close()
		}()
		select {
		case <-closed:
		case <-time.After(goodbye): // it has something to say yet, to a server that takes nothing
		}
		return nil
	})
	stack.Go("pulse of NATS", (&pulse.Pulse{Server: "NATS", Raised: m.nats.Degraded, Log: log,
		Ask: func(ctx context.Context) error {
			if !nc.IsConnected() { // the connection has said so
				return pulse.ErrTold
			}
			return natsx.Ask(ctx, nc)
		}}).Run)
	return nc, nil
}

// StopTimeout is how long a process may take to stop.
const StopTimeout = 10 * time.Second

// reloadLook is how often the state of the policy is shown in the metrics.
const reloadLook = time.Second

// every calls f now and then until stop, which waits for it.
func every(d time.Duration, f func()) (stop func()) {
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		t := time.NewTicker(d)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				f()
			case <-done:
				return
			}
		}
	}()
	return func() { close(done); <-stopped }
}

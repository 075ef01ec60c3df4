// Package app wires weir's parts into processes. It is the only place that knows them all.
package app

import (
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/weirhq/weir/internal/embedded/clickhouse"
	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/embedded/redis"
	"github.com/weirhq/weir/internal/run"
)

// Servers are the addresses of the three servers.
type Servers struct{ NATS, Redis, ClickHouse string }

// Embed starts an embedded server for each address that is empty, with its state under data. They stop with the stack; a child that
// dies before that is started again.
// ClickHouse goes first: it is the one that notices when another process has the folder.
func Embed(s Servers, data string, stack *run.Stack, log *slog.Logger) (Servers, error) {
	if s.ClickHouse == "" {
		srv, err := clickhouse.Start(clickhouse.Config{Dir: filepath.Join(data, "clickhouse"), Database: "weir", Supervise: true}, log)
		if err != nil {
			return s, fmt.Errorf("start embedded ClickHouse: %w", err)
		}
		stack.Defer("embedded ClickHouse", srv.Stop)
		s.ClickHouse = srv.URL()
	}
	if s.NATS == "" {
		srv, err := nats.Start(nats.Config{Dir: filepath.Join(data, "nats")}, log)
		if err != nil {
			return s, fmt.Errorf("start embedded NATS: %w", err)
		}
		stack.Defer("embedded NATS", func() error { srv.Stop(); return nil })
		s.NATS = srv.URL()
	}
	if s.Redis == "" {
		srv, err := redis.Start(redis.Config{Dir: filepath.Join(data, "redis"), AppendOnly: true, Supervise: true}, log)
		if err != nil {
			return s, fmt.Errorf("start embedded Redis: %w", err)
		}
		stack.Defer("embedded Redis", srv.Stop)
		s.Redis = srv.URL()
	}
	return s, nil
}

// Package embeddedtest gives tests the real servers that they claim to test. A server that is missing fails the test.
package embeddedtest

import (
	"log/slog"
	"testing"

	"github.com/weirhq/weir/internal/embedded/clickhouse"
	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/embedded/redis"
)

// NATS starts a server for this test, with JetStream in a folder of its own, and stops it afterwards.
func NATS(t testing.TB) *nats.Server {
	t.Helper()
	s, err := nats.Start(nats.Config{Dir: t.TempDir()}, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// Redis starts an empty redis-server for this test and stops it afterwards. It is append-only, so that a Kill and
// a Restart find the data again.
func Redis(t testing.TB) *redis.Server {
	t.Helper()
	s, err := redis.Start(redis.Config{Dir: t.TempDir(), AppendOnly: true, Real: true}, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// ClickHouse starts a server for this test, with an empty database weir, and stops it afterwards. That takes about 0.2 s:
// tests need not share one.
func ClickHouse(t testing.TB) *clickhouse.Server {
	t.Helper()
	s, err := clickhouse.Start(clickhouse.Config{Dir: t.TempDir(), Database: "weir"}, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Log is a logger that writes to the test's own output, shown when the test fails or runs with -v. Nothing may log
// to it once the test and its cleanups are done.
func Log(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

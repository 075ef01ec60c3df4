package redis

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/internal/embedded/child"
)

func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	s, err := Start(cfg, slog.New(slog.DiscardHandler))
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

func client(t *testing.T, s *Server, password string) *redis.Client {
	t.Helper()
	c := redis.NewClient(&redis.Options{
		Addr: strings.TrimPrefix(s.URL(), "redis://"), Password: password,
		MaxRetries: -1, ReadTimeout: 200 * time.Millisecond, DialerRetries: 1,
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestCrashKeepsWhatAppendOnlyPromises(t *testing.T) {
	ctx := context.Background()
	for _, tt := range []struct {
		keep bool
		want string
	}{{true, "1"}, {false, ""}} {
		s := start(t, Config{Real: true, AppendOnly: tt.keep})
		c := client(t, s, "")
		if err := c.Set(ctx, "k", "1", 0).Err(); err != nil {
			t.Fatal(err)
		}
		url := s.URL()
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := c.Ping(ctx).Err(); err == nil {
			t.Fatal("a killed server answered PING")
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		if s.URL() != url {
			t.Fatalf("URL() = %s after Restart, want %s", s.URL(), url)
		}
		if got, err := client(t, s, "").Get(ctx, "k").Result(); got != tt.want || err != nil && !errors.Is(err, redis.Nil) {
			t.Fatalf("AppendOnly %v: Get = %q, %v after a crash, want %q", tt.keep, got, err, tt.want)
		}
	}
}

// Under supervision a server that was killed from outside comes back by itself, on the same address and with its data.
func TestSupervisedServerComesBack(t *testing.T) {
	ctx := context.Background()
	s := start(t, Config{Real: true, AppendOnly: true, Supervise: true})
	c := client(t, s, "")
	if err := c.Set(ctx, "k", "1", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(s.backend.(*child.Server).PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for c.Ping(ctx).Err() == nil { // until it is gone
		time.Sleep(time.Millisecond)
	}
	for c.Ping(ctx).Err() != nil {
		time.Sleep(10 * time.Millisecond)
	}
	if got, err := c.Get(ctx, "k").Result(); got != "1" {
		t.Errorf("Get = %q, %v after the death, want 1", got, err)
	}
}

func TestPauseAnswersNothingUntilResume(t *testing.T) {
	ctx := context.Background()
	s := start(t, Config{Real: true})
	c := client(t, s, "")
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	var timeout net.Error
	if err := c.Ping(ctx).Err(); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Fatalf("PING of a paused server = %v, want a timeout", err)
	}
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := client(t, s, "").Ping(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	// Stop must not wait for ever on a paused server.
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
}

func TestNothingIsEvictedAndEverybodyIsLocal(t *testing.T) {
	ctx := context.Background()
	c := client(t, start(t, Config{Real: true}), "")
	for key, want := range map[string]string{"maxmemory-policy": "noeviction", "bind": "127.0.0.1", "save": ""} {
		if got := c.ConfigGet(ctx, key).Val()[key]; got != want {
			t.Errorf("CONFIG GET %s = %q, want %q", key, got, want)
		}
	}
}

func TestPasswordIsAskedFor(t *testing.T) {
	ctx := context.Background()
	const password = `ri"ght \ pass`
	s := start(t, Config{Real: true, Password: password})
	if err := client(t, s, "wrong").Ping(ctx).Err(); err == nil || !strings.Contains(err.Error(), "WRONGPASS") {
		t.Fatalf("PING with a wrong password = %v, want WRONGPASS", err)
	}
	if err := client(t, s, password).Ping(ctx).Err(); err != nil {
		t.Fatal(err)
	}
}

func TestAddressInUseIsOneClearError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, err = Start(Config{Dir: t.TempDir(), Port: l.Addr().(*net.TCPAddr).Port}, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "address already in use") || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Fatalf("Start on a taken port = %v, want an error that says so and names %s", err, l.Addr())
	}
}

func TestFailedStartSaysWhy(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "appendonlydir"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "appendonlydir", "appendonly.aof.manifest"), []byte("rubbish\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Start(Config{Dir: dir, AppendOnly: true, Real: true}, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(err.Error(), "manifest") {
		t.Fatalf("Start on a broken append-only file = %v, want redis-server's own reason", err)
	}
}

func TestWithoutRedisServerMiniredisExpiresKeys(t *testing.T) {
	ctx := context.Background()
	t.Setenv("PATH", t.TempDir())
	if _, err := Start(Config{Dir: t.TempDir(), Real: true}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "apt-get install redis-server") {
		t.Fatalf("Start without redis-server = %v, want an error that says what to install", err)
	}
	var log strings.Builder
	s, err := Start(Config{Dir: t.TempDir()}, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Stop() })
	if s.IsReal() || strings.Count(log.String(), "\n") != 1 || !strings.Contains(log.String(), "miniredis") {
		t.Fatalf("log = %q, want one line that says miniredis", log.String())
	}
	if err := s.Pause(); !errors.Is(err, ErrNotReal) {
		t.Fatalf("Pause() = %v, want ErrNotReal", err)
	}
	c := client(t, s, "")
	if err := c.Set(ctx, "k", "1", 150*time.Millisecond).Err(); err != nil {
		t.Fatal(err)
	}
	for {
		if err := c.Get(ctx, "k").Err(); errors.Is(err, redis.Nil) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	if err := c.Ping(ctx).Err(); err != nil {
		t.Fatal(err)
	}
}

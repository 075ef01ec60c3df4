package nats

import (
	"context"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	s, err := Start(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func connect(t *testing.T, s *Server, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(s.URL(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func TestStreamsSurviveARestartOnTheSamePort(t *testing.T) {
	ctx := context.Background()
	cfg := Config{Dir: t.TempDir()}
	s := start(t, cfg)
	js := connect(t, s)
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := js.Publish(ctx, "s.a", []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	u, err := url.Parse(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	s.Stop()
	s.Stop()

	if cfg.Port, err = strconv.Atoi(u.Port()); err != nil {
		t.Fatal(err)
	}
	again := start(t, cfg)
	if again.URL() != s.URL() {
		t.Fatalf("URL() = %s after a restart, want %s", again.URL(), s.URL())
	}
	stream, err := connect(t, again).Stream(ctx, "S")
	if err != nil {
		t.Fatal(err)
	}
	if got := stream.CachedInfo().State.Msgs; got != 3 {
		t.Fatalf("messages after a restart = %d, want 3", got)
	}
}

// T3: the server acknowledges before fsync unless it is told not to.
func TestT3AcknowledgesAfterFsync(t *testing.T) {
	s := start(t, Config{Dir: t.TempDir()})
	if cfg := s.srv.JetStreamConfig(); cfg == nil || !cfg.SyncAlways {
		t.Fatalf("JetStreamConfig() = %+v, want SyncAlways", cfg)
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

func TestPasswordIsAskedFor(t *testing.T) {
	s := start(t, Config{Dir: t.TempDir(), User: "weir", Password: "right"})
	if _, err := nats.Connect(s.URL(), nats.UserInfo("weir", "wrong")); err == nil || !strings.Contains(strings.ToLower(err.Error()), "authorization") {
		t.Fatalf("Connect with a wrong password = %v, want an authorization violation", err)
	}
	connect(t, s, nats.UserInfo("weir", "right"))
}

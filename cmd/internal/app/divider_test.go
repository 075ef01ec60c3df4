package app

import (
	"context"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// TestACentreThatHearsNothingGrantsNothing: what it says while NATS hangs comes to gateways when NATS goes on, and the last word of
// it is that nothing is granted. When NATS has answered for a while all is well.
func TestACentreThatHearsNothingGrantsNothing(t *testing.T) {
	log := embeddedtest.Log(t)
	server, err := nats.StartProcess(nats.Config{Dir: t.TempDir()}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	nc, err := natsx.Connect(natsx.Config{URL: server.URL()}, log, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	declare := func(ctx context.Context) error { return natsx.Declare(ctx, js, natsx.Storage{}) }
	if err := declare(ctx); err != nil {
		t.Fatal(err)
	}
	counter, err := redis.New(redis.Config{URL: embeddedtest.Redis(t).URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = counter.Close() })
	m := NewMetrics()
	d := &divider{nc: nc, counter: counter, recorder: clickhouse.NewRecorder(clickhouse.RecorderConfig{}, nil, nil, log), declare: declare, m: m, log: log}
	ended := make(chan error, 1)
	go func() { ended <- d.keep(ctx, func() bool { return true }) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	gateway, err := natsx.Connect(natsx.Config{URL: server.URL()}, log, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(gateway.Close)
	heard, err := gateway.SubscribeSync(schemas.ThrottlePrefix + "g1")
	if err != nil {
		t.Fatal(err)
	}
	beating := every(100*time.Millisecond, func() {
		if b, err := schemas.EncodeHeartbeat(&schemas.Heartbeat{Gateway: "g1", Boot: "boot", SentAt: time.Now()}); err == nil {
			_ = gateway.Publish(schemas.HeartbeatPrefix+"g1", b)
		}
	})
	t.Cleanup(beating)
	hears := func(frozen bool) {
		t.Helper()
		for {
			msg, err := heard.NextMsgWithContext(ctx)
			if err != nil {
				t.Fatalf("the gateway did not hear frozen %v: %v", frozen, err)
			}
			if u, err := schemas.DecodeThrottleUpdate(msg.Data); err != nil {
				t.Fatal(err)
			} else if u.Frozen == frozen {
				return
			}
		}
	}
	hears(false)
	if err := server.Pause(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	hears(true)
	hears(false)
}

package natsfeed_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/alerting/natsfeed"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/faultproxy"
	"github.com/weirhq/weir/schemas"
)

// directFeed is a feed that may go past the stream to h.
func directFeed(t *testing.T, nc *nats.Conn, js jetstream.JetStream, h *hook) *natsfeed.Feed {
	t.Helper()
	m := alerting.NewMetrics(prometheus.NewRegistry())
	cfg := natsfeed.Config{Tick: 20 * time.Millisecond, Poll: 100 * time.Millisecond, Retry: 100 * time.Millisecond, Away: time.Second}
	f := natsfeed.New(cfg, nc, js, alerting.New(quick, m), embeddedtest.Log(t), m)
	f.Direct("webhook", h.receiver(t, 0))
	return f
}

// keys are the kinds and dedup keys of what a hook has taken, in order.
func (h *hook) keys(t *testing.T) (all []string) {
	t.Helper()
	for _, a := range h.all() {
		if a.code != 200 {
			continue
		}
		alert, err := schemas.DecodeAlert([]byte(a.body))
		if err != nil {
			t.Fatal(err)
		}
		if a.id != alerting.MessageID(alert) {
			t.Errorf("webhook-id %s, want %s", a.id, alerting.MessageID(alert))
		}
		all = append(all, strings.TrimPrefix(alert.Type, "weir.alert.")+" "+alert.DedupKey)
	}
	return all
}

// While NATS is away the alert about it goes straight to on-call; once it is back, the stream has it, and nothing is sent twice.
func TestNATSIsAway(t *testing.T) {
	t.Parallel()
	nc, js, stop, again := restartable(t)
	var refuse atomic.Bool
	refuse.Store(true)
	h := newHook(t, func(int, http.ResponseWriter, *http.Request) int {
		if refuse.CompareAndSwap(true, false) { // an attempt that fails is made again
			return 503
		}
		return 200
	})
	start(t, directFeed(t, nc, js, h).Run)
	start(t, natsfeed.NewSender(natsfeed.SenderConfig{}, js, h.receiver(t, 0), embeddedtest.Log(t), nil).Run)
	time.Sleep(500 * time.Millisecond)
	want := []string{"firing degraded/part/nats", "resolved degraded/part/nats"}
	for i := range 2 {
		stop()
		eventually(t, "on-call to hear of it", func() bool { return len(h.taken()) == 2*i+1 })
		again()
		eventually(t, "on-call to hear that it is back", func() bool { return len(h.taken()) == 2*i+2 })
	}
	time.Sleep(500 * time.Millisecond)
	if got := h.keys(t); !slices.Equal(got, append(want, want...)) {
		t.Errorf("on-call took %q", got)
	}
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing, resolved, firing, resolved)
}

// A NATS that hangs and goes on brings late what gateways said of themselves meanwhile: on-call knows of NATS, and hears no more.
func TestNATSHangs(t *testing.T) {
	t.Parallel()
	url, direct, _ := server(t)
	proxy, err := faultproxy.Start("127.0.0.1:0", strings.TrimPrefix(url, "nats://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	nc, js := connect(t, "nats://"+proxy.Addr())
	h := newHook(t, always(200))
	start(t, directFeed(t, nc, js, h).Run)
	start(t, natsfeed.NewSender(natsfeed.SenderConfig{}, js, h.receiver(t, 0), embeddedtest.Log(t), nil).Run)
	var alone atomic.Bool
	start(t, func(ctx context.Context) error {
		for {
			mode := "synced"
			if alone.Load() {
				mode = "isolated"
			}
			b, err := schemas.EncodeHeartbeat(&schemas.Heartbeat{Boot: "boot", SentAt: time.Now(), Mode: mode})
			if err == nil {
				err = direct.Publish(schemas.HeartbeatPrefix+"g1", b)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(100 * time.Millisecond):
			}
			if err != nil {
				return err
			}
		}
	})
	time.Sleep(time.Second)
	for i := range 2 {
		proxy.Set(faultproxy.Faults{Hold: true})
		alone.Store(true)
		eventually(t, "on-call to hear of it", func() bool { return len(h.taken()) == 2*i+1 })
		time.Sleep(4 * time.Second) // until the stream cannot be asked any more
		proxy.Set(faultproxy.Faults{})
		time.Sleep(1500 * time.Millisecond)
		alone.Store(false)
		eventually(t, "on-call to hear that it is back", func() bool { return len(h.taken()) == 2*i+2 })
	}
	time.Sleep(500 * time.Millisecond)
	f, r := "firing degraded/part/nats", "resolved degraded/part/nats"
	if got := h.keys(t); !slices.Equal(got, []string{f, r, f, r}) {
		t.Errorf("on-call took %q", got)
	}
}

// full is a JetStream that takes no alerts while it says so.
type full struct {
	jetstream.JetStream
	is *atomic.Bool
}

func (f full) PublishMsg(ctx context.Context, msg *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	if f.is.Load() {
		return nil, errors.New("no space left on device")
	}
	return f.JetStream.PublishMsg(ctx, msg, opts...)
}

// What the stream does not take goes past it, more than one alert too, and is stored once there is room.
func TestTheStreamTakesNothing(t *testing.T) {
	t.Parallel()
	_, nc, js := server(t)
	var is atomic.Bool
	is.Store(true)
	h := newHook(t, always(200))
	start(t, directFeed(t, nc, full{js, &is}, h).Run)
	start(t, natsfeed.NewSender(natsfeed.SenderConfig{}, js, h.receiver(t, 0), embeddedtest.Log(t), nil).Run)
	g := &gateway{level: 2}
	g.run(t, nc, js, "g1")
	eventually(t, "on-call to hear of the bucket", func() bool { return len(h.taken()) == 1 })
	g.set(90)
	eventually(t, "on-call to hear of its end", func() bool { return len(h.taken()) == 2 })
	g.set(2)
	eventually(t, "on-call to hear of the bucket again", func() bool { return len(h.taken()) == 3 })
	is.Store(false)
	eventually(t, "all to be stored", func() bool { return len(alerts(t, js, schemas.AlertsStream)) == 3 })
	g.set(90)
	eventually(t, "its end", func() bool { return len(h.taken()) == 4 })
	time.Sleep(500 * time.Millisecond)
	f, r := "firing low-tokens/contract/acme", "resolved low-tokens/contract/acme"
	if got := h.keys(t); !slices.Equal(got, []string{f, r, f, r}) {
		t.Errorf("on-call took %q", got)
	}
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing, resolved, firing, resolved)
}

// An alerter that hangs with an alert in its hand does not keep it from the one beside it for long; one that is at it does.
func TestAnotherTakesWhatOneDoesNotFinish(t *testing.T) {
	t.Parallel()
	url, _, js := server(t)
	_, stop := sender(t, fast, js, receiverFunc(func(string) error { return nil }))
	eventually(t, "the consumer", func() bool { _, err := js.Consumer(t.Context(), schemas.AlertsStream, "webhook"); return err == nil })
	stop()
	_, other := connect(t, url)
	cons, err := other.Consumer(t.Context(), schemas.AlertsStream, "webhook")
	if err != nil {
		t.Fatal(err)
	}
	ids := []string{store(t, js, 1), store(t, js, 2)}
	hung, err := cons.Next()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	busy, done := make(chan string, 2), make(chan struct{})
	sender(t, fast, js, receiverFunc(func(id string) error {
		busy <- id
		<-done
		return nil
	}))
	if id := <-busy; id != ids[0] {
		t.Errorf("received %s, want %s", id, ids[0])
	}
	t.Logf("taken over after %s", time.Since(began).Round(10*time.Millisecond))
	var second atomic.Int32
	_, idle := connect(t, url)
	sender(t, fast, idle, receiverFunc(func(string) error { second.Add(1); return nil }))
	time.Sleep(5 * time.Second) // longer than a silent one has
	if n := second.Load(); n != 0 {
		t.Errorf("%d alerts taken from one that is at it", n)
	}
	close(done)
	eventually(t, "the second alert", func() bool { return second.Load()+int32(len(busy)) == 1 })
	_ = hung
}

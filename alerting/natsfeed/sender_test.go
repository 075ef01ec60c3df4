package natsfeed_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/alerting/natsfeed"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

var fast = natsfeed.SenderConfig{RetryMin: 50 * time.Millisecond, RetryMax: 500 * time.Millisecond}

func sender(t *testing.T, cfg natsfeed.SenderConfig, js jetstream.JetStream, to alerting.Receiver) (m *alerting.Metrics, stop func()) {
	t.Helper()
	m = alerting.NewMetrics(prometheus.NewRegistry())
	return m, start(t, natsfeed.NewSender(cfg, js, to, embeddedtest.Log(t), m).Run)
}

func count(m *alerting.Metrics, receiver, outcome string) int {
	return int(testutil.ToFloat64(m.Deliveries.WithLabelValues(receiver, outcome)))
}

// dead are the dead letters' reasons, in order.
func dead(t *testing.T, js jetstream.JetStream) (reasons []string) {
	t.Helper()
	stream, err := js.Stream(t.Context(), schemas.DeadStream)
	if err != nil {
		t.Fatal(err)
	}
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		msg, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		if msg.Subject != "weir.dlq.v1.webhook" || msg.Header.Get("Weir-Stream") != schemas.AlertsStream || msg.Header.Get("Weir-Detail") == "" || len(msg.Data) == 0 {
			t.Errorf("dead letter on %s: %v", msg.Subject, msg.Header)
		}
		reasons = append(reasons, msg.Header.Get("Weir-Reason"))
	}
	return reasons
}

func gaps(all []attempt) (gaps []time.Duration) {
	for i := 1; i < len(all); i++ {
		gaps = append(gaps, all[i].at.Sub(all[i-1].at))
	}
	return gaps
}

func TestB048(t *testing.T) {
	t.Parallel()
	t.Run("429 with Retry-After: 2, twice", func(t *testing.T) {
		_, _, js := server(t)
		h := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int {
			if i < 2 {
				w.Header().Set("Retry-After", "2")
				return 429
			}
			return 200
		})
		id := store(t, js, 1)
		m, _ := sender(t, fast, js, h.receiver(t, 0))
		eventually(t, "the delivery", func() bool { return count(m, "webhook", "delivered") == 1 })
		all := h.all()
		if len(all) != 3 || !slices.Equal(h.taken(), []string{id}) {
			t.Fatalf("attempts %+v, want 3 and the last one taken", all)
		}
		for _, gap := range gaps(all) {
			if gap < 2*time.Second {
				t.Errorf("gaps %v, want at least 2s each", gaps(all))
			}
		}
	})
	t.Run("429 without the header, three times", func(t *testing.T) {
		_, _, js := server(t)
		h := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int {
			if i < 3 {
				return 429
			}
			return 200
		})
		store(t, js, 1)
		m, _ := sender(t, natsfeed.SenderConfig{RetryMin: 200 * time.Millisecond}, js, h.receiver(t, 0))
		eventually(t, "the delivery", func() bool { return count(m, "webhook", "delivered") == 1 })
		all := h.all()
		if len(all) != 4 || count(m, "webhook", "retried") != 3 {
			t.Fatalf("attempts %+v, want 4", all)
		}
		for i, gap := range gaps(all) {
			if least := 200 * time.Millisecond << i; gap < least {
				t.Errorf("gaps %v, want at least 200ms, doubled each time", gaps(all))
			}
		}
	})
	t.Run("400, 401 and 410", func(t *testing.T) {
		_, _, js := server(t)
		codes := []int{400, 401, 410}
		h := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int { return codes[min(i, 2)] })
		for n := range 4 {
			store(t, js, n)
		}
		m, stop := sender(t, fast, js, h.receiver(t, 0))
		eventually(t, "the end of deliveries", func() bool { return count(m, "webhook", "disabled") == 1 })
		time.Sleep(200 * time.Millisecond)
		if all := h.all(); len(all) != 3 {
			t.Errorf("attempts %+v, want one each, and none after 410", all)
		}
		if got := dead(t, js); !slices.Equal(got, []string{"refused", "refused", "gone"}) || count(m, "webhook", "dead") != 3 {
			t.Errorf("dead letters %q, want refused, refused, gone", got)
		}
		if got := testutil.ToFloat64(m.Unsent); got != 1 {
			t.Errorf("unsent = %v, want 1", got)
		}
		stop()
		if got := testutil.ToFloat64(m.Unsent); got != 0 {
			t.Errorf("unsent after the stop = %v, want 0", got)
		}
		// The operator names another receiver: what was not sent goes there.
		next := newHook(t, always(200))
		m, _ = sender(t, fast, js, next.receiver(t, 0))
		eventually(t, "the rest", func() bool { return count(m, "webhook", "delivered") == 1 })
	})
	t.Run("503 for a while", func(t *testing.T) {
		_, _, js := server(t)
		var up atomic.Bool
		h := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int {
			if up.Load() {
				return 200
			}
			return 503
		})
		var ids []string
		for n := range 5 {
			ids = append(ids, store(t, js, n))
		}
		m, _ := sender(t, fast, js, h.receiver(t, 0))
		eventually(t, "a few attempts", func() bool { return len(h.all()) > 4 })
		if got := testutil.ToFloat64(m.Unsent); got != 1 {
			t.Errorf("unsent = %v, want 1", got)
		}
		up.Store(true)
		eventually(t, "the deliveries", func() bool { return count(m, "webhook", "delivered") == 5 })
		if got := h.taken(); !slices.Equal(got, ids) {
			t.Errorf("taken %q, want %q: each once, in order", got, ids)
		}
		for _, a := range h.all() {
			if a.code == 503 && a.id != ids[0] {
				t.Errorf("%s was tried before the first one was taken", a.id)
			}
		}
		if got := testutil.ToFloat64(m.Unsent); got != 0 {
			t.Errorf("unsent = %v, want 0", got)
		}
	})
	t.Run("the connection is reset after the body was read", func(t *testing.T) {
		_, _, js := server(t)
		h := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int {
			if i > 0 {
				return 200
			}
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return 500
			}
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
			return 0
		})
		id := store(t, js, 1)
		m, _ := sender(t, fast, js, h.receiver(t, 0))
		eventually(t, "the delivery", func() bool { return count(m, "webhook", "delivered") == 1 })
		if all := h.all(); len(all) != 2 || all[0].id != id || all[1].id != id || all[0].body != all[1].body {
			t.Errorf("attempts %+v, want two alike", all)
		}
	})
}

func TestB083OneReceiverFails(t *testing.T) {
	t.Parallel()
	_, _, js := server(t)
	a := newHook(t, always(200))
	b := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int {
		if i < 5 {
			return 500
		}
		return 200
	})
	store(t, js, 1)
	cfgA, cfgB := fast, fast
	cfgA.Name, cfgB.Name = "a", "b"
	ma, _ := sender(t, cfgA, js, a.receiver(t, 0))
	mb, _ := sender(t, cfgB, js, b.receiver(t, 0))
	eventually(t, "both deliveries", func() bool { return count(ma, "a", "delivered") == 1 && count(mb, "b", "delivered") == 1 })
	if n := len(a.all()); n != 1 {
		t.Errorf("%d attempts at the healthy one, want 1", n)
	}
	if n := len(b.all()); n != 6 {
		t.Errorf("%d attempts at the failing one, want 6", n)
	}
}

func TestB084OneReceiverHangs(t *testing.T) {
	t.Parallel()
	_, nc, js := server(t)
	release := make(chan struct{})
	a := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int {
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return 0
	})
	defer close(release)
	b := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int {
		_, _ = io.WriteString(w, "thanks")
		return 0
	})
	cfgA, cfgB := fast, fast
	cfgA.Name, cfgB.Name = "a", "b"
	ma, _ := sender(t, cfgA, js, a.receiver(t, 5*time.Second))
	mb, _ := sender(t, cfgB, js, b.receiver(t, 0))
	start(t, newFeed(t, nc, js).Run)
	for n := range 500 {
		store(t, js, n)
	}
	began := time.Now()
	eventually(t, "all at the healthy one", func() bool { return count(mb, "b", "delivered") == 500 })
	(&gateway{level: 2}).run(t, nc, js, "g1") // alerts are found while the other hangs
	eventually(t, "one more", func() bool { return count(mb, "b", "delivered") == 501 })
	t.Logf("501 alerts were at the healthy receiver after %s", time.Since(began).Round(time.Millisecond))
	if n := count(ma, "a", "delivered"); n != 0 {
		t.Errorf("%d delivered to the one that hangs, want 0", n)
	}
	cons, err := js.Consumer(t.Context(), schemas.AlertsStream, "a")
	if err != nil {
		t.Fatal(err)
	}
	// What it did not take waits in the stream, not in memory.
	if info := cons.CachedInfo(); info.NumAckPending > 1 || info.NumPending < 499 {
		t.Errorf("%d in flight and %d waiting for it, want 1 and 500", info.NumAckPending, info.NumPending)
	}
}

// receiverFunc is a receiver in this process.
type receiverFunc func(id string) error

func (f receiverFunc) Send(_ context.Context, id string, _ []byte) error { return f(id) }

// The process dies after the receiver took the alert and before that is acknowledged: it comes again under the same id, and
// before any later one.
func TestCrashBeforeAcknowledgement(t *testing.T) {
	t.Parallel()
	url, _, js := server(t)
	if _, err := js.CreateConsumer(t.Context(), schemas.AlertsStream, jetstream.ConsumerConfig{Durable: "webhook", AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: time.Second, MaxDeliver: -1, MaxAckPending: 1}); err != nil {
		t.Fatal(err)
	}
	ids := []string{store(t, js, 1), store(t, js, 2), store(t, js, 3)}
	var got []string
	var doomed atomic.Bool
	ncDoomed, jsDoomed := connect(t, url)
	s := natsfeed.NewSender(fast, jsDoomed, receiverFunc(func(id string) error {
		got = append(got, id)
		if id == ids[1] && doomed.CompareAndSwap(false, true) {
			ncDoomed.Close()
		}
		return nil
	}), embeddedtest.Log(t), nil)
	stop := start(t, s.Run)
	eventually(t, "the crash", doomed.Load)
	stop()

	m, stop := sender(t, fast, js, receiverFunc(func(id string) error { got = append(got, id); return nil }))
	eventually(t, "the rest", func() bool { return count(m, "webhook", "delivered") == 2 })
	stop()
	if want := []string{ids[0], ids[1], ids[1], ids[2]}; !slices.Equal(got, want) {
		t.Errorf("received %q, want %q", got, want)
	}
}

func TestWhatIsNotTried(t *testing.T) {
	t.Parallel()
	_, _, js := server(t)
	if _, err := js.Publish(t.Context(), schemas.AlertPrefix+"info", []byte("garbage")); err != nil {
		t.Fatal(err)
	}
	store(t, js, 1)
	h := newHook(t, func(i int, w http.ResponseWriter, r *http.Request) int { return 500 })
	cfg := fast
	cfg.GiveUp = time.Second
	m, _ := sender(t, cfg, js, h.receiver(t, 0))
	eventually(t, "two dead letters", func() bool { return count(m, "webhook", "dead") == 2 })
	if got := dead(t, js); !slices.Equal(got, []string{"malformed", "expired"}) {
		t.Errorf("dead letters %q, want malformed and expired", got)
	}
	if n := len(h.all()); n < 2 {
		t.Errorf("%d attempts before giving up, want more", n)
	}
}

// The consumer is deleted by hand: deliveries go on where they ended.
func TestConsumerIsDeleted(t *testing.T) {
	t.Parallel()
	_, _, js := server(t)
	h := newHook(t, always(200))
	first := store(t, js, 1)
	m, _ := sender(t, fast, js, h.receiver(t, 0))
	eventually(t, "the first delivery", func() bool { return count(m, "webhook", "delivered") == 1 })
	if err := js.DeleteConsumer(t.Context(), schemas.AlertsStream, "webhook"); err != nil {
		t.Fatal(err)
	}
	second := store(t, js, 2)
	eventually(t, "the second delivery", func() bool { return count(m, "webhook", "delivered") == 2 })
	if got := h.taken(); !slices.Equal(got, []string{first, second}) {
		t.Errorf("taken %q, want %q", got, fmt.Sprint(first, second))
	}
}

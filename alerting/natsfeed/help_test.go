package natsfeed_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/alerting/natsfeed"
	"github.com/weirhq/weir/alerting/webhook"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	embedded "github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// patience is how long a test waits for what must happen; nothing depends on how long it takes.
const patience = 60 * time.Second

const secret = conf.Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")

func connect(t *testing.T, url string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := natsx.Connect(natsx.Config{URL: url, RetryWait: 50 * time.Millisecond}, embeddedtest.Log(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

// server is a NATS server with weir's streams, and a connection to it.
func server(t *testing.T) (url string, nc *nats.Conn, js jetstream.JetStream) {
	t.Helper()
	url = embeddedtest.NATS(t).URL()
	nc, js = connect(t, url)
	if err := natsx.Declare(t.Context(), js, natsx.Storage{}); err != nil {
		t.Fatal(err)
	}
	return url, nc, js
}

// restartable is one that may be stopped, and started again on its address and data.
func restartable(t *testing.T) (nc *nats.Conn, js jetstream.JetStream, stop, again func()) {
	t.Helper()
	cfg := embedded.Config{Dir: t.TempDir()}
	var s *embedded.Server
	again = func() {
		t.Helper()
		var err error
		if s, err = embedded.Start(cfg, embeddedtest.Log(t)); err != nil {
			t.Fatal(err)
		}
	}
	again()
	t.Cleanup(func() { s.Stop() })
	var err error
	if cfg.Port, err = strconv.Atoi(s.URL()[len("nats://127.0.0.1:"):]); err != nil {
		t.Fatal(err)
	}
	nc, js = connect(t, s.URL())
	if err := natsx.Declare(t.Context(), js, natsx.Storage{}); err != nil {
		t.Fatal(err)
	}
	return nc, js, func() { s.Stop() }, again
}

// start runs f until the test or the returned function stops it.
func start(t *testing.T, f func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// eventually waits until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s", patience, what)
		}
	}
}

// quick is thresholds that a test can wait for.
var quick = alerting.Config{LowTokensFor: 300 * time.Millisecond, Hold: 300 * time.Millisecond}

// newFeed returns a feed with a detector that knows nothing.
func newFeed(t *testing.T, nc *nats.Conn, js jetstream.JetStream) *natsfeed.Feed {
	t.Helper()
	m := alerting.NewMetrics(prometheus.NewRegistry())
	cfg := natsfeed.Config{Tick: 20 * time.Millisecond, Poll: 100 * time.Millisecond, Retry: 100 * time.Millisecond}
	return natsfeed.New(cfg, nc, js, alerting.New(quick, m), embeddedtest.Log(t), m)
}

// gateway reports the level of one bucket, and beats, again and again.
type gateway struct {
	mu    sync.Mutex // all below
	level int64
}

func (g *gateway) set(level int64) { g.mu.Lock(); g.level = level; g.mu.Unlock() }

func (g *gateway) run(t *testing.T, nc *nats.Conn, js jetstream.JetStream, name string) (stop func()) {
	return start(t, func(ctx context.Context) error {
		for seq := uint64(1); ; seq++ {
			g.mu.Lock()
			level := g.level
			g.mu.Unlock()
			r := &schemas.Report{Boot: "boot-of-" + name, Seq: seq, SealedAt: time.Now(), Tokens: []schemas.Tokens{{Rule: "contract", Layer: "contract",
				Key: "acme", Tenant: "acme", Mode: "enforce", RateNanos: 1, Capacity: 100, LimitRateNanos: 1, LimitBurst: 100, TokensLast: level}}}
			body, err := schemas.EncodeReport(r)
			if err != nil {
				return err
			}
			beat, err := schemas.EncodeHeartbeat(&schemas.Heartbeat{Boot: r.Boot, SentAt: time.Now(), Mode: "synced"})
			if err != nil {
				return err
			}
			// What cannot be sent while the server is away is not sent: the next one says as much.
			_ = nc.Publish(schemas.HeartbeatPrefix+name, beat)
			publish, cancel := context.WithTimeout(ctx, time.Second)
			_, _ = js.Publish(publish, schemas.UsagePrefix+name, body)
			cancel()
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
}

// alerts is all that the stream holds.
func alerts(t *testing.T, js jetstream.JetStream, name string) (all []schemas.Alert) {
	t.Helper()
	stream, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		msg, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		a, err := schemas.DecodeAlert(msg.Data)
		if err != nil {
			t.Fatal(err)
		}
		if name == schemas.AlertsStream && (msg.Header.Get(nats.MsgIdHdr) != alerting.MessageID(a) || msg.Subject != schemas.AlertPrefix+a.Severity) {
			t.Errorf("stored on %s with headers %v: %+v", msg.Subject, msg.Header, a)
		}
		all = append(all, *a)
	}
	return all
}

// types are the kinds of all, in order.
func types(all []schemas.Alert) (kinds []string) {
	for _, a := range all {
		kinds = append(kinds, a.Type)
	}
	return kinds
}

func wantTypes(t *testing.T, all []schemas.Alert, want ...string) {
	t.Helper()
	if got := types(all); !slices.Equal(got, want) {
		t.Errorf("stored %q, want %q", got, want)
	}
	for i := 1; i < len(all); i += 2 {
		if a, b := all[i-1], all[i]; a.DedupKey != b.DedupKey || !a.StartsAt.Equal(b.StartsAt) {
			t.Errorf("%+v does not end %+v", b, a)
		}
	}
}

// hook is an on-call webhook that answers as it is told.
type hook struct {
	*httptest.Server
	mu       sync.Mutex // all below
	attempts []attempt
}

type attempt struct {
	id   string
	at   time.Time
	body string
	code int
}

// newHook returns a hook that answers attempt i (from 0) through answer, which returns the status, or 0 when it has answered.
func newHook(t *testing.T, answer func(i int, w http.ResponseWriter, r *http.Request) int) *hook {
	h := &hook{}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		if err := webhook.Verify(r.Header, body, time.Now(), secret); err != nil {
			t.Error(err)
		}
		h.mu.Lock()
		i := len(h.attempts)
		h.attempts = append(h.attempts, attempt{id: r.Header.Get(webhook.HeaderID), at: time.Now(), body: string(body)})
		h.mu.Unlock()
		code := answer(i, w, r)
		h.mu.Lock()
		h.attempts[i].code = code
		h.mu.Unlock()
		if code != 0 {
			w.WriteHeader(code)
		}
	}))
	t.Cleanup(h.Close)
	return h
}

func always(code int) func(int, http.ResponseWriter, *http.Request) int {
	return func(int, http.ResponseWriter, *http.Request) int { return code }
}

func (h *hook) all() []attempt {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.attempts)
}

// taken are the ids of the attempts that were answered 200, in order.
func (h *hook) taken() (ids []string) {
	for _, a := range h.all() {
		if a.code == 200 {
			ids = append(ids, a.id)
		}
	}
	return ids
}

func (h *hook) receiver(t *testing.T, timeout time.Duration) *webhook.Receiver {
	t.Helper()
	r, err := webhook.New(webhook.Config{Timeout: timeout}, conf.Secret(h.URL), secret)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// store puts alert n into the stream, as a feed would: one that is not of the detector's.
func store(t *testing.T, js jetstream.JetStream, n int) (id string) {
	t.Helper()
	a := schemas.Alert{Type: schemas.AlertFiring, Name: "ledger-mismatch", Severity: schemas.SeverityWarning, DedupKey: fmt.Sprint("ledger-mismatch/t", n),
		Tenant: fmt.Sprint("t", n), StartsAt: time.Date(2026, 11, 29, 10, 0, 0, n, time.UTC)}
	body, err := schemas.EncodeAlert(&a)
	if err != nil {
		t.Fatal(err)
	}
	id = alerting.MessageID(&a)
	if _, err := js.Publish(t.Context(), schemas.AlertPrefix+a.Severity, body, jetstream.WithMsgID(id)); err != nil {
		t.Fatal(err)
	}
	return id
}

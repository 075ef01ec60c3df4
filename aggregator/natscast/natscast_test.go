package natscast_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/aggregator/natscast"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

const patient = 20 * time.Second

func connect(t *testing.T, url string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// centre is one that remembers.
type centre struct {
	beats    chan schemas.Heartbeat
	snapshot func(gateway string) (*schemas.ThrottleUpdate, error)
	mu       sync.Mutex
	asked    []string
}

func (c *centre) Heartbeat(h *schemas.Heartbeat, _ time.Time) { c.beats <- *h }

func (c *centre) Take(_ context.Context, asked []schemas.TakeRequest) ([]schemas.TakeReply, error) {
	replies := make([]schemas.TakeReply, len(asked))
	for i, q := range asked {
		replies[i] = schemas.TakeReply{Allowed: q.Cost < 5 && q.Gateway == "g1", Remaining: q.LimitBurst - q.Cost, RetryIn: time.Duration(q.Cost)}
	}
	return replies, nil
}

func (c *centre) Snapshot(_ context.Context, gateway string) (*schemas.ThrottleUpdate, error) {
	c.mu.Lock()
	c.asked = append(c.asked, gateway)
	c.mu.Unlock()
	return c.snapshot(gateway)
}

// serve runs a server over a NATS of its own and returns a gateway's connection to it.
func serve(t *testing.T, c *centre) (*nats.Conn, *nats.Conn, *natscast.Metrics) {
	t.Helper()
	s := embeddedtest.NATS(t)
	nc, gateway := connect(t, s.URL()), connect(t, s.URL())
	m := natscast.NewMetrics(prometheus.NewRegistry())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- natscast.NewServer(nc, c, embeddedtest.Log(t), m).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	for nc.NumSubscriptions() < 3 {
		time.Sleep(time.Millisecond)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return gateway, nc, m
}

func update(shares int) *schemas.ThrottleUpdate {
	u := &schemas.ThrottleUpdate{Gateways: 3, TTL: 3 * time.Second, Shares: []schemas.Share{}}
	for i := range shares {
		u.Shares = append(u.Shares, schemas.Share{Rule: "contract", Key: fmt.Sprintf("tenant-%06d", i), Version: 1795989242974759 + uint64(i),
			RateNanos: 1<<62 + int64(i), Burst: 1 << 62, LimitRateNanos: 1<<63 - 1, LimitBurst: 1<<63 - 1, Reason: "newcomer", Level: -1 << 60})
	}
	return u
}

// TestCastInParts: ten thousand shares of the longest kind arrive whole, in messages under 256 KiB; none, as a keepalive.
func TestCastInParts(t *testing.T) {
	s := embeddedtest.NATS(t)
	nc := connect(t, s.URL())
	sub, err := connect(t, s.URL()).SubscribeSync(schemas.ThrottlePrefix + "*")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sub.NextMsg(time.Millisecond); !errors.Is(err, nats.ErrTimeout) { // also makes the subscription known
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	c := natscast.New(nc)
	for _, n := range []int{0, 1, 10_000} {
		want := update(n)
		if n > 1 {
			want.Shares[7].Key = strings.Repeat("}", schemas.MaxTextBytes)
		}
		if err := c.Cast(context.Background(), "g1", want); err != nil {
			t.Fatal(err)
		}
		got := []schemas.Share{}
		for parts := 0; parts == 0 || len(got) < n; parts++ {
			msg, err := sub.NextMsg(patient)
			if err != nil {
				t.Fatal(err)
			}
			if len(msg.Data) > 256<<10 || msg.Subject != "weir.throttle.v1.g1" {
				t.Errorf("%d bytes on %s, want at most 256 KiB on weir.throttle.v1.g1", len(msg.Data), msg.Subject)
			}
			u, err := schemas.DecodeThrottleUpdate(msg.Data)
			if err != nil {
				t.Fatal(err)
			}
			if u.Gateways != 3 || u.TTL != 3*time.Second || u.Snapshot {
				t.Errorf("part %d says %d gateways, %v, snapshot %v", parts, u.Gateways, u.TTL, u.Snapshot)
			}
			got = append(got, u.Shares...)
		}
		if fmt.Sprint(got) != fmt.Sprint(want.Shares) {
			t.Errorf("%d shares arrived as %d others", n, len(got))
		}
	}
	if err := c.Cast(context.Background(), "g.1", update(1)); err == nil {
		t.Error("Cast to a name that is none gave no error")
	}
	s.Stop()
	for nc.IsConnected() {
		time.Sleep(time.Millisecond)
	}
	if err := c.Cast(context.Background(), "g1", update(1)); err == nil {
		t.Error("Cast without a connection gave no error")
	}
}

func TestHeartbeats(t *testing.T) {
	c := &centre{beats: make(chan schemas.Heartbeat, 10)}
	gateway, _, _ := serve(t, c)
	want := schemas.Heartbeat{Gateway: "g1", Boot: "b", SentAt: time.Unix(1, 2).UTC(), Mode: "synced", ClockKnown: true, ClockOffset: -2500 * time.Millisecond, PendingReports: 7, Without: []string{schemas.WithoutSpool}}
	b, err := schemas.EncodeHeartbeat(&want)
	if err != nil {
		t.Fatal(err)
	}
	if err := gateway.Publish("weir.heartbeat.v1.g1", b); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-c.beats:
		if !reflect.DeepEqual(got, want) {
			t.Errorf("heartbeat %+v, want %+v", got, want)
		}
	case <-time.After(patient):
		t.Error("no heartbeat came")
	}
}

// TestSnapshots: the first part is the answer, the others come as updates. A failure is not answered and harms nobody.
func TestSnapshots(t *testing.T) {
	c := &centre{snapshot: func(gateway string) (*schemas.ThrottleUpdate, error) {
		if gateway == "unlucky" {
			return nil, errors.New("redis is away")
		}
		u := update(6000)
		u.Snapshot = true
		return u, nil
	}}
	gateway, _, m := serve(t, c)
	if _, err := gateway.Request(schemas.SnapshotPrefix+"unlucky", nil, 200*time.Millisecond); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("request of the unlucky: %v, want a timeout", err)
	}
	sub, err := gateway.SubscribeSync(schemas.ThrottlePrefix + "g1")
	if err != nil {
		t.Fatal(err)
	}
	msg, err := gateway.Request(schemas.SnapshotPrefix+"g1", nil, patient)
	if err != nil {
		t.Fatal(err)
	}
	u, err := schemas.DecodeThrottleUpdate(msg.Data)
	if err != nil || !u.Snapshot || len(u.Shares) == 0 || len(u.Shares) == 6000 {
		t.Fatalf("answer has %d shares, snapshot %v, %v, want some of 6000", len(u.Shares), u.Snapshot, err)
	}
	for n := len(u.Shares); n < 6000; {
		msg, err := sub.NextMsg(patient)
		if err != nil {
			t.Fatal(err)
		}
		u, err := schemas.DecodeThrottleUpdate(msg.Data)
		if err != nil || u.Snapshot || u.Shares[0].Key != fmt.Sprintf("tenant-%06d", n) {
			t.Fatalf("part from %d is a snapshot (%v), %v, or not in order", n, u.Snapshot, err)
		}
		n += len(u.Shares)
	}
	for end := time.Now().Add(patient); ; time.Sleep(time.Millisecond) { // an answer is counted when it is out
		ok, failed := testutil.ToFloat64(m.Snapshots.WithLabelValues("ok")), testutil.ToFloat64(m.Snapshots.WithLabelValues("failed"))
		if ok == 1 && failed == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%v answered and %v failed, want 1 and 1", ok, failed)
		}
	}
}

// TestTakes: requests for tokens are answered, together where many wait; what is no request is counted and left alone.
func TestTakes(t *testing.T) {
	gateway, _, _ := serve(t, &centre{})
	var wait sync.WaitGroup
	for i := range 300 {
		cost := int64(i%9 + 1)
		b, err := schemas.EncodeTakeRequest(schemas.TakeRequest{Rule: "r", Key: "k", LimitRateNanos: 1e9, LimitBurst: 10, Cost: cost})
		if err != nil {
			t.Fatal(err)
		}
		wait.Go(func() {
			msg, err := gateway.Request(schemas.StrictPrefix+"g1", b, patient)
			if err != nil {
				t.Error(err)
				return
			}
			r, err := schemas.DecodeTakeReply(msg.Data)
			if want := (schemas.TakeReply{Allowed: cost < 5, Remaining: 10 - cost, RetryIn: time.Duration(cost)}); err != nil || r != want {
				t.Errorf("answer to %d = %+v, %v, want %+v", cost, r, err, want)
			}
		})
	}
	wait.Wait()
	if _, err := gateway.Request(schemas.StrictPrefix+"g1", []byte("no request"), 50*time.Millisecond); err == nil {
		t.Error("nonsense was answered")
	}
}

// mute is a centre that was frozen: it answers nobody.
type mute struct{ centre }

func (*mute) Take(context.Context, []schemas.TakeRequest) ([]schemas.TakeReply, error) {
	return nil, errors.New("frozen")
}

// TestOneThatIsFrozenTakesNoRequestsAway: it is subscribed like the one that has replaced it.
func TestOneThatIsFrozenTakesNoRequestsAway(t *testing.T) {
	gateway, other, _ := serve(t, &centre{})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- natscast.NewServer(other, &mute{}, embeddedtest.Log(t), nil).Run(ctx)
	}()
	b, err := schemas.EncodeTakeRequest(schemas.TakeRequest{Rule: "r", Key: "k", LimitRateNanos: 1e9, LimitBurst: 10, Cost: 1})
	if err != nil {
		t.Fatal(err)
	}
	for other.NumSubscriptions() < 8 { // both have four
		time.Sleep(time.Millisecond)
	}
	if err := other.Flush(); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		if _, err := gateway.Request(schemas.StrictPrefix+"g1", b, patient); err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestClock: both times lie between the asking and the hearing, by the same clock here.
func TestClock(t *testing.T) {
	gateway, _, _ := serve(t, &centre{})
	before := time.Now()
	msg, err := gateway.Request(schemas.ClockSubject, nil, patient)
	if err != nil {
		t.Fatal(err)
	}
	after := time.Now()
	r, err := schemas.DecodeClockReply(msg.Data)
	if err != nil {
		t.Fatal(err)
	}
	if r.Received.Before(before) || r.Sent.Before(r.Received) || r.Sent.After(after) {
		t.Errorf("received %v, sent %v, want in order between %v and %v", r.Received, r.Sent, before, after)
	}
}

// TestBadMessages: what cannot be read is counted by its reason, and the next good message is served.
func TestBadMessages(t *testing.T) {
	c := &centre{beats: make(chan schemas.Heartbeat, 10)}
	gateway, nc, m := serve(t, c)
	for range 3 {
		for subject, body := range map[string]string{
			"weir.heartbeat.v1.g1": "\xff\xff\xff", "weir.heartbeat.v1.bad!name": "", "weir.heartbeat.v1." + strings.Repeat("x", 65): "",
			"weir.snapshot.v1.g*1": "", "weir.snapshot.v1.g1": "", "weir.clock.v1": "no reply subject",
		} {
			if err := gateway.Publish(subject, []byte(body)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := gateway.Request(schemas.ClockSubject, nil, patient); err != nil {
		t.Error(err)
	}
	b, err := schemas.EncodeHeartbeat(&schemas.Heartbeat{Boot: "b"})
	if err != nil {
		t.Fatal(err)
	}
	if err := gateway.Publish("weir.heartbeat.v1.g2", b); err != nil {
		t.Fatal(err)
	}
	select {
	case h := <-c.beats:
		if h.Gateway != "g2" {
			t.Errorf("heartbeat of %q, want g2", h.Gateway)
		}
	case <-time.After(patient):
		t.Error("no heartbeat came")
	}
	for reason, want := range map[string]float64{"malformed": 3, "subject": 9, "reply": 6} {
		for end := time.Now().Add(patient); testutil.ToFloat64(m.Bad.WithLabelValues(reason)) != want && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		if got := testutil.ToFloat64(m.Bad.WithLabelValues(reason)); got != want {
			t.Errorf("%v of %s, want %v", got, reason, want)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.asked) > 0 {
		t.Errorf("snapshots of %v were made for nobody", c.asked)
	}
	if !nc.IsConnected() {
		t.Error("the connection is lost")
	}
}

// T5: NATS does not ask whether who sends a request might publish on its reply subject. An answer elsewhere than in an inbox would be
// a message with the centre's rights, written by any gateway.
func TestT5AnswersGoToInboxesOnly(t *testing.T) {
	c := &centre{snapshot: func(string) (*schemas.ThrottleUpdate, error) {
		u := update(1)
		u.Snapshot = true
		return u, nil
	}}
	gateway, nc, m := serve(t, c)
	take, err := schemas.EncodeTakeRequest(schemas.TakeRequest{Rule: "r", Key: "k", LimitRateNanos: 1e9, LimitBurst: 10, Cost: 1})
	if err != nil {
		t.Fatal(err)
	}
	targets := []string{"$KV.weir-history.history", "weir.usage.v1.other", "weir.throttle.v1.other", "$JS.API.STREAM.DELETE.WEIR_USAGE"}
	heard := make(chan *nats.Msg, 100)
	for _, subject := range targets {
		if _, err := nc.ChanSubscribe(subject, heard); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	for subject, body := range map[string][]byte{schemas.ClockSubject: nil, schemas.SnapshotPrefix + "g1": nil, schemas.StrictPrefix + "g1": take} {
		for _, reply := range targets {
			if err := gateway.PublishRequest(subject, reply, body); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := gateway.Request(subject, body, patient); err != nil { // behind them, and in an inbox
			t.Errorf("request on %s: %v", subject, err)
		}
	}
	for end := time.Now().Add(patient); testutil.ToFloat64(m.Bad.WithLabelValues("reply")) != 12 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if got := testutil.ToFloat64(m.Bad.WithLabelValues("reply")); got != 12 {
		t.Errorf("%v were ignored for their reply subject, want 12", got)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	select {
	case msg := <-heard:
		t.Errorf("an answer went to %s", msg.Subject)
	default:
	}
}

package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

func TestSourceDeliversTheSameBatchUntilItIsHandled(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 10)
	n := 0
	j := &journal{fail: func(schemas.Batch[*schemas.Report]) error {
		if n++; n <= 3 {
			return errors.New("redis is away")
		}
		return nil
	}}
	m := NewMetrics(prometheus.NewRegistry())
	s := source(t, nc, Config{}, m)
	if err := s.Ready(); err == nil {
		t.Error("Ready = nil before Consume")
	}
	stop := run(t, s, j.handle)
	eventually(t, "all are handled", func() bool { return j.distinct() == 10 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	calls := j.calls()
	if calls[1] != calls[0] || calls[2] != calls[0] || calls[3] != calls[0] {
		t.Errorf("batches after an error differ:\n%s", strings.Join(calls, "\n"))
	}
	if first := j.batches[0]; first.First != 1 || first.Last != uint64(len(first.Items)) {
		t.Errorf("first batch is %d-%d with %d items", first.First, first.Last, len(first.Items))
	}
	if n := testutil.ToFloat64(m.Failures.WithLabelValues("throttle", "handle")); n != 3 {
		t.Errorf("failures = %v, want 3", n)
	}
	if n := testutil.ToFloat64(m.Degraded); n != 0 {
		t.Errorf("degraded = %v after recovery, want 0", n)
	}
	info := consumerInfo(t, js, "throttle")
	if info.AckFloor.Stream != 10 || info.NumAckPending != 0 {
		t.Errorf("ack floor %d with %d pending, want 10 and 0", info.AckFloor.Stream, info.NumAckPending)
	}
	if c := info.Config; c.AckWait != 10*time.Second || c.MaxDeliver != -1 || c.MaxAckPending != 2000 || c.InactiveThreshold != 0 {
		t.Errorf("consumer on the server = %+v", c)
	}
}

func consumerInfo(t *testing.T, js jetstream.JetStream, name string) *jetstream.ConsumerInfo {
	t.Helper()
	c, err := js.Consumer(context.Background(), schemas.UsageStream, name)
	if err != nil {
		t.Fatal(err)
	}
	return c.CachedInfo()
}

// B030, first half: two readers, a handler that is nearly too slow. Second half: one that is always too slow.
func TestB030SlowHandlersOfTwoReaders(t *testing.T) {
	for _, c := range []struct {
		name  string
		sleep time.Duration
	}{{"nearly late", 450 * time.Millisecond}, {"always late", 900 * time.Millisecond}} {
		t.Run(c.name, func(t *testing.T) {
			url, nc, js := start(t)
			other, _ := connect(t, url)
			slow := func(schemas.Batch[*schemas.Report]) error { time.Sleep(c.sleep); return nil }
			j := &journal{}
			handle := func(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
				if err := slow(b); err != nil {
					return err
				}
				return j.handle(ctx, b)
			}
			cfg := Config{AckWait: 500 * time.Millisecond, MaxMessages: 2}
			a, b := source(t, nc, cfg, nil), source(t, other, cfg, nil)
			run(t, a, handle)
			run(t, b, handle)
			eventually(t, "both are reading", func() bool { return a.Ready() == nil && b.Ready() == nil })
			if got := consumerInfo(t, js, "throttle").Config.AckWait; got != cfg.AckWait {
				t.Fatalf("AckWait on the server = %s, want %s", got, cfg.AckWait)
			}
			publish(t, js, "gw", 1, 10)
			eventually(t, "all are acknowledged", func() bool {
				info := consumerInfo(t, js, "throttle")
				return info.AckFloor.Stream == 10 && info.NumAckPending == 0
			})
			if n := j.distinct(); n != 10 {
				t.Errorf("%d distinct messages handled, want 10", n)
			}
			deliveries := 0
			for _, n := range j.seqs {
				deliveries += n
			}
			// While a handler is at it the server is told so. On a machine that is busy this may come late for a message,
			// but not for all of them.
			if deliveries >= 20 {
				t.Errorf("%d deliveries of 10 messages", deliveries)
			}
		})
	}
}

// While a handler is at it, the server is told so for every message, again and again.
func TestB030TheServerIsToldThatAHandlerIsAtIt(t *testing.T) {
	url, nc, js := start(t)
	watcher, _ := connect(t, url)
	progress := make(chan string, 1000)
	if _, err := watcher.Subscribe("$JS.ACK."+schemas.UsageStream+".throttle.>", func(m *natsgo.Msg) {
		if string(m.Data) == "+WPI" {
			progress <- m.Subject
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	publish(t, js, "gw", 1, 3)
	release := make(chan struct{})
	run(t, source(t, nc, Config{AckWait: 300 * time.Millisecond}, nil), func(context.Context, schemas.Batch[*schemas.Report]) error {
		<-release
		return nil
	})
	defer close(release)
	told := map[string]int{}
	for end := time.After(patience); ; {
		select {
		case subject := <-progress:
			told[subject]++
		case <-end:
			t.Fatalf("in progress: %v, want each of the three twice", told)
		}
		enough := len(told) >= 3
		for _, n := range told {
			enough = enough && n >= 2
		}
		if enough {
			return
		}
	}
}

// What a dead process holds must not wait for AckWait, here an hour.
func TestSourceTakesOverFromADeadProcessAtOnce(t *testing.T) {
	url, nc, js := start(t)
	publish(t, js, "gw", 1, 5)
	cfg := Config{AckWait: time.Hour}
	dead, _ := connect(t, url)
	held := make(chan struct{}, 1)
	run(t, source(t, dead, cfg, nil), func(ctx context.Context, _ schemas.Batch[*schemas.Report]) error {
		select {
		case held <- struct{}{}:
		default:
		}
		<-ctx.Done()
		return ctx.Err()
	})
	<-held
	dead.Close()

	j := &journal{}
	run(t, source(t, nc, cfg, nil), j.handle)
	eventually(t, "all are handled", func() bool { return j.distinct() == 5 })
}

func TestB031DeletedConsumerOrStream(t *testing.T) {
	for _, kind := range []string{"source", "ledger"} {
		t.Run(kind, func(t *testing.T) {
			_, nc, js := start(t)
			cfg := Config{Declare: func(ctx context.Context) error { return natsx.Declare(ctx, js, natsx.Storage{}) }}
			m := NewMetrics(prometheus.NewRegistry())
			j := &journal{}
			var c consumer
			name := "throttle"
			if kind == "source" {
				c = source(t, nc, cfg, m)
			} else {
				c, name = ledger(t, nc, cfg, m), "history"
			}
			run(t, c, j.handle)
			publish(t, js, "gw", 1, 20)
			eventually(t, "20 are handled", func() bool { return j.distinct() == 20 })

			if err := js.DeleteConsumer(t.Context(), schemas.UsageStream, name); err != nil {
				t.Fatal(err)
			}
			publish(t, js, "gw", 21, 40)
			eventually(t, "40 are handled after the consumer was deleted", func() bool { return j.distinct() == 40 })
			eventually(t, "it is ready", func() bool { return c.Ready() == nil })

			// The stream goes, and with it what is in it. The new one numbers its messages from 1 again.
			j.mu.Lock()
			before := j.batches[0].Stream
			j.batches, j.seqs = nil, map[uint64]int{}
			j.mu.Unlock()
			if err := js.DeleteStream(t.Context(), schemas.UsageStream); err != nil {
				t.Fatal(err)
			}
			publish(t, js, "gw", 41, 60)
			eventually(t, "20 of the new stream are handled", func() bool { return j.distinct() == 20 })
			j.mu.Lock()
			after := j.batches[0].Stream
			j.mu.Unlock()
			if before == after || !strings.HasPrefix(after, schemas.UsageStream+"@") {
				t.Errorf("batches of two streams are of %q and %q, want two names", before, after)
			}
			eventually(t, "it is ready", func() bool { return c.Ready() == nil })
			if n := testutil.ToFloat64(m.Failures.WithLabelValues(name, "fetch")); n == 0 {
				t.Error("no failure was counted")
			}
		})
	}
}

// A reader whose stream is not there says so until it is.
func TestReadinessIsFalseWhileNothingCanBeRead(t *testing.T) {
	_, nc, js := start(t)
	m := NewMetrics(prometheus.NewRegistry())
	s := source(t, nc, Config{}, m)
	j := &journal{}
	run(t, s, j.handle)
	eventually(t, "it is ready", func() bool { return s.Ready() == nil })
	if err := js.DeleteStream(t.Context(), schemas.UsageStream); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is not ready", func() bool { return s.Ready() != nil && testutil.ToFloat64(m.Degraded) == 1 })
	if err := s.Ready(); !strings.Contains(err.Error(), "throttle") {
		t.Errorf("Ready = %v, want it to name the consumer", err)
	}
	eventually(t, "lag grows", func() bool { return testutil.ToFloat64(m.Lag.WithLabelValues("throttle")) > 0 })
	declare(t, js)
	publish(t, js, "gw", 1, 1)
	eventually(t, "it is ready again", func() bool { return s.Ready() == nil && j.distinct() == 1 && testutil.ToFloat64(m.Degraded) == 0 })
}

// A deleted consumer does not start at the stream's beginning: seven days of reports would come again.
func TestSourceGoesOnWhereADeletedConsumerWas(t *testing.T) {
	_, nc, js := start(t)
	s := source(t, nc, Config{}, nil)
	j := &journal{}
	run(t, s, j.handle)
	publish(t, js, "gw", 1, 100)
	eventually(t, "the floor is known", func() bool { return s.floor.Load() == 100 })
	if err := js.DeleteConsumer(t.Context(), schemas.UsageStream, "throttle"); err != nil {
		t.Fatal(err)
	}
	publish(t, js, "gw", 101, 101)
	eventually(t, "the next is handled", func() bool { return j.distinct() == 101 })
	for seq, n := range j.seqs {
		if n != 1 {
			t.Fatalf("message %d was handled %d times", seq, n)
		}
	}
}

func TestCutConnectionsAreSurvived(t *testing.T) {
	url, _, js := start(t)
	px := newProxy(t, url)
	nc, _ := connect(t, px.url())
	s, l := source(t, nc, Config{}, nil), ledger(t, nc, Config{}, nil)
	js1, js2 := &journal{}, &journal{}
	run(t, s, js1.handle)
	run(t, l, js2.handle)
	for i := range uint64(5) {
		publish(t, js, "gw", 20*i+1, 20*i+20)
		px.cut()
	}
	eventually(t, "both have all", func() bool { return js1.distinct() == 100 && js2.distinct() == 100 })
	for seq, n := range js2.seqs {
		if n != 1 {
			t.Errorf("the ledger handled message %d %d times", seq, n)
		}
	}
}

// B068: a batch that is larger than what may be unacknowledged never fills.
func TestB068BatchAndMaxAckPending(t *testing.T) {
	_, nc, js := start(t)
	if _, err := NewSource(Config{Name: "x", MaxMessages: 5000, MaxAckPending: 1000}, nc, schemas.DecodeReport, quiet, nil); err == nil || !strings.Contains(err.Error(), "MaxAckPending") {
		t.Errorf("NewSource = %v, want an error that names MaxAckPending", err)
	}
	if _, err := NewLedger(Config{Name: "x", MaxMessages: 5000, MaxAckPending: 1000}, nc, schemas.DecodeReport, quiet, nil); err == nil || !strings.Contains(err.Error(), "MaxAckPending") {
		t.Errorf("NewLedger = %v, want an error that names MaxAckPending", err)
	}
	if _, err := NewLedger(Config{Name: "a b", MaxBytes: 1}, nc, schemas.DecodeReport, quiet, nil); err == nil || !strings.Contains(err.Error(), "a b") || !strings.Contains(err.Error(), "MaxBytes") {
		t.Errorf("NewLedger = %v, want every mistake at once", err)
	}
	publish(t, js, "gw", 1, 300)
	j := &journal{}
	run(t, source(t, nc, Config{MaxMessages: 100, MaxAckPending: 100, MaxDelay: time.Second}, nil), j.handle)
	eventually(t, "all are handled", func() bool { return j.distinct() == 300 })
	for _, b := range j.batches {
		if len(b.Items) > 100 {
			t.Errorf("a batch has %d messages, want at most 100", len(b.Items))
		}
	}
}

// B024: bytes that are no text, straight onto the stream. They are counted once, under a reason of ours, and do not come again.
func TestB024PoisonIsCountedOnceAndStopsNothing(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 1)
	raw(t, js, schemas.UsagePrefix+"gw", []byte("{\"boot\":\"b\",\"seq\":2,\"usage\":[{\"ts\":\"2026-11-29T10:00:00Z\",\"tenant\":\"\xff\",\"route\":\"r\",\"allowed\":1}]}"))
	raw(t, js, schemas.UsagePrefix+"gw", []byte{0xff, 0xfe})
	publish(t, js, "gw", 4, 4)
	m := NewMetrics(prometheus.NewRegistry())
	j := &journal{}
	run(t, source(t, nc, Config{}, m), j.handle)
	eventually(t, "the good ones are handled", func() bool { return j.distinct() == 2 })
	eventually(t, "all are acknowledged", func() bool { return consumerInfo(t, js, "throttle").AckFloor.Stream == 4 })
	if n := testutil.ToFloat64(m.Refused.WithLabelValues("throttle", schemas.ReasonMalformed)); n != 2 {
		t.Errorf("refused = %v, want 2", n)
	}
}

func TestBatchesAreBoundedByBytes(t *testing.T) {
	_, nc, js := start(t)
	body := fmt.Appendf(nil, `{"boot":"b","seq":1,"usage":[]}%s`, strings.Repeat(" ", 900<<10))
	for range 6 {
		raw(t, js, schemas.UsagePrefix+"gw", body)
	}
	j := &journal{}
	run(t, ledger(t, nc, Config{MaxBytes: 2 << 20, MaxDelay: time.Second}, nil), j.handle)
	eventually(t, "all are handled", func() bool { return j.distinct() == 6 })
	for _, b := range j.batches {
		if len(b.Items) > 2 {
			t.Errorf("a batch has %d messages of 0.9 MiB, want at most 2", len(b.Items))
		}
	}
}

package jetstream

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

func TestPublisherStoresInOrderWithWhatTheFarSideNeeds(t *testing.T) {
	_, nc, js := start(t)
	p, err := NewPublisher(nc, "gw-1", nil)
	if err != nil {
		t.Fatal(err)
	}
	for seq := range uint64(3) {
		if err := p.Publish(t.Context(), report("boot", seq+1, 5)); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	for seq := uint64(1); seq <= 3; seq++ {
		msg, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		r, err := schemas.DecodeReport(msg.Subject, msg.Header.Get("Content-Type"), msg.Data, msg.Time)
		if err != nil {
			t.Fatal(err)
		}
		if r.Gateway != "gw-1" || r.Boot != "boot" || r.Seq != seq || r.Requests() != 5 || msg.Header.Get(jetstream.MsgIDHeader) != "" {
			t.Errorf("message %d = %+v with headers %v", seq, r, msg.Header)
		}
	}
}

// The answer to a publish is lost: the report is there, the gateway does not know, and tries again.
func TestPublisherStoresOnceWhenTheAckIsLost(t *testing.T) {
	url, _, js := start(t)
	px := newProxy(t, url)
	nc, _ := connect(t, px.url())
	p, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), report("b", 1, 1)); err != nil {
		t.Fatal(err)
	}
	px.deaf.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	second := report("b", 2, 7)
	if err := p.Publish(ctx, second); err == nil {
		t.Fatal("Publish = nil though no answer came")
	}
	eventually(t, "the report is in the stream", func() bool { return messages(t, js, schemas.UsageStream) == 2 })
	px.cut()
	px.deaf.Store(false)
	eventually(t, "the report is known to be stored", func() bool { return try(p, second) == nil })
	if err := p.Publish(t.Context(), report("b", 3, 1)); err != nil {
		t.Fatal(err)
	}
	if n := messages(t, js, schemas.UsageStream); n != 3 {
		t.Errorf("stream has %d messages, want 3", n)
	}
}

// The publish itself is lost.
func TestPublisherStoresOnceWhenTheReportIsLost(t *testing.T) {
	url, _, js := start(t)
	px := newProxy(t, url)
	nc, _ := connect(t, px.url())
	p, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), report("b", 1, 1)); err != nil {
		t.Fatal(err)
	}
	px.mute.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	second := report("b", 2, 7)
	if err := p.Publish(ctx, second); err == nil {
		t.Fatal("Publish = nil though nothing arrived")
	}
	px.cut()
	px.mute.Store(false)
	eventually(t, "the report is stored", func() bool { return try(p, second) == nil })
	if n := messages(t, js, schemas.UsageStream); n != 2 {
		t.Errorf("stream has %d messages, want 2", n)
	}
}

func try(p *Publisher, r *schemas.Report) error {
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	return p.Publish(ctx, r)
}

// B028: a window in which ids are remembered is no protection after it. There is none here: whenever a stored report
// comes again, from the process that sent it or from one that found it in a spool, it is not stored again.
func TestB028RepeatIsNotStoredAtAnyTime(t *testing.T) {
	_, nc, js := start(t)
	for range 4 {
		p, err := NewPublisher(nc, "gw", nil) // knows nothing
		if err != nil {
			t.Fatal(err)
		}
		for seq := uint64(1); seq <= 3; seq++ {
			for range 2 {
				if err := p.Publish(t.Context(), report("b", seq, 1)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if n := messages(t, js, schemas.UsageStream); n != 3 {
		t.Errorf("stream has %d messages, want 3", n)
	}
}

// Our report is stored, we do not know it, and somebody else's comes behind it.
// What the life before has stored is known after ours have been stored, too: those that are left of it come between ours.
func TestPublisherKnowsItsPredecessorsLastWords(t *testing.T) {
	_, nc, js := start(t)
	put := func(p *Publisher, boot string, seqs ...uint64) {
		t.Helper()
		for _, seq := range seqs {
			if err := p.Publish(t.Context(), report(boot, seq, 1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	one, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	put(one, "one", 1, 2, 3)
	two, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	put(two, "two", 1)
	put(two, "one", 1, 2, 3, 4)
	put(two, "two", 2, 2)
	put(two, "one", 4)
	if n := messages(t, js, schemas.UsageStream); n != 6 {
		t.Errorf("%d messages in the stream, want 6: one-1 to one-4, two-1 and two-2", n)
	}
}

func TestPublisherFindsItsReportBehindAnother(t *testing.T) {
	_, nc, js := start(t)
	p, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), report("b", 1, 1)); err != nil {
		t.Fatal(err)
	}
	last := p.last
	if err := p.Publish(t.Context(), report("b", 2, 1)); err != nil {
		t.Fatal(err)
	}
	p.last, p.seq = last, 1 // as if the answer had been lost
	other, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Publish(t.Context(), report("c", 1, 1)); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), report("b", 2, 1)); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), report("b", 3, 1)); err != nil {
		t.Fatal(err)
	}
	if n := messages(t, js, schemas.UsageStream); n != 4 {
		t.Errorf("stream has %d messages, want 4", n)
	}
}

// T5: message ids are one name space for a whole stream. Without them, no gateway can make another's report a duplicate.
func TestT5AnotherGatewayCannotSuppressOurs(t *testing.T) {
	_, nc, js := start(t)
	thief, err := NewPublisher(nc, "thief", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := thief.Publish(t.Context(), report("ours", 1, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), schemas.UsagePrefix+"thief", []byte("x"), jetstream.WithMsgID("ours-1")); err != nil {
		t.Fatal(err)
	}
	p, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), report("ours", 1, 99)); err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.GetLastMsgForSubject(t.Context(), schemas.UsagePrefix+"gw"); err != nil {
		t.Errorf("our report: %v", err)
	}
}

// FACTS 1.4: when the last message of the subject has expired, the next one follows message 0.
func TestPublisherGoesOnAfterEverythingHasExpired(t *testing.T) {
	_, nc, js := start(t)
	short(t, js, func(c *jetstream.StreamConfig) { c.MaxAge, c.Duplicates = 200*time.Millisecond, 200*time.Millisecond })
	p, err := NewPublisher(nc, "gw", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), report("b", 1, 1)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the report has expired", func() bool { return messages(t, js, schemas.UsageStream) == 0 })
	if err := p.Publish(t.Context(), report("b", 2, 1)); err != nil {
		t.Fatal(err)
	}
}

// short makes the usage stream anew with other settings.
func short(t *testing.T, js jetstream.JetStream, change func(*jetstream.StreamConfig)) {
	t.Helper()
	cfg := jetstream.StreamConfig{Name: schemas.UsageStream, Subjects: []string{schemas.UsagePrefix + "*"}, Discard: jetstream.DiscardNew}
	change(&cfg)
	if err := js.DeleteStream(t.Context(), schemas.UsageStream); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
}

func TestPublisherTellsWhyAReportIsNotStored(t *testing.T) {
	publish := func(t *testing.T, p *Publisher, r *schemas.Report) error {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err := p.Publish(ctx, r)
		if err == nil {
			t.Fatal("Publish = nil, want an error")
		}
		if !strings.Contains(err.Error(), "report 1 of boot b on weir.usage.v1.gw") {
			t.Errorf("Publish = %v, want it to name the report", err)
		}
		return err
	}
	counts := func(t *testing.T, m *Metrics, reason string) {
		t.Helper()
		if n := testutil.ToFloat64(m.PublishErrors.WithLabelValues(reason)); n != 1 {
			t.Errorf("weir_report_publish_errors_total{reason=%q} = %v, want 1", reason, n)
		}
		if n := testutil.CollectAndCount(m.PublishErrors); n != len(reasons) {
			t.Errorf("%d reasons, want %d", n, len(reasons))
		}
	}
	t.Run("full", func(t *testing.T) {
		_, nc, js := start(t)
		short(t, js, func(c *jetstream.StreamConfig) { c.MaxBytes = 2000 })
		m := NewMetrics(prometheus.NewRegistry())
		p, err := NewPublisher(nc, "gw", m)
		if err != nil {
			t.Fatal(err)
		}
		_ = publish(t, p, report("b", 1, make([]uint64, 500)...))
		counts(t, m, "full")
		if err := p.Publish(t.Context(), report("b", 2, 1)); err != nil { // there is room for a small one
			t.Fatal(err)
		}
	})
	t.Run("no stream", func(t *testing.T) {
		_, nc, js := start(t)
		if err := js.DeleteStream(t.Context(), schemas.UsageStream); err != nil {
			t.Fatal(err)
		}
		m := NewMetrics(prometheus.NewRegistry())
		p, err := NewPublisher(nc, "gw", m)
		if err != nil {
			t.Fatal(err)
		}
		p.known = true
		_ = publish(t, p, report("b", 1, 1))
		counts(t, m, "no_stream")
		p.known = false
		_ = publish(t, p, report("b", 1, 1))
	})
	t.Run("disconnected", func(t *testing.T) {
		url, _, _ := start(t)
		px := newProxy(t, url)
		nc, _ := connect(t, px.url())
		_ = px.l.Close()
		px.cut()
		eventually(t, "the connection is down", func() bool { return !nc.IsConnected() })
		m := NewMetrics(prometheus.NewRegistry())
		p, err := NewPublisher(nc, "gw", m)
		if err != nil {
			t.Fatal(err)
		}
		_ = publish(t, p, report("b", 1, 1))
		if most := p.MaxPayload(); most != 1<<20 {
			t.Errorf("MaxPayload = %d while the server is away, want what it said last: 1 MiB", most)
		}
		counts(t, m, "disconnected")
	})
	t.Run("too large", func(t *testing.T) {
		url := custom(t, server.Options{MaxPayload: 4 << 10})
		nc, js := connect(t, url)
		declare(t, js)
		m := NewMetrics(prometheus.NewRegistry())
		p, err := NewPublisher(nc, "gw", m)
		if err != nil {
			t.Fatal(err)
		}
		if err := publish(t, p, report("b", 1, make([]uint64, 500)...)); !errors.Is(err, ErrTooLarge) {
			t.Errorf("Publish = %v, want %v", err, ErrTooLarge)
		}
		if most := p.MaxPayload(); most != 4<<10 {
			t.Errorf("MaxPayload = %d, want what the server says: 4096", most)
		}
		counts(t, m, "too_large")
	})
	// T7: the server does not answer a forbidden publish.
	t.Run("permission", func(t *testing.T) {
		url := custom(t, server.Options{Users: []*server.User{
			{Username: "admin", Password: "a"},
			{Username: "gw", Password: "g", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Allow: []string{schemas.UsagePrefix + "other", "$JS.API.>"}}}},
		}})
		_, js := connect(t, strings.Replace(url, "://", "://admin:a@", 1))
		declare(t, js)
		natsMetrics := natsx.NewMetrics(prometheus.NewRegistry())
		nc, err := natsx.ConnectCheck(t.Context(), natsx.Config{URL: strings.Replace(url, "://", "://gw:g@", 1)}, quiet, natsMetrics)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		m := NewMetrics(prometheus.NewRegistry())
		p, err := NewPublisher(nc, "gw", m)
		if err != nil {
			t.Fatal(err)
		}
		_ = publish(t, p, report("b", 1, 1))
		counts(t, m, "permission")
		if n := testutil.ToFloat64(natsMetrics.Errors.WithLabelValues("permission")); n == 0 {
			t.Error("weir_nats_errors_total{reason=permission} = 0, want it counted")
		}
	})
}

func TestPublisherRefusesANameThatIsNoSubjectToken(t *testing.T) {
	_, nc, _ := start(t)
	for _, name := range []string{"", "a b", "a.b", "*", ">", "a\r\nPUB x 0\r\n", strings.Repeat("g", 65)} {
		if _, err := NewPublisher(nc, name, nil); err == nil {
			t.Errorf("NewPublisher(%q) = nil, want an error", name)
		}
	}
}

package natsfeed_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/alerting/natsfeed"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

const (
	firing   = schemas.AlertFiring
	resolved = schemas.AlertResolved
)

// From a report to on-call and back, over a real server and a real receiver.
func TestFromReportToWebhook(t *testing.T) {
	t.Parallel()
	_, nc, js := server(t)
	h := newHook(t, always(200))
	start(t, newFeed(t, nc, js).Run)
	start(t, natsfeed.NewSender(natsfeed.SenderConfig{}, js, h.receiver(t, 0), embeddedtest.Log(t), nil).Run)
	g := &gateway{level: 2}
	g.run(t, nc, js, "g1")
	eventually(t, "an alert at the webhook", func() bool { return len(h.taken()) == 1 })
	g.set(90)
	eventually(t, "its end at the webhook", func() bool { return len(h.taken()) == 2 })

	all := alerts(t, js, schemas.AlertsStream)
	wantTypes(t, all, firing, resolved)
	if a := all[0]; a.Name != alerting.LowTokens || a.DedupKey != "low-tokens/contract/acme" || a.Tenant != "acme" {
		t.Errorf("stored %+v", a)
	}
	for i, a := range h.all() {
		if want := alerting.MessageID(&all[i]); a.id != want {
			t.Errorf("webhook-id %s, want %s", a.id, want)
		}
		if got, err := schemas.DecodeAlert([]byte(a.body)); err != nil || !got.StartsAt.Equal(all[i].StartsAt) || got.Type != all[i].Type {
			t.Errorf("body %s, want that of the stream (%v)", a.body, err)
		}
	}
}

// After a restart, wherever it came, nothing is said twice and nothing is left unsaid.
func TestRestart(t *testing.T) {
	t.Parallel()
	url, nc, js := server(t)
	g := &gateway{level: 2}
	g.run(t, nc, js, "g1")
	stop := start(t, newFeed(t, nc, js).Run)
	stored := func(n int) func() bool { return func() bool { return len(alerts(t, js, schemas.AlertsStream)) >= n } }
	eventually(t, "an alert", stored(1))
	stop()

	// Another process: the alert still fires, and is not said again.
	nc2, js2 := connect(t, url)
	stop = start(t, newFeed(t, nc2, js2).Run)
	time.Sleep(time.Second) // three times what it takes to fire
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing)
	stop()

	// It ends while no alerter runs, and the next one says so.
	g.set(90)
	stop = start(t, newFeed(t, nc, js).Run)
	eventually(t, "its end", stored(2))
	g.set(2)
	eventually(t, "the next alert", stored(3))
	stop()
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing, resolved, firing)
}

// flaky is a JetStream that loses what the test says.
type flaky struct {
	jetstream.JetStream
	publish func(ctx context.Context, msg *nats.Msg, send func() (*jetstream.PubAck, error)) (*jetstream.PubAck, error)
}

func (f *flaky) PublishMsg(ctx context.Context, msg *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	return f.publish(ctx, msg, func() (*jetstream.PubAck, error) { return f.JetStream.PublishMsg(ctx, msg, opts...) })
}

func TestCrashPoints(t *testing.T) {
	t.Parallel()
	lost := errors.New("lost")
	t.Run("after deciding, before storing", func(t *testing.T) {
		_, nc, js := server(t)
		g := &gateway{level: 2}
		g.run(t, nc, js, "g1")
		var tried atomic.Int32
		stop := start(t, newFeed(t, nc, &flaky{js, func(context.Context, *nats.Msg, func() (*jetstream.PubAck, error)) (*jetstream.PubAck, error) {
			tried.Add(1)
			return nil, lost
		}}).Run)
		eventually(t, "a few attempts to store", func() bool { return tried.Load() > 3 })
		stop() // dies with the change in memory
		wantTypes(t, alerts(t, js, schemas.AlertsStream))
		start(t, newFeed(t, nc, js).Run)
		eventually(t, "the alert", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 0 })
		g.set(90)
		eventually(t, "its end", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 1 })
		wantTypes(t, alerts(t, js, schemas.AlertsStream), firing, resolved)
	})
	for name, crash := range map[string]bool{"after storing, the acknowledgement lost": false, "after storing, before anything else": true} {
		t.Run(name, func(t *testing.T) {
			_, nc, js := server(t)
			g := &gateway{level: 2}
			g.run(t, nc, js, "g1")
			var stored atomic.Int32
			stop := start(t, newFeed(t, nc, &flaky{js, func(ctx context.Context, msg *nats.Msg, send func() (*jetstream.PubAck, error)) (*jetstream.PubAck, error) {
				ack, err := send()
				if err == nil && stored.Add(1) == 1 {
					return nil, lost
				}
				return ack, err
			}}).Run)
			eventually(t, "the alert", func() bool { return stored.Load() > 0 })
			if crash {
				stop()
				start(t, newFeed(t, nc, js).Run)
			}
			time.Sleep(time.Second)
			wantTypes(t, alerts(t, js, schemas.AlertsStream), firing)
			g.set(90)
			eventually(t, "its end", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 1 })
			wantTypes(t, alerts(t, js, schemas.AlertsStream), firing, resolved)
		})
	}
}

// Alerters that run side by side see the same, and say it once.
func TestTwoAlerters(t *testing.T) {
	t.Parallel()
	url, nc, js := server(t)
	for range 3 {
		nc, js := connect(t, url)
		start(t, newFeed(t, nc, js).Run)
	}
	g := &gateway{level: 2}
	g.run(t, nc, js, "g1")
	want := []string{}
	for i := range 3 {
		g.set(2)
		eventually(t, "an alert", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 2*i })
		g.set(90)
		eventually(t, "its end", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 2*i+1 })
		want = append(want, firing, resolved)
	}
	time.Sleep(500 * time.Millisecond)
	wantTypes(t, alerts(t, js, schemas.AlertsStream), want...)
}

// One alerter dies, and the one beside it ends what that one began.
func TestStandbyTakesOver(t *testing.T) {
	t.Parallel()
	url, nc, js := server(t)
	stop := start(t, newFeed(t, nc, js).Run)
	g := &gateway{level: 2}
	g.run(t, nc, js, "g1")
	eventually(t, "an alert", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 0 })
	nc2, js2 := connect(t, url)
	// It stays well below firing by itself.
	m := alerting.NewMetrics(prometheus.NewRegistry())
	slow := quick
	slow.LowTokensFor = time.Hour
	start(t, natsfeed.New(natsfeed.Config{Tick: 20 * time.Millisecond, Poll: 100 * time.Millisecond}, nc2, js2, alerting.New(slow, m), embeddedtest.Log(t), m).Run)
	g.set(90)
	eventually(t, "its end", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 1 })
	knows := func(n float64) func() bool {
		return func() bool { return testutil.ToFloat64(m.Firing.WithLabelValues(alerting.LowTokens)) == n }
	}
	eventually(t, "the other one to know of the end", knows(0))
	g.set(2)
	eventually(t, "another alert", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 2 })
	eventually(t, "the other one to know", knows(1))
	stop()
	g.set(90)
	eventually(t, "its end", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 3 })
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing, resolved, firing, resolved)
}

// deaf is a JetStream that delivers no reports.
type deaf struct{ jetstream.JetStream }

func (d deaf) OrderedConsumer(ctx context.Context, stream string, cfg jetstream.OrderedConsumerConfig) (jetstream.Consumer, error) {
	if stream == schemas.UsageStream {
		cfg.FilterSubjects = []string{schemas.UsagePrefix + "nobody"}
	}
	return d.JetStream.OrderedConsumer(ctx, stream, cfg)
}

// An alerter to which no reports come, though there are some, does not take that for calm.
func TestB046TheAlerterIsBlind(t *testing.T) {
	t.Parallel()
	_, nc, js := server(t)
	a := schemas.Alert{Type: firing, Name: alerting.Anomaly, Severity: schemas.SeverityWarning, DedupKey: "anomaly/acme", Tenant: "acme", StartsAt: time.Now().UTC()}
	body, err := schemas.EncodeAlert(&a)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), schemas.AlertPrefix+a.Severity, body, jetstream.WithMsgID(alerting.MessageID(&a))); err != nil {
		t.Fatal(err)
	}
	(&gateway{level: 90}).run(t, nc, js, "g1")
	m := alerting.NewMetrics(prometheus.NewRegistry())
	patient := alerting.Config{LowTokensFor: quick.LowTokensFor, Hold: 5 * time.Second} // it is seen to be blind before, also on a busy machine
	stop := start(t, natsfeed.New(natsfeed.Config{Tick: 20 * time.Millisecond, Poll: 100 * time.Millisecond}, nc, deaf{js}, alerting.New(patient, m), embeddedtest.Log(t), m).Run)
	eventually(t, "somebody to be told", func() bool { return testutil.ToFloat64(m.Degraded) == 1 })
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing)
	stop()
	if got := testutil.ToFloat64(m.Degraded); got != 0 {
		t.Errorf("degraded after the stop = %v, want 0", got)
	}
	start(t, newFeed(t, nc, js).Run) // one that hears
	eventually(t, "its end", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 1 })
}

// The server goes and comes back: nothing is said about that, and what is said then is right.
func TestServerIsRestarted(t *testing.T) {
	t.Parallel()
	nc, js, stop, again := restartable(t)
	start(t, newFeed(t, nc, js).Run)
	g := &gateway{level: 2}
	g.run(t, nc, js, "g1")
	eventually(t, "an alert", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 0 })

	stop()
	time.Sleep(time.Second)
	again()
	eventually(t, "the connection", nc.IsConnected)
	time.Sleep(time.Second)
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing)
	g.set(90)
	eventually(t, "its end", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 1 })
	wantTypes(t, alerts(t, js, schemas.AlertsStream), firing, resolved)
}

// An alerter that starts first waits for the streams.
func TestStreamsComeLater(t *testing.T) {
	t.Parallel()
	nc, js := connect(t, embeddedtest.NATS(t).URL())
	start(t, newFeed(t, nc, js).Run)
	start(t, natsfeed.NewSender(natsfeed.SenderConfig{}, js, newHook(t, always(200)).receiver(t, 0), embeddedtest.Log(t), nil).Run)
	time.Sleep(200 * time.Millisecond)
	if err := natsx.Declare(t.Context(), js, natsx.Storage{}); err != nil {
		t.Fatal(err)
	}
	(&gateway{level: 2}).run(t, nc, js, "g1")
	eventually(t, "an alert", func() bool { return len(alerts(t, js, schemas.AlertsStream)) > 0 })
}

// What is not ours, and what cannot be read, harms nothing.
func TestStrangersInTheStreams(t *testing.T) {
	t.Parallel()
	_, nc, js := server(t)
	for subject, bodies := range map[string][]string{
		schemas.UsagePrefix + "g9":                        {"", "garbage", `{"boot":"b","seq":0}`},
		schemas.AlertPrefix + schemas.SeverityInfo:        {"", "garbage", `{"type":"weir.alert.firing","alert":"ledger-mismatch","dedup_key":"x"}`},
		schemas.AlertPrefix + "something-else-altogether": {`{"type":"weir.alert.resolved","alert":"low-tokens","dedup_key":"low-tokens/contract/acme"}`},
	} {
		for _, body := range bodies {
			if _, err := js.Publish(t.Context(), subject, []byte(body)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := nc.Publish(schemas.HeartbeatPrefix+"g9", []byte("\xff\xff")); err != nil {
		t.Fatal(err)
	}
	start(t, newFeed(t, nc, js).Run)
	(&gateway{level: 2}).run(t, nc, js, "g1")
	eventually(t, "an alert", func() bool {
		stream, err := js.Stream(t.Context(), schemas.AlertsStream)
		if err != nil {
			t.Fatal(err)
		}
		return stream.CachedInfo().State.LastSeq == 5
	})
}

package natsx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/faultproxy"
	"github.com/weirhq/weir/internal/obs/obstest"
	"github.com/weirhq/weir/schemas"
)

const patience = 30 * time.Second

var quiet = slog.New(slog.DiscardHandler)

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func startAt(t *testing.T, cfg nats.Config) *nats.Server {
	t.Helper()
	s, err := nats.Start(cfg, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func port(t *testing.T, s string) int {
	t.Helper()
	u, err := url.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	p, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestUnreachableServerIsOneClearLine(t *testing.T) {
	addr := freeAddr(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := ConnectCheck(ctx, Config{URL: "nats://weir:s3cret@" + addr}, quiet, nil)
	if !errors.Is(err, ErrUnreachable) {
		t.Fatalf("ConnectCheck = %v, want %v", err, ErrUnreachable)
	}
	if s := err.Error(); !strings.Contains(s, addr) || strings.Contains(s, "s3cret") || strings.Contains(s, "\n") {
		t.Errorf("ConnectCheck = %q, want one line that names %s and no secret", s, addr)
	}
}

// A server that is not there from the start: the log says why it cannot be reached, then and later.
func TestUnreachableServerIsLoggedWithItsReason(t *testing.T) {
	var out obstest.Lines
	nc, err := Connect(Config{URL: "nats://" + freeAddr(t), RetryWait: time.Millisecond, LogEvery: time.Millisecond}, slog.New(slog.NewTextHandler(&out, nil)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	eventually(t, "a summary", func() bool { return strings.Contains(out.String(), "still away") })
	for line := range strings.Lines(out.String()) {
		if !strings.Contains(line, "connection refused") || strings.Contains(line, "buffer") {
			t.Errorf("log has %q, want the reason", line)
		}
	}
}

// A server that hangs is waited for in the background, and taken once it speaks.
func TestASilentServerHoldsUpNoStart(t *testing.T) {
	hung, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := hung.Addr().String()
	began := time.Now()
	nc, err := Connect(Config{URL: freeAddr(t) + "," + address, Timeout: 30 * time.Second, RetryWait: 10 * time.Millisecond}, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("Connect took %s beside a server that says nothing", took)
	}
	if err := hung.Close(); err != nil { // and with it what waits to be accepted
		t.Fatal(err)
	}
	startAt(t, nats.Config{Dir: t.TempDir(), Port: port(t, "nats://"+address)})
	eventually(t, "the server is taken once it speaks", nc.IsConnected)
}

// While a server that went silent is looked for, nobody who uses the connection waits for that: the client has its lock while it
// dials, and a gateway writes its counts to disk beside it.
func TestASilentServerHoldsUpNobodyWhoUsesTheConnection(t *testing.T) {
	for _, servers := range []int{1, 2} {
		var urls []string
		var proxies []*faultproxy.Proxy
		for range servers {
			p, err := faultproxy.Start("127.0.0.1:0", strings.TrimPrefix(embeddedtest.NATS(t).URL(), "nats://"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(p.Close)
			proxies, urls = append(proxies, p), append(urls, p.Addr())
		}
		m := NewMetrics(prometheus.NewRegistry())
		nc, err := Connect(Config{URL: strings.Join(urls, ","), Timeout: 10 * patience, RetryWait: time.Millisecond}, quiet, m)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		eventually(t, "it is connected", nc.IsConnected)
		for range 3 {
			for _, p := range proxies {
				p.Set(faultproxy.Faults{Hold: true})
				p.Cut(true)
			}
			eventually(t, "it is away", func() bool { return testutil.ToFloat64(m.Connected) == 0 })
			eventually(t, "a server is asked, and says nothing", func() bool {
				for _, p := range proxies {
					if p.Connections() > 0 {
						return true
					}
				}
				return false
			})
			asked := make(chan error, 1)
			go func() {
				for range 1000 {
					_, _, _ = nc.MaxPayload(), nc.Stats(), nc.LastError()
					if nc.IsConnected() {
						asked <- errors.New("it is connected to a server that says nothing")
						return
					}
				}
				asked <- nil
			}()
			select {
			case err := <-asked:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(patience): // a tenth of what the server is waited for
				t.Fatalf("the connection to %d silent servers answers nobody", servers)
			}
			for _, p := range proxies {
				p.Set(faultproxy.Faults{})
			}
			eventually(t, "a server is taken once it speaks", func() bool { return testutil.ToFloat64(m.Connected) == 1 })
		}
	}
}

// A server that takes nothing off our hands is given up when there is no more room for what it is sent: until then the client has its
// lock, for a minute if nobody says otherwise, and does not even see that no ping is answered.
func TestAServerThatTakesNothingIsGivenUp(t *testing.T) {
	p, err := faultproxy.Start("127.0.0.1:0", strings.TrimPrefix(embeddedtest.NATS(t).URL(), "nats://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	m := NewMetrics(prometheus.NewRegistry())
	nc, err := Connect(Config{URL: p.Addr()}, quiet, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	eventually(t, "it is connected", func() bool { return testutil.ToFloat64(m.Connected) == 1 })
	p.Set(faultproxy.Faults{Hold: true})
	go func() {
		for nc.Publish("x", make([]byte, 1<<20)) == nil {
		}
	}()
	eventually(t, "it is given up", func() bool { return testutil.ToFloat64(m.Connected) == 0 })
}

// Of several servers the next is taken when one is gone, whether that one is refused or silent.
func TestAnotherServerIsTakenForOneThatIsSilent(t *testing.T) {
	var urls []string
	var proxies []*faultproxy.Proxy
	for range 2 {
		p, err := faultproxy.Start("127.0.0.1:0", strings.TrimPrefix(embeddedtest.NATS(t).URL(), "nats://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		proxies, urls = append(proxies, p), append(urls, p.Addr())
	}
	nc, err := Connect(Config{URL: strings.Join(urls, ","), Timeout: time.Second, RetryWait: time.Millisecond}, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	for _, f := range []faultproxy.Faults{{Hold: true}, {Refuse: true}} {
		for away := range proxies {
			proxies[away].Set(f)
			proxies[away].Cut(true)
			eventually(t, "the other one is taken", func() bool { return nc.IsConnected() && nc.ConnectedAddr() == urls[1-away] })
			proxies[away].Set(faultproxy.Faults{})
		}
	}
}

func TestWrongPasswordIsOneClearLineAtOnce(t *testing.T) {
	srv := startAt(t, nats.Config{Dir: t.TempDir(), User: "weir", Password: "right"})
	at := strings.TrimPrefix(srv.URL(), "nats://")
	_, err := ConnectCheck(t.Context(), Config{URL: "nats://weir:s3cret@" + at}, quiet, nil)
	if !errors.Is(err, ErrUnreachable) {
		t.Fatalf("ConnectCheck = %v, want %v", err, ErrUnreachable)
	}
	if s := err.Error(); !strings.Contains(s, at) || !strings.Contains(s, "password") || strings.Contains(s, "s3cret") || strings.Contains(s, "\n") {
		t.Errorf("ConnectCheck = %q, want one line that names %s and the password's fault, and no secret", s, at)
	}
	nc, err := ConnectCheck(t.Context(), Config{URL: "nats://weir:right@" + at}, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
}

func TestBadURLIsNotQuoted(t *testing.T) {
	for _, u := range []string{"nats://weir:s3cret@ho st:4222", "nats://weir:s3cret%zz@h:4222", "nats://", "nats://weir:s3cret@h:4222,://s3cret"} {
		_, err := Connect(Config{URL: u}, quiet, nil)
		if err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("Connect(%q) = %v, want an error without the secret", u, err)
		}
	}
}

func TestRedact(t *testing.T) {
	for in, want := range map[string]string{
		"nats://127.0.0.1:4222":         "nats://127.0.0.1:4222",
		"127.0.0.1:4222":                "nats://127.0.0.1:4222",
		"nats://u:p@h:4222":             "nats://u:***@h:4222",
		"nats://token@h:4222":           "nats://***@h:4222",
		"tls://u:p@h:1, nats://v:q@i:2": "tls://u:***@h:1,nats://v:***@i:2",
		"nats://u:p@ h:4222":            "(not a URL)",
	} {
		if got := Redact(in); got != want {
			t.Errorf("Redact(%q) = %q, want %q", in, got, want)
		}
	}
}

// T18: the default gives up after 60 attempts. Here the server is not there at first, comes, goes and comes again.
func TestT18ConnectionIsNeverGivenUp(t *testing.T) {
	addr := freeAddr(t)
	_, p, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(p)
	if err != nil {
		t.Fatal(err)
	}
	var out obstest.Lines
	m := NewMetrics(prometheus.NewRegistry())
	nc, err := Connect(Config{URL: "nats://" + addr, RetryWait: time.Millisecond, Name: "gw"}, slog.New(slog.NewTextHandler(&out, nil)), m)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	gauges := func(connected, degraded float64) func() bool {
		return func() bool {
			return testutil.ToFloat64(m.Connected) == connected && testutil.ToFloat64(m.Degraded) == degraded
		}
	}
	eventually(t, "it is degraded", gauges(0, 1))
	if err := nc.Publish("x", nil); err == nil {
		t.Error("Publish = nil while there is no server: it would be sent late")
	}
	cfg := nats.Config{Dir: t.TempDir(), Port: n}
	for range 2 {
		srv := startAt(t, cfg)
		eventually(t, "it is connected", gauges(1, 0))
		srv.Stop()
		eventually(t, "it is degraded", gauges(0, 1))
	}
	tries := nc.Stats().Reconnects
	startAt(t, cfg)
	eventually(t, "it is connected", gauges(1, 0))
	if nc.Opts.MaxReconnect != -1 || !nc.Opts.RetryOnFailedConnect || !nc.Opts.IgnoreAuthErrorAbort {
		t.Errorf("options = %d, %t, %t", nc.Opts.MaxReconnect, nc.Opts.RetryOnFailedConnect, nc.Opts.IgnoreAuthErrorAbort)
	}
	nc.Close()
	eventually(t, "nothing is left in the gauges", gauges(0, 0))
	if away, back := strings.Count(out.String(), "NATS is away"), strings.Count(out.String(), "NATS is back"); away != 3 || back != 3 {
		t.Errorf("told %d outages and %d ends, want 3 and 3 (reconnects %d):\n%s", away, back, tries, out.String())
	}
}

// Credentials that are refused while we run, and put right on the server, must not have cost us the connection.
func TestRefusedCredentialsAreTriedAgain(t *testing.T) {
	dir := t.TempDir()
	srv := startAt(t, nats.Config{Dir: dir, User: "weir", Password: "old"})
	p := port(t, srv.URL())
	m := NewMetrics(prometheus.NewRegistry())
	nc, err := Connect(Config{URL: fmt.Sprintf("nats://weir:old@127.0.0.1:%d", p), RetryWait: time.Millisecond}, quiet, m)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	srv.Stop()
	srv = startAt(t, nats.Config{Dir: dir, User: "weir", Password: "new", Port: p})
	eventually(t, "it was refused more than twice", func() bool { return testutil.ToFloat64(m.Errors.WithLabelValues("auth")) > 3 })
	srv.Stop()
	startAt(t, nats.Config{Dir: dir, User: "weir", Password: "old", Port: p})
	eventually(t, "it is connected", nc.IsConnected)
}

// T7: that a subject is forbidden shows nowhere else.
func TestT7ForbiddenSubjectIsToldOnceAndCounted(t *testing.T) {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, Users: []*server.User{
		{Username: "gw", Password: "g", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Allow: []string{"ok"}}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("server is not ready")
	}
	var out obstest.Lines
	m := NewMetrics(prometheus.NewRegistry())
	nc, err := ConnectCheck(t.Context(), Config{URL: strings.Replace(s.ClientURL(), "://", "://gw:g@", 1)}, slog.New(slog.NewTextHandler(&out, nil)), m)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	for range 5 {
		if err := nc.Publish("forbidden", nil); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all are counted", func() bool { return testutil.ToFloat64(m.Errors.WithLabelValues("permission")) == 5 })
	if n := strings.Count(out.String(), "level=ERROR"); n != 1 || !strings.Contains(out.String(), "configuration") || !strings.Contains(out.String(), "forbidden") {
		t.Errorf("told %d times, want once, as a fault of the configuration:\n%s", n, out.String())
	}
}

func js(t *testing.T) (context.Context, jetstream.JetStream, func() []Problem) {
	t.Helper()
	nc, err := ConnectCheck(t.Context(), Config{URL: embeddedtest.NATS(t).URL()}, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return t.Context(), js, func() []Problem {
		own, err := Problems(t.Context(), nc, js, true)
		if err != nil {
			t.Fatal(err)
		}
		all, err := Problems(t.Context(), nc, js, false)
		if err != nil {
			t.Fatal(err)
		}
		if len(all) != len(own)+1 { // the note about sync_interval, which an embedded server needs no reminder of
			t.Errorf("problems of an embedded server %v, of another one %v, want a note more", own, all)
		}
		for _, p := range all {
			if s := p.String(); strings.Contains(s, "("+p.Trap+")") || strings.Contains(s, "any role") {
				t.Errorf("%q names a trap, or the wrong role", s)
			}
		}
		var open []Problem
		for _, p := range all {
			if !p.Note {
				open = append(open, p)
			}
		}
		return open
	}
}

func TestDeclareMakesWhatWeirLivesOn(t *testing.T) {
	ctx, js, problems := js(t)
	if p := problems(); len(p) != 3 {
		t.Errorf("problems before = %v, want three streams missing", p)
	}
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs { // every role does it when it starts
		wg.Go(func() { errs[i] = Declare(ctx, js, Storage{}) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for name, subjects := range map[string]string{schemas.UsageStream: "weir.usage.v1.*", schemas.AlertsStream: "weir.alert.v1.*", schemas.DeadStream: "weir.dlq.v1.*"} {
		s, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		c := s.CachedInfo().Config
		if len(c.Subjects) != 1 || c.Subjects[0] != subjects || c.Storage != jetstream.FileStorage || c.Retention != jetstream.LimitsPolicy || c.Discard != jetstream.DiscardNew ||
			c.DenyDelete != (c.Name != schemas.DeadStream) || !c.DenyPurge || c.MaxBytes <= 0 || c.Duplicates != 10*time.Minute || c.AllowDirect {
			t.Errorf("stream %s = %+v", name, c)
		}
		if name == schemas.UsageStream && c.MaxAge != 7*24*time.Hour {
			t.Errorf("max_age of usage = %s, want 7 days", c.MaxAge)
		}
	}
	for _, name := range []string{PolicyBucket, SwitchesBucket, HistoryBucket} {
		if _, err := js.KeyValue(ctx, name); err != nil {
			t.Errorf("bucket %s: %v", name, err)
		}
	}
	if p := problems(); len(p) != 0 {
		t.Errorf("problems after = %v, want none", p)
	}
	if err := Declare(ctx, js, Storage{UsageMaxBytes: 1 << 20, UsageMaxAge: 48 * time.Hour}); err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(ctx, schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	if c := s.CachedInfo().Config; c.MaxBytes != 1<<20 || c.MaxAge != 48*time.Hour {
		t.Errorf("after a change: %d bytes, %s, want 1 MiB and 48h", c.MaxBytes, c.MaxAge)
	}
	if err := Declare(ctx, js, Storage{}); err != nil { // keeps them
		t.Fatal(err)
	}
	if s, err = js.Stream(ctx, schemas.UsageStream); err != nil || s.CachedInfo().Config.MaxBytes != 1<<20 {
		t.Errorf("declared again: %v, %v", s.CachedInfo().Config.MaxBytes, err)
	}
	body := make([]byte, 800<<10)
	if _, err := js.Publish(ctx, schemas.UsagePrefix+"gw", body); err != nil {
		t.Fatal(err)
	}
	if p := problems(); len(p) != 1 || p[0].Trap != "T19" || !strings.Contains(p[0].Text, "% full") {
		t.Errorf("problems of a stream at 78 %% = %v", p)
	}
}

// A stream that somebody made before us, with settings that lose usage.
func TestDeclareRefusesAStreamThatLosesUsage(t *testing.T) {
	for _, c := range []struct {
		setting string
		change  func(*jetstream.StreamConfig)
	}{
		{"discard", func(c *jetstream.StreamConfig) { c.Discard = jetstream.DiscardOld }},
		{"retention", func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy }},
		{"retention", func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }},
		{"storage", func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }},
		{"max_msgs_per_subject", func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 }},
		{"no_ack", func(c *jetstream.StreamConfig) { c.NoAck = true }},
		{"max_age", func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour }},
		{"max_msg_size", func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1000 }},
		{"subjects", func(c *jetstream.StreamConfig) { c.Subjects = []string{"weir.usage.v1.a"} }},
		{"persist_mode", func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode }},
	} {
		t.Run(c.setting, func(t *testing.T) {
			ctx, js, problems := js(t)
			cfg := Storage{}.streams()[0]
			c.change(&cfg)
			if _, err := js.CreateStream(ctx, cfg); err != nil {
				t.Fatal(err)
			}
			err := Declare(ctx, js, Storage{})
			if err == nil || !strings.Contains(err.Error(), schemas.UsageStream) || !strings.Contains(err.Error(), c.setting) {
				t.Fatalf("Declare = %v, want an error that names %s and %s", err, schemas.UsageStream, c.setting)
			}
			named := false
			for _, p := range problems() {
				named = named || p.Where == schemas.UsageStream && strings.Contains(p.Text, c.setting)
			}
			if !named {
				t.Errorf("problems = %v, want one that names %s", problems(), c.setting)
			}
			if _, err := js.Stream(ctx, schemas.DeadStream); err != nil {
				t.Errorf("the other streams: %v", err)
			}
		})
	}
	t.Run("bucket", func(t *testing.T) {
		ctx, js, _ := js(t)
		if _, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: HistoryBucket, Storage: jetstream.MemoryStorage, TTL: time.Hour}); err != nil {
			t.Fatal(err)
		}
		if err := Declare(ctx, js, Storage{}); err == nil || !strings.Contains(err.Error(), HistoryBucket) || !strings.Contains(err.Error(), "storage") || !strings.Contains(err.Error(), "ttl") {
			t.Errorf("Declare = %v, want an error that names the bucket, its storage and its ttl", err)
		}
	})
}

// T8 and its like: settings of consumers that lose messages.
func TestProblemsOfConsumers(t *testing.T) {
	ctx, js, problems := js(t)
	if err := Declare(ctx, js, Storage{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []jetstream.ConsumerConfig{
		{Durable: "gives-up", MaxDeliver: 5, AckPolicy: jetstream.AckExplicitPolicy},
		{Durable: "forgets", InactiveThreshold: time.Hour, AckPolicy: jetstream.AckExplicitPolicy},
		{Durable: "deaf", AckPolicy: jetstream.AckNonePolicy},
		{Durable: "fine", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: -1},
	} {
		if _, err := js.CreateConsumer(ctx, schemas.UsageStream, c); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string]string{}
	for _, p := range problems() {
		got[p.Where] = p.String()
	}
	for where, what := range map[string]string{"gives-up": "max_deliver is 5", "forgets": "inactive_threshold", "deaf": "ack_policy"} {
		if !strings.Contains(got[schemas.UsageStream+"/"+where], what) {
			t.Errorf("problems = %v, want %s: %s", got, where, what)
		}
	}
	if len(got) != 3 {
		t.Errorf("problems = %v, want three", got)
	}
}

func TestOlder(t *testing.T) {
	for _, c := range []struct {
		v    string
		want bool
	}{{"2.9.25", true}, {"2.13.99", true}, {"2.14.0", false}, {"2.15.2", false}, {"3.0.0", false}, {"2.14.0-RC.1", false}, {"", false}} {
		if got := older(c.v, minServer); got != c.want {
			t.Errorf("older(%q) = %t, want %t", c.v, got, c.want)
		}
	}
}

// T5: the answer to a direct read can be an empty message anywhere, which deletes a stream where it meets that API: gateways read the
// bucket of marks otherwise. Positions have a history, for what is written over them. Buckets of an earlier version are changed.
func TestT5BucketsThatGatewaysCannotAbuse(t *testing.T) {
	for _, before := range []bool{false, true} {
		ctx, js, problems := js(t)
		if before {
			for _, b := range []string{HistoryBucket, StoredBucket} {
				if _, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: b, History: 1, Storage: jetstream.FileStorage}); err != nil {
					t.Fatal(err)
				}
			}
			if p := fmt.Sprint(problems()); !strings.Contains(p, "weir-stored: allow_direct is true") {
				t.Errorf("problems = %s, want that marks are read directly", p)
			}
		}
		if err := Declare(ctx, js, Storage{}); err != nil {
			t.Fatal(err)
		}
		for bucket, want := range map[string]struct {
			direct  bool
			history int64
		}{HistoryBucket: {true, 64}, StoredBucket: {false, 1}} {
			s, err := js.Stream(ctx, "KV_"+bucket)
			if err != nil {
				t.Fatal(err)
			}
			if is := s.CachedInfo().Config; is.AllowDirect != want.direct || is.MaxMsgsPerSubject != want.history {
				t.Errorf("bucket %s: allow_direct %t and a history of %d, want %+v", bucket, is.AllowDirect, is.MaxMsgsPerSubject, want)
			}
		}
		if p := problems(); len(p) != 0 {
			t.Errorf("problems = %v, want none", p)
		}
	}
}

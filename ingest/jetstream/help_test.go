package jetstream

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// patience bounds waits for what must happen at some time; no test depends on how long it took.
const patience = 30 * time.Second

func connect(t testing.TB, url string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	nc, err := natsx.ConnectCheck(ctx, natsx.Config{URL: url, RetryWait: 20 * time.Millisecond}, quiet, nil)
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

// start returns a connection to a server of our own, on which weir's streams are declared.
func start(t testing.TB) (url string, nc *nats.Conn, js jetstream.JetStream) {
	t.Helper()
	url = embeddedtest.NATS(t).URL()
	nc, js = connect(t, url)
	declare(t, js)
	return url, nc, js
}

func declare(t testing.TB, js jetstream.JetStream) {
	t.Helper()
	if err := natsx.Declare(t.Context(), js, natsx.Storage{}); err != nil {
		t.Fatal(err)
	}
}

var quiet = slog.New(slog.DiscardHandler)

// custom starts a server with options that the embedded one does not have.
func custom(t *testing.T, opts server.Options) string {
	t.Helper()
	opts.Host, opts.Port, opts.JetStream, opts.NoSigs, opts.NoLog = "127.0.0.1", server.RANDOM_PORT, true, true, true
	opts.StoreDir = t.TempDir()
	s, err := server.NewServer(&opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("server is not ready")
	}
	return s.ClientURL()
}

func report(boot string, seq uint64, allowed ...uint64) *schemas.Report {
	r := &schemas.Report{Boot: boot, Seq: seq, SealedAt: time.Now()}
	for i, n := range allowed {
		r.Usage = append(r.Usage, schemas.Usage{Time: time.Now(), Tenant: fmt.Sprintf("t%d", i), Route: "r", Allowed: n, Cost: n})
	}
	return r
}

func messages(t testing.TB, js jetstream.JetStream, stream string) uint64 {
	t.Helper()
	s, err := js.Stream(context.Background(), stream)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().State.Msgs
}

func publish(t testing.TB, js jetstream.JetStream, gateway string, from, to uint64) {
	t.Helper()
	for seq := from; seq <= to; seq++ {
		body, err := schemas.EncodeReport(report("b", seq, 1))
		if err != nil {
			t.Fatal(err)
		}
		raw(t, js, schemas.UsagePrefix+gateway, body)
	}
}

func raw(t testing.TB, js jetstream.JetStream, subject string, body []byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		_, err := js.Publish(ctx, subject, body)
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// eventually waits until ok returns true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// proxy stands between a client and a server.
type proxy struct {
	target string
	l      net.Listener
	deaf   atomic.Bool // what the server says is thrown away
	mute   atomic.Bool // what the client says is thrown away

	mu    sync.Mutex
	conns []net.Conn
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{target: u.Host, l: l}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", p.target)
			if err != nil {
				_ = c.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, c, s)
			p.mu.Unlock()
			go pump(s, c, &p.mute)
			go pump(c, s, &p.deaf)
		}
	}()
	t.Cleanup(func() { _ = l.Close(); p.cut() })
	return p
}

func pump(to, from net.Conn, swallow *atomic.Bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && !swallow.Load() {
			if _, err := to.Write(buf[:n]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	_ = to.Close()
	_ = from.Close()
}

func (p *proxy) url() string { return "nats://" + p.l.Addr().String() }

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// journal collects what a handler is given.
type journal struct {
	mu      sync.Mutex
	batches []schemas.Batch[*schemas.Report]
	seqs    map[uint64]int
	fail    func(schemas.Batch[*schemas.Report]) error
}

func (j *journal) handle(_ context.Context, b schemas.Batch[*schemas.Report]) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.batches = append(j.batches, b)
	if j.fail != nil {
		if err := j.fail(b); err != nil {
			return err
		}
	}
	if j.seqs == nil {
		j.seqs = map[uint64]int{}
	}
	for _, it := range b.Items {
		j.seqs[it.Seq]++
	}
	return nil
}

func (j *journal) distinct() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.seqs)
}

func (j *journal) calls() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var all []string
	for _, b := range j.batches {
		all = append(all, name(b))
	}
	return all
}

func name(b schemas.Batch[*schemas.Report]) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %d-%d:", b.Stream, b.First, b.Last)
	for _, it := range b.Items {
		fmt.Fprintf(&s, " %d=%s/%s/%d", it.Seq, it.Value.Gateway, it.Value.Boot, it.Value.Seq)
	}
	return s.String()
}

type consumer interface {
	Consume(context.Context, func(context.Context, schemas.Batch[*schemas.Report]) error) error
	Ready() error
}

// run consumes in the background. The returned function stops it and returns what Consume returned.
func run(t *testing.T, c consumer, handle func(context.Context, schemas.Batch[*schemas.Report]) error) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Consume(ctx, handle) }()
	var once sync.Once
	var err error
	stop = func() error {
		once.Do(func() {
			cancel()
			select {
			case err = <-done:
			case <-time.After(patience):
				t.Error("Consume does not return")
			}
		})
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return stop
}

func source(t *testing.T, nc *nats.Conn, cfg Config, m *Metrics) *Source[*schemas.Report] {
	t.Helper()
	cfg.Name = or(cfg.Name, "throttle")
	cfg.RetryMin, cfg.RetryMax = or(cfg.RetryMin, 10*time.Millisecond), or(cfg.RetryMax, 100*time.Millisecond)
	s, err := NewSource(cfg, nc, schemas.DecodeReport, embeddedtest.Log(t), m)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func ledger(t *testing.T, nc *nats.Conn, cfg Config, m *Metrics) *Ledger[*schemas.Report] {
	t.Helper()
	cfg.Name = or(cfg.Name, "history")
	cfg.MaxDelay = or(cfg.MaxDelay, 30*time.Millisecond)
	cfg.RetryMin, cfg.RetryMax = or(cfg.RetryMin, 10*time.Millisecond), or(cfg.RetryMax, 100*time.Millisecond)
	l, err := NewLedger(cfg, nc, schemas.DecodeReport, embeddedtest.Log(t), m)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func or[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

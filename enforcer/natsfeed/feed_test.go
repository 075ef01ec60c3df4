package natsfeed

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/obs/obstest"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// centre stands in for the aggregator: it answers snapshots and clocks, and pushes what it is told to.
type centre struct {
	t  *testing.T
	nc *nats.Conn

	mu       sync.Mutex // all below
	snapshot *schemas.ThrottleUpdate
	asked    int
	ahead    time.Duration // of the gateway's clock
	beats    []schemas.Heartbeat
}

func newCentre(t *testing.T, url string) *centre {
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	c := &centre{t: t, nc: nc, snapshot: &schemas.ThrottleUpdate{Gateways: 1, TTL: time.Minute, Snapshot: true}}
	c.subscribe(schemas.SnapshotPrefix+"*", func(m *nats.Msg) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.asked++
		if c.snapshot != nil {
			c.respond(m, c.snapshot)
		}
	})
	c.subscribe(schemas.ClockSubject, func(m *nats.Msg) {
		c.mu.Lock()
		ahead := c.ahead
		c.mu.Unlock()
		received := time.Now().Add(ahead)
		b, err := schemas.EncodeClockReply(schemas.ClockReply{Received: received, Sent: time.Now().Add(ahead)})
		if err == nil {
			err = m.Respond(b)
		}
		if err != nil {
			t.Error(err)
		}
	})
	c.subscribe(schemas.HeartbeatPrefix+"*", func(m *nats.Msg) {
		h, err := schemas.DecodeHeartbeat(m.Subject, m.Data)
		if err != nil {
			t.Error(err)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.beats = append(c.beats, *h)
	})
	return c
}

func (c *centre) subscribe(subject string, handle nats.MsgHandler) {
	if _, err := c.nc.Subscribe(subject, handle); err != nil {
		c.t.Fatal(err)
	}
	if err := c.nc.Flush(); err != nil {
		c.t.Fatal(err)
	}
}

func (c *centre) respond(m *nats.Msg, u *schemas.ThrottleUpdate) {
	b, err := schemas.EncodeThrottleUpdate(u)
	if err == nil {
		err = m.Respond(b)
	}
	if err != nil {
		c.t.Error(err)
	}
}

func (c *centre) setSnapshot(u *schemas.ThrottleUpdate) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snapshot = u
}

func (c *centre) push(gateway string, u *schemas.ThrottleUpdate) {
	b, err := schemas.EncodeThrottleUpdate(u)
	if err == nil {
		err = c.nc.Publish(schemas.ThrottlePrefix+gateway, b)
	}
	if err == nil {
		err = c.nc.Flush()
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *centre) lastBeat() (schemas.Heartbeat, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.beats) == 0 {
		return schemas.Heartbeat{}, false
	}
	return c.beats[len(c.beats)-1], true
}

// applied gathers what a feed hands on.
type applied struct {
	mu      sync.Mutex
	updates []schemas.ThrottleUpdate
}

func (a *applied) apply(u schemas.ThrottleUpdate) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.updates = append(a.updates, u)
}

func (a *applied) count(ok func(schemas.ThrottleUpdate) bool) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, u := range a.updates {
		if ok(u) {
			n++
		}
	}
	return n
}

func snapshots(u schemas.ThrottleUpdate) bool { return u.Snapshot }

// wire is a network between a gateway and NATS that can be cut.
type wire struct {
	ln   net.Listener
	to   string
	mu   sync.Mutex
	cut  bool
	open map[net.Conn]bool
}

func newWire(t *testing.T, url string) *wire {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{ln: ln, to: strings.TrimPrefix(url, "nats://"), open: map[net.Conn]bool{}}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			done.Go(func() { w.carry(in) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		w.setCut(true)
		done.Wait()
	})
	return w
}

func (w *wire) url() string { return "nats://" + w.ln.Addr().String() }

func (w *wire) carry(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", w.to)
	if err != nil {
		return
	}
	defer out.Close()
	w.mu.Lock()
	if w.cut {
		w.mu.Unlock()
		return
	}
	w.open[in], w.open[out] = true, true
	w.mu.Unlock()
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
		both.Go(func() {
			_, _ = io.Copy(pair[0], pair[1])
			_ = pair[0].Close()
			_ = pair[1].Close()
		})
	}
	both.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, in)
	delete(w.open, out)
}

func (w *wire) setCut(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
	if cut {
		for c := range w.open {
			_ = c.Close()
		}
	}
}

func connect(t *testing.T, url string) *nats.Conn {
	nc, err := natsx.Connect(natsx.Config{URL: url, RetryWait: 20 * time.Millisecond}, embeddedtest.Log(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// start runs a feed until the test ends, and fails the test if it ends before.
func start(t *testing.T, f *Feed) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil after its context is done", err)
		}
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never happened: " + what)
		}
	}
}

func fast(cfg Config) Config {
	cfg.Boot, cfg.Heartbeat, cfg.ClockEvery = "b1", 20*time.Millisecond, 20*time.Millisecond
	cfg.Look, cfg.Calm = 5*time.Millisecond, 50*time.Millisecond
	cfg.RetryMin, cfg.RetryMax, cfg.Resync = 10*time.Millisecond, 50*time.Millisecond, time.Hour
	return cfg
}

func newFeed(t *testing.T, cfg Config, nc *nats.Conn, apply func(schemas.ThrottleUpdate), status func() Status, log *slog.Logger) *Feed {
	t.Helper()
	f, err := New(cfg, nc, apply, status, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func isSynced() Status {
	return Status{Mode: enforcer.Synced, PolicyVersion: 77, Pending: 3, Without: []string{"sleep"}, Sealed: 41}
}

func TestASnapshotIsAskedForUntilItIsAnswered(t *testing.T) {
	srv := embeddedtest.NATS(t)
	var got applied
	// Nobody listens at first.
	start(t, newFeed(t, fast(Config{Gateway: "g1"}), connect(t, srv.URL()), got.apply, isSynced, embeddedtest.Log(t)))
	time.Sleep(50 * time.Millisecond)

	c := newCentre(t, srv.URL())
	c.setSnapshot(nil) // and then somebody who does not answer
	eventually(t, "asked by a centre that came later", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.asked >= 2 })
	c.setSnapshot(&schemas.ThrottleUpdate{Gateways: 3, TTL: time.Minute, Snapshot: true})
	eventually(t, "a snapshot applied", func() bool { return got.count(snapshots) > 0 })

	// Once answered, it is left at that.
	time.Sleep(50 * time.Millisecond) // requests under way
	c.mu.Lock()
	asked := c.asked
	c.mu.Unlock()
	time.Sleep(300 * time.Millisecond)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asked != asked {
		t.Errorf("asked %d times more after the answer, want 0", c.asked-asked)
	}
}

func TestASnapshotIsAskedForAgainNowAndThen(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	var got applied
	cfg := fast(Config{Gateway: "g1"})
	cfg.Resync = 20 * time.Millisecond
	start(t, newFeed(t, cfg, connect(t, srv.URL()), got.apply, isSynced, embeddedtest.Log(t)))
	eventually(t, "three snapshots", func() bool { return got.count(snapshots) >= 3 })
	_ = c
}

func TestWhatWasDroppedIsAskedFor(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	var got applied
	gate := make(chan struct{})
	apply := func(u schemas.ThrottleUpdate) {
		if u.Gateways == 99 {
			<-gate // a gateway with no time for updates
		}
		got.apply(u)
	}
	nc := connect(t, srv.URL())
	start(t, newFeed(t, fast(Config{Gateway: "g1"}), nc, apply, isSynced, embeddedtest.Log(t)))
	eventually(t, "the first snapshot", func() bool { return got.count(snapshots) == 1 })
	c.push("g1", &schemas.ThrottleUpdate{Gateways: 99, TTL: time.Minute})
	b, err := schemas.EncodeThrottleUpdate(&schemas.ThrottleUpdate{Gateways: 2, TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	for range queue + 100 {
		if err := c.nc.Publish(schemas.ThrottlePrefix+"g1", b); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil { // the gateway's connection has read them all
		t.Fatal(err)
	}
	close(gate)
	eventually(t, "another snapshot", func() bool { return got.count(snapshots) > 1 })
}

func TestUpdatesOfOtherGatewaysAndRubbishAreIgnored(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	var got applied
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	f, err := New(fast(Config{Gateway: "g1"}), connect(t, srv.URL()), got.apply, isSynced, m, embeddedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	start(t, f)
	eventually(t, "a snapshot", func() bool { return got.count(snapshots) == 1 })
	c.push("g2", &schemas.ThrottleUpdate{Gateways: 9, TTL: time.Minute})
	for _, b := range [][]byte{[]byte("nonsense"), {}, {0xff, 0xfe}} {
		if err := c.nc.Publish(schemas.ThrottlePrefix+"g1", b); err != nil {
			t.Fatal(err)
		}
	}
	share := schemas.Share{Rule: "contract", Key: "acme", Version: 5, RateNanos: 1e9, Burst: 2, LimitRateNanos: 3e9, LimitBurst: 6, Reason: "demand"}
	c.push("g1", &schemas.ThrottleUpdate{Gateways: 2, TTL: time.Second, Shares: []schemas.Share{share}})
	eventually(t, "the update", func() bool {
		return got.count(func(u schemas.ThrottleUpdate) bool {
			return len(u.Shares) == 1 && u.Shares[0] == share && u.Gateways == 2
		}) == 1
	})
	if n := got.count(func(schemas.ThrottleUpdate) bool { return true }); n != 2 {
		t.Errorf("%d updates applied, want 2: the snapshot and its own", n)
	}
	if n := testutil.ToFloat64(m.Updates.WithLabelValues("malformed")); n != 3 {
		t.Errorf("%v malformed updates counted, want 3", n)
	}
}

func TestHeartbeatsSayWhatTheGatewayIs(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	const skew = -3 * time.Second // the gateway is 3 s behind
	cfg := fast(Config{Gateway: "g1", Version: "v1.2.3"})
	cfg.Now = func() time.Time { return time.Now().Add(skew) }
	start(t, newFeed(t, cfg, connect(t, srv.URL()), new(applied).apply, isSynced, embeddedtest.Log(t)))
	eventually(t, "a heartbeat with a clock", func() bool { h, ok := c.lastBeat(); return ok && h.ClockKnown })
	h, _ := c.lastBeat()
	off := h.ClockOffset
	h.ClockOffset, h.ClockError, h.SentAt = 0, 0, time.Time{}
	want := schemas.Heartbeat{Gateway: "g1", Boot: "b1", PolicyVersion: 77, Mode: enforcer.Synced, ClockKnown: true, PendingReports: 3, Version: "v1.2.3", Without: []string{"sleep"}, Sealed: 41}
	if !reflect.DeepEqual(h, want) {
		t.Errorf("heartbeat = %+v, want %+v", h, want)
	}
	// The offset is right within what it says of itself, which is never more than the exchange took.
	h, _ = c.lastBeat()
	if d := (off - -skew).Abs(); d > h.ClockError+time.Millisecond {
		t.Errorf("offset %s ± %s, want %s: the centre is ahead", off, h.ClockError, -skew)
	}
	if d := time.Since(h.SentAt); d < 2*time.Second {
		t.Errorf("sent %s ago by its stamp, want the gateway's own clock, %s behind", d, -skew)
	}
}

func TestTheLastHeartbeatSaysStopped(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	feed := newFeed(t, fast(Config{Gateway: "g1"}), connect(t, srv.URL()), new(applied).apply, isSynced, embeddedtest.Log(t))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- feed.Run(ctx) }()
	eventually(t, "a heartbeat", func() bool { h, ok := c.lastBeat(); return ok && h.Mode == enforcer.Synced })
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	eventually(t, "the gateway says goodbye", func() bool { h, _ := c.lastBeat(); return h.Mode == "stopped" })
}

func TestModeIsToldOncePerChange(t *testing.T) {
	srv := embeddedtest.NATS(t)
	newCentre(t, srv.URL())
	var (
		mu   sync.Mutex
		mode = "isolated"
	)
	status := func() Status { mu.Lock(); defer mu.Unlock(); return Status{Mode: mode} }
	set := func(m string) { mu.Lock(); defer mu.Unlock(); mode = m }
	var out obstest.Lines
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo}))
	m := NewMetrics(prometheus.NewRegistry())
	m.Degraded = prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_degraded", ConstLabels: prometheus.Labels{"part": "throttle"}})
	f, err := New(fast(Config{Gateway: "g1"}), connect(t, srv.URL()), new(applied).apply, status, m, log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	for i, step := range []struct {
		mode     string
		degraded float64
	}{{"isolated", 1}, {"synced", 0}, {"stale", 1}, {"isolated", 1}, {"floor", 1}, {"synced", 0}, {"stale", 1}} {
		set(step.mode)
		eventually(t, step.mode+" told", func() bool { return strings.Count(out.String(), "throttling with") == i+1 })
		if got := testutil.ToFloat64(m.Degraded); got != step.degraded {
			t.Errorf("in mode %s weir_degraded = %v, want %v", step.mode, got, step.degraded)
		}
	}
	time.Sleep(10 * f.cfg.Heartbeat)
	if n := strings.Count(out.String(), "throttling with"); n != 7 {
		t.Errorf("%d lines about the mode, want 7, one per change:\n%s", n, out.String())
	}
	if n := strings.Count(out.String(), "level=ERROR"); n != 3 {
		t.Errorf("%d of them are errors, want 3, of the isolated ones:\n%s", n, out.String())
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := testutil.ToFloat64(m.Degraded); got != 0 {
		t.Errorf("after the feed ended weir_degraded = %v, want 0", got)
	}
}

// TestSharesThatHaveOutlivedTheirTimeAreTold: once, and a while after the last message.
func TestSharesThatHaveOutlivedTheirTimeAreTold(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	silent := make(chan time.Time, 10)
	cfg := fast(Config{Gateway: "g1", Silent: func() { silent <- time.Now() }})
	got := new(applied)
	start(t, newFeed(t, cfg, connect(t, srv.URL()), got.apply, isSynced, embeddedtest.Log(t)))
	<-silent // nothing was heard at the start
	const ttl = 300 * time.Millisecond
	var last time.Time
	for range 5 {
		last = time.Now()
		c.push("g1", &schemas.ThrottleUpdate{Gateways: 1, TTL: ttl})
		time.Sleep(ttl / 10)
	}
	if at := <-silent; at.Sub(last) < ttl {
		t.Errorf("told %s after the last message, want no sooner than after %s", at.Sub(last), ttl)
	}
	if len(silent) > 0 {
		t.Error("told again")
	}
}

func TestTheFleetOutlivesTheProcess(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	file := filepath.Join(t.TempDir(), "fleet")
	cfg := fast(Config{Gateway: "g1", FleetFile: file})
	start(t, newFeed(t, cfg, connect(t, srv.URL()), new(applied).apply, isSynced, embeddedtest.Log(t)))
	for _, step := range []struct{ told, want Fleet }{{Fleet{1, 0}, Fleet{1, 1_000_000}}, {Fleet{3, 0}, Fleet{3, 333_333}}, {Fleet{3, 600_000}, Fleet{3, 600_000}},
		{Fleet{3, 20_000}, Fleet{3, 20_000}}, {Fleet{2, 0}, Fleet{2, 500_000}}} {
		told, want := step.told, step.want
		eventually(t, "the fleet kept", func() bool {
			c.push("g1", &schemas.ThrottleUpdate{Gateways: told.Gateways, Weight: told.Weight, TTL: time.Minute}) // the first may come too early
			got, err := ReadFleet(file)
			return err == nil && got == want
		})
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(file), ".fleet-*")); err != nil || len(left) > 0 {
		t.Errorf("temporary files left: %v %v", left, err)
	}
}

// TestACentreThatDoesNotKnowTakesNoWeight: of a fleet of the same size the old one stays, also over a restart of the gateway.
func TestACentreThatDoesNotKnowTakesNoWeight(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	file := filepath.Join(t.TempDir(), "fleet")
	if err := writeFleet(file, Fleet{3, 600_000}); err != nil {
		t.Fatal(err)
	}
	heard := new(applied)
	start(t, newFeed(t, fast(Config{Gateway: "g1", FleetFile: file}), connect(t, srv.URL()), heard.apply, isSynced, embeddedtest.Log(t)))
	says := func(u, want Fleet) {
		t.Helper()
		eventually(t, "the fleet kept", func() bool {
			c.push("g1", &schemas.ThrottleUpdate{Gateways: u.Gateways, Weight: u.Weight, TTL: time.Minute})
			got, err := ReadFleet(file)
			return err == nil && got == want
		})
	}
	for range 3 {
		c.push("g1", &schemas.ThrottleUpdate{Gateways: 3, TTL: time.Minute})
	}
	says(Fleet{3, 0}, Fleet{3, 600_000})
	says(Fleet{4, 0}, Fleet{4, 250_000})
	says(Fleet{4, 100_000}, Fleet{4, 100_000})
	says(Fleet{4, 0}, Fleet{4, 100_000})
	for f, want := range map[Fleet]Fleet{{3, 0}: {3, 600_000}, {2, 0}: {2, 500_000}, {3, 7}: {3, 7}} {
		if got := fleetOf(&schemas.ThrottleUpdate{Gateways: f.Gateways, Weight: f.Weight}, Fleet{3, 600_000}); got != want {
			t.Errorf("after a fleet of 3 and a weight of 600000, told %v: %v, want %v", f, got, want)
		}
	}
}

func TestReadFleet(t *testing.T) {
	dir := t.TempDir()
	if f, err := ReadFleet(filepath.Join(dir, "none")); f != (Fleet{}) || err != nil {
		t.Errorf("ReadFleet of no file = %v, %v, want nothing, nil", f, err)
	}
	for text, want := range map[string]Fleet{"4\n": {4, 250_000}, "12 500\n": {12, 500}, "1 1000000": {1, 1_000_000}, "": {}, "0": {}, "-1": {}, "3.5": {}, "many": {}, "99999999999": {},
		"3\x00\x00": {}, "3 0": {}, "3 1000001": {}, "3 -4": {}, "3 x": {}, "3 4 5": {}, "0 9": {}} {
		file := filepath.Join(dir, "fleet")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if f, err := ReadFleet(file); f != want || (err == nil) != (want != Fleet{}) {
			t.Errorf("ReadFleet of %q = %v, %v, want %v", text, f, err, want)
		}
	}
}

func TestBadNamesAreRefused(t *testing.T) {
	for _, cfg := range []Config{{Gateway: "", Boot: "b"}, {Gateway: "a.b", Boot: "b"}, {Gateway: ">", Boot: "b"}, {Gateway: "g", Boot: "b c"}} {
		if _, err := New(cfg, nil, nil, nil, nil, embeddedtest.Log(t)); err == nil {
			t.Errorf("New(%+v) has no error", cfg)
		}
	}
}

const hundred = `
version: 1
plans:
  standard: {rate: 100/s, burst: 100}
default_plan: standard
rules:
  - {name: guard, layer: guard, key: [], rate: 100000/s, burst: 100000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
`

// share is a version of acme's part of its 100 per second.
func share(version uint64, limit int64) *schemas.ThrottleUpdate {
	return &schemas.ThrottleUpdate{Gateways: 2, TTL: time.Minute, Shares: []schemas.Share{{Rule: "contract", Key: "acme", Version: version,
		RateNanos: limit * 1e9, Burst: limit, LimitRateNanos: 100e9, LimitBurst: 100, Reason: "demand"}}}
}

func TestB033APushMissedWhileCutOffIsMadeUpFor(t *testing.T) {
	srv := embeddedtest.NATS(t)
	c := newCentre(t, srv.URL())
	p, err := limits.Parse("policy.yaml", []byte(hundred))
	if err != nil {
		t.Fatal(err)
	}
	e := enforcer.New(enforcer.Config{})
	e.SetPolicy(p)
	limit := func() int64 { return e.Check(enforcer.Monotonic(), &enforcer.Request{Tenant: "acme"}).Burst }

	var got applied
	apply := func(u schemas.ThrottleUpdate) { e.Apply(u); got.apply(u) }
	all := func() int { return got.count(func(schemas.ThrottleUpdate) bool { return true }) }
	w := newWire(t, srv.URL())
	nc := connect(t, w.url())
	start(t, newFeed(t, fast(Config{Gateway: "g1"}), nc, apply, func() Status { return Status{Mode: e.Mode()} }, embeddedtest.Log(t)))
	eventually(t, "a snapshot", func() bool { return got.count(snapshots) > 0 })
	c.push("g1", share(5, 100))
	eventually(t, "version 5", func() bool { return limit() == 100 && all() == 2 })

	w.setCut(true)
	eventually(t, "cut off", func() bool { return !nc.IsConnected() })
	c.push("g1", share(7, 10)) // nobody hears it
	missed := share(7, 10)
	missed.Snapshot = true
	c.setSnapshot(missed)
	time.Sleep(300 * time.Millisecond)
	if n := all(); n != 2 || limit() != 100 {
		t.Fatalf("cut off: %d updates applied and limit %d, want the 2 from before and 100", n, limit())
	}

	back := time.Now()
	w.setCut(false)
	eventually(t, "version 7 after the reconnect", func() bool { return limit() == 10 })
	t.Logf("limit 10 is in force %s after the network came back", time.Since(back).Round(time.Millisecond))

	for _, late := range []*schemas.ThrottleUpdate{share(6, 100), share(7, 100)} {
		n := all()
		c.push("g1", late)
		eventually(t, "a late update heard", func() bool { return all() == n+1 })
		if limit() != 10 {
			t.Errorf("limit %d after version %d came late, want 10", limit(), late.Shares[0].Version)
		}
	}
	// A centre that has restarted goes on counting where it was, and its next change wins.
	newCentre(t, srv.URL()).push("g1", share(8, 20))
	eventually(t, "version 8", func() bool { return limit() == 20 })
}

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/rig"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// TestSIGTERMWhileServersHang: every part ends within the time that it is given, under load, whichever server hangs meanwhile, and all of
// them; a gateway's exit says that nothing is lost, and in the end nothing is.
func TestSIGTERMWhileServersHang(t *testing.T) {
	r := newRig(t, rig.Config{Gateways: 2})
	j := rig.NewJournal()
	ctx, stop := context.WithCancel(t.Context())
	var load sync.WaitGroup
	defer load.Wait()
	defer stop()
	load.Go(func() { rig.Send(ctx, j, 1, cellRate, r.Gateways) })
	names := []string{rig.GatewayName(1), rig.GatewayName(2)}
	for _, hung := range [][]string{{rig.NATS}, {rig.Redis}, {rig.ClickHouse}, {rig.NATS, rig.Redis, rig.ClickHouse}} {
		what := strings.Join(hung, " and ")
		time.Sleep(cellTime)
		for _, s := range hung {
			if err := r.Parts[s].Pause(); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(cellTime) // until somebody waits for it
		var ends sync.WaitGroup
		for name, w := range r.Weirs {
			if name == rig.GatewayName(2) {
				continue // somebody goes on
			}
			ends.Go(func() {
				began := time.Now()
				code, err := w.Term()
				took := time.Since(began)
				t.Logf("%s without %s: %s, exit code %d", name, what, took.Round(10*time.Millisecond), code)
				if err != nil || took > app.StopTimeout {
					t.Errorf("%s took %s to end on SIGTERM while %s hung (%v), want %s at most", name, took, what, err, app.StopTimeout)
				}
				if name == rig.GatewayName(1) && code != 0 {
					t.Errorf("%s ended with %d while %s hung, want 0", name, code, what)
				}
			})
		}
		ends.Wait()
		for _, s := range hung {
			if err := r.Parts[s].Resume(); err != nil {
				t.Fatal(err)
			}
		}
		for _, w := range r.Weirs {
			if err := w.Restart(); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{rig.Aggregator, rig.Alerter} {
			if err := r.AwaitReady(name); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop()
	load.Wait()
	if err := r.Drain(names); err != nil {
		t.Fatal(err)
	}
	stored, err := r.Stored()
	if err != nil {
		t.Fatal(err)
	}
	var v rig.Verdict
	v.History(j.Cells, stored)
	requests, unanswered := j.Totals()
	t.Logf("%d requests, %d without an answer, lost %d, doubled %d", requests, unanswered, v.Lost, v.Doubled)
	if v.Lost+v.Doubled > 0 || requests == 0 {
		t.Errorf("lost %d, doubled %d of %d: %q", v.Lost, v.Doubled, requests, v.Lines)
	}
}

// TestSIGTERMWithRequestsInFlightWhileNATSHangs: requests that never end, at both listeners, leave enough of the time to say how much stays
// in the spool, whether the connection to a NATS that hangs is still up or is being made again. The next start delivers it.
func TestSIGTERMWithRequestsInFlightWhileNATSHangs(t *testing.T) {
	const inFlight = 21 // one of them at the check API
	server, err := nats.StartProcess(nats.Config{Dir: t.TempDir()}, embeddedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	nc, err := natsx.Connect(natsx.Config{URL: server.URL()}, embeddedtest.Log(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := natsx.Declare(t.Context(), js, natsx.Storage{}); err != nil {
		t.Fatal(err)
	}
	arrived := make(chan struct{}, inFlight)
	hung := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		<-r.Context().Done()
	}))
	t.Cleanup(hung.Close)
	policy := write(t, "policy.yaml", "version: 1\nrules:\n  - {name: guard, layer: guard, key: [], rate: 1000/s, burst: 1000}\n")
	data := t.TempDir()
	gateway := func() *process {
		return start(t, `"msg":"serving"`, nil, append([]string{"gateway", "--name", "g", "--nats", server.URL(), "--policy", policy, "--upstream", hung.URL, "--data", data}, anyPorts...)...)
	}
	sent := uint64(0)
	for _, away := range []func(g *process) bool{
		func(*process) bool { return true },
		func(g *process) bool { return strings.Contains(strings.Join(g.lines(), ""), "NATS is away") },
	} {
		g := gateway()
		var up struct{ Addr, Check string }
		for _, line := range g.lines() {
			if strings.Contains(line, `"msg":"gateway is up"`) {
				if err := json.Unmarshal([]byte(line), &up); err != nil {
					t.Fatal(err)
				}
			}
		}
		var clients sync.WaitGroup
		for range inFlight - 1 {
			clients.Go(func() {
				if resp, err := http.Get("http://" + up.Addr); err == nil {
					_ = resp.Body.Close()
				}
			})
			<-arrived
		}
		sent += inFlight
		check, err := net.Dial("tcp", up.Check)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprint(check, "POST /v1/check HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := check.Read(make([]byte, 1)); err != nil { // it is decided, and waits for its body
			t.Fatal(err)
		}
		if err := server.Pause(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "NATS is away", func() bool { return away(g) })
		if code := g.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("the gateway exits %d, want 0: %s", code, g.lines()[len(g.lines())-1])
		}
		if said := strings.Join(g.lines(), "\n"); !strings.Contains(said, `"msg":"usage stays in the spool, the next start delivers it"`) || !strings.Contains(said, fmt.Sprintf(`"requests":%d`, inFlight)) {
			t.Errorf("it does not say that %d requests stay in the spool", inFlight)
		}
		_ = check.Close() // it was cut off
		clients.Wait()
		if err := server.Resume(); err != nil {
			t.Fatal(err)
		}
		g = gateway()
		eventually(t, "all is in the stream", func() bool { n, err := usage(t.Context(), js); return err == nil && n >= sent })
		if code := g.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("the gateway exits %d beside a NATS that is well, want 0", code)
		}
		if n, err := usage(t.Context(), js); err != nil || n != sent {
			t.Errorf("%d requests are in the stream, %v, want %d", n, err, sent)
		}
	}
}

// usage is how many requests the reports in the stream have. One that nobody has said is stored is sent by each life, and is one.
func usage(ctx context.Context, js jetstream.JetStream) (n uint64, err error) {
	stream, err := js.Stream(ctx, schemas.UsageStream)
	if err != nil {
		return 0, err
	}
	seen := map[string]bool{}
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		m, err := stream.GetMsg(ctx, seq)
		if err != nil {
			return 0, err
		}
		r, err := schemas.DecodeReport(m.Subject, m.Header.Get("Content-Type"), m.Data, m.Time)
		if err != nil {
			return 0, err
		}
		if id := fmt.Sprint(r.Boot, r.Seq); !seen[id] {
			seen[id] = true
			n += r.Requests()
		}
	}
	return n, nil
}

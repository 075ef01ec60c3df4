package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/rig"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/faultproxy"
	"github.com/weirhq/weir/internal/run"
)

// decisionPolicy has a tenant in ten whose requests are nearly all refused, whatever the centre says, and limits that nobody
// else reaches: the same decisions are made in every condition.
const decisionPolicy = `
version: 1
identity: {tenant: {header: X-App-Key}}
plans:
  large: {rate: 1000000/s, burst: 100000000}
  tiny: {rate: 1/s, burst: 1}
default_plan: large
tenants: {%s}
rules:
  - {name: guard, layer: guard, key: [], rate: 100000000/s, burst: 1000000000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
`

const (
	decisionTenants = 1000
	decisionTime    = 20 * time.Millisecond // of one measurement …
	decisionTimes   = 10                    // … of so many in a row
)

// BenchmarkDecision measures what a decision costs while parts behind the gateway are dead, hung or slow, against all up: the guard
// of a real gateway in this process, from a request to the answer with its headers, counted in its spool, and no network. Short
// measurements of both take turns, so that whatever else this machine does is in both. p99 is that of all decisions, against that of
// all decisions with all up; "usual" compares the medians of the p99 of 20 ms each, which a moment in which this process did not run is
// no part of. It fails when that is more than twice as much with a part away, never because it was slow; and not after a single round, in
// which other work on the machine may have begun halfway.
//
//	go test -run '^$' -bench Decision -benchtime 10x -timeout 60m ./cmd/e2e
func BenchmarkDecision(b *testing.B) {
	r := newRig(b, rig.Config{})
	g := newDecider(b, r)
	b.ResetTimer()
	links := []string{rig.Link(rig.GatewayName(1), rig.NATS), rig.Link(rig.Aggregator, rig.NATS), rig.Link(rig.Aggregator, rig.Redis), rig.Link(rig.Aggregator, rig.ClickHouse)}
	slow := func(part string, delay time.Duration) {
		for _, l := range links {
			if l == rig.Link(rig.GatewayName(1), part) || l == rig.Link(rig.Aggregator, part) {
				r.Links[l].Set(faultproxy.Faults{Delay: [2]time.Duration{faultproxy.Down: delay}})
			}
		}
	}
	type condition struct{ part, way string }
	var up taken
	away := map[condition]*taken{}
	var order []condition
	for range b.N {
		for _, part := range []string{rig.NATS, rig.Redis, rig.ClickHouse, rig.Aggregator, rig.Alerter} {
			p := r.Parts[part]
			for _, w := range []struct {
				name       string
				begin, end func() error
			}{
				{"dead", p.Kill, p.Restart},
				{"hung", p.Pause, p.Resume},
				{"slow", func() error { slow(part, 300*time.Millisecond); return nil }, func() error { slow(part, 0); return nil }},
			} {
				if w.name == "slow" && (part == rig.Aggregator || part == rig.Alerter) {
					continue // no link leads to them
				}
				c := condition{part, w.name}
				if !slices.Contains(order, c) {
					order = append(order, c)
					away[c] = &taken{}
				}
				g.awaitWell(b)
				g.measure(b, &up)
				if err := w.begin(); err != nil {
					b.Fatal(err)
				}
				for range 3 { // shares expire meanwhile
					time.Sleep(time.Second)
					g.measure(b, away[c])
				}
				if err := w.end(); err != nil {
					b.Fatal(err)
				}
				g.awaitWell(b)
				g.measure(b, &up)
			}
		}
	}
	us := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	up99 := up.percentile(99)
	fmt.Printf("\n%-10s %-5s %10s %10s %7s %7s\n", "part", "is", "p50", "p99", "ratio", "usual") // a benchmark keeps few lines of its log
	fmt.Printf("%-10s %-5s %8.2fµs %8.2fµs\n", "all", "up", us(up.percentile(50)), us(up99))
	for _, c := range order {
		a := away[c]
		a99 := a.percentile(99)
		ratio, usual := float64(a99)/float64(up99), float64(percentile(a.p99, 50))/float64(percentile(up.p99, 50))
		fmt.Printf("%-10s %-5s %8.2fµs %8.2fµs %7.2f %7.2f\n", c.part, c.way, us(a.percentile(50)), us(a99), ratio, usual)
		b.ReportMetric(ratio, c.part+"-"+c.way+"-p99/up")
		if usual > 2 && b.N > 1 {
			b.Errorf("%s is %s: the p99 of a decision is %.1f times that with all up", c.part, c.way, usual)
		}
	}
}

// taken is how long decisions took.
type taken struct {
	all [1 << 17]uint64 // decisions by nanoseconds; those that took longer are in the last
	p99 []time.Duration // of each measurement
}

func (t *taken) percentile(p uint64) time.Duration {
	var all, sum uint64
	for _, n := range t.all {
		all += n
	}
	for ns, n := range t.all {
		if sum += n; sum*100 >= all*p {
			return time.Duration(ns)
		}
	}
	return 0
}

// decider is a gateway in this process beside the rig's own, with the same way to NATS.
type decider struct {
	rig      *rig.Rig
	metrics  *app.Metrics
	handler  http.Handler
	requests []*http.Request
	at       int
}

func newDecider(b *testing.B, r *rig.Rig) *decider {
	b.Helper()
	d := &decider{rig: r, metrics: app.NewMetrics()}
	tiny := ""
	for i := range decisionTenants {
		q := httptest.NewRequest(http.MethodGet, "/orders/1", http.NoBody)
		q.Header.Set("X-App-Key", fmt.Sprint("t", i))
		d.requests = append(d.requests, q)
		if i%10 == 0 {
			tiny += fmt.Sprintf("t%d: {plan: tiny}, ", i)
		}
	}
	log := embeddedtest.Log(b)
	policy, err := app.NewPolicy(write(b, "policy.yaml", fmt.Sprintf(decisionPolicy, tiny)), d.metrics, log)
	if err != nil {
		b.Fatal(err)
	}
	stack := &run.Stack{}
	b.Cleanup(func() {
		if err := stack.Stop(app.StopTimeout); err != nil {
			b.Error(err)
		}
	})
	url := "nats://" + r.Links[rig.Link(rig.GatewayName(1), rig.NATS)].Addr()
	nc, err := app.Connect(b.Context(), url, "here", true, d.metrics, stack, log)
	if err != nil {
		b.Fatal(err)
	}
	g, err := app.NewGateway(app.GatewayConfig{Name: "here", Fleet: 2, Data: b.TempDir()}, policy, nc, d.metrics, stack, log)
	if err != nil {
		b.Fatal(err)
	}
	d.handler = g.Guard.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	return d
}

// unread is an answer that nobody reads.
type unread struct {
	header http.Header
	status int
}

func (u *unread) Header() http.Header         { return u.header }
func (u *unread) Write(p []byte) (int, error) { return len(p), nil }
func (u *unread) WriteHeader(status int)      { u.status = status }

// measure takes the time of every decision that is made in a while.
func (d *decider) measure(b *testing.B, into *taken) {
	b.Helper()
	w := &unread{header: http.Header{}}
	times := make([]time.Duration, 0, 1<<16)
	refused, made := 0, 0
	for range decisionTimes {
		times = times[:0]
		for end := time.Now().Add(decisionTime); len(times) < cap(times); {
			clear(w.header)
			q := d.requests[d.at%len(d.requests)]
			d.at++
			began := time.Now()
			d.handler.ServeHTTP(w, q)
			now := time.Now()
			times = append(times, now.Sub(began))
			if w.status == http.StatusTooManyRequests {
				refused++
			}
			if now.After(end) {
				break
			}
		}
		made += len(times)
		for _, t := range times {
			into.all[min(max(t, 0), time.Duration(len(into.all)-1))]++
		}
		into.p99 = append(into.p99, percentile(times, 99))
	}
	if made > 100*decisionTenants && (refused < made/12 || refused > made/8) {
		b.Errorf("%d of %d requests were refused, want a tenth", refused, made)
	}
}

// awaitWell waits until nobody shows that anything is away, and for a while more, in which what has waited is worked off.
func (d *decider) awaitWell(b *testing.B) {
	b.Helper()
	eventually(b, "all to be well", func() bool {
		families, err := d.metrics.Registry.Gather()
		if err != nil {
			b.Fatal(err)
		}
		sum := 0.0
		for _, f := range families {
			if f.GetName() == "weir_degraded" {
				for _, m := range f.GetMetric() {
					sum += m.GetGauge().GetValue()
				}
			}
		}
		for _, part := range []string{"nats", "redis", "clickhouse", "consumer"} {
			v, e := d.rig.Metric(rig.Aggregator, fmt.Sprintf("weir_degraded{part=%q}", part))
			err = errors.Join(err, e)
			sum += v
		}
		_, e := d.rig.Metric(rig.Alerter, "weir_build_info")
		return sum == 0 && errors.Join(err, e) == nil
	})
	time.Sleep(time.Second)
}

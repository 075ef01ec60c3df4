package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/aggregator"
	rediscounter "github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
)

// TestFailoverGrantsNothingTwice has two aggregators and three gateways under load. The one that divides the limits is killed, or
// frozen and later woken, again and again, while the gateways hold all tokens that there are; then the load jumps. In no span of time do
// they admit more than the limit and the bound.
func TestFailoverGrantsNothingTwice(t *testing.T) {
	const (
		rate, burst = 60, 200
		gateways    = 3
	)
	nats, redis := embeddedtest.NATS(t), embeddedtest.Redis(t)
	up := upstream(t)
	policy := write(t, "policy.yaml", fmt.Sprintf(`
version: 1
identity: {tenant: {header: X-App-Key}}
routes:
  - {name: lease, match: {path: /lease}}
  - {name: shared, match: {path: /shared}}
rules:
  - {name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}
  - {name: leased, layer: contract, key: [tenant], routes: [lease], rate: %[1]d/s, burst: %[2]d, consistency: lease}
  - {name: shared, layer: contract, key: [tenant], routes: [shared], rate: %[1]d/s, burst: %[2]d}
`, rate, burst))
	active, standby := centre(t, nats.URL(), redis.URL()), centre(t, nats.URL(), redis.URL())
	var addrs []string
	for i := range gateways {
		p := proxied(t, fmt.Sprintf("g%d", i), nats.URL(), policy, up, t.TempDir(), "--fleet", fmt.Sprint(gateways))
		addrs = append(addrs, listener(t, p))
	}

	load := map[string]*admissions{"/lease": {}, "/shared": {}}
	var heavy atomic.Bool
	done := make(chan struct{})
	var callers sync.WaitGroup
	for path, a := range load { // three times the limit or a quarter of it, most of it on a gateway that changes
		callers.Go(func() {
			began := time.Now()
			var asks sync.WaitGroup
			defer asks.Wait()
			for n := 0; ; n++ {
				if d := time.Until(began.Add(time.Duration(n) * time.Second / (3 * rate))); d > 0 {
					select {
					case <-time.After(d):
					case <-done:
						return
					}
				}
				if n%12 > 0 && !heavy.Load() {
					continue
				}
				g := n % gateways
				if n%10 < 7 {
					g = n / (10 * 3 * rate) % gateways
				}
				asks.Go(func() {
					if status, _, _ := get(t, "http://"+addrs[g]+path, "acme"); status == http.StatusNoContent {
						a.add(time.Now())
					}
				})
			}
		})
	}
	began := time.Now()
	time.Sleep(4 * time.Second)
	for round := range 4 {
		taken := takesOver(standby)
		at := time.Now()
		if frozen := round%2 == 0; frozen {
			active.signal(syscall.SIGSTOP)
			eventually(t, "the other takes over", taken)
			time.Sleep(time.Duration(round) * 1500 * time.Millisecond) // woken while the other learns, and when it divides
			active.signal(syscall.SIGCONT)
			active, standby = standby, active
		} else {
			active.stop(syscall.SIGKILL)
			eventually(t, "the other takes over", taken)
			active = standby
			standby = centre(t, nats.URL(), redis.URL())
		}
		heavy.Store(true)
		t.Logf("round %d: taken over after %s", round, time.Since(at).Round(100*time.Millisecond))
		time.Sleep(4 * time.Second)
		heavy.Store(false)
		time.Sleep(5 * time.Second) // in which the bucket fills
	}
	close(done)
	callers.Wait()
	lasted := time.Since(began).Seconds()
	for path, a := range load {
		bound := burst + 0.3*rate + 2*gateways // as in aggregator/README.md
		if path == "/lease" {
			bound += burst // that gateways hold while it fills
		}
		over, from, to := a.worst(rate)
		t.Logf("%s: %d admitted in %.1f s, %.0f of the limit; at worst %.0f beyond the rate, in %s", path, len(a.at), lasted, float64(len(a.at))/rate/lasted*100, over, to.Sub(from).Round(10*time.Millisecond))
		if over > bound {
			t.Errorf("%s: %.0f admitted beyond the rate between %s and %s, want at most %.0f", path, over, from.Sub(began), to.Sub(began), bound)
		}
		if got := float64(len(a.at)); got < 0.25*rate*lasted { // no more is asked for in much of the time
			t.Errorf("%s: %.0f admitted in %.1f s", path, got, lasted)
		}
	}
}

// centre is an aggregator without a history, once it has the lease of the centre or stands by.
func centre(t *testing.T, nats, redis string) *process {
	return start(t, `"lease":"centre"`, nil, "aggregator", "--metrics-addr", "127.0.0.1:0", "--nats", nats, "--redis", redis,
		"--clickhouse", "http://127.0.0.1:1/weir", "--data", t.TempDir())
}

// upstream is the URL of a service that answers 204.
func upstream(t *testing.T) string {
	t.Helper()
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	t.Cleanup(up.Close)
	return up.URL
}

// proxied starts a gateway in front of a service, as a process that has heard the centre.
func proxied(t *testing.T, name, nats, policy, upstream, data string, more ...string) *process {
	t.Helper()
	return start(t, `"msg":"throttling with the centre"`, nil, append([]string{"gateway", "--name", name, "--nats", nats, "--policy", policy, "--upstream", upstream,
		"--gateway-addr", "127.0.0.1:0", "--check-addr", "127.0.0.1:0", "--metrics-addr", "127.0.0.1:0", "--data", data}, more...)...)
}

// takesOver says whether p has taken the lease of the centre from now on.
func takesOver(p *process) func() bool {
	from := len(p.lines())
	return func() bool {
		return slices.ContainsFunc(p.lines()[from:], func(line string) bool {
			return strings.Contains(line, "lease taken") && strings.Contains(line, `"lease":"centre"`)
		})
	}
}

// TestAFrozenCentreTakesNothing freezes the aggregator that answers strict requests, for less time than it takes to be replaced, and for
// longer. Once the other one has taken over, that one answers them all; when the first one wakes up it takes no tokens for what was asked
// meanwhile.
func TestAFrozenCentreTakesNothing(t *testing.T) {
	nats, redis := embeddedtest.NATS(t), embeddedtest.Redis(t)
	up := upstream(t)
	policy := write(t, "policy.yaml", `
version: 1
identity: {tenant: {header: X-App-Key}}
rules:
  - {name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}
  - {name: contract, layer: contract, key: [tenant], rate: 1/s, burst: 100000, consistency: strict}
`)
	active, standby := centre(t, nats.URL(), redis.URL()), centre(t, nats.URL(), redis.URL())
	gateway := proxied(t, "g", nats.URL(), policy, up, t.TempDir())
	url := "http://" + listener(t, gateway) + "/"
	counter, err := rediscounter.New(rediscounter.Config{URL: redis.URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = counter.Close() })
	taken := func() int64 {
		n, err := counter.Total(t.Context(), aggregator.Key{Rule: "contract", Key: "acme"})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	asked := int64(0)
	ask := func(n int) {
		for range n {
			if status, _, _ := get(t, url, "acme"); status != http.StatusNoContent {
				t.Fatalf("status %d, want 204: there are tokens", status)
			}
			asked++
			time.Sleep(5 * time.Millisecond)
		}
	}
	// mostly says whether nearly all requests are answered by the centre: a busy machine may answer some of them late.
	mostly := func() bool {
		before := taken()
		ask(100)
		return taken()-before > 75
	}
	eventually(t, "the centre answers", mostly)
	before, was := taken(), asked
	active.signal(syscall.SIGSTOP)
	for end := time.Now().Add(700 * time.Millisecond); time.Now().Before(end); {
		ask(1)
	}
	missed := asked - was
	active.signal(syscall.SIGCONT)
	eventually(t, "it answers again", mostly)
	time.Sleep(3 * time.Second) // what the gateway decided meanwhile is told, and counted once
	if n, most := taken()-before, asked-was+missed/2; n > most {
		t.Errorf("%d tokens were taken for %d requests, of which %d came while it was frozen: want at most %d", n, asked-was, missed, most)
	}
	from := len(standby.lines())
	active.signal(syscall.SIGSTOP)
	eventually(t, "the other takes over", func() bool {
		ask(1)
		return slices.ContainsFunc(standby.lines()[from:], func(line string) bool {
			return strings.Contains(line, "lease taken") && strings.Contains(line, `"lease":"centre"`)
		})
	})
	eventually(t, "the other answers all", mostly)
	before, was = taken(), asked
	active.signal(syscall.SIGCONT)
	ask(200)
	if n, most := taken()-before, asked-was+50; n > most {
		t.Errorf("%d tokens were taken for %d requests since the first one woke up, want at most %d", n, asked-was, most)
	}
}

// TestAFrozenCentreComesBack: an aggregator that goes on after some seconds refuses nobody who keeps to the limit, though it finds all
// that was used meanwhile at once, in buckets that could not take what was earned.
func TestAFrozenCentreComesBack(t *testing.T) {
	nats, redis := embeddedtest.NATS(t), embeddedtest.Redis(t)
	up := upstream(t)
	policy := write(t, "policy.yaml", `
version: 1
identity: {tenant: {header: X-App-Key}}
rules:
  - {name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}
  - {name: contract, layer: contract, key: [tenant], rate: 100/s, burst: 100}
`)
	only := centre(t, nats.URL(), redis.URL())
	var urls []string
	for _, name := range []string{"g1", "g2", "g3"} {
		gateway := proxied(t, name, nats.URL(), policy, up, t.TempDir(), "--fleet", "3")
		urls = append(urls, "http://"+listener(t, gateway)+"/")
	}
	n := 0
	ask := func(d time.Duration) (asked, refused int) { // fewer than 95 a second
		for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(10500 * time.Microsecond) {
			n++
			asked++
			if status, _, _ := get(t, urls[n%3], "acme"); status != http.StatusNoContent {
				refused++
			}
		}
		return asked, refused
	}
	if asked, refused := ask(4 * time.Second); refused > 0 {
		t.Fatalf("%d of %d requests refused before anything happened", refused, asked)
	}
	only.signal(syscall.SIGSTOP)
	ask(5 * time.Second)
	only.signal(syscall.SIGCONT)
	ask(2 * time.Second)
	if asked, refused := ask(3 * time.Second); refused > asked/20 {
		t.Errorf("%d of %d requests refused from two seconds after it woke up, of a tenant that keeps to its limit", refused, asked)
	}
}

// listener is the address at which a gateway takes requests.
func listener(t *testing.T, p *process) string {
	t.Helper()
	for _, line := range p.lines() {
		var up struct{ Msg, Addr string }
		if err := json.Unmarshal([]byte(line), &up); err == nil && up.Msg == "gateway is up" {
			return up.Addr
		}
	}
	t.Fatal("the gateway does not say where it is")
	return ""
}

// admissions are the instants at which requests were admitted.
type admissions struct {
	mu sync.Mutex
	at []time.Time
}

func (a *admissions) add(at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at = append(a.at, at)
}

// worst is the most that was admitted beyond a rate in any span of time, and when that was.
func (a *admissions) worst(rate float64) (over float64, from, to time.Time) {
	slices.SortFunc(a.at, time.Time.Compare)
	level, since := 0.0, time.Time{}
	for i, at := range a.at {
		if i > 0 {
			level -= rate * at.Sub(a.at[i-1]).Seconds()
		}
		if level <= 0 {
			level, since = 0, at
		}
		if level++; level > over {
			over, from, to = level, since, at
		}
	}
	return over, from, to
}

package rig

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Cell is where requests are counted: by all that a caller knows of them.
type Cell struct{ Gateway, Tenant, Route string }

// Outcomes counts requests by the rule that refused them; "" is allowed.
type Outcomes map[string]uint64

func (o Outcomes) sum() (n uint64) {
	for _, v := range o {
		n += v
	}
	return n
}

// Entry is what the load generator knows of a cell.
type Entry struct {
	Answered   Outcomes
	Unanswered uint64 // sent, at least in part: each may have been decided and counted, or not
}

// Journal is the oracle: the answers that were received. Its methods may be called from any goroutine.
type Journal struct {
	mu         sync.Mutex // guards what follows, while there is load
	Cells      map[Cell]*Entry
	Unexpected map[string]int // answers that nobody should get
	times      []time.Duration
}

// NewJournal returns an empty journal.
func NewJournal() *Journal { return &Journal{Cells: map[Cell]*Entry{}, Unexpected: map[string]int{}} }

func (j *Journal) note(c Cell, answered bool, rule string, took time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e := j.Cells[c]
	if e == nil {
		e = &Entry{Answered: Outcomes{}}
		j.Cells[c] = e
	}
	if answered {
		e.Answered[rule]++
		j.times = append(j.times, took)
	} else {
		e.Unanswered++
	}
}

func (j *Journal) wonder(what string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.Unexpected[what]++
}

// Totals are the requests that were sent and those of them without an answer.
func (j *Journal) Totals() (requests, unanswered uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.Cells {
		requests += e.Answered.sum() + e.Unanswered
		unanswered += e.Unanswered
	}
	return requests, unanswered
}

// TakeTimes returns, and forgets, how long each answer took since the last call.
func (j *Journal) TakeTimes() []time.Duration {
	j.mu.Lock()
	defer j.mu.Unlock()
	times := j.times
	j.times = nil
	return times
}

// Refused is the number of answers that were refusals.
func (j *Journal) Refused() (n uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.Cells {
		n += e.Answered.sum() - e.Answered[""]
	}
	return n
}

const (
	workersPerGateway = 8
	tenants           = 10
	patient           = 20 * time.Second       // a caller who waits out any fault
	impatient         = 300 * time.Millisecond // and one who hangs up
)

// Policy makes every rule refuse some of the load: a few tenants are far over their plan, exports over the route's limit.
const Policy = `
version: 1
identity: {tenant: {header: X-App-Key}}
routes:
  - {name: export, match: {path: /export/**}}
  - {name: orders, match: {path: /orders/**}}
plans:
  small: {rate: 120/m, burst: 40}
  big: {rate: 100/s, burst: 300}
default_plan: small
tenants:
  tenant-0: {plan: big}
rules:
  - {name: guard, layer: guard, key: [], rate: 250/s, burst: 300}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
  - {name: shadow, layer: contract, key: [tenant], rate: 1/s, burst: 5, mode: shadow}
  - {name: export, layer: route, key: [route], routes: [export], rate: 5/s, burst: 20}
`

// tenantName is the i-th tenant. One has a name that every encoding on the way has to get right.
func tenantName(i int) string {
	if i == 1 {
		return `a:b{c}%20'"\|`
	}
	return fmt.Sprintf("tenant-%d", i)
}

// Send generates load on the gateways, named with their addresses, until ctx is done: callers that ask one thing after another,
// rate times a second all together, half of them impatient, each address asked by as many as another. Nothing is ever asked
// twice: what has no answer is noted as such. What could not be sent, because nobody took the connection, is not noted.
func Send(ctx context.Context, j *Journal, seed uint64, rate float64, gateways map[string][]string) {
	var all sync.WaitGroup
	for g, name := range slices.Sorted(maps.Keys(gateways)) {
		for w := range workersPerGateway {
			c := &caller{journal: j, gateway: name, addr: gateways[name][w/2%len(gateways[name])], rng: rand.New(rand.NewPCG(seed, uint64(1+g*workersPerGateway+w))), timeout: patient}
			if w%2 == 1 {
				c.timeout = impatient
			}
			mean := float64(len(gateways)*workersPerGateway) / rate
			all.Go(func() {
				defer c.hangUp()
				for {
					select {
					case <-ctx.Done():
						return
					case <-time.After(c.rest + time.Duration(c.rng.ExpFloat64()*mean*float64(time.Second))):
						c.rest = 0
						c.ask()
					}
				}
			})
		}
	}
	all.Wait()
}

// caller is one connection's worth of requests to one gateway. It speaks HTTP by itself: net/http would send a request again
// when its connection breaks.
type caller struct {
	journal *Journal
	gateway string
	addr    string
	rng     *rand.Rand
	timeout time.Duration

	conn   net.Conn
	answer *bufio.Reader
	rest   time.Duration // before the next request
}

func (c *caller) hangUp() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

func (c *caller) ask() {
	tenant := tenantName(min(int(c.rng.ExpFloat64()*2.5), tenants-1)) // some ask often
	to := Cell{Gateway: c.gateway, Tenant: tenant, Route: "other"}
	path := "/"
	switch n := c.rng.IntN(10); {
	case n < 5:
		to.Route, path = "orders", fmt.Sprintf("/orders/%d", c.rng.IntN(1000))
	case n < 7:
		to.Route, path = "export", "/export/all"
	}
	if c.conn == nil {
		conn, err := net.DialTimeout("tcp", c.addr, time.Second)
		if err != nil {
			return // nothing was sent
		}
		c.conn, c.answer = conn, bufio.NewReader(conn)
	}
	began := time.Now()
	status, rule, err := c.exchange(path, tenant)
	if err != nil {
		c.hangUp()
		c.journal.note(to, false, "", 0)
		c.rest = 100 * time.Millisecond // what has no answer proves little, so there should not be much of it
		return
	}
	took := time.Since(began)
	switch status {
	case http.StatusOK:
		c.journal.note(to, true, "", took)
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		c.journal.note(to, true, rule, took)
	default:
		c.journal.wonder(fmt.Sprintf("status %d", status))
		c.journal.note(to, true, "", took)
	}
}

// exchange sends a request and reads its answer. An error means that there was none.
func (c *caller) exchange(path, tenant string) (status int, rule string, err error) {
	if err := c.conn.SetDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, "", err
	}
	if _, err := fmt.Fprintf(c.conn, "GET %s HTTP/1.1\r\nHost: gateway\r\nX-App-Key: %s\r\n\r\n", path, tenant); err != nil {
		return 0, "", err
	}
	resp, err := http.ReadResponse(c.answer, nil)
	if err != nil {
		return 0, "", err
	}
	// The head is the answer. A body that is cut off only ends the connection.
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.Close {
		defer c.hangUp()
	}
	_ = resp.Body.Close()
	_, rest, _ := strings.Cut(resp.Header.Get("RateLimit"), `"`)
	rule, _, _ = strings.Cut(rest, `"`)
	return resp.StatusCode, rule, nil
}

// upstream is the API behind the gateways. It is never at fault. It returns its URL.
func upstream() (*http.Server, string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", fmt.Errorf("upstream: %w", err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok\n") // a caller that has gone needs no answer
	})}
	go func() { _ = srv.Serve(ln) }() // ends with Close
	return srv, "http://" + ln.Addr().String(), nil
}

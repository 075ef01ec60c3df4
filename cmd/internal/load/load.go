// Package load sends generated traffic to gateways: Zipf-distributed tenants, a daily peak, and one tenant that goes mad.
package load

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirhq/weir/internal/conf"
)

// Config says what traffic to send. A zero field means its default.
type Config struct {
	URLs        []string      // gateways, at least one; requests are spread evenly
	Header      string        // header that carries the tenant (X-App-Key)
	Tenants     int           // tenants besides the mad one (200)
	Skew        float64       // Zipf exponent, above 1 (1.2)
	Rate        float64       // requests per second, averaged over a day (300)
	Day         time.Duration // length of one simulated day, with its peak in the middle (2m)
	Mad         string        // the tenant that goes mad; "-" is none (acme)
	MadAfter    time.Duration // when it goes mad, after the start and again after each calm (20s)
	MadFor      time.Duration // how long (30s)
	MadRate     float64       // its requests per second while mad (200, the retry storm that weir was born from)
	Concurrency int           // requests in flight at most; what does not fit is counted as unsent (256)
	Seed        uint64        // of the random choices (1)
}

func (c Config) withDefaults() Config {
	def := func(v *float64, d float64) {
		if *v == 0 {
			*v = d
		}
	}
	dur := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	if c.Header == "" {
		c.Header = "X-App-Key"
	}
	if c.Tenants == 0 {
		c.Tenants = 200
	}
	if c.Mad == "" {
		c.Mad = "acme"
	}
	if c.Concurrency == 0 {
		c.Concurrency = 256
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	def(&c.Skew, 1.2)
	def(&c.Rate, 300)
	def(&c.MadRate, 200)
	dur(&c.Day, 2*time.Minute)
	dur(&c.MadAfter, 20*time.Second)
	dur(&c.MadFor, 30*time.Second)
	return c
}

// validate reports every mistake at once.
func (c Config) validate() error {
	var bad []string
	check := func(ok bool, msg string) {
		if !ok {
			bad = append(bad, msg)
		}
	}
	check(len(c.URLs) > 0, "no gateway to send to")
	for _, s := range c.URLs {
		u, err := url.Parse(s)
		check(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "", fmt.Sprintf("gateway %s, want an address such as http://127.0.0.1:8080", conf.Redact(s)))
	}
	check(c.Skew > 1, "skew must be above 1")
	check(c.Rate > 0 && !math.IsInf(c.Rate, 0), "rate must be above 0")
	check(c.Tenants > 0, "tenants must be above 0")
	check(c.Concurrency > 0, "concurrency must be above 0")
	check(c.MadRate >= 0, "mad rate must not be negative")
	check(c.Day > 0, "day must be above 0")
	if bad != nil {
		return fmt.Errorf("load: %s", strings.Join(bad, "; "))
	}
	return nil
}

// Summary is what happened since the last one.
type Summary struct {
	Elapsed  time.Duration
	Allowed  int
	Refused  map[string]int // by the rule that refused
	Failed   map[string]int // by reason: another status, or no answer
	Unsent   int            // the generator could not keep up
	Tenants  map[string]int // requests by tenant
	Slowest  time.Duration
	Mad      bool // the mad tenant is at it
	Requests int  // Allowed + Refused + Failed
}

// Top names the n tenants with the most requests, most first.
func (s Summary) Top(n int) []string {
	names := make([]string, 0, len(s.Tenants))
	for t := range s.Tenants {
		names = append(names, t)
	}
	slices.SortFunc(names, func(a, b string) int {
		if d := s.Tenants[b] - s.Tenants[a]; d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	return names[:min(n, len(names))]
}

// Generator sends traffic while Run runs.
type Generator struct {
	cfg    Config
	client *http.Client
	rng    *rand.Rand // owned by Run
	zipf   *rand.Zipf // owned by Run

	sent, answered atomic.Int64 // requests, ever

	mu  sync.Mutex // guards sum
	sum Summary
}

// Unanswered says that requests were sent and not one of them ever got an answer.
func (g *Generator) Unanswered() bool { return g.sent.Load() > 0 && g.answered.Load() == 0 }

// New returns a generator, or every mistake in cfg.
func New(cfg Config) (*Generator, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(cfg.Seed, cfg.Seed))
	return &Generator{
		cfg:  cfg,
		rng:  rng,
		zipf: rand.NewZipf(rng, cfg.Skew, 1, uint64(cfg.Tenants-1)),
		client: &http.Client{
			Timeout:       5 * time.Second,
			Transport:     &http.Transport{MaxIdleConnsPerHost: cfg.Concurrency, DisableCompression: true},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		sum: newSummary(),
	}, nil
}

func newSummary() Summary {
	return Summary{Refused: map[string]int{}, Failed: map[string]int{}, Tenants: map[string]int{}}
}

// tick is how often requests are sent; the rate of a tick is a Poisson draw.
const tick = 10 * time.Millisecond

type request struct{ tenant, method, path string }

// Run sends until ctx is done, then waits for what is in flight.
func (g *Generator) Run(ctx context.Context) error {
	work := make(chan request, g.cfg.Concurrency)
	var wg sync.WaitGroup
	for i := range g.cfg.Concurrency {
		url := g.cfg.URLs[i%len(g.cfg.URLs)]
		wg.Go(func() {
			for r := range work {
				g.send(url, r)
			}
		})
	}
	start := time.Now()
	t := time.NewTicker(tick)
	defer t.Stop()
	for last := start; ; {
		select {
		case <-ctx.Done():
			close(work)
			wg.Wait()
			g.client.CloseIdleConnections()
			return nil
		case now := <-t.C:
			g.emit(work, now.Sub(start), now.Sub(last))
			last = now
		}
	}
}

// emit queues the requests of the dt that ended at since the start.
func (g *Generator) emit(work chan<- request, at, dt time.Duration) {
	day := 2 * math.Pi * float64(at) / float64(g.cfg.Day)
	rate := g.cfg.Rate * (1 - 0.6*math.Cos(day)) // quiet at night, 1.6 times the mean at noon
	for range g.poisson(rate * dt.Seconds()) {
		g.queue(work, g.pick(fmt.Sprintf("tenant-%03d", g.zipf.Uint64())))
	}
	phase := at % (g.cfg.MadAfter + g.cfg.MadFor)
	mad := g.cfg.Mad != "-" && phase >= g.cfg.MadAfter
	madRate := 0.0
	switch {
	case mad:
		madRate = g.cfg.MadRate
	case g.cfg.Mad != "-":
		madRate = g.cfg.MadRate / 40
	}
	for range g.poisson(madRate * dt.Seconds()) {
		g.queue(work, request{g.cfg.Mad, http.MethodGet, "/orders/42/retry"})
	}
	g.mu.Lock()
	g.sum.Mad = mad
	g.mu.Unlock()
}

// pick gives a tenant's request one of a few everyday interfaces.
func (g *Generator) pick(tenant string) request {
	switch n := g.rng.IntN(100); {
	case n < 60:
		return request{tenant, http.MethodGet, fmt.Sprintf("/orders/%d", g.rng.IntN(10_000))}
	case n < 70:
		return request{tenant, http.MethodPost, "/orders"}
	case n < 73:
		return request{tenant, http.MethodGet, "/report/export/daily.csv"}
	default:
		return request{tenant, http.MethodGet, fmt.Sprintf("/items?page=%d", g.rng.IntN(50))}
	}
}

func (g *Generator) queue(work chan<- request, r request) {
	select {
	case work <- r:
	default:
		g.mu.Lock()
		g.sum.Unsent++
		g.mu.Unlock()
	}
}

// poisson draws a count with the given mean (Knuth's product method, split so that exp does not underflow).
func (g *Generator) poisson(mean float64) int {
	n := 0
	for ; mean > 0; mean -= 30 {
		limit, p := math.Exp(-min(mean, 30)), g.rng.Float64()
		for p > limit {
			n++
			p *= g.rng.Float64()
		}
	}
	return n
}

func (g *Generator) send(url string, r request) {
	start := time.Now()
	rule, failed := g.ask(url, r)
	took := time.Since(start)
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &g.sum
	s.Requests++
	s.Tenants[r.tenant]++
	s.Slowest = max(s.Slowest, took)
	switch {
	case failed != "":
		s.Failed[failed]++
	case rule != "":
		s.Refused[rule]++
	default:
		s.Allowed++
	}
}

// ask sends one request; it returns the rule that refused it, or why there is no answer to count.
func (g *Generator) ask(url string, r request) (rule, failed string) {
	req, err := http.NewRequest(r.method, strings.TrimSuffix(url, "/")+r.path, http.NoBody)
	if err != nil {
		return "", "bad request"
	}
	req.Header.Set(g.cfg.Header, r.tenant)
	g.sent.Add(1)
	resp, err := g.client.Do(req)
	if err != nil {
		return "", "no answer"
	}
	g.answered.Add(1)
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return "", "answer cut off"
	}
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		var problem struct {
			Violated []string `json:"violated-policies"`
		}
		if json.Unmarshal(body, &problem) == nil && len(problem.Violated) > 0 {
			return problem.Violated[0], ""
		}
		fallthrough
	default:
		if resp.StatusCode >= 400 {
			return "", fmt.Sprintf("status %d", resp.StatusCode)
		}
		return "", ""
	}
}

// Take returns what happened since the last Take and starts anew. Safe for concurrent use with Run.
func (g *Generator) Take() Summary {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sum
	g.sum = newSummary()
	g.sum.Mad = s.Mad
	return s
}

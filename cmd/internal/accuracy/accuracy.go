// Package accuracy measures how near a fleet of gateways comes to one limit, beside what a perfect shared bucket would have admitted
// of the same requests: weir's modes and what others do instead, in traffic that shifts and with parts that fail. The simulator runs
// the real limiter and the real aggregator in virtual time; the same seed gives the same result.
package accuracy

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/weirhq/weir/limits"
)

// fleet is all gateways of one mode, and what stands behind them.
type fleet interface {
	// ask is called when arrival i comes to its gateway. The fleet calls world.answer once, then or later.
	ask(i int)
	// happen is called when something happens, also if it is nothing to this fleet.
	happen(h happening)
}

// mode is one way to keep a limit. Of several forms the one counts that does best in a scenario.
type mode struct {
	name  string
	forms []func(*world) fleet
}

// modes are all of them, in the order in which they are shown.
var modes = []mode{
	{"shared", []func(*world) fleet{newWeir(limits.Shared)}},
	{"lease", []func(*world) fleet{newWeir(limits.Lease)}},
	{"strict", []func(*world) fleet{newWeir(limits.Strict)}},
	{"divide-by-n", []func(*world) fleet{newDivided}},
	{"redis-per-request", []func(*world) fleet{newCentral}},
	{"gubernator-global", []func(*world) fleet{newGubernator(false), newGubernator(true)}},
}

// Config says what to simulate. A zero field means its default.
type Config struct {
	Seed      uint64   // of all random choices (1)
	Scenarios []string // by name (all)
	Modes     []string // by name (all)
}

// Row is how one mode did in one scenario. Numbers of requests are over the whole run, of all gateways and keys.
type Row struct {
	Scenario string   `json:"scenario"`
	Mode     string   `json:"mode"`
	Limit    int      `json:"limit"`         // what the limit allows in all that time: rate·t + burst, for each key that came
	Demand   int      `json:"demand"`        // requests that came
	Admitted int      `json:"admitted"`      // of them
	Over     float64  `json:"over"`          // admitted above a perfect bucket, second by second and key by key, as a part of what that bucket admitted
	Under    float64  `json:"under"`         // and below it
	Usable   *float64 `json:"usable_p99_ms"` // from a step until 95 % of the available limit is usable there; null where nothing steps

	Perfect  int      `json:"perfect"` // requests that the perfect bucket admitted
	Rate     float64  `json:"rate"`    // of the limit of each key, per second
	Burst    int64    `json:"burst"`
	Keys     int      `json:"keys"`     // that came
	Gateways int      `json:"gateways"` // at the start
	Seconds  int      `json:"seconds"`
	Messages *float64 `json:"messages_per_gateway_s"` // that gateways sent or were sent, to keep the limit; null where nobody counted
	Bytes    *float64 `json:"bytes_per_gateway_s"`    // in reports and updates; over real servers, in all of them
	Redis    *float64 `json:"redis_calls_per_s"`      // of all

	Down *float64 `json:"down,omitempty"` // admitted while the centre or Redis was down, as a part of what the perfect bucket admitted meanwhile
	Back *float64 `json:"back,omitempty"` // the same from two seconds after their return

	Late *float64 `json:"late_p99_ms,omitempty"` // over real servers: from the time when a request should come until it is answered. Far above the network's delay the machine was too slow, and the row says little

	series []float64 // admitted per second, by bin of the scenario's chart
}

// Result is all rows, by scenario and in each by mode.
type Result struct {
	Rows   []Row
	charts []chart
}

// job is one form of one mode in one scenario.
type job struct {
	sc   *prepared
	mode string
	form func(*world) fleet
	row  Row
}

// prepared is a scenario with its arrivals, for as long as some job needs them.
type prepared struct {
	scenario
	once     sync.Once
	arrivals []arrival
	asked    int // keys that are in the arrivals
	perfect  []bool
	series   []float64 // of the perfect bucket
	mu       sync.Mutex
	left     int // jobs
}

// Simulate runs all scenarios in all modes. It uses as many cores as there are, and the result does not depend on that.
func Simulate(ctx context.Context, cfg Config, progress func(done, total int)) (*Result, error) {
	if cfg.Seed == 0 {
		cfg.Seed = 1
	}
	all, chosen, err := choose(cfg)
	if err != nil {
		return nil, err
	}
	var jobs []*job
	ready := make([]*prepared, len(all))
	for i := range all {
		ready[i] = &prepared{scenario: all[i]}
		for _, m := range chosen {
			for _, form := range m.forms {
				jobs = append(jobs, &job{sc: ready[i], mode: m.name, form: form})
				ready[i].left++
			}
		}
	}

	// A world of many keys fills most of a gigabyte: there is one at a time, begun first for it takes longest.
	large, small := make(chan *job, len(jobs)), make(chan *job, len(jobs))
	for _, j := range slices.Backward(jobs) {
		if j.sc.cold > 0 {
			large <- j
		} else {
			small <- j
		}
	}
	close(large)
	close(small)
	var wg sync.WaitGroup
	var mu sync.Mutex
	done := 0
	work := func(queue <-chan *job) {
		for j := range queue {
			if ctx.Err() != nil {
				return
			}
			j.run(cfg.Seed)
			mu.Lock()
			done++
			if progress != nil {
				progress(done, len(jobs))
			}
			mu.Unlock()
		}
	}
	for i := range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			if i == 0 {
				work(large)
			}
			work(small)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return gather(ready, jobs), nil
}

// choose picks scenarios and modes by name.
func choose(cfg Config) (chosen []scenario, in []mode, err error) {
	if chosen, err = pick("scenario", scenarios(), cfg.Scenarios, func(sc scenario) string { return sc.name }); err == nil {
		in, err = pick("mode", modes, cfg.Modes, func(m mode) string { return m.name })
	}
	return chosen, in, err
}

// pick returns those of all that are asked for by name, in their order, and all when none are.
func pick[T any](kind string, all []T, asked []string, name func(T) string) (picked []T, err error) {
	if len(asked) == 0 {
		return all, nil
	}
	var names []string
	for _, x := range all {
		names = append(names, name(x))
		if slices.Contains(asked, name(x)) {
			picked = append(picked, x)
		}
	}
	for _, a := range asked {
		if !slices.Contains(names, a) {
			return nil, &UnknownError{kind, a, names}
		}
	}
	return picked, nil
}

// UnknownError is a scenario or mode that does not exist.
type UnknownError struct {
	Kind, Name string
	Names      []string // that there are
}

func (e *UnknownError) Error() string {
	return fmt.Sprintf("no %s %q: there are %s", e.Kind, e.Name, strings.Join(e.Names, ", "))
}

// prepare makes the arrivals, once.
func (p *prepared) prepare(seed uint64) {
	p.once.Do(func() {
		p.arrivals = p.generate(seed)
		p.asked = distinct(p.arrivals, p.keys)
		p.perfect = ideal(&p.scenario, p.arrivals)
		p.series = series(p.arrivals, p.perfect, p.from, p.to, p.bin)
	})
}

// distinct counts the keys that are asked for.
func distinct(arrivals []arrival, keys int) int {
	seen, n := make([]bool, keys), 0
	for i := range arrivals {
		if k := arrivals[i].key; !seen[k] {
			seen[k] = true
			n++
		}
	}
	return n
}

// release forgets the arrivals after the last job.
func (p *prepared) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left--; p.left == 0 {
		p.arrivals, p.perfect = nil, nil
	}
}

func (j *job) run(seed uint64) {
	p := j.sc
	p.prepare(seed)
	defer p.release()
	w := &world{sc: &p.scenario, arrivals: p.arrivals, seed: seed}
	w.run(j.form)
	j.score(w.admitted, w.traffic)
}

// score makes the row of what a fleet admitted and sent.
func (j *job) score(admitted []bool, sent traffic) {
	p := j.sc
	r := compare(p.arrivals, p.keys, admitted, p.perfect)
	seconds := float64(p.seconds)
	perGateway := seconds * float64(p.gateways)
	j.row = Row{Scenario: p.name, Mode: j.mode, Limit: p.asked * int(float64(p.burst)+math.Floor(p.perSecond()*seconds+1e-9)),
		Demand: len(p.arrivals), Admitted: r.admitted, Perfect: r.perfect,
		Over: part(r.over, r.perfect), Under: part(r.under, r.perfect),
		Rate: p.perSecond(), Burst: p.burst, Keys: p.asked, Gateways: p.gateways, Seconds: p.seconds,
		Messages: rate(sent.messages, perGateway, 2), Bytes: rate(sent.bytes, perGateway, 0), Redis: rate(sent.redis, seconds, 2), series: series(p.arrivals, admitted, p.from, p.to, p.bin)}
	if lag, ok := p99(usable(p.arrivals, p.steps, admitted, p.perfect)); ok {
		v := round(float64(lag)/float64(ms), 1)
		j.row.Usable = &v
	}
	if down, back, ok := outage(p.arrivals, p.happenings, admitted, p.perfect); ok {
		down, back := round(down, 4), round(back, 4)
		j.row.Down, j.row.Back = &down, &back
	}
}

func part(n, of int) float64 { return round(float64(n)/float64(max(of, 1)), 6) }

// rate is n by something, null if n is not known.
func rate(n int64, by float64, digits int) *float64 {
	if n < 0 {
		return nil
	}
	v := round(float64(n)/by, digits)
	return &v
}

func round(v float64, digits int) float64 {
	scale := math.Pow10(digits)
	return math.Round(v*scale) / scale
}

// gather takes the best form of each mode.
func gather(ready []*prepared, jobs []*job) *Result {
	res := &Result{}
	for _, j := range jobs {
		n := len(res.Rows)
		if n > 0 && res.Rows[n-1].Scenario == j.row.Scenario && res.Rows[n-1].Mode == j.row.Mode {
			if last := &res.Rows[n-1]; j.row.Over+j.row.Under < last.Over+last.Under {
				*last = j.row
			}
			continue
		}
		res.Rows = append(res.Rows, j.row)
	}
	for _, p := range ready {
		c := chart{name: p.name, title: p.title, from: p.from, bin: p.bin, perfect: p.series}
		for i := range res.Rows {
			if r := &res.Rows[i]; r.Scenario == p.name {
				c.lines = append(c.lines, line{r.Mode, r.series})
			}
		}
		res.charts = append(res.charts, c)
	}
	return res
}

// WriteTable writes the rows for people.
func (r *Result) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	head, live := "SCENARIO\tMODE\tDEMAND\tLIMIT\tPERFECT\tADMITTED\tOVER\tUNDER\tUSABLE MS\tMSG/GW/S\tKB/GW/S\tREDIS/S\t", false
	for i := range r.Rows {
		live = live || r.Rows[i].Late != nil
	}
	if live {
		head += "LATE MS\t"
	}
	_, _ = fmt.Fprintln(t, head) // Flush has the error
	for i := range r.Rows {
		x := &r.Rows[i]
		_, _ = fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%.2f %%\t%.2f %%\t%s\t%s\t%s\t%s\t", x.Scenario, x.Mode, x.Demand, x.Limit, x.Perfect, x.Admitted,
			100*x.Over, 100*x.Under, cell(x.Usable, "%.0f", 1), cell(x.Messages, "%.1f", 1), cell(x.Bytes, "%.1f", 1000), cell(x.Redis, "%.0f", 1))
		if live {
			_, _ = fmt.Fprint(t, cell(x.Late, "%.0f", 1), "\t")
		}
		_, _ = fmt.Fprintln(t)
	}
	return t.Flush()
}

// cell is a figure in a table, in units of so many; a dash if it is not known.
func cell(v *float64, format string, unit float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf(format, *v/unit)
}

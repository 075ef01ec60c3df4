package accuracy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/weirhq/weir/limits"
)

// LiveConfig says what to run over real servers. A zero field means its default.
type LiveConfig struct {
	Config
	Dir    string // for servers' files; required
	Whole  bool   // run all of each scenario, not only the beginning: the step takes twelve minutes for each mode
	Rivals string // folder of the Go module that runs redis_rate and Gubernator; without it they are left out
}

// liveFleet is a fleet of real gateways. ask is called from any goroutine, and waits for the answer.
type liveFleet interface {
	ask(gateway, key int) (bool, error)
	happen(h happening) error
	sent() (traffic, error) // since it started
	stop() error
}

// liveMode is one way to keep a limit, over real servers.
type liveMode struct {
	name  string
	forms int
	waits bool // a request waits for another process: each has a goroutine of its own
	start func(ctx context.Context, cfg LiveConfig, sc *scenario, form int, log *slog.Logger) (liveFleet, error)
}

func liveModes(rivals bool) []liveMode {
	all := []liveMode{
		{name: "shared", forms: 1, start: startLiveWeir(limits.Shared)},
		{name: "lease", forms: 1, start: startLiveWeir(limits.Lease)},
		{name: "strict", forms: 1, waits: true, start: startLiveWeir(limits.Strict)},
		{name: "divide-by-n", forms: 1, start: startLiveDivided},
		{name: "redis-per-request", forms: 1, waits: true, start: startLiveCentral},
	}
	if rivals {
		all[len(all)-1].start = startRival("redis-per-request")
		all = append(all, liveMode{name: "gubernator-global", forms: 2, waits: true, start: startRival("gubernator-global")})
	}
	return all
}

// liveFor is how much of each scenario runs in real time. The others need a world in which everything can be bent.
var liveFor = map[string]int{
	"steady-skew": 10, "steady-skew-light": 10, "steady-skew-2": 10, "step": 35, "moving-hotspot": 30, "flash-crowd": 14,
	"join-leave": 35, "centre-down": 26, "redis-down": 26, "tiny": 60,
}

// Live runs scenarios in real time, one after another, over servers that it starts.
func Live(ctx context.Context, cfg LiveConfig, log *slog.Logger, progress func(done, total int)) (*Result, error) {
	if cfg.Seed == 0 {
		cfg.Seed = 1
	}
	all, chosen, err := chooseLive(cfg)
	if err != nil {
		return nil, err
	}
	if cfg.Rivals != "" {
		if err := buildRivals(ctx, cfg); err != nil {
			return nil, err
		}
	}
	total := 0
	for _, m := range chosen {
		total += m.forms * len(all)
	}
	var ready []*prepared
	var jobs []*job
	for i := range all {
		p := &prepared{scenario: all[i]}
		if !cfg.Whole {
			p.shorten(liveFor[p.name])
		}
		p.prepare(cfg.Seed)
		ready = append(ready, p)
		for _, m := range chosen {
			for form := range m.forms {
				admitted, late, sent, err := runLive(ctx, cfg, p, m, form, log)
				if err != nil {
					return nil, fmt.Errorf("%s over real servers, scenario %s: %w", m.name, p.name, err)
				}
				j := &job{sc: p, mode: m.name}
				j.score(admitted, sent)
				if d, ok := p99(late); ok {
					v := round(float64(d)/float64(ms), 1)
					j.row.Late = &v
				}
				jobs = append(jobs, j)
				if progress != nil {
					progress(len(jobs), total)
				}
			}
		}
	}
	return gather(ready, jobs), nil
}

// chooseLive picks scenarios and modes by name.
func chooseLive(cfg LiveConfig) (chosen []scenario, in []liveMode, err error) {
	all := slices.DeleteFunc(scenarios(), func(sc scenario) bool { return liveFor[sc.name] == 0 })
	if chosen, err = pick("live scenario", all, cfg.Scenarios, func(sc scenario) string { return sc.name }); err == nil {
		in, err = pick("live mode", liveModes(cfg.Rivals != ""), cfg.Modes, func(m liveMode) string { return m.name })
	}
	return chosen, in, err
}

// shorten leaves out what comes after some seconds.
func (p *prepared) shorten(seconds int) {
	fill := p.fill
	p.seconds = min(p.seconds, seconds)
	p.to = min(p.to, time.Duration(p.seconds)*time.Second)
	p.from = min(p.from, p.to/2)
	p.fill = func(sc *scenario, g *generator) {
		fill(sc, g)
		end := int64(sc.seconds) * s
		g.arrivals = slices.DeleteFunc(g.arrivals, func(a arrival) bool { return a.at >= end })
		sc.steps = slices.DeleteFunc(sc.steps, func(st span) bool { return st.to > end })
	}
	p.happenings = slices.DeleteFunc(slices.Clone(p.happenings), func(h happening) bool { return h.at >= int64(p.seconds)*s })
}

// runLive puts a scenario before a real fleet. It returns what was admitted, how late each request was answered, and what the fleet
// sent meanwhile.
func runLive(ctx context.Context, cfg LiveConfig, p *prepared, m liveMode, form int, log *slog.Logger) (admitted []bool, late []time.Duration, sent traffic, err error) {
	f, err := m.start(ctx, cfg, &p.scenario, form, log)
	if err != nil {
		return nil, nil, sent, err
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	before, err := f.sent()
	if err != nil {
		return nil, nil, sent, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	admitted = make([]bool, len(p.arrivals))
	late = make([]time.Duration, len(p.arrivals))
	start := time.Now().Add(100 * time.Millisecond)
	until := func(at int64) bool {
		if d := time.Until(start.Add(time.Duration(at))); d > 0 {
			select {
			case <-time.After(d):
			case <-ctx.Done():
			}
		}
		return ctx.Err() == nil
	}
	ask := func(i int) {
		a := &p.arrivals[i]
		ok, err := f.ask(int(a.gateway), int(a.key))
		if err != nil {
			cancel(err)
		}
		admitted[i], late[i] = ok, time.Since(start.Add(time.Duration(a.at)))
	}
	var wg sync.WaitGroup
	for g := range p.most { // one goroutine for each gateway, as far as requests need not wait
		wg.Go(func() {
			for i := range p.arrivals {
				if int(p.arrivals[i].gateway) != g {
					continue
				}
				if !until(p.arrivals[i].at) {
					return
				}
				if m.waits {
					wg.Go(func() { ask(i) })
				} else {
					ask(i)
				}
			}
		})
	}
	wg.Go(func() {
		for _, h := range p.happenings {
			if !until(h.at) {
				return
			}
			if err := f.happen(h); err != nil {
				cancel(err)
			}
		}
	})
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, nil, sent, err
	}
	after, err := f.sent()
	return admitted, late, traffic{messages: since(before.messages, after.messages), bytes: since(before.bytes, after.bytes),
		redis: since(before.redis, after.redis)}, err
}

// unknown is traffic that nobody counts.
const unknown = -1

func since(before, after int64) int64 {
	if before < 0 || after < 0 {
		return unknown
	}
	return after - before
}

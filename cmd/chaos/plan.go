package main

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/weirhq/weir/cmd/internal/rig"
)

// kind is what happens to a target.
type kind string

const (
	// Of a part, which is a process.
	kill   kind = "kill"   // SIGKILL, and started again afterwards
	term   kind = "term"   // SIGTERM, and started again afterwards
	pause  kind = "pause"  // SIGSTOP, then SIGCONT
	flush  kind = "flush"  // FLUSHALL: Redis forgets everything
	forget kind = "forget" // SCRIPT FLUSH: Redis forgets its scripts

	// Of a link, which is a client's way to a server. It has a fault proxy.
	cut      kind = "cut"       // every connection ends
	reset    kind = "reset"     // every connection is reset
	refuse   kind = "refuse"    // and new ones too, for a time
	hold     kind = "hold"      // nothing passes for a time
	slow     kind = "slow"      // replies are late by N milliseconds
	cutUp    kind = "cut-up"    // the connection is reset after N more bytes of requests
	cutDown  kind = "cut-down"  // the connection is reset after N more bytes of replies
	swallowA kind = "swallowed" // the connections of now are silent for good
)

// fault is one thing that goes wrong.
type fault struct {
	Target string
	Kind   kind
	At     time.Duration // since the load began
	For    time.Duration // 0 where it is over at once
	N      int64         // bytes or milliseconds, where Kind has them
}

func (f fault) String() string {
	s := fmt.Sprintf("%7s  %-22s %s", f.At, f.Target, f.Kind)
	if f.N > 0 {
		s += fmt.Sprintf(" %d", f.N)
	}
	if f.For > 0 {
		s += fmt.Sprintf(" for %s", f.For)
	}
	return s
}

// plan is everything about a run that its seed decides.
type plan struct {
	Seed      uint64
	Gateways  int
	Rate      float64 // requests per second, of all gateways together
	Faults    []fault // by time; those of one target do not overlap
	Afterlife bool    // the gateways start once more after the drain: nothing may be sent again
}

// window is how long things go wrong.
const window = 4 * time.Second

// newPlan decides on a run. Spared parts are neither killed nor terminated.
func newPlan(seed uint64, spared ...string) plan {
	rng := rand.New(rand.NewPCG(seed, 0x77656972))
	p := plan{Seed: seed, Gateways: 2 + rng.IntN(2), Rate: float64(150 + rng.IntN(300)), Afterlife: rng.IntN(4) == 0}
	for n := 5 + rng.IntN(14); len(p.Faults) < n; {
		f := p.draw(rng)
		if slices.Contains(spared, f.Target) && (f.Kind == kill || f.Kind == term) {
			f.Kind = pause
		}
		if !slices.ContainsFunc(p.Faults, func(o fault) bool {
			return o.Target == f.Target && f.At <= o.At+o.For && o.At <= f.At+f.For
		}) {
			p.Faults = append(p.Faults, f)
		}
	}
	slices.SortStableFunc(p.Faults, func(a, b fault) int { return cmp.Compare(a.At, b.At) })
	return p
}

// flushed tells whether Redis is emptied in this run.
func (p plan) flushed() bool {
	return slices.ContainsFunc(p.Faults, func(f fault) bool { return f.Kind == flush })
}

// killed are the parts that are killed in this run.
func (p plan) killed() map[string]bool {
	all := map[string]bool{}
	for _, f := range p.Faults {
		if f.Kind == kill {
			all[f.Target] = true
		}
	}
	return all
}

func (p plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d gateways, %.0f requests per second, afterlife %t\n", p.Seed, p.Gateways, p.Rate, p.Afterlife)
	for _, f := range p.Faults {
		fmt.Fprintln(&b, f)
	}
	return b.String()
}

// draw makes up one fault.
func (p plan) draw(rng *rand.Rand) fault {
	gateway := func() string { return rig.GatewayName(1 + rng.IntN(p.Gateways)) }
	pick := func(all ...kind) kind { return all[rng.IntN(len(all))] }
	f := fault{At: time.Duration(rng.Int64N(int64(window))).Round(time.Millisecond)}
	if rng.IntN(2) == 0 { // a part
		switch rng.IntN(7) {
		case 0, 1:
			f.Target, f.Kind = gateway(), pick(kill, kill, term, pause)
		case 2, 3:
			f.Target, f.Kind = rig.Aggregator, pick(kill, kill, term, pause)
		case 4:
			f.Target, f.Kind = rig.NATS, pick(kill, kill, pause)
		case 5:
			f.Target, f.Kind = pickString(rng, rig.Redis, rig.ClickHouse), pick(kill, pause)
			if f.Target == rig.Redis && rng.IntN(4) == 0 {
				f.Kind = pick(forget, flush)
			}
		case 6:
			f.Target, f.Kind = rig.Alerter, pick(kill, term, pause)
		}
	} else {
		switch rng.IntN(8) {
		case 0, 1:
			f.Target = rig.Link(gateway(), rig.NATS)
		case 2, 3:
			f.Target = rig.Link(rig.Aggregator, rig.NATS)
		case 4:
			f.Target = rig.Link(rig.Aggregator, rig.Redis)
		case 5:
			f.Target = rig.Link(rig.Aggregator, rig.ClickHouse)
		case 6:
			f.Target = rig.Link(rig.Alerter, rig.NATS)
		case 7:
			f.Target = rig.Link(rig.Load, gateway())
		}
		f.Kind = pick(cut, reset, refuse, hold, slow, cutUp, cutUp, cutDown, cutDown, cutDown)
		if rng.IntN(100) == 0 {
			f.Kind = swallowA
		}
	}
	switch f.Kind {
	case kill, term:
		f.For = between(rng, 0, time.Second)
	case pause, hold, refuse:
		f.For = between(rng, 20*time.Millisecond, 2*time.Second)
	case slow:
		f.For, f.N = between(rng, 200*time.Millisecond, 2*time.Second), int64(5+rng.ExpFloat64()*150)
	case cutUp, cutDown:
		f.For, f.N = between(rng, 100*time.Millisecond, time.Second), 1+rng.Int64N(1<<uint(4+rng.IntN(10)))
	}
	return f
}

func between(rng *rand.Rand, lo, hi time.Duration) time.Duration {
	return (lo + time.Duration(rng.Int64N(int64(hi-lo)))).Round(time.Millisecond)
}

func pickString(rng *rand.Rand, all ...string) string { return all[rng.IntN(len(all))] }

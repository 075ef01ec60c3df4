package accuracy

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
)

// scenario is traffic on a fleet, and what goes wrong meanwhile.
type scenario struct {
	name, title   string
	gateways      int   // that there are at the start
	most          int   // with those that join later
	keys          int   // each has the whole limit
	cold          int32 // keys from this one on come so rarely that nobody is in need of their shares; 0 if there are none
	tokens        int64
	per           time.Duration // tokens per this
	burst         int64
	seconds       int
	loss          float64 // part of the messages that are lost
	clocks        bool    // wall clocks are 5 s off, half of them ahead and half behind
	happenings    []happening
	steps         []span                      // a demand on one gateway where there was none
	fill          func(*scenario, *generator) // makes the arrivals, and the steps
	from, to, bin time.Duration               // of the chart: all of the time, by the second, where nothing is said
}

type span struct{ from, to int64 }

// arrival is one request for one token.
type arrival struct {
	at      int64 // ns
	gateway int32
	key     int32
}

// happening is something that happens to a fleet.
type happening struct {
	at      int64
	what    what
	gateway int
}

type what uint8

const (
	centreDown what = iota
	centreUp
	redisDown
	redisUp // with nothing in its memory
	joins
	leaves   // in good order
	vanishes // without a word
)

// limit is the limit of each key.
func (sc *scenario) limit() bucket.Limit {
	r, err := bucket.NewRate(uint64(sc.tokens), 1, sc.per)
	if err != nil {
		panic(fmt.Sprintf("scenario %s: %v", sc.name, err))
	}
	return bucket.Limit{Rate: r, Burst: sc.burst}
}

// perSecond is the limit's rate.
func (sc *scenario) perSecond() float64 { return float64(sc.tokens) / sc.per.Seconds() }

// generator makes arrivals.
type generator struct {
	rng      *rand.Rand
	arrivals []arrival
}

// flow adds requests at random instants (a Poisson process) from one time to another, in seconds.
func (g *generator) flow(gateway, key int, perSecond, from, to float64) {
	for t := from; ; {
		t += g.rng.ExpFloat64() / perSecond
		if t >= to {
			return
		}
		g.arrivals = append(g.arrivals, arrival{int64(t * 1e9), int32(gateway), int32(key)})
	}
}

// generate makes a scenario's arrivals in order of time. It may be called once for each copy of a scenario.
func (sc *scenario) generate(seed uint64) []arrival {
	g := &generator{rng: random(seed, sc.name+"/arrivals")}
	sc.fill(sc, g)
	slices.SortFunc(g.arrivals, func(a, b arrival) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.gateway, b.gateway), cmp.Compare(a.key, b.key))
	})
	return g.arrivals
}

// skewed is a scenario of one gateway that has nine tenths of the demand; demand is in parts of the limit.
func skewed(name, title string, gateways int, demand float64) scenario {
	return scenario{name: name, title: title, gateways: gateways, seconds: 30, fill: func(sc *scenario, g *generator) {
		for i := range gateways {
			part := 0.1 / float64(gateways-1)
			if i == 1 {
				part = 0.9
			}
			g.flow(i, 0, part*demand*sc.perSecond(), 0, 30)
		}
	}}
}

// even spreads a demand over gateways 0 to n-1.
func (g *generator) even(n int, perSecond, from, to float64) {
	for i := range n {
		g.flow(i, 0, perSecond/float64(n), from, to)
	}
}

// scenarios are all of them, with a limit of 1000 per second and a burst of 1000 where they do not say otherwise.
func scenarios() []scenario {
	all := []scenario{
		skewed("steady-skew", "Steady load, 90 % of it on one of 10 gateways, 1.5 × the limit", 10, 1.5),
		skewed("steady-skew-light", "The same with 0.9 × the limit: nothing need be refused", 10, 0.9),
		skewed("steady-skew-2", "Steady load, 90 % of it on one of 2 gateways, 1.5 × the limit", 2, 1.5),
		skewed("steady-skew-50", "Steady load, 90 % of it on one of 50 gateways, 1.5 × the limit", 50, 1.5),
		{name: "step", title: "100 steps from idle to 10 × the limit on one of 5 gateways", gateways: 5, seconds: 700, to: 30 * time.Second, bin: 250 * time.Millisecond, fill: func(sc *scenario, g *generator) {
			for t, n := 2.0, 0; n < 100; n++ {
				t += 3 + 3*g.rng.Float64()
				g.flow(g.rng.IntN(5), 0, 10*sc.perSecond(), t, t+2)
				sc.steps = append(sc.steps, span{int64(t * 1e9), int64((t + 2) * 1e9)})
				t += 2
			}
		}},
		{name: "moving-hotspot", title: "2 × the limit, all of it on one of 10 gateways, another one each second", gateways: 10, seconds: 60, from: 10 * time.Second, to: 30 * time.Second, bin: 250 * time.Millisecond, fill: func(sc *scenario, g *generator) {
			for t := range 60 {
				g.flow(t*3%10, 0, 2*sc.perSecond(), float64(t), float64(t+1))
			}
		}},
		{name: "flash-crowd", title: "From idle to 10 × the limit on all of 10 gateways at once, each with half of what the next busier one has; three times", gateways: 10, seconds: 45, to: 30 * time.Second, bin: 250 * time.Millisecond,
			fill: func(sc *scenario, g *generator) {
				for n, t := range []float64{2, 17, 32} {
					for i := range 10 {
						part := 1 / float64(int64(2)<<min(i, 8)) // the last two alike, so that they add up to 1
						g.flow((i+4*n)%10, 0, 10*sc.perSecond()*part, t, t+8)
					}
				}
			}},
		{name: "flash-crowd-even", title: "The same spread evenly, which is what dividing by N is made for", gateways: 10, seconds: 45, to: 30 * time.Second, bin: 250 * time.Millisecond,
			fill: func(sc *scenario, g *generator) {
				for _, t := range []float64{2, 17, 32} {
					g.even(10, 10*sc.perSecond(), t, t+8)
				}
			}},
		{name: "join-leave", title: "1.5 × the limit on 4 gateways; two join, one vanishes, one leaves", gateways: 4, most: 6, seconds: 50,
			happenings: []happening{{9 * s, joins, 4}, {9 * s, joins, 5}, {25 * s, vanishes, 1}, {40 * s, leaves, 5}},
			fill: func(sc *scenario, g *generator) {
				for i := range 6 { // a gateway has traffic from one second after it joined
					from, to := 0.0, 50.0
					switch i {
					case 1:
						to = 25
					case 4:
						from = 10
					case 5:
						from, to = 10, 40
					}
					for _, part := range []struct{ from, to, gateways float64 }{{0, 10, 4}, {10, 25, 6}, {25, 40, 5}, {40, 50, 4}} {
						if lo, hi := max(from, part.from), min(to, part.to); lo < hi {
							g.flow(i, 0, 1.5*sc.perSecond()/part.gateways, lo, hi)
						}
					}
				}
			}},
		{name: "message-loss", title: "5 % of all messages are lost; 1.5 × the limit, half of it on one of 10 gateways, another one every 5 s", gateways: 10, seconds: 60, loss: 0.05,
			fill: func(sc *scenario, g *generator) {
				for t := 0; t < 60; t += 5 {
					g.even(10, 0.75*sc.perSecond(), float64(t), float64(t+5))
					g.flow(t*3/5%10, 0, 0.75*sc.perSecond(), float64(t), float64(t+5))
				}
			}},
		{name: "centre-down", title: "The centre is down for 10 s; 1.5 × the limit, evenly on 10 gateways", gateways: 10, seconds: 40,
			happenings: []happening{{10 * s, centreDown, 0}, {20 * s, centreUp, 0}},
			fill:       func(sc *scenario, g *generator) { g.even(10, 1.5*sc.perSecond(), 0, 40) }},
		{name: "redis-down", title: "Redis is down for 10 s and comes back empty; 1.5 × the limit, evenly on 10 gateways", gateways: 10, seconds: 40,
			happenings: []happening{{10 * s, redisDown, 0}, {20 * s, redisUp, 0}},
			fill:       func(sc *scenario, g *generator) { g.even(10, 1.5*sc.perSecond(), 0, 40) }},
		{name: "clocks", title: "Wall clocks are 5 s ahead or behind; 1.5 × the limit, half of it on one of 10 gateways", gateways: 10, seconds: 30, clocks: true,
			fill: func(sc *scenario, g *generator) {
				g.even(10, 0.75*sc.perSecond(), 0, 30)
				g.flow(1, 0, 0.75*sc.perSecond(), 0, 30)
			}},
		{name: "tiny", title: "3 per minute, burst 1, 5 gateways, 2 requests a second for 10 minutes", gateways: 5, seconds: 600, tokens: 3, per: time.Minute, burst: 1, bin: time.Minute,
			fill: func(sc *scenario, g *generator) { g.even(5, 2, 0, 600) }},
		{name: "cold-keys", title: "100 hot keys at 2 × their limit of 100 per second, and 1 M cold ones that come once in 100 s; 10 gateways", gateways: 10, seconds: 10, keys: coldKeys + hotKeys, cold: hotKeys, tokens: 100, burst: 100,
			fill: func(sc *scenario, g *generator) {
				for k := range hotKeys { // three gateways in ten have a hot key's traffic, unevenly
					for i, part := range []float64{0.7, 0.2, 0.1} {
						g.flow((k+3*i)%10, k, part*2*sc.perSecond(), 0, 10)
					}
				}
				for i := range 10 {
					first := len(g.arrivals)
					g.flow(i, 0, coldKeys/100/10, 0, 10)
					for n := range g.arrivals[first:] {
						g.arrivals[first+n].key = hotKeys + g.rng.Int32N(coldKeys)
					}
				}
			}},
	}
	for i := range all {
		sc := &all[i]
		sc.most = max(sc.most, sc.gateways)
		sc.keys = max(sc.keys, 1)
		sc.per = cmp.Or(sc.per, time.Second)
		sc.tokens = cmp.Or(sc.tokens, 1000)
		sc.burst = cmp.Or(sc.burst, 1000)
		sc.to = cmp.Or(sc.to, time.Duration(sc.seconds)*time.Second)
		sc.bin = cmp.Or(sc.bin, time.Second)
	}
	return all
}

const (
	hotKeys  = 100
	coldKeys = 1_000_000
)

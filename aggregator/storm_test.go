package aggregator_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/aggregatortest"
	"github.com/weirhq/weir/schemas"
)

// toy is a gateway said plainly: one bucket that follows shares and grants.
type toy struct {
	name           string
	rate, tokens   float64
	burst          float64
	version        uint64
	granted        uint64
	known          bool
	cum, seq       uint64
	taken, refused uint64
	reported       time.Duration
	enforced       aggregator.Limit
}

func (g *toy) hear(s *schemas.Share) {
	if s.Version <= g.version {
		return
	}
	g.version, g.known = s.Version, true
	g.rate, g.burst, g.enforced = float64(s.RateNanos)/1e9, float64(s.Burst), aggregator.Limit{RateNanos: s.RateNanos, Burst: s.Burst}
	g.tokens = min(g.tokens, g.burst)
	if s.Grant > g.granted && s.Granted <= g.granted {
		g.tokens = min(g.tokens+float64(s.Grant-g.granted), g.burst)
		g.granted = s.Grant
	}
}

// TestStorm: while updates are lost, repeated and come in any order, and reports are late and repeated, a fleet admits in any time
// no more than rate·t, the burst and a stated slack; after it what gateways hold is what the central bucket has.
func TestStorm(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 6).Draw(t, "gateways")
		l := aggregator.Limit{RateNanos: rapid.Int64Range(10, 1000).Draw(t, "rate") * 1e9, Burst: rapid.Int64Range(1, 1000).Draw(t, "burst")}
		consistency := rapid.SampledFrom([]string{"", "lease"}).Draw(t, "consistency")
		loss := rapid.Float64Range(0, 0.5).Draw(t, "loss")
		rnd := rapid.Uint64().Draw(t, "seed")
		chance := func() float64 { // xorshift
			rnd |= 1
			rnd ^= rnd << 13
			rnd ^= rnd >> 7
			rnd ^= rnd << 17
			return float64(rnd>>11) / (1 << 53)
		}
		const step = 10 * time.Millisecond
		epoch := time.Unix(1_800_000_000, 0)
		now := time.Duration(0)
		ready := make(chan time.Time)
		close(ready)
		counter := aggregatortest.NewMemory()
		counter.Now = func() time.Time { return epoch.Add(now) }
		said := &casts{last: map[string]schemas.Share{}}
		a := aggregator.New(aggregator.Config{Learn: -1, Now: counter.Now, After: func(time.Duration) <-chan time.Time { return ready }}, counter, said, slog.New(slog.DiscardHandler), nil)

		gateways := make([]*toy, n)
		for i := range gateways {
			even := aggregator.Limit{RateNanos: l.RateNanos / int64(n), Burst: max(l.Burst/int64(n), 1)}
			gateways[i] = &toy{name: fmt.Sprint("g", i), rate: float64(even.RateNanos) / 1e9, burst: float64(even.Burst), tokens: float64(even.Burst), enforced: even}
		}
		type late struct {
			at time.Duration
			cast
		}
		var down []late
		type up struct {
			at time.Duration
			r  *schemas.Report
		}
		var reports []up
		demand := make([]float64, n)       // per step
		var admitted, least, worst float64 // less what was refilled meanwhile: at least so far, and most above that
		var seq uint64
		run := func(until time.Duration, storm bool) {
			for ; now < until; now += step {
				admitted -= float64(l.RateNanos) / 1e9 * step.Seconds()
				least = min(least, admitted)
				for i, g := range gateways {
					a.Heartbeat(&schemas.Heartbeat{Gateway: g.name, Boot: "b"}, counter.Now())
					if storm && chance() < 0.01 {
						demand[i] = max(chance()*3-1, 0) * float64(l.RateNanos) / 1e9 * step.Seconds()
					}
					if !storm {
						demand[i] = 0
					}
					g.tokens = min(g.tokens+g.rate*step.Seconds(), max(g.burst, 0))
					for want := demand[i] + chance(); want >= 1 && demand[i] > 0; want-- {
						if g.tokens >= 1 {
							g.tokens--
							g.cum++
							g.taken++
							admitted++
						} else {
							g.refused++
						}
					}
					if g.taken+g.refused > 0 && (g.refused > 0 || now-g.reported >= 50*time.Millisecond) || !storm && now-g.reported >= 500*time.Millisecond {
						g.seq++
						r := &schemas.Report{Gateway: g.name, Boot: "b", Seq: g.seq, SealedAt: counter.Now(), Tokens: []schemas.Tokens{{Rule: "r", Key: "k", Consistency: consistency,
							RateNanos: g.enforced.RateNanos, Capacity: g.enforced.Burst, LimitRateNanos: l.RateNanos, LimitBurst: l.Burst, Taken: g.taken, Refused: g.refused,
							Cum: g.cum, TokensLast: int64(g.tokens), Granted: g.granted, Window: min(now-g.reported, 100*time.Millisecond)}}}
						g.taken, g.refused, g.reported = 0, 0, now
						delay := step
						if storm && chance() < loss {
							delay = time.Duration(chance() * float64(200*time.Millisecond))
						}
						reports = append(reports, up{now + delay, r})
						if storm && chance() < loss {
							reports = append(reports, up{now + 3*delay, r})
						}
					}
				}
				worst = max(worst, admitted-least)
				b := schemas.Batch[*schemas.Report]{Stream: schemas.UsageStream}
				reports = slices.DeleteFunc(reports, func(u up) bool {
					if u.at > now {
						return false
					}
					seq++
					b.Items = append(b.Items, schemas.Delivered[*schemas.Report]{Seq: seq, Arrived: counter.Now(), Value: u.r})
					return true
				})
				if len(b.Items) > 0 {
					if err := a.Reports(context.Background(), b); err != nil {
						t.Fatal(err)
					}
				}
				if !counter.Now().Before(a.Due()) {
					a.Step(context.Background())
				}
				for _, c := range said.take(false) {
					if !storm || chance() >= loss {
						down = append(down, late{now + step, c})
					}
					if storm && chance() < loss {
						down = append(down, late{now + time.Duration(chance()*float64(time.Second)), c})
					}
				}
				down = slices.DeleteFunc(down, func(d late) bool {
					if d.at > now {
						return false
					}
					for _, g := range gateways {
						if g.name == d.gateway {
							for i := range d.Shares {
								g.hear(&d.Shares[i])
							}
						}
					}
					return true
				})
			}
		}
		run(20*time.Second, true)
		rate, burst := float64(l.RateNanos)/1e9, float64(l.Burst)
		slack := 0.3*rate + 2*float64(n) // reports and updates under way, and a token of each that has no share
		if consistency == "lease" {
			slack += burst // blocks that are taken and not used do not keep the bucket from filling
		}
		if worst > burst+slack {
			t.Fatalf("in some time t %.1f more than rate·t was admitted, of %v/s and burst %v by %d gateways, want %.1f at most", worst, rate, burst, n, burst+slack)
		}
		run(40*time.Second, false)
		states, err := counter.Fold(context.Background(), []aggregator.Fold{{Key: aggregator.Key{Rule: "r", Key: "k"}, Limit: l}})
		if err != nil {
			t.Fatal(err)
		}
		var held float64
		for _, g := range gateways {
			held += g.tokens
		}
		if level := float64(states[0].LevelMicros) / 1e6; held > level+float64(n)+0.01*rate {
			t.Fatalf("after the storm gateways hold %v, the bucket has %v of %v", held, level, burst)
		}
	})
}

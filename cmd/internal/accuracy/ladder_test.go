package accuracy

import (
	"testing"

	"github.com/weirhq/weir/limits"
)

// TestAFleetAloneAdmitsWhatItDid: a fleet of which one gateway has nine tenths of the load loses the centre, and each gateway goes on
// with about what it had.
func TestAFleetAloneAdmitsWhatItDid(t *testing.T) {
	for _, c := range []struct {
		demand, least float64 // in parts of the limit
		mode          limits.Consistency
	}{{1.5, 0.9, limits.Shared}, {0.9, 0.92, limits.Shared}, {1.5, 0.9, limits.Lease}} {
		sc := skewed("alone", "", 10, c.demand)
		sc.most, sc.keys, sc.tokens, sc.per, sc.burst, sc.seconds = 10, 1, 1000, 1e9, 1000, 80
		sc.fill = func(sc *scenario, g *generator) {
			for i := range 10 {
				part := 0.1 / 9
				if i == 1 {
					part = 0.9
				}
				g.flow(i, 0, part*c.demand*sc.perSecond(), 0, 80)
			}
		}
		sc.happenings = []happening{{40 * s, centreDown, 0}, {70 * s, centreUp, 0}}
		w, perfect := runOn(sc, 1, newWeir(c.mode))
		alone := w.partOf(perfect, 45, 70)
		after := w.partOf(perfect, 74, 80)
		t.Logf("%v, %.1f × the limit: %.3f of it alone, %.3f with the centre again", c.mode, c.demand, alone, after)
		if alone < c.least || alone > 1.01 {
			t.Errorf("%v, %.1f × the limit: alone the fleet admitted %.3f of what it could, want %.2f or more", c.mode, c.demand, alone, c.least)
		}
		if after < 0.98 || after > 1.02 {
			t.Errorf("%v, %.1f × the limit: with the centre again %.3f, want 1", c.mode, c.demand, after)
		}
	}
}

// TestAFleetWithoutRedisAdmitsWhatItDid: a fleet of which one gateway has two thirds of the load loses Redis for eight seconds. What
// lives by grants, or asks about each request, goes on with about what it had, and no more than the limit.
func TestAFleetWithoutRedisAdmitsWhatItDid(t *testing.T) {
	for _, mode := range []limits.Consistency{limits.Lease, limits.Strict} {
		for _, c := range []struct{ demand, least float64 }{{0.76, 0.9}, {1.5, 0.9}} { // in parts of the limit, of what could be admitted
			sc := skewed("without-redis", "", 4, c.demand)
			sc.most, sc.keys, sc.tokens, sc.per, sc.burst, sc.seconds = 4, 1, 100, 1e9, 100, 60
			sc.fill = func(sc *scenario, g *generator) {
				for i, part := range []float64{50. / 76, 15. / 76, 8. / 76, 3. / 76} {
					g.flow(i, 0, part*c.demand*sc.perSecond(), 0, 60)
				}
			}
			sc.happenings = []happening{{40 * s, redisDown, 0}, {48 * s, redisUp, 0}}
			w, perfect := runOn(sc, 1, newWeir(mode))
			without := w.partOf(perfect, 42, 48)
			after := w.partOf(perfect, 52, 60)
			t.Logf("%v, %.2f × the limit: %.3f of it without Redis, %.3f with it again", mode, c.demand, without, after)
			if without < c.least || without > 1.04 {
				t.Errorf("%v, %.2f × the limit: without Redis the fleet admitted %.3f of what it could, want %.2f or more", mode, c.demand, without, c.least)
			}
			if after < 0.97 || after > 1.03 {
				t.Errorf("%v, %.2f × the limit: with Redis again %.3f, want 1", mode, c.demand, after)
			}
		}
	}
}

func TestOutage(t *testing.T) {
	var arrivals []arrival
	var admitted, perfect []bool
	for n := range 10 * int64(1000) { // 1000 a second, of which half may pass; down from 1 to 4 s
		at := n * ms
		pass := n%2 == 0
		arrivals, perfect = append(arrivals, arrival{at: at}), append(perfect, pass)
		switch {
		case at >= s && at < 4*s:
			pass = n%4 == 0
		case at >= 4*s && at < 6*s:
			pass = true
		case at >= 9*s:
			pass = false
		}
		admitted = append(admitted, pass)
	}
	if down, back, ok := outage(arrivals, []happening{{s, redisDown, 0}, {4 * s, redisUp, 0}}, admitted, perfect); !ok || down != 0.5 || back != 0.75 {
		t.Errorf("outage = %v, %v, %v, want half, and three quarters from 6 to 10 s", down, back, ok)
	}
	if _, _, ok := outage(arrivals, []happening{{s, vanishes, 0}}, admitted, perfect); ok {
		t.Error("an outage where nothing was down")
	}
}

// partOf is what was admitted from one second to another, as a part of what a perfect bucket admitted.
func (w *world) partOf(perfect []bool, from, to int64) float64 {
	var got, want float64
	for i := range w.arrivals {
		if at := w.arrivals[i].at; at < from*s || at >= to*s {
			continue
		}
		if w.admitted[i] {
			got++
		}
		if perfect[i] {
			want++
		}
	}
	return got / want
}

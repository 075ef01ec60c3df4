package accuracy

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
)

// everything is a result as bytes.
func everything(t *testing.T, cfg Config) []byte {
	t.Helper()
	res, err := Simulate(context.Background(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(res.Rows)
	if err != nil {
		t.Fatal(err)
	}
	out := bytes.NewBuffer(b)
	for i := range res.charts {
		out.WriteString(res.charts[i].svg())
	}
	if err := res.WriteTable(out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestSameSeedSameBytes(t *testing.T) {
	cfg := Config{Scenarios: []string{"steady-skew", "join-leave", "message-loss", "redis-down", "centre-down", "clocks", "tiny"}}
	first := everything(t, cfg)
	if again := everything(t, cfg); !bytes.Equal(first, again) {
		t.Error("two runs with one seed differ")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	if again := everything(t, cfg); !bytes.Equal(first, again) {
		t.Error("a run on one core differs")
	}
	cfg.Seed = 2
	if other := everything(t, cfg); bytes.Equal(first, other) {
		t.Error("two seeds give the same bytes")
	}
}

// TestManyKeysSameBytes: where there are many keys, the order of a hash table could show.
func TestManyKeysSameBytes(t *testing.T) {
	cfg := Config{Scenarios: []string{"cold-keys"}, Modes: []string{"shared", "gubernator-global"}}
	first := everything(t, cfg)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	if again := everything(t, cfg); !bytes.Equal(first, again) {
		t.Error("two runs with one seed differ")
	}
}

func TestPerfectBucketEqualsThatOfTheLimiter(t *testing.T) {
	rng := random(1, t.Name())
	for range 200 {
		sc := &scenario{name: "x", keys: 1, tokens: 1 + rng.Int64N(5000), per: []time.Duration{time.Second, time.Minute, 7 * time.Second}[rng.IntN(3)], burst: 1 + rng.Int64N(50)}
		p, lim := newPerfect(sc), sc.limit()
		state := bucket.Full(lim, 0)
		now := int64(0)
		mean := float64(sc.per) / float64(sc.tokens) / (0.5 + 2*rng.Float64())
		for n := range 2000 {
			now += int64(rng.ExpFloat64() * mean)
			if rng.IntN(500) == 0 {
				now += int64(sc.per) * 100 // idle
			}
			got, want := p.take(&arrival{at: now}), state.Take(lim, now, 1).Allowed
			if got != want {
				t.Fatalf("%d per %s, burst %d: take %d at %d = %v, want %v", sc.tokens, sc.per, sc.burst, n, now, got, want)
			}
		}
	}
}

// runOn runs arrivals on a mode.
func runOn(sc scenario, seed uint64, form func(*world) fleet) (w *world, perfect []bool) {
	w = &world{sc: &sc, arrivals: sc.generate(seed), seed: seed}
	w.run(form)
	return w, ideal(&sc, w.arrivals)
}

func TestDividingAnEvenLoadIsPerfect(t *testing.T) {
	sc := scenario{name: "even", gateways: 10, most: 10, keys: 1, tokens: 1000, per: time.Second, burst: 1000, seconds: 10, fill: func(_ *scenario, g *generator) {
		for t := range 1000 { // each 10 ms two requests at each gateway, which earns one token in that time
			for i := range 20 {
				g.arrivals = append(g.arrivals, arrival{at: int64(t) * 10 * ms, gateway: int32(i % 10)})
			}
		}
	}}
	w, perfect := runOn(sc, 1, newDivided)
	if got := compare(w.arrivals, 1, w.admitted, perfect); got.admitted != got.perfect || got.over+got.under != 0 || got.admitted != 10_990 {
		t.Errorf("divided = %+v, want 10990 admitted as the perfect bucket did", got)
	}
	w, perfect = runOn(sc, 1, newCentral)
	if got := compare(w.arrivals, 1, w.admitted, perfect); got.over+got.under > 40 {
		t.Errorf("one bucket in Redis = %+v, want what a hop's delay explains", got)
	}
}

func TestCompare(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		name              string
		at                []int64 // ms
		keys              []int32
		admitted, perfect []bool
		want              score
	}{
		{"equal", []int64{0, 1}, nil, []bool{yes, no}, []bool{yes, no}, score{1, 1, 0, 0}},
		{"another one of the same second", []int64{0, 999}, nil, []bool{no, yes}, []bool{yes, no}, score{1, 1, 0, 0}},
		{"another second", []int64{0, 1000}, nil, []bool{no, yes}, []bool{yes, no}, score{1, 1, 1, 1}},
		{"over twice, under once", []int64{0, 1, 2, 1500, 2500}, nil, []bool{yes, yes, yes, no, yes}, []bool{yes, no, no, yes, yes}, score{4, 3, 2, 1}},
		{"keys are apart", []int64{0, 1}, []int32{0, 1}, []bool{yes, no}, []bool{no, yes}, score{1, 1, 1, 1}},
		{"even, then not", []int64{0, 1, 2}, nil, []bool{yes, no, yes}, []bool{no, yes, no}, score{2, 1, 1, 0}},
		{"nothing came", nil, nil, nil, nil, score{}},
	} {
		arrivals := make([]arrival, len(c.at))
		for i, at := range c.at {
			arrivals[i].at = at * ms
			if c.keys != nil {
				arrivals[i].key = c.keys[i]
			}
		}
		if got := compare(arrivals, 2, c.admitted, c.perfect); got != c.want {
			t.Errorf("%s: compare = %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestUsable(t *testing.T) {
	// A request each ms; perfect admits all.
	var arrivals []arrival
	for at := range int64(400) {
		arrivals = append(arrivals, arrival{at: at * ms})
	}
	perfect := slices.Repeat([]bool{true}, 400)
	admit := func(from, to int) []bool { // but for these
		a := slices.Clone(perfect)
		for i := from; i < to; i++ {
			a[i] = false
		}
		return a
	}
	step := []span{{100 * ms, 300 * ms}}
	for _, c := range []struct {
		name     string
		admitted []bool
		want     time.Duration
	}{
		{"at once", perfect, 0},
		{"before the step", admit(0, 100), 0},
		{"never", admit(100, 300), 200 * time.Millisecond},
		{"5 lacking are less than 5 % after 100", admit(110, 115), 99 * time.Millisecond},
		{"20 lacking are always more", admit(110, 130), 200 * time.Millisecond},
	} {
		if got := usable(arrivals, step, c.admitted, perfect); len(got) != 1 || got[0] != c.want {
			t.Errorf("%s: usable = %v, want %v", c.name, got, c.want)
		}
	}
	if got, ok := p99([]time.Duration{3, 1, 2}); got != 3 || !ok {
		t.Errorf("p99 of three = %d, want the largest", got)
	}
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i))
	}
	if got, _ := p99(hundred); got != 98 {
		t.Errorf("p99 of 0 to 99 = %d, want 98", got)
	}
	if _, ok := p99(nil); ok {
		t.Error("p99 of nothing is something")
	}
}

func TestEventsHappenInOrder(t *testing.T) {
	w := &world{sc: &scenario{seconds: 1}}
	var got []int64
	rng := random(7, t.Name())
	var f fleetFunc = func(int) {}
	w.run(func(w *world) fleet {
		for range 1000 {
			at := rng.Int64N(900)
			w.at(at, func() {
				if w.now != at {
					t.Errorf("an event for %d happens at %d", at, w.now)
				}
				got = append(got, at)
			})
		}
		l := w.link(2, "x")
		for i := range int64(100) {
			l.send(0, func() { got = append(got, 1000+i) })
		}
		return f
	})
	if len(got) != 1100 {
		t.Fatalf("%d events happened, want 1100", len(got))
	}
	sent := slices.DeleteFunc(slices.Clone(got), func(v int64) bool { return v < 1000 })
	if planned := slices.DeleteFunc(got, func(v int64) bool { return v >= 1000 }); !slices.IsSorted(planned) {
		t.Error("events are out of order")
	}
	if !slices.IsSorted(sent) {
		t.Error("messages of one link overtake one another")
	}
}

type fleetFunc func(int)

func (f fleetFunc) ask(i int)        { f(i) }
func (f fleetFunc) happen(happening) {}

// TestGubernatorModel is what its source does with one key.
func TestGubernatorModel(t *testing.T) {
	start := func(leaky bool) (*gubernator, *world) {
		w := &world{sc: &scenario{name: "g", gateways: 2, most: 2, keys: 1, tokens: 10, per: time.Second, burst: 10, seconds: 1}}
		return newGubernator(leaky)(w).(*gubernator), w
	}
	now := epoch.UnixMilli()
	for _, c := range []struct {
		name  string
		leaky bool
		hits  []int64 // drained
		want  int64   // remaining
		later int64   // ms
		then  int64
	}{
		{"window: full again as a whole", false, []int64{4, 6}, 0, 1001, 9},
		{"window: nothing comes back before", false, []int64{4, 6}, 0, 900, 0},
		{"window: more hits than remain drain it", false, []int64{4, 7}, 0, 900, 0},
		{"leaky: refills at its rate", true, []int64{4, 6}, 0, 500, 4},
		{"leaky: more hits than remain drain it", true, []int64{4, 7}, 0, 500, 4},
	} {
		g, w := start(c.leaky)
		remaining := int64(-1)
		for _, h := range c.hits {
			_, remaining, _ = g.decide(g.peers[0], 0, hit{h, now}, true)
		}
		if remaining != c.want {
			t.Errorf("%s: %d remain, want %d", c.name, remaining, c.want)
		}
		w.now = c.later * ms
		if _, remaining, _ = g.decide(g.peers[0], 0, hit{1, now + c.later}, false); remaining != c.then {
			t.Errorf("%s: %d remain after %d ms and one more hit, want %d", c.name, remaining, c.later, c.then)
		}
	}
}

// TestPeersOfGubernatorGoOverBetweenBroadcasts is the behaviour that its GLOBAL mode is known for: each peer answers from its own copy.
func TestPeersOfGubernatorGoOverBetweenBroadcasts(t *testing.T) {
	sc := scenario{name: "burst", gateways: 5, most: 5, keys: 1, tokens: 100, per: time.Second, burst: 100, seconds: 1, fill: func(_ *scenario, g *generator) {
		for i := range 1000 { // in a tenth of a second
			g.arrivals = append(g.arrivals, arrival{at: int64(i) * ms / 20, gateway: int32(i % 5)})
		}
	}}
	w, perfect := runOn(sc, 1, newGubernator(false))
	if got := compare(w.arrivals, 1, w.admitted, perfect); got.admitted != 500 {
		t.Errorf("5 peers admit %d of a crowd, want each its whole limit of 100", got.admitted)
	}
}

// TestAloneIsPerfect: with nobody to share with, each gateway has the one bucket.
func TestAloneIsPerfect(t *testing.T) {
	sc := skewed("alone", "", 2, 1.5)
	sc.gateways, sc.most, sc.keys, sc.tokens, sc.per, sc.burst = 1, 1, 1, 1000, time.Second, 1000
	sc.fill = func(sc *scenario, g *generator) { g.flow(0, 0, 1.5*sc.perSecond(), 0, 30) }
	w, perfect := runOn(sc, 3, newDivided)
	if got := compare(w.arrivals, 1, w.admitted, perfect); got.over+got.under > 0 {
		t.Errorf("divided by one = %+v, want perfect", got)
	}
	w, perfect = runOn(sc, 3, newWeir(limits.Local))
	if got := compare(w.arrivals, 1, w.admitted, perfect); got.over+got.under > 0 {
		t.Errorf("a real gateway alone = %+v, want perfect", got)
	}
}

func TestWeirReportsAndHears(t *testing.T) {
	sc := skewed("traffic", "", 5, 1.5)
	sc.most, sc.keys, sc.tokens, sc.per, sc.burst = 5, 1, 1000, time.Second, 1000
	w, _ := runOn(sc, 1, newWeir(limits.Shared))
	if w.traffic.messages == 0 || w.traffic.bytes == 0 || w.traffic.redis == 0 {
		t.Errorf("traffic = %+v, want some of each", w.traffic)
	}
}

func TestWriteDoc(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "accuracy.md")
	res, err := Simulate(context.Background(), Config{Scenarios: []string{"tiny"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := res.WriteDoc(file, "accuracy"); err == nil {
		t.Error("a document that is not there was written")
	}
	for range 2 { // the second time over the first
		if _, err := os.Stat(file); err != nil {
			if err := os.WriteFile(file, []byte("# Head\n"+docBegin+"\nold\n"+docEnd+"\ntail\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := res.WriteDoc(file, "accuracy"); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	if !strings.HasPrefix(text, "# Head\n") || !strings.HasSuffix(text, "\ntail\n") || strings.Contains(text, "old") || strings.Count(text, "| divide-by-n |") != 1 {
		t.Errorf("document = %s", text)
	}
	if err := res.WriteCharts(filepath.Join(dir, "accuracy")); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "accuracy", "tiny.svg")); err != nil || !bytes.HasSuffix(b, []byte("</svg>\n")) {
		t.Errorf("chart = %.80s, %v", b, err)
	}
}

func TestUnknownNames(t *testing.T) {
	for _, cfg := range []Config{{Scenarios: []string{"no"}}, {Modes: []string{"no"}}} {
		if _, err := Simulate(context.Background(), cfg, nil); err == nil || !strings.Contains(err.Error(), `"no"`) {
			t.Errorf("Simulate(%+v) = %v, want an error that says what there is", cfg, err)
		}
	}
}

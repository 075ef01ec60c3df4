package aggregator

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/weirhq/weir/schemas"
)

func TestWeigh(t *testing.T) {
	for _, c := range []struct {
		taken []float64
		want  []int
	}{
		{nil, []int{}},
		{[]float64{0}, []int{1_000_000}},
		{[]float64{7}, []int{1_000_000}},
		{[]float64{0, 0, 0, 0}, []int{250_000, 250_000, 250_000, 250_000}},
		{[]float64{3, 1}, []int{750_000, 250_000}},
		{[]float64{1, 0, 0, 0, 0}, []int{800_000, 50_000, 50_000, 50_000, 50_000}},
		{[]float64{1, 90, 1, 8}, []int{62_500, 803_572, 62_500, 71_428}}, // 8 of 98 parts of what is left
	} {
		if got := Weigh(c.taken); !slices.Equal(got, c.want) {
			t.Errorf("Weigh(%v) = %v, want %v", c.taken, got, c.want)
		}
	}
}

// TestWeightsNeverAddUpToMoreThanTheLimit plays random histories, and adds up what each gateway heard last, at every instant: also
// at that in which those that have more have heard so and those that have less have not. Messages get lost, though no two in a row of one
// gateway. The centre starts anew, though not just then, and says nothing of weights until it knows them: gateways keep what they have, or where the
// fleet has another size an even part; then none misses that.
func TestWeightsNeverAddUpToMoreThanTheLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w weights
		now := time.Unix(1_800_000_000, 0)
		fleet := []string{"g0", "g1"}
		heard, missed := map[string]int{}, map[string]bool{}
		for step := range rapid.IntRange(1, 120).Draw(t, "steps") {
			now = now.Add(time.Second)
			joined, size := "", len(fleet)
			switch rapid.IntRange(0, 30).Draw(t, "event") {
			case 0:
				joined = fmt.Sprintf("g%d", 2+step)
				fleet = slices.Sorted(slices.Values(append(slices.Clone(fleet), joined)))
			case 1:
				if len(fleet) > 1 {
					at := rapid.IntRange(0, len(fleet)-1).Draw(t, "gone")
					delete(heard, fleet[at])
					delete(missed, fleet[at])
					fleet = slices.Delete(slices.Clone(fleet), at, at+1)
				}
			case 2:
				if !slices.Contains(slices.Collect(maps.Values(missed)), true) {
					w = weights{}
				}
			}
			for _, g := range fleet {
				taken := rapid.SampledFrom([]uint64{0, 0, 1, 5, 100, 1000, 100_000}).Draw(t, "taken")
				w.count(&schemas.Report{Gateway: g, Tokens: []schemas.Tokens{{Rule: "r", Key: "k", Taken: taken, LimitRateNanos: 1e9, LimitBurst: 5}}})
			}
			w.step(fleet, now)
			even := len(w.told) == 0 && len(fleet) != size
			sum, most := 0, 0
			for _, g := range fleet {
				if len(w.told) > 0 && w.told[g] < schemas.WholeWeight/(4*len(fleet))-1 && w.lag == 0 {
					t.Fatalf("%s has %d of a fleet of %d, want at least a quarter of the even part", g, w.told[g], len(fleet))
				}
				was := heard[g]
				missed[g] = g != joined && !even && !missed[g] && rapid.Bool().Draw(t, "missed")
				switch {
				case missed[g]:
				case len(w.told) > 0:
					heard[g] = w.told[g]
				case even || was == 0:
					heard[g] = schemas.WholeWeight / len(fleet)
				}
				sum, most = sum+heard[g], most+max(was, heard[g])
			}
			if !even && step > 0 {
				sum = most
			}
			if sum > schemas.WholeWeight+len(fleet) { // a newcomer's first millionth
				t.Fatalf("weights %v add up to %d", heard, sum)
			}
		}
	})
}

// TestANewCentreGoesOnFromTheWeightsThatThereAre: what gateways say that they have, so that one that is lost right after it has weighed
// them leaves a fleet with all of a limit; nothing is known of one that does not say.
func TestANewCentreGoesOnFromTheWeightsThatThereAre(t *testing.T) {
	const half = schemas.WholeWeight / 2
	for _, c := range []struct {
		name           string
		a, b           int // that they say
		wantA, wantB   int // once they are weighed, with the same load …
		laterA, laterB int // … and two keepalives later
	}{
		{"the same as before", half, half, half, half, half, half},
		{"the load has moved", 900_000, 100_000, half, 100_000, half, half},
		{"each was alone", schemas.WholeWeight, schemas.WholeWeight, half, half, half, half},
		{"together more than all, each by little", 590_000, 590_000, half, half, half, half},
		{"one does not say", half, 0, half / 4, half / 4, half, half},
	} {
		var w weights
		now, fleet := time.Unix(1_800_000_000, 0), []string{"a", "b"}
		step := func(n int) string {
			for range n {
				now = now.Add(time.Second)
				for _, g := range fleet {
					w.count(&schemas.Report{Gateway: g, Tokens: []schemas.Tokens{{Rule: "r", Key: "k", Taken: 100, LimitRateNanos: 1e9, LimitBurst: 5}}})
				}
				w.hear("a", c.a)
				w.hear("b", c.b)
				w.step(fleet, now)
			}
			return fmt.Sprint(w.told["a"], w.told["b"])
		}
		step(10)
		if got, want := step(1), fmt.Sprint(c.wantA, c.wantB); got != want {
			t.Errorf("%s: told %s, want %s", c.name, got, want)
		}
		if got, want := step(2), fmt.Sprint(c.laterA, c.laterB); got != want {
			t.Errorf("%s: told %s later, want %s", c.name, got, want)
		}
	}
}

// TestWeightsFollowTrafficAndNotNoise: they are known after ten seconds, and are said anew only when they have moved.
func TestWeightsFollowTrafficAndNotNoise(t *testing.T) {
	var w weights
	now, fleet := time.Unix(1_800_000_000, 0), []string{"a", "b"}
	changes := 0
	run := func(seconds int, taken ...int) {
		for n := range seconds {
			before := fmt.Sprint(w.told)
			now = now.Add(time.Second)
			for i, g := range fleet {
				noise := (n*7 + i*3) % (taken[i]/10 + 1)
				w.count(&schemas.Report{Gateway: g, Tokens: []schemas.Tokens{
					{Rule: "r", Key: "k", Taken: uint64(taken[i] + noise), LimitRateNanos: 1e9, LimitBurst: 5},
					{Rule: "r", Key: "k", Taken: 1e6, Mode: "shadow", LimitRateNanos: 1e9, LimitBurst: 5},
				}})
			}
			w.step(fleet, now)
			if fmt.Sprint(w.told) != before {
				changes++
			}
		}
	}
	run(9, 900, 100)
	if w.told != nil {
		t.Errorf("told %v after nine seconds, want nothing yet", w.told)
	}
	run(100, 900, 100)
	if w.told["a"] < 860_000 || w.told["b"] != 125_000 || changes != 2 {
		t.Errorf("told %v in %d changes, want the least at first and then about 875000 and 125000", w.told, changes)
	}
	run(30, 0, 0)
	if w.told["a"] < 860_000 || changes != 2 {
		t.Errorf("told %v in %d changes after half a minute in which nobody came, want the same", w.told, changes)
	}
	run(120, 100, 900)
	if w.told["b"] < 700_000 || changes > 16 {
		t.Errorf("told %v in %d changes after the load moved, want most of it there", w.told, changes)
	}
}

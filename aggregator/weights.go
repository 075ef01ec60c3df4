package aggregator

import (
	"cmp"
	"slices"
	"time"

	"github.com/weirhq/weir/schemas"
)

// Weigh returns the weight of each gateway in a fleet that took these tokens, in parts of schemas.WholeWeight: what it keeps to when it
// hears the centre no longer. Weights go by what was taken, but nobody has less than a quarter of the even part, for load moves
// while the centre is away, too. They add up to the whole or a little less.
func Weigh(taken []float64) []int {
	weights, order := make([]int, len(taken)), make([]int, len(taken))
	sum := 0.0
	for i, t := range taken {
		order[i] = i
		sum += t
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(taken[a], taken[b]) })
	rest, floor := schemas.WholeWeight, schemas.WholeWeight/(4*max(len(taken), 1))
	for n, i := range order { // those below the floor come first, and what they get the others do not
		if left := len(order) - n; sum <= 0 {
			weights[i] = rest / left
		} else {
			weights[i] = max(int(float64(rest)*min(taken[i]/sum, 1)), min(floor, rest/left))
		}
		rest, sum = rest-weights[i], sum-taken[i]
	}
	return weights
}

const (
	weighEvery = 10 * time.Second // the fleet is weighed
	weighKeeps = 0.8              // of what was taken before, each time: a mean over most of a minute
	weighLag   = 2                // keepalives that a smaller weight is ahead of the larger ones that it makes room for
	weighSlack = 5                // a change by less than one part in this is none
)

// weights are those of a fleet.
type weights struct {
	fleet  []string
	lately map[string]float64 // tokens that each gateway took since the last weighing …
	taken  map[string]float64 // … and before it, less and less of what is long ago
	at     time.Time          // of the last weighing
	told   map[string]int     // millionths by gateway; none before anything is known
	said   map[string]int     // what gateways say that they have, until then
	next   map[string]int     // what is told after lag more keepalives
	lag    int
}

// count notes what a gateway took by itself.
func (w *weights) count(r *schemas.Report) {
	for i := range r.Tokens {
		if t := &r.Tokens[i]; shared(t) {
			w.add(r.Gateway, int64(t.Taken))
		}
	}
}

// add notes tokens that a gateway took, or, below 0, gave back.
func (w *weights) add(gateway string, tokens int64) {
	if w.lately == nil {
		w.lately = make(map[string]float64)
	}
	w.lately[gateway] += float64(tokens)
}

// hear notes what a gateway says that it was told, by a centre before this one.
func (w *weights) hear(gateway string, weight int) {
	if w.told == nil && weight > 0 {
		if w.said == nil {
			w.said = make(map[string]int)
		}
		w.said[gateway] = weight
	}
}

// recall takes what all of a fleet say that they have for what they were told, and no more than the whole.
func (w *weights) recall(fleet []string) {
	told, sum := make(map[string]int, len(fleet)), 0
	for _, g := range fleet {
		if w.said[g] == 0 {
			return
		}
		told[g] = w.said[g]
		sum += w.said[g]
	}
	for g, weight := range told {
		told[g] = max(weight*schemas.WholeWeight/max(sum, schemas.WholeWeight), 1)
	}
	w.told, w.next, w.said = told, told, nil
}

// step weighs the fleet, which is in order, when it is time to or another one than before. It is called once a keepalive.
//
// A weight grows some keepalives after those that it takes from have shrunk: a fleet that loses the centre meanwhile, or a gateway
// that misses one message, does not have more than all of a limit. A newcomer has as good as nothing until then; and where gateways do not
// say what they were told before, everybody begins with the least that anybody may have been told.
func (w *weights) step(fleet []string, now time.Time) {
	if w.lag > 0 {
		if w.lag--; w.lag == 0 {
			w.told = w.next
		}
	}
	if w.at.IsZero() {
		w.at = now
	}
	same := slices.Equal(fleet, w.fleet)
	if due := now.Sub(w.at) >= weighEvery; due {
		w.at = now
		w.forget()
	} else if same {
		return
	}
	before := w.fleet
	w.fleet = fleet
	if len(w.taken) == 0 {
		return
	}
	if w.told == nil {
		w.recall(fleet)
	}
	taken := make([]float64, len(fleet))
	for i, g := range fleet {
		taken[i] = w.taken[g]
	}
	next, told, moved := make(map[string]int, len(fleet)), make(map[string]int, len(fleet)), !same
	for i, weight := range Weigh(taken) {
		g := fleet[i]
		next[g], told[g] = weight, weight
		was, ok := w.told[g]
		switch {
		case ok:
			told[g] = min(was, weight)
			moved = moved || abs(int64(w.next[g]-weight)) > int64(w.next[g]/weighSlack)
		case w.told == nil && slices.Contains(before, g):
			told[g], moved = min(weight, max(schemas.WholeWeight/(4*len(fleet)), 1)), true
		default:
			told[g], moved = 1, true
		}
	}
	if moved {
		w.told, w.next, w.lag = told, next, weighLag
	}
}

// forget adds what was taken lately to what was before. A while in which nothing was says nothing.
func (w *weights) forget() {
	sum := 0.0
	for _, n := range w.lately {
		sum += n
	}
	if sum == 0 {
		return
	}
	taken := make(map[string]float64, len(w.fleet))
	for _, g := range w.fleet {
		taken[g] = weighKeeps*w.taken[g] + w.lately[g]
	}
	w.taken, w.lately = taken, nil
}

package aggregator

import (
	"context"
	"fmt"
	"time"

	"github.com/weirhq/weir/schemas"
)

// Again folds reports that were folded before, for the counter may have lost what it had of them. What it has changes nothing, and of
// what it lacks only the counts are news: they tell neither who lives and asks for tokens now, nor what limit is in force.
func (a *Aggregator) Again(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
	folds := merge(b.Items, a.cfg.Now(), a.cfg.Late)
	a.mu.Lock()
	for i := range folds {
		f := &folds[i]
		for j := range f.Uses {
			f.Uses[j].DemandNanos = 0
		}
		if e := a.keys[f.Key]; e != nil {
			f.Limit = e.state.Limit
		}
	}
	a.mu.Unlock()
	a.outstanding(folds)
	states, err := a.fold(ctx, folds)
	if err != nil {
		return fmt.Errorf("fold reports %d to %d of %s again: %w", b.First, b.Last, b.Stream, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range states {
		if e := a.keys[states[i].Key]; e != nil { // the next tick looks at it
			e.asked, e.unsure, e.anew = time.Time{}, true, e.anew || folds[i].makesAnew(&states[i])
		}
	}
	return nil
}

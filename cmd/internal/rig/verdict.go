package rig

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// Verdict compares what was stored with what was answered. The zero Verdict has compared nothing.
type Verdict struct {
	Lost, Doubled uint64
	Behind        uint64   // tokens of killed gateways that Redis was never told of
	Lines         []string // one for each difference
}

func (v *Verdict) add(lost, doubled uint64, format string, args ...any) {
	if lost == 0 && doubled == 0 {
		return
	}
	v.Lost += lost
	v.Doubled += doubled
	v.Lines = append(v.Lines, fmt.Sprintf("lost %d, doubled %d: ", lost, doubled)+fmt.Sprintf(format, args...))
}

// History judges what ClickHouse has. Every answered request must be there under the outcome that its caller was told. What is
// there beyond that must be one of the cell's requests without an answer, each at most once.
func (v *Verdict) History(oracle map[Cell]*Entry, stored map[Cell]Outcomes) {
	cells := map[Cell]bool{}
	for c := range oracle {
		cells[c] = true
	}
	for c := range stored {
		cells[c] = true
	}
	for _, c := range slices.SortedFunc(maps.Keys(cells), func(a, b Cell) int {
		return cmp.Or(cmp.Compare(a.Gateway, b.Gateway), cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Route, b.Route))
	}) {
		e := oracle[c]
		if e == nil {
			e = &Entry{}
		}
		rules := map[string]bool{}
		for r := range e.Answered {
			rules[r] = true
		}
		for r := range stored[c] {
			rules[r] = true
		}
		var lost, extra uint64
		for r := range rules {
			want, have := e.Answered[r], stored[c][r]
			lost += want - min(want, have)
			extra += have - min(want, have)
		}
		v.add(lost, extra-min(extra, e.Unanswered), "ClickHouse, %s, tenant %q, route %s: answered %v, %d without an answer, stored %v",
			c.Gateway, c.Tenant, c.Route, e.Answered, e.Unanswered, stored[c])
	}
}

// Redis judges Redis' totals of the contract rule by tenant, which count what was admitted: against the answers, and against the
// history, from which they differ by nothing.
//
// After a gateway was killed they may be behind. Its requests are on disk and get into the history; the tokens that its buckets
// gave in the last moments are not, and no report ever tells of them. How many that are is added to Behind. More than what was
// admitted they can never be.
func (v *Verdict) Redis(oracle map[Cell]*Entry, stored map[Cell]Outcomes, totals map[string]uint64, killed bool) {
	type sum struct{ admitted, unanswered, stored uint64 }
	sums := map[string]sum{}
	for c, e := range oracle {
		s := sums[c.Tenant]
		s.admitted += e.Answered[""]
		s.unanswered += e.Unanswered
		sums[c.Tenant] = s
	}
	for c, o := range stored {
		s := sums[c.Tenant]
		s.stored += o[""]
		sums[c.Tenant] = s
	}
	for tenant := range totals {
		if _, ok := sums[tenant]; !ok {
			sums[tenant] = sum{}
		}
	}
	for _, tenant := range slices.Sorted(maps.Keys(sums)) {
		s, have := sums[tenant], totals[tenant]
		var lost, doubled uint64
		if killed {
			v.Behind += s.stored - min(s.stored, have)
			doubled = have - min(have, s.admitted+s.unanswered)
		} else {
			lost = max(s.admitted, s.stored) - min(max(s.admitted, s.stored), have)
			doubled = have - min(have, s.admitted+s.unanswered, s.stored)
		}
		v.add(lost, doubled, "Redis, tenant %q: admitted %d, %d without an answer, ClickHouse has %d, counted %d", tenant, s.admitted, s.unanswered, s.stored, have)
	}
}

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
	Behind        uint64   // tokens of killed gateways that nobody was told of
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

// Life is one bucket's owner: a life of a gateway, and the tenant.
type Life struct{ Gateway, Boot, Tenant string }

// Account is what the history has of one life of a tenant's bucket of the contract rule, which every request of its asks.
type Account struct {
	Admitted uint64 // requests
	Late     uint64 // of them, in reports after the last one that tells of the bucket
	Returned uint64 // requests in those that a later rule refused, so that their tokens were given back
	Taken    uint64 // tokens, as the last report that tells of the bucket says
}

// Redis judges Redis' totals of the contract rule by tenant, which count what was admitted: they are the sums of what reports told of
// the buckets, exactly, and what these told is what was admitted, life by life, exactly.
//
// There is one exception. What the buckets of a gateway gave after their last report dies with it when it is killed, while its
// requests are on disk and get into the history. It is added to Behind, and is no more than what was counted after that report. The
// other way round, a request whose tokens were told of was cut off before it was counted, and has no answer, or gave them back after
// that report, and was counted as refused later.
func (v *Verdict) Redis(oracle map[Cell]*Entry, accounts map[Life]Account, totals map[string]uint64, killed map[string]bool) {
	unanswered := map[[2]string]uint64{}
	for c, e := range oracle {
		unanswered[[2]string{c.Gateway, c.Tenant}] += e.Unanswered
	}
	told := map[string]uint64{}
	for _, l := range slices.SortedFunc(maps.Keys(accounts), func(a, b Life) int {
		return cmp.Or(cmp.Compare(a.Gateway, b.Gateway), cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Boot, b.Boot))
	}) {
		a := accounts[l]
		told[l.Tenant] += a.Taken
		lost, doubled := a.Admitted-min(a.Admitted, a.Taken), a.Taken-min(a.Admitted, a.Taken)
		if killed[l.Gateway] {
			v.Behind += lost
			lost -= min(lost, a.Late)
			doubled -= min(doubled, a.Returned+unanswered[[2]string{l.Gateway, l.Tenant}])
		}
		v.add(lost, doubled, "buckets, %s, tenant %q, boot %s: admitted %d, %d of them after the last report, which tells of %d", l.Gateway, l.Tenant, l.Boot, a.Admitted, a.Late, a.Taken)
	}
	for tenant := range totals {
		told[tenant] += 0
	}
	for _, tenant := range slices.Sorted(maps.Keys(told)) {
		want, have := told[tenant], totals[tenant]
		v.add(want-min(want, have), have-min(want, have), "Redis, tenant %q: reports told of %d, it counted %d", tenant, want, have)
	}
}

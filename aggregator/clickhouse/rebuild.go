package clickhouse

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"

	"github.com/weirhq/weir/schemas"
)

// Gap is where a roll-up differs from the ledger: what the ledger has, less what the roll-up has.
type Gap struct {
	Rollup   string    `json:"rollup"`
	Time     time.Time `json:"ts"`
	Tenant   string    `json:"tenant"`
	Route    string    `json:"route"`
	Rule     string    `json:"rule"`
	Allowed  int64     `json:"allowed"`
	Rejected int64     `json:"rejected"`
	Cost     int64     `json:"cost"`
}

// Rebuilt is what a rebuild did.
type Rebuilt struct {
	From  time.Time `json:"from"` // whole days of UTC
	To    time.Time `json:"to"`
	Rows  uint64    `json:"rows"`  // put right
	Equal bool      `json:"equal"` // the roll-ups are what the ledger adds up to
	Gaps  []Gap     `json:"gaps"`  // that are left, a hundred of them
	Half  uint64    `json:"half"`  // reports of which only a part is stored: their batch is in hand, or was when somebody stopped
	Short []Short   `json:"short"` // days whose reports are not whole in the ledger: what roll-ups have more was left alone
	Bare  uint64    `json:"bare"`  // hours and days of a roll-up of which the ledger has nothing, or only what came long after: likewise
	// Vouched are sums of a roll-up that are not what the ledger has, and another roll-up has them too: likewise.
	Vouched uint64 `json:"vouched"`
	// Remade is when a part of the ledger or of a roll-up was last made again, if something of a time before it was left alone for that.
	Remade time.Time `json:"remade,omitzero"`
}

// Short is how much the ledger lacks of the reports that arrived on one day.
type Short struct {
	Day      time.Time `json:"day"`
	Reports  uint64    `json:"reports"` // that are not whole
	Requests uint64    `json:"requests"`
}

// maxGaps bounds the gaps that are told.
const maxGaps = 100

// rebuildTries of a slice, and rebuildPause between them: a batch that is being stored is through in that time.
const (
	rebuildTries = 20
	rebuildPause = 250 * time.Millisecond
)

// Rebuild makes the roll-ups of the days that hold from <= ts < to equal to usage FINAL, and proves it. It inserts, per
// roll-up, what is missing, or two's complements of what is too much: at any moment a reader sees the old sum or the new
// one, an interruption leaves slices that are right and slices that are as they were, and a repetition finds nothing to
// do. Inserts may go on. A slice during which one came in is looked at again, and one in which a report is stored in part
// is left alone, since its batch will come again. Nothing is taken away that the ledger may have lost: what two roll-ups have was there,
// and where the ledger has not all that reports say of themselves, or nothing, or was made again since, a roll-up may be all that is left.
// Progress is told of each day of which there is anything; it may be nil.
func (s *Store) Rebuild(ctx context.Context, from, to time.Time, progress func(day time.Time, rows uint64)) (Rebuilt, error) {
	return s.rebuild(ctx, from, to, nil, progress)
}

// rebuild is Rebuild in doubt about reports: what they explain may be in every roll-up twice, or in none.
func (s *Store) rebuild(ctx context.Context, from, to time.Time, reports []stored, progress func(day time.Time, rows uint64)) (Rebuilt, error) {
	day := 24 * time.Hour
	r := Rebuilt{From: from.UTC().Truncate(day), To: to.UTC().Add(day - 1).Truncate(day), Equal: true, Gaps: []Gap{}, Short: []Short{}}
	b := rebuild{s: s, run: rand.Text(), tries: rebuildTries, reports: reports, whole: map[time.Time]bool{}, out: &r}
	days, err := s.days(ctx, r.From, r.To)
	if err != nil {
		return r, s.explain("look for days", err)
	}
	if b.remade, err = s.remade(ctx); err != nil {
		return r, s.explain("look when the ledger was made", err)
	}
	for _, d := range days {
		b.coarser = map[segment][]Gap{}
		before := r.Rows
		for _, t := range rollups {
			if equal, err := b.equal(ctx, t, d, d.Add(day)); err != nil {
				return r, s.explain(fmt.Sprintf("compare %s of %s", t.name, d.Format(time.DateOnly)), err)
			} else if equal {
				continue
			}
			width := min(day, 60*t.grain) // an hour of minutes, a day of the rest
			for at := d; at.Before(d.Add(day)); at = at.Add(width) {
				if err := b.slice(ctx, t, at, at.Add(width)); err != nil {
					return r, s.explain(fmt.Sprintf("rebuild %s of %s", t.name, at.Format(time.RFC3339)), err)
				}
			}
		}
		if progress != nil {
			progress(d, r.Rows-before)
		}
	}
	return r, nil
}

type rebuild struct {
	s     *Store
	run   string             // names the inserts of this run
	n     int                // inserts that are known to be stored
	tries int                // of a slice in which reports are half there and nothing comes in
	whole map[time.Time]bool // of the reports that arrived on a day, as far as it is known
	out   *Rebuilt

	remade  time.Time         // the ledger or a roll-up, in part at least
	coarser map[segment][]Gap // of the day in hand: gaps of roll-ups that are done
	reports []stored          // in doubt
	sums    map[Gap]Gap       // of their usage, by place and the roll-up whose grain it is
}

// equal is the quick look at a day: nothing differs, and no report is half there.
func (b *rebuild) equal(ctx context.Context, t rollup, from, to time.Time) (bool, error) {
	gaps, err := b.s.gapsUpTo(ctx, t, ledger, from, to, 1)
	if err != nil || len(gaps) > 0 {
		return false, err
	}
	is, err := b.s.settledReports(ctx, from, to)
	return is.half == 0, err
}

// slice makes one roll-up right for a time that lies in one partition.
func (b *rebuild) slice(ctx context.Context, t rollup, from, to time.Time) error {
	for try := 0; ; try++ {
		before, err := b.s.settledReports(ctx, from, to)
		if err != nil {
			return err
		}
		gaps, err := b.s.gaps(ctx, t, from, to)
		if err != nil || len(gaps) == 0 && before.half == 0 {
			return err
		}
		var right []Gap
		var told func()
		if before.half == 0 {
			if right, told, err = b.warranted(ctx, t, gaps, from, to, before.timely == 0); err != nil {
				return err
			}
		}
		after, err := b.s.settledReports(ctx, from, to)
		if err != nil {
			return err
		}
		// Usage is stored before its roll-ups, and its report last: if no report came in meanwhile, and none is half there,
		// all of these gaps are here to stay.
		if before == after && before.half == 0 {
			if len(right) == 0 {
				b.leave(gaps)
				told()
				return nil
			}
			// An insert that was not acknowledged keeps its name, so that it cannot count twice if it was made after all.
			if err := insert(ctx, b.s, gapTable(t.name), fmt.Sprintf("rebuild-%s-%d", b.run, b.n), right); err != nil {
				return err
			}
			b.n++
			b.out.Rows += uint64(len(right))
			continue // and look again
		}
		if try < b.tries || try < rebuildTries && before != after {
			if err := pause(ctx, rebuildPause); err != nil {
				return err
			}
			continue
		}
		if after.half > 0 {
			b.out.Half = max(b.out.Half, after.half)
			b.tries = 0 // a batch in hand would be through by now: no other slice waits for one
		}
		b.leave(gaps)
		return nil
	}
}

// pause waits between two looks at something that may be about to change.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// leave notes gaps that are left.
func (b *rebuild) leave(gaps []Gap) {
	b.out.Equal = b.out.Equal && len(gaps) == 0
	b.out.Gaps = append(b.out.Gaps, gaps[:min(len(gaps), maxGaps-len(b.out.Gaps))]...)
}

// takes says whether mending the gap takes something out of the roll-up.
func (g Gap) takes() bool { return g.Allowed < 0 || g.Rejected < 0 || g.Cost < 0 }

// warranted are the gaps that are no fault of the ledger, and what to tell of the others if these are all that is left. The three
// roll-ups are made by the same inserts: what one alone has too much is its own fault, and what another has too was there, unless
// reports in doubt explain it. What the ledger may have lost is in no gap that adds to the roll-up, except that it may have moved: where
// something of a tenant is left, what the others lack as well is not added to it.
func (b *rebuild) warranted(ctx context.Context, t rollup, gaps []Gap, from, to time.Time, bare bool) ([]Gap, func(), error) {
	if !slices.ContainsFunc(gaps, Gap.takes) {
		return gaps, func() {}, nil
	}
	short, err := b.short(ctx, from, to)
	if err != nil {
		return nil, nil, err
	}
	others, err := b.others(ctx, t, from, to)
	if err != nil {
		return nil, nil, err
	}
	suspect, told := true, func() {}
	switch {
	case short: // which is noted
	case bare:
		told = func() { b.out.Bare++ }
	case from.Before(b.remade):
		told = func() { b.out.Remade = b.remade }
	default:
		suspect, told = false, func() { b.out.Vouched += uint64(len(gaps)) }
	}
	type owner struct {
		at     time.Time
		tenant string
	}
	left := map[owner]bool{}
	leave := func(g Gap) bool {
		is := g.takes() && (suspect || b.vouched(t, g, others, Gap.takes))
		if is {
			left[owner{g.Time, g.Tenant}] = true
		}
		return is
	}
	right := slices.DeleteFunc(slices.Clone(gaps), leave)
	return slices.DeleteFunc(right, func(g Gap) bool {
		return !g.takes() && left[owner{g.Time, g.Tenant}] && b.vouched(t, g, others, func(o Gap) bool { return o != o.place() && !o.takes() })
	}), told, nil
}

// vouched says that another roll-up has a gap like that one, and that reports in doubt do not explain both.
func (b *rebuild) vouched(t rollup, g Gap, others map[Gap]Gap, like func(Gap) bool) bool {
	for _, o := range rollups {
		grain := max(t.grain, o.grain)
		place := g.place()
		place.Rollup, place.Time = o.name, g.Time.Truncate(grain)
		if other := others[place]; o != t && like(other) && (!b.explained(g, t.grain) || !b.explained(other, grain)) {
			return true
		}
	}
	return false
}

// others are the gaps that the other roll-ups have at this time, by place, added up to the grain of t where theirs is finer.
func (b *rebuild) others(ctx context.Context, t rollup, from, to time.Time) (map[Gap]Gap, error) {
	out := map[Gap]Gap{}
	for _, o := range rollups {
		if o == t {
			continue
		}
		grain := max(t.grain, o.grain)
		at := segment{o.name, from.Truncate(grain), to.Add(grain - 1).Truncate(grain)}
		gaps, known := b.coarser[at]
		if !known || o.grain < t.grain {
			var err error
			if gaps, err = b.s.gaps(ctx, rollup{o.name, grain}, at.from, at.to); err != nil {
				return nil, err
			}
			if o.grain > t.grain && b.coarser != nil {
				b.coarser[at] = gaps
			}
		}
		for _, g := range gaps {
			out[g.place()] = g
		}
	}
	return out, nil
}

// explained says that the gap is no more than reports in doubt have there.
func (b *rebuild) explained(g Gap, grain time.Duration) bool {
	if b.sums == nil {
		b.sums = map[Gap]Gap{}
		for i := range b.reports {
			for _, u := range b.reports[i].Value.Usage {
				for _, t := range rollups {
					place := Gap{Rollup: t.name, Time: u.Time.UTC().Truncate(t.grain), Tenant: u.Tenant, Route: u.Route, Rule: u.Rule}
					sum := b.sums[place]
					sum.Allowed, sum.Rejected, sum.Cost = sum.Allowed+int64(u.Allowed), sum.Rejected+int64(u.Rejected), sum.Cost+int64(u.Cost)
					b.sums[place] = sum
				}
			}
		}
	}
	place := g.place()
	for _, t := range rollups {
		if t.grain == grain {
			place.Rollup = t.name
		}
	}
	within := func(n, sum int64) bool { return max(n, -n) <= sum }
	sum := b.sums[place]
	return within(g.Allowed, sum.Allowed) && within(g.Rejected, sum.Rejected) && within(g.Cost, sum.Cost)
}

// short says whether a report that is not whole in the ledger may have had usage of from <= ts < to. It looks at the arrivals of a day
// at a time, from the first that may, and notes the first that is short.
func (b *rebuild) short(ctx context.Context, from, to time.Time) (bool, error) {
	day, now := 24*time.Hour, time.Now().Add(schemas.MaxAhead)
	for d := from.Add(-schemas.MaxAhead).Truncate(day); d.Before(to.Add(schemas.MaxBehind)) && d.Before(now); d = d.Add(day) {
		whole, known := b.whole[d]
		if !known {
			is, err := b.s.short(ctx, d)
			if err != nil {
				return false, err
			}
			whole = is.Reports == 0
			b.whole[d] = whole
			if !whole {
				b.out.Short = append(b.out.Short, is)
			}
		}
		if !whole {
			return true, nil
		}
	}
	return false, nil
}

// short asks how much the ledger lacks of the reports that arrived on a day. What most reports have is of that day and the one before:
// the whole time that they may have usage of is asked for only when something is not there.
func (s *Store) short(ctx context.Context, day time.Time) (Short, error) {
	is, next := Short{Day: day}, day.Add(24*time.Hour)
	for _, behind := range []time.Duration{24 * time.Hour, schemas.MaxBehind} {
		// reports is read first: all that it knows of is in usage by then. Rows of equal key are equal, as under FINAL.
		err := s.conn.QueryRow(ctx, `SELECT count(), toUInt64(sum(said - have)) FROM (
				SELECT gateway, boot, seq, max(said) AS said, sum(have) AS have FROM (
					SELECT gateway, boot, seq, requests AS said, toUInt64(0) AS have FROM reports WHERE `+received+`
					UNION ALL
					SELECT gateway, boot, seq, toUInt64(0), max(allowed + rejected) FROM usage WHERE `+received+`
						AND ts >= fromUnixTimestamp64Milli({first:Int64}, 'UTC') AND ts < fromUnixTimestamp64Milli({last:Int64}, 'UTC') GROUP BY gateway, boot, seq, entry
				) GROUP BY gateway, boot, seq
			) WHERE have < said`, append(window(day, next), ch.Named("first", millis(day.Add(-behind))), ch.Named("last", millis(next.Add(schemas.MaxAhead))))...).Scan(&is.Reports, &is.Requests)
		if err != nil || is.Reports == 0 {
			return is, err
		}
	}
	return is, nil
}

// days are those of from <= ts < to of which the ledger or a roll-up has anything, in order. Errors are the driver's.
func (s *Store) days(ctx context.Context, from, to time.Time) ([]time.Time, error) {
	var asks []string
	for _, t := range append([]rollup{{name: "usage"}}, rollups...) {
		asks = append(asks, "SELECT DISTINCT intDiv(toUnixTimestamp64Milli(ts), 86400000) AS day FROM "+t.name+" WHERE "+within)
	}
	rows, err := s.conn.Query(ctx, "SELECT DISTINCT day FROM ("+strings.Join(asks, " UNION ALL ")+") ORDER BY day", window(from, to)...)
	if err != nil {
		return nil, err
	}
	var out []time.Time
	var day int64
	for rows.Next() {
		if err := rows.Scan(&day); err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		out = append(out, time.Unix(day*86400, 0).UTC())
	}
	return out, errors.Join(rows.Err(), rows.Close())
}

// gapTable is how gaps become rows: sums of unsigned numbers wrap, so that the two's complement takes away.
func gapTable(name string) table[Gap] {
	return table[Gap]{name, []column[Gap]{
		col("ts", instant, func(g *Gap) time.Time { return g.Time }),
		col("tenant", "String", func(g *Gap) string { return g.Tenant }),
		col("route", low, func(g *Gap) string { return g.Route }),
		col("rule", low, func(g *Gap) string { return g.Rule }),
		col("allowed", "UInt64", func(g *Gap) uint64 { return uint64(g.Allowed) }),
		col("rejected", "UInt64", func(g *Gap) uint64 { return uint64(g.Rejected) }),
		col("cost", "UInt64", func(g *Gap) uint64 { return uint64(g.Cost) }),
	}}
}

// gapLooks at a gap that is told, and gapPause between them: a batch that is being stored is a gap for a moment, and seldom the next one
// is where it was.
const (
	gapLooks = 3
	gapPause = time.Second
)

// Gaps are the differences between each roll-up and the ledger over the whole minutes, hours and days of from <= ts < to, at
// most a hundred of each, that are still there when they are looked at again: it takes two seconds more if there are any.
func (s *Store) Gaps(ctx context.Context, from, to time.Time) ([]Gap, error) {
	gaps, err := s.gapsNow(ctx, from, to)
	for look := 1; look < gapLooks && err == nil && len(gaps) > 0; look++ {
		before := map[Gap]bool{}
		for _, g := range gaps {
			before[g.place()] = true
		}
		if err := pause(ctx, gapPause); err != nil {
			return nil, err
		}
		gaps, err = s.gapsNow(ctx, from, to)
		gaps = slices.DeleteFunc(gaps, func(g Gap) bool { return !before[g.place()] })
	}
	return gaps, err
}

// place is where a gap is, whatever its size: a batch may be on top of what is here to stay.
func (g Gap) place() Gap {
	g.Allowed, g.Rejected, g.Cost = 0, 0, 0
	return g
}

// gapsNow are those of one look, in which a batch that is just being stored may show as one.
func (s *Store) gapsNow(ctx context.Context, from, to time.Time) ([]Gap, error) {
	out := []Gap{}
	for _, t := range rollups {
		a, b := from.Add(t.grain-1).Truncate(t.grain), to.Truncate(t.grain)
		if !a.Before(b) {
			continue
		}
		gaps, err := s.gapsUpTo(ctx, t, ledger, a, b, maxGaps)
		if err != nil {
			return nil, s.explain("compare "+t.name+" with the ledger", err)
		}
		out = append(out, gaps...)
	}
	return out, nil
}

func (s *Store) gaps(ctx context.Context, t rollup, from, to time.Time) ([]Gap, error) {
	return s.gapsUpTo(ctx, t, ledger, from, to, 1<<40)
}

// ledger is what all is counted from.
const ledger = "usage FINAL"

// mendWithin is the age of days whose roll-ups are mended without being asked.
const mendWithin = 31 * 24 * time.Hour

// mendRollups rebuilds the days of reports in which a roll-up has not what it should: a server that is killed can have lost a part of
// one alone, or have stored again what a roll-up had. Each is compared with the next finer one, and only the finest with the ledger.
// Days that are long past are told of and left alone: somebody may have dropped their ledger and kept the roll-ups.
func (s *Store) mendRollups(ctx context.Context, reports []stored) error {
	finer := ledger
	for _, t := range slices.Backward(rollups) {
		for _, r := range spans(t, reports) {
			gaps, err := s.gapsUpTo(ctx, t, finer, r.from, r.to, 1)
			if err != nil {
				return err
			}
			if len(gaps) == 0 {
				continue
			}
			log := s.log.With("table", t.name, "from", r.from, "to", r.to)
			if time.Since(r.from) > mendWithin {
				log.Error("a roll-up is not what it is made of: run weir history rebuild")
				continue
			}
			log.Error("a roll-up is not what it is made of, rebuilding the roll-ups")
			r, err := s.rebuild(ctx, r.from, r.to, reports, nil)
			if err != nil { // a connection was cut, say: who comes after knows no reports that explain anything
				r, err = s.rebuild(ctx, r.From, r.To, reports, nil)
			}
			switch {
			case err != nil:
				log.Error("the roll-ups may not be equal to the ledger: run weir history rebuild", "err", err)
			case !r.Equal:
				log.Error("the roll-ups are not equal to the ledger, and left alone: run weir history verify", "half", r.Half, "short", r.Short, "bare", r.Bare, "vouched", r.Vouched, "remade", r.Remade)
			}
		}
		finer = t.name
	}
	return nil
}

// spans are the runs of whole grains of t that hold usage of reports, in order.
func spans(t rollup, reports []stored) (all []segment) {
	seen := map[time.Time]bool{}
	for i := range reports {
		for _, u := range reports[i].Value.Usage {
			seen[u.Time.UTC().Truncate(t.grain)] = true
		}
	}
	for _, at := range slices.SortedFunc(maps.Keys(seen), time.Time.Compare) {
		if n := len(all); n > 0 && all[n-1].to.Equal(at) {
			all[n-1].to = at.Add(t.grain)
			continue
		}
		all = append(all, segment{t.name, at, at.Add(t.grain)})
	}
	return all
}

// gapsUpTo compares a roll-up with what it is made of, the ledger or a finer one; its errors are the driver's.
func (s *Store) gapsUpTo(ctx context.Context, t rollup, with string, from, to time.Time, most uint64) ([]Gap, error) {
	rows, err := s.conn.Query(ctx, `SELECT toUnixTimestamp64Milli(at), tenant, route, rule, sum(a) AS allowed, sum(r) AS rejected, sum(c) AS cost FROM (
			SELECT fromUnixTimestamp64Milli(toUnixTimestamp64Milli(ts) - toUnixTimestamp64Milli(ts) % {grain:Int64}, 'UTC') AS at, tenant, route, rule,
				toInt64(allowed) AS a, toInt64(rejected) AS r, toInt64(cost) AS c FROM `+with+` WHERE `+within+`
			UNION ALL
			SELECT fromUnixTimestamp64Milli(toUnixTimestamp64Milli(ts) - toUnixTimestamp64Milli(ts) % {grain:Int64}, 'UTC'), tenant, route, rule,
				-toInt64(allowed), -toInt64(rejected), -toInt64(cost) FROM `+t.name+` WHERE `+within+`
		) GROUP BY at, tenant, route, rule HAVING allowed != 0 OR rejected != 0 OR cost != 0 ORDER BY at, tenant, route, rule LIMIT {most:UInt64}`+final,
		append(window(from, to), ch.Named("grain", t.grain.Milliseconds()), ch.Named("most", most))...)
	if err != nil {
		return nil, err
	}
	var out []Gap
	for rows.Next() {
		g := Gap{Rollup: t.name}
		var ms int64
		if err := rows.Scan(&ms, &g.Tenant, &g.Route, &g.Rule, &g.Allowed, &g.Rejected, &g.Cost); err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		g.Time = time.UnixMilli(ms).UTC()
		out = append(out, g)
	}
	return out, errors.Join(rows.Err(), rows.Close())
}

// settlement is which reports have rows in a part of the ledger: how many, how many of them arrived no longer than mendWithin after
// it, and how many are not stored whole.
type settlement struct{ reports, timely, half uint64 }

func (s *Store) settledReports(ctx context.Context, from, to time.Time) (n settlement, err error) {
	err = s.conn.QueryRow(ctx, `WITH seen AS (SELECT gateway, boot, seq, min(received) AS first FROM usage WHERE `+within+` GROUP BY gateway, boot, seq)
		SELECT (SELECT count() FROM seen), (SELECT countIf(first < fromUnixTimestamp64Milli({timely:Int64}, 'UTC')) FROM seen), (SELECT count() FROM seen WHERE (gateway, boot, seq) NOT IN (
			SELECT gateway, boot, seq FROM reports WHERE (gateway, boot) IN (SELECT gateway, boot FROM seen)))`,
		append(window(from, to), ch.Named("timely", millis(to.Add(mendWithin))))...).Scan(&n.reports, &n.timely, &n.half)
	return n, err
}

package clickhouse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
)

// Counts are requests, and the tokens that they asked for. They are below 0 where corrections took away more than there is: it is
// shown, and not as a huge number.
type Counts struct {
	Allowed  int64 `json:"allowed"`
	Rejected int64 `json:"rejected"`
	Cost     int64 `json:"cost"`
}

// Requests is how many there were.
func (c Counts) Requests() int64 { return c.Allowed + c.Rejected }

func (c *Counts) add(d Counts) {
	c.Allowed += d.Allowed
	c.Rejected += d.Rejected
	c.Cost += d.Cost
}

// Totals are the counts of everybody.
type Totals struct {
	From      time.Time `json:"from"`
	To        time.Time `json:"to"`
	Requests  int64     `json:"requests"`
	Corrected int64     `json:"corrected,omitempty"` // of them by corrections: what the ledger has is the rest
	Counts
}

// Totals counts every request with from <= ts < to, from the ledger itself: it is exact whatever was inserted twice. As in
// every answer of this package, corrections of hours that lie in it whole are included; the present hour does when it does up to now.
func (s *Store) Totals(ctx context.Context, from, to time.Time) (Totals, error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	t := Totals{From: from.UTC(), To: to.UTC()}
	to = wholeHour(to)
	for _, part := range []segment{{ledger, from, to}, corrections(from, to)} {
		var c Counts
		usage, args := usageIn([]segment{part}, "true")
		if err := s.conn.QueryRow(ctx, `SELECT `+sums+` FROM `+usage+` AS u`+final, args...).Scan(&c.Allowed, &c.Rejected, &c.Cost); err != nil {
			return Totals{}, s.explain("count requests", err)
		}
		t.add(c)
		t.Corrected = c.Requests() // of the last part
	}
	t.Requests = t.Counts.Requests()
	return t, nil
}

// Orders of Top.
const (
	ByRequests = "requests"
	ByAllowed  = "allowed"
	ByRejected = "rejected"
	ByCost     = "cost"
)

// TenantTotal is the counts of one tenant.
type TenantTotal struct {
	Tenant   string `json:"tenant"`
	Requests int64  `json:"requests"`
	Counts
}

// Top returns the n tenants (at most 10000) with the most of by, one of the By constants, largest first. Whole days,
// hours and minutes are read from the roll-ups, and the ends from the ledger.
func (s *Store) Top(ctx context.Context, from, to time.Time, n int, by string) ([]TenantTotal, error) {
	if !slices.Contains([]string{ByRequests, ByAllowed, ByRejected, ByCost}, by) {
		return nil, fmt.Errorf("top by %q: want requests, allowed, rejected or cost", by)
	}
	if n < 1 || n > 10_000 {
		return nil, fmt.Errorf("top %d: want 1 to 10000", n)
	}
	to = wholeHour(to)
	usage, args := usageIn(append(cover(from, to, rollups), corrections(from, to)), "true")
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, `SELECT tenant, `+sums+`, allowed + rejected AS requests
		FROM `+usage+` AS u GROUP BY tenant ORDER BY `+by+` DESC, tenant LIMIT {n:UInt32}`+final,
		append(args, ch.Named("n", uint32(n)))...)
	if err != nil {
		return nil, s.explain("find the top tenants", err)
	}
	out := []TenantTotal{}
	for rows.Next() {
		var t TenantTotal
		if err := rows.Scan(&t.Tenant, &t.Allowed, &t.Rejected, &t.Cost, &t.Requests); err != nil {
			return nil, errors.Join(s.explain("find the top tenants", err), rows.Close())
		}
		out = append(out, t)
	}
	return out, s.explain("find the top tenants", errors.Join(rows.Err(), rows.Close()))
}

// TenantUsage is one tenant's history: in total, per route and rule, and over time.
type TenantUsage struct {
	Tenant   string        `json:"tenant"`
	From     time.Time     `json:"from"`
	To       time.Time     `json:"to"`
	StepMS   int64         `json:"step_ms"`
	Requests int64         `json:"requests"`
	Counts                 // in total
	Routes   []RouteTotal  `json:"routes"`                      // most requests first
	Points   []TenantPoint `json:"points"`                      // in order of time, then route, then rule; steps without requests are left out
	Apart    bool          `json:"corrections_apart,omitempty"` // there are corrections in the totals and the routes, and not in the points
}

// RouteTotal is the counts of one route and outcome.
type RouteTotal struct {
	Route string `json:"route"`
	Rule  string `json:"rule"` // the refusing rule, empty for what was allowed
	Counts
}

// TenantPoint is the counts of one step, route and outcome.
type TenantPoint struct {
	Time time.Time `json:"ts"` // start of the step
	RouteTotal
}

// Tenant returns what one tenant did with from <= ts < to, in steps counted from from. Corrections are of an hour: they are in
// the totals and the routes, and in the points where steps are whole hours. Points of other steps are what gateways reported, and
// Apart tells of it.
func (s *Store) Tenant(ctx context.Context, tenant string, from, to time.Time, step time.Duration) (TenantUsage, error) {
	if err := checkSteps(from, to, step); err != nil {
		return TenantUsage{}, fmt.Errorf("usage of tenant %q: %w", tenant, err)
	}
	doing := fmt.Sprintf("read the usage of tenant %q", tenant)
	t := TenantUsage{Tenant: tenant, From: from.UTC(), To: to.UTC(), StepMS: step.Milliseconds(), Routes: []RouteTotal{}, Points: []TenantPoint{}}
	to = wholeHour(to)
	segments := cover(from, to, forSteps(from, step))
	hours := step%time.Hour == 0 && from.Equal(from.Truncate(time.Hour))
	if hours {
		segments = append(segments, corrections(from, to))
	}
	usage, args := usageIn(segments, "tenant = {tenant:String}")
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, `SELECT `+stepOf+` AS step, route, rule, `+sums+`
		FROM `+usage+` AS u GROUP BY step, route, rule ORDER BY step, route, rule`+final,
		append(args, ch.Named("from", millis(from)), ch.Named("tenant", tenant), ch.Named("step", step.Milliseconds()))...)
	if err != nil {
		return TenantUsage{}, s.explain(doing, err)
	}
	routes := map[[2]string]*Counts{}
	for rows.Next() {
		var n int64
		var p TenantPoint
		if err := rows.Scan(&n, &p.Route, &p.Rule, &p.Allowed, &p.Rejected, &p.Cost); err != nil {
			return TenantUsage{}, errors.Join(s.explain(doing, err), rows.Close())
		}
		p.Time = t.From.Add(time.Duration(n) * step)
		t.Points = append(t.Points, p)
		t.add(p.Counts)
		id := [2]string{p.Route, p.Rule}
		if routes[id] == nil {
			routes[id] = &Counts{}
		}
		routes[id].add(p.Counts)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return TenantUsage{}, s.explain(doing, err)
	}
	if !hours {
		if err := s.correctTotals(ctx, tenant, from, to, &t, routes); err != nil {
			return TenantUsage{}, s.explain(doing, err)
		}
	}
	t.Requests = t.Counts.Requests()
	for id, c := range routes {
		t.Routes = append(t.Routes, RouteTotal{id[0], id[1], *c})
	}
	slices.SortFunc(t.Routes, func(a, b RouteTotal) int {
		return cmp.Or(cmp.Compare(b.Requests(), a.Requests()), cmp.Compare(a.Route, b.Route), cmp.Compare(a.Rule, b.Rule))
	})
	return t, nil
}

// correctTotals adds the corrections of a tenant to its totals and routes; its errors are the driver's.
func (s *Store) correctTotals(ctx context.Context, tenant string, from, to time.Time, t *TenantUsage, routes map[[2]string]*Counts) error {
	c := corrections(from, to)
	rows, err := s.conn.Query(ctx, `SELECT route, rule, sum(allowed), sum(rejected), sum(cost) FROM `+c.table+`
		WHERE tenant = {tenant:String} AND `+within+` GROUP BY route, rule`+final, append(window(c.from, c.to), ch.Named("tenant", tenant))...)
	if err != nil {
		return err
	}
	for rows.Next() {
		var id [2]string
		var d Counts
		if err := rows.Scan(&id[0], &id[1], &d.Allowed, &d.Rejected, &d.Cost); err != nil {
			return errors.Join(err, rows.Close())
		}
		t.Apart = true
		t.add(d)
		if routes[id] == nil {
			routes[id] = &Counts{}
		}
		routes[id].add(d)
	}
	return errors.Join(rows.Err(), rows.Close())
}

// CurveQuery says which buckets of a rule to follow: the one of a key, or all of a tenant when Tenant is not empty.
type CurveQuery struct {
	Rule     string
	Key      string // as in reports; empty is the key of a rule without dimensions
	Tenant   string
	From, To time.Time // From <= ts < To
	Step     time.Duration
}

// CurvePoint is the level of the buckets in one step: the low-token curve.
type CurvePoint struct {
	Time     time.Time `json:"ts"`          // start of the step
	Last     int64     `json:"tokens_last"` // what each gateway last had in the step, added up; as all sums of it at most the largest number
	Capacity int64     `json:"capacity"`    // likewise
	Min      int64     `json:"tokens_min"`  // the least that any gateway had
	Taken    uint64    `json:"taken"`
	Refused  uint64    `json:"refused"`
	Buckets  uint64    `json:"buckets"` // local ones that reported in the step; a full bucket has nothing to report
}

// Curve returns the level over time, in steps counted from From. Steps without a report are left out.
func (s *Store) Curve(ctx context.Context, q CurveQuery) ([]CurvePoint, error) {
	doing := fmt.Sprintf("read the curve of rule %q", q.Rule)
	if err := checkSteps(q.From, q.To, q.Step); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	which, name := "key = {who:String}", q.Key
	if q.Tenant != "" {
		which, name = "tenant = {who:String}", q.Tenant
	}
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, `SELECT step, `+heldSum("l")+`, `+heldSum("c")+`, min(m), toUInt64(`+heldSum("t")+`), toUInt64(`+heldSum("r")+`), count() FROM (
			SELECT `+stepOf+` AS step, gateway, key, argMax(tokens_last, (ts, seq)) AS l, argMax(capacity, (ts, seq)) AS c,
				min(tokens_min) AS m, `+heldSum("taken")+` AS t, `+heldSum("refused")+` AS r
			FROM tokens FINAL WHERE rule = {rule:String} AND `+which+` AND `+within+` GROUP BY step, gateway, key
		) GROUP BY step ORDER BY step`+final,
		append(window(q.From, q.To), ch.Named("rule", q.Rule), ch.Named("who", name), ch.Named("step", q.Step.Milliseconds()))...)
	if err != nil {
		return nil, s.explain(doing, err)
	}
	out := []CurvePoint{}
	for rows.Next() {
		var n int64
		var p CurvePoint
		if err := rows.Scan(&n, &p.Last, &p.Capacity, &p.Min, &p.Taken, &p.Refused, &p.Buckets); err != nil {
			return nil, errors.Join(s.explain(doing, err), rows.Close())
		}
		p.Time = q.From.UTC().Add(time.Duration(n) * q.Step)
		out = append(out, p)
	}
	return out, s.explain(doing, errors.Join(rows.Err(), rows.Close()))
}

// Times go to the server as milliseconds since 1970 and come back as numbers of steps: no text, so no time zone.
const (
	within = `ts >= fromUnixTimestamp64Milli({from:Int64}, 'UTC') AND ts < fromUnixTimestamp64Milli({to:Int64}, 'UTC')`
	stepOf = `intDiv(toUnixTimestamp64Milli(ts) - {from:Int64}, {step:Int64})`

	// final makes FINAL cheap: equal rows share a partition, so that it need not look across.
	final = ` SETTINGS do_not_merge_across_partitions_select_final = 1`
)

func window(from, to time.Time) []any {
	return []any{ch.Named("from", millis(from)), ch.Named("to", millis(to))}
}

// millis is the first whole millisecond that is not before t.
func millis(t time.Time) int64 { return t.Add(time.Millisecond - 1).UnixMilli() }

// rollup is a table that holds usage added up over each grain.
type rollup struct {
	name  string
	grain time.Duration
}

var rollups = []rollup{{"usage_1d", 24 * time.Hour}, {"usage_1h", time.Hour}, {"usage_1m", time.Minute}}

// segment is a part of a range, and the table that answers for it.
type segment struct {
	table    string
	from, to time.Time
}

// cover splits from <= ts < to into whole days, hours and minutes, each read from its roll-up, and the ledger for what is
// left at both ends.
func cover(from, to time.Time, rollups []rollup) []segment {
	if len(rollups) == 0 {
		return []segment{{ledger, from, to}}
	}
	grain := rollups[0].grain
	a, b := from.Add(grain-1).Truncate(grain), to.Truncate(grain)
	if !a.Before(b) {
		return cover(from, to, rollups[1:])
	}
	var out []segment
	if from.Before(a) {
		out = cover(from, a, rollups[1:])
	}
	out = append(out, segment{rollups[0].name, a, b})
	if b.Before(to) {
		out = append(out, cover(b, to, rollups[1:])...)
	}
	return out
}

// corrections are those of whole hours of a range.
func corrections(from, to time.Time) segment {
	return segment{"corrections FINAL", from, to.Add(1 - time.Hour)}
}

// wholeHour is the end of a range that includes the present: the end of the hour. What lies ahead can only be of a clock that is fast, and
// the hour is then there whole, with its corrections.
func wholeHour(to time.Time) time.Time {
	if to.Before(time.Now()) {
		return to
	}
	return to.Add(time.Hour - 1).Truncate(time.Hour)
}

// CutCorrections returns how many corrections an answer about from <= ts < to leaves out, for it has only a part of their hour; those
// of a tenant unless that is empty.
func (s *Store) CutCorrections(ctx context.Context, tenant string, from, to time.Time) (n uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	in := corrections(from, wholeHour(to))
	err = s.conn.QueryRow(ctx, `SELECT count() FROM `+in.table+` WHERE `+within+` AND ({tenant:String} = '' OR tenant = {tenant:String})
		AND NOT (ts >= fromUnixTimestamp64Milli({first:Int64}, 'UTC') AND ts < fromUnixTimestamp64Milli({last:Int64}, 'UTC'))`+final,
		append(window(from.Truncate(time.Hour), to), ch.Named("tenant", tenant), ch.Named("first", millis(in.from)), ch.Named("last", millis(in.to)))...).Scan(&n)
	return n, s.explain("look for corrections of hours that are cut", err)
}

// sums are of what usageIn gives, which is signed: rows of roll-ups may be two's complements, and corrections negative.
const sums = `sum(u.allowed) AS allowed, sum(u.rejected) AS rejected, sum(u.cost) AS cost`

// heldSum is a sum of what gateways say of their buckets, which may be any number: it is held to what fits, and does not wrap.
func heldSum(of string) string {
	sum := `sum(toInt128(` + of + `))`
	return `multiIf(` + sum + ` > 9223372036854775807, toInt64(9223372036854775807), ` + sum + ` < -9223372036854775808, toInt64(-9223372036854775808), toInt64(` + sum + `))`
}

// forSteps are the roll-ups that tell steps counted from from apart.
func forSteps(from time.Time, step time.Duration) []rollup {
	for i, r := range rollups {
		if from.Equal(from.Truncate(r.grain)) && step%r.grain == 0 {
			return rollups[i:]
		}
	}
	return nil
}

// usageIn is a subquery for the usage rows, or their sums, of a range, as far as where is true; and its parameters.
func usageIn(segments []segment, where string) (sql string, args []any) {
	parts := make([]string, len(segments))
	for i, g := range segments {
		parts[i] = fmt.Sprintf(`SELECT ts, tenant, route, rule, toInt64(allowed) AS allowed, toInt64(rejected) AS rejected, toInt64(cost) AS cost FROM %s
			WHERE %s AND ts >= fromUnixTimestamp64Milli({from%d:Int64}, 'UTC') AND ts < fromUnixTimestamp64Milli({to%d:Int64}, 'UTC')`, g.table, where, i, i)
		args = append(args, ch.Named(fmt.Sprint("from", i), millis(g.from)), ch.Named(fmt.Sprint("to", i), millis(g.to)))
	}
	return "(" + strings.Join(parts, " UNION ALL ") + ")", args
}

// maxSteps bounds an answer.
const maxSteps = 100_000

func checkSteps(from, to time.Time, step time.Duration) error {
	switch {
	case step < time.Millisecond || step%time.Millisecond != 0:
		return fmt.Errorf("step %s: want whole milliseconds, at least one", step)
	case to.Before(from):
		return fmt.Errorf("from %s is after to %s", from.UTC().Format(time.RFC3339), to.UTC().Format(time.RFC3339))
	case to.Sub(from)/step > maxSteps:
		return fmt.Errorf("%d steps of %s, want at most %d", to.Sub(from)/step, step, maxSteps)
	}
	return nil
}

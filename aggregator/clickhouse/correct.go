package clickhouse

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"

	"github.com/weirhq/weir/schemas"
)

// Correction is a signed difference to what a gateway reported for a tenant, route and outcome in one hour. It never
// changes usage: what was stored stays, and what is to be counted instead is the sum of both.
type Correction struct {
	Ref      string    `json:"ref"`  // names it: the same ref again is the same correction. Made up when empty
	Hour     time.Time `json:"hour"` // whole, of UTC
	Gateway  string    `json:"gateway"`
	Tenant   string    `json:"tenant"`
	Route    string    `json:"route"`
	Rule     string    `json:"rule"` // the refusing rule, empty for what was allowed
	Allowed  int64     `json:"allowed"`
	Rejected int64     `json:"rejected"`
	Cost     int64     `json:"cost"`
	Reason   string    `json:"reason"`
	Author   string    `json:"author"`
	Made     time.Time `json:"made"` // now when zero
}

// ErrCorrection is in the chain of the error about a correction that cannot be meant.
var ErrCorrection = errors.New("this correction cannot be meant")

// firstHour is the first that a correction can be of: what the history can store goes on beyond it, both ways.
var firstHour = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// Validate tells every mistake that can be seen without the history, each with the field that it is in.
func (c *Correction) Validate() error {
	var bad []string
	add := func(wrong bool, format string, args ...any) {
		if wrong {
			bad = append(bad, fmt.Sprintf(format, args...))
		}
	}
	hour := c.Hour.UTC().Format(time.RFC3339)
	add(!c.Hour.Equal(c.Hour.Truncate(time.Hour)) || c.Hour.IsZero(), "hour is %s, want a whole one", hour)
	add(c.Hour.Before(firstHour) || c.Hour.After(time.Now()), "hour is %s, want one from the year 2000 to the present one", hour)
	for _, f := range [][2]string{{"gateway", c.Gateway}, {"tenant", c.Tenant}, {"route", c.Route}, {"reason", c.Reason}, {"author", c.Author}} {
		add(strings.TrimSpace(f[1]) == "", "%s is empty", f[0])
	}
	add(c.Allowed == 0 && c.Rejected == 0 && c.Cost == 0, "allowed, rejected and cost are 0: it changes nothing")
	for _, f := range []struct {
		name string
		n    int64
	}{{"allowed", c.Allowed}, {"rejected", c.Rejected}, {"cost", c.Cost}} {
		add(f.n > schemas.MaxCount || f.n < -schemas.MaxCount, "%s is %d, want at most %d", f.name, f.n, int64(schemas.MaxCount))
	}
	add(c.Rejected != 0 && c.Rule == "", "rule is empty, want the one that rejected")
	add(c.Allowed != 0 && c.Rule != "", "rule is %q though allowed is %d: what was allowed has no rule, what was rejected is a correction of its own", c.Rule, c.Allowed)
	for _, f := range [][2]string{{"ref", c.Ref}, {"tenant", c.Tenant}, {"route", c.Route}, {"rule", c.Rule}, {"author", c.Author}} {
		add(len(f[1]) > schemas.MaxTextBytes, "%s has %d bytes, want at most %d", f[0], len(f[1]), schemas.MaxTextBytes)
	}
	if bad == nil {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrCorrection, strings.Join(bad, "; "))
}

var correctionsTable = table[Correction]{"corrections", []column[Correction]{
	col("ts", instant, func(c *Correction) time.Time { return c.Hour }),
	col("ref", "String", func(c *Correction) string { return c.Ref }),
	col("gateway", low, func(c *Correction) string { return c.Gateway }),
	col("tenant", "String", func(c *Correction) string { return c.Tenant }),
	col("route", low, func(c *Correction) string { return c.Route }),
	col("rule", low, func(c *Correction) string { return c.Rule }),
	col("allowed", "Int64", func(c *Correction) int64 { return c.Allowed }),
	col("rejected", "Int64", func(c *Correction) int64 { return c.Rejected }),
	col("cost", "Int64", func(c *Correction) int64 { return c.Cost }),
	col("reason", "String", func(c *Correction) string { return c.Reason }),
	col("author", "String", func(c *Correction) string { return c.Author }),
	col("made", instant, func(c *Correction) time.Time { return c.Made }),
}}

// Correct adds a correction and returns it with its ref. It refuses one after which a count would be below zero, one of a
// gateway that nobody has heard of, and one whose ref names another correction.
func (s *Store) Correct(ctx context.Context, c Correction) (Correction, error) {
	const doing = "correct usage"
	if err := c.Validate(); err != nil {
		return c, err
	}
	if c.Made.IsZero() {
		c.Made = time.Now()
	}
	if c.Ref == "" {
		c.Ref = strings.ToLower(rand.Text()[:12])
	}
	c.Hour, c.Made = c.Hour.UTC(), c.Made.UTC().Truncate(time.Millisecond)
	have, err := s.Corrections(ctx, time.Unix(0, 0), time.Unix(1<<32, 0), c.Ref)
	if err != nil {
		return c, err
	}
	if len(have) > 0 {
		h := have[0]
		c.Made = h.Made
		if h != c {
			return c, fmt.Errorf("%w: ref %q names another one, of %s", ErrCorrection, c.Ref, h.Made.Format(time.RFC3339))
		}
		return h, nil // made already
	}
	var known bool
	if err := s.conn.QueryRow(ctx, `SELECT (SELECT count() FROM (SELECT 1 FROM reports WHERE gateway = {gateway:String} LIMIT 1))
			+ (SELECT count() FROM (SELECT 1 FROM corrections WHERE gateway = {gateway:String} LIMIT 1)) > 0`, ch.Named("gateway", c.Gateway)).Scan(&known); err != nil {
		return c, s.explain(doing, err)
	}
	if !known {
		return c, fmt.Errorf("%w: gateway is %q, of which there is no report and no correction", ErrCorrection, c.Gateway)
	}
	var allowed, rejected, cost int64
	if err := s.conn.QueryRow(ctx, `SELECT sum(a), sum(r), sum(c) FROM (
			SELECT toInt64(allowed) AS a, toInt64(rejected) AS r, toInt64(cost) AS c FROM usage FINAL WHERE `+within+sameCount+`
			UNION ALL SELECT allowed, rejected, cost FROM corrections FINAL WHERE `+within+sameCount+`)`+final,
		append(window(c.Hour, c.Hour.Add(time.Hour)), ch.Named("tenant", c.Tenant), ch.Named("gateway", c.Gateway), ch.Named("route", c.Route), ch.Named("rule", c.Rule))...).
		Scan(&allowed, &rejected, &cost); err != nil {
		return c, s.explain(doing, err)
	}
	for _, f := range []struct {
		name    string
		have, n int64
	}{{"allowed", allowed, c.Allowed}, {"rejected", rejected, c.Rejected}, {"cost", cost, c.Cost}} {
		if f.have+f.n < 0 {
			return c, fmt.Errorf("%w: %s %d would be below zero, for %d are on record", ErrCorrection, f.name, f.n, f.have)
		}
	}
	return c, s.explain(doing, insert(ctx, s, correctionsTable, "correction-"+c.Ref, []Correction{c}))
}

// Unheard returns what a correction names of which nothing is on record in any hour, by the name of the field: "tenant", "route" (of the
// tenant) or "rule"; empty when all is known. A name that was mistyped makes a customer that does not exist.
func (s *Store) Unheard(ctx context.Context, c Correction) (field string, err error) {
	for _, f := range []struct{ name, where string }{
		{"tenant", `tenant = {tenant:String}`},
		{"route", `tenant = {tenant:String} AND route = {route:String}`},
		{"rule", `rule = {rule:String}`},
	} {
		var heard bool
		if err := s.conn.QueryRow(ctx, `SELECT count() > 0 FROM (SELECT 1 FROM usage_1d WHERE `+f.where+` UNION ALL SELECT 1 FROM corrections WHERE `+f.where+` LIMIT 1)`,
			ch.Named("tenant", c.Tenant), ch.Named("route", c.Route), ch.Named("rule", c.Rule)).Scan(&heard); err != nil {
			return "", s.explain("look for what a correction names", err)
		}
		if !heard && (f.name != "rule" || c.Rule != "") {
			return f.name, nil
		}
	}
	return "", nil
}

const sameCount = ` AND tenant = {tenant:String} AND gateway = {gateway:String} AND route = {route:String} AND rule = {rule:String}`

// Corrections returns those of hours with from <= hour < to, in order; the one of a ref unless that is empty.
func (s *Store) Corrections(ctx context.Context, from, to time.Time, ref string) ([]Correction, error) {
	const doing = "read corrections"
	rows, err := s.conn.Query(ctx, `SELECT ref, toUnixTimestamp64Milli(ts), gateway, tenant, route, rule, allowed, rejected, cost, reason, author, toUnixTimestamp64Milli(made)
		FROM corrections FINAL WHERE `+within+` AND ({ref:String} = '' OR ref = {ref:String}) ORDER BY ts, made, ref`, append(window(from, to), ch.Named("ref", ref))...)
	if err != nil {
		return nil, s.explain(doing, err)
	}
	out := []Correction{}
	for rows.Next() {
		var c Correction
		var hour, made int64
		if err := rows.Scan(&c.Ref, &hour, &c.Gateway, &c.Tenant, &c.Route, &c.Rule, &c.Allowed, &c.Rejected, &c.Cost, &c.Reason, &c.Author, &made); err != nil {
			return nil, s.explain(doing, errors.Join(err, rows.Close()))
		}
		c.Hour, c.Made = time.UnixMilli(hour).UTC(), time.UnixMilli(made).UTC()
		out = append(out, c)
	}
	return out, s.explain(doing, errors.Join(rows.Err(), rows.Close()))
}

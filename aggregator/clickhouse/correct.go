package clickhouse

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

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

// Validate tells every mistake that can be seen without the history, each with the field that it is in, as the command line calls it. A
// tenant or route may be empty, or have space around it: reports may name one so.
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
	for _, f := range [][2]string{{"gateway", c.Gateway}, {"reason", c.Reason}, {"by", c.Author}} {
		add(strings.TrimSpace(f[1]) == "", "%s is empty", f[0])
	}
	for _, f := range [][2]string{{"gateway", c.Gateway}, {"reason", c.Reason}, {"by", c.Author}, {"ref", c.Ref}} { // as two they would look the same
		add(strings.TrimSpace(f[1]) != f[1], "%s is %q, with space around it", f[0], f[1])
	}
	for _, f := range [][2]string{{"gateway", c.Gateway}, {"tenant", c.Tenant}, {"route", c.Route}, {"rule", c.Rule}, {"reason", c.Reason}, {"by", c.Author}, {"ref", c.Ref}} {
		add(!utf8.ValidString(f[1]), "%s is %q, which is not valid UTF-8", f[0], f[1])
		add(strings.ContainsFunc(f[1], unicode.IsControl), "%s is %q, with control characters", f[0], f[1])
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
	for _, f := range [][2]string{{"ref", c.Ref}, {"tenant", c.Tenant}, {"route", c.Route}, {"rule", c.Rule}, {"by", c.Author}} {
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

// refClaim binds a ref to a month.
type refClaim struct {
	ref   string
	month uint32 // as toYYYYMM says it
}

var refsTable = table[refClaim]{"correction_refs", []column[refClaim]{
	col("ref", "String", func(c *refClaim) string { return c.ref }),
	col("month", "UInt32", func(c *refClaim) uint32 { return c.month }),
}}

const (
	correctTries  = 200             // of a correction beside others: one of those that are made at once is stored in each round
	correctSettle = 2 * time.Second // a server that knows a token has its row by then, or never
	correctLook   = 50 * time.Millisecond
)

// Correct adds a correction and returns it with its ref. It refuses one after which a count would be below zero, one of a
// gateway that nobody has heard of, and one whose ref names another correction. Many may be made at once, by many processes: equal
// ones of one ref are one, and what the others have left no room for is refused. After an error of the way to the server it may be
// stored or not, and the same ref again tells.
//
// What was checked has to hold when the row is stored. So corrections are numbered within their month, which is their partition: the
// number is how many there are, read before the checks, and the insert's token is made of it. Of all who have checked beside the same
// rows ClickHouse stores the first, and drops the others without a word. Who then finds more rows, and not its own, begins again. Who
// finds no more, in all the time that a server takes between token and row, has a token without a row: the server was killed between the
// two, or the row was deleted. Nothing has changed then, and the next token of the number is tried.
//
// Numbers know one month, and a ref is one over all of them. So before the insert a ref is bound to its month, for ever (see claim), and
// no correction of another month passes under it. That is all a binding says: of one month, numbers see to it that a ref is stored once. A
// correction that is bound and then not stored, since others were faster or the way to the server broke, can be made again under its ref,
// or another of the month; for one of another month another ref is to be taken.
func (s *Store) Correct(ctx context.Context, c Correction) (Correction, error) {
	const doing = "correct usage"
	if err := c.Validate(); err != nil {
		return c, err
	}
	if c.Made.IsZero() {
		c.Made = time.Now()
	}
	mine := c.Ref == "" // the ref is, and nobody else's
	if mine {
		c.Ref = strings.ToLower(rand.Text()[:12])
	}
	c.Hour, c.Made = c.Hour.UTC(), c.Made.UTC().Truncate(time.Millisecond)
	var last uint64
	used := -1 // tokens of last that have no row
	for range correctTries {
		number, err := s.correctionsOf(ctx, c.Hour)
		if err != nil {
			return c, s.explain(doing, err)
		}
		if made, err := s.made(ctx, &c); made || err != nil {
			return c, err
		}
		if err := s.bearable(ctx, &c); err != nil {
			return c, err
		}
		if !mine {
			if err := s.claim(ctx, &c); err != nil {
				return c, err
			}
			mine = true
		}
		if used++; number != last {
			last, used = number, 0
		}
		unsure := insert(ctx, s, correctionsTable, fmt.Sprintf("correction-%s-%d-%d", c.Hour.Format("2006-01"), number, used), []Correction{c})
		made, err := s.settles(ctx, &c, number)
		switch {
		case made || errors.Is(err, ErrCorrection):
			return c, err
		case unsure != nil:
			err := s.explain(doing, unsure)
			if errors.Is(err, ErrRefused) || errors.Is(err, ErrDenied) || errors.Is(err, ErrSchema) { // nothing is stored then
				return c, err
			}
			return c, fmt.Errorf("%w (whether correction %q is stored is unknown: the same ref again tells)", err, c.Ref)
		case err != nil:
			return c, err
		}
	}
	return c, fmt.Errorf("%s: nothing is stored after %d tries, for others correct %s all the time", doing, correctTries, c.Hour.Format("January 2006"))
}

// claim binds the ref of c to its month, and fails when it is bound to another one: ErrCorrection, and nothing of c is stored then. Of all who
// find it free ClickHouse stores the first. Who sees none stored, in the time of settles, tries the next token.
func (s *Store) claim(ctx context.Context, c *Correction) error {
	const doing = "claim the ref of a correction"
	want := refClaim{c.Ref, uint32(100*c.Hour.Year() + int(c.Hour.Month()))}
	for used := range correctTries {
		for until := time.Now().Add(correctSettle); ; {
			var claims, others uint64
			if err := s.conn.QueryRow(ctx, "SELECT count(), countIf(month != {month:UInt32}) FROM correction_refs WHERE ref = {ref:String}",
				ch.Named("ref", want.ref), ch.Named("month", want.month)).Scan(&claims, &others); err != nil {
				return s.explain(doing, err)
			}
			if others > 0 {
				return fmt.Errorf("%w: ref %q names another one, of another month than %s", ErrCorrection, c.Ref, c.Hour.Format("January 2006"))
			}
			if claims > 0 {
				return nil
			}
			if used == 0 || time.Now().After(until) {
				break
			}
			if err := pause(ctx, correctLook); err != nil {
				return err
			}
		}
		if err := insert(ctx, s, refsTable, fmt.Sprintf("ref-%s-%d", c.Ref, used), []refClaim{want}); err != nil {
			return s.explain(doing, err)
		}
	}
	return fmt.Errorf("%s: it is not stored after %d tries", doing, correctTries)
}

// correctionsOf is how many corrections there are of the month of an hour; its errors are the driver's.
func (s *Store) correctionsOf(ctx context.Context, hour time.Time) (n uint64, err error) {
	month := time.Date(hour.Year(), hour.Month(), 1, 0, 0, 0, 0, time.UTC)
	err = s.conn.QueryRow(ctx, "SELECT count() FROM corrections FINAL WHERE "+within, window(month, month.AddDate(0, 1, 0))...).Scan(&n)
	return n, err
}

// made says whether c is there, which it then is as it was made. Another one of its ref is an error.
func (s *Store) made(ctx context.Context, c *Correction) (bool, error) {
	have, err := s.Corrections(ctx, time.Unix(0, 0), time.Unix(1<<32, 0), c.Ref)
	if err != nil || len(have) == 0 {
		return false, err
	}
	for _, h := range have {
		c.Made = h.Made
		if h != *c {
			return false, fmt.Errorf("%w: ref %q names another one, made %s, of %s", ErrCorrection, c.Ref, h.Made.Format(time.RFC3339), h.Hour.Format(time.RFC3339))
		}
	}
	return true, nil
}

// settles waits until c is there, or other corrections are than number of them, or nothing will change.
func (s *Store) settles(ctx context.Context, c *Correction, number uint64) (made bool, err error) {
	for until := time.Now().Add(correctSettle); ; {
		if made, err = s.made(ctx, c); made || err != nil {
			return made, err
		}
		n, err := s.correctionsOf(ctx, c.Hour)
		if err != nil || n != number || time.Now().After(until) {
			return false, s.explain("read corrections", err)
		}
		if err := pause(ctx, correctLook); err != nil {
			return false, err
		}
	}
}

// bearable is nil when what is on record bears c.
func (s *Store) bearable(ctx context.Context, c *Correction) error {
	const doing = "look at what is to be corrected"
	var known bool
	if err := s.conn.QueryRow(ctx, `SELECT (SELECT count() FROM (SELECT 1 FROM reports WHERE gateway = {gateway:String} LIMIT 1))
			+ (SELECT count() FROM (SELECT 1 FROM corrections WHERE gateway = {gateway:String} LIMIT 1)) > 0`, ch.Named("gateway", c.Gateway)).Scan(&known); err != nil {
		return s.explain(doing, err)
	}
	if !known {
		return fmt.Errorf("%w: gateway is %q, of which there is no report and no correction", ErrCorrection, c.Gateway)
	}
	var have Counts
	if err := s.conn.QueryRow(ctx, `SELECT sum(a), sum(r), sum(c) FROM (
			SELECT toInt64(allowed) AS a, toInt64(rejected) AS r, toInt64(cost) AS c FROM usage FINAL WHERE `+within+sameCount+`
			UNION ALL SELECT allowed, rejected, cost FROM corrections FINAL WHERE `+within+sameCount+`)`+final,
		append(window(c.Hour, c.Hour.Add(time.Hour)), ch.Named("tenant", c.Tenant), ch.Named("gateway", c.Gateway), ch.Named("route", c.Route), ch.Named("rule", c.Rule))...).
		Scan(&have.Allowed, &have.Rejected, &have.Cost); err != nil {
		return s.explain(doing, err)
	}
	for _, f := range []struct {
		name    string
		have, n int64
	}{{"allowed", have.Allowed, c.Allowed}, {"rejected", have.Rejected, c.Rejected}, {"cost", have.Cost, c.Cost}} {
		if f.n < 0 && f.have+f.n < 0 {
			return fmt.Errorf("%w: %s %d would be below zero, for %d are on record", ErrCorrection, f.name, f.n, f.have)
		}
		if f.n > 0 && f.have > schemas.MaxCount-f.n {
			return fmt.Errorf("%w: %s %d would be above %d, for %d are on record", ErrCorrection, f.name, f.n, int64(schemas.MaxCount), f.have)
		}
	}
	return nil
}

// Unheard returns what a correction names of which nothing is on record in any hour, by the names of the fields: "tenant", "route" (of the
// tenant) or "rule". A name that was mistyped makes a customer that does not exist.
func (s *Store) Unheard(ctx context.Context, c Correction) (fields []string, err error) {
	for _, f := range []struct{ name, where string }{
		{"tenant", `tenant = {tenant:String}`},
		{"route", `tenant = {tenant:String} AND route = {route:String}`},
		{"rule", `rule = {rule:String}`},
	} {
		var heard bool
		if err := s.conn.QueryRow(ctx, `SELECT count() > 0 FROM (SELECT 1 FROM usage_1d WHERE `+f.where+` UNION ALL SELECT 1 FROM corrections WHERE `+f.where+` LIMIT 1)`,
			ch.Named("tenant", c.Tenant), ch.Named("route", c.Route), ch.Named("rule", c.Rule)).Scan(&heard); err != nil {
			return nil, s.explain("look for what a correction names", err)
		}
		if !heard && (f.name != "rule" || c.Rule != "") {
			fields = append(fields, f.name)
		}
	}
	return fields, nil
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

package clickhouse

import (
	"context"
	"errors"
	"fmt"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"

	"github.com/weirhq/weir/schemas"
)

// MissingReports is a run of reports of one boot that are not stored.
type MissingReports struct {
	Gateway, Boot string
	First, Last   uint64
	Hour          time.Time // in which the next one arrived
}

// Missing returns the runs after which a report of the same boot is stored, and this one arrived with from <= received < to.
func (s *Store) Missing(ctx context.Context, from, to time.Time) ([]MissingReports, error) {
	var out []MissingReports
	err := s.scan(ctx, "look for missing reports", `SELECT gateway, boot, before + 1, toUInt64(seq - 1), toUnixTimestamp64Milli(received) FROM (
			SELECT gateway, boot, seq, received, lagInFrame(seq, 1, 0) OVER (PARTITION BY gateway, boot ORDER BY seq) AS before FROM reports FINAL
			WHERE (gateway, boot) IN (SELECT gateway, boot FROM reports WHERE `+received+`)
		) WHERE seq > before + 1 AND `+received+` ORDER BY gateway, boot, seq`, window(from, to), func(rows driver.Rows) error {
		var m MissingReports
		var ms int64
		err := rows.Scan(&m.Gateway, &m.Boot, &m.First, &m.Last, &ms)
		m.Hour = time.UnixMilli(ms).UTC().Truncate(time.Hour)
		out = append(out, m)
		return err
	})
	return out, err
}

// Tail is a run of reports that a gateway has said it has sealed and that are not stored, and neither is a later one of the same boot.
type Tail struct {
	MissingReports // Hour is that of the first heartbeats that told of them, as far as these were kept
	// Kept says that the gateway may have them yet: this boot is alive, or another one of that gateway is that has had reports to deliver
	// all the time, and may be delivering those of this one.
	Kept bool
}

// maxSealed is more than any boot seals: a hundred reports a second for thirty years.
const maxSealed = 100_000_000_000

// Tails returns the runs that were told of with from <= ts < to, and before told: what was told of after that may be on its way.
// Who is alive has been heard since alive. Heartbeats are kept for 30 days, and those of older gateways tell of nothing, nor do those
// that name more than maxSealed.
func (s *Store) Tails(ctx context.Context, from, to, told, alive time.Time) ([]Tail, error) {
	var out []Tail
	err := s.scan(ctx, "look for reports that gateways have told of", `WITH
		told AS ( -- and the hour before: what was told of then already is not of this one
			SELECT gateway, boot, toUnixTimestamp64Milli(ts) - toUnixTimestamp64Milli(ts) % 3600000 AS hour, max(sealed) AS last FROM gateways
			WHERE sealed BETWEEN 1 AND {most:UInt64} AND ts >= fromUnixTimestamp64Milli({from:Int64} - 3600000, 'UTC') AND ts < fromUnixTimestamp64Milli(least({to:Int64}, {told:Int64}), 'UTC') GROUP BY gateway, boot, hour),
		have AS (SELECT gateway, boot, max(seq) AS stored FROM reports WHERE (gateway, boot) IN (SELECT gateway, boot FROM told) GROUP BY gateway, boot),
		alive AS (
			SELECT gateway, boot, countIf(pending_reports = 0 AND ts < fromUnixTimestamp64Milli({told:Int64}, 'UTC')) = 0 AS delivers FROM gateways WHERE ts >= fromUnixTimestamp64Milli({alive:Int64}, 'UTC')
			GROUP BY gateway, boot HAVING argMax(mode, ts) != '`+schemas.ModeStopped+`')
		SELECT gateway, boot, greatest(before, stored) + 1, last, hour,
			(gateway, boot) IN (SELECT gateway, boot FROM alive) OR gateway IN (SELECT gateway FROM alive WHERE delivers)
		FROM (SELECT gateway, boot, hour, last, lagInFrame(last, 1, 0) OVER (PARTITION BY gateway, boot ORDER BY hour) AS before FROM told) AS runs
		LEFT JOIN have USING (gateway, boot)
		WHERE last > greatest(before, stored) AND hour > {from:Int64} - 3600000 ORDER BY hour, gateway, boot`,
		append(window(from, to), ch.Named("told", millis(told)), ch.Named("alive", millis(alive)), ch.Named("most", uint64(maxSealed))), func(rows driver.Rows) error {
			var t Tail
			var hour int64
			err := rows.Scan(&t.Gateway, &t.Boot, &t.First, &t.Last, &hour, &t.Kept)
			t.Hour = time.UnixMilli(hour).UTC()
			out = append(out, t)
			return err
		})
	return out, err
}

// Uneven is a difference between two accounts of what one gateway saw in one hour. Where one hour has reports of which there is too little
// and others of which there is too much, it has one of each: neither makes up for the other.
type Uneven struct {
	Gateway, Boot string
	Rule, Key     string // of a bucket; empty for all requests
	Hour          time.Time
	Want, Have    int64
}

// UnevenReports returns where usage does not add up to what the reports say of themselves, for reports that arrived with
// from <= received < to.
func (s *Store) UnevenReports(ctx context.Context, from, to time.Time) ([]Uneven, error) {
	// A report's usage is at most a year older and a day younger than its arrival: what it cannot be in is not read.
	args := append(window(from, to), ch.Named("first", millis(from.Add(-schemas.MaxBehind))), ch.Named("last", millis(to.Add(schemas.MaxAhead))))
	return s.uneven(ctx, "compare usage with reports", `SELECT gateway, boot, '', '', toInt64(hour), sum(toInt64(said)), sum(toInt64(have)) FROM (
			SELECT gateway, boot, seq, max(at) AS hour, sum(said) AS said, sum(have) AS have FROM (
				SELECT gateway, boot, seq, toUnixTimestamp64Milli(received) - toUnixTimestamp64Milli(received) % 3600000 AS at, requests AS said, toUInt64(0) AS have
				FROM reports FINAL WHERE `+received+`
				UNION ALL
				SELECT gateway, boot, seq, toInt64(0), toUInt64(0), allowed + rejected FROM usage FINAL WHERE `+received+`
					AND ts >= fromUnixTimestamp64Milli({first:Int64}, 'UTC') AND ts < fromUnixTimestamp64Milli({last:Int64}, 'UTC')
			) GROUP BY gateway, boot, seq
		) WHERE hour > 0 AND said != have GROUP BY gateway, boot, hour, have > said ORDER BY hour, gateway, boot, have > said`+final, args)
}

// Orphans are rows of usage whose report is not stored: they were copied or made up, or the batch that they are of is stored in part.
type Orphans struct {
	Gateway, Boot string
	Hour          time.Time // in which they arrived
	Reports       uint64    // that they name
	First, Last   uint64    // the lowest and the highest of their numbers
	Requests      uint64
	Latest        time.Time // arrival
}

// Orphans returns those that arrived with from <= received < to. A batch that is just being stored shows as some.
func (s *Store) Orphans(ctx context.Context, from, to time.Time) ([]Orphans, error) {
	where := received + ` AND ts >= fromUnixTimestamp64Milli({first:Int64}, 'UTC') AND ts < fromUnixTimestamp64Milli({last:Int64}, 'UTC')`
	args := append(window(from, to), ch.Named("first", millis(from.Add(-schemas.MaxBehind))), ch.Named("last", millis(to.Add(schemas.MaxAhead))))
	var out []Orphans
	err := s.scan(ctx, "look for usage without a report", `SELECT gateway, boot, toUnixTimestamp64Milli(received) - toUnixTimestamp64Milli(received) % 3600000 AS hour,
			uniqExact(seq), min(seq), max(seq), sum(allowed + rejected), toUnixTimestamp64Milli(max(received)) FROM usage FINAL WHERE `+where+`
			AND (gateway, boot, seq) NOT IN (SELECT gateway, boot, seq FROM reports WHERE (gateway, boot) IN (SELECT gateway, boot FROM usage WHERE `+where+`))
			GROUP BY gateway, boot, hour ORDER BY hour, gateway, boot`+final, args, func(rows driver.Rows) error {
		var o Orphans
		var hour, latest int64
		err := rows.Scan(&o.Gateway, &o.Boot, &hour, &o.Reports, &o.First, &o.Last, &o.Requests, &latest)
		o.Hour, o.Latest = time.UnixMilli(hour).UTC(), time.UnixMilli(latest).UTC()
		out = append(out, o)
		return err
	})
	return out, err
}

// UnevenTokens returns where what was taken of a bucket, report by report, does not add up to the growth of its cumulative
// count, for reports of from <= ts < to: more grown than taken is lost, less is doubled. A count also falls, where tokens were given
// back after a report told of them: what is taken next makes up for it first, so that a report that tells of tokens taken tells of
// more than any before.
func (s *Store) UnevenTokens(ctx context.Context, from, to time.Time) ([]Uneven, error) {
	return s.uneven(ctx, "compare cumulative counts", `SELECT gateway, boot, rule, key, toUnixTimestamp64Milli(ts) - toUnixTimestamp64Milli(ts) % 3600000 AS hour,
			`+heldSum("grown")+`, `+heldSum("taken")+` FROM (
			SELECT gateway, boot, rule, key, ts, taken, greatest(0, toInt64(cum) - ifNull(max(if(taken > 0, toInt64(cum), NULL)) OVER
				(PARTITION BY gateway, boot, incarnation, rule, key ORDER BY seq, entry ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), toInt64(cum) - toInt64(taken))) AS grown
			FROM tokens FINAL WHERE `+within+`
		) WHERE grown != toInt64(taken) GROUP BY gateway, boot, rule, key, hour, taken > grown ORDER BY hour, gateway, boot, rule, key, taken > grown`+final, window(from, to))
}

func (s *Store) uneven(ctx context.Context, doing, sql string, args []any) ([]Uneven, error) {
	var out []Uneven
	err := s.scan(ctx, doing, sql, args, func(rows driver.Rows) error {
		var u Uneven
		var hour int64
		err := rows.Scan(&u.Gateway, &u.Boot, &u.Rule, &u.Key, &hour, &u.Want, &u.Have)
		u.Hour = time.UnixMilli(hour).UTC()
		out = append(out, u)
		return err
	})
	return out, err
}

// Mark is how far the cumulative count of one incarnation of a bucket has come, by the reports that are stored.
type Mark struct {
	Rule, Key, Gateway, Boot string
	Incarnation              uint32
	Seq, Cum                 uint64
	At                       time.Time // of that report
}

// Marks returns those of the incarnations with a report of from <= ts < to, at most n of them, the latest first.
func (s *Store) Marks(ctx context.Context, from, to time.Time, n int) ([]Mark, error) {
	var out []Mark
	err := s.scan(ctx, "read cumulative counts", `SELECT rule, key, gateway, boot, incarnation, max(seq), argMax(cum, (seq, entry)), toUnixTimestamp64Milli(max(ts)) AS at FROM tokens
			WHERE ts >= fromUnixTimestamp64Milli({from:Int64}, 'UTC') AND (rule, key) IN (SELECT rule, key FROM tokens WHERE `+within+`)
			GROUP BY rule, key, gateway, boot, incarnation HAVING min(ts) < fromUnixTimestamp64Milli({to:Int64}, 'UTC') ORDER BY at DESC LIMIT {n:UInt32}`,
		append(window(from, to), ch.Named("n", uint32(n))), func(rows driver.Rows) error {
			var m Mark
			var at int64
			err := rows.Scan(&m.Rule, &m.Key, &m.Gateway, &m.Boot, &m.Incarnation, &m.Seq, &m.Cum, &at)
			m.At = time.UnixMilli(at).UTC()
			out = append(out, m)
			return err
		})
	return out, err
}

// Unsealed is what a process had admitted and not sealed when it ended: it was killed, or could not keep it.
type Unsealed struct {
	Gateway, Boot string
	Hour          time.Time // of the first of it
	Tenants       uint64
	Cost          uint64 // tokens that its requests asked for
}

// Unsealed returns those with requests of from <= ts < to, by life. The next process sealed them, under no policy; a gateway that
// never names a policy has no part in it.
func (s *Store) Unsealed(ctx context.Context, from, to time.Time) ([]Unsealed, error) {
	var out []Unsealed
	err := s.scan(ctx, "look for what killed processes left", `SELECT gateway, boot, toUnixTimestamp64Milli(min(ts)) AS first, uniqExact(tenant), sum(greatest(cost, allowed))
			FROM usage FINAL WHERE policy_version = 0 AND allowed > 0 AND `+within+` AND gateway IN (SELECT gateway FROM usage WHERE policy_version != 0 AND `+within+`)
			GROUP BY gateway, boot ORDER BY first, gateway, boot`, window(from, to), func(rows driver.Rows) error {
		var u Unsealed
		var first int64
		err := rows.Scan(&u.Gateway, &u.Boot, &first, &u.Tenants, &u.Cost)
		u.Hour = time.UnixMilli(first).UTC().Truncate(time.Hour)
		out = append(out, u)
		return err
	})
	return out, err
}

// ReportID names a report for ever.
type ReportID struct {
	Gateway, Boot string
	Seq           uint64
}

// Stored returns what is in those of these reports that are stored whole.
func (s *Store) Stored(ctx context.Context, ids []ReportID) (map[ReportID]Contents, error) {
	items := make([]schemas.Delivered[*schemas.Report], len(ids))
	for i, id := range ids {
		items[i].Value = &schemas.Report{Gateway: id.Gateway, Boot: id.Boot, Seq: id.Seq}
	}
	by, err := s.storedBy(ctx, "-", items) // no batch is called so
	if err != nil {
		return nil, s.explain("look up reports", err)
	}
	out := make(map[ReportID]Contents, len(by))
	for id, k := range by {
		out[ReportID{id.gateway, id.boot, id.seq}] = k.Contents
	}
	return out, nil
}

const received = `received >= fromUnixTimestamp64Milli({from:Int64}, 'UTC') AND received < fromUnixTimestamp64Milli({to:Int64}, 'UTC')`

// scan calls row for every row of a query.
func (s *Store) scan(ctx context.Context, doing, sql string, args []any, row func(driver.Rows) error) error {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, sql, args...)
	if err != nil {
		return s.explain(doing, err)
	}
	for rows.Next() {
		if err := row(rows); err != nil {
			return s.explain(doing, errors.Join(err, rows.Close()))
		}
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return s.explain(doing, err)
	}
	return nil
}

func (m MissingReports) String() string {
	if m.First == m.Last {
		return fmt.Sprintf("report %d", m.First)
	}
	return fmt.Sprintf("reports %d to %d", m.First, m.Last)
}

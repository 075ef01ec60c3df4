package clickhouse

import (
	"context"
	"errors"
	"slices"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
)

const (
	judgeStep = 10 * time.Second    // of arrivals that are judged at once: what a step holds in memory
	judgeLate = time.Hour           // what a gateway sealed longer before it arrived is not judged any more
	judgePast = 24 * time.Hour      // judging goes on from so long ago at most
	fleetSpan = 10 * time.Minute    // a gateway that reported in it may hold a token of any key
	nearLevel = time.Minute         // a level is looked for so far back, and
	farLevel  = 31 * 24 * time.Hour // so far where it takes longer to refill; older ones are full again
	minSlack  = 2                   // tokens

	levelsAtOnce = 200 // bounds one question about levels, so that it fits into a URL
)

// Admitted is what all gateways together took from one key's limit in one second.
type Admitted struct {
	Time           time.Time // beginning of the second
	Rule, Key      string
	LimitRateNanos int64
	LimitBurst     int64
	Taken          float64
}

// Accuracy is one second of one key: what was admitted, and how much of it the limit allowed.
type Accuracy struct {
	Admitted
	Allowed, Over float64
	Level         float64   // of the one bucket after the second; below 0 is what gateways are ahead of it
	Seen          time.Time // all that had arrived by then was judged before
}

// Judged is up to when all arrivals have been judged, for Judge to go on from: a day before now at the earliest.
func (s *Store) Judged(ctx context.Context, now time.Time) (time.Time, error) {
	past := now.UTC().Add(-judgePast)
	var seen time.Time
	err := s.conn.QueryRow(ctx, `SELECT max(seen) FROM accuracy WHERE ts >= fromUnixTimestamp64Milli({from:Int64}, 'UTC')`, ch.Named("from", millis(past.Add(-judgeLate)))).Scan(&seen)
	if err != nil {
		return time.Time{}, s.explain("ask what is judged", err)
	}
	if seen.Before(past) {
		seen = past
	}
	return seen.UTC(), nil
}

// Judge holds what arrived after seen, at most ten seconds of it, against the limits, stores a row for each second and key
// that it changes, and returns up to when it came: seen again when nothing has arrived. A second is judged whenever a report
// of it arrives, and so are the later ones of its key, however late that is, up to an hour. Judging something twice gives
// the same rows.
func (s *Store) Judge(ctx context.Context, seen time.Time) (time.Time, error) {
	const doing = "judge what was admitted"
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	var first, last time.Time
	var n uint64
	// A report is in this table only when all that arrived before it is stored.
	err := s.conn.QueryRow(ctx, `SELECT min(received), max(received), count() FROM reports WHERE received > fromUnixTimestamp64Milli({seen:Int64}, 'UTC')`,
		ch.Named("seen", millis(seen))).Scan(&first, &last, &n)
	if err != nil || n == 0 {
		return seen, s.explain(doing, err)
	}
	upto := first.Add(judgeStep)
	if last.Before(upto) {
		upto = last
	}
	var gateways uint64
	err = s.conn.QueryRow(ctx, `SELECT uniqExact(gateway, boot) FROM reports
		WHERE received > fromUnixTimestamp64Milli({from:Int64}, 'UTC') AND received <= fromUnixTimestamp64Milli({upto:Int64}, 'UTC')`,
		ch.Named("from", millis(upto.Add(-fleetSpan))), ch.Named("upto", millis(upto))).Scan(&gateways)
	if err != nil {
		return seen, s.explain(doing, err)
	}
	judged, err := s.judge(ctx, seen, upto, float64(max(minSlack, gateways)))
	if err == nil {
		err = insert(ctx, s, accuracyTable, "", judged)
	}
	if err != nil {
		return seen, s.explain(doing, err)
	}
	return upto.UTC(), nil
}

// taken is a query for what was taken: by which second (at) in how many seconds (n), and in how many of these it is laid
// (parts), evenly, never in more than there are tokens. What a bucket gave in more than a minute it gave in the last one, unless its
// gateway was cut off within an hour before and told it all at once: then that minute has its part of the time (secs). The second is that
// of the arrival, by one clock for all; of a report that had to wait it is the gateway's. Shadow rules admit everything, local ones are
// not shared, and both are left out. DISTINCT does what FINAL would, after the condition on time and not before it.
const taken = `(SELECT DISTINCT gateway, boot, seq, entry, rule, key, received, limit_rate_nanos, limit_burst, taken,
		toUnixTimestamp(if(received > ts + INTERVAL 10 SECOND, ts, received)) AS at,
		toInt64(least(greatest(1, intDiv(window_ms + 999, 1000)), 60)) AS n, least(n, toInt64(taken)) AS parts,
		if((gateway, boot) IN (SELECT gateway, boot FROM tokens WHERE ts >= fromUnixTimestamp64Milli({from:Int64} - 3600000, 'UTC') AND received > ts + INTERVAL 10 SECOND),
			greatest(n, intDiv(window_ms, 1000)), n) AS secs, at - intDiv((parts - 1) * n, parts) AS first
	FROM tokens
	WHERE ts >= fromUnixTimestamp64Milli({from:Int64}, 'UTC') AND received <= fromUnixTimestamp64Milli({upto:Int64}, 'UTC')
		AND mode != 'shadow' AND consistency != 'local' AND taken > 0 AND limit_rate_nanos >= 0`

// isNew is true of what arrived since the last look.
const isNew = `received >= fromUnixTimestamp64Milli({seen:Int64}, 'UTC')`

// judge judges what arrived in seen..upto. It begins, for each key, with the first second that any of this is of, at the
// level which the key's last second before that left.
func (s *Store) judge(ctx context.Context, seen, upto time.Time, slack float64) ([]Accuracy, error) {
	args := func(from time.Time) []any {
		return []any{ch.Named("from", millis(from)), ch.Named("seen", millis(seen)), ch.Named("upto", millis(upto))}
	}
	var first int64
	var n uint64
	err := s.conn.QueryRow(ctx, `SELECT min(first), count() FROM `+taken+` AND `+isNew+`)`, args(seen.Add(-judgeLate))...).Scan(&first, &n)
	if err != nil || n == 0 {
		return nil, err
	}
	// What counts in a second arrived, or was sealed, at most ten seconds before it.
	from := time.Unix(first, 0).Add(-10 * time.Second)
	left := map[[2]string]bucket{}
	near := append(args(from), ch.Named("near", millis(from.Add(-nearLevel))))
	if err := s.levels(ctx, left, `SELECT a.rule, a.key, max(a.ts), argMax(a.level, (a.ts, a.seen, -a.level))
		FROM accuracy AS a INNER JOIN (SELECT rule, key, min(first) AS since FROM `+taken+` AND `+isNew+`) GROUP BY rule, key) AS f ON a.rule = f.rule AND a.key = f.key
		WHERE a.ts >= fromUnixTimestamp64Milli({near:Int64}, 'UTC') AND toUnixTimestamp(a.ts) < f.since GROUP BY a.rule, a.key`, near...); err != nil {
		return nil, err
	}
	rows, err := s.conn.Query(ctx, `
		SELECT rule, key, at - intDiv(arrayJoin(range(parts)) * n, parts) AS second, max(limit_rate_nanos), max(limit_burst), sum(taken / parts * n / secs)
		FROM (SELECT *, min(if(`+isNew+`, first, 0xffffffff)) OVER (PARTITION BY rule, key) AS since FROM `+taken+`))
		GROUP BY rule, key, second HAVING second >= any(since) ORDER BY rule, key, second`, args(from)...)
	if err != nil {
		return nil, err
	}
	var out []Accuracy
	for rows.Next() {
		a := Accuracy{Seen: seen}
		var second int64
		if err := rows.Scan(&a.Rule, &a.Key, &second, &a.LimitRateNanos, &a.LimitBurst, &a.Taken); err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		a.Time = time.Unix(second, 0).UTC()
		if i := len(out) - 1; i >= 0 && out[i].Rule == a.Rule && out[i].Key == a.Key {
			a.Rule, a.Key = out[i].Rule, out[i].Key // one text for all of them
		}
		out = append(out, a)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, err
	}
	if err := s.farLevels(ctx, left, out, upto); err != nil {
		return nil, err
	}
	var b bucket
	for i := range out {
		a := &out[i]
		if i == 0 || out[i-1].Rule != a.Rule || out[i-1].Key != a.Key {
			var ok bool
			if b, ok = left[[2]string{a.Rule, a.Key}]; !ok {
				b = bucket{level: float64(a.LimitBurst), at: a.Time}
			}
		}
		b.judge(a, slack)
	}
	return out, nil
}

// farLevels looks further back for the levels of keys that were not used lately and need longer than that to refill.
func (s *Store) farLevels(ctx context.Context, left map[[2]string]bucket, all []Accuracy, upto time.Time) error {
	var missing []*Accuracy
	for i := range all {
		a := &all[i]
		if i > 0 && all[i-1].Rule == a.Rule && all[i-1].Key == a.Key {
			continue
		}
		if _, ok := left[[2]string{a.Rule, a.Key}]; !ok && float64(a.LimitBurst)*1e9 > nearLevel.Seconds()*float64(a.LimitRateNanos) {
			missing = append(missing, a)
		}
	}
	for part := range slices.Chunk(missing, levelsAtOnce) {
		rules, keys, since := make([]string, len(part)), make([]string, len(part)), make([]int64, len(part))
		for i, a := range part {
			rules[i], keys[i], since[i] = a.Rule, a.Key, a.Time.Unix()
		}
		if err := s.levels(ctx, left, `SELECT a.rule, a.key, max(a.ts), argMax(a.level, (a.ts, a.seen, -a.level))
			FROM accuracy AS a INNER JOIN (SELECT tupleElement(k, 1) AS rule, tupleElement(k, 2) AS key, tupleElement(k, 3) AS since
				FROM (SELECT arrayJoin(arrayZip({rules:Array(String)}, {keys:Array(String)}, {since:Array(Int64)})) AS k)) AS f ON a.rule = f.rule AND a.key = f.key
			WHERE a.rule IN {rules:Array(String)} AND a.key IN {keys:Array(String)} AND toUnixTimestamp(a.ts) < f.since
				AND a.ts >= fromUnixTimestamp64Milli({far:Int64}, 'UTC') GROUP BY a.rule, a.key`,
			ch.Named("rules", rules), ch.Named("keys", keys), ch.Named("since", since), ch.Named("far", millis(upto.Add(-farLevel)))); err != nil {
			return err
		}
	}
	return nil
}

// levels adds what a query says of rule, key, last second and level.
func (s *Store) levels(ctx context.Context, left map[[2]string]bucket, query string, args ...any) error {
	rows, err := s.conn.Query(ctx, query, args...)
	if err != nil {
		return err
	}
	for rows.Next() {
		var id [2]string
		var b bucket
		if err := rows.Scan(&id[0], &id[1], &b.at, &b.level); err != nil {
			return errors.Join(err, rows.Close())
		}
		b.at = b.at.Add(time.Second)
		left[id] = b
	}
	return errors.Join(rows.Err(), rows.Close())
}

// bucket is the one bucket that all gateways together are held against.
type bucket struct {
	level float64
	at    time.Time // when it had that level
}

// judge says how much of a second the bucket allows. The refill of a second counts from its beginning, so that a burst at any
// moment of it is not held against anybody. The level may be slack below zero: every gateway may give a token of a limit
// that is too small to divide before it hears from the others. That is paid back by what comes next, and not a part of
// each second anew.
func (b *bucket) judge(a *Accuracy, slack float64) {
	rate, burst := float64(a.LimitRateNanos)/1e9, float64(a.LimitBurst)
	b.level = min(burst, b.level+rate*max(0, a.Time.Sub(b.at).Seconds())) + rate
	b.at = a.Time.Add(time.Second)
	a.Allowed = min(a.Taken, max(0, b.level+slack))
	a.Over = a.Taken - a.Allowed
	b.level = min(burst, b.level-a.Allowed)
	a.Level = b.level
}

var accuracyTable = table[Accuracy]{"accuracy", []column[Accuracy]{
	col("ts", instant, func(r *Accuracy) time.Time { return r.Time }),
	lowCol("rule", func(r *Accuracy) string { return r.Rule }),
	col("key", "String", func(r *Accuracy) string { return r.Key }),
	col("limit_rate_nanos", "Int64", func(r *Accuracy) int64 { return r.LimitRateNanos }),
	col("limit_burst", "Int64", func(r *Accuracy) int64 { return r.LimitBurst }),
	col("admitted", "Float64", func(r *Accuracy) float64 { return r.Taken }),
	col("allowed", "Float64", func(r *Accuracy) float64 { return r.Allowed }),
	col("over", "Float64", func(r *Accuracy) float64 { return r.Over }),
	col("level", "Float64", func(r *Accuracy) float64 { return r.Level }),
	col("seen", instant, func(r *Accuracy) time.Time { return r.Seen }),
}}

// Overshoot is how far a rule was not kept to in a time.
type Overshoot struct {
	Rule           string
	Admitted, Over float64 // tokens
	Minutes        int     // of the time, in which anything was over
}

// Overshoots returns every rule that admitted anything with from <= second < to, of what is judged by now.
func (s *Store) Overshoots(ctx context.Context, from, to time.Time) ([]Overshoot, error) {
	const doing = "read the accuracy"
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, `
		SELECT rule, sum(now.1), sum(now.2), uniqExactIf(intDiv(toUnixTimestamp64Milli(ts) - {from:Int64}, 60000), now.2 > 0.001) FROM (
			SELECT rule, key, ts, argMax((admitted, over), (seen, admitted)) AS now FROM accuracy WHERE `+within+` GROUP BY rule, key, ts)
		GROUP BY rule ORDER BY rule`, window(from, to)...)
	if err != nil {
		return nil, s.explain(doing, err)
	}
	var out []Overshoot
	for rows.Next() {
		var o Overshoot
		var minutes uint64
		if err := rows.Scan(&o.Rule, &o.Admitted, &o.Over, &minutes); err != nil {
			return nil, s.explain(doing, errors.Join(err, rows.Close()))
		}
		o.Minutes = int(minutes)
		out = append(out, o)
	}
	return out, s.explain(doing, errors.Join(rows.Err(), rows.Close()))
}

package clickhouse

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// Admitted is what all gateways together took from one key's limit in one second.
type Admitted struct {
	Time           time.Time // beginning of the second, by the stream's clock
	Rule, Key      string
	LimitRateNanos int64
	LimitBurst     int64
	Taken          float64
}

// Admitted returns, in order of rule, key and second, what was taken with from <= second < to, whole seconds, from keys of
// which more than the burst was taken in that time: no other can have been overdrawn. A report that covers several seconds is
// spread over them evenly. Shadow rules admit everything, and are left out.
func (s *Store) Admitted(ctx context.Context, from, to time.Time) ([]Admitted, error) {
	const doing = "read what was admitted"
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, `
		WITH spread AS (
			SELECT rule, key, limit_rate_nanos, limit_burst, taken, greatest(1, intDiv(window_ms + 999, 1000)) AS n,
				arrayJoin(range(least(n, 60))) AS i, toUnixTimestamp(received) - i AS second
			FROM tokens FINAL
			WHERE received >= fromUnixTimestamp64Milli({from:Int64}, 'UTC') AND received < fromUnixTimestamp64Milli({to:Int64} + 60000, 'UTC')
				AND mode != 'shadow' AND taken > 0 AND limit_rate_nanos >= 0)
		SELECT rule, key, second, max(limit_rate_nanos), max(limit_burst), sum(taken / least(n, 60)) AS admitted
		FROM spread WHERE second >= intDiv({from:Int64}, 1000) AND second < intDiv({to:Int64}, 1000)
			AND (rule, key) IN (SELECT rule, key FROM spread GROUP BY rule, key HAVING sum(taken / least(n, 60)) > max(limit_burst))
		GROUP BY rule, key, second ORDER BY rule, key, second`, window(from, to)...)
	if err != nil {
		return nil, s.explain(doing, err)
	}
	var out []Admitted
	for rows.Next() {
		var a Admitted
		var second int64
		if err := rows.Scan(&a.Rule, &a.Key, &second, &a.LimitRateNanos, &a.LimitBurst, &a.Taken); err != nil {
			return nil, s.explain(doing, errors.Join(err, rows.Close()))
		}
		a.Time = time.Unix(second, 0).UTC()
		out = append(out, a)
	}
	return out, s.explain(doing, errors.Join(rows.Err(), rows.Close()))
}

// Accuracy is one second of one key: what was admitted, and what one bucket would have admitted of it.
type Accuracy struct {
	Admitted
	Allowed, Over float64
}

// Judge holds what was admitted, in the order of Store.Admitted, against one bucket for each key that is full when from
// begins. It lets the refill of a second count from the beginning of the second, so that a burst at any moment of it is
// not held against anybody.
func Judge(admitted []Admitted, from time.Time) []Accuracy {
	out := make([]Accuracy, 0, len(admitted))
	var level float64
	at := from
	for i, a := range admitted {
		rate, burst := float64(a.LimitRateNanos)/1e9, float64(a.LimitBurst)
		if i == 0 || cmp.Or(cmp.Compare(a.Rule, admitted[i-1].Rule), cmp.Compare(a.Key, admitted[i-1].Key)) != 0 {
			level, at = burst, from
		}
		level = min(burst, level+rate*a.Time.Sub(at).Seconds())
		at = a.Time.Add(time.Second)
		allowed := min(a.Taken, level+rate)
		level = min(burst, level+rate-allowed)
		out = append(out, Accuracy{Admitted: a, Allowed: allowed, Over: a.Taken - allowed})
	}
	return out
}

var accuracyTable = table[Accuracy]{"accuracy", []column[Accuracy]{
	col("ts", instant, func(r *Accuracy) time.Time { return r.Time }),
	col("rule", low, func(r *Accuracy) string { return r.Rule }),
	col("key", "String", func(r *Accuracy) string { return r.Key }),
	col("limit_rate_nanos", "Int64", func(r *Accuracy) int64 { return r.LimitRateNanos }),
	col("limit_burst", "Int64", func(r *Accuracy) int64 { return r.LimitBurst }),
	col("admitted", "Float64", func(r *Accuracy) float64 { return r.Taken }),
	col("allowed", "Float64", func(r *Accuracy) float64 { return r.Allowed }),
	col("over", "Float64", func(r *Accuracy) float64 { return r.Over }),
}}

// KeepAccuracy stores seconds that were judged. A second that is stored again replaces itself.
func (s *Store) KeepAccuracy(ctx context.Context, judged []Accuracy) error {
	return s.explain("store the accuracy", insert(ctx, s, accuracyTable, "", judged))
}

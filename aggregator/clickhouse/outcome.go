package clickhouse

import (
	"context"
	"errors"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
)

// Outcome is what a gateway did with requests: Rule refused them, or, when empty, they were allowed.
type Outcome struct{ Gateway, Rule string }

// Outcomes counts what the gateways whose names start with prefix did since from, from the ledger itself.
func (s *Store) Outcomes(ctx context.Context, prefix string, from time.Time) (map[Outcome]uint64, error) {
	const doing = "count requests by gateway and rule"
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, `SELECT gateway, rule, sum(allowed + rejected) FROM usage FINAL
		WHERE startsWith(gateway, {prefix:String}) AND ts >= fromUnixTimestamp64Milli({from:Int64}, 'UTC') GROUP BY gateway, rule`+final,
		ch.Named("prefix", prefix), ch.Named("from", millis(from)))
	if err != nil {
		return nil, s.explain(doing, err)
	}
	counts := map[Outcome]uint64{}
	for rows.Next() {
		var o Outcome
		var n uint64
		if err := rows.Scan(&o.Gateway, &o.Rule, &n); err != nil {
			return nil, s.explain(doing, errors.Join(err, rows.Close()))
		}
		counts[o] = n
	}
	return counts, s.explain(doing, errors.Join(rows.Err(), rows.Close()))
}

// Now is the server's clock.
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	var ms int64
	if err := s.conn.QueryRow(ctx, "SELECT toUnixTimestamp64Milli(now64(3))").Scan(&ms); err != nil {
		return time.Time{}, s.explain("ask for the time", err)
	}
	return time.UnixMilli(ms), nil
}

package clickhouse

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"

	embedded "github.com/weirhq/weir/internal/embedded/clickhouse"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
)

const (
	historyDays    = 30
	historyTenants = 10_000
	historyStep    = 1_000_000 // rows of one insert
)

var historyEnd = time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)

// fillHistory puts n rows of usage into the ledger and into the roll-ups what the views make of it: a month of 10,000
// tenants of which a tenth makes half of the traffic, on 3 routes each, by 8 gateways; one row in 16 is a refusal.
func fillHistory(tb testing.TB, s *Store, n uint64) {
	tb.Helper()
	views := []string{"usage_1m_mv", "usage_1h_mv", "usage_1d_mv"}
	for _, v := range views {
		run(tb, s, "DETACH TABLE "+v)
	}
	settings := ch.Settings{"max_insert_threads": 1, "max_partitions_per_insert_block": 100}
	for at := uint64(0); at < n; at += historyStep {
		step := min(historyStep, n-at)
		if err := s.conn.Exec(ch.Context(tb.Context(), ch.WithSettings(settings)), fmt.Sprintf(`INSERT INTO usage
			(ts, gateway, boot, seq, entry, tenant, route, rule, layer, allowed, rejected, cost, policy_version, received)
			WITH number + %d AS i, cityHash64(i) AS h, (h %% 1000003) / 1000003 AS u
			SELECT fromUnixTimestamp64Milli(%d + intDiv(i * %d, %d), 'UTC') AS at,
				concat('gw-', toString(i %% 8)), concat('01J', toString(i %% 8)), intDiv(i, 4000) + 1, toUInt32(intDiv(i, 8) %% 500),
				concat('tenant-', toString(toUInt32(%d * u * u * u))) AS tenant,
				concat('route-', toString(cityHash64(tenant) %% 18 + h %% 3)) AS r,
				if(h %% 16 = 0, 'contract', '') AS ru, ru,
				if(h %% 16 = 0, 0, 1 + h %% 97), if(h %% 16 = 0, 1 + h %% 7, 0), 1 + h %% 97, 7, at + toIntervalMillisecond(40)
			FROM numbers(%d)`, at, historyEnd.AddDate(0, 0, -historyDays).UnixMilli(), (historyDays*24*time.Hour).Milliseconds(), n, historyTenants, step)); err != nil {
			tb.Fatal(err)
		}
	}
	for _, v := range views {
		run(tb, s, "ATTACH TABLE "+v)
	}
	for i, from := range []string{"usage", "usage_1m", "usage_1h"} { // each from the finer one
		to := []string{"usage_1m", "usage_1h", "usage_1d"}[i]
		start := []string{"Minute", "Hour", "Day"}[i]
		for day := range historyDays {
			run(tb, s, fmt.Sprintf(`INSERT INTO %s SELECT toDateTime64(toStartOf%s(u.ts, 'UTC'), 3, 'UTC') AS ts, tenant, route, rule,
				sum(u.allowed), sum(u.rejected), sum(u.cost) FROM %s AS u WHERE u.ts >= '%s' AND u.ts < '%s' GROUP BY ts, tenant, route, rule`,
				to, start, from, historyEnd.AddDate(0, 0, day-historyDays).Format(time.DateTime), historyEnd.AddDate(0, 0, day+1-historyDays).Format(time.DateTime)))
		}
	}
}

// BenchmarkHistory100M says what the history costs at 100 million rows of usage (or WEIR_HISTORY_ROWS of them), generated
// in the engine. WEIR_HISTORY_DATA names a folder that keeps them for another run.
//
//	go test -run '^$' -bench History100M -benchtime 1x -timeout 60m ./aggregator/clickhouse
func BenchmarkHistory100M(b *testing.B) {
	rows := uint64(100_000_000)
	if v := os.Getenv("WEIR_HISTORY_ROWS"); v != "" {
		var err error
		if rows, err = strconv.ParseUint(v, 10, 64); err != nil {
			b.Fatal(err)
		}
	}
	dir := os.Getenv("WEIR_HISTORY_DATA")
	if dir == "" {
		dir = b.TempDir()
	}
	server, err := embedded.Start(embedded.Config{Dir: dir, Database: "weir"}, embeddedtest.Log(b))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := server.Stop(); err != nil {
			b.Error(err)
		}
	})
	s := open(b, server.URL()+"?read_timeout=30m")
	if start := time.Now(); number(b, s, "(SELECT count() FROM usage)") != rows {
		fillHistory(b, s, rows)
		b.Logf("filled %d rows in %s", rows, time.Since(start).Round(time.Second))
	}
	for waited := time.Now(); number(b, s, "(SELECT count() FROM system.mutations WHERE database = currentDatabase() AND NOT is_done)") > 0; time.Sleep(time.Second) {
		if time.Since(waited) > 30*time.Minute {
			b.Fatal("mutations do not end")
		}
	}
	bytes := func(table string) uint64 {
		return number(b, s, "(SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = currentDatabase() AND table = '"+table+"')")
	}
	for _, r := range append([]rollup{{name: "usage"}}, rollups...) {
		b.Logf("%s: %d rows, %d bytes", r.name, number(b, s, "(SELECT count() FROM "+r.name+")"), bytes(r.name))
	}
	perRow := float64(bytes("usage")) / float64(rows)

	hour := historyEnd.Add(-7 * time.Minute)
	second := hour.Add(-13 * time.Second) // begins and ends within a minute, so that both ends are read from the ledger
	month := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	for _, q := range []struct {
		name string
		ask  func() (found int, err error)
	}{
		{"top-last-hour", func() (int, error) {
			top, err := s.Top(b.Context(), hour.Add(-time.Hour), hour, 10, ByRequests)
			return len(top), err
		}},
		{"top-last-hour-to-the-second", func() (int, error) {
			top, err := s.Top(b.Context(), second.Add(-time.Hour), second, 10, ByRequests)
			return len(top), err
		}},
		{"tenant-month-by-day", func() (int, error) {
			u, err := s.Tenant(b.Context(), "tenant-42", month, month.AddDate(0, 1, 0), 24*time.Hour)
			return len(u.Points), err
		}},
	} {
		b.Run(q.name, func(b *testing.B) {
			var took []time.Duration
			for range max(b.N, 20) {
				start := time.Now()
				found, err := q.ask()
				if took = append(took, time.Since(start)); err != nil || found == 0 {
					b.Fatal(found, err)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "median-ms")
			b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "worst-ms")
			b.ReportMetric(0, "ns/op") // of twenty
		})
	}
	b.ReportMetric(perRow, "disk-B/row")
}

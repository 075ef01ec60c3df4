package clickhouse

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/faultproxy"
)

func rebuildAll(t *testing.T, s *Store) Rebuilt {
	t.Helper()
	var all Rebuilt
	for i, day := range []time.Time{time.Date(2026, 10, 31, 0, 0, 0, 0, time.UTC), time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC), noon} {
		r, err := s.Rebuild(t.Context(), day, day.Add(time.Minute), nil)
		if err != nil {
			t.Fatal(err)
		}
		all.Rows, all.Half, all.Equal = all.Rows+r.Rows, all.Half+r.Half, r.Equal && (i == 0 || all.Equal)
	}
	return all
}

// Whatever is wrong with the roll-ups (gone, doubled, too much, of nobody), a rebuild makes them what the ledger adds up to,
// a repetition finds nothing to do, and merges keep it so.
func TestRebuild(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, acrossMonths("a", 1, 200), reportAt("b", 1, noon, 100)))
	if r := rebuildAll(t, s); !r.Equal || r.Rows != 0 || r.Half != 0 {
		t.Fatalf("Rebuild of what is right = %+v", r)
	}
	for _, damage := range []string{
		"TRUNCATE TABLE usage_1m",
		"INSERT INTO usage_1h SELECT * FROM usage_1h",
		"INSERT INTO usage_1d (ts, tenant, route, rule, allowed, rejected, cost) VALUES ('2026-11-15 00:00:00', 'nobody', 'x', '', 5, 0, 5)",
		"ALTER TABLE usage_1h DROP PARTITION 202610",
		"INSERT INTO usage_1m SELECT ts, tenant, route, rule, allowed + 7, rejected, cost FROM usage_1m LIMIT 3",
	} {
		run(t, s, damage)
		gaps, err := s.Gaps(t.Context(), time.Date(2026, 10, 31, 0, 0, 0, 0, time.UTC), noon.Add(12*time.Hour))
		if err != nil || len(gaps) == 0 {
			t.Errorf("after %s: Gaps = %v, %v, want some", damage, gaps, err)
		}
		if r := rebuildAll(t, s); !r.Equal || r.Rows == 0 {
			t.Errorf("after %s: Rebuild = %+v", damage, r)
		}
		wantUsage(t, s, 300, 900)
		if r := rebuildAll(t, s); !r.Equal || r.Rows != 0 {
			t.Errorf("after %s: Rebuild again = %+v, want nothing to do", damage, r)
		}
	}
	for _, r := range rollups {
		run(t, s, "OPTIMIZE TABLE "+r.name+" FINAL")
		if got := number(t, s, "(SELECT countIf(allowed > 1e6 OR rejected > 1e6) FROM "+r.name+")"); got != 0 {
			t.Errorf("%s has %d rows below zero after a merge", r.name, got)
		}
	}
	wantUsage(t, s, 300, 900)
}

// meanwhile is a connection beside which something happens before it asks for the nth time about the minutes' roll-up.
type meanwhile struct {
	driver.Conn
	asked int
	then  func(asked int)
}

func (m *meanwhile) Query(ctx context.Context, sql string, args ...any) (driver.Rows, error) {
	if strings.Contains(sql, "FROM usage_1m") {
		m.asked++
		m.then(m.asked)
	}
	return m.Conn.Query(ctx, sql, args...)
}

// A batch that is between the ledger and the roll-ups when both are read is no gap, and neither is another one after it; what is
// there whenever it is looked at is one, also under such a batch.
func TestGapsAreThereToStay(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10)))
	direct := s.conn
	between := func(asked int) { // at each look another minute is not what the ledger adds up to
		run(t, s, "ALTER TABLE usage_1m DELETE WHERE tenant = 'between' SETTINGS mutations_sync = 2")
		run(t, s, fmt.Sprintf("INSERT INTO usage_1m (ts, tenant, route, rule, allowed, rejected, cost) VALUES ('2026-11-15 12:0%d:00', 'between', 'x', '', 1, 0, 1)", asked))
	}
	look := func() []Gap {
		t.Helper()
		conn := &meanwhile{Conn: direct, then: between}
		s.conn = conn
		defer func() { s.conn = direct }()
		gaps, err := s.Gaps(t.Context(), noon.Add(-time.Hour), noon.Add(time.Hour))
		if err != nil || conn.asked < 2 {
			t.Fatalf("Gaps = %v, %v after %d looks", gaps, err, conn.asked)
		}
		return gaps
	}
	if gaps := look(); len(gaps) != 0 {
		t.Errorf("Gaps beside inserts = %+v, want none", gaps)
	}
	run(t, s, "INSERT INTO usage_1m (ts, tenant, route, rule, allowed, rejected, cost) VALUES ('2026-11-15 12:00:00', 'nobody', 'x', '', 5, 0, 5)")
	if gaps := look(); len(gaps) != 1 || gaps[0].Tenant != "nobody" || gaps[0].Allowed != -5 {
		t.Errorf("Gaps = %+v, want that of nobody alone", gaps)
	}
}

// Late rows land in their own hour, in every table, whenever they come.
func TestLateRowsLandInTheirOwnHour(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10)))
	late := batchOf(2, reportAt("b", 1, noon.Add(-3*time.Hour), 10))
	late.Items[0].Arrived = noon.Add(40 * 24 * time.Hour)
	store(t, s, late)
	for hour, want := range map[time.Time]int64{noon.Add(-3 * time.Hour): 30, noon: 30} {
		got, err := s.Totals(t.Context(), hour, hour.Add(time.Hour))
		if err != nil || got.Requests != want {
			t.Errorf("Totals of %s = %+v, %v, want %d", hour, got, err, want)
		}
		top, err := s.Top(t.Context(), hour, hour.Add(time.Hour), 100, ByRequests)
		var sum int64
		for _, x := range top {
			sum += x.Requests
		}
		if err != nil || sum != want {
			t.Errorf("Top of %s adds up to %d, %v, want %d", hour, sum, err, want)
		}
	}
	if r := rebuildAll(t, s); !r.Equal || r.Rows != 0 {
		t.Errorf("Rebuild = %+v", r)
	}
}

// While reports come in, rebuilds go on; all their connections are cut again and again, some after a part of a request or of an
// answer, and rebuilds are interrupted as well. Each is repeated until it is through.
func TestRebuildWhileInsertsGoOn(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	direct := open(t, server.URL())
	u, err := url.Parse(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := faultproxy.Start("127.0.0.1:0", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	u.Host = proxy.Addr()
	s := unmigrated(t, u.String()+"?read_timeout=1s")
	run(t, direct, "INSERT INTO usage_1m (ts, tenant, route, rule, allowed, rejected, cost) VALUES ('2026-11-15 12:00:00', 'nobody', 'x', '', 5, 0, 5)")

	const batches, cuts = 30, 60
	var work sync.WaitGroup
	through := make(chan struct{}) // the connections stay as they are from here on
	work.Go(func() {
		defer close(through)
		for i := range int64(cuts) {
			if i%3 == 0 {
				proxy.Cut(i%2 == 0)
			} else {
				proxy.Set(faultproxy.Faults{CutAfter: [2]int64{faultproxy.Up: (i % 3) * i * 400, faultproxy.Down: (i % 2) * i * 40}})
			}
			time.Sleep(15 * time.Millisecond)
		}
		proxy.Set(faultproxy.Faults{})
	})
	var failed atomic.Int64
	var stored atomic.Uint64
	work.Go(func() {
		for n := uint64(1); n <= batches || !closed(through); n++ {
			for s.Reports(t.Context(), batchOf(n, reportAt("a", n, noon, 50))) != nil {
				if failed.Add(1) > 10_000 {
					t.Error("a batch does not store")
					return
				}
			}
			stored.Store(n)
		}
	})
	for n := 0; !closed(through); n++ {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(n%5)*40*time.Millisecond)
		if _, err := s.Rebuild(ctx, noon, noon.Add(time.Hour), nil); err != nil {
			failed.Add(1)
		}
		cancel()
	}
	work.Wait()
	if failed.Load() < 5 {
		t.Errorf("only %d attempts failed: the test has not tested much", failed.Load())
	}
	for number(t, direct, "(SELECT count() FROM system.processes WHERE query_kind = 'Insert')") > 0 { // of a connection that was cut
		time.Sleep(10 * time.Millisecond)
	}
	if r, err := direct.Rebuild(t.Context(), noon, noon.Add(time.Hour), nil); err != nil || !r.Equal {
		t.Errorf("Rebuild = %+v, %v", r, err)
	}
	wantUsage(t, direct, 50*stored.Load(), 150*stored.Load())
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A batch of which a part is stored will come again: its rows are not rebuilt, or they would count twice then.
func TestRebuildLeavesHalfStoredReportsAlone(t *testing.T) {
	s := fresh(t)
	b := batchOf(1, reportAt("a", 1, noon, 10))
	// As after a crash of the server between the ledger and the roll-up.
	run(t, s, "DETACH TABLE usage_1m_mv")
	run(t, s, "ALTER TABLE reports ADD CONSTRAINT never CHECK 0")
	if err := s.Reports(t.Context(), b); err == nil {
		t.Fatal("Reports = nil though the report cannot be noted")
	}
	run(t, s, "ALTER TABLE reports DROP CONSTRAINT never")
	run(t, s, "ATTACH TABLE usage_1m_mv")

	var r Rebuilt
	half := rebuild{s: s, run: "test", tries: 1, whole: map[time.Time]bool{}, out: &r}
	if err := half.slice(t.Context(), rollups[2], noon, noon.Add(time.Hour)); err != nil || r.Rows != 0 || r.Half != 1 || r.Equal || len(r.Gaps) == 0 {
		t.Errorf("Rebuild = %+v, %v, want no rows while a report is half stored", r, err)
	}
	store(t, s, b)
	if r, err := s.Rebuild(t.Context(), noon, noon.Add(time.Hour), nil); err != nil || !r.Equal {
		t.Errorf("Rebuild = %+v, %v", r, err)
	}
	wantUsage(t, s, 10, 30)
}

// What reports prove is not taken out of the roll-ups when the ledger has lost it: not of a day that has other usage, not of one that
// has none, not where the ledger was cut on purpose, and not when it is mended unasked. What is doubled on other days, or what a roll-up
// lacks, is put right beside it.
func TestRebuildLeavesWhatTheLedgerLost(t *testing.T) {
	s := fresh(t)
	day := 24 * time.Hour
	before := reportAt("a", 1, noon.Add(-2*day), 10) // arrives with the others: its usage is late
	store(t, s, batchOf(1, before, reportAt("a", 2, noon, 10), reportAt("a", 3, noon.Add(30*time.Second), 10)))
	after := batchOf(4, reportAt("b", 1, noon.Add(3*day), 10))
	after.Items[0].Arrived = noon.Add(3*day + time.Hour)
	store(t, s, after)
	sums := func() (out [3]uint64) {
		for i, r := range rollups {
			out[i] = number(t, s, "(SELECT sum(allowed + rejected) FROM "+r.name+")")
		}
		return out
	}
	whole := sums()
	rebuild := func() Rebuilt {
		t.Helper()
		r, err := s.Rebuild(t.Context(), noon.Add(-3*day), noon.Add(4*day), nil)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := rebuild(); !r.Equal || r.Rows != 0 {
		t.Fatalf("Rebuild of what is right = %+v", r)
	}
	run(t, s, "DELETE FROM usage WHERE seq = 3 AND entry < 5 SETTINGS mutations_sync = 2")
	r := rebuild()
	if r.Equal || r.Rows != 0 || len(r.Short) != 1 || r.Short[0] != (Short{noon.Truncate(day), 1, 15}) || len(r.Gaps) == 0 {
		t.Errorf("Rebuild after a loss = %+v, want it told and nothing put right", r)
	}
	run(t, s, "DELETE FROM usage WHERE seq = 3 OR ts < '2026-11-14' SETTINGS mutations_sync = 2")
	if r := rebuild(); r.Equal || r.Rows != 0 || len(r.Short) != 1 || r.Short[0].Reports != 2 || r.Short[0].Requests != 60 {
		t.Errorf("Rebuild after the loss of whole reports = %+v, want it told and nothing put right", r)
	}
	if got := sums(); got != whole {
		t.Errorf("the roll-ups have %d, want %d as before", got, whole)
	}

	// What can have nothing to do with it.
	run(t, s, "INSERT INTO usage_1h SELECT * FROM usage_1h WHERE ts >= '2026-11-18'")
	run(t, s, "DELETE FROM usage_1d WHERE ts >= '2026-11-15' AND ts < '2026-11-16' SETTINGS mutations_sync = 2")
	if r := rebuild(); r.Equal || r.Rows == 0 {
		t.Errorf("Rebuild = %+v, want the rest put right", r)
	}
	want := whole
	want[0] -= 30 // which only the others have by now
	if got := sums(); got != want {
		t.Errorf("the roll-ups have %d, want %d", got, want)
	}

	// Nobody who mends them unasked takes it away.
	if err := s.mendRollups(t.Context(), []stored{{Delivered: batchOf(1, reportAt("a", 3, noon, 10)).Items[0]}}); err != nil {
		t.Error(err)
	}
	if got := sums(); got != want {
		t.Errorf("mended, the roll-ups have %d, want %d", got, want)
	}

	// Cut on purpose, with what proves it or without.
	for _, table := range []string{"usage", "reports"} {
		run(t, s, "ALTER TABLE "+table+" DROP PARTITION 202611")
		if r := rebuild(); r.Equal || r.Rows != 0 || (len(r.Short) == 0) != (table == "reports") || (r.Bare == 0) != (table == "usage") {
			t.Errorf("Rebuild of a month that was cut from %s = %+v", table, r)
		}
		if got := sums(); got != want {
			t.Errorf("with %s cut, the roll-ups have %d, want %d", table, got, want)
		}
	}
	// Who knows better empties the roll-up.
	run(t, s, "ALTER TABLE usage_1m DROP PARTITION 202611")
	run(t, s, "ALTER TABLE usage_1h DROP PARTITION 202611")
	run(t, s, "ALTER TABLE usage_1d DROP PARTITION 202611")
	if r := rebuild(); !r.Equal {
		t.Errorf("Rebuild of nothing = %+v", r)
	}
}

// A rebuild of all time asks about the days of which there is anything, in the ledger or in a roll-up.
func TestRebuildOfAllTime(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10), reportAt("b", 1, noon.Add(-400*24*time.Hour), 10)))
	run(t, s, "DELETE FROM usage WHERE gateway = 'b' SETTINGS mutations_sync = 2")
	run(t, s, "INSERT INTO usage_1m (ts, tenant, route, rule, allowed, rejected, cost) VALUES ('2026-11-16 00:00:00', 'nobody', 'x', '', 5, 0, 5)")
	var days []string
	r, err := s.Rebuild(t.Context(), time.Unix(0, 0), noon.Add(400*24*time.Hour), func(day time.Time, _ uint64) { days = append(days, day.Format(time.DateOnly)) })
	if want := "[2025-10-11 2026-11-15 2026-11-16]"; err != nil || fmt.Sprint(days) != want {
		t.Errorf("Rebuild = %+v, %v, of the days %v, want %s", r, err, days, want)
	}
}

// What the ledger may have lost stays in the roll-ups, whoever mends them and whatever else is gone: the tables with all that tells of
// it, a day that was cut by hand, a column. What one roll-up alone has too much is taken out all the same, beside it.
func TestRebuildLeavesWhatRollupsVouchFor(t *testing.T) {
	do := func(t *testing.T, s *Store, sqls ...string) {
		for _, sql := range sqls {
			run(t, s, sql+" SETTINGS mutations_sync = 2")
		}
	}
	migrate := func(t *testing.T, s *Store) {
		if err := s.Migrate(t.Context(), func(string) {}); err != nil {
			t.Fatal(err)
		}
	}
	late := func(t *testing.T, s *Store, after time.Duration) {
		b := batchOf(100, reportAt("late", 1, noon, 1))
		b.Items[0].Arrived = b.Items[0].Arrived.Add(after)
		store(t, s, b)
	}
	all := []string{"usage_1d", "usage_1h", "usage_1m"}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, s *Store) // after reports of 90 requests are stored
		more   uint64                       // requests that come in with it
		keep   []string                     // roll-ups that have it all
		says   func(r Rebuilt) bool
	}{
		{"tables dropped, and a batch fails", func(t *testing.T, s *Store) {
			do(t, s, "DROP TABLE usage", "DROP TABLE reports")
			b := batchOf(10, reportAt("a", 4, noon, 10))
			if err := s.Reports(t.Context(), b); err == nil {
				t.Fatal("Reports = nil without tables")
			}
			migrate(t, s)
			store(t, s, b)
		}, 30, all, func(r Rebuilt) bool { return !r.Remade.IsZero() }},
		{"tables emptied, and a batch fails", func(t *testing.T, s *Store) {
			do(t, s, "TRUNCATE TABLE usage", "TRUNCATE TABLE reports")
			s.Doubt()
			store(t, s, batchOf(10, reportAt("a", 4, noon, 10)))
		}, 30, all, func(r Rebuilt) bool { return r.Vouched > 0 }},
		{"cut by hand, and a late report", func(t *testing.T, s *Store) {
			do(t, s, "DELETE FROM usage WHERE ts < '2026-11-16'", "DELETE FROM reports WHERE received < '2026-11-16'")
			late(t, s, 24*time.Hour)
		}, 3, all, func(r Rebuilt) bool { return r.Vouched > 0 }},
		{"all cut but days, and a late report", func(t *testing.T, s *Store) {
			for _, table := range []string{"usage", "reports", "usage_1m", "usage_1h"} {
				do(t, s, "ALTER TABLE "+table+" DROP PARTITION 202611")
			}
			late(t, s, 40*24*time.Hour)
		}, 3, all[:1], func(r Rebuilt) bool { return r.Bare > 0 }},
		{"all dropped but days, and a late report", func(t *testing.T, s *Store) {
			do(t, s, "DROP TABLE usage", "DROP TABLE reports", "DROP TABLE usage_1m", "DROP TABLE usage_1h")
			migrate(t, s)
			late(t, s, 0)
		}, 3, all[:1], func(r Rebuilt) bool { return !r.Remade.IsZero() }},
		{"column cost dropped", func(t *testing.T, s *Store) {
			do(t, s, "DROP TABLE usage_1m_mv", "DROP TABLE usage_1h_mv", "DROP TABLE usage_1d_mv", "ALTER TABLE usage DROP COLUMN cost")
			migrate(t, s)
			s.Doubt()
			late(t, s, 0)
		}, 3, all, func(r Rebuilt) bool { return !r.Remade.IsZero() }},
		{"column cost made 0", func(t *testing.T, s *Store) {
			do(t, s, "ALTER TABLE usage UPDATE cost = 0 WHERE 1")
			s.Doubt()
			late(t, s, 0)
		}, 3, all, func(r Rebuilt) bool { return r.Vouched > 0 }},
		{"column route dropped", func(t *testing.T, s *Store) {
			do(t, s, "DROP TABLE usage_1m_mv", "DROP TABLE usage_1h_mv", "DROP TABLE usage_1d_mv", "ALTER TABLE usage DROP COLUMN route")
			migrate(t, s)
			s.Doubt()
			late(t, s, 0)
		}, 3, all, func(r Rebuilt) bool { return !r.Remade.IsZero() }},
		{"column route made empty", func(t *testing.T, s *Store) {
			do(t, s, "ALTER TABLE usage UPDATE route = '' WHERE 1")
			s.Doubt()
			late(t, s, 0)
		}, 3, all, func(r Rebuilt) bool { return r.Vouched > 0 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := fresh(t)
			store(t, s, batchOf(1, reportAt("a", 1, noon, 10), reportAt("a", 2, noon.Add(time.Minute), 10), reportAt("b", 1, noon.Add(-2*time.Hour), 10)))
			c.damage(t, s)
			want := func(when string) {
				t.Helper()
				for _, table := range c.keep {
					for column, want := range map[string]uint64{"allowed + rejected": 90 + c.more, "cost": (90 + c.more) / 3 * 4} {
						if got := number(t, s, "(SELECT sumIf("+column+", route = 'orders') FROM "+table+")"); got != want {
							t.Errorf("%s: %s has %s %d, want %d", when, table, column, got, want)
						}
						if got := number(t, s, "(SELECT sum("+column+") FROM "+table+")"); got != want {
							t.Errorf("%s: %s has %s %d of all routes, want %d", when, table, column, got, want)
						}
					}
				}
			}
			want("damaged")
			rebuild := func() Rebuilt {
				t.Helper()
				r, err := s.Rebuild(t.Context(), noon, noon.Add(time.Hour), nil)
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			if r := rebuild(); r.Equal || !c.says(r) {
				t.Errorf("Rebuild = %+v, want it told", r)
			}
			want("rebuilt")
			if r := rebuild(); r.Equal || r.Rows != 0 {
				t.Errorf("Rebuild again = %+v, want nothing to do", r)
			}
			if r := rebuild(); r.Vouched == 0 { // where marks stand in the way, nothing is taken out at all
				return
			}
			run(t, s, "INSERT INTO usage_1h (ts, tenant, route, rule, allowed, rejected, cost) VALUES ('2026-11-15 12:00:00', 'nobody', 'orders', '', 5, 0, 5)")
			if r := rebuild(); r.Equal || r.Rows != 1 {
				t.Errorf("Rebuild with a sum of nobody in one roll-up = %+v, want that put right", r)
			}
			want("rebuilt with a sum of nobody")
		})
	}
}

// A batch that a killed server has left twice in every roll-up is taken out of them when it is done again, and it alone: a rebuild that
// knows of no batch does not tell it from what the ledger has lost.
func TestMendWhatAllRollupsHaveTwice(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10)))
	b := batchOf(2, reportAt("a", 2, noon.Add(time.Second), 10), reportAt("a", 3, noon.Add(time.Minute), 10))
	store(t, s, b)
	for _, insert := range []string{"FROM usage WHERE seq = 2", "FROM usage WHERE seq >= 2"} {
		run(t, s, "CREATE TABLE copy AS usage")
		run(t, s, "INSERT INTO copy SELECT * "+insert)
		for table, grain := range map[string]string{"usage_1d": "Day", "usage_1h": "Hour", "usage_1m": "Minute"} {
			run(t, s, "INSERT INTO "+table+" SELECT toDateTime64(toStartOf"+grain+"(u.ts, 'UTC'), 3, 'UTC') AS at, tenant, route, rule, sum(allowed), sum(rejected), sum(cost) FROM copy AS u GROUP BY at, tenant, route, rule")
		}
		run(t, s, "DROP TABLE copy")
		if r, err := s.Rebuild(t.Context(), noon, noon.Add(time.Hour), nil); err != nil || r.Equal || r.Rows != 0 || r.Vouched == 0 {
			t.Errorf("Rebuild = %+v, %v, want it told", r, err)
		}
		s.Doubt()
		direct := s.conn
		s.conn = &cutOnce{Conn: direct, asked: "SELECT DISTINCT day"} // as it begins to mend them
		store(t, s, b)
		s.conn = direct
		wantUsage(t, s, 30, 90)
	}
}

// cutOnce is a connection that breaks when it is first asked that.
type cutOnce struct {
	driver.Conn
	asked string
	cut   bool
}

func (c *cutOnce) Query(ctx context.Context, sql string, args ...any) (driver.Rows, error) {
	if !c.cut && strings.Contains(sql, c.asked) {
		c.cut = true
		return nil, io.EOF
	}
	return c.Conn.Query(ctx, sql, args...)
}

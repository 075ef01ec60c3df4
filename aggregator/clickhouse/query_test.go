package clickhouse

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// history is a store with random usage of three days, and the naive twin that answers from the same reports.
func history(t *testing.T) (*Store, []schemas.Usage) {
	s := fresh(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	day := noon.Truncate(24 * time.Hour)
	var all []schemas.Usage
	for seq := range uint64(6) {
		r := &schemas.Report{Gateway: fmt.Sprintf("gw-%d", seq%3), Boot: "b", Seq: seq + 1}
		for range 400 {
			u := schemas.Usage{Time: day.Add(time.Duration(rnd.Int64N(int64(72 * time.Hour)))).Truncate(time.Millisecond),
				Tenant: fmt.Sprintf("t%d", rnd.IntN(20)), Route: []string{"export", "orders", "other"}[rnd.IntN(3)], Cost: uint64(rnd.IntN(90))}
			if n := uint64(rnd.IntN(50)); rnd.IntN(4) > 0 {
				u.Allowed = n
			} else {
				u.Rejected, u.Rule, u.Layer = n, []string{"contract", "guard"}[rnd.IntN(2)], "contract"
			}
			r.Usage = append(r.Usage, u)
		}
		all = append(all, r.Usage...)
		store(t, s, batchOf(seq+1, r))
	}
	return s, all
}

func between(all []schemas.Usage, from, to time.Time) (in []schemas.Usage) {
	for _, u := range all {
		if !u.Time.Before(from) && u.Time.Before(to) {
			in = append(in, u)
		}
	}
	return in
}

func sum(all []schemas.Usage) (c Counts) {
	for _, u := range all {
		c.add(Counts{int64(u.Allowed), int64(u.Rejected), int64(u.Cost)})
	}
	return c
}

// ranges are read from the days, the hours, the minutes and the ledger, and from all of them; some begin and end anywhere.
func ranges() [][2]time.Time {
	day := noon.Truncate(24 * time.Hour)
	out := [][2]time.Time{
		{day, day.Add(48 * time.Hour)},
		{day.Add(5 * time.Hour), day.Add(40 * time.Hour)},
		{day.Add(61 * time.Minute), day.Add(2000 * time.Minute)},
		{day.Add(1234567 * time.Millisecond), day.Add(99999999 * time.Millisecond)},
		{day.Add(1234567 * time.Millisecond), day.Add(61*time.Hour + 1)},
		{day.Add(time.Hour), day.Add(time.Hour)},
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	for i := range 12 {
		unit := []time.Duration{time.Second, time.Millisecond}[i%2]
		from := day.Add(time.Duration(rnd.Int64N(int64(70*time.Hour/unit))) * unit)
		out = append(out, [2]time.Time{from, from.Add(time.Duration(rnd.Int64N(int64(12*time.Hour/unit))) * unit)})
	}
	return out
}

func TestCover(t *testing.T) {
	day := noon.Truncate(24 * time.Hour)
	at := func(clock string) time.Time {
		t.Helper()
		d, err := time.Parse("2 15:04:05.000", clock)
		if err != nil {
			t.Fatal(err)
		}
		return day.AddDate(0, 0, d.Day()-day.Day()).Add(d.Sub(d.Truncate(24 * time.Hour)))
	}
	for _, tt := range []struct{ from, to, want string }{
		{"15 00:00:00.000", "17 00:00:00.000", "usage_1d 15 00:00:00.000"},
		{"15 01:00:00.000", "17 02:00:00.000", "usage_1h 15 01:00:00.000, usage_1d 16 00:00:00.000, usage_1h 17 00:00:00.000"},
		{"15 23:58:00.500", "16 00:01:00.000", "usage FINAL 15 23:58:00.500, usage_1m 15 23:59:00.000"},
		{"15 23:58:59.500", "18 01:01:00.001", "usage FINAL 15 23:58:59.500, usage_1m 15 23:59:00.000, usage_1d 16 00:00:00.000, usage_1h 18 00:00:00.000, usage_1m 18 01:00:00.000, usage FINAL 18 01:01:00.000"},
		{"15 10:00:10.000", "15 10:00:50.000", "usage FINAL 15 10:00:10.000"},
		{"15 10:00:00.000", "15 10:00:00.000", "usage FINAL 15 10:00:00.000"},
	} {
		var got []string
		next := at(tt.from)
		for _, g := range cover(at(tt.from), at(tt.to), rollups) {
			got = append(got, g.table+g.from.Format(" 2 15:04:05.000"))
			if !g.from.Equal(next) {
				t.Errorf("cover(%s, %s): a gap at %s", tt.from, tt.to, next)
			}
			next = g.to
		}
		if strings.Join(got, ", ") != tt.want || !next.Equal(at(tt.to)) {
			t.Errorf("cover(%s, %s) = %q to %s, want %q", tt.from, tt.to, strings.Join(got, ", "), next, tt.want)
		}
	}
	for _, tt := range []struct {
		from time.Time
		step time.Duration
		want int
	}{{day, 24 * time.Hour, 3}, {day, time.Hour, 2}, {noon, 24 * time.Hour, 2}, {day, 90 * time.Minute, 1}, {day, 90 * time.Second, 0}, {day.Add(1), time.Hour, 0}} {
		if got := forSteps(tt.from, tt.step); len(got) != tt.want {
			t.Errorf("forSteps(%s, %s) = %v, want %d", tt.from, tt.step, got, tt.want)
		}
	}
}

func TestTotalsTopAndTenantMatchTheNaiveTwin(t *testing.T) {
	s, all := history(t)
	for _, r := range ranges() {
		in := between(all, r[0], r[1])
		src := r[0].Format(time.StampMilli) + " to " + r[1].Format(time.StampMilli)

		total, err := s.Totals(t.Context(), r[0], r[1])
		if err != nil {
			t.Fatal(err)
		}
		if want := (Totals{From: r[0], To: r[1], Requests: sum(in).Requests(), Counts: sum(in)}); total != want {
			t.Errorf("Totals of %s = %+v, want %+v", src, total, want)
		}

		byTenant := map[string][]schemas.Usage{}
		for _, u := range in {
			byTenant[u.Tenant] = append(byTenant[u.Tenant], u)
		}
		for by, key := range map[string]func(Counts) int64{
			ByRequests: Counts.Requests,
			ByAllowed:  func(c Counts) int64 { return c.Allowed },
			ByRejected: func(c Counts) int64 { return c.Rejected },
			ByCost:     func(c Counts) int64 { return c.Cost },
		} {
			want := []TenantTotal{}
			for name, us := range byTenant {
				want = append(want, TenantTotal{name, sum(us).Requests(), sum(us)})
			}
			slices.SortFunc(want, func(a, b TenantTotal) int {
				if x, y := key(a.Counts), key(b.Counts); x != y {
					return int(y - x)
				}
				return strings.Compare(a.Tenant, b.Tenant)
			})
			if len(want) > 5 {
				want = want[:5]
			}
			got, err := s.Top(t.Context(), r[0], r[1], 5, by)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("Top of %s by %s = %+v, %v, want %+v", src, by, got, err, want)
			}
		}

		for _, step := range []time.Duration{24 * time.Hour, time.Hour, 90 * time.Second} {
			got, err := s.Tenant(t.Context(), "t3", r[0], r[1], step)
			if err != nil {
				t.Fatal(err)
			}
			mine := byTenant["t3"]
			if got.Counts != sum(mine) || got.Requests != sum(mine).Requests() {
				t.Errorf("Tenant of %s, step %s: in total %+v, want %+v", src, step, got.Counts, sum(mine))
			}
			want := map[TenantPoint]Counts{} // by time, route and rule
			routes := map[RouteTotal]Counts{}
			for _, u := range mine {
				at := r[0].Add(u.Time.Sub(r[0]).Truncate(step))
				c := want[TenantPoint{at, RouteTotal{Route: u.Route, Rule: u.Rule}}]
				c.add(Counts{int64(u.Allowed), int64(u.Rejected), int64(u.Cost)})
				want[TenantPoint{at, RouteTotal{Route: u.Route, Rule: u.Rule}}] = c
				c = routes[RouteTotal{Route: u.Route, Rule: u.Rule}]
				c.add(Counts{int64(u.Allowed), int64(u.Rejected), int64(u.Cost)})
				routes[RouteTotal{Route: u.Route, Rule: u.Rule}] = c
			}
			if len(got.Points) != len(want) || len(got.Routes) != len(routes) {
				t.Errorf("Tenant of %s, step %s: %d points and %d routes, want %d and %d", src, step, len(got.Points), len(got.Routes), len(want), len(routes))
			}
			for _, p := range got.Points {
				if w := want[TenantPoint{p.Time, RouteTotal{Route: p.Route, Rule: p.Rule}}]; w != p.Counts {
					t.Errorf("Tenant of %s, step %s: point %+v, want %+v", src, step, p, w)
				}
			}
			for _, p := range got.Routes {
				if w := routes[RouteTotal{Route: p.Route, Rule: p.Rule}]; w != p.Counts {
					t.Errorf("Tenant of %s, step %s: route %+v, want %+v", src, step, p, w)
				}
			}
		}
	}
}

// Names are data, never SQL and never text that the server reads in its own way.
func TestNamesAreParameters(t *testing.T) {
	s := fresh(t)
	evil := []string{`'; DROP TABLE usage; --`, "tab\tnew\nline\\", `{a:String}`, "", "中文 ünï", `\N`, "NULL"}
	r := reportAt("a", 1, noon, len(evil))
	for i, name := range evil {
		r.Usage[i].Tenant, r.Usage[i].Route = name, name
		r.Tokens = append(r.Tokens, schemas.Tokens{Rule: "r" + name, Key: name, Tenant: name, Capacity: 9, TokensLast: int64(i)})
	}
	store(t, s, batchOf(1, r))
	for i, name := range evil {
		got, err := s.Tenant(t.Context(), name, noon, noon.Add(time.Hour), time.Hour)
		if err != nil || got.Requests != 3 || got.Routes[0].Route != name {
			t.Errorf("Tenant(%q) = %+v, %v, want 3 requests", name, got, err)
		}
		curve, err := s.Curve(t.Context(), CurveQuery{Rule: "r" + name, Key: name, From: noon, To: noon.Add(time.Hour), Step: time.Hour})
		if err != nil || len(curve) != 1 || curve[0].Last != int64(i) {
			t.Errorf("Curve(%q) = %+v, %v, want one point of %d", name, curve, err, i)
		}
	}
}

// The curve of a key is what its gateways had last, added up, and the least that any of them had.
func TestCurve(t *testing.T) {
	s := fresh(t)
	bucket := func(gw string, seq uint64, at time.Duration, key string, lo, last, capacity int64) *schemas.Report {
		return &schemas.Report{Gateway: gw, Boot: "b", Seq: seq, SealedAt: noon.Add(at), Tokens: []schemas.Tokens{
			{Rule: "contract", Layer: "contract", Key: key, Tenant: "acme", Mode: "enforce", RateNanos: 1_500_000_000, Capacity: capacity,
				LimitRateNanos: 3e9, LimitBurst: 20, Taken: 2, Refused: 1, Cum: seq, TokensMin: lo, TokensLast: last, Window: time.Second}}}
	}
	store(t, s, batchOf(1,
		bucket("gw-1", 1, 0, "acme", 5, 8, 10),
		bucket("gw-1", 2, 30*time.Second, "acme", 3, 4, 10),
		bucket("gw-2", 1, 10*time.Second, "acme", 6, 7, 10),
		bucket("gw-1", 3, 61*time.Second, "acme", -2, 1, 12),
		bucket("gw-1", 4, 62*time.Second, "acme/10.0.0.1", 0, 5, 6),
		bucket("gw-3", 1, 10*time.Minute, "acme", 1, 1, 1)))
	q := CurveQuery{Rule: "contract", Key: "acme", From: noon, To: noon.Add(5 * time.Minute), Step: time.Minute}
	first := CurvePoint{Time: noon, Last: 11, Capacity: 20, Min: 3, Taken: 6, Refused: 3, Buckets: 2}
	second := CurvePoint{Time: noon.Add(time.Minute), Last: 1, Capacity: 12, Min: -2, Taken: 2, Refused: 1, Buckets: 1}
	got, err := s.Curve(t.Context(), q)
	if err != nil || !reflect.DeepEqual(got, []CurvePoint{first, second}) {
		t.Errorf("Curve of the key = %+v, %v", got, err)
	}
	q.Key, q.Tenant = "", "acme"
	second = CurvePoint{Time: noon.Add(time.Minute), Last: 6, Capacity: 18, Min: -2, Taken: 4, Refused: 2, Buckets: 2}
	got, err = s.Curve(t.Context(), q)
	if err != nil || !reflect.DeepEqual(got, []CurvePoint{first, second}) {
		t.Errorf("Curve of the tenant = %+v, %v", got, err)
	}
	huge := func(gw string) *schemas.Report {
		r := bucket(gw, 1, 0, "huge", math.MinInt64, math.MaxInt64, math.MaxInt64)
		r.Tokens[0].Tenant, r.Tokens[0].Taken, r.Tokens[0].Refused, r.Tokens[0].Cum = "huge", schemas.MaxCount, schemas.MaxCount, schemas.MaxCount
		for len(r.Tokens) < 3000 {
			r.Tokens = append(r.Tokens, r.Tokens[0])
		}
		return r
	}
	store(t, s, batchOf(10, huge("gw-8"), huge("gw-9")))
	q.Tenant = "huge" // numbers that no sum holds do not come out as small or negative ones
	want := CurvePoint{Time: noon, Last: math.MaxInt64, Capacity: math.MaxInt64, Min: math.MinInt64, Taken: math.MaxInt64, Refused: math.MaxInt64, Buckets: 2}
	if got, err = s.Curve(t.Context(), q); err != nil || !reflect.DeepEqual(got, []CurvePoint{want}) {
		t.Errorf("Curve of huge numbers = %+v, %v, want %+v", got, err, want)
	}
	if uneven, err := s.UnevenTokens(t.Context(), noon, noon.Add(time.Hour)); err != nil || !slices.ContainsFunc(uneven, func(u Uneven) bool { return u.Gateway == "gw-9" && u.Have == math.MaxInt64 }) {
		t.Errorf("UnevenTokens = %+v, %v, want that of gw-9 taken without end", uneven, err)
	}
	run(t, s, "ALTER TABLE tokens DELETE WHERE tenant = 'huge' SETTINGS mutations_sync = 2")
	q.Tenant = "nobody"
	if got, err = s.Curve(t.Context(), q); err != nil || len(got) != 0 {
		t.Errorf("Curve of nobody = %+v, %v", got, err)
	}
	if got := number(t, s, "(SELECT countIf(rate = 1.5) FROM tokens)"); got != 6 {
		t.Errorf("%d of 6 rows have the rate 1.5", got)
	}
}

func TestQueriesRefuseNonsense(t *testing.T) {
	s := unmigrated(t, "http://127.0.0.1:1/weir") // nothing is asked
	if _, err := s.Top(t.Context(), noon, noon, 5, "password"); err == nil || !strings.Contains(err.Error(), "want requests, allowed, rejected or cost") {
		t.Errorf("Top by password = %v", err)
	}
	if _, err := s.Top(t.Context(), noon, noon, 0, ByCost); err == nil {
		t.Error("Top 0 = nil")
	}
	for _, step := range []time.Duration{0, -time.Second, time.Microsecond, 1500 * time.Microsecond, time.Millisecond} {
		if _, err := s.Tenant(t.Context(), "a", noon, noon.Add(time.Hour), step); err == nil {
			t.Errorf("Tenant in steps of %s = nil", step)
		}
	}
	if _, err := s.Curve(t.Context(), CurveQuery{Rule: "r", From: noon, To: noon.Add(-1), Step: time.Minute}); err == nil || !strings.Contains(err.Error(), "is after") {
		t.Errorf("Curve backwards = %v", err)
	}
}

func TestAnswersAsJSON(t *testing.T) {
	b, err := json.Marshal([]any{
		Totals{From: noon, To: noon, Requests: 3, Counts: Counts{1, 2, 4}},
		TenantTotal{"acme", 3, Counts{1, 2, 4}},
		TenantUsage{Tenant: "acme", From: noon, To: noon, StepMS: 60000, Requests: 1, Counts: Counts{1, 0, 1},
			Routes: []RouteTotal{{"orders", "", Counts{1, 0, 1}}}, Points: []TenantPoint{{noon, RouteTotal{"orders", "", Counts{1, 0, 1}}}}},
		CurvePoint{Time: noon, Last: 1, Capacity: 2, Min: 0, Taken: 3, Refused: 4, Buckets: 5},
	})
	want := `[{"from":"2026-11-15T12:00:00Z","to":"2026-11-15T12:00:00Z","requests":3,"allowed":1,"rejected":2,"cost":4},` +
		`{"tenant":"acme","requests":3,"allowed":1,"rejected":2,"cost":4},` +
		`{"tenant":"acme","from":"2026-11-15T12:00:00Z","to":"2026-11-15T12:00:00Z","step_ms":60000,"requests":1,"allowed":1,"rejected":0,"cost":1,` +
		`"routes":[{"route":"orders","rule":"","allowed":1,"rejected":0,"cost":1}],"points":[{"ts":"2026-11-15T12:00:00Z","route":"orders","rule":"","allowed":1,"rejected":0,"cost":1}]},` +
		`{"ts":"2026-11-15T12:00:00Z","tokens_last":1,"capacity":2,"tokens_min":0,"taken":3,"refused":4,"buckets":5}]`
	if err != nil || string(b) != want {
		t.Errorf("JSON = %s, %v, want %s", b, err, want)
	}
}

// B036: an instant is the same instant whatever zones the process and the server live in. The test runs itself as a
// process of each zone, since a Go process reads its own zone once.
func TestB036TimeZones(t *testing.T) {
	const inner, serverZone = "WEIR_TEST_B036", "WEIR_TEST_B036_SERVER"
	if os.Getenv(inner) != "" {
		_, _ = time.Now().Zone()              // reads this process's zone
		t.Setenv("TZ", os.Getenv(serverZone)) // the server is a child of this process
		checkB036(t, os.Getenv(serverZone))
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, zones := range [][2]string{{"Asia/Shanghai", "America/New_York"}, {"UTC", "UTC"}} {
		cmd := exec.Command(self, "-test.run=^TestB036TimeZones$", "-test.v")
		cmd.Env = append(os.Environ(), inner+"=1", serverZone+"="+zones[0], "TZ="+zones[1])
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "ms of "+zones[1]) {
			t.Errorf("server in %s, process in %s: %v\n%s", zones[0], zones[1], err, out)
		}
	}
}

func checkB036(t *testing.T, serverZone string) {
	s := fresh(t)
	var zone string
	if err := s.conn.QueryRow(t.Context(), "SELECT timezone()").Scan(&zone); err != nil || zone != serverZone {
		t.Fatalf("the server's time zone is %q, %v, want %s", zone, err, serverZone)
	}
	r := reportAt("a", 1, noon, 2)
	r.Usage[0].Time = time.Date(2025, 7, 1, 0, 30, 0, 129e6, time.UTC).Local()
	r.Usage[1].Time = time.Date(2025, 6, 30, 16, 30, 0, 0, time.UTC).Local()
	r.Usage[0].Allowed, r.Usage[1].Allowed = 1, 1
	store(t, s, batchOf(1, r))
	if got := number(t, s, "(SELECT max(toUnixTimestamp64Milli(ts)) FROM usage)"); got != 1751329800129 {
		t.Errorf("ts = %d, want 1751329800129", got)
	}
	for month, want := range map[time.Month]int64{time.June: 1, time.July: 1, time.August: 0} {
		from := time.Date(2025, month, 1, 0, 0, 0, 0, time.UTC)
		total, err := s.Totals(t.Context(), from.Local(), from.AddDate(0, 1, 0).Local())
		if err != nil || total.Requests != want {
			t.Errorf("Totals of %s = %d, %v, want %d", month, total.Requests, err, want)
		}
		top, err := s.Top(t.Context(), from.Local(), from.AddDate(0, 1, 0).Local(), 5, ByRequests) // from the days
		if err != nil || int64(len(top)) != want {
			t.Errorf("Top of %s = %+v, %v, want %d tenants", month, top, err, want)
		}
	}
	got, err := s.Tenant(t.Context(), "tenant-0", time.Date(2025, 7, 1, 0, 0, 0, 0, time.UTC).Local(), time.Date(2025, 7, 2, 0, 0, 0, 0, time.UTC), 30*time.Minute)
	if err != nil || len(got.Points) != 1 || got.Points[0].Time != time.Date(2025, 7, 1, 0, 30, 0, 0, time.UTC) {
		t.Errorf("Tenant = %+v, %v, want one point at 00:30 UTC", got, err)
	}
	if problems := s.Problems(t.Context()); len(problems) != 0 {
		t.Errorf("Problems = %q, want none", problems)
	}
	name := "UTC"
	if _, offset := r.Usage[0].Time.Zone(); offset == -4*3600 {
		name = "America/New_York"
	}
	t.Logf("%d ms of %s", r.Usage[0].Time.UnixMilli(), name)
}

// B072: what callers choose is not LowCardinality: it is neither bounded nor short.
func TestB072TenantsAreNotLowCardinality(t *testing.T) {
	s := fresh(t)
	n := 0
	if err := s.each(t.Context(), "SELECT table || '.' || name, type FROM system.columns WHERE database = currentDatabase() AND name IN ('tenant', 'key', 'path', 'client', 'instance')", func(name, typ string) {
		n++
		if typ != "String" {
			t.Errorf("%s is %s, want String", name, typ)
		}
	}); err != nil || n < 12 {
		t.Errorf("saw %d columns, %v", n, err)
	}
}

// B073: sums are of integers: a million times one unit is a million, every time, and the sum of its parts.
func TestB073SumsAreExact(t *testing.T) {
	s := fresh(t)
	run(t, s, `INSERT INTO usage (ts, gateway, boot, seq, entry, tenant, route, allowed, cost)
		SELECT toDateTime64('2026-11-15 12:00:00', 3, 'UTC') + toIntervalSecond(number % 600), 'a', 'b', intDiv(number, 500), number % 500, 'tenant-' || toString(number % 10), 'orders', 1, 1 FROM numbers(1000000)`)
	for range 3 {
		for range 5 {
			total, err := s.Totals(t.Context(), noon, noon.Add(time.Hour))
			if err != nil || total.Counts != (Counts{1_000_000, 0, 1_000_000}) {
				t.Fatalf("Totals = %+v, %v", total, err)
			}
			for _, to := range []time.Time{noon.Add(time.Hour), noon.Add(time.Hour + time.Millisecond)} { // roll-up and ledger
				top, err := s.Top(t.Context(), noon, to, 20, ByCost)
				if err != nil || len(top) != 10 {
					t.Fatalf("Top = %+v, %v", top, err)
				}
				for _, tenant := range top {
					if tenant.Counts != (Counts{100_000, 0, 100_000}) {
						t.Fatalf("Top = %+v", top)
					}
				}
			}
		}
		run(t, s, "OPTIMIZE TABLE usage FINAL")
	}
}

func BenchmarkQueries(b *testing.B) {
	s := open(b, embeddedtest.ClickHouse(b).URL()+"?read_timeout=10m")
	const rows = 2_000_000
	run(b, s, fmt.Sprintf(`INSERT INTO usage (ts, gateway, boot, seq, entry, tenant, route, rule, layer, allowed, rejected, cost, received)
		SELECT toDateTime64('2026-11-01 00:00:00', 3, 'UTC') + toIntervalMillisecond(number * 1200) AS ts, 'gw-' || toString(number %% 3), 'boot-' || toString(number %% 3),
			intDiv(number, 1500), intDiv(number, 3) %% 500, 'tenant-' || toString(toUInt64(pow(cityHash64(number) %% 1000000 / 1000000., 3) * 5000)),
			['export', 'orders', 'other'][1 + cityHash64(number, 1) %% 3], number %% 10 = 0 ? 'contract' : '', number %% 10 = 0 ? 'contract' : '',
			number %% 10 = 0 ? 0 : number %% 40, number %% 10 = 0 ? number %% 7 : 0, number %% 40, ts FROM numbers(%d)`, rows))
	run(b, s, fmt.Sprintf(`INSERT INTO tokens (ts, gateway, boot, seq, entry, rule, layer, key, tenant, mode, rate_nanos, capacity, taken, tokens_min, tokens_last, received)
		SELECT toDateTime64('2026-11-01 00:00:00', 3, 'UTC') + toIntervalMillisecond(number * 1200) AS ts, 'gw-' || toString(number %% 3), 'boot-' || toString(number %% 3),
			intDiv(number, 1500), intDiv(number, 3) %% 500, 'contract', 'contract', 'tenant-' || toString(intDiv(number, 3) %% 50) AS key, key, 'enforce', 5000000000, 10, 1, number %% 10, number %% 10, now()
			FROM numbers(%d)`, rows))
	if got := number(b, s, "(SELECT count() FROM usage FINAL)"); got != rows {
		b.Fatalf("%d rows, want %d", got, rows)
	}
	from, day := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC), 24*time.Hour
	odd := 123 * time.Millisecond // not whole minutes: the ledger answers
	month := from.Add(28 * day)
	for _, bb := range []struct {
		name string
		f    func() (int, error)
	}{
		{"Totals/month", func() (int, error) { v, err := s.Totals(b.Context(), from, month); return int(v.Requests), err }},
		{"Totals/hour", func() (int, error) {
			v, err := s.Totals(b.Context(), from.Add(3*day), from.Add(3*day+time.Hour))
			return int(v.Requests), err
		}},
		{"Top/month", func() (int, error) { v, err := s.Top(b.Context(), from, month, 10, ByRejected); return len(v), err }},
		{"Top/month_by_hours", func() (int, error) {
			v, err := s.Top(b.Context(), from.Add(time.Hour), month, 10, ByRejected)
			return len(v), err
		}},
		{"Top/month_by_minutes", func() (int, error) {
			v, err := s.Top(b.Context(), from.Add(time.Minute), month, 10, ByRejected)
			return len(v), err
		}},
		{"Top/month_of_the_ledger", func() (int, error) {
			v, err := s.Top(b.Context(), from.Add(odd), month, 10, ByRejected)
			return len(v), err
		}},
		{"Top/hour_of_the_ledger", func() (int, error) {
			v, err := s.Top(b.Context(), from.Add(3*day+odd), from.Add(3*day+time.Hour), 10, ByRejected)
			return len(v), err
		}},
		{"Tenant/month_in_days", func() (int, error) {
			v, err := s.Tenant(b.Context(), "tenant-0", from, month, day)
			return len(v.Points), err
		}},
		{"Tenant/month_in_hours", func() (int, error) {
			v, err := s.Tenant(b.Context(), "tenant-0", from, month, time.Hour)
			return len(v.Points), err
		}},
		{"Tenant/hour_in_seconds", func() (int, error) {
			v, err := s.Tenant(b.Context(), "tenant-0", from.Add(3*day), from.Add(3*day+time.Hour), time.Second)
			return len(v.Points), err
		}},
		{"Curve/key_for_a_month_in_hours", func() (int, error) {
			v, err := s.Curve(b.Context(), CurveQuery{Rule: "contract", Key: "tenant-7", From: from, To: month, Step: time.Hour})
			return len(v), err
		}},
		{"Curve/tenant_for_an_hour_in_minutes", func() (int, error) {
			v, err := s.Curve(b.Context(), CurveQuery{Rule: "contract", Tenant: "tenant-7", From: from.Add(3 * day), To: from.Add(3*day + time.Hour), Step: time.Minute})
			return len(v), err
		}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			for b.Loop() {
				if n, err := bb.f(); err != nil || n == 0 {
					b.Fatalf("%d results, %v", n, err)
				}
			}
		})
	}
}

// BenchmarkReports stores reports of 500 usage rows, a second's worth from each of a fleet per batch.
func BenchmarkReports(b *testing.B) {
	for _, reports := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("%d_reports_of_500_rows", reports), func(b *testing.B) {
			s := open(b, embeddedtest.ClickHouse(b).URL())
			var seq uint64
			for b.Loop() {
				var rs []*schemas.Report
				for g := range reports {
					rs = append(rs, reportAt(fmt.Sprintf("gw-%d", g), seq+1, noon.Add(time.Duration(seq)*time.Second), 500))
				}
				seq++
				store(b, s, batchOf(1+(seq-1)*uint64(reports), rs...))
			}
			rows := uint64(b.N) * uint64(reports) * 500
			if got := number(b, s, "(SELECT sum(allowed + rejected) FROM usage FINAL)"); got != 3*rows {
				b.Fatalf("%d requests stored, want %d", got, 3*rows)
			}
			b.ReportMetric(float64(rows)/b.Elapsed().Seconds(), "rows/s")
		})
	}
}

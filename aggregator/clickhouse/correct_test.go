package clickhouse

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// A correction is added to every answer that holds its hour whole, once however often it is made, and changes no usage.
func TestCorrections(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10))) // tenant-0: rows 0 and 7, allowed
	c := Correction{Ref: "ticket-1", Hour: noon, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: -5, Cost: -6, Reason: "counted twice", Author: "kim"}
	for range 2 {
		if _, err := s.Correct(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	wantUsage(t, s, 10, 30)
	totals := func(from, to time.Time) int64 {
		t.Helper()
		got, err := s.Totals(t.Context(), from, to)
		if err != nil {
			t.Fatal(err)
		}
		return got.Requests
	}
	for _, w := range []struct {
		from, to time.Time
		want     int64
	}{
		{noon, noon.Add(time.Hour), 25},
		{noon.Add(-time.Hour), noon.Add(24 * time.Hour), 25},
		{noon, noon.Add(time.Hour - time.Millisecond), 30}, // not the whole hour
	} {
		if got := totals(w.from, w.to); got != w.want {
			t.Errorf("Totals from %s to %s = %d, want %d", w.from, w.to, got, w.want)
		}
	}
	top, err := s.Top(t.Context(), noon, noon.Add(time.Hour), 100, ByRequests)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range top {
		if x.Tenant == "tenant-0" && x.Requests != 1 {
			t.Errorf("Top has %+v, want 1 request", x)
		}
	}
	for step, points := range map[time.Duration]int64{24 * time.Hour: 1, time.Hour: 1, time.Minute: 6, 90 * time.Minute: 6} {
		u, err := s.Tenant(t.Context(), "tenant-0", noon.Truncate(24*time.Hour), noon.Truncate(24*time.Hour).Add(24*time.Hour), step)
		if err != nil || u.Requests != 1 {
			t.Errorf("Tenant by %s = %d requests, %v, want 1 as Top says", step, u.Requests, err)
		}
		var inPoints, inRoutes int64
		for _, p := range u.Points {
			inPoints += p.Requests()
		}
		for _, r := range u.Routes {
			inRoutes += r.Requests()
		}
		if inPoints != points || inRoutes != 1 {
			t.Errorf("Tenant by %s has %d requests in points and %d in routes, want %d and 1", step, inPoints, inRoutes, points)
		}
	}
	if got := number(t, s, "(SELECT sum(allowed + rejected) FROM corrected_1h)"); got != 25 {
		t.Errorf("corrected_1h has %d requests, want 25", got)
	}
	if r := rebuildAll(t, s); r.Rows != 0 || !r.Equal {
		t.Errorf("Rebuild = %+v, want roll-ups to be what was reported", r)
	}
	all, err := s.Corrections(t.Context(), noon, noon.Add(time.Hour), "")
	if err != nil || len(all) != 1 || all[0].Author != "kim" || all[0].Reason != "counted twice" || all[0].Made.IsZero() || all[0].Allowed != -5 {
		t.Errorf("Corrections = %+v, %v", all, err)
	}

	for name, change := range map[string]func(*Correction){
		"below zero":      func(c *Correction) { c.Allowed = -2 },
		"another ref":     func(c *Correction) { c.Ref, c.Allowed = "ticket-1", 1 },
		"no reason":       func(c *Correction) { c.Reason = " " },
		"no author":       func(c *Correction) { c.Author = "" },
		"not an hour":     func(c *Correction) { c.Hour = noon.Add(time.Minute) },
		"nothing":         func(c *Correction) { c.Allowed, c.Cost = 0, 0 },
		"rule is missing": func(c *Correction) { c.Allowed, c.Rejected = 0, 1 },
		"rule of allowed": func(c *Correction) { c.Rule = "contract" },
		"no such gateway": func(c *Correction) { c.Gateway = "nosuch" },
	} {
		bad := c
		bad.Ref, bad.Allowed, bad.Cost = "", 1, 0
		change(&bad)
		if _, err := s.Correct(t.Context(), bad); !errors.Is(err, ErrCorrection) {
			t.Errorf("%s: Correct = %v, want ErrCorrection", name, err)
		}
	}
	c.Ref, c.Allowed, c.Cost = "", 4, 5
	if made, err := s.Correct(t.Context(), c); err != nil || made.Ref == "" {
		t.Errorf("Correct upwards = %+v, %v", made, err)
	}
	if got := totals(noon, noon.Add(time.Hour)); got != 29 {
		t.Errorf("Totals = %d, want 29", got)
	}
}

// A correction of the present hour is in what has that hour up to now, points of hours agree with totals, and what is left out or
// apart is said.
func TestCorrectionsOfThePresentHour(t *testing.T) {
	s := fresh(t)
	now := time.Now().UTC()
	hour := now.Truncate(time.Hour)
	before := hour.Add(-time.Hour)
	store(t, s, batchOf(1, reportAt("a", 1, before, 10))) // tenant-0: rows 0 and 7, allowed
	for ref, at := range map[string]time.Time{"present": hour, "before": before} {
		c := Correction{Ref: ref, Hour: at, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: 100, Reason: "not counted", Author: "kim"}
		if _, err := s.Correct(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	soon := now.Add(5 * time.Minute)
	for _, w := range []struct {
		from, to              time.Time
		step                  time.Duration
		total, others, points int64
		cut                   uint64
		apart                 bool
	}{
		{hour, soon, time.Hour, 100, 0, 100, 0, false},
		{before, soon, time.Hour, 206, 24, 206, 0, false},
		{before, soon, time.Minute, 206, 24, 6, 0, true},
		{before.Add(time.Minute), soon, time.Hour, 100, 0, 0, 1, true},
		{before, hour.Add(-time.Millisecond), time.Hour, 6, 24, 6, 1, false},
	} {
		u, err := s.Tenant(t.Context(), "tenant-0", w.from, w.to, w.step)
		if err != nil {
			t.Fatal(err)
		}
		var points int64
		for _, p := range u.Points {
			points += p.Requests()
		}
		if u.Requests != w.total || points != w.points || u.Apart != w.apart || !u.To.Equal(w.to) {
			t.Errorf("Tenant from %s to %s by %s has %d requests, %d in points, apart %t, to %s, want %+v", w.from, w.to, w.step, u.Requests, points, u.Apart, u.To, w)
		}
		for tenant, cut := range map[string]uint64{"": w.cut, "tenant-0": w.cut, "tenant-1": 0} {
			if n, err := s.CutCorrections(t.Context(), tenant, w.from, w.to); err != nil || n != cut {
				t.Errorf("CutCorrections(%q) from %s to %s = %d, %v, want %d", tenant, w.from, w.to, n, err, cut)
			}
		}
		top, err := s.Top(t.Context(), w.from, w.to, 100, ByRequests)
		if i := slices.IndexFunc(top, func(x TenantTotal) bool { return x.Tenant == "tenant-0" }); err != nil || i < 0 || top[i].Requests != w.total {
			t.Errorf("Top from %s to %s = %+v, %v, want %d", w.from, w.to, top, err, w.total)
		}
		all, err := s.Totals(t.Context(), w.from, w.to)
		if err != nil || all.Requests != w.others+w.total {
			t.Errorf("Totals from %s to %s = %+v, %v, want %d", w.from, w.to, all, err, w.others+w.total)
		}
	}
}

// The history's clock ends in 2299: an hour beyond what can be meant would be stored as another one.
func TestCorrectionsOfNoHourThatWas(t *testing.T) {
	now := time.Now().UTC().Truncate(time.Hour)
	for hour, ok := range map[time.Time]bool{
		time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC): false, time.Date(1999, 12, 31, 23, 0, 0, 0, time.UTC): false,
		now.Add(time.Hour): false, now: true, firstHour: true,
	} {
		c := Correction{Hour: hour, Gateway: "a", Tenant: "t", Route: "r", Allowed: 1, Reason: "why", Author: "kim"}
		if err := c.Validate(); (err == nil) != ok || !ok && !errors.Is(err, ErrCorrection) {
			t.Errorf("a correction of %s: %v", hour, err)
		}
	}
}

// Of corrections that are made at once, by several processes, each has checked what is on record with those before it.
func TestCorrectionsAtOnce(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	s := open(t, server.URL())
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10))) // tenant-0: rows 0 and 7, 6 allowed
	all := func(many int, of func(i int) Correction) (made []Correction, refused int) {
		t.Helper()
		var mu sync.Mutex
		var wg sync.WaitGroup
		processes := []*Store{s, open(t, server.URL()), open(t, server.URL())}
		for i := range many {
			wg.Go(func() {
				c, err := processes[i%len(processes)].Correct(t.Context(), of(i))
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					made = append(made, c)
				case errors.Is(err, ErrCorrection):
					refused++
				default:
					t.Errorf("Correct = %v", err)
				}
			})
		}
		wg.Wait()
		return made, refused
	}
	of := func(ref string, tenant string, allowed int64) Correction {
		return Correction{Ref: ref, Hour: noon, Gateway: "a", Tenant: tenant, Route: "orders", Allowed: allowed, Reason: "why", Author: "kim"}
	}
	rows := func(where string) uint64 {
		return number(t, s, "(SELECT count() FROM corrections FINAL WHERE "+where+")")
	}

	if made, refused := all(12, func(int) Correction { return of("", "tenant-0", -6) }); len(made) != 1 || refused != 11 || rows("1") != 1 {
		t.Errorf("%d corrections that each take all away are made and %d refused, and %d stored, want 1 of them", len(made), refused, rows("1"))
	}
	if u, err := s.Tenant(t.Context(), "tenant-0", noon, noon.Add(time.Hour), time.Hour); err != nil || u.Requests != 0 {
		t.Errorf("Tenant has %d requests, %v, want none", u.Requests, err)
	}
	made, refused := all(12, func(int) Correction { return of("one", "tenant-1", 5) })
	if len(made) != 12 || refused != 0 || rows("tenant = 'tenant-1'") != 1 {
		t.Errorf("of equal corrections of one ref %d are made and %d refused, and %d stored, want one", len(made), refused, rows("tenant = 'tenant-1'"))
	}
	for _, c := range made {
		if c != made[0] {
			t.Errorf("one correction is told as %+v and as %+v", made[0], c)
		}
	}
	made, refused = all(12, func(i int) Correction { return of("another", "tenant-2", int64(i+1)) })
	if len(made) != 1 || refused != 11 || rows("tenant = 'tenant-2'") != 1 {
		t.Errorf("of other corrections of one ref %d are made and %d refused, and %d stored, want one", len(made), refused, rows("tenant = 'tenant-2'"))
	}
	made, refused = all(12, func(int) Correction { return of("", "tenant-3", 1) })
	if len(made) != 12 || refused != 0 || rows("tenant = 'tenant-3'") != 12 {
		t.Errorf("of corrections that go together %d are made and %d refused, and %d stored, want 12", len(made), refused, rows("tenant = 'tenant-3'"))
	}
	// Months are partitions, and each knows tokens of its own: a ref is one over all of them all the same.
	for round := range 5 {
		ref := "months-" + strconv.Itoa(round)
		month := func(i int, allowed int64) Correction {
			c := of(ref, "tenant-4", allowed)
			c.Hour = noon.AddDate(0, -i%3, 0)
			return c
		}
		made, refused = all(24, func(i int) Correction { return month(i, int64(1+i%2)) })
		if len(made) != 4 || refused != 20 || rows("ref = '"+ref+"'") != 1 {
			t.Errorf("of one ref in three months %d are made and %d refused, and %d stored, want 4, 20 and 1", len(made), refused, rows("ref = '"+ref+"'"))
		}
		stored, err := s.Corrections(t.Context(), time.Unix(0, 0), time.Now(), ref)
		if err != nil || len(stored) != 1 {
			t.Fatalf("Corrections of %s = %+v, %v, want one", ref, stored, err)
		}
		for _, c := range made {
			if c != stored[0] {
				t.Errorf("%+v is made, and %+v is stored", c, stored[0])
			}
		}
	}
}

// cutOff is a store with some usage, directly and over a proxy that cuts connections.
func cutOff(t *testing.T) (p *proxy, direct, s *Store) {
	t.Helper()
	server := embeddedtest.ClickHouse(t)
	direct = open(t, server.URL())
	store(t, direct, batchOf(1, reportAt("a", 1, noon, 10)))
	p, through := newProxy(t, server.URL())
	return p, direct, unmigrated(t, through)
}

// A ref is bound to a month when its correction is about to be stored. One that is refused before binds nothing; one that was bound and
// is not stored leaves its ref to its month; and a ref of before there were bindings names what is stored under it.
func TestCorrectionRefs(t *testing.T) {
	p, direct, s := cutOff(t)
	c := Correction{Ref: "one", Hour: noon.AddDate(0, -1, 0), Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: -2, Reason: "why", Author: "kim"}
	wants := func(what string, c Correction, want error) {
		t.Helper()
		if _, err := s.Correct(t.Context(), c); !errors.Is(err, want) {
			t.Errorf("Correct %s = %v, want %v", what, err, want)
		}
	}
	wants("by more than there is", c, ErrCorrection)
	c.Hour = noon
	wants("in the month that was meant", c, nil)

	c.Ref = "two"
	p.cutNext(beforeData, "corrections", nil) // its ref is bound by then
	wants("without a server", c, ErrUnreachable)
	other := c
	other.Hour, other.Allowed = noon.AddDate(0, -1, 0), 1
	wants("under a ref of another month", other, ErrCorrection)
	c.Allowed = -3
	wants("under a ref that is free in its month", c, nil)
	for f := range 3 {
		c.Ref = "claim " + fault(f).String()
		c.Allowed = 1
		p.cutNext(fault(f), "correction_refs", nil)
		wants("while its ref is bound", c, ErrUnreachable)
		wants("again", c, nil)
		wants("again", c, nil)
	}

	run(t, direct, "TRUNCATE TABLE correction_refs") // what is stored is from before it
	c.Ref = "two"
	c.Allowed = -3
	wants("again", c, nil)
	other.Ref = "two"
	wants("under a ref of before", other, ErrCorrection)
	for range 2 { // a token without a row
		other.Ref = "three"
		wants("under a token without a row", other, nil)
		run(t, direct, "TRUNCATE TABLE corrections")
		run(t, direct, "ALTER TABLE correction_refs DELETE WHERE 1 SETTINGS mutations_sync = 2")
	}
	if n := number(t, s, "(SELECT count() FROM corrections)"); n != 0 {
		t.Errorf("%d corrections are stored, want none", n)
	}
}

// A token can be known of a row that is not there: a server was killed between the two, or the row was deleted. The next correction
// is stored all the same, and once.
func TestCorrectionUnderATokenWithoutARow(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10)))
	c := Correction{Hour: noon, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: -4, Reason: "why", Author: "kim"}
	for range 2 {
		if _, err := s.Correct(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		run(t, s, "ALTER TABLE corrections DELETE WHERE 1 SETTINGS mutations_sync = 2")
	}
	for range 2 {
		c.Ref = "again"
		if _, err := s.Correct(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if n := number(t, s, "(SELECT count() FROM corrections)"); n != 1 {
		t.Errorf("%d corrections are stored, want 1", n)
	}
	run(t, s, "ALTER TABLE corrections DROP PARTITION '"+noon.Format("200601")+"'")
	c.Ref = ""
	if _, err := s.Correct(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if n := number(t, s, "(SELECT count() FROM corrections)"); n != 1 {
		t.Errorf("%d corrections are stored after the month was dropped, want 1", n)
	}
}

// A correction whose answer is lost is looked for: stored, it is made; if not it may still come to be, and its ref tells.
func TestCorrectionWhoseAnswerIsLost(t *testing.T) {
	p, direct, s := cutOff(t)
	for f, stored := range map[fault]bool{beforeData: false, midBlock: false, beforeReply: true} {
		c := Correction{Ref: f.String(), Hour: noon, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: -2, Reason: "why", Author: "kim"}
		p.cutNext(f, "corrections", nil)
		switch _, err := s.Correct(t.Context(), c); {
		case stored && err != nil:
			t.Errorf("cut %s: Correct = %v, though it is stored", f, err)
		case !stored && (!errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "the same ref again tells")):
			t.Errorf("cut %s: Correct = %v, want ErrUnreachable and how to go on", f, err)
		}
		if _, err := s.Correct(t.Context(), c); err != nil {
			t.Errorf("cut %s: Correct again = %v", f, err)
		}
	}
	if n := number(t, direct, "(SELECT count() FROM corrections)"); n != 3 {
		t.Errorf("%d corrections are stored, want 3", n)
	}
}

// What a user has no right to store is known not to be stored.
func TestCorrectionWithoutTheRight(t *testing.T) {
	all := fresh(t)
	store(t, all, batchOf(1, reportAt("a", 1, noon, 10)))
	s, refused := forbidding(t, "http://"+all.opt.Addr[0]+"/weir", "INSERT INTO corrections ")
	c := Correction{Ref: "ticket-1", Hour: noon, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: 5, Reason: "lost", Author: "kim"}
	if _, err := s.Correct(t.Context(), c); refused.Load() != 1 || !errors.Is(err, ErrDenied) || !strings.Contains(err.Error(), "lacks a right") || strings.Contains(err.Error(), "unknown") {
		t.Errorf("Correct = %v after %d refusals, want ErrDenied and no doubt after 1", err, refused.Load())
	}
	if _, err := all.Correct(t.Context(), c); err != nil {
		t.Errorf("Correct by one who may = %v", err)
	}
}

// What corrections have taken too much of is told as less than nothing, and can be put right.
func TestLessThanNothing(t *testing.T) {
	s := fresh(t)
	store(t, s, batchOf(1, reportAt("a", 1, noon, 10)))
	run(t, s, "INSERT INTO corrections SELECT ts, 'old', 'a', 'tenant-0', 'orders', '', -10, 0, -20, 'two at once', 'kim', ts FROM (SELECT toDateTime64('"+noon.Format(time.DateTime)+"', 3, 'UTC') AS ts)")
	top, err := s.Top(t.Context(), noon, noon.Add(time.Hour), 100, ByRequests)
	if i := slices.IndexFunc(top, func(x TenantTotal) bool { return x.Tenant == "tenant-0" }); err != nil || i != len(top)-1 || top[i].Requests != -4 || top[i].Allowed != -4 {
		t.Errorf("Top = %+v, %v, want tenant-0 last, with -4 requests", top, err)
	}
	for _, step := range []time.Duration{time.Hour, time.Minute} {
		u, err := s.Tenant(t.Context(), "tenant-0", noon, noon.Add(time.Hour), step)
		if body, _ := json.Marshal(u); err != nil || u.Requests != -4 || u.Routes[0].Allowed != -4 || u.Routes[0].Requests() != -4 || !strings.Contains(string(body), `"requests":-4,"allowed":-4`) {
			t.Errorf("Tenant by %s = %s, %v, want -4 requests", step, body, err)
		}
	}
	if all, err := s.Totals(t.Context(), noon, noon.Add(time.Hour)); err != nil || all.Requests != 20 {
		t.Errorf("Totals = %+v, %v, want 20 requests", all, err)
	}
	c := Correction{Hour: noon, Gateway: "a", Tenant: "tenant-0", Route: "orders", Allowed: 3, Reason: "in part", Author: "kim"}
	if _, err := s.Correct(t.Context(), c); err != nil {
		t.Errorf("Correct upwards = %v", err)
	}
	c.Allowed = schemas.MaxCount
	for _, want := range []error{nil, ErrCorrection} {
		if _, err := s.Correct(t.Context(), c); !errors.Is(err, want) {
			t.Errorf("Correct by as much as there is = %v, want %v", err, want)
		}
	}
}

package clickhouse

import (
	"errors"
	"slices"
	"testing"
	"time"
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
	totals := func(from, to time.Time) uint64 {
		t.Helper()
		got, err := s.Totals(t.Context(), from, to)
		if err != nil {
			t.Fatal(err)
		}
		return got.Requests
	}
	for _, w := range []struct {
		from, to time.Time
		want     uint64
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
	for step, points := range map[time.Duration]uint64{24 * time.Hour: 1, time.Hour: 1, time.Minute: 6, 90 * time.Minute: 6} {
		u, err := s.Tenant(t.Context(), "tenant-0", noon.Truncate(24*time.Hour), noon.Truncate(24*time.Hour).Add(24*time.Hour), step)
		if err != nil || u.Requests != 1 {
			t.Errorf("Tenant by %s = %d requests, %v, want 1 as Top says", step, u.Requests, err)
		}
		var inPoints, inRoutes uint64
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
		from, to                   time.Time
		step                       time.Duration
		total, others, points, cut uint64
		apart                      bool
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
		var points uint64
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

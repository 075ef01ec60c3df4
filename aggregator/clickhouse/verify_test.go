package clickhouse

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/schemas"
)

// Each way in which accounts can differ is found where it is, and nothing else.
func TestAccounts(t *testing.T) {
	s := fresh(t)
	hour := noon.Add(time.Hour) // in which reports arrive
	taking := func(seq, taken, cum uint64) *schemas.Report {
		r := reportAt("a", seq, noon, 5)
		r.SealedAt = hour.Add(time.Duration(seq) * time.Minute)
		r.Tokens = []schemas.Tokens{{Rule: "contract", Key: "k", Taken: taken, Cum: cum}}
		return r
	}
	store(t, s, batchOf(1, taking(1, 3, 3), taking(2, 4, 7), taking(3, 0, 7)))
	look := func() (missing []MissingReports, reports, tokens []Uneven) {
		t.Helper()
		var err [3]error
		missing, err[0] = s.Missing(t.Context(), hour, hour.Add(time.Hour))
		reports, err[1] = s.UnevenReports(t.Context(), hour, hour.Add(time.Hour))
		tokens, err[2] = s.UnevenTokens(t.Context(), hour, hour.Add(time.Hour))
		for _, e := range err {
			if e != nil {
				t.Fatal(e)
			}
		}
		return missing, reports, tokens
	}
	if m, r, k := look(); len(m)+len(r)+len(k) != 0 {
		t.Errorf("of what is equal: %v %v %v", m, r, k)
	}
	store(t, s, batchOf(4, taking(6, 2, 12))) // 4 and 5 took 3 and are lost
	m, r, k := look()
	if len(m) != 1 || m[0] != (MissingReports{"a", "boot-a", 4, 5, hour}) || len(r) != 0 {
		t.Errorf("missing = %+v, reports = %+v", m, r)
	}
	if len(k) != 1 || k[0] != (Uneven{"a", "boot-a", "contract", "k", hour, 5, 2}) {
		t.Errorf("tokens = %+v, want 5 grown and 2 taken", k)
	}
	store(t, s, batchOf(5, taking(4, 1, 8), taking(5, 2, 10)))
	if m, r, k := look(); len(m)+len(r)+len(k) != 0 {
		t.Errorf("after the late ones: %v %v %v", m, r, k)
	}
	run(t, s, "DELETE FROM usage WHERE seq = 5 AND entry = 0 SETTINGS mutations_sync = 2")
	store(t, s, batchOf(7, taking(7, 0, 11), taking(8, 2, 14))) // one came back after 6 had told of it
	if m, r, k := look(); len(m)+len(r)+len(k) != 1 {
		t.Errorf("after one was given back: %v %v %v, want no more than before", m, r, k)
	}
	store(t, s, batchOf(9, taking(9, 0, 13)))
	if _, r, _ := look(); len(r) != 1 || r[0] != (Uneven{"a", "boot-a", "", "", hour, 15, 12}) {
		t.Errorf("reports = %+v, want 15 said and 12 there", r)
	}
	marks, err := s.Marks(t.Context(), hour, hour.Add(time.Hour), 10)
	if err != nil || len(marks) != 1 || marks[0].Cum != 13 || marks[0].Seq != 9 {
		t.Errorf("Marks = %+v, %v", marks, err)
	}
	ids := []ReportID{{"a", "boot-a", 6}, {"a", "boot-a", 10}}
	if have, err := s.Stored(t.Context(), ids); err != nil || len(have) != 1 || have[ids[0]] != ContentsOf(taking(6, 2, 12)) {
		t.Errorf("Stored = %v, %v", have, err)
	}
}

// What is doubled does not make up for what is lost, of reports and of one bucket's counts alike: each is told with the numbers of what it
// concerns alone.
func TestSurplusAndLackAreApart(t *testing.T) {
	s := fresh(t)
	hour := noon.Add(time.Hour)
	var all []*schemas.Report
	for i, k := range []schemas.Tokens{{Taken: 3, Cum: 3}, {Taken: 2, Cum: 6}, {Taken: 1, Cum: 6}} { // report 2 lacks one, and 3 has one too many
		k.Rule, k.Key = "contract", "k"
		r := reportAt("a", uint64(i+1), noon, 5)
		r.SealedAt, r.Tokens = hour, []schemas.Tokens{k}
		all = append(all, r)
	}
	store(t, s, batchOf(1, all...))
	run(t, s, "INSERT INTO usage SELECT * REPLACE (entry + 100 AS entry) FROM usage WHERE seq = 1")
	run(t, s, "DELETE FROM usage WHERE seq = 2 SETTINGS mutations_sync = 2")
	reports, err := s.UnevenReports(t.Context(), hour, hour.Add(time.Hour))
	if want := []Uneven{{"a", "boot-a", "", "", hour, 15, 0}, {"a", "boot-a", "", "", hour, 15, 30}}; err != nil || !slices.Equal(reports, want) {
		t.Errorf("reports = %+v, %v, want %+v", reports, err, want)
	}
	tokens, err := s.UnevenTokens(t.Context(), hour, hour.Add(time.Hour))
	if want := []Uneven{{"a", "boot-a", "contract", "k", hour, 3, 2}, {"a", "boot-a", "contract", "k", hour, 0, 1}}; err != nil || !slices.Equal(tokens, want) {
		t.Errorf("tokens = %+v, %v, want %+v", tokens, err, want)
	}
}

// The last reports of a boot are missed by what its heartbeats told, in the hour in which they told it first, and whether its gateway may
// have them yet is known.
func TestTails(t *testing.T) {
	s := fresh(t)
	hour, now := noon, noon.Add(90*time.Minute)
	at := func(since time.Duration) time.Time { return now.Add(-since) }
	var beats []GatewaySample
	beat := func(gateway, boot string, since time.Duration, sealed, pending uint64, mode string) {
		beats = append(beats, GatewaySample{at(since), schemas.Heartbeat{Gateway: gateway, Boot: boot, Mode: mode, Sealed: sealed, PendingReports: pending}})
	}
	// All is stored; told so late that it may be on its way; an older weir, which tells of nothing; nothing was stored of an idle one.
	beat("well", "boot-well", time.Hour, 2, 0, "synced")
	beat("new", "boot-new", 2*time.Second, 9, 1, "synced")
	beat("old", "boot-old", time.Hour, 0, 0, "synced")
	beat("idle", "boot-idle", 0, 0, 0, "synced")
	// 3 to 5 were told of in the first hour, up to 8 in the second, and again and again.
	beat("a", "boot-a", 80*time.Minute, 2, 0, "synced")
	beat("a", "boot-a", 70*time.Minute, 5, 3, "synced")
	beat("a", "boot-a", 20*time.Minute, 8, 6, "synced")
	beat("a", "boot-a", 10*time.Minute, 8, 6, "synced")
	// Alive; ended in order just now; killed, with a next life that delivers, that has nothing, or that has just begun.
	beat("alive", "boot-alive", 20*time.Minute, 1, 1, "synced")
	beat("alive", "boot-alive", 5*time.Second, 1, 1, "synced")
	beat("ended", "boot-ended", 20*time.Minute, 1, 1, "synced")
	beat("ended", "boot-ended", 5*time.Second, 1, 1, schemas.ModeStopped)
	for _, g := range []struct {
		name          string
		since         time.Duration
		before, after uint64 // reports that wait
	}{{"delivers", 30 * time.Second, 2, 0}, {"empty", 30 * time.Second, 0, 3}, {"begins", 5 * time.Second, 0, 0}} {
		beat(g.name, "boot-"+g.name, 20*time.Minute, 1, 1, "synced")
		beat(g.name, "next", g.since, 0, g.before, "synced")
		beat(g.name, "next", 3*time.Second, 0, g.after, "synced")
	}
	if err := s.Gateways(t.Context(), beats); err != nil {
		t.Fatal(err)
	}
	store(t, s, batchOf(1, reportAt("well", 1, noon, 1), reportAt("well", 2, noon, 1), reportAt("a", 1, noon, 1), reportAt("a", 2, noon, 1)))
	look := func(from, to time.Time) (all []string) {
		t.Helper()
		tails, err := s.Tails(t.Context(), from, to, at(10*time.Second), at(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range tails {
			all = append(all, fmt.Sprintf("%s %s %s of %s, kept %t", m.Gateway, m.Boot, m.MissingReports, m.Hour.Format("15:04"), m.Kept))
		}
		return all
	}
	first, second := []string{"a boot-a reports 3 to 5 of 12:00, kept false"}, []string{
		"a boot-a reports 6 to 8 of 13:00, kept false",
		"alive boot-alive report 1 of 13:00, kept true",
		"begins boot-begins report 1 of 13:00, kept true",
		"delivers boot-delivers report 1 of 13:00, kept true",
		"empty boot-empty report 1 of 13:00, kept false",
		"ended boot-ended report 1 of 13:00, kept false",
	}
	for _, tt := range []struct {
		hours, upto int
		want        []string
	}{{0, 1, first}, {1, 2, second}, {0, 24, append(first, second...)}, {2, 24, nil}, {-24, 0, nil}} {
		if got := look(hour.Add(time.Duration(tt.hours)*time.Hour), hour.Add(time.Duration(tt.upto)*time.Hour)); !slices.Equal(got, tt.want) {
			t.Errorf("of hours %d to %d: %q, want %q", tt.hours, tt.upto, got, tt.want)
		}
	}
	// What comes later is there.
	store(t, s, batchOf(5, reportAt("a", 6, noon, 1), reportAt("alive", 1, noon, 1)))
	if got := look(hour, hour.Add(24*time.Hour)); got[0] != "a boot-a reports 7 to 8 of 13:00, kept false" || strings.Contains(got[1], "alive") {
		t.Errorf("after some have come: %q", got)
	}
}

// Rows without a report are found, whoever's they are; those of reports that arrived at another time are not.
func TestOrphans(t *testing.T) {
	s := fresh(t)
	arrived := noon.Add(time.Hour)
	one, two := reportAt("a", 1, noon, 5), reportAt("a", 2, noon, 5)
	one.SealedAt, two.SealedAt = arrived, arrived
	store(t, s, batchOf(1, one, two))
	look := func() []Orphans {
		t.Helper()
		o, err := s.Orphans(t.Context(), arrived.Add(-24*time.Hour), arrived.Add(24*time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	if o := look(); len(o) != 0 {
		t.Errorf("of what is whole: %+v", o)
	}
	run(t, s, "INSERT INTO usage SELECT * REPLACE ('copied' AS boot) FROM usage")
	o := look()
	if len(o) != 1 || o[0].Boot != "copied" || o[0].Reports != 2 || o[0].First != 1 || o[0].Last != 2 || o[0].Requests != 30 || o[0].Latest.IsZero() {
		t.Errorf("Orphans = %+v, want the copies of 2 reports", o)
	}
}

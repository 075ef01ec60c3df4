package clickhouse

import (
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

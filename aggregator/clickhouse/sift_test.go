package clickhouse

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/weirhq/weir/schemas"
)

// wantRefused checks that err names exactly these messages.
func wantRefused(t *testing.T, err error, seqs ...uint64) {
	t.Helper()
	var r schemas.Refused
	if !errors.As(err, &r) {
		t.Fatalf("Reports = %v, want a schemas.Refused", err)
	}
	var got []uint64
	for _, m := range r {
		got = append(got, m.Seq)
		if !strings.Contains(m.Detail, "code 469") || strings.Contains(m.Detail, "\n") {
			t.Errorf("message %d is refused with %q, want one line with the server's code", m.Seq, m.Detail)
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(seqs) {
		t.Errorf("refused %d, want %d", got, seqs)
	}
}

// Rows that ClickHouse will not take cost their own report and no other, wherever they are, also over a cut connection.
func TestPoisonIsIsolated(t *testing.T) {
	const n = 40
	for name, bad := range map[string][]uint64{"first": {1}, "last": {n}, "neighbours": {7, 8}, "several": {3, 20, 21, 39}} {
		t.Run(name, func(t *testing.T) {
			s := fresh(t)
			run(t, s, "ALTER TABLE usage ADD CONSTRAINT sane CHECK tenant != 'poison'")
			run(t, s, "ALTER TABLE tokens ADD CONSTRAINT sane CHECK key != 'poison'")
			var reports []*schemas.Report
			for i := range uint64(n) {
				reports = append(reports, acrossMonths("a", i+1, 6))
			}
			for i, seq := range bad {
				if i%2 == 0 {
					reports[seq-1].Usage[4].Tenant = "poison"
				} else {
					reports[seq-1].Tokens[0].Key = "poison"
				}
			}
			b := batchOf(1, reports...)
			for range 2 { // and again, as after a crash before the dead letters were written
				var seqs []uint64
				err := s.Reports(t.Context(), b)
				for i := range bad { // those of tokens are found first
					if i%2 == 1 {
						seqs = append(seqs, bad[i])
					}
				}
				for i := range bad {
					if i%2 == 0 {
						seqs = append(seqs, bad[i])
					}
				}
				wantRefused(t, err, seqs...)
				wantUsage(t, s, 6*uint64(n-len(bad)), 18*uint64(n-len(bad)))
			}
			// What was put right is replayed, behind everything else, twice.
			run(t, s, "ALTER TABLE usage DROP CONSTRAINT sane")
			run(t, s, "ALTER TABLE tokens DROP CONSTRAINT sane")
			for i := range uint64(2) {
				var again []*schemas.Report
				for _, seq := range bad {
					again = append(again, reports[seq-1])
				}
				store(t, s, batchOf(1000+100*i, again...))
				wantUsage(t, s, 6*n, 18*n)
				for _, table := range []string{"tokens", "rejections", "reports"} {
					if got := number(t, s, "(SELECT count() FROM "+table+" FINAL)"); got != n {
						t.Errorf("%s FINAL has %d rows, want %d", table, got, n)
					}
				}
			}
		})
	}
}

// Sift cuts a batch that one insert cannot hold between reports, and isolates in each part.
func TestPoisonInALargeBatch(t *testing.T) {
	s := fresh(t)
	run(t, s, "ALTER TABLE usage ADD CONSTRAINT sane CHECK tenant != 'poison'")
	var reports []*schemas.Report
	const each = maxRows/4 + 1 // three to an insert
	for i := range uint64(4) {
		reports = append(reports, reportAt("a", i+1, noon, each))
	}
	reports[1].Usage[each-1].Tenant = "poison"
	reports[3].Usage[0].Tenant = "poison"
	for range 2 {
		wantRefused(t, s.Reports(t.Context(), batchOf(1, reports...)), 2, 4)
		wantUsage(t, s, 2*each, 6*each)
	}
}

func TestPoisonAlert(t *testing.T) {
	s := fresh(t)
	run(t, s, "ALTER TABLE alerts ADD CONSTRAINT sane CHECK tenant != 'poison'")
	b := schemas.Batch[*schemas.Alert]{Stream: schemas.AlertsStream, First: 1, Last: 3}
	for i := range uint64(3) {
		b.Items = append(b.Items, schemas.Delivered[*schemas.Alert]{Seq: i + 1, Arrived: noon,
			Value: &schemas.Alert{Type: schemas.AlertFiring, Name: "anomaly", DedupKey: fmt.Sprint(i), Tenant: []string{"a", "poison", "b"}[i], StartsAt: noon}})
	}
	wantRefused(t, s.Alerts(t.Context(), b), 2)
	if got := number(t, s, "(SELECT count() FROM alerts)"); got != 2 {
		t.Errorf("%d alerts are stored, want 2", got)
	}
}

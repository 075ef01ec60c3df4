package clickhouse

import (
	"os"
	"strings"
	"testing"
)

func TestREADMEQueriesRun(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	s := fresh(t)
	r := acrossMonths("a", 1, 10)
	r.Rejections[0].Instance = "01JD0Q2W"
	store(t, s, batchOf(1, r))
	n := 0
	for i, block := range strings.Split(string(text), "```") {
		sql, ok := strings.CutPrefix(block, "sql\n")
		if i%2 == 0 || !ok {
			continue
		}
		n++
		rows, err := s.conn.Query(t.Context(), sql)
		if err != nil {
			t.Errorf("%s\n%v", sql, err)
			continue
		}
		for rows.Next() {
		}
		if err := rows.Err(); err != nil {
			t.Errorf("%s\n%v", sql, err)
		}
		if err := rows.Close(); err != nil {
			t.Error(err)
		}
	}
	if n < 12 {
		t.Errorf("ran %d queries, want 12 or more", n)
	}
	if got := number(t, s, "(SELECT count() FROM reports GROUP BY gateway, boot HAVING max(seq) - uniqExact(seq) = 0)"); got != 1 {
		t.Errorf("%d boots without a gap, want 1", got)
	}
}

package clickhouse

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/weirhq/weir/schemas"
)

// TestJudgeIsOneBucket has rows of {second, taken, allowed} of a bucket of 10 per second with a burst of 20.
func TestJudgeIsOneBucket(t *testing.T) {
	from := time.Date(2026, 11, 29, 10, 0, 0, 0, time.UTC)
	var in []Admitted
	var want []float64
	add := func(key string, second int, taken, allowed float64) {
		in = append(in, Admitted{Time: from.Add(time.Duration(second) * time.Second), Rule: "r", Key: key, LimitRateNanos: 10e9, LimitBurst: 20, Taken: taken})
		want = append(want, allowed)
	}
	add("a", 0, 30, 30) // the burst, and the second's refill
	add("a", 1, 10, 10)
	add("a", 2, 15, 10) // 5 too many
	add("a", 5, 40, 30) // two idle seconds refill 20, and no more than the burst
	add("a", 6, 0.5, 0.5)
	add("a", 7, 25, 19.5)
	add("b", 7, 31, 30) // another key has a bucket of its own, full
	for i, got := range Judge(in, from) {
		if math.Abs(got.Allowed-want[i]) > 1e-9 || math.Abs(got.Over-(in[i].Taken-want[i])) > 1e-9 {
			t.Errorf("%s second %d: allowed %v, over %v, want %v of %v", got.Key, got.Time.Second(), got.Allowed, got.Over, want[i], in[i].Taken)
		}
	}
}

// TestAccuracyOfReports reads back what two gateways took from three keys.
func TestAccuracyOfReports(t *testing.T) {
	s := fresh(t)
	at := time.Now().UTC().Truncate(time.Second).Add(-time.Minute)
	report := func(gateway string, seq uint64, second int, tokens ...schemas.Tokens) schemas.Delivered[*schemas.Report] {
		arrived := at.Add(time.Duration(second)*time.Second + 300*time.Millisecond)
		return schemas.Delivered[*schemas.Report]{Seq: seq, Arrived: arrived, Value: &schemas.Report{Gateway: gateway, Boot: "b-" + gateway, Seq: seq, SealedAt: arrived, Tokens: tokens}}
	}
	took := func(key string, n uint64, window time.Duration) schemas.Tokens {
		return schemas.Tokens{Rule: "contract", Key: key, Mode: "enforce", LimitRateNanos: 10e9, LimitBurst: 20, Taken: n, Cum: n, Window: window}
	}
	shadow := took("shadow", 999, time.Second)
	shadow.Mode = "shadow"
	items := []schemas.Delivered[*schemas.Report]{
		report("g1", 1, 0, took("storm", 25, 100*time.Millisecond), took("calm", 20, time.Second), shadow),
		report("g2", 2, 0, took("storm", 25, 100*time.Millisecond)),
		report("g1", 3, 3, took("storm", 30, 3*time.Second)), // 10 in each of three seconds
	}
	if err := s.Reports(t.Context(), schemas.Batch[*schemas.Report]{Stream: "S", First: 1, Last: 3, Items: items}); err != nil {
		t.Fatal(err)
	}
	got, err := s.Admitted(t.Context(), at, at.Add(10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	text := ""
	for _, a := range got {
		text += fmt.Sprintf("%s/%s+%d=%v ", a.Rule, a.Key, int(a.Time.Sub(at).Seconds()), a.Taken)
	}
	if want := "contract/storm+0=50 contract/storm+1=10 contract/storm+2=10 contract/storm+3=10 "; text != want {
		t.Errorf("admitted %s, want %s", text, want)
	}
	judged := Judge(got, at)
	if judged[0].Over != 20 || judged[1].Over != 0 {
		t.Errorf("judged %+v, want 20 over in the first second only", judged)
	}
	for range 2 { // the same seconds twice are the same rows
		if err := s.KeepAccuracy(t.Context(), judged); err != nil {
			t.Fatal(err)
		}
	}
	var rows uint64
	var over float64
	if err := s.conn.QueryRow(t.Context(), "SELECT count(), sum(over) FROM accuracy FINAL WHERE rule = 'contract'").Scan(&rows, &over); err != nil || rows != 4 || over != 20 {
		t.Errorf("accuracy has %d rows and %v over (%v), want 4 and 20", rows, over, err)
	}
}

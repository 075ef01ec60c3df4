package app

import (
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// TestOvershootIsTold goes from what two gateways report, through the history and the table accuracy, to the metric and the
// alert: once, when it lasts, and its end.
func TestOvershootIsTold(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	js, stack := besideAlerter(t, AlerterConfig{}, log)
	store, err := clickhouse.Open(embeddedtest.ClickHouse(t).URL(), log)
	if err != nil {
		t.Fatal(err)
	}
	stack.Defer("store", store.Close)
	if err := store.Migrate(t.Context(), func(string) {}); err != nil {
		t.Fatal(err)
	}

	start := time.Now().UTC().Truncate(time.Minute).Add(-40 * time.Minute)
	var seq uint64
	// took stores that two gateways together took n tokens of 10 per second and a burst of 20 in each second from..to.
	took := func(rule string, from, to int, n uint64) {
		t.Helper()
		var items []schemas.Delivered[*schemas.Report]
		for i := from; i < to; i++ {
			for g := range 2 {
				seq++
				at := start.Add(time.Duration(i)*time.Second + 500*time.Millisecond)
				items = append(items, schemas.Delivered[*schemas.Report]{Seq: seq, Arrived: at, Value: &schemas.Report{Gateway: fmt.Sprint("g", g), Boot: "b", Seq: seq, SealedAt: at,
					Tokens: []schemas.Tokens{{Rule: rule, Key: "acme", Mode: "enforce", LimitRateNanos: 10e9, LimitBurst: 20, Taken: n / 2, Cum: seq * n, Window: time.Second}}}})
			}
		}
		if err := store.Reports(t.Context(), schemas.Batch[*schemas.Report]{Stream: "S", First: items[0].Seq, Last: seq, Items: items}); err != nil {
			t.Fatal(err)
		}
	}
	m := NewMetrics()
	one := newAccountant(store, js, m.overshoot, log)
	account := func(a *accountant, second int) {
		t.Helper()
		if err := a.account(t.Context(), start.Add(time.Duration(second)*time.Second+accountDelay)); err != nil {
			t.Fatal(err)
		}
	}
	ratio := func(rule string, want float64) {
		t.Helper()
		if got := testutil.ToFloat64(m.overshoot.WithLabelValues(rule)); math.Abs(got-want) > 0.005 {
			t.Errorf("ratio of %s is %.4f, want %.4f", rule, got, want)
		}
	}
	told := func(n uint64, text string) *schemas.Alert {
		t.Helper()
		return alertNumber(t, js, n, text)
	}

	took("kept", 0, 180, 10)
	took("crowd", 119, 121, 100) // over two minutes' border, and repaid
	account(one, 180)
	ratio("kept", 0)
	ratio("crowd", (200-20-20-2)/200.0)
	told(0, "a crowd, and a rule that is kept to")

	took("broken", 300, 400, 12) // 12 for 10: the burst is used up after 10 s
	account(one, 400)
	ratio("broken", (100*2-20-2)/1200.0)
	told(0, "not long enough")
	took("broken", 400, 480, 12)
	account(one, 480)
	ratio("broken", (180*2-20-2)/2160.0)
	a := told(1, "three minutes")
	if a.Type != schemas.AlertFiring || a.Name != AlertOvershoot || a.DedupKey != "overshoot/broken" || a.Rule != "broken" || a.Severity != schemas.SeverityWarning ||
		a.Threshold != overshootBound || math.Abs(a.Value-338.0/2160) > 0.005 || !strings.Contains(a.Summary, "15.6 %") {
		t.Errorf("alert = %+v", a)
	}
	account(one, 490)
	two := newAccountant(store, js, m.overshoot, log) // another process takes over
	account(two, 500)
	told(1, "looked at again")
	took("broken", 500, 800, 10)
	account(two, 800)
	ratio("broken", 0)
	ratio("kept", 0)
	if r := told(2, "kept to again"); r.Type != schemas.AlertResolved || r.DedupKey != a.DedupKey || !r.StartsAt.Equal(a.StartsAt) || r.EndsAt.IsZero() {
		t.Errorf("alert = %+v, want the end of %+v", r, a)
	}

	// Nobody looks for ten minutes, in which a rule is broken for four: that is told, if late, and its end too.
	took("missed", 900, 1140, 12)
	took("kept", 1140, 1500, 10)
	account(newAccountant(store, js, m.overshoot, log), 1560)
	ratio("missed", 0)
	if r := told(4, "caught up"); r.Type != schemas.AlertResolved || r.Rule != "missed" {
		t.Errorf("alert = %+v, want the end of that about missed", r)
	}
}

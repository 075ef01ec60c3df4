package aggregator_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/aggregator"
)

// TestFoldedAgain: what the counter lost is counted once more, and nothing else comes of it: gateways that have ended do not come back,
// nobody weighs more or asks for tokens, and the limit is what it is now.
func TestFoldedAgain(t *testing.T) {
	bubble(t, noLearning, func(w *world) {
		defer w.run()()
		defer w.alive("g1")()
		time.Sleep(1100 * time.Millisecond)
		key, before := aggregator.Key{Rule: "contract", Key: "acme"}, aggregator.Limit{RateNanos: 1000e9, Burst: 600}
		old := w.batch(w.report("ended", w.tokens("ended", "acme", before, 5, 0)), w.report("g1", w.tokens("g1", "acme", before, 3, 0)))
		w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 4, 0)))
		counted := testutil.ToFloat64(w.m.Reconciled)
		w.casts.take(true)
		for range 2 {
			if err := w.Again(context.Background(), old); err != nil {
				t.Fatal(err)
			}
			if n := w.counter.Total(key); n != 12 {
				t.Errorf("%d tokens counted, want 12", n)
			}
		}
		live, err := w.counter.Fold(context.Background(), []aggregator.Fold{{Key: key}})
		if err != nil {
			t.Fatal(err)
		}
		if s := live[0]; s.Limit != limit100 || len(s.Demands) != 1 || s.Demands[0].Gateway != "g1" {
			t.Errorf("limit %v, demands %v, want %v and that of g1", s.Limit, s.Demands, limit100)
		}
		if got := testutil.ToFloat64(w.m.Reconciled); got != counted {
			t.Errorf("%v requests were reconciled again", got-counted)
		}
		time.Sleep(3 * time.Second)
		for _, c := range w.casts.take(true) {
			if c.gateway != "g1" || c.Gateways != 1 {
				t.Fatalf("%s hears of %d gateways, want g1 to be alone", c.gateway, c.Gateways)
			}
		}
		w.counter.Flush() // a key that is not there is made from what they say
		time.Sleep(time.Minute)
		if err := w.Again(context.Background(), old); err != nil {
			t.Fatal(err)
		}
		live, err = w.counter.Fold(context.Background(), []aggregator.Fold{{Key: key}})
		if err != nil || w.counter.Total(key) != 8 {
			t.Errorf("%d tokens counted, %v, want 8", w.counter.Total(key), err)
		}
		if full := live[0].Limit.Burst * 1e6; live[0].LevelMicros != full {
			t.Errorf("level %d, want %d: what they tell of is too old to charge", live[0].LevelMicros, full)
		}
		w.counter.Fail(errors.New("redis is away"))
		if err := w.Again(context.Background(), old); err == nil {
			t.Error("folded again without a counter")
		}
	})
}

package aggregator_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/schemas"
)

// TestLeavingIsHeardAtOnce: a gateway that says that it stops leaves the fleet with that word, and the reports that it still had do
// not bring it back.
func TestLeavingIsHeardAtOnce(t *testing.T) {
	bubble(t, noLearning, func(w *world) {
		defer w.run()()
		defer w.alive("g1")()
		w.beat("g2")
		time.Sleep(1100 * time.Millisecond)
		w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 5, 95)), w.report("g2", w.tokens("g2", "acme", limit100, 5, 95)))
		w.expect("g1 50.0/30 demand, g2 50.0/30 demand")
		last := w.report("g2", w.tokens("g2", "acme", limit100, 3, 95))
		at := time.Now()
		w.Heartbeat(&schemas.Heartbeat{Gateway: "g2", Boot: "boot", Mode: schemas.ModeStopped}, at)
		time.Sleep(time.Millisecond)
		said := w.casts.take(true)
		if len(said) < 2 {
			t.Fatalf("after a gateway left %d messages came at once, want its absence and a share", len(said))
		}
		for _, c := range said {
			if c.gateway != "g1" || c.Gateways != 1 || c.at.Sub(at) > time.Millisecond {
				t.Errorf("%v later %s heard of %d gateways, want g1 to hear of one at once", c.at.Sub(at), c.gateway, c.Gateways)
			}
		}
		if got, want := show(said), "g1 100.0/60 demand"; got != want {
			t.Errorf("shares %s, want %s", got, want)
		}
		w.handle(last)
		w.beat("g2") // one that was under way
		time.Sleep(5 * time.Second)
		for _, c := range w.casts.take(true) {
			if c.gateway != "g1" || c.Gateways != 1 {
				t.Fatalf("%s hears of %d gateways after the last word of another", c.gateway, c.Gateways)
			}
		}
		if n := w.counter.Total(aggregator.Key{Rule: "contract", Key: "acme"}); n != 13 {
			t.Errorf("%d tokens counted, want 13: what a gateway says last counts", n)
		}
		w.Heartbeat(&schemas.Heartbeat{Gateway: "g2", Boot: "next"}, time.Now())
		time.Sleep(1100 * time.Millisecond)
		if all := w.casts.take(true); all[len(all)-1].Gateways != 2 {
			t.Errorf("a new life of the gateway is not in the fleet: %+v", all[len(all)-1])
		}
	})
}

// TestFleetHearsWhenNothingIsGranted: the loss of the counter and its return are said at once, not with the next keepalive, and a
// limit that is kept strictly is answered when all that was used meanwhile is counted, for the counter may have forgotten it.
func TestFleetHearsWhenNothingIsGranted(t *testing.T) {
	bubble(t, noLearning, func(w *world) {
		defer w.run()()
		defer w.alive("g1", "g2")()
		time.Sleep(1300 * time.Millisecond)
		strict := func(taken, refused uint64) *schemas.Report {
			x := w.tokens("g1", "acme", limit100, taken, refused)
			x.Consistency, x.Capacity = "strict", 30
			return w.report("g1", x)
		}
		take := func() (bool, error) {
			r, err := w.Take(context.Background(), []schemas.TakeRequest{{Rule: "contract", Key: "acme", LimitRateNanos: limit100.RateNanos, LimitBurst: limit100.Burst, Cost: 1}})
			return err == nil && r[0].Allowed, err
		}
		if ok, err := take(); !ok || err != nil {
			t.Fatalf("a token of a full bucket: %v, %v", ok, err)
		}
		frozen := func() (said []bool) {
			for _, c := range w.casts.take(true) {
				if c.gateway == "g1" {
					said = append(said, c.Frozen)
				}
			}
			return said
		}
		frozen()
		w.counter.Fail(errors.New("redis is away"))
		b := w.batch(strict(40, 5))
		if err := w.Reports(context.Background(), b); err == nil {
			t.Fatal("reports were folded without a counter")
		}
		if got := frozen(); len(got) != 1 || !got[0] {
			t.Errorf("within the first try the fleet heard %v, want that nothing is granted", got)
		}
		w.counter.Flush()
		w.counter.Fail(nil)
		if err := w.Reports(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		if ok, err := take(); ok || err == nil {
			t.Errorf("a token of a bucket that was forgotten: %v, %v", ok, err)
		}
		time.Sleep(700 * time.Millisecond)
		w.handle(strict(70, 30)) // all that it had
		frozen()
		time.Sleep(400 * time.Millisecond)
		if got := frozen(); len(got) == 0 || got[len(got)-1] {
			t.Errorf("a second later the fleet hears %v, want that all is well", got)
		}
		n := 0
		for range 200 {
			if ok, err := take(); err != nil {
				t.Fatal(err)
			} else if ok {
				n++
			}
		}
		if n < 10 || n > 75 { // what this gateway earned, what the other one may hold
			t.Errorf("%d tokens at once of a limit that was spent, want what gateways did not use", n)
		}
	})
}

// rates is what the shares that were told last add up to, in tokens per second.
func (w *world) rates() (sum float64) {
	last := map[string]int64{}
	for _, c := range w.casts.take(true) {
		for _, s := range c.Shares {
			last[c.gateway] = s.RateNanos
		}
	}
	for _, rate := range last {
		sum += float64(rate) / 1e9
	}
	return sum
}

// TestReportsThatWaitAreHeardFirst: what gateways used while there was no centre comes in several batches. All of them are heard before
// a limit is divided, for the tokens of that time are not in the bucket any more: they would be a debt that nobody has made.
func TestReportsThatWaitAreHeardFirst(t *testing.T) {
	bubble(t, aggregator.Config{}, func(w *world) {
		defer w.run()()
		defer w.alive("g1", "g2")()
		time.Sleep(1400 * time.Millisecond)
		first := w.batch(w.report("g1", w.tokens("g1", "acme", limit100, 90, 40)))
		first.Waiting = 1
		if err := w.Reports(context.Background(), first); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond) // it has learned for long enough
		w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 200, 90)))
		time.Sleep(400 * time.Millisecond)
		if got := w.rates(); got < 99 || got > 100 {
			t.Errorf("shares add up to %.1f/s, want the whole limit", got)
		}
	})
	bubble(t, aggregator.Config{}, func(w *world) { // reports that always wait are no reason to divide nothing for ever
		defer w.run()()
		defer w.alive("g1", "g2")()
		busy := func(d time.Duration) float64 {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				b := w.batch(w.report("g1", w.tokens("g1", "acme", limit100, 9, 40)))
				b.Waiting = 1000
				if err := w.Reports(context.Background(), b); err != nil {
					t.Fatal(err)
				}
			}
			return w.rates()
		}
		if got := busy(5 * time.Second); got != 0 {
			t.Errorf("shares add up to %.1f/s, though reports wait", got)
		}
		if got := busy(5 * time.Second); got < 99 || got > 100 {
			t.Errorf("shares add up to %.1f/s, though they have waited for long", got)
		}
	})
}

// TestACentreThatWasFrozen finds what was used meanwhile in several batches, and its gateways silent for a while. It refuses nobody for
// that, and says that it grants nothing until it has heard them.
func TestACentreThatWasFrozen(t *testing.T) {
	var slept atomic.Int64
	now := func() time.Time { return time.Now().Add(time.Duration(slept.Load())) }
	bubble(t, aggregator.Config{Now: now}, func(w *world) {
		w.counter.Now = now
		defer w.run()()
		defer w.alive("g1", "g2")()
		time.Sleep(2600 * time.Millisecond)
		w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 40, 90)), w.report("g2", w.tokens("g2", "acme", limit100, 20, 90)))
		if got := w.rates(); got < 99 || got > 100 {
			t.Fatalf("shares add up to %.1f/s, want the whole limit", got)
		}
		time.Sleep(50 * time.Millisecond)
		slept.Store(int64(10 * time.Second))
		for range 3 {
			w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 150, 90)), w.report("g2", w.tokens("g2", "acme", limit100, 150, 90)))
		}
		time.Sleep(50 * time.Millisecond)
		for _, c := range w.casts.take(true) {
			if !c.Frozen || c.Gateways != 2 {
				t.Errorf("at once %s hears %+v, want that nothing is granted to the two", c.gateway, c.ThrottleUpdate)
			}
		}
		time.Sleep(1500 * time.Millisecond)
		w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 9, 90)), w.report("g2", w.tokens("g2", "acme", limit100, 9, 90)))
		if got := w.rates(); got < 99 || got > 100 {
			t.Errorf("then shares add up to %.1f/s, want the whole limit", got)
		}
	})
}

// hasty is a counter whose Take ends as it is told, after it has been asked.
type hasty struct {
	aggregator.Counter
	err   error
	takes int
}

func (h *hasty) Take(ctx context.Context, takes []aggregator.Take) ([]aggregator.Taken, error) {
	h.takes++
	if h.err != nil {
		return nil, h.err
	}
	return h.Counter.Take(ctx, takes)
}

// TestTakeSaysNothingOfTheCounter: one that had no answer within its milliseconds freezes nobody, and while nothing is granted the
// counter is not even asked: the gateway takes from its own bucket then.
func TestTakeSaysNothingOfTheCounter(t *testing.T) {
	bubble(t, noLearning, func(w *world) {
		counter := &hasty{Counter: w.counter}
		w.Aggregator = aggregator.New(w.cfg, counter, w.casts, embeddedtest.Log(w.t), w.m)
		w.beat("g1", "g2")
		w.Step(context.Background())
		ask := func() error {
			_, err := w.Take(context.Background(), []schemas.TakeRequest{{Rule: "contract", Key: "s", LimitRateNanos: limit100.RateNanos, LimitBurst: limit100.Burst, Cost: 1}})
			return err
		}
		counter.err = context.DeadlineExceeded
		if ask() == nil {
			t.Error("no error of a take that was not answered")
		}
		counter.err = nil
		if err := ask(); err != nil || testutil.ToFloat64(w.m.Degraded) != 0 {
			t.Errorf("after one slow take: %v, degraded %v", err, testutil.ToFloat64(w.m.Degraded))
		}
		w.counter.Fail(errors.New("away"))
		if err := w.Reports(context.Background(), w.batch(w.report("g1", w.tokens("g1", "acme", limit100, 10, 90)))); err == nil {
			t.Fatal("no error of a counter that is away")
		}
		w.counter.Fail(nil)
		before := counter.takes
		if ask() == nil || counter.takes != before {
			t.Errorf("while nothing is granted %d takes went to the counter", counter.takes-before)
		}
		given, cancel := context.WithCancel(context.Background())
		cancel()
		if err := w.Reports(context.Background(), w.batch(w.report("g1", w.tokens("g1", "acme", limit100, 1, 0)))); err != nil {
			t.Fatal(err)
		}
		w.counter.Fail(context.Canceled)
		_ = w.Reports(given, w.batch(w.report("g1", w.tokens("g1", "acme", limit100, 1, 0))))
		if testutil.ToFloat64(w.m.Degraded) != 0 {
			t.Error("whoever gave up waiting says that the counter is away")
		}
	})
}

// TestReportsAreFoldedBeforeLimitsAreDivided: for a second after the counter is back nothing is granted: gateways say what they
// used meanwhile, and their buckets are believed. It is so whether a report or a look at a key found that the counter was away.
func TestReportsAreFoldedBeforeLimitsAreDivided(t *testing.T) {
	for _, found := range []string{"report", "look"} {
		t.Run(found, func(t *testing.T) {
			bubble(t, noLearning, func(w *world) {
				defer w.run()()
				w.beat("g1", "g2")
				time.Sleep(2 * time.Second)
				w.beat("g1", "g2")
				w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 10, 90)))
				w.counter.Fail(errors.New("away"))
				r := w.batch(w.report("g1", w.tokens("g1", "acme", limit100, 10, 90)))
				if found == "look" {
					time.Sleep(2500 * time.Millisecond)
				} else if w.Reports(context.Background(), r) == nil {
					t.Fatal("no error of a counter that is away")
				}
				if testutil.ToFloat64(w.m.Degraded) != 1 {
					t.Fatal("it was not noticed that the counter is away")
				}
				w.beat("g1", "g2")
				w.counter.Fail(nil)
				if err := w.Reports(context.Background(), r); err != nil {
					t.Fatal(err)
				}
				back := time.Now()
				w.casts.take(true)
				time.Sleep(1900 * time.Millisecond)
				frozen, free := time.Time{}, time.Time{}
				for _, c := range w.casts.take(true) {
					switch {
					case c.Frozen:
						frozen = c.at
					case free.IsZero():
						free = c.at
					}
				}
				if frozen.Sub(back) < 700*time.Millisecond || free.Sub(back) < time.Second || free.Sub(back) > 1100*time.Millisecond {
					t.Errorf("frozen until %v, free from %v after the counter was back, want about a second", frozen.Sub(back), free.Sub(back))
				}
			})
		})
	}
}

// TestSharesStandStillWhileReportsDoNotCome: when the server of the stream hangs, demand seems to end everywhere. The fleet hears that
// nothing is granted, also in what it hears late, and no share moves; tokens and shares come again with the reports.
func TestSharesStandStillWhileReportsDoNotCome(t *testing.T) {
	var deaf atomic.Bool
	bubble(t, aggregator.Config{Learn: -1, Deaf: deaf.Load}, func(w *world) {
		defer w.run()()
		defer w.alive("g1", "g2")()
		w.spend = true
		time.Sleep(1100 * time.Millisecond)
		last := func(key string) schemas.Share {
			w.casts.mu.Lock()
			defer w.casts.mu.Unlock()
			return w.casts.last["g1/"+key]
		}
		asks := func() {
			busy, idle := w.tokens("g1", "acme", limit100, 9, 1), w.tokens("g2", "acme", limit100, 1, 0)
			lease := w.tokens("g1", "leased", limit100, 5, 5)
			lease.Consistency = "lease"
			w.handle(w.report("g1", busy, lease), w.report("g2", idle))
			time.Sleep(100 * time.Millisecond)
		}
		for range 20 {
			asks()
		}
		w.casts.take(true)
		time.Sleep(650 * time.Millisecond) // until it is noticed
		before := last("acme")
		if before.RateNanos < 60e9 {
			t.Fatalf("g1, which has most of the load, has %d nanotokens a second", before.RateNanos)
		}
		w.casts.take(true)
		deaf.Store(true)
		grants := last("leased").Grant
		time.Sleep(4 * time.Second)
		said := w.casts.take(true)
		if len(said) < 2*12 { // four each second to each
			t.Errorf("%d messages in four seconds", len(said))
		}
		for _, c := range said {
			if !c.Frozen {
				t.Errorf("%s hears that tokens are granted", c.gateway)
			}
		}
		after := last("acme")
		if after.RateNanos != before.RateNanos || after.Burst != before.Burst || last("leased").Grant != grants {
			t.Errorf("g1 had %d/%d and has %d/%d; grants of the lease were %d and are %d", before.RateNanos, before.Burst, after.RateNanos, after.Burst,
				grants, last("leased").Grant)
		}
		asks() // they come in, and are listened to
		deaf.Store(false)
		w.casts.take(true)
		for range 10 {
			asks()
		}
		if said = w.casts.take(true); said[0].Frozen || said[len(said)-1].Frozen {
			t.Error("the fleet hears that nothing is granted when reports come again")
		}
		if again := last("acme"); again.RateNanos < 60e9 || last("leased").Grant <= grants {
			t.Errorf("a second after reports come again g1 has %d nanotokens a second, and %d grants of the lease, which were %d", again.RateNanos, last("leased").Grant, grants)
		}
	})
}

// TestAFleetWithoutTrafficHearsThatTheCounterIsAway: also where nothing asks the counter for tokens the fleet hears when it goes and
// when it is back, from who asks how it is all the time. That this is late says nothing while the counter answers us.
func TestAFleetWithoutTrafficHearsThatTheCounterIsAway(t *testing.T) {
	var since atomic.Int64 // it is silent, in ns; 0 while it is not
	silent := func() time.Duration {
		if at := since.Load(); at > 0 {
			return time.Since(time.Unix(0, at))
		}
		return 0
	}
	bubble(t, aggregator.Config{Learn: -1, Silent: silent}, func(w *world) {
		defer w.run()()
		defer w.alive("g1", "g2")()
		time.Sleep(12 * time.Second)
		turned := func(what string, lasts time.Duration, want bool, from, to time.Duration) {
			t.Helper()
			at := time.Now()
			w.casts.take(true)
			time.Sleep(lasts)
			var first time.Duration
			for _, c := range w.casts.take(true) {
				if c.gateway == "g1" && c.Frozen == want && first == 0 {
					first = max(c.at.Sub(at), 1)
				}
			}
			if first == 0 || first < from || first > to {
				t.Errorf("%s: the fleet hears so after %v, want from %v to %v", what, first, from, to)
			}
		}
		since.Store(time.Now().UnixNano())
		turned("away", 5*time.Second, true, time.Second, 1250*time.Millisecond)
		if n := testutil.ToFloat64(w.m.Degraded); n != 1 {
			t.Errorf("degraded %v while the counter is away", n)
		}
		if _, err := w.Take(context.Background(), []schemas.TakeRequest{{Rule: "contract", Key: "s", LimitRateNanos: limit100.RateNanos, LimitBurst: limit100.Burst, Cost: 1}}); err == nil {
			t.Error("a token was given while the counter is away")
		}
		since.Store(0)
		turned("back", 3*time.Second, false, time.Second, 1250*time.Millisecond) // after what was used meanwhile is counted
		if n := testutil.ToFloat64(w.m.Degraded); n != 0 {
			t.Errorf("degraded %v after the counter came back", n)
		}
		since.Store(time.Now().UnixNano()) // the one who asks is late, and folds are not
		for range 20 {
			w.handle(w.report("g1", w.tokens("g1", "acme", limit100, 1, 0)))
			time.Sleep(200 * time.Millisecond)
		}
		for _, c := range w.casts.take(true) {
			if c.Frozen {
				t.Fatal("a counter that answers counts as away")
			}
		}
	})
}

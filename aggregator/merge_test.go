package aggregator

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/weirhq/weir/schemas"
)

// TestMerge: the reports of a batch become one use for each bucket, whatever their order and however often each is there.
func TestMerge(t *testing.T) {
	now := time.Date(2026, 11, 29, 10, 0, 0, 0, time.UTC)
	report := func(seq, taken, refused, cum uint64, window, age time.Duration) schemas.Delivered[*schemas.Report] {
		return schemas.Delivered[*schemas.Report]{Arrived: now.Add(-age), Value: &schemas.Report{Gateway: "g1", Boot: "b", Seq: seq, Tokens: []schemas.Tokens{
			{Rule: "r", Key: "k", LimitRateNanos: 1e12, LimitBurst: 10, RateNanos: int64(seq), Capacity: 3, Taken: taken, Refused: refused, Cum: cum, Window: window}}}}
	}
	const ms = time.Millisecond
	for _, tc := range []struct {
		name  string
		items []schemas.Delivered[*schemas.Report]
		want  Use
	}{
		{"one", []schemas.Delivered[*schemas.Report]{report(1, 10, 5, 10, 100*ms, 0)},
			Use{Seq: 1, Cum: 10, From: 0, DemandNanos: 150e9, Span: 100 * ms, Lag: 100 * ms, Window: 150 * ms, Enforced: Limit{1, 3}}},
		{"in order", []schemas.Delivered[*schemas.Report]{report(1, 10, 0, 10, 100*ms, 0), report(2, 5, 15, 15, 200*ms, 0)},
			Use{Seq: 2, Cum: 15, From: 0, DemandNanos: 100e9, Span: 300 * ms, Lag: 250 * ms, Window: 250 * ms, Enforced: Limit{2, 3}}},
		{"out of order", []schemas.Delivered[*schemas.Report]{report(2, 5, 15, 15, 200*ms, 0), report(1, 10, 0, 10, 100*ms, 0)},
			Use{Seq: 2, Cum: 15, From: 0, DemandNanos: 100e9, Span: 300 * ms, Lag: 250 * ms, Window: 250 * ms, Enforced: Limit{2, 3}}},
		{"twice, and a window too short for a rate", []schemas.Delivered[*schemas.Report]{report(7, 10, 0, 90, 10*ms, 0), report(7, 10, 0, 90, 10*ms, 0)},
			Use{Seq: 7, Cum: 90, From: 80, DemandNanos: 1000e9, Span: 10 * ms, Lag: 10 * ms, Window: 60 * ms, Enforced: Limit{7, 3}}},
		{"no window", []schemas.Delivered[*schemas.Report]{report(1, 10, 0, 10, 0, 0)},
			Use{Seq: 1, Cum: 10, From: 0, DemandNanos: 10e9, Span: time.Second, Lag: 0, Window: 50 * ms, Enforced: Limit{1, 3}}},
		{"a long window", []schemas.Delivered[*schemas.Report]{report(1, 0, 60, 10, time.Minute, 0)},
			Use{Seq: 1, Cum: 10, From: 10, DemandNanos: 1e9, Span: time.Minute, Lag: 150 * ms, Window: 10*time.Second + 50*ms, Enforced: Limit{1, 3}}},
		{"late", []schemas.Delivered[*schemas.Report]{report(1, 10, 5, 10, 100*ms, time.Minute)}, Use{Seq: 1, Cum: 10, From: 10, Settled: 10, late: true}},
		{"not late, then late", []schemas.Delivered[*schemas.Report]{report(1, 10, 0, 10, 100*ms, 0), report(2, 5, 0, 15, 100*ms, time.Minute)},
			Use{Seq: 2, Cum: 15, From: 15, Settled: 15, DemandNanos: 100e9, Span: 100 * ms, Lag: 100 * ms, Window: 150 * ms, Enforced: Limit{1, 3}}},
		{"given back", []schemas.Delivered[*schemas.Report]{report(2, 0, 0, 8, 100*ms, 0), report(1, 10, 0, 10, 100*ms, 0)},
			Use{Seq: 2, Cum: 8, From: 0, DemandNanos: 50e9, Span: 200 * ms, Lag: 200 * ms, Window: 150 * ms, Enforced: Limit{2, 3}}},
		{"late, then not", []schemas.Delivered[*schemas.Report]{report(1, 10, 5, 10, 100*ms, time.Minute), report(2, 5, 0, 15, 100*ms, 0)},
			Use{Seq: 2, Cum: 15, From: 10, Settled: 10, DemandNanos: 50e9, Span: 100 * ms, Lag: 100 * ms, Window: 150 * ms, Enforced: Limit{2, 3}}},
		{"more than the whole limit", []schemas.Delivered[*schemas.Report]{report(1, 0, schemas.MaxCount, 0, 100*ms, 0)},
			Use{Seq: 1, DemandNanos: 1e12, Span: 100 * ms, Lag: 100 * ms, Window: 150 * ms, Enforced: Limit{1, 3}}},
		{"taken more than ever", []schemas.Delivered[*schemas.Report]{report(1, 10, 0, 3, 100*ms, 0)},
			Use{Seq: 1, Cum: 3, From: 0, DemandNanos: 100e9, Span: 100 * ms, Lag: 100 * ms, Window: 150 * ms, Enforced: Limit{1, 3}}},
	} {
		tc.want.Gateway, tc.want.Boot = "g1", "b"
		folds := merge(tc.items, now, 30*time.Second)
		if len(folds) != 1 || len(folds[0].Uses) != 1 || folds[0].Limit != (Limit{1e12, 10}) {
			t.Errorf("%s: merge = %+v, want one use of one key", tc.name, folds)
			continue
		}
		got := folds[0].Uses[0]
		if want := float64(got.asked) - 2*math.Sqrt(float64(got.asked)); got.Seq > 0 && tc.want.DemandNanos < 1e12 && math.Abs(float64(got.SureNanos)-max(want, 0)/max(got.Span, 10*ms).Seconds()*1e9) > 1 {
			t.Errorf("%s: sure of %d, want %.1f in %v", tc.name, got.SureNanos, want, got.Span)
		}
		if got.taken > got.asked {
			t.Errorf("%s: %d taken of %d asked for", tc.name, got.taken, got.asked)
		}
		got.asked, got.taken, got.SureNanos = 0, 0, 0
		if got != tc.want {
			t.Errorf("%s: use\n got %+v\nwant %+v", tc.name, got, tc.want)
		}
	}
}

// TestLateUseOfASlowLimit: 300 tokens of 60 per hour are not earned again within a minute. A late report of them is no news of what is
// asked for, and they are charged, until the bucket would be full again without them.
func TestLateUseOfASlowLimit(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	report := func(seq, taken, cum uint64, age time.Duration) schemas.Delivered[*schemas.Report] {
		return schemas.Delivered[*schemas.Report]{Arrived: now.Add(-age), Value: &schemas.Report{Gateway: "g1", Boot: "b", Seq: seq, Tokens: []schemas.Tokens{
			{Rule: "r", Key: "k", LimitRateNanos: 16_666_667, LimitBurst: 300, Taken: taken, Cum: cum, Window: time.Second}}}}
	}
	for _, tc := range []struct {
		name  string
		items []schemas.Delivered[*schemas.Report]
		from  uint64
		late  bool
	}{
		{"a minute", []schemas.Delivered[*schemas.Report]{report(1, 299, 299, time.Minute)}, 0, true},
		{"four hours, a minute, and now", []schemas.Delivered[*schemas.Report]{report(1, 9, 9, 4*time.Hour), report(2, 1, 10, time.Minute), report(3, 1, 11, 0)}, 0, false},
		{"six hours, and a minute", []schemas.Delivered[*schemas.Report]{report(1, 9, 9, 6*time.Hour), report(2, 1, 10, time.Minute)}, 9, true},
	} {
		u := merge(tc.items, now, 30*time.Second)[0].Uses[0]
		if u.From != tc.from || u.late != tc.late || (u.DemandNanos == 0) != tc.late {
			t.Errorf("%s: charged from %d, news: %v, want from %d, %v: %+v", tc.name, u.From, !u.late, tc.from, !tc.late, u)
		}
	}
}

// nothing is a counter that knows every key, and a caster that casts nothing.
type nothing struct{ version uint64 }

func (n *nothing) Fold(_ context.Context, folds []Fold) ([]KeyState, error) {
	states := make([]KeyState, len(folds))
	for i := range folds {
		n.version++
		f := &folds[i]
		states[i] = KeyState{Key: f.Key, Limit: f.Limit, LevelMicros: f.Limit.Burst * 1e6, Version: n.version,
			Demands: []Demand{{Gateway: f.Uses[0].Gateway, RateNanos: f.Uses[0].DemandNanos, Since: 1}}}
	}
	return states, nil
}
func (*nothing) Take(context.Context, []Take) ([]Taken, error)               { return nil, nil }
func (*nothing) Epoch(context.Context) (uint64, error)                       { return 1, nil }
func (*nothing) Mark(context.Context, []Key) error                           { return nil }
func (*nothing) Live(context.Context) ([]KeyState, error)                    { return nil, nil }
func (*nothing) Cast(context.Context, string, *schemas.ThrottleUpdate) error { return nil }

// BenchmarkReports takes batches of 100 reports of 100 records from ten gateways, 2000 keys of which one in twenty is pressed, with
// the counter and the caster stubbed.
func BenchmarkReports(b *testing.B) {
	const reports, records, keys = 100, 100, 2000
	a := New(Config{Learn: -1}, &nothing{}, &nothing{}, slog.New(slog.NewTextHandler(io.Discard, nil)), nil)
	var batch schemas.Batch[*schemas.Report]
	for i := range reports {
		r := &schemas.Report{Gateway: "gateway-" + strconv.Itoa(i%10), Boot: "01J0000000000000000000000A", Seq: uint64(i + 1)}
		for j := range records {
			k := (i*records + j) * 7919 % keys
			taken := uint64(1)
			if k%20 == 0 {
				taken = 100
			}
			r.Tokens = append(r.Tokens, schemas.Tokens{Rule: "contract", Key: fmt.Sprint("tenant-", k), RateNanos: 8e9, Capacity: 16, LimitRateNanos: 80e9, LimitBurst: 160,
				Taken: taken, Cum: uint64(i + 1), Window: 100 * time.Millisecond})
		}
		batch.Items = append(batch.Items, schemas.Delivered[*schemas.Report]{Seq: uint64(i), Arrived: time.Now(), Value: r})
	}
	for b.Loop() {
		if err := a.Reports(context.Background(), batch); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*reports*records), "ns/record")
}

// TestTheDelaysOfTheGoneAreForgotten: also when a report of one comes late.
func TestTheDelaysOfTheGoneAreForgotten(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	a := New(Config{Learn: -1, Now: func() time.Time { return now }}, &nothing{}, &nothing{}, slog.New(slog.DiscardHandler), nil)
	report := func(seq uint64, arrived time.Time) {
		t.Helper()
		r := &schemas.Report{Gateway: "g1", Boot: "b", Seq: seq, SealedAt: arrived,
			Tokens: []schemas.Tokens{{Rule: "r", Key: "k", Taken: 1, Cum: seq, LimitRateNanos: 1e9, LimitBurst: 10, Window: time.Second}}}
		if err := a.Reports(context.Background(), schemas.Batch[*schemas.Report]{Items: []schemas.Delivered[*schemas.Report]{{Seq: seq, Arrived: arrived, Value: r}}}); err != nil {
			t.Fatal(err)
		}
	}
	report(1, now)
	if len(a.delays) != 1 {
		t.Errorf("%d delays of one gateway", len(a.delays))
	}
	a.Heartbeat(&schemas.Heartbeat{Gateway: "g1", Boot: "b", Mode: schemas.ModeStopped}, now)
	report(2, now) // its last one
	now = now.Add(time.Minute)
	a.expire()
	report(3, now.Add(-time.Minute))
	if len(a.delays) != 0 || len(a.fleet) != 0 {
		t.Errorf("%d delays of a gateway that is gone, in a fleet of %d", len(a.delays), len(a.fleet))
	}
}

// TestMemoryIsBounded: keys × gateways, as the fleet grows, too; and a fleet that asks for snapshots at once plans each key once.
func TestMemoryIsBounded(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	a := New(Config{Learn: -1, MaxShares: 600, Now: func() time.Time { return now }}, &nothing{}, &nothing{}, slog.New(slog.DiscardHandler), nil)
	r := &schemas.Report{Gateway: "g1", Boot: "b", Seq: 1}
	for k := range 100 {
		r.Tokens = append(r.Tokens, schemas.Tokens{Rule: "r", Key: fmt.Sprint(k), Taken: 1, Refused: 1000, Cum: 1, LimitRateNanos: 1e9, LimitBurst: 1000, Window: time.Second})
	}
	entries := func() (n int) {
		for _, e := range a.keys {
			n += len(e.held)
		}
		return n
	}
	grow := func(gateways int) {
		for g := range gateways {
			a.Heartbeat(&schemas.Heartbeat{Gateway: fmt.Sprint("g", g), Boot: "b"}, now)
		}
		r.Seq++
		if err := a.Reports(context.Background(), schemas.Batch[*schemas.Report]{Items: []schemas.Delivered[*schemas.Report]{{Seq: r.Seq, Arrived: now, Value: r}}}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ gateways, keys int }{{4, 100}, {20, 30}, {1000, 1}} {
		grow(c.gateways)
		if len(a.keys) != c.keys || entries() > max(600, c.gateways) {
			t.Errorf("%d gateways: %d keys and %d entries, want %d keys", c.gateways, len(a.keys), entries(), c.keys)
		}
	}
}

// lively has live keys.
type lively struct {
	nothing
	states []KeyState
}

func (l *lively) Live(context.Context) ([]KeyState, error) { return l.states, nil }

// TestAHerdPlansEachKeyOnce: when all gateways ask for a snapshot, the first one's work serves the others, and they are told the
// same as if each had been alone.
func TestAHerdPlansEachKeyOnce(t *testing.T) {
	const gateways, keys = 300, 50
	now := time.Unix(1_800_000_000, 0)
	l := &lively{}
	for k := range keys {
		l.states = append(l.states, KeyState{Key: Key{"r", fmt.Sprint(k)}, Limit: Limit{1000e9, 10_000}, LevelMicros: 5e9, Version: 1, At: 1e15,
			Demands: []Demand{{Gateway: "g7", RateNanos: 5000e9, Since: 1}}})
	}
	a := New(Config{Learn: -1, Now: func() time.Time { return now }}, l, &nothing{}, slog.New(slog.DiscardHandler), nil)
	for g := range gateways {
		a.Heartbeat(&schemas.Heartbeat{Gateway: fmt.Sprint("g", g), Boot: "b"}, now)
	}
	sums := make(map[string]Limit)
	ask := func(gateway string) (bytes uint64) {
		t.Helper()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		u, err := a.Snapshot(context.Background(), gateway)
		runtime.ReadMemStats(&after)
		if err != nil || len(u.Shares) != keys {
			t.Fatalf("snapshot of %s: %d shares, %v", gateway, len(u.Shares), err)
		}
		for _, s := range u.Shares {
			sums[s.Key] = Limit{sums[s.Key].RateNanos + s.RateNanos, sums[s.Key].Burst + s.Burst}
		}
		return after.TotalAlloc - before.TotalAlloc
	}
	first, others := ask("g0"), uint64(0)
	for g := range gateways - 1 {
		others += ask(fmt.Sprint("g", g+1))
	}
	if mean := others / (gateways - 1); mean*20 > first {
		t.Errorf("the first snapshot took %d bytes, each of the others %d: it planned anew", first, mean)
	}
	for k, sum := range sums {
		if sum != (Limit{1000e9, 10_000}) {
			t.Errorf("shares of %s add up to %v", k, sum)
		}
	}
	for _, e := range a.keys {
		for g, h := range e.held {
			if !h.told || h.next != nil {
				t.Fatalf("%s was told its share, and it is not known: %+v", g, h)
			}
		}
	}
}

// Gateways can say what they like, as often as they like: nothing of it wraps.
func TestWhatGatewaysSayDoesNotWrap(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	var items []schemas.Delivered[*schemas.Report]
	for seq := range uint64(2100) { // of 2^53 tokens each, taken and refused: above 2^64
		items = append(items, schemas.Delivered[*schemas.Report]{Arrived: now, Value: &schemas.Report{Gateway: "g1", Boot: "b", Seq: seq + 1, Tokens: []schemas.Tokens{
			{Rule: "r", Key: "k", LimitRateNanos: math.MaxInt64, LimitBurst: math.MaxInt64, RateNanos: math.MaxInt64, Capacity: math.MaxInt64, TokensLast: math.MaxInt64,
				Taken: schemas.MaxCount, Refused: schemas.MaxCount, Cum: schemas.MaxCount, Window: math.MaxInt64}}}})
	}
	u := merge(items, now, time.Minute)[0].Uses[0]
	if u.asked != schemas.MaxCount || u.taken != schemas.MaxCount || u.Span != demandSpanMax || u.DemandNanos <= 0 || u.SureNanos <= 0 || u.Lag < 0 {
		t.Errorf("merged to %+v", u)
	}
	e := entry{held: map[string]*held{}}
	at := now.UnixMicro()
	for range 2 {
		e.note(&u, at)
		h := e.held["g1"]
		if n := h.holds(h.asOf); n < MaxBurst*1e6 {
			t.Errorf("holds %d millionths of a token, want all that there can be", n)
		}
		h.grant = schemas.MaxCount // all that it can ever be granted is on its way
		u.Seq++
	}
}

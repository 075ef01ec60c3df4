package ingest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"pgregory.net/rapid"

	"github.com/weirhq/weir/schemas"
)

var quiet = slog.New(slog.DiscardHandler)

// table is a fake of the gateway's buckets: what is put into it is emitted once.
type table struct {
	mu        sync.Mutex
	hot, cold []schemas.Tokens
	signal    chan struct{}
	calls     []time.Time
	alls      []time.Time
}

func newTable() *table { return &table{signal: make(chan struct{}, 1)} }

func (b *table) Collect(_ int64, all bool, emit func(schemas.Tokens)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls = append(b.calls, time.Now())
	for _, t := range b.hot {
		emit(t)
	}
	b.hot = nil
	if all {
		b.alls = append(b.alls, time.Now())
		for _, t := range b.cold {
			emit(t)
		}
		b.cold = nil
	}
}

func (b *table) Hot() <-chan struct{} { return b.signal }

// put adds t to what the bucket has to say, as real ones do.
func (b *table) put(hot bool, t schemas.Tokens) {
	b.mu.Lock()
	defer b.mu.Unlock()
	same := func(o schemas.Tokens) bool {
		return o.Rule == t.Rule && o.Key == t.Key && o.Incarnation == t.Incarnation
	}
	for _, list := range []*[]schemas.Tokens{&b.hot, &b.cold} {
		i := slices.IndexFunc(*list, same)
		if i < 0 {
			continue
		}
		have := (*list)[i]
		t.Taken, t.Refused, t.Window, t.TokensMin = t.Taken+have.Taken, t.Refused+have.Refused, t.Window+have.Window, min(t.TokensMin, have.TokensMin)
		*list = slices.Delete(*list, i, i+1)
		hot = hot || list == &b.hot
	}
	if hot { // and goes out with all that it has to say
		b.hot = append(b.hot, t)
	} else {
		b.cold = append(b.cold, t)
	}
}

// stream is a fake of the far side. It stores a report once, and may lose a publish or the answer to it.
type stream struct {
	mu      sync.Mutex
	away    bool
	fault   func() (stored bool, err error) // nil: stored, no error
	reports []*schemas.Report
	at      []time.Time
	bytes   map[uint64][]byte
	wrong   []string
}

func (s *stream) Publish(_ context.Context, r *schemas.Report) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, err := schemas.EncodeReport(r)
	if err != nil {
		s.wrong = append(s.wrong, err.Error())
		return err
	}
	if s.bytes == nil {
		s.bytes = map[uint64][]byte{}
	}
	if have, ok := s.bytes[r.Seq]; ok && !bytes.Equal(have, body) {
		s.wrong = append(s.wrong, fmt.Sprintf("report %d has changed", r.Seq))
	}
	s.bytes[r.Seq] = body
	if _, err := schemas.DecodeReport(schemas.UsagePrefix+r.Gateway, schemas.ContentProtobuf, body, time.Now()); err != nil {
		s.wrong = append(s.wrong, err.Error())
	}
	if len(body) >= 512<<10 {
		s.wrong = append(s.wrong, fmt.Sprintf("report %d has %d bytes", r.Seq, len(body)))
	}
	stored, err := !s.away, error(nil)
	if s.away {
		err = errors.New("nats is away")
	} else if s.fault != nil {
		stored, err = s.fault()
	}
	if last := uint64(len(s.reports)); stored && r.Seq > last {
		if r.Seq != last+1 {
			s.wrong = append(s.wrong, fmt.Sprintf("report %d comes after %d", r.Seq, last))
		}
		s.reports = append(s.reports, r)
		s.at = append(s.at, time.Now())
	}
	return err
}

func (s *stream) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
}

// sums adds up what is stored, by the key of a request.
func (s *stream) sums() (requests map[usageKey]uint64, cost map[usageKey]uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	requests, cost = map[usageKey]uint64{}, map[usageKey]uint64{}
	for _, r := range s.reports {
		for _, u := range r.Usage {
			k := usageKey{u.Tenant, u.Route, u.Rule, u.Layer}
			requests[k] += u.Allowed + u.Rejected
			cost[k] += u.Cost
		}
	}
	return requests, cost
}

func (s *stream) check(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.wrong {
		t.Error(w)
	}
}

// begin runs r. The returned function stops it and returns what Run returned.
func begin(r *Reporter) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return sync.OnceValue(func() error { cancel(); return <-done })
}

func TestUsageIsReportedEverySecondAndBucketsByHeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		buckets, far := newTable(), &stream{}
		m := NewMetrics(prometheus.NewRegistry())
		r := New(Config{PolicyVersion: func() uint64 { return 9 }}, "gw", "boot", buckets, far, quiet, m)
		stop := begin(r)
		first := time.Now()
		r.Count(first, "acme", "export", "", "", 1)
		time.Sleep(10 * time.Millisecond)
		r.Count(time.Now(), "acme", "export", "", "", 3)
		r.Count(time.Now(), "acme", "export", "contract", "contract", 1)
		buckets.put(true, schemas.Tokens{Rule: "contract", Key: "acme", Cum: 5, Taken: 5})
		buckets.put(false, schemas.Tokens{Rule: "contract", Key: "cold", Cum: 1, Taken: 1})
		if reports, requests := r.Pending(); reports != 0 || requests != 3 {
			t.Errorf("Pending() = %d, %d, want 0, 3", reports, requests)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()

		if len(far.reports) != 3 {
			t.Fatalf("%d reports, want 3: hot, usage, cold", len(far.reports))
		}
		for i, want := range []time.Duration{100 * time.Millisecond, time.Second, 2 * time.Second} {
			if got := far.at[i].Sub(first); got != want {
				t.Errorf("report %d came after %s, want %s", i+1, got, want)
			}
		}
		if hot := far.reports[0]; len(hot.Tokens) != 1 || hot.Tokens[0].Key != "acme" || len(hot.Usage) != 0 {
			t.Errorf("first report = %+v", hot)
		}
		usage := far.reports[1]
		if len(usage.Usage) != 2 || usage.Gateway != "gw" || usage.Boot != "boot" || usage.Seq != 2 || usage.PolicyVersion != 9 || !usage.SealedAt.Equal(first.Add(time.Second)) {
			t.Errorf("second report = %+v", usage)
		}
		for _, u := range usage.Usage {
			switch {
			case u.Rule == "" && u.Allowed == 2 && u.Cost == 4 && u.Rejected == 0 && u.Time.Equal(first):
			case u.Rule == "contract" && u.Layer == "contract" && u.Rejected == 1 && u.Cost == 1 && u.Allowed == 0 && u.Time.Equal(first.Add(10*time.Millisecond)):
			default:
				t.Errorf("usage = %+v", u)
			}
		}
		if cold := far.reports[2]; len(cold.Tokens) != 1 || cold.Tokens[0].Key != "cold" {
			t.Errorf("third report = %+v", cold)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		for stage, c := range map[string]prometheus.Counter{"admitted": m.Admitted, "spooled": m.Spooled, "acked": m.Acked} {
			if n := testutil.ToFloat64(c); n != 3 {
				t.Errorf("%s = %v, want 3", stage, n)
			}
		}
		if n := testutil.ToFloat64(m.Reports); n != 0 {
			t.Errorf("pending reports = %v, want 0", n)
		}
		far.check(t)
	})
}

func TestHotBucketGoesOutAtOnceButNotTooOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		buckets, far := newTable(), &stream{}
		r := New(Config{}, "gw", "boot", buckets, far, quiet, nil)
		stop := begin(r)
		time.Sleep(150 * time.Millisecond)
		synctest.Wait()
		at := time.Now()
		buckets.calls = nil
		for i := range 20 { // a bucket that cries every millisecond
			buckets.put(true, schemas.Tokens{Rule: "r", Key: "k", Cum: uint64(i)})
			select {
			case buckets.signal <- struct{}{}:
			default:
			}
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		var after []time.Duration
		for _, c := range buckets.calls {
			after = append(after, c.Sub(at))
		}
		if len(after) < 2 || after[0] != 0 || len(after) > 3 {
			t.Fatalf("buckets were read after %v, want at once and then every 10ms", after)
		}
		for i := 1; i < len(after); i++ {
			if d := after[i] - after[i-1]; d < 10*time.Millisecond {
				t.Errorf("buckets were read after %v: less than 10ms apart", after)
			}
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	})
}

// The first rejections of each flush are samples, and no more. Whatever they hold can be sent.
func TestRejectionsAreSampled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &stream{}
		m := NewMetrics(prometheus.NewRegistry())
		r := New(Config{MaxRejections: 5}, "gw", "boot", newTable(), far, quiet, m)
		stop := begin(r)
		for range 2 {
			for i := range 1000 {
				r.Reject(schemas.Rejection{Time: time.Now(), Tenant: fmt.Sprint(i), Path: "/\xff" + strings.Repeat("é", 300)})
			}
			time.Sleep(1100 * time.Millisecond)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, rep := range far.reports {
			n += len(rep.Rejections)
		}
		if n != 10 {
			t.Errorf("%d samples, want 5 in each of two flushes", n)
		}
		if kept, dropped := testutil.ToFloat64(m.Rejections.WithLabelValues("kept")), testutil.ToFloat64(m.Rejections.WithLabelValues("dropped")); kept != 10 || dropped != 1990 {
			t.Errorf("kept %v and dropped %v, want 10 and 1990", kept, dropped)
		}
		far.check(t)
	})
}

// B024: a tenant that is no text must neither stop the reports of the others nor vanish.
func TestB024BytesThatAreNoTextAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &stream{}
		r := New(Config{}, "gw", "boot", newTable(), far, quiet, nil)
		stop := begin(r)
		r.Count(time.Now(), "\xff\xfe", "r\xe5", "", "", 1)
		r.Count(time.Now(), "k"+strings.Repeat("é", 5000), "r", "", "", 1)
		r.Count(time.Now(), "good", "r", "", "", 1)
		r.Count(time.Now(), "good", "r", "rule\xff", "la\xffyer", -5)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		far.check(t)
		requests, _ := far.sums()
		want := map[usageKey]uint64{
			{"\uFFFD", "r\uFFFD", "", ""}:                 1,
			{"k" + strings.Repeat("é", 127), "r", "", ""}: 1,
			{"good", "r", "", ""}:                         1,
			{"good", "r", "rule\uFFFD", "la\uFFFDyer"}:    1,
		}
		for k, n := range want {
			if requests[k] != n {
				t.Errorf("%q = %d, want %d", k, requests[k], n)
			}
		}
		if len(requests) != len(want) {
			t.Errorf("stored %v", requests)
		}
	})
}

// B051: what was counted before the end is stored, whatever the flush interval; here 1250 requests at once.
func TestB051NothingIsLostOnShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &stream{}
		buckets := newTable()
		r := New(Config{UsageEvery: time.Minute, AllEvery: time.Minute, MaxEntries: 10}, "gw", "boot", buckets, far, quiet, nil)
		stop := begin(r)
		for i := range 1250 {
			r.Count(time.Now(), fmt.Sprint(i%100), "r", "", "", 1)
		}
		buckets.put(false, schemas.Tokens{Rule: "r", Key: "k", Cum: 7, Taken: 7})
		begun := time.Now()
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took > time.Second {
			t.Errorf("draining took %s", took)
		}
		requests, _ := far.sums()
		if n := total(requests); n != 1250 {
			t.Errorf("%d requests are stored, want 1250", n)
		}
		tokens := 0
		for _, rep := range far.reports {
			tokens += len(rep.Tokens)
		}
		if tokens != 1 {
			t.Errorf("%d bucket records, want 1", tokens)
		}
	})
}

// moody is a spool that refuses groups at times, and looks whether anybody says before it is so that a group is kept.
type moody struct {
	*memory
	seq     uint64 // of the last report that it keeps
	newest  func() uint64
	refuse  atomic.Bool
	refused atomic.Int64 // groups with requests
	ahead   atomic.Uint64
}

func (s *moody) Seq() uint64 { return s.seq }

func (s *moody) Commit(generation uint32) error {
	if n := s.newest(); n > s.seq {
		s.ahead.Store(n)
	}
	if s.refuse.Load() {
		if s.group = nil; generation > 0 {
			s.refused.Add(1)
		}
		return errors.New("refused")
	}
	s.seq = s.group[len(s.group)-1].Seq
	return s.memory.Commit(generation)
}

// What a gateway says it has sealed is kept, whoever asks when: not what the spool is just taking or has refused, and not buckets alone.
func TestNewestIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &moody{memory: newMemory(64), seq: 4} // a start has found as many of its own
		buckets := newTable()
		r := New(Config{Spool: s, MaxEntries: 10}, "gw", "boot", buckets, &stream{}, quiet, nil)
		s.newest = r.Newest
		want := func(n uint64, when string) {
			t.Helper()
			if got := r.Newest(); got != n {
				t.Errorf("%s: newest is %d, want %d", when, got, n)
			}
		}
		want(4, "at the start")
		stop := begin(r)
		buckets.put(true, schemas.Tokens{Rule: "r", Key: "k", Cum: 7, Taken: 7})
		time.Sleep(500 * time.Millisecond)
		want(4, "after a report of a bucket, which is 5")
		s.refuse.Store(true)
		for i := range 25 {
			r.Count(time.Now(), fmt.Sprint(i), "r", "", "", 1)
		}
		time.Sleep(2 * time.Second)
		want(4, "refused")
		if s.refused.Load() == 0 {
			t.Error("the spool was not asked")
		}
		s.refuse.Store(false)
		time.Sleep(2 * time.Second)
		want(8, "after 25 counts, 10 in a report")
		if err := stop(); err != nil {
			t.Error(err)
		}
		if n := s.ahead.Load(); n > 0 {
			t.Errorf("%d is said to be the newest while it is being sealed", n)
		}
	})
}

func total(m map[usageKey]uint64) (n uint64) {
	for _, v := range m {
		n += v
	}
	return n
}

// A server that is away does not hold the process longer than DrainTimeout, and the error says what is left.
func TestShutdownIsBoundedAndSaysWhatIsLeft(t *testing.T) {
	for left, want := range map[time.Duration]time.Duration{time.Minute: 3 * time.Second, time.Second: time.Second, -time.Second: 0} {
		synctest.Test(t, func(t *testing.T) {
			far := &stream{away: true}
			r := New(Config{DrainTimeout: 3 * time.Second, Left: func() time.Duration { return left }, MaxReports: 2, MaxEntries: 10}, "gw", "boot", newTable(), far, quiet, nil)
			stop := begin(r)
			for i := range 100 {
				r.Count(time.Now(), fmt.Sprint(i), "r", "", "", 1)
			}
			time.Sleep(5 * time.Second)
			begun := time.Now()
			err := stop()
			if took := time.Since(begun); took != want {
				t.Errorf("draining took %s with %s left, want %s", took, left, want)
			}
			if err == nil || !strings.Contains(err.Error(), "10 reports and 100 requests") || !strings.Contains(err.Error(), "nats is away") {
				t.Errorf("Run = %v, want 10 reports, 100 requests and the cause", err)
			}
		})
	}
}

// Nor does a server that hangs. What our own end cancelled must not look like a clean end.
func TestShutdownBeforeAHangingServerIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := publisherFunc(func(ctx context.Context, _ *schemas.Report) error { <-ctx.Done(); return ctx.Err() })
		r := New(Config{DrainTimeout: 3 * time.Second, PublishTimeout: time.Hour}, "gw", "boot", newTable(), hang, quiet, nil)
		stop := begin(r)
		r.Count(time.Now(), "t", "r", "", "", 1)
		time.Sleep(5 * time.Second)
		if err := stop(); err == nil || errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v, want an error that says what is left", err)
		}
	})
}

// Requests that come in while we drain are in, too.
func TestRequestsDuringTheDrainAreStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &stream{away: true}
		r := New(Config{}, "gw", "boot", newTable(), far, quiet, nil)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		r.Count(time.Now(), "a", "r", "", "", 1)
		cancel()
		time.Sleep(time.Second)
		r.Count(time.Now(), "late", "r", "", "", 1)
		far.setAway(false)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		requests, _ := far.sums()
		if total(requests) != 2 {
			t.Errorf("stored %v, want both", requests)
		}
	})
}

func TestFailuresAreToldOnceAndThenSummarised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		far := &stream{away: true}
		m := NewMetrics(prometheus.NewRegistry())
		r := New(Config{}, "gw", "boot", newTable(), far, slog.New(slog.NewTextHandler(&out, nil)), m)
		stop := begin(r)
		r.Count(time.Now(), "a", "r", "", "", 1)
		time.Sleep(5*time.Minute + 30*time.Second)
		synctest.Wait()
		if n := testutil.ToFloat64(m.Degraded); n != 1 {
			t.Errorf("degraded = %v, want 1", n)
		}
		far.setAway(false)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if n := testutil.ToFloat64(m.Degraded); n != 0 {
			t.Errorf("degraded = %v, want 0", n)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(out.String(), "\n"); n < 6 || n > 7 {
			t.Errorf("%d lines for an outage of five minutes, want one, one a minute, and one at its end:\n%s", n, out.String())
		}
	})
}

// Property: what is counted is what is stored, to the unit, over random failures, lost answers, splits, outages with
// merging, and a shutdown.
func TestWhatIsCountedIsWhatIsStored(t *testing.T) {
	type bucketKey struct {
		rule, key   string
		incarnation uint32
	}
	synctestRapid(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		rng, faults := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2)) // one for each goroutine
		far := &stream{fault: func() (bool, error) {
			switch faults.IntN(4) {
			case 0:
				return false, errors.New("lost")
			case 1:
				return true, errors.New("answer lost")
			}
			return true, nil
		}}
		buckets := newTable()
		cfg := Config{MaxEntries: rapid.IntRange(1, 20).Draw(t, "entries"), MaxReports: rapid.IntRange(1, 5).Draw(t, "reports"),
			MaxBytes: rapid.SampledFrom([]int{300, 1000, 512 << 10}).Draw(t, "bytes"), DrainTimeout: time.Hour}
		nap := 3 * time.Second
		if rapid.Bool().Draw(t, "long") { // outages of hours, at a slower pace
			cfg.HotEvery, cfg.RetryMax, nap = 10*time.Second, 2*time.Minute, 40*time.Minute
		}
		m := NewMetrics(prometheus.NewRegistry())
		r := New(cfg, "gw", "boot", buckets, far, quiet, m)
		stop := begin(r)
		defer func() { _ = stop() }() // a bubble ends when all in it has ended
		requests, cost := map[usageKey]uint64{}, map[usageKey]uint64{}
		taken, cum := map[bucketKey]uint64{}, map[bucketKey]uint64{}
		var n uint64
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			far.setAway(rng.IntN(3) == 0)
			for range rng.IntN(50) {
				k := usageKey{tenant: fmt.Sprint("t", rng.IntN(30)), route: fmt.Sprint("r", rng.IntN(2))}
				if rng.IntN(3) == 0 {
					k.rule, k.layer = "contract", "contract"
				}
				c := rng.Int64N(5) + 1
				r.Count(time.Now(), k.tenant, k.route, k.rule, k.layer, c)
				requests[k]++
				cost[k] += uint64(c)
				n++
			}
			for range rng.IntN(10) {
				b := bucketKey{rule: "contract", key: fmt.Sprint("t", rng.IntN(5)), incarnation: uint32(rng.IntN(2))}
				d := rng.Uint64N(9)
				taken[b] += d
				cum[b] += d
				buckets.put(rng.IntN(2) == 0, schemas.Tokens{Rule: b.rule, Key: b.key, Incarnation: b.incarnation, Taken: d, Cum: cum[b], Window: time.Millisecond})
			}
			time.Sleep(time.Duration(rng.Int64N(int64(nap))))
		}
		far.setAway(false)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		far.mu.Lock()
		for _, w := range far.wrong {
			t.Error(w)
		}
		far.mu.Unlock()
		gotRequests, gotCost := far.sums()
		for k := range requests {
			if gotRequests[k] != requests[k] || gotCost[k] != cost[k] {
				t.Fatalf("%+v: stored %d of cost %d, want %d of %d", k, gotRequests[k], gotCost[k], requests[k], cost[k])
			}
		}
		if got := total(gotRequests); got != n {
			t.Fatalf("stored %d, want %d", got, n)
		}
		gotTaken, gotCum := map[bucketKey]uint64{}, map[bucketKey]uint64{}
		for _, rep := range far.reports {
			if e := len(rep.Usage) + len(rep.Tokens) + len(rep.Rejections); e > cfg.MaxEntries {
				t.Fatalf("report %d has %d entries, want at most %d", rep.Seq, e, cfg.MaxEntries)
			}
			if e := len(rep.Usage) + len(rep.Tokens); len(far.bytes[rep.Seq]) > cfg.MaxBytes && e > 1 {
				t.Fatalf("report %d has %d bytes, want at most %d", rep.Seq, len(far.bytes[rep.Seq]), cfg.MaxBytes)
			}
			for _, b := range rep.Tokens {
				k := bucketKey{b.Rule, b.Key, b.Incarnation}
				gotTaken[k] += b.Taken
				gotCum[k] = max(gotCum[k], b.Cum)
			}
		}
		for k := range taken {
			if gotTaken[k] != taken[k] || gotCum[k] != cum[k] {
				t.Fatalf("%+v: taken %d and cum %d, want %d and %d", k, gotTaken[k], gotCum[k], taken[k], cum[k])
			}
		}
		for stage, c := range map[string]prometheus.Counter{"admitted": m.Admitted, "spooled": m.Spooled, "acked": m.Acked} {
			if got := testutil.ToFloat64(c); got != float64(n) {
				t.Fatalf("%s = %v, want %d", stage, got, n)
			}
		}
		if a, b, c := testutil.ToFloat64(m.Degraded), testutil.ToFloat64(m.Reports), testutil.ToFloat64(m.Merged); a != 0 || b != 0 || c != 0 {
			t.Fatalf("gauges at the end: degraded %v, reports %v, merged %v, want 0", a, b, c)
		}
	})
}

// synctestRapid runs each check of a property in a bubble of its own.
func synctestRapid(t *testing.T, prop func(*rapid.T)) {
	t.Helper()
	rapid.Check(t, func(rt *rapid.T) {
		var failure any // rapid fails by a panic, which must not end the bubble
		synctest.Test(t, func(*testing.T) {
			defer func() { failure = recover() }()
			prop(rt)
		})
		if failure != nil {
			panic(failure)
		}
	})
}

// An entry of an outage stays in its hour, under the first request's time.
func TestMergingKeepsTheHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &stream{away: true}
		buckets := newTable()
		r := New(Config{MaxReports: 1}, "gw", "boot", buckets, far, quiet, nil)
		stop := begin(r)
		begun := time.Now() // a full hour, in a bubble
		for i := range 150 {
			r.Count(time.Now(), "a", "r", "", "", 1)
			buckets.put(true, schemas.Tokens{Rule: "c", Key: "a", Cum: uint64(i + 1), Taken: 1, Refused: 2, TokensMin: int64(100 - i%7), TokensLast: int64(i), Window: time.Minute})
			time.Sleep(time.Minute)
		}
		far.setAway(false)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		far.check(t)
		perHour := map[int]uint64{}
		entries := 0
		for _, rep := range far.reports {
			for _, u := range rep.Usage {
				perHour[int(u.Time.Sub(begun)/time.Hour)] += u.Allowed
				entries++
			}
		}
		if perHour[0] != 60 || perHour[1] != 60 || perHour[2] != 30 {
			t.Errorf("requests by hour = %v, want 60, 60, 30", perHour)
		}
		if entries > 5 {
			t.Errorf("%d entries for three hours of one tenant", entries)
		}
		last := far.reports[len(far.reports)-1]
		if n := len(far.reports); n > 6 {
			t.Errorf("%d reports", n)
		}
		var taken, refused, cum uint64
		var window time.Duration
		low := int64(1000)
		for _, rep := range far.reports {
			for _, b := range rep.Tokens {
				taken, refused, window = taken+b.Taken, refused+b.Refused, window+b.Window
				cum, low = max(cum, b.Cum), min(low, b.TokensMin)
			}
		}
		if taken != 150 || refused != 300 || cum != 150 || low != 94 || window != 150*time.Minute {
			t.Errorf("buckets: taken %d, refused %d, cum %d, min %d over %s; last report %+v", taken, refused, cum, low, window, last)
		}
	})
}

// 10,000 tenants, six hours without NATS, a request of each every few minutes: memory follows keys and hours, not requests.
func TestOutageMemoryIsBounded(t *testing.T) {
	const tenants, hours = 10_000, 6
	synctest.Test(t, func(t *testing.T) {
		names := make([]string, tenants)
		for i := range names {
			names[i] = fmt.Sprint("tenant-", i)
		}
		far := &stream{away: true}
		r := New(Config{HotEvery: time.Minute, UsageEvery: time.Minute, AllEvery: time.Minute, RetryMax: 5 * time.Minute, DrainTimeout: time.Hour}, "gw", "boot", newTable(), far, quiet, nil)
		stop := begin(r)
		heap := func() uint64 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		before := heap()
		n := uint64(0)
		for range hours * 12 {
			for _, name := range names {
				r.Count(time.Now(), name, "r", "", "", 1)
				n++
			}
			time.Sleep(5 * time.Minute)
		}
		synctest.Wait()
		used := heap() - before
		entries := r.merging()
		reports, requests := r.Pending()
		t.Logf("%d requests wait in %d reports and %d entries: %d MB, %d bytes for each key and hour", requests, reports, entries, used>>20, used/(tenants*hours))
		if requests != n || reports < 64 || reports >= 64+tenants/500 { // the last group is taken whole
			t.Errorf("Pending() = %d, %d, want 64 or a little more, %d", reports, requests, n)
		}
		if entries > tenants*hours*11/10 { // a count that found its shard taken has begun another entry
			t.Errorf("%d entries, want about one for each of %d keys and %d hours", entries, tenants, hours)
		}
		// 400 bytes each, as the comment on Reporter says, and 16 MB for the sealed reports and the counters.
		if limit := uint64(tenants*hours*400 + 16<<20); used > limit {
			t.Errorf("%d bytes in use, want at most %d", used, limit)
		}
		far.setAway(false)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		far.check(t)
		stored, _ := far.sums()
		if total(stored) != n {
			t.Errorf("%d requests are stored, want %d", total(stored), n)
		}
		runtime.KeepAlive(names)
	})
}

// Count never waits for a report: with a far side that hangs for good, a million requests are counted.
func TestRequestsAreNotSlowedByAHangingPublisher(t *testing.T) {
	block := make(chan struct{})
	hang := publisherFunc(func(ctx context.Context, _ *schemas.Report) error {
		select {
		case <-block:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	r := New(Config{HotEvery: time.Millisecond, UsageEvery: time.Millisecond, MaxReports: 1, DrainTimeout: time.Millisecond}, "gw", "boot", newTable(), hang, quiet, nil)
	stop := begin(r)
	var wg sync.WaitGroup
	const goroutines, each = 8, 50_000
	for g := range goroutines {
		wg.Go(func() {
			for i := range each {
				r.Count(time.Now(), [...]string{"hot", "a", "b"}[(i+g)%3], "r", "", "", 1)
			}
		})
	}
	wg.Wait()
	if err := stop(); err == nil || !strings.Contains(err.Error(), fmt.Sprint(goroutines*each)) {
		t.Errorf("Run = %v, want it to name %d requests", err, goroutines*each)
	}
}

type publisherFunc func(context.Context, *schemas.Report) error

func (f publisherFunc) Publish(ctx context.Context, r *schemas.Report) error { return f(ctx, r) }

// What has merged is told in full, in as many reports as it takes for each to be one that is taken.
func TestCountsBeyondTheBoundsOfAReportAreSplit(t *testing.T) {
	now := time.Now()
	type counted struct{ allowed, rejected, cost uint64 }
	for name, c := range map[string]struct {
		cells []Cell
		rule  string
		want  counted
	}{
		"cost merges":        {cells: slices.Repeat([]Cell{{n: 2, cost: [2]uint64{schemas.MaxReportCost / 2}}}, 5), want: counted{10, 0, 5 * (schemas.MaxReportCost / 2)}},
		"requests merge":     {cells: slices.Repeat([]Cell{{n: schemas.MaxReportRequests - 2}}, 5), want: counted{5 * (schemas.MaxReportRequests - 2), 0, 0}},
		"one hour of bytes":  {cells: []Cell{{n: 1e9, cost: [2]uint64{45e12}}}, want: counted{1e9, 0, 45e12}},
		"many, refused":      {cells: []Cell{{n: 7*schemas.MaxReportRequests + 2, cost: [2]uint64{7*schemas.MaxReportRequests + 3}}}, rule: "r", want: counted{0, 7*schemas.MaxReportRequests + 2, 7*schemas.MaxReportRequests + 3}},
		"few that cost much": {cells: []Cell{{n: 4, cost: [2]uint64{4 * schemas.MaxReportCost}}}, rule: "r", want: counted{0, 4, 4 * schemas.MaxReportCost}},
		"just begun":         {cells: []Cell{{cost: [2]uint64{0, 7}}}, want: counted{}}, // a first request that was being counted at a kill
		"a power cut":        {cells: []Cell{{cost: [2]uint64{7, 9}}}, want: counted{}}, // which a spool does not hand over
		"a damaged cell":     {cells: []Cell{{n: 2, cost: [2]uint64{math.MaxUint64}}}, want: counted{2, 0, 2 * schemas.MaxReportCost}},
		"a worse one":        {cells: []Cell{{n: math.MaxUint64, cost: [2]uint64{math.MaxUint64, math.MaxUint64}}}, want: counted{maxParts * schemas.MaxReportRequests, 0, maxParts * schemas.MaxReportCost}},
	} {
		p := newPending()
		for i := range c.cells {
			c.cells[i].first = now.UnixNano()
			p.addUsage(&cell{key: usageKey{"a", "b", c.rule, ""}, at: &c.cells[i]})
		}
		var got counted
		for r, at := p.cut(cut{}, 500, 1<<20); r != nil; r, at = p.cut(at, 500, 1<<20) {
			r.Boot, r.Seq = "b", 1
			if err := r.Validate(now); err != nil {
				t.Fatalf("%s: a report that nobody takes: %v", name, err)
			}
			for _, u := range r.Usage {
				if u.Allowed+u.Rejected == 0 && c.want != (counted{}) {
					t.Fatalf("%s: %+v is of no request", name, u)
				}
				got.allowed, got.rejected, got.cost = got.allowed+u.Allowed, got.rejected+u.Rejected, got.cost+u.Cost
			}
		}
		if got != c.want {
			t.Errorf("%s: reports tell of %+v, want %+v", name, got, c.want)
		}
	}
}

// Requests that ask for as much as there is do not make the costs of a count begin again from 0.
func TestCostsOfACellStopAtTheLargestNumber(t *testing.T) {
	var c Cell
	c.Begin(1)
	for range 3 {
		c.Add(math.MaxUint64/2 - 1)
	}
	if n, cost, _ := c.Read(); n != 3 || cost != math.MaxUint64 {
		t.Errorf("%d requests of cost %d", n, cost)
	}
}

// The bound by which reports are split holds for the largest entries there are.
func TestSizeBoundHolds(t *testing.T) {
	long := strings.Repeat("x", schemas.MaxTextBytes)
	p := newPending()
	now := time.Now()
	for i := range 2000 {
		k := fmt.Sprintf("%s%d", long[:250], i)
		p.addUsage(&cell{key: usageKey{k, long, long, long}, at: &Cell{n: 1e6, cost: [2]uint64{1e6}, first: now.UnixNano()}})
		p.addTokens(schemas.Tokens{Rule: long, Layer: long, Key: k, Tenant: long, Mode: "enforce", RateNanos: 1<<63 - 1, Capacity: 1<<63 - 1, LimitRateNanos: 1<<63 - 1,
			LimitBurst: 1<<63 - 1, Taken: schemas.MaxCount, Refused: schemas.MaxCount, Cum: schemas.MaxCount, Incarnation: 1<<32 - 1, TokensMin: -1 << 63, TokensLast: -1 << 63, Window: 1<<63 - 1})
		p.addRejections([]schemas.Rejection{{Time: now, Tenant: long, Route: long, Rule: long, Layer: long, Method: long, Path: long, Client: long, RetryAfterMS: 1<<63 - 1, Instance: long}}, 1<<20)
	}
	for r, c := p.cut(cut{}, 500, 512<<10); r != nil; r, c = p.cut(c, 500, 512<<10) {
		r.Boot, r.Seq, r.PolicyVersion, r.SealedAt = strings.Repeat("b", 64), 1<<64-1, 1<<64-1, now
		body, err := schemas.EncodeReport(r)
		if err != nil {
			t.Fatal(err)
		}
		if len(body) >= 512<<10 {
			t.Fatalf("%d bytes with %+v", len(body), c)
		}
		if len(body) < 256<<10 && c.rejections < len(p.rejections) {
			t.Errorf("only %d bytes with %+v: the bound is too careful", len(body), c)
		}
	}
}

// Keys with one hash are counted apart.
func TestKeysWithOneHashAreCountedApart(t *testing.T) {
	var c counts
	c.init(newMemory(1))
	for i := range 30 {
		c.add(time.Now(), usageKey{"a", "r", "rule", fmt.Sprint("layer", i%3)}, 1)
	}
	got := map[string]uint64{}
	c.drain(2, func(x *cell) {
		n, _, _ := x.at.Read()
		got[x.key.layer] += n
	})
	if len(got) != 3 || got["layer0"] != 10 || got["layer1"] != 10 || got["layer2"] != 10 {
		t.Errorf("counted %v, want 10 each", got)
	}
	c.drain(3, func(x *cell) { t.Errorf("%+v is counted twice", x) })
}

// Reports are cut to what the server takes now, before they are sealed.
func TestReportsFitTheServersMaxPayload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &stream{}
		r := New(Config{MaxPayload: func() int64 { return 4 << 10 }}, "gw", "boot", newTable(), far, quiet, nil)
		stop := begin(r)
		for i := range 1000 {
			r.Count(time.Now(), fmt.Sprint("tenant-", i), "r", "", "", 1)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		for seq, b := range far.bytes {
			if len(b) > 4<<10-headerBytes {
				t.Errorf("report %d has %d bytes", seq, len(b))
			}
		}
		if requests, _ := far.sums(); total(requests) != 1000 {
			t.Errorf("%d requests are stored, want 1000", total(requests))
		}
	})
}

// picky is a Stream that does not take some reports.
type picky struct {
	mu      sync.Mutex
	refuses func(*schemas.Report) bool
	order   []string
}

func (s *picky) Publish(ctx context.Context, r *schemas.Report) error {
	_, err := s.Put(ctx, r, false)
	return err
}

func (s *picky) Put(_ context.Context, r *schemas.Report, again bool) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuses(r) {
		return 0, fmt.Errorf("%w: it is", ErrTooLarge)
	}
	s.order = append(s.order, fmt.Sprintf("%d %v", r.Seq, again))
	return 1, nil
}

func (*picky) Stored(context.Context) (schemas.Floor, *schemas.Stored, error) {
	return schemas.Floor{}, &schemas.Stored{}, nil
}

// A report that the server will not take does not hold up those behind it, and is not dropped: it goes when the server has changed.
func TestTooLargeReportGoesLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &picky{refuses: func(r *schemas.Report) bool { return r.Seq == 1 }}
		m := NewMetrics(prometheus.NewRegistry())
		r := New(Config{}, "gw", "boot", newTable(), far, quiet, m)
		stop := begin(r)
		for range 3 {
			r.Count(time.Now(), "a", "r", "", "", 1)
			time.Sleep(1500 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n, requests := r.Pending(); n != 1 || requests != 1 || testutil.ToFloat64(m.Failures) == 0 {
			t.Errorf("Pending() = %d, %d with %v failures, want the one", n, requests, testutil.ToFloat64(m.Failures))
		}
		far.mu.Lock()
		far.refuses = func(*schemas.Report) bool { return false }
		far.mu.Unlock()
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(far.order); got != "[2 false 3 false 1 true]" {
			t.Errorf("sent %s, want 2 and 3, and then 1 again", got)
		}
	})
}

// roomy is a spool that takes any number of reports.
type roomy struct{ *memory }

func (roomy) Full() bool { return false }

// While many reports wait, buckets keep what they have to say, requests do not; afterwards the buckets come, with all that they took.
func TestBucketsWaitWhileReportsDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far, buckets := &stream{away: true}, newTable()
		r := New(Config{Spool: roomy{newMemory(1)}, MaxReports: 5}, "gw", "boot", buckets, far, quiet, nil)
		stop := begin(r)
		time.Sleep(500 * time.Millisecond) // between two flushes, so that each count has its own
		for i := range 60 {
			r.Count(time.Now(), "a", "r", "", "", 1)
			buckets.put(true, schemas.Tokens{Rule: "c", Key: "a", Cum: uint64(i + 1), Taken: 1})
			time.Sleep(time.Second)
		}
		if n, requests := r.Pending(); requests != 60 || n < 40 || n > 65 { // two seconds may share one: what is hot does not go out behind other reports
			t.Errorf("Pending() = %d, %d, want about a report for each second and 60", n, requests)
		}
		far.setAway(false)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		far.check(t)
		var records int
		var taken, allowed uint64
		for _, rep := range far.reports {
			records += len(rep.Tokens)
			for _, b := range rep.Tokens {
				taken += b.Taken
			}
			for _, u := range rep.Usage {
				allowed += u.Allowed
			}
		}
		if allowed != 60 || taken != 60 || records > 8 {
			t.Errorf("%d requests, %d taken in %d records, want 60, 60 in a few", allowed, taken, records)
		}
	})
}

// TestALostReportIsSentAgainSoon: an attempt that is overdue gives way to the next long before the timeout, without noise, and to a
// server that is slow it gives time.
func TestALostReportIsSentAgainSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		var mu sync.Mutex // guards what follows
		lost, slow := 2, 5*time.Millisecond
		var at []time.Time
		far := publisherFunc(func(ctx context.Context, _ *schemas.Report) error {
			mu.Lock()
			at = append(at, time.Now())
			took := slow
			if lost > 0 {
				lost--
				took = time.Hour
			}
			mu.Unlock()
			select {
			case <-time.After(took):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		m := NewMetrics(prometheus.NewRegistry())
		r := New(Config{}, "gw", "boot", newTable(), far, slog.New(slog.NewTextHandler(&out, nil)), m)
		stop := begin(r)
		send := func() []time.Time {
			mu.Lock()
			at = nil
			mu.Unlock()
			r.Count(time.Now(), "a", "r", "", "", 1)
			time.Sleep(5 * time.Second)
			mu.Lock()
			defer mu.Unlock()
			return at
		}
		if at := send(); len(at) != 3 || at[2].Sub(at[0]) > 150*time.Millisecond {
			t.Errorf("attempts at %v, want three in 50 and 100 ms", at)
		}
		mu.Lock()
		slow = 300 * time.Millisecond
		mu.Unlock()
		if at := send(); len(at) != 4 || at[3].Sub(at[0]) > 350*time.Millisecond {
			t.Errorf("attempts at %v, want 50, 100 and 200 ms for those that are too short, and then one that is not", at)
		}
		for range 20 {
			send()
		}
		if at := send(); len(at) != 1 {
			t.Errorf("attempts at %v, want one that is long enough at once", at)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if out.Len() > 0 || testutil.ToFloat64(m.Failures) > 0 {
			t.Errorf("noise about reports that were stored: %s", out.String())
		}
	})
}

package bucket_test

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
)

func limit(t testing.TB, num, den uint64, per time.Duration, burst int64) bucket.Limit {
	t.Helper()
	r, err := bucket.NewRate(num, den, per)
	if err != nil {
		t.Fatal(err)
	}
	return bucket.Limit{Rate: r, Burst: burst}
}

const sec = int64(time.Second)

// Each row is one take on the same bucket, and wants the whole decision.
func TestStories(t *testing.T) {
	type row struct {
		now, n int64
		want   bucket.Decision
	}
	yes := func(left int64) bucket.Decision { return bucket.Decision{Allowed: true, Remaining: left} }
	no := func(left int64, wait time.Duration) bucket.Decision {
		return bucket.Decision{Remaining: left, RetryIn: wait}
	}
	for _, story := range []struct {
		name  string
		limit bucket.Limit
		rows  []row
	}{
		{"B001a the first request of 10/13 per second is allowed", limit(t, 10, 13, time.Second, 1), []row{
			{0, 1, yes(0)},
			{0, 1, no(0, 1300*time.Millisecond)},
		}},
		{"B001b one per hour", limit(t, 1, 1, time.Hour, 1), []row{
			{0, 1, yes(0)},
			{3599_999e6, 1, no(0, time.Millisecond)},
			{3600 * sec, 1, yes(0)},
		}},
		{"B003 rate 0 burst 0 denies all, a peek too", bucket.Limit{}, []row{
			{0, 1, no(0, bucket.Never)},
			{sec, 0, no(0, bucket.Never)},
		}},
		{"B003 rate 5 burst 0 denies all", limit(t, 5, 1, time.Second, 0), []row{
			{0, 1, no(0, bucket.Never)},
			{sec, 1, no(0, bucket.Never)},
		}},
		{"B003 rate 0 burst 5 gives five and never more", limit(t, 0, 1, time.Second, 5), []row{
			{0, 5, yes(0)},
			{1 << 62, 1, no(0, bucket.Never)},
		}},
		{"B005a an overnight pause", limit(t, 250_000, 1, time.Second, 250_000), []row{
			{0, 250_000, yes(0)},
			{12 * 3600 * sec, 250_000, yes(0)},
		}},
		{"B005b 980 million per 10 s", limit(t, 980_000_000, 1, 10*time.Second, 980_000_000), []row{
			{0, 980_000_000, yes(0)},
			{10*sec - 1, 980_000_000, no(979_999_999, time.Nanosecond)},
			{10 * sec, 980_000_000, yes(0)},
		}},
		{"B005c three hundred years idle", limit(t, 1, 1, time.Second, 1), []row{
			{-5e18, 1, yes(0)},
			{46e17, 1, yes(0)}, // 304 years: more nanoseconds than an int64 holds
			{46e17, 1, no(0, time.Second)},
		}},
		{"B007 a negative cost mints nothing", limit(t, 1, 1, time.Second, 5), []row{
			{0, 5, yes(0)},
			{0, -5, no(0, bucket.Never)},
			{0, math.MinInt64, no(0, bucket.Never)},
			{0, 1, no(0, time.Second)},
		}},
		{"a cost above the burst is refused for ever", limit(t, 1, 1, time.Second, 5), []row{
			{0, 6, no(5, bucket.Never)},
			{0, math.MaxInt64, no(5, bucket.Never)},
			{0, 5, yes(0)},
		}},
		{"B008 monotonic time went on while the wall clock hopped", limit(t, 1, 1, time.Second, 3), []row{
			{0, 3, yes(0)},
			{sec, 1, yes(0)},
			{sec + 10e6, 1, no(0, 990*time.Millisecond)},
		}},
		{"B008 a step back gives no debt and no free refill", limit(t, 1, 1, time.Second, 3), []row{
			{20 * sec, 3, yes(0)},
			{9 * sec, 1, no(0, 12*time.Second)}, // the same take succeeds at 21 s on this clock
			{20 * sec, 1, no(0, time.Second)},
			{21 * sec, 1, yes(0)},
		}},
		{"B053 time passes while full", limit(t, 20, 1, time.Second, 100), []row{
			{5 * sec, 100, yes(0)},
			{5 * sec, 1, no(0, 50*time.Millisecond)},
		}},
		{"B055 a peek takes nothing", limit(t, 1, 1, time.Second, 10), []row{
			{0, 0, yes(10)},
			{0, 0, yes(10)},
			{0, 1, yes(9)},
		}},
		{"one per month, waits rounded up", limit(t, 1, 1, 30*24*time.Hour, 2), []row{
			{0, 2, yes(0)},
			{1, 2, no(0, 2*30*24*time.Hour-1)},
			{30 * 24 * 3600 * sec, 1, yes(0)},
		}},
		{"three per 10 ns rounds the wait up", limit(t, 3, 1, 10, 1), []row{
			{0, 1, yes(0)},
			{0, 1, no(0, 4)}, // 3.33 ns
			{3, 1, no(0, 1)},
			{4, 1, yes(0)},
		}},
		{"a wait longer than a Duration is for ever", limit(t, 1, 1, 30*24*time.Hour, 1e9), []row{
			{0, 1e9, yes(0)},
			{0, 1e9, no(0, bucket.Never)},
		}},
		{"unlimited", bucket.Limit{Unlimited: true}, []row{
			{0, math.MaxInt64, yes(math.MaxInt64)},
			{0, -1, no(math.MaxInt64, bucket.Never)},
		}},
	} {
		t.Run(story.name, func(t *testing.T) {
			s := bucket.Full(story.limit, story.rows[0].now)
			for i, r := range story.rows {
				if got := s.Take(story.limit, r.now, r.n); got != r.want {
					t.Fatalf("row %d: Take(%d) at %d = %+v, want %+v", i, r.n, r.now, got, r.want)
				}
			}
		})
	}
}

// count asks for one token every step from 0 to end inclusive and returns how many were allowed.
func count(l bucket.Limit, step, end time.Duration) (allowed int) {
	s := bucket.Full(l, 0)
	for now := time.Duration(0); now <= end; now += step {
		if s.Take(l, int64(now), 1).Allowed {
			allowed++
		}
	}
	return allowed
}

func TestB001RefillIsExact(t *testing.T) {
	if got := count(limit(t, 10, 13, time.Second, 1), 10*time.Millisecond, time.Hour); got != 2770 {
		t.Errorf("allowed %d, want 2770", got)
	}
}

func TestB004HighRatesAreNotRounded(t *testing.T) {
	for rate, want := range map[uint64]int{1500: 15010, 5000: 50010} {
		if got := count(limit(t, rate, 1, time.Second, 10), 100*time.Microsecond, 10*time.Second); got != want {
			t.Errorf("rate %d: allowed %d, want %d", rate, got, want)
		}
	}
	l := limit(t, 65535, 1, time.Second, 65535)
	s := bucket.Full(l, 0)
	for i := range int64(20) {
		if d := s.Take(l, i*sec/10, 1); !d.Allowed || d.Remaining < 65533 {
			t.Fatalf("take %d = %+v, want at least 65533 remaining", i, d)
		}
	}
}

func TestB056FractionalRates(t *testing.T) {
	if got := count(limit(t, 1, 10, time.Second, 1), time.Second, 60*time.Second); got != 7 {
		t.Errorf("0.1/s: allowed %d in 60 s, want 7", got)
	}
	if got := count(limit(t, 5, 10, time.Minute, 1), time.Second, 10*time.Minute); got != 6 {
		t.Errorf("0.5/m: allowed %d in 10 min, want 6", got)
	}
}

func TestB075LimitsChangeOnALiveBucket(t *testing.T) {
	five, two, hundred := limit(t, 5, 1, time.Second, 5), limit(t, 2, 1, time.Second, 2), limit(t, 100, 1, time.Second, 100)
	s := bucket.Full(five, 0)
	s.Resize(five, two, 0)
	take := func(l bucket.Limit, now int64, n int) (allowed int) {
		for range n {
			d := s.Take(l, now, 1)
			if d.Allowed {
				allowed++
			} else if longest := time.Duration(uint64(time.Second) / (l.Rate.Num * uint64(sec) / l.Rate.Den)); d.RetryIn > longest {
				t.Fatalf("told to wait %v, longer than the limit's %v", d.RetryIn, longest)
			}
		}
		return allowed
	}
	if got := take(two, 0, 5); got != 2 {
		t.Errorf("lowered: %d allowed, want 2", got)
	}
	if got := take(two, sec, 5); got != 2 {
		t.Errorf("one second later: %d allowed, want 2", got)
	}
	s.Resize(two, hundred, sec)
	got := 0
	for now := sec; now <= sec+sec/2; now += 10e6 {
		got += take(hundred, now, 1)
	}
	if got != 50 {
		t.Errorf("raised: %d allowed within 0.5 s, want 50", got)
	}
}

func TestNewRateNamesWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		num, den uint64
		per      time.Duration
		want     string
	}{
		{1, 0, time.Second, "rate has denominator 0"},
		{1, 1, 0, "rate is per 0s, want a positive duration"},
		{1, 1, -time.Second, "rate is per -1s, want a positive duration"},
		{1, math.MaxUint64, time.Second, "rate of 1/18446744073709551615 tokens per 1s is too fine"},
		{math.MaxUint64, 1, time.Second, "rate of 18446744073709551615/1 tokens per 1s is too large: more than one token per nanosecond"},
	} {
		if _, err := bucket.NewRate(c.num, c.den, c.per); err == nil || err.Error() != c.want {
			t.Errorf("NewRate(%d, %d, %v) = %v, want %s", c.num, c.den, c.per, err, c.want)
		}
	}
	for _, c := range []struct {
		num, den uint64
		per      time.Duration
		want     bucket.Rate
	}{
		{1, 1, 30 * 24 * time.Hour, bucket.Rate{Num: 1, Den: 2_592_000_000_000_000}},
		{10_000_000, 1, time.Second, bucket.Rate{Num: 1, Den: 100}},
		{10, 13, time.Second, bucket.Rate{Num: 1, Den: 1_300_000_000}},
		{5, 10, time.Minute, bucket.Rate{Num: 1, Den: 120_000_000_000}},
		{0, 7, time.Second, bucket.Rate{}},
		{1e18, 1e9, time.Second, bucket.Rate{Num: 1, Den: 1}},
	} {
		if got, err := bucket.NewRate(c.num, c.den, c.per); err != nil || got != c.want {
			t.Errorf("NewRate(%d, %d, %v) = %v, %v, want %v", c.num, c.den, c.per, got, err, c.want)
		}
	}
}

func TestNano(t *testing.T) {
	for _, n := range []int64{0, 1, 385, 1e9, 13_000e9, 1e18} {
		r, err := bucket.FromNano(n)
		if err != nil || r.Nano() != n {
			t.Errorf("FromNano(%d) = %v, %v, and back %d", n, r, err, r.Nano())
		}
	}
	if _, err := bucket.FromNano(-1); err == nil {
		t.Error("FromNano(-1) gave no error")
	}
}

func TestPart(t *testing.T) {
	third := limit(t, 10, 1, time.Second, 10).Part(1, 3)
	if third.Rate != (bucket.Rate{Num: 1, Den: 300_000_000}) || third.Burst != 3 {
		t.Errorf("a third of 10/s burst 10 = %+v", third)
	}
	if one := limit(t, 1, 1, time.Second, 1).Part(1, 5); one.Burst != 1 {
		t.Errorf("a fifth of burst 1 = %d, want 1", one.Burst)
	}
	if zero := (bucket.Limit{}).Part(1, 5); zero != (bucket.Limit{}) {
		t.Errorf("a fifth of nothing = %+v", zero)
	}
	if all := (bucket.Limit{Unlimited: true}).Part(1, 5); !all.Unlimited {
		t.Errorf("a fifth of unlimited = %+v", all)
	}
	// Never above the true part, and below it by at most one in 2^30, for any rate.
	rng := seeded(t)
	for range 20_000 {
		l := randomLimit(rng)
		den := rng.Uint64()>>rng.IntN(64) + 1
		num := rng.Uint64N(den) + 1
		p := l.Part(num, den)
		want := new(big.Rat).Mul(ratOf(l.Rate), new(big.Rat).SetFrac(u(num), u(den)))
		if l.Unlimited || l.Burst == 0 || l.Rate.Num == 0 {
			continue
		}
		got := ratOf(p.Rate)
		if got.Cmp(want) > 0 && p.Rate.Den != math.MaxInt64 {
			t.Fatalf("%+v.Part(%d, %d) = %+v, above the true part", l, num, den, p)
		}
		low := new(big.Rat).Mul(want, big.NewRat(1<<30-1, 1<<30))
		if got.Cmp(low) < 0 {
			t.Fatalf("%+v.Part(%d, %d) = %+v, too far below the true part", l, num, den, p)
		}
		if p.Rate.Num > p.Rate.Den || p.Rate.Den > math.MaxInt64 {
			t.Fatalf("%+v.Part(%d, %d) = %+v, out of bounds", l, num, den, p)
		}
	}
}

// twin is the obviously right slow bucket, in rational numbers.
type twin struct {
	tokens *big.Rat
	at     int64
}

func u(n uint64) *big.Int { return new(big.Int).SetUint64(n) }

func ratOf(r bucket.Rate) *big.Rat {
	if r.Num == 0 {
		return new(big.Rat)
	}
	return new(big.Rat).SetFrac(u(r.Num), u(r.Den))
}

func full(l bucket.Limit, now int64) twin { return twin{big.NewRat(l.Burst, 1), now} }

func (w *twin) refill(l bucket.Limit, now int64) {
	if now <= w.at {
		return
	}
	elapsed := new(big.Int).Sub(big.NewInt(now), big.NewInt(w.at))
	gain := new(big.Rat).Mul(ratOf(l.Rate), new(big.Rat).SetInt(elapsed))
	w.tokens.Add(w.tokens, gain)
	if b := big.NewRat(l.Burst, 1); w.tokens.Cmp(b) > 0 {
		w.tokens.Set(b)
	}
	w.at = now
}

func floor(r *big.Rat) int64 { return new(big.Int).Quo(r.Num(), r.Denom()).Int64() }

func (w *twin) take(l bucket.Limit, now, n int64) bucket.Decision {
	if l.Unlimited {
		d := bucket.Decision{Allowed: n >= 0, Remaining: math.MaxInt64}
		if n < 0 {
			d.RetryIn = bucket.Never
		}
		return d
	}
	c := twin{new(big.Rat).Set(w.tokens), w.at}
	c.refill(l, now)
	d := bucket.Decision{Remaining: floor(c.tokens), RetryIn: bucket.Never}
	if n < 0 || n > l.Burst || l.Burst == 0 {
		return d
	}
	need := new(big.Rat).Sub(big.NewRat(n, 1), c.tokens)
	if need.Sign() > 0 {
		if l.Rate.Num > 0 {
			ns := need.Quo(need, ratOf(l.Rate))
			wait := new(big.Int).Quo(new(big.Int).Add(ns.Num(), new(big.Int).Sub(ns.Denom(), big.NewInt(1))), ns.Denom())
			wait.Add(wait, new(big.Int).Sub(big.NewInt(c.at), big.NewInt(now)))
			if wait.IsInt64() {
				d.RetryIn = time.Duration(wait.Int64())
			}
		}
		return d
	}
	if n > 0 {
		*w = c
		w.tokens.Sub(w.tokens, big.NewRat(n, 1))
	}
	return bucket.Decision{Allowed: true, Remaining: floor(c.tokens)}
}

func (w *twin) put(l bucket.Limit, n int64) {
	w.tokens.Add(w.tokens, big.NewRat(n, 1))
	if b := big.NewRat(l.Burst, 1); w.tokens.Cmp(b) > 0 {
		w.tokens.Set(b)
	}
}

// resize rounds the fraction down to the new units, as the bucket says it does.
func (w *twin) resize(old, new_ bucket.Limit, now int64) {
	if old.Unlimited {
		*w = full(new_, max(w.at, now))
		return
	}
	w.refill(old, now)
	b := big.NewRat(new_.Burst, 1)
	if w.tokens.Cmp(b) >= 0 {
		w.tokens.Set(b)
		return
	}
	whole := big.NewRat(floor(w.tokens), 1)
	if new_.Rate.Num == 0 || old.Rate.Num == 0 {
		w.tokens.Set(whole)
		return
	}
	frac := new(big.Rat).Sub(w.tokens, whole)
	units := floor(frac.Mul(frac, new(big.Rat).SetInt(u(new_.Rate.Den))))
	w.tokens.Add(whole, new(big.Rat).SetFrac(big.NewInt(units), u(new_.Rate.Den)))
}

func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1))
}

func randomLimit(rng *rand.Rand) bucket.Limit {
	pers := []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour, 30 * 24 * time.Hour, 15 * time.Second, 7}
	for {
		num, den := rng.Uint64N(1<<rng.IntN(25)), rng.Uint64N(1<<rng.IntN(14))+1
		r, err := bucket.NewRate(num, den, pers[rng.IntN(len(pers))])
		if err != nil {
			continue
		}
		burst := rng.Int64N(1 << rng.IntN(30))
		if rng.IntN(50) == 0 {
			burst = bucket.MaxBurst
		}
		return bucket.Limit{Rate: r, Burst: burst, Unlimited: rng.IntN(100) == 0}
	}
}

// run does one random life of a bucket beside its twin.
func run(t *testing.T, rng *rand.Rand, steps int) {
	l := randomLimit(rng)
	now := rng.Int64() - rng.Int64()
	s, w := bucket.Full(l, now), full(l, now)
	for range steps {
		switch rng.IntN(12) {
		case 0:
			now -= rng.Int64N(1 << rng.IntN(40)) // a step back
		case 1:
			if now < 0 {
				now += rng.Int64()
			}
		default:
			if step := rng.Int64N(1 << rng.IntN(48)); now < math.MaxInt64-step {
				now += step
			}
		}
		switch rng.IntN(20) {
		case 0:
			next := randomLimit(rng)
			s.Resize(l, next, now)
			w.resize(l, next, now)
			l = next
		default:
			n := rng.Int64N(max(1, l.Burst)+2) >> rng.IntN(20)
			if rng.IntN(30) == 0 {
				n = -n
			}
			before := s
			got, want := s.Take(l, now, n), w.take(l, now, n)
			if got != want {
				t.Fatalf("%+v at %d: Take(%d) = %+v, want %+v (state %+v)", l, now, n, got, want, before)
			}
			if !got.Allowed && s != before {
				t.Fatalf("a refused take changed %+v to %+v", before, s)
			}
			if !got.Allowed && got.RetryIn != bucket.Never && now <= math.MaxInt64-int64(got.RetryIn) {
				early, late := s, s
				if early.Take(l, now+int64(got.RetryIn)-1, n).Allowed || !late.Take(l, now+int64(got.RetryIn), n).Allowed {
					t.Fatalf("%+v at %d: RetryIn %d of Take(%d) is not the smallest", l, now, got.RetryIn, n)
				}
			}
			if got.Allowed && rng.IntN(5) == 0 && !l.Unlimited {
				s.Put(l, n)
				w.put(l, n)
			}
		}
	}
}

func TestTwin(t *testing.T) {
	rng := seeded(t)
	for range 3000 {
		run(t, rng, 60)
	}
}

func FuzzTwin(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) { run(t, rand.New(rand.NewPCG(a, b)), 200) })
}

func TestAllocations(t *testing.T) {
	l := limit(t, 10, 13, time.Second, 100)
	s, now := bucket.Full(l, 0), int64(0)
	if n := testing.AllocsPerRun(1000, func() { now += sec; s.Take(l, now, 1); s.Take(l, now, 101) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func ExampleState_Take() {
	rate, _ := bucket.NewRate(80, 1, time.Second)
	l := bucket.Limit{Rate: rate, Burst: 2}
	s := bucket.Full(l, 0)
	for range 3 {
		fmt.Println(s.Take(l, 0, 1))
	}
	// Output:
	// {true 1 0s}
	// {true 0 0s}
	// {false 0 12.5ms}
}

func BenchmarkTake(b *testing.B) {
	l := limit(b, 10_000_000, 1, time.Second, 1e9)
	s, now := bucket.Full(l, 0), int64(0)
	for b.Loop() {
		now += 137
		s.Take(l, now, 1)
	}
}

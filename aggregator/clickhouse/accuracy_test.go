package clickhouse

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/schemas"
)

// TestJudgeIsOneBucket has rows of {second, taken, allowed} of a bucket of 10 per second with a burst of 20.
func TestJudgeIsOneBucket(t *testing.T) {
	from := time.Date(2026, 11, 29, 10, 0, 0, 0, time.UTC)
	for _, slack := range []float64{0, 3} {
		b := bucket{level: 20, at: from}
		for _, row := range []struct {
			second              int
			taken, allowed, all float64 // allowed without slack, and with 3 tokens
		}{
			{0, 30, 30, 30}, // the burst, and the second's refill
			{1, 10, 10, 10},
			{2, 15, 10, 13},      // the slack is used up
			{3, 15, 10, 10},      // so that it is once
			{4, 5, 5, 5},         // it is paid back: the level is 5, or 2
			{6, 50, 25, 25},      // an idle second
			{9, 40, 30, 30},      // which refills no more than the burst
			{10, 0.5, 0.5, 0.5},  //
			{11, 25, 19.5, 19.5}, //
		} {
			a := Accuracy{Admitted: Admitted{Time: from.Add(time.Duration(row.second) * time.Second), LimitRateNanos: 10e9, LimitBurst: 20, Taken: row.taken}}
			b.judge(&a, slack)
			want := row.allowed
			if slack > 0 {
				want = row.all
			}
			if math.Abs(a.Allowed-want) > 1e-9 || math.Abs(a.Over-(row.taken-want)) > 1e-9 || a.Level < -slack || a.Level != b.level {
				t.Errorf("slack %v, second %d: allowed %v, over %v at level %v, want %v of %v", slack, row.second, a.Allowed, a.Over, a.Level, want, row.taken)
			}
		}
	}
}

// reporter stores reports of gateways that took tokens.
type reporter struct {
	*testing.T
	*Store
	start time.Time
	seq   uint64
}

func newReporter(t *testing.T, start time.Time) *reporter {
	return &reporter{t, fresh(t), start.UTC().Truncate(time.Second), 0}
}

// report stores that gateway took tokens, as sealed and received so long after the start.
func (r *reporter) report(gateway string, sealed, received time.Duration, tokens ...schemas.Tokens) {
	r.Helper()
	r.reports(r.delivered(gateway, sealed, received, tokens...))
}

func (r *reporter) delivered(gateway string, sealed, received time.Duration, tokens ...schemas.Tokens) schemas.Delivered[*schemas.Report] {
	r.seq++
	return schemas.Delivered[*schemas.Report]{Seq: r.seq, Arrived: r.start.Add(received), Value: &schemas.Report{
		Gateway: gateway, Boot: "b-" + gateway, Seq: r.seq, SealedAt: r.start.Add(sealed), Tokens: tokens}}
}

func (r *reporter) reports(items ...schemas.Delivered[*schemas.Report]) {
	r.Helper()
	if err := r.Reports(r.Context(), schemas.Batch[*schemas.Report]{Stream: "S", First: items[0].Seq, Last: items[len(items)-1].Seq, Items: items}); err != nil {
		r.Fatal(err)
	}
}

// judgeAll judges what has arrived since seen, and returns up to when.
func (r *reporter) judgeAll(seen time.Time) time.Time {
	r.Helper()
	for {
		upto, err := r.Judge(r.Context(), seen)
		if err != nil {
			r.Fatal(err)
		}
		if upto.Equal(seen) {
			return seen
		}
		seen = upto
	}
}

// judged is what the table says of a key: second=admitted, with what was over.
func (r *reporter) judged(key string) string {
	r.Helper()
	rows, err := r.conn.Query(r.Context(), "SELECT toInt64(toUnixTimestamp(ts)), admitted, over FROM accuracy FINAL WHERE key = '"+key+"' ORDER BY ts")
	if err != nil {
		r.Fatal(err)
	}
	var out []string
	for rows.Next() {
		var second int64
		var admitted, over float64
		if err := rows.Scan(&second, &admitted, &over); err != nil {
			r.Fatal(err)
		}
		text := fmt.Sprintf("%d=%.4g", second-r.start.Unix(), admitted)
		if over > 0 {
			text += fmt.Sprintf("(%.4g over)", over)
		}
		out = append(out, text)
	}
	if err := rows.Err(); err != nil {
		r.Fatal(err)
	}
	return strings.Join(out, " ")
}

func (r *reporter) want(key, want string) {
	r.Helper()
	if got := r.judged(key); got != want {
		r.Errorf("%s: %s, want %s", key, got, want)
	}
}

// took is a bucket of 10 per second and a burst of 20 at one gateway.
func took(key string, n uint64, window time.Duration) schemas.Tokens {
	return schemas.Tokens{Rule: "contract", Key: key, Mode: "enforce", LimitRateNanos: 10e9, LimitBurst: 20, Taken: n, Cum: n, Window: window}
}

// TestAccuracyOfReports: every second of every key that was used is there, and two gateways are one.
func TestAccuracyOfReports(t *testing.T) {
	r := newReporter(t, time.Now().Add(-time.Minute))
	shadow, local := took("shadow", 999, time.Second), took("local", 999, time.Second)
	shadow.Mode, local.Consistency = "shadow", "local"
	const at = 300 * time.Millisecond
	r.report("g1", at, at, took("storm", 26, 100*time.Millisecond), took("calm", 1, time.Hour), shadow, local)
	r.report("g2", at, at, took("storm", 26, 100*time.Millisecond))
	r.report("g1", 3*time.Second+at, 3*time.Second+at, took("storm", 30, 3*time.Second), took("calm", 2, 3*time.Second)) // evenly
	seen := r.judgeAll(r.start.Add(-time.Hour))
	r.want("storm", "0=52(20 over) 1=10 2=10 3=10") // 20 + 10, and a token for each gateway
	r.want("calm", "0=1 2=1 3=1")
	r.want("shadow", "")
	r.want("local", "")
	if want := r.start.Add(3*time.Second + at); !seen.Equal(want) {
		t.Errorf("judged up to %v, want %v", seen, want)
	}
	got, err := r.Overshoots(t.Context(), r.start, r.start.Add(5*time.Minute))
	if want := (Overshoot{Rule: "contract", Admitted: 85, Over: 20, Minutes: 1}); err != nil || len(got) != 1 || got[0] != want {
		t.Errorf("Overshoots = %+v, %v, want %+v", got, err, want)
	}
	r.report("g1", 4*time.Second+at, 4*time.Second+at, took("storm", 12, time.Second)) // the level is where it was left
	r.judgeAll(seen)
	r.want("storm", "0=52(20 over) 1=10 2=10 3=10 4=12(2 over)")
}

// TestEverySecondIsJudged: after an outage, after a restart, and again when a report of it comes late.
func TestEverySecondIsJudged(t *testing.T) {
	r := newReporter(t, time.Now().Add(-10*time.Minute))
	second := func(i int) time.Duration { return time.Duration(i)*time.Second + 500*time.Millisecond }
	r.report("g1", second(0), second(0), took("a", 10, time.Second))
	r.judgeAll(r.start.Add(-time.Hour))
	var missed []schemas.Delivered[*schemas.Report] // nobody is there to judge for 50 s
	for i := 1; i <= 50; i++ {
		missed = append(missed, r.delivered("g1", second(i), second(i), took("a", 10, time.Second)))
	}
	r.reports(missed[:30]...)
	seen, err := r.Judged(t.Context(), r.start.Add(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	seen = r.judgeAll(seen)
	r.reports(missed[30:]...)
	seen = r.judgeAll(seen)
	all := func(change map[int]string) string {
		var out []string
		for i := range 51 {
			text := fmt.Sprintf("%d=10", i)
			if c, ok := change[i]; ok {
				text = c
			}
			out = append(out, text)
		}
		return strings.Join(out, " ")
	}
	r.want("a", all(nil))

	// Another gateway could not report for half a minute: its seconds are those of its clock. The first takes the burst, the
	// second all that may be ahead, so that what it took ten seconds later is over.
	r.report("g2", second(20), second(51), took("a", 20, time.Second), took("b", 1, time.Second))
	seen = r.judgeAll(seen)
	r.want("a", all(map[int]string{20: "20=30"}))
	r.reports(r.delivered("g2", second(21), second(52), took("a", 2, time.Second)), r.delivered("g2", second(30), second(52), took("a", 5, time.Second)))
	seen = r.judgeAll(seen)
	r.want("a", all(map[int]string{20: "20=30", 21: "21=12", 30: "30=15(5 over)"}))
	// What changes an earlier second changes what the later ones leave room for.
	r.report("g3", second(10), second(53), took("a", 4, time.Second))
	r.judgeAll(seen)
	r.want("a", all(map[int]string{10: "10=14", 20: "20=30(1 over)", 21: "21=12(2 over)", 30: "30=15(5 over)"}))
	if n := number(t, r.Store, "(SELECT count() FROM accuracy FINAL)"); n != 52 {
		t.Errorf("%d rows, want 51 and one of b", n)
	}
}

// TestAnOutageIsNoOvershoot: gateways that were cut off tell late, and of the rest of the time all at once, what was within the limit.
func TestAnOutageIsNoOvershoot(t *testing.T) {
	r := newReporter(t, time.Now().Add(-10*time.Minute))
	for _, g := range []string{"g1", "g2"} { // 8 of 10 a second, for five minutes
		r.report(g, 30*time.Second, 300*time.Second, took("a", 4*30, 30*time.Second))
		r.report(g, 300*time.Second, 300*time.Second, took("a", 4*270, 270*time.Second), took("idle", 15, 270*time.Second))
	}
	r.report("g3", 300*time.Second, 300*time.Second, took("b", 600, time.Hour)) // it was there all the time, and asked for b in the last minute
	r.report("g4", 300*time.Second, 300*time.Second, took("b", 600, time.Hour))
	r.judgeAll(r.start.Add(-time.Hour))
	if over := number(t, r.Store, "(SELECT toUInt64(sum(over)) FROM accuracy FINAL WHERE key IN ('a', 'idle'))"); over != 0 {
		t.Errorf("%d tokens over, want none: %s", over, r.judged("a"))
	}
	if over := number(t, r.Store, "(SELECT toUInt64(sum(over)) FROM accuracy FINAL WHERE key = 'b')"); over < 500 {
		t.Errorf("%d tokens of b over, want half of 1200 or so: %s", over, r.judged("b"))
	}
}

// TestBucketIsNotFullEveryMinute: 100 per hour, of which 110 a minute are admitted for half an hour, and of another 100.
func TestBucketIsNotFullEveryMinute(t *testing.T) {
	r := newReporter(t, time.Now().Add(-time.Hour))
	seen := r.start.Add(-time.Second)
	var items []schemas.Delivered[*schemas.Report]
	for i := range 30 {
		at := time.Duration(i) * time.Minute
		var tokens []schemas.Tokens
		for rule, perMinute := range map[string]uint64{"more": 110, "less": 100} {
			slow := took("a", perMinute, time.Second)
			slow.Rule, slow.LimitRateNanos, slow.LimitBurst = rule, 100_000_000_000/3600, 100
			tokens = append(tokens, slow)
		}
		if items = append(items, r.delivered("g1", at, at, tokens...)); i%10 == 9 { // judged from where the table leaves off
			r.reports(items...)
			seen, items = r.judgeAll(seen), nil
		}
	}
	got, err := r.Overshoots(t.Context(), r.start, r.start.Add(time.Hour))
	if err != nil || len(got) != 2 {
		t.Fatalf("Overshoots = %+v, %v", got, err)
	}
	for _, o := range got { // the burst, 29 minutes and a second of refill, and 2 tokens that may be ahead
		if want := o.Admitted - 100 - 29*100.0/60 - 2; math.Abs(o.Over-want) > 0.1 || o.Minutes < 29 || o.Admitted < 3000 {
			t.Errorf("%+v, want %.2f over in 29 minutes or 30", o, want)
		}
	}
}

// TestIdleBucketRefills: a key that was not used for as long as it takes to refill is full, a slow one is not before.
func TestIdleBucketRefills(t *testing.T) {
	r := newReporter(t, time.Now().Add(-2*time.Hour))
	slow := took("a", 100, time.Second)
	slow.LimitRateNanos, slow.LimitBurst = 100_000_000_000/3600, 100
	quick := took("b", 30, time.Second)
	r.report("g1", 0, 0, slow, quick)
	seen := r.judgeAll(r.start.Add(-time.Second))
	slow.Taken = 80
	const half, later = 30 * time.Minute, 100 * time.Minute
	r.report("g1", half, half, slow, quick)
	seen = r.judgeAll(seen)
	r.report("g1", later, later, slow, quick)
	r.judgeAll(seen)
	r.want("a", "0=100 1800=80(27.97 over) 6000=80")
	r.want("b", "0=30 1800=30 6000=30")
}

// TestTinyLimitIsNotOver: 3 per minute with a burst of 1, where each of three gateways gives its first token.
func TestTinyLimitIsNotOver(t *testing.T) {
	r := newReporter(t, time.Now().Add(-20*time.Minute))
	tiny := took("a", 1, time.Second)
	tiny.LimitRateNanos, tiny.LimitBurst = 3e9/60, 1
	var items []schemas.Delivered[*schemas.Report]
	for i := range 3 {
		items = append(items, r.delivered(fmt.Sprint("g", i), 0, time.Duration(i)*time.Millisecond, tiny))
	}
	for i := range 30 { // and from then on as often as it may
		at := time.Duration(i+3) * 20 * time.Second
		items = append(items, r.delivered(fmt.Sprint("g", i%3), at, at, tiny))
	}
	r.reports(items...)
	seen := r.judgeAll(r.start.Add(-time.Second))
	got, err := r.Overshoots(t.Context(), r.start, r.start.Add(20*time.Minute))
	if err != nil || len(got) != 1 || got[0].Admitted != 33 || got[0].Over > 1e-9 {
		t.Errorf("Overshoots = %+v, %v, want 33 admitted and none over", got, err)
	}
	items = nil
	for i := range 8 { // every gateway a token, again and again
		at := 15*time.Minute + time.Duration(i)*time.Second
		items = append(items, r.delivered(fmt.Sprint("g", i%3), at, at, tiny))
	}
	r.reports(items...)
	r.judgeAll(seen)
	if got, err = r.Overshoots(t.Context(), r.start, r.start.Add(20*time.Minute)); err != nil || got[0].Over < 3 {
		t.Errorf("Overshoots = %+v, %v, want more than 3 over", got, err)
	}
}

// BenchmarkJudge judges ten seconds in which three gateways report each key five times a second, beside two minutes of the same.
func BenchmarkJudge(b *testing.B) {
	for _, keys := range []int{100, 1000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			s := fresh(b)
			at := time.Now().UTC().Truncate(time.Second).Add(-time.Hour)
			insert := func(seconds int) {
				run(b, s, fmt.Sprintf(`INSERT INTO tokens (ts, gateway, boot, seq, rule, key, mode, limit_rate_nanos, limit_burst, taken, window_ms, received)
					SELECT fromUnixTimestamp64Milli(%d + intDiv(number, 3 * %d) * 200, 'UTC') AS ts, concat('g', toString(number %% 3)), 'b', %d + intDiv(number, 3 * %d),
						'contract', concat('key-', toString(intDiv(number, 3) %% %d)), 'enforce', 100000000000, 200, 7, 200, ts FROM numbers(%d)`,
					at.UnixMilli(), keys, at.Unix()*100, keys, keys, 3*5*seconds*keys))
				at = at.Add(time.Duration(seconds) * time.Second)
				run(b, s, fmt.Sprintf("INSERT INTO reports (gateway, boot, seq, received) SELECT 'g1', 'b', %d, fromUnixTimestamp64Milli(%d, 'UTC')", at.Unix(), at.Add(-time.Millisecond).UnixMilli()))
			}
			insert(120)
			seen := at.Add(-time.Millisecond)
			b.ResetTimer()
			for range b.N {
				b.StopTimer()
				insert(10)
				b.StartTimer()
				upto, err := s.Judge(b.Context(), seen)
				if err != nil || upto.Equal(seen) {
					b.Fatal(upto, err)
				}
				seen = upto
			}
			b.StopTimer()
			rows := number(b, s, "(SELECT count() FROM accuracy FINAL)")
			if want := uint64(b.N * 10 * keys); rows != want {
				b.Errorf("%d rows, want %d", rows, want)
			}
			run(b, s, "OPTIMIZE TABLE accuracy FINAL")
			b.ReportMetric(float64(number(b, s, "(SELECT sum(data_compressed_bytes) FROM system.parts WHERE table = 'accuracy' AND active AND database = currentDatabase())"))/float64(rows), "disk-B/row")
		})
	}
}

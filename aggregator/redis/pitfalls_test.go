package redis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	embedded "github.com/weirhq/weir/internal/embedded/redis"
)

var ctx = context.Background()

// one folds uses of a key and returns its state.
func one(t testing.TB, c *redis.Counter, k aggregator.Key, l aggregator.Limit, uses ...aggregator.Use) aggregator.KeyState {
	t.Helper()
	states, err := c.Fold(ctx, []aggregator.Fold{{Key: k, Limit: l, Uses: uses}})
	if err != nil {
		t.Fatal(err)
	}
	return states[0]
}

// took is the use of a gateway that has taken cum tokens, one more than the report before.
func took(gateway string, cum uint64) aggregator.Use {
	return aggregator.Use{Gateway: gateway, Boot: "b1", Seq: cum, Cum: cum, From: cum - 1, DemandNanos: 1e9, Window: 100 * time.Millisecond}
}

func tokens(s aggregator.KeyState) float64 { return float64(s.LevelMicros) / 1e6 }

func per(n float64, d time.Duration) int64 { return int64(n / d.Seconds() * 1e9) }

// TestB003LimitOfZero: whatever limit comes, no script error, and a whole key.
func TestB003LimitOfZero(t *testing.T) {
	s := embeddedtest.Redis(t)
	c := open(t, redis.Config{URL: s.URL(), Timeout: patient})
	for i, l := range []aggregator.Limit{{RateNanos: 1, Burst: 0}, {RateNanos: 0, Burst: 5}, {RateNanos: -5, Burst: 5}, {RateNanos: 5, Burst: -5}, {RateNanos: 1<<63 - 1, Burst: 1<<63 - 1}} {
		k := aggregator.Key{Rule: "r", Key: strconv.Itoa(i)}
		for n := range uint64(10) {
			one(t, c, k, l, took("g1", n+1))
		}
		if ttl := raw(t, s.URL()).PTTL(ctx, c.Name(k)).Val(); ttl <= 0 {
			t.Errorf("limit %+v: time to live %v, want above 0", l, ttl)
		}
	}
}

// TestB011LifetimeNeverZero: with a burst below the rate the key lives all the same.
func TestB011LifetimeNeverZero(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	for _, l := range []aggregator.Limit{{RateNanos: 3e9, Burst: 1}, {RateNanos: 100e9, Burst: 1}, {RateNanos: 1000e9, Burst: 10}, {RateNanos: 5e9, Burst: 2}} {
		k := aggregator.Key{Rule: "r", Key: fmt.Sprint(l)}
		use := took("g1", 20)
		use.From = 0
		state := one(t, c, k, l, use)
		if want := float64(l.Burst) - 20; tokens(state) != max(want, -float64(l.Burst)-5*float64(l.RateNanos)/1e9) {
			t.Errorf("limit %+v: level %v after 20 at once, want %v", l, tokens(state), want)
		}
		if ttl := r.PTTL(ctx, c.Name(k)).Val(); ttl < time.Millisecond {
			t.Errorf("limit %+v: time to live %v, want at least 1ms", l, ttl)
		}
	}
}

// TestB013NoKeyWithoutExpiry cuts connections in mid command under load: no key is left without an expiry, and no unit is lost or doubled.
func TestB013NoKeyWithoutExpiry(t *testing.T) {
	const keys, size = 10_000, 50
	s := embeddedtest.Redis(t)
	proxy := cutting(t, strings.TrimPrefix(s.URL(), "redis://"))
	c, r := open(t, redis.Config{URL: "redis://" + proxy, Timeout: patient}), raw(t, s.URL())
	limit := aggregator.Limit{RateNanos: 1e9, Burst: 10}
	cuts := 0
	for lo := 0; lo < keys; lo += size {
		var folds []aggregator.Fold
		for i := range size {
			folds = append(folds, aggregator.Fold{Key: aggregator.Key{Rule: "r", Key: strconv.Itoa(lo + i)}, Limit: limit, Uses: []aggregator.Use{took("g1", 1)}})
		}
		for {
			_, err := c.Fold(ctx, folds)
			if err == nil {
				break
			}
			if !errors.Is(err, redis.ErrUnreachable) {
				t.Fatal(err)
			}
			cuts++
		}
	}
	if cuts == 0 {
		t.Fatal("no connection was cut")
	}
	t.Logf("%d folds were cut", cuts)
	found := 0
	for it := r.Scan(ctx, 0, "weir:{*", 1000).Iterator(); it.Next(ctx); found++ {
		if ttl := r.PTTL(ctx, it.Val()).Val(); ttl <= 0 {
			t.Errorf("%s: time to live %v", it.Val(), ttl)
		}
		if n := r.HGet(ctx, it.Val(), "n").Val(); n != "1" {
			t.Errorf("%s: total %s, want 1", it.Val(), n)
		}
	}
	if found != keys {
		t.Errorf("%d keys, want %d", found, keys)
	}
}

// cutting is a proxy to addr that closes a connection after a random number of bytes of each direction.
func cutting(t *testing.T, addr string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); running.Wait() })
	running.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", addr)
			if err != nil {
				_ = in.Close()
				continue
			}
			pass := func(to, from net.Conn, limit int64) {
				_, _ = io.CopyN(to, from, limit)
				_ = in.Close()
				_ = out.Close()
			}
			running.Go(func() { pass(out, in, 30_000+rand.Int64N(300_000)) })
			running.Go(func() { pass(in, out, 5_000+rand.Int64N(60_000)) })
		}
	})
	return l.Addr().String()
}

// TestB013PlantedKeyHeals: a key of our form, deep in debt and without expiry, comes back by itself.
func TestB013PlantedKeyHeals(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	k, l := aggregator.Key{Rule: "r", Key: "planted"}, aggregator.Limit{RateNanos: 10e9, Burst: 10}
	now := r.Time(ctx).Val().UnixMicro()
	if err := r.HSet(ctx, c.Name(k), "r", "10000000000", "b", "10", "l", "-8000000000000000", "t", now, "n", "123456789").Err(); err != nil {
		t.Fatal(err)
	}
	state := one(t, c, k, l, took("g1", 1))
	if want := -10 - 5*10.0; tokens(state) != want {
		t.Errorf("level %v, want the bound of debt %v", tokens(state), want)
	}
	if ttl := r.PTTL(ctx, c.Name(k)).Val(); ttl < 60*time.Second || ttl > 68*time.Second {
		t.Errorf("time to live %v, want a minute and the 7 s that 70 tokens take", ttl)
	}
}

// TestB014ScriptCacheEmptied: the cache is emptied before any fold, within pipelines too, and SCRIPT is forbidden.
func TestB014ScriptCacheEmptied(t *testing.T) {
	for name, perCall := range map[string]int{"one key a call": 1, "many": 0} {
		t.Run(name, func(t *testing.T) {
			s := embeddedtest.Redis(t)
			c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient, PerCall: perCall}), raw(t, s.URL())
			l := aggregator.Limit{RateNanos: 1, Burst: 100}
			fold := func(cum uint64) {
				t.Helper()
				var folds []aggregator.Fold
				for i := range 120 {
					folds = append(folds, aggregator.Fold{Key: aggregator.Key{Rule: "r", Key: strconv.Itoa(i)}, Limit: l, Uses: []aggregator.Use{took("g1", cum)}})
				}
				if _, err := c.Fold(ctx, folds); err != nil {
					t.Fatal(err)
				}
			}
			for cum := range uint64(8) {
				fold(cum + 1)
				if err := r.ScriptFlush(ctx).Err(); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Restart(); err != nil {
				t.Fatal(err)
			}
			reconnect(t, r)
			for c.Mark(ctx, []aggregator.Key{{}}) != nil { // the pool learns of the restart
			}
			if err := r.Do(ctx, "ACL", "SETUSER", "default", "-script").Err(); err != nil {
				t.Fatal(err)
			}
			fold(9)
			fold(10)
			for i := range 120 {
				if n, err := c.Total(ctx, aggregator.Key{Rule: "r", Key: strconv.Itoa(i)}); n != 10 || err != nil {
					t.Fatalf("total of key %d = %d, %v, want 10", i, n, err)
				}
			}
		})
	}
}

// TestT2FlushInsidePipeline: the cache is emptied between two commands of one pipeline. What failed is sent again, and only that.
func TestT2FlushInsidePipeline(t *testing.T) {
	s := embeddedtest.Redis(t)
	r := raw(t, s.URL())
	proxy := flushing(t, strings.TrimPrefix(s.URL(), "redis://"))
	c := open(t, redis.Config{URL: "redis://" + proxy, Timeout: patient, PerCall: 1})
	l := aggregator.Limit{RateNanos: 1, Burst: 100}
	for cum := range uint64(10) {
		var folds []aggregator.Fold
		for i := range 20 {
			folds = append(folds, aggregator.Fold{Key: aggregator.Key{Rule: "r", Key: strconv.Itoa(i)}, Limit: l, Uses: []aggregator.Use{took("g1", cum+1)}})
		}
		states, err := c.Fold(ctx, folds)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range states {
			if tokens(s) != 99-float64(cum) {
				t.Fatalf("round %d, key %d: level %v, want %d", cum, i, tokens(s), 99-cum)
			}
		}
	}
	stats := r.Info(ctx, "errorstats").Val()
	if !strings.Contains(stats, "errorstat_NOSCRIPT") {
		t.Errorf("Redis never answered NOSCRIPT: %q", stats)
	}
}

// flushing is a proxy to a Redis that lets a SCRIPT FLUSH slip in after each command that brings the script's text.
func flushing(t *testing.T, addr string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); running.Wait() })
	flush := raw(t, "redis://"+addr)
	running.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", addr)
			if err != nil {
				_ = in.Close()
				continue
			}
			t.Cleanup(func() { _ = in.Close(); _ = out.Close() })
			running.Go(func() { _, _ = io.Copy(in, out); _ = in.Close() })
			running.Go(func() {
				buf := make([]byte, 1<<20)
				for {
					n, err := in.Read(buf)
					if err != nil {
						_ = out.Close()
						return
					}
					if at := bytes.Index(buf[:n], []byte("\r\nevalsha\r\n")); at > 0 && bytes.Contains(buf[:at], []byte("HMGET")) {
						at = bytes.LastIndexByte(buf[:at], '*') // where the second command begins
						_, _ = out.Write(buf[:at])
						for flush.Info(ctx, "commandstats").Val() == "" || flush.ScriptFlush(ctx).Err() != nil {
						}
						_, _ = out.Write(buf[at:n])
						continue
					}
					_, _ = out.Write(buf[:n])
				}
			})
		}
	})
	return l.Addr().String()
}

// TestT1RepliesTooLate: a Redis that answers too late has applied what it was sent. Four tries charge once.
func TestT1RepliesTooLate(t *testing.T) {
	s := embeddedtest.Redis(t)
	c := open(t, redis.Config{URL: s.URL(), Timeout: 50 * time.Millisecond})
	k, l := aggregator.Key{Rule: "r", Key: "k"}, aggregator.Limit{RateNanos: 1, Burst: 100}
	one(t, c, k, l, took("g1", 1))
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if _, err := c.Fold(ctx, []aggregator.Fold{{Key: k, Limit: l, Uses: []aggregator.Use{took("g1", 2)}}}); !errors.Is(err, redis.ErrUnreachable) {
			t.Errorf("Fold on a paused Redis: %v, want ErrUnreachable", err)
		}
	}
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	p := open(t, redis.Config{URL: s.URL(), Timeout: patient})
	if state := one(t, p, k, l, took("g1", 2)); tokens(state) != 98 {
		t.Errorf("level %v, want 98", tokens(state))
	}
	if n, err := p.Total(ctx, k); n != 2 || err != nil {
		t.Errorf("total %d, %v, want 2", n, err)
	}
}

// TestB017SyncCountsOnce: ten requests on one of two gateways, told one by one, are ten.
func TestB017SyncCountsOnce(t *testing.T) {
	s := embeddedtest.Redis(t)
	c := open(t, redis.Config{URL: s.URL(), Timeout: patient})
	k, l := aggregator.Key{Rule: "r", Key: "k"}, aggregator.Limit{RateNanos: per(1000, time.Minute), Burst: 1000}
	for cum := range uint64(10) {
		one(t, c, k, l, took("g1", cum+1), aggregator.Use{Gateway: "g2", Boot: "b", Seq: cum + 1})
		one(t, c, k, l) // looking is not using
	}
	if n, err := c.Total(ctx, k); n != 10 || err != nil {
		t.Errorf("total %d, %v, want 10", n, err)
	}
}

// TestB058LifetimeIsInMilliseconds: a thousand keys of a 60 s window live between 1 and 120 s.
func TestB058LifetimeIsInMilliseconds(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	var folds []aggregator.Fold
	for i := range 1000 {
		n := uint64(i%60 + 1)
		folds = append(folds, aggregator.Fold{Key: aggregator.Key{Rule: "r", Key: strconv.Itoa(i)}, Limit: aggregator.Limit{RateNanos: per(60, time.Minute), Burst: 60},
			Uses: []aggregator.Use{{Gateway: "g", Boot: "b", Seq: 1, Cum: n, DemandNanos: 1e9}}})
	}
	if _, err := c.Fold(ctx, folds); err != nil {
		t.Fatal(err)
	}
	for _, f := range folds {
		if ttl := r.PTTL(ctx, c.Name(f.Key)).Val(); ttl < time.Second || ttl > 120*time.Second {
			t.Fatalf("%v lives %v, want 1 to 120 s", f.Key, ttl)
		}
	}
}

// TestB059LargeNumbers: time keeps its 16 digits, fractions of tokens are told, totals pass 2^53.
func TestB059LargeNumbers(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	k, l := aggregator.Key{Rule: "r", Key: "k"}, aggregator.Limit{RateNanos: 1, Burst: 10}
	state := one(t, c, k, l)
	if got := r.HGet(ctx, c.Name(k), "t").Val(); got != strconv.FormatInt(state.At, 10) || len(got) != 16 {
		t.Errorf("stored time %q, want the 16 digits of %d", got, state.At)
	}
	for _, micros := range []int64{990_000, 2_999_000} {
		if err := r.HSet(ctx, c.Name(k), "l", micros).Err(); err != nil {
			t.Fatal(err)
		}
		if state := one(t, c, k, l); state.LevelMicros != micros {
			t.Errorf("level %d µtokens, want %d", state.LevelMicros, micros)
		}
	}
	if err := r.HSet(ctx, c.Name(k), "n", "9007199254740992").Err(); err != nil {
		t.Fatal(err)
	}
	one(t, c, k, l, took("g1", 1))
	if n, err := c.Total(ctx, k); n != 9007199254740993 || err != nil {
		t.Errorf("total %d, %v, want 9007199254740993", n, err)
	}
	// Whatever gateways say, the total becomes no small number, and nobody is refused for it.
	k.Key = "full"
	one(t, c, k, l)
	if err := r.HSet(ctx, c.Name(k), "n", "9223372036854775807").Err(); err != nil {
		t.Fatal(err)
	}
	if taken, err := c.Take(ctx, []aggregator.Take{{Key: k, Limit: l, Cost: 1}}); err != nil || !taken[0].OK || taken[0].LevelMicros != 9_000_000 {
		t.Errorf("Take = %+v, %v, want one of 10 tokens", taken, err)
	}
	if n, err := c.Total(ctx, k); n != math.MaxInt64 || err != nil {
		t.Errorf("total %d, %v, want the largest number", n, err)
	}
	k.Key = "forged"
	var uses []aggregator.Use
	for i := range 1200 {
		u := took(fmt.Sprint("g", i), 1)
		u.Cum = 1<<53 - 1
		uses = append(uses, u)
	}
	one(t, c, k, l, uses...)
	if n, err := c.Total(ctx, k); n < 1<<52 || err != nil {
		t.Errorf("total %d, %v of 2^63 tokens and more", n, err)
	}
}

// TestB061DamagedState: any field gone or spoiled is made good and reported; no script error, and the next fold is as ever.
func TestB061DamagedState(t *testing.T) {
	s := embeddedtest.Redis(t)
	damaged(t, s.URL(), true)
}

func TestB061DamagedStateMiniredis(t *testing.T) {
	damaged(t, "redis://"+miniredis.RunT(t).Addr(), false)
}

func damaged(t *testing.T, url string, real bool) {
	c, r := open(t, redis.Config{URL: url, Timeout: patient}), raw(t, url)
	l := aggregator.Limit{RateNanos: 1_000_000_001, Burst: 10}
	n := 0
	try := func(damage string, lost bool, do func(name string) error) {
		n++
		k := aggregator.Key{Rule: "r", Key: strconv.Itoa(n)}
		one(t, c, k, l, took("g1", 4), took("g2", 4))
		if err := do(c.Name(k)); err != nil {
			t.Fatal(err)
		}
		state := one(t, c, k, l, took("g1", 5))
		if state.Lost != lost {
			t.Errorf("%s: lost = %v, want %v", damage, state.Lost, lost)
		}
		if got := tokens(state); got > 10 || got < -16 {
			t.Errorf("%s: level %v", damage, got)
		}
		if ttl := r.PTTL(ctx, c.Name(k)).Val(); ttl <= 0 {
			t.Errorf("%s: time to live %v", damage, ttl)
		}
		for _, d := range state.Demands {
			if d.Gateway != "g1" && d.Gateway != "g2" {
				t.Errorf("%s: demand of %q", damage, d.Gateway)
			}
		}
		before := tokens(state)
		if state = one(t, c, k, l, took("g1", 6)); state.Lost || tokens(state) > before || tokens(state) < before-1 {
			t.Errorf("%s: the fold after has level %v after %v, lost %v", damage, tokens(state), before, state.Lost)
		}
		if total, err := c.Total(ctx, k); err != nil || total <= 0 {
			t.Errorf("%s: total %d, %v", damage, total, err)
		}
	}
	try("time deleted", true, func(k string) error { return r.HDel(ctx, k, "t").Err() })
	try("level deleted", true, func(k string) error { return r.HDel(ctx, k, "l").Err() })
	try("another type", true, func(k string) error { return errors.Join(r.Del(ctx, k).Err(), r.Set(ctx, k, "abc", 0).Err()) })
	for _, v := range []string{"abc", "", "nan", "inf", "-inf", "1e400", "0x", "9223372036854775807"} {
		for _, f := range []string{"l", "t"} {
			try(fmt.Sprintf("%s = %q", f, v), true, func(k string) error { return r.HSet(ctx, k, f, v).Err() })
		}
		for _, f := range []string{"r", "b", "v", "d", "f", "c:g1:b1:0"} {
			try(fmt.Sprintf("%s = %q", f, v), false, func(k string) error { return r.HSet(ctx, k, f, v).Err() })
		}
	}
	totals := []string{"abc", "", "nan", "1.5", "9223372036854775807"}
	if !real {
		totals = totals[:4] // miniredis lets a sum run over
	}
	for _, v := range totals {
		try(fmt.Sprintf("n = %q", v), true, func(k string) error { return r.HSet(ctx, k, "n", v).Err() })
	}
	try("time in the future", false, func(k string) error { return r.HSet(ctx, k, "t", "8000000000000000").Err() })
	try("fraction out of range", false, func(k string) error { return r.HSet(ctx, k, "f", "-5000000000").Err() })
	try("demand until the future", false, func(k string) error { return r.HSet(ctx, k, "d", ";g1 5 8000000000000000 5;").Err() })
	for _, d := range []string{"junk", ";", ";;;", "g1", ";g1", ";g1 ", ";g1 1;", ";g1 1 2;", ";g1 a b c;g2", ";g1 1 2 3 4;", strings.Repeat(";g1 1 1 1", 100)} {
		try(fmt.Sprintf("d = %q", d), false, func(k string) error { return r.HSet(ctx, k, "d", d).Err() })
	}
	// a look at a key whose limit is spoiled finds none
	k := aggregator.Key{Rule: "r", Key: "look"}
	for _, f := range []string{"r", "b"} {
		one(t, c, k, l)
		if err := r.HSet(ctx, c.Name(k), f, "abc").Err(); err != nil {
			t.Fatal(err)
		}
		if s := one(t, c, k, aggregator.Limit{}); s.Version != 0 {
			t.Errorf("state with %s spoiled = %+v, want none", f, s)
		}
	}
}

// TestB061EvictionIsRemarked: Check asks for noeviction.
func TestB061EvictionIsRemarked(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	if remarks, err := c.Check(ctx); len(remarks) != 0 || err != nil {
		t.Errorf("Check = %q, %v, want nothing", remarks, err)
	}
	if err := r.ConfigSet(ctx, "maxmemory-policy", "volatile-lru").Err(); err != nil {
		t.Fatal(err)
	}
	if remarks, err := c.Check(ctx); len(remarks) != 1 || !strings.Contains(remarks[0], "volatile-lru") || err != nil {
		t.Errorf("Check = %q, %v, want a remark on volatile-lru", remarks, err)
	}
}

// TestB063RulesOfOneUser: two rules for one user have buckets and lives of their own.
func TestB063RulesOfOneUser(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	month, hour := 30*24*time.Hour, time.Hour
	a, la := aggregator.Key{Rule: "A", Key: "u"}, aggregator.Limit{RateNanos: per(10, month), Burst: 10}
	b, lb := aggregator.Key{Rule: "B", Key: "u"}, aggregator.Limit{RateNanos: per(5, hour), Burst: 5}
	take := func(k aggregator.Key, l aggregator.Limit, n uint64) aggregator.KeyState {
		return one(t, c, k, l, aggregator.Use{Gateway: "g", Boot: "b", Seq: n, Cum: n})
	}
	take(a, la, 4)
	take(b, lb, 5)
	if s := take(b, lb, 6); tokens(s) > -0.9 {
		t.Errorf("B: level %v after 6 of 5, want -1", tokens(s))
	}
	if s := one(t, c, a, la); tokens(s) < 6 || tokens(s) > 6.01 {
		t.Errorf("A: level %v, want 6", tokens(s))
	}
	for k, want := range map[aggregator.Key]time.Duration{a: month / 10 * 4, b: hour * 6 / 5} { // what refills, and a minute
		if ttl := r.PTTL(ctx, c.Name(k)).Val(); ttl < want || ttl > want+2*time.Minute {
			t.Errorf("%v lives %v, want %v and a minute", k, ttl, want)
		}
	}
}

// TestSlowRateKeepsItsRemainder: a rate of one token a month, looked at every millisecond, earns what it should to the µtoken.
func TestSlowRateKeepsItsRemainder(t *testing.T) {
	s := embeddedtest.Redis(t)
	c := open(t, redis.Config{URL: s.URL(), Timeout: patient})
	k, l := aggregator.Key{Rule: "r", Key: "k"}, aggregator.Limit{RateNanos: 386_000, Burst: 100} // 386 µtokens a second
	first := one(t, c, k, l, aggregator.Use{Gateway: "g", Boot: "b", Seq: 1, Cum: 50})
	var last aggregator.KeyState
	for range 2000 {
		last = one(t, c, k, l)
	}
	if want := first.LevelMicros + (last.At-first.At)*386_000/1e9; last.LevelMicros != want {
		t.Errorf("level %d µtokens after %d µs, want %d", last.LevelMicros, last.At-first.At, want)
	}
}

// TestPruning: marks that nobody used for an hour go, the newest of a gateway stays for a day, and faded demands go too.
func TestPruning(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	k, l := aggregator.Key{Rule: "r", Key: "k"}, aggregator.Limit{RateNanos: 1e9, Burst: 1000}
	use := func(gateway, boot string, inc uint32) aggregator.Use {
		return aggregator.Use{Gateway: gateway, Boot: boot, Incarnation: inc, Seq: 1, Cum: 5, DemandNanos: 1e9}
	}
	one(t, c, k, l, use("g1", "b1", 0), use("g1", "b1", 1), use("g1", "b2", 0), use("g2", "b1", 0))
	// back is an hour ago: the mark of a key, unused since age ago, is stamped so, and the key's clock stands before this quarter
	old := func(age time.Duration, fields ...string) {
		t.Helper()
		now := r.Time(ctx).Val()
		set := []any{"t", now.Add(-20 * time.Minute).UnixMicro()}
		for _, f := range fields {
			set = append(set, f, fmt.Sprintf("5 1 %d", now.Add(-age).UnixMicro()))
		}
		if err := r.HSet(ctx, c.Name(k), set...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	marks := func() string {
		var list []string
		for _, f := range r.HKeys(ctx, c.Name(k)).Val() {
			if strings.HasPrefix(f, "c:") {
				list = append(list, strings.TrimPrefix(f, "c:"))
			}
		}
		slices.Sort(list)
		return strings.Join(list, " ")
	}
	old(59*time.Minute, "c:g1:b1:0", "c:g1:b1:1", "c:g2:b1:0")
	one(t, c, k, l, use("g1", "b2", 0))
	if got, want := marks(), "g1:b1:0 g1:b1:1 g1:b2:0 g2:b1:0"; got != want {
		t.Errorf("marks after 59 minutes: %s, want %s", got, want)
	}
	old(61*time.Minute, "c:g1:b1:0", "c:g1:b1:1", "c:g2:b1:0")
	one(t, c, k, l, use("g1", "b2", 0))
	if got, want := marks(), "g1:b2:0 g2:b1:0"; got != want {
		t.Errorf("marks after 61 minutes: %s, want %s", got, want)
	}
	old(25*time.Hour, "c:g2:b1:0")
	if err := r.HSet(ctx, c.Name(k), "d", ";g2 1000 1 1;").Err(); err != nil {
		t.Fatal(err)
	}
	one(t, c, k, l, use("g1", "b2", 0))
	if got, want := marks(), "g1:b2:0"; got != want {
		t.Errorf("marks after 25 hours: %s, want %s", got, want)
	}
	if d := r.HGet(ctx, c.Name(k), "d").Val(); strings.Contains(d, "g2") {
		t.Errorf("demands %q, want none of g2", d)
	}
	if n, err := c.Total(ctx, k); n != 20 || err != nil {
		t.Errorf("total %d, %v, want 20", n, err)
	}
}

// TestClockStepsBack: Redis' clock a day back gives nothing and takes nothing, and versions go on growing.
func TestClockStepsBack(t *testing.T) {
	s := embeddedtest.Redis(t)
	c, r := open(t, redis.Config{URL: s.URL(), Timeout: patient}), raw(t, s.URL())
	k, l := aggregator.Key{Rule: "r", Key: "k"}, aggregator.Limit{RateNanos: 1, Burst: 100}
	first := one(t, c, k, l, took("g1", 1))
	ahead := first.At + 24*3600*1_000_000
	if err := r.HSet(ctx, c.Name(k), "t", ahead).Err(); err != nil {
		t.Fatal(err)
	}
	version := uint64(ahead)
	for range 3 {
		s := one(t, c, k, l)
		if tokens(s) != 99 || s.Version <= version {
			t.Errorf("level %v, version %d after %d, want 99 and a higher one", tokens(s), s.Version, version)
		}
		version = s.Version
	}
}

// TestUnusableRedis: each way in which Redis cannot be used is one clear line, told apart from a refusal, and never shows the password.
func TestUnusableRedis(t *testing.T) {
	const secret = "s3cr3t-p4ss"
	s, err := embedded.Start(embedded.Config{Dir: t.TempDir(), Password: secret, Real: true}, embeddedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	addr := strings.TrimPrefix(s.URL(), "redis://")
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := closed.Addr().String()
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ url, want string }{
		"no password":    {"redis://" + addr, "wrong or missing password"},
		"wrong password": {"redis://:not-" + secret + "@" + addr, "wrong or missing password"},
		"wrong user":     {"redis://someone:" + secret + "@" + addr, "wrong or missing password"},
		"nobody there":   {"redis://:" + secret + "@" + nobody, "connection refused"},
	} {
		c := open(t, redis.Config{URL: tc.url, Timeout: patient})
		_, err := c.Check(ctx)
		_, foldErr := c.Fold(ctx, []aggregator.Fold{{Key: aggregator.Key{Rule: "r"}, Limit: aggregator.Limit{RateNanos: 1, Burst: 1}}})
		for _, err := range []error{err, foldErr} {
			if !errors.Is(err, redis.ErrUnreachable) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), secret) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v, want one line with %q and without the password", name, err, tc.want)
			}
		}
	}
	for _, url := range []string{"http://:" + secret + "@" + addr, "redis://:" + secret + "@" + addr + "/x", "redis://:" + secret + "@[::1", "redis://u:" + secret + "@h:1?dial_timeout=" + "x"} {
		if _, err := redis.New(redis.Config{URL: url}); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("New(%q) = %v, want an error without the password", strings.ReplaceAll(url, secret, "***"), err)
		}
	}
	c := open(t, redis.Config{URL: "redis://:" + secret + "@" + addr, Timeout: patient})
	if remarks, err := c.Check(ctx); err != nil || len(remarks) != 0 {
		t.Errorf("Check with the password = %q, %v", remarks, err)
	}
	r := raw(t, "redis://:"+secret+"@"+addr)
	if err := r.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	_, err = c.Fold(ctx, []aggregator.Fold{{Key: aggregator.Key{Rule: "r"}, Limit: aggregator.Limit{RateNanos: 1, Burst: 1}}})
	if err == nil || errors.Is(err, redis.ErrUnreachable) || !strings.Contains(err.Error(), "OOM") {
		t.Errorf("Fold on a full Redis: %v, want its OOM", err)
	}
}

// TestStrictAfterALoss: a Redis that was emptied, or restarted without persistence, admits no second burst of a limit that is kept
// strictly: a key that is not there has earned since the loss, and no more, whoever notices first.
func TestStrictAfterALoss(t *testing.T) {
	for name, lose := range map[string]func(*testing.T, *embedded.Server) error{
		"emptied":   func(t *testing.T, s *embedded.Server) error { return raw(t, s.URL()).FlushAll(ctx).Err() },
		"restarted": func(_ *testing.T, s *embedded.Server) error { return s.Restart() },
	} {
		t.Run(name, func(t *testing.T) {
			s, err := embedded.Start(embedded.Config{Dir: t.TempDir(), Real: true}, embeddedtest.Log(t))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Stop() })
			forgot := 0
			centre, other := open(t, redis.Config{URL: s.URL(), Timeout: patient, Forgot: func() { forgot++ }}), open(t, redis.Config{URL: s.URL(), Timeout: patient})
			l := aggregator.Limit{RateNanos: per(1, time.Hour), Burst: 10}
			admitted := func(c *redis.Counter, key string) (n int) {
				t.Helper()
				for range 3 {
					takes := make([]aggregator.Take, 5)
					for i := range takes {
						takes[i] = aggregator.Take{Key: aggregator.Key{Rule: "strict", Key: key}, Limit: l, Cost: 1}
					}
					taken, err := c.Take(ctx, takes)
					for err != nil { // the pool learns of the restart
						taken, err = c.Take(ctx, takes)
					}
					for _, one := range taken {
						if one.OK {
							n++
						}
					}
				}
				return n
			}
			for _, c := range []*redis.Counter{centre, other} {
				if _, err := c.Epoch(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if n := admitted(centre, "a"); n != 10 {
				t.Fatalf("%d of 15 admitted, want the burst of 10", n)
			}
			if err := lose(t, s); err != nil {
				t.Fatal(err)
			}
			reconnect(t, raw(t, s.URL()))
			for _, c := range []*redis.Counter{centre, other} {
				if n := admitted(c, "a"); n != 0 {
					t.Errorf("%d admitted after the loss, want none", n)
				}
			}
			for err = errors.New("not yet"); err != nil; { // what gateways took by themselves is no reason for a full bucket
				_, err = centre.Fold(ctx, []aggregator.Fold{{Key: aggregator.Key{Rule: "strict", Key: "b"}, Limit: l, Strict: true, Uses: []aggregator.Use{took("g1", 1)}}})
			}
			if n := admitted(other, "b"); n != 0 {
				t.Errorf("%d admitted of a key that a report made, want none", n)
			}
			if forgot != 1 {
				t.Errorf("told %d times that Redis has forgotten, want once", forgot)
			}

			if err := lose(t, s); err != nil {
				t.Fatal(err)
			}
			reconnect(t, raw(t, s.URL()))
			newcomer := open(t, redis.Config{URL: s.URL(), Timeout: patient}) // makes a note of its own, knowing nothing
			if _, err := newcomer.Epoch(ctx); err != nil {
				t.Fatal(err)
			}
			if n := admitted(other, "a"); n != 0 {
				t.Errorf("%d admitted by one that has seen more than the newcomer, want none", n)
			}
			fast := aggregator.Limit{RateNanos: 1e15, Burst: 10}
			time.Sleep(time.Millisecond)
			taken, err := other.Take(ctx, []aggregator.Take{{Key: aggregator.Key{Rule: "strict", Key: "fast"}, Limit: fast, Cost: 10}})
			if err != nil || !taken[0].OK {
				t.Errorf("a key that has earned its burst since: %+v, %v", taken, err)
			}
		})
	}
}

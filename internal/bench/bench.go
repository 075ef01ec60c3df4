// Package bench measures the local check beside what others offer and beside a floor: the least that a check with a usage count
// can cost on this machine. It is a module of its own, so that rivals are no dependencies of weir.
package bench

import (
	"context"
	"fmt"
	"hash/maphash"
	"math/rand"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	"golang.org/x/time/rate"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
)

// Checker answers for one key. Every limit here is so high that all is admitted: the path that writes.
type Checker func(key string) bool

// Limiter is one contestant.
type Limiter struct {
	Name string
	New  func(keys int) Checker
}

// coarse is a clock for one atomic load, moved on by the harness.
var coarse atomic.Int64

// Limiters are all contestants: the floor, weir with one rule by tenant, and others.
func Limiters() []Limiter {
	return []Limiter{
		{"floor", newFloor},
		{"weir", func(int) Checker { return weir(contract()) }},
		{"weir-guard", func(int) Checker { return weir(guard(), contract()) }},
		{"weir-clock", func(int) Checker { return weirClock(contract()) }},
		{"xrate-syncmap", func(int) Checker { return xrateSyncMap() }},
		{"xrate-rwmutex", func(int) Checker { return xrateRWMutex() }},
		{"throttled", func(int) Checker { return throttledCheck() }},
		{"go-limiter", func(int) Checker { return goLimiter() }},
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func contract() limits.Rule {
	return limits.Rule{Name: "contract", Layer: limits.LayerContract, Key: []limits.Dimension{{Kind: limits.ByTenant}},
		Fixed: bucket.Limit{Rate: must(bucket.NewRate(10_000_000, 1, time.Second)), Burst: bucket.MaxBurst}}
}

func guard() limits.Rule {
	return limits.Rule{Name: "guard", Layer: limits.LayerGuard,
		Fixed: bucket.Limit{Rate: must(bucket.NewRate(100_000_000, 1, time.Second)), Burst: bucket.MaxBurst}}
}

func newWeir(rules ...limits.Rule) *enforcer.Enforcer {
	e := enforcer.New(enforcer.Config{})
	e.SetPolicy(&limits.Policy{Rules: rules})
	return e
}

// weir reads the same clock as the floor.
func weir(rules ...limits.Rule) Checker {
	e := newWeir(rules...)
	return func(key string) bool {
		q := enforcer.Request{Tenant: key, Cost: 1}
		return e.Check(coarse.Load(), &q).Allowed
	}
}

// weirClock reads a clock on every call, as the rivals do.
func weirClock(rules ...limits.Rule) Checker {
	e := newWeir(rules...)
	return func(key string) bool {
		q := enforcer.Request{Tenant: key, Cost: 1}
		return e.Check(enforcer.Monotonic(), &q).Allowed
	}
}

// slot is one key of the floor: limit and usage in one cache line.
type slot struct {
	hash, tat, hits, denied atomic.Uint64
	_                       [32]byte
}

// newFloor is a bare table of one 64-byte slot per key, half full, never grown, with the key's hash only: GCRA by compare and
// swap, and a count.
func newFloor(keys int) Checker {
	size := 1
	for size < keys*2 {
		size *= 2
	}
	slots := make([]slot, size)
	mask := uint64(size - 1)
	seed := maphash.MakeSeed()
	const interval, burst = 100, 100 * 1_000_000_000
	return func(key string) bool {
		h := maphash.String(seed, key) | 1
		for i := h >> 1 & mask; ; i = (i + 1) & mask {
			s := &slots[i]
			have := s.hash.Load()
			if have == 0 && s.hash.CompareAndSwap(0, h) {
				have = h
			} else if have == 0 {
				have = s.hash.Load()
			}
			if have != h {
				continue
			}
			now := uint64(coarse.Load())
			for {
				tat := s.tat.Load()
				next := max(tat, now) + interval
				if next > now+burst {
					s.denied.Add(1)
					return false
				}
				if s.tat.CompareAndSwap(tat, next) {
					s.hits.Add(1)
					return true
				}
			}
		}
	}
}

const (
	xlimit = rate.Limit(1e9)
	xburst = 1_000_000_000
)

func xrateSyncMap() Checker {
	var m sync.Map
	return func(key string) bool {
		l, ok := m.Load(key)
		if !ok {
			l, _ = m.LoadOrStore(key, rate.NewLimiter(xlimit, xburst))
		}
		return l.(*rate.Limiter).Allow()
	}
}

func xrateRWMutex() Checker {
	var mu sync.RWMutex
	m := map[string]*rate.Limiter{}
	return func(key string) bool {
		mu.RLock()
		l, ok := m[key]
		mu.RUnlock()
		if !ok {
			mu.Lock()
			if l, ok = m[key]; !ok {
				l = rate.NewLimiter(xlimit, xburst)
				m[key] = l
			}
			mu.Unlock()
		}
		return l.Allow()
	}
}

// throttledCheck does not count the calls that end in an error: with two callers on one key some do.
func throttledCheck() Checker {
	store := must(memstore.NewCtx(0))
	l := must(throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerDuration(1_000_000_000, time.Second), MaxBurst: 1_000_000_000}))
	l.SetMaxCASAttemptsLimit(1000)
	ctx := context.Background()
	return func(key string) bool {
		limited, _, err := l.RateLimitCtx(ctx, key, 1)
		return !limited && err == nil
	}
}

func goLimiter() Checker {
	store := must(memorystore.New(&memorystore.Config{Tokens: 1 << 40, Interval: time.Hour}))
	ctx := context.Background()
	return func(key string) bool {
		_, _, _, ok, err := store.Take(ctx, key)
		return ok && err == nil
	}
}

// Keys returns n keys of 19 bytes.
func Keys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("k%018x", uint64(i)*0x9e3779b97f4a7c15)
	}
	return keys
}

// Stream returns n keys drawn by pick, their bytes side by side in the order of use: a request's bytes are in the cache.
func Stream(keys []string, n int, pick func(*rand.Rand) int) []string {
	rng := rand.New(rand.NewSource(1))
	size := len(keys[0])
	slab := make([]byte, 0, n*size)
	for range n {
		slab = append(slab, keys[pick(rng)]...)
	}
	all := string(slab)
	stream := make([]string, n)
	for i := range stream {
		stream[i] = all[i*size : (i+1)*size]
	}
	return stream
}

// Uniform draws from n keys alike.
func Uniform(n int) func(*rand.Rand) int { return func(r *rand.Rand) int { return r.Intn(n) } }

// Zipf draws from n keys with exponent 1.1.
func Zipf(n int) func(*rand.Rand) int {
	var z *rand.Zipf
	perm := rand.New(rand.NewSource(2)).Perm(n)
	return func(r *rand.Rand) int {
		if z == nil {
			z = rand.NewZipf(r, 1.1, 1, uint64(n-1))
		}
		return perm[z.Uint64()]
	}
}

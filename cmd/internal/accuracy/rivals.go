package accuracy

import (
	"math/rand/v2"

	"github.com/weirhq/weir/enforcer/bucket"
)

// divided is what one gets without a centre: each gateway has limit/N to itself. It knows N, also when it changes, at once.
type divided struct {
	w     *world
	whole bucket.Limit
	part  bucket.Limit
	n     int
	own   []map[int32]*bucket.State // by gateway and key
}

func newDivided(w *world) fleet {
	f := &divided{w: w, whole: w.sc.limit(), n: w.sc.gateways}
	f.part = f.whole.Part(1, uint64(f.n))
	for range w.sc.most {
		f.own = append(f.own, make(map[int32]*bucket.State))
	}
	return f
}

func (f *divided) happen(h happening) {
	switch h.what {
	case joins:
		f.n++
	case leaves, vanishes:
		f.n--
	default:
		return
	}
	next := f.whole.Part(1, uint64(f.n))
	for _, own := range f.own {
		for _, b := range own { // in any order: each is on its own
			b.Resize(f.part, next, f.w.now)
		}
	}
	f.part = next
}

func (f *divided) ask(i int) {
	a := &f.w.arrivals[i]
	b := f.own[a.gateway][a.key]
	if b == nil {
		full := bucket.Full(f.part, f.w.now)
		b = &full
		f.own[a.gateway][a.key] = b
	}
	f.w.answer(i, b.Take(f.part, f.w.now, 1).Allowed)
}

// central asks one bucket in Redis about each request, as go-redis/redis_rate does: the generic cell rate algorithm by the clock of
// Redis. While Redis is down the caller has an error and, like most, lets the request pass. What is lost is sent again by TCP.
type central struct {
	w     *world
	limit bucket.Limit
	keys  map[int32]*bucket.State
	rng   *rand.Rand
	down  bool
}

// retransmit is TCP's least wait before it sends a lost segment again.
const retransmit = 200 * ms

func newCentral(w *world) fleet {
	return &central{w: w, limit: w.sc.limit(), keys: make(map[int32]*bucket.State), rng: w.random("central")}
}

func (f *central) happen(h happening) {
	switch h.what {
	case redisDown:
		f.down = true
		clear(f.keys)
	case redisUp:
		f.down = false
	}
}

func (f *central) ask(i int) {
	delay := hopMin + f.rng.Int64N(hopMax-hopMin)
	for f.w.sc.loss > 0 && f.rng.Float64() < f.w.sc.loss {
		delay += retransmit
	}
	f.w.traffic.messages += 2
	f.w.traffic.redis++
	f.w.after(delay, func() { f.decide(i) })
}

func (f *central) decide(i int) {
	if f.down {
		f.w.answer(i, true)
		return
	}
	key := f.w.arrivals[i].key
	b := f.keys[key]
	if b == nil {
		full := bucket.Full(f.limit, f.w.now)
		b = &full
		f.keys[key] = b
	}
	f.w.answer(i, b.Take(f.limit, f.w.now, 1).Allowed)
}

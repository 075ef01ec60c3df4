package accuracy

import (
	"math/rand/v2"
	"slices"
)

// gubernator is what github.com/gubernator-io/gubernator v2.16.0 does with Behavior GLOBAL and its default settings, read from its
// algorithms.go, global.go and gubernator.go. A key has an owner. Another peer answers from its own copy of the state and queues
// the hits, refused ones too; GlobalSyncWait after the first of them they go to the owner, summed up. The owner drains what it has
// when they are more. GlobalSyncWait after the first change it tells all peers what remains, and their copies are replaced.
//
// Its token bucket is a window: it becomes full as a whole when its time is over. Its leaky bucket refills all the time, at every
// peer on its own between two broadcasts.
//
// The model is kind where it must choose: owners are gateways that stay, no owner is ever lost, and membership changes at once.
type gubernator struct {
	w     *world
	leaky bool
	peers []*peer

	limit, duration, burst int64 // duration in ms
}

const (
	globalSyncWait   = 100 * ms
	globalBatchLimit = 1000
)

type peer struct {
	skew  int64
	rng   *rand.Rand
	up    bool
	items map[int32]*item

	hits    batch // for owners
	updates batch // for peers
}

// batch is what a peer has queued, by key in the order of first mention.
type batch struct {
	keys    []int32
	queue   map[int32]*hit
	planned bool // globalSyncWait is running down
}

type hit struct{ hits, createdAt int64 }

// item is one peer's copy of a key's state. Times are in ms.
type item struct {
	expireAt  int64
	remaining int64   // of a token bucket
	level     float64 // of a leaky bucket
	burst     int64
	updatedAt int64
}

func newGubernator(leaky bool) func(*world) fleet {
	return func(w *world) fleet {
		f := &gubernator{w: w, leaky: leaky, limit: w.sc.tokens, duration: w.sc.per.Milliseconds(), burst: w.sc.burst}
		for i := range w.sc.most {
			p := &peer{rng: w.random("peer " + string(rune('a'+i))), up: i < w.sc.gateways, items: make(map[int32]*item),
				hits: batch{queue: make(map[int32]*hit)}, updates: batch{queue: make(map[int32]*hit)}}
			if w.sc.clocks {
				p.skew = []int64{5 * s, -5 * s}[i%2]
			}
			f.peers = append(f.peers, p)
		}
		return f
	}
}

func (f *gubernator) happen(h happening) {
	switch h.what {
	case joins:
		f.peers[h.gateway].up = true
	case leaves, vanishes:
		f.peers[h.gateway].up = false
	}
}

// millis is a peer's clock.
func (f *gubernator) millis(p *peer) int64 { return f.w.wall(p.skew).UnixMilli() }

func (f *gubernator) owner(key int32) *peer { return f.peers[int(key)%f.w.sc.gateways] }

func (f *gubernator) ask(i int) {
	a := &f.w.arrivals[i]
	p := f.peers[a.gateway]
	h := hit{1, f.millis(p)}
	over, _, _ := f.decide(p, a.key, h, false)
	f.w.answer(i, !over)
	if p == f.owner(a.key) {
		f.queueUpdate(p, a.key, h)
	} else {
		f.queueHit(p, a.key, h)
	}
}

func (f *gubernator) queueHit(p *peer, key int32, h hit) {
	if q := p.hits.queue[key]; q != nil {
		q.hits += h.hits
	} else {
		p.hits.queue[key] = &h
		p.hits.keys = append(p.hits.keys, key)
	}
	f.schedule(&p.hits, func() { f.sendHits(p) })
}

func (f *gubernator) queueUpdate(p *peer, key int32, h hit) {
	if p.updates.queue[key] == nil {
		p.updates.keys = append(p.updates.keys, key)
	}
	p.updates.queue[key] = &h
	f.schedule(&p.updates, func() { f.broadcast(p) })
}

// schedule sends a batch that is full, and plans it for one that begins.
func (f *gubernator) schedule(b *batch, send func()) {
	if len(b.keys) >= globalBatchLimit {
		send()
	}
	if len(b.keys) == 0 || b.planned {
		return
	}
	b.planned = true
	f.w.after(globalSyncWait, func() {
		b.planned = false
		if len(b.keys) > 0 {
			send()
		}
	})
}

// take empties the batch.
func (b *batch) take() ([]int32, map[int32]*hit) {
	keys, queue := b.keys, b.queue
	b.keys, b.queue = nil, make(map[int32]*hit)
	return keys, queue
}

// rpc calls a peer, or fails.
func (f *gubernator) rpc(p *peer, do func()) {
	f.w.traffic.messages += 2
	delay := 2*hopMin + p.rng.Int64N(2*(hopMax-hopMin))
	if f.w.sc.loss > 0 && p.rng.Float64() < f.w.sc.loss {
		return // it is logged and not tried again
	}
	f.w.after(delay, do)
}

func (f *gubernator) sendHits(p *peer) {
	keys, queue := p.hits.take()
	for _, o := range f.peers {
		own := slices.DeleteFunc(slices.Clone(keys), func(k int32) bool { return f.owner(k) != o })
		if len(own) == 0 {
			continue
		}
		f.rpc(p, func() {
			for _, k := range own {
				f.decide(o, k, *queue[k], true)
				f.queueUpdate(o, k, *queue[k])
			}
		})
	}
}

func (f *gubernator) broadcast(p *peer) {
	keys, queue := p.updates.take()
	type global struct{ remaining, resetTime int64 }
	globals := make([]global, len(keys))
	for n, k := range keys {
		_, globals[n].remaining, globals[n].resetTime = f.decide(p, k, hit{0, queue[k].createdAt}, false)
	}
	for _, o := range f.peers {
		if o == p || !o.up {
			continue
		}
		f.rpc(p, func() {
			for n, k := range keys { // its burst becomes the limit: that is how the update is read there
				o.items[k] = &item{expireAt: globals[n].resetTime, remaining: globals[n].remaining,
					level: float64(globals[n].remaining), burst: f.limit, updatedAt: f.millis(o)}
			}
		})
	}
}

// decide applies a peer's algorithm to its item, and returns whether the limit is exceeded, what remains and when it is reset.
func (f *gubernator) decide(p *peer, key int32, h hit, drain bool) (over bool, remaining, resetTime int64) {
	it := p.items[key]
	if it != nil && it.expireAt < f.millis(p) {
		it = nil
	}
	if f.leaky {
		return f.leakyBucket(p, key, it, h, drain)
	}
	return f.tokenBucket(p, key, it, h, drain)
}

func (f *gubernator) tokenBucket(p *peer, key int32, t *item, h hit, drain bool) (over bool, remaining, resetTime int64) {
	if t == nil {
		t = &item{expireAt: h.createdAt + f.duration, remaining: f.limit - h.hits}
		if over = h.hits > f.limit; over {
			t.remaining = f.limit
		}
		p.items[key] = t
		return over, t.remaining, t.expireAt
	}
	switch {
	case h.hits == 0:
	case t.remaining == 0:
		over = true
	case h.hits > t.remaining:
		over = true
		if drain {
			t.remaining = 0
		}
	default:
		t.remaining -= h.hits
	}
	return over, t.remaining, t.expireAt
}

func (f *gubernator) leakyBucket(p *peer, key int32, b *item, h hit, drain bool) (over bool, remaining, resetTime int64) {
	rate := float64(f.duration) / float64(f.limit) // ms for a token
	reset := func(remaining int64) int64 { return h.createdAt + (f.limit-remaining)*int64(rate) }
	if b == nil {
		b = &item{expireAt: h.createdAt + f.duration, level: float64(f.burst - h.hits), burst: f.burst, updatedAt: h.createdAt}
		remaining = f.burst - h.hits
		if over = h.hits > f.burst; over {
			remaining, b.level = 0, 0
		}
		p.items[key] = b
		return over, remaining, reset(remaining)
	}
	if b.burst != f.burst {
		if f.burst > int64(b.level) {
			b.level = float64(f.burst)
		}
		b.burst = f.burst
	}
	if h.hits != 0 {
		b.expireAt = h.createdAt + f.duration
	}
	if leak := float64(h.createdAt-b.updatedAt) / rate; int64(leak) > 0 {
		b.level += leak
		b.updatedAt = h.createdAt
	}
	if int64(b.level) > b.burst {
		b.level = float64(b.burst)
	}
	remaining = int64(b.level)
	switch {
	case remaining == 0 && h.hits > 0:
		return true, remaining, reset(remaining)
	case remaining == h.hits:
		b.level = 0
		return false, 0, reset(0)
	case h.hits > remaining:
		resetTime = reset(remaining)
		if drain {
			b.level, remaining = 0, 0
		}
		return true, remaining, resetTime
	case h.hits == 0:
		return false, remaining, reset(remaining)
	}
	b.level -= float64(h.hits)
	remaining = int64(b.level)
	return false, remaining, reset(remaining)
}

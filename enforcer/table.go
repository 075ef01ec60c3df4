package enforcer

import (
	"encoding/binary"
	"math"
	"math/bits"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/weirhq/weir/enforcer/bucket"
)

// The table holds the bucket of every live key. It is cut into shards by hash. A shard's segment is one array of slots, one
// cache line each and free of pointers, so that a million of them cost the collector nothing. Two keys in three are in the slot
// that their hash points to. For the others one byte of tag per slot, eight to a word, tells which lines are worth looking at
// (the layout is that of Abseil's Swiss tables). A slab holds the keys' text, which only reports read. A key is recognised by
// 92 bits of hash under seeds that no caller knows.
//
// A decision takes no lock but the bit in its own slot, held for the arithmetic. New keys are entered under the shard's mutex.
// The one operation that grows, evicts and compacts is rebuild: it moves a segment of a few thousand slots to a new one.

const (
	shardBits = 8
	shardN    = 1 << shardBits
	groupLen  = 8            // slots per word of tags
	groupMax  = groupLen - 1 // a segment is rebuilt when it holds this many per group, on average
	tagBit    = 0x80         // set in every tag: an empty slot has tag 0
	tagLow    = 0x0101010101010101
	tagHigh   = 0x8080808080808080
)

// The low bits of slot.word. The others are the second part of the fingerprint.
const (
	locked  = 1 << iota // somebody is in the slot
	moved               // the slot's segment is being replaced: look in the next one. Never cleared
	touched             // taken from or refused since the last report
	hot                 // on the list of what goes out at once
	flags   = locked | moved | touched | hot
)

// shareFlag in slot.lim says that the rest is the number of a share; otherwise it is a generation and an index.
const (
	shareFlag  = 1 << 31
	genShift   = 19
	genMask    = 1<<12 - 1
	entryLimit = 1 << genShift
)

// slot is one bucket. fp is written last when a key enters, and never again, nor is ref; word is atomic; everything else belongs
// to whoever has set locked in word.
type slot struct {
	fp       atomic.Uint64 // 0 in a free slot
	word     atomic.Uint32
	lim      uint32 // the limit that tokens and rem are counted in
	ref      uint32 // of the key in the slab
	reported uint32 // when last, in milliseconds (modulo 2^32); later for a key that was idle: see wake
	tokens   uint32
	min      uint32 // fewest tokens since the last report
	rem      uint64
	at       int64
	cum      uint64 // tokens taken in this incarnation
	taken    int32  // of them, not reported yet; below 0 when a report came between a take and its return
	refused  uint32 // tokens asked for and refused, not reported yet; stays at its maximum
}

func (s *slot) state() bucket.State {
	return bucket.State{Tokens: int64(s.tokens), Rem: s.rem, At: s.at}
}

func (s *slot) set(b bucket.State) { s.tokens, s.rem, s.at = uint32(b.Tokens), b.Rem, b.At }

// wakeful is as much of the time before a bucket was touched as counts for the rate of its use: a key that was idle for long and
// is pressed now must not look as if it had been pressed all the while a little.
const wakeful = 30 // ms

// wake notes the first use since the last report.
func (s *slot) wake(now int64) {
	if ms := uint32(now / 1e6); ms-s.reported > wakeful {
		s.reported = ms - wakeful
	}
}

// lock sets the lock bit and returns the word as it was, or false if the slot has moved.
func (s *slot) lock() (uint32, bool) {
	w := s.word.Load()
	if w&(locked|moved) == 0 && s.word.CompareAndSwap(w, w|locked) {
		return w, true
	}
	return s.wait()
}

func (s *slot) wait() (uint32, bool) {
	for spin := 1; ; spin++ {
		w := s.word.Load()
		if w&moved != 0 {
			return w, false
		}
		if w&locked == 0 && s.word.CompareAndSwap(w, w|locked) {
			return w, true
		}
		if spin%64 == 0 { // its holder was most likely descheduled
			runtime.Gosched()
		}
	}
}

// unlock ends what lock began. w is the word that lock returned, with flags set or cleared.
func (s *slot) unlock(w uint32) { release(&s.word, w) }

type segment struct {
	first *slot          // slots, for find: one cache line of this struct and no bounds to check
	tag   *atomic.Uint64 // tags
	size  uint64         // number of slots, a multiple of groupLen

	slots []slot
	tags  []atomic.Uint64
	hot   []atomic.Uint64 // one bit per slot
	n     int             // slots in use; guarded by shard.mu
	slab  []byte          // per key: incarnation, rule, length, text; guarded by shard.mu
}

func newSegment(live, slab int) *segment {
	groups := max(1, (live*9/8+groupMax)/groupMax)
	g := &segment{
		tags:  make([]atomic.Uint64, groups),
		slots: make([]slot, groups*groupLen),
		hot:   make([]atomic.Uint64, (groups*groupLen+63)/64),
		size:  uint64(groups * groupLen),
		slab:  make([]byte, 1, slab+slab/8+64), // no key is at 0
	}
	g.first, g.tag = &g.slots[0], &g.tags[0]
	return g
}

// full says whether the next key needs a rebuild first. shard.mu is held.
func (g *segment) full() bool {
	return g.n >= len(g.tags)*groupMax || len(g.slab) > math.MaxUint32-1024
}

// at returns slot n, which must be below size.
func (g *segment) at(n uint64) *slot {
	return (*slot)(unsafe.Add(unsafe.Pointer(g.first), n*uint64(unsafe.Sizeof(slot{}))))
}

func (g *segment) tagsAt(group uint64) uint64 {
	return (*atomic.Uint64)(unsafe.Add(unsafe.Pointer(g.tag), group*8)).Load()
}

// home returns the slot that h points to: its top bits, scaled, so that a segment may have any size.
func (g *segment) home(h uint64) uint64 {
	n, _ := bits.Mul64(h, g.size)
	return n
}

func tagOf(h uint64) uint64 { return h>>shardBits&0x7f | tagBit }

// find returns the slot of a key and its number, or nil.
func (g *segment) find(h uint64, h2 uint32) (*slot, uint64) {
	n := g.home(h)
	s := g.at(n)
	i := n / groupLen
	w := g.tagsAt(i) // before we know whether it is needed: both lines are fetched at once
	if s.fp.Load() == h && (s.word.Load()^h2)&^flags == 0 {
		return s, n
	}
	tag := tagOf(h) * tagLow
	for {
		x := w ^ tag
		for m := (x - tagLow) &^ x & tagHigh; m != 0; m &= m - 1 {
			n := i*groupLen + uint64(bits.TrailingZeros64(m)>>3)
			s := g.at(n)
			if s.fp.Load() == h && (s.word.Load()^h2)&^flags == 0 {
				return s, n
			}
		}
		if w&tagHigh != tagHigh {
			return nil, 0
		}
		if i++; i*groupLen == g.size {
			i = 0
		}
		w = g.tagsAt(i)
	}
}

// claim returns the number of a free slot for h, for publish after it is filled. There must be one; shard.mu is held.
func (g *segment) claim(h uint64) int {
	n := int(g.home(h))
	if g.slots[n].ref == 0 {
		return n
	}
	for i := n / groupLen; ; {
		if free := ^g.tags[i].Load() & tagHigh; free != 0 {
			return i*groupLen + bits.TrailingZeros64(free)>>3
		}
		if i++; i == len(g.tags) {
			i = 0
		}
	}
}

// publish lets find see slot n. shard.mu is held.
func (g *segment) publish(n int, h uint64) {
	g.slots[n].fp.Store(h)
	t := &g.tags[n/groupLen]
	t.Store(t.Load() | tagOf(h)<<(n%groupLen*8))
	g.n++
}

// key reads what the slab says at ref. shard.mu is held.
func (g *segment) key(ref uint32) (incarnation uint32, rule int, text []byte) {
	b := g.slab[ref:]
	inc, n := binary.Uvarint(b)
	b = b[n:]
	r, n := binary.Uvarint(b)
	b = b[n:]
	size, n := binary.Uvarint(b)
	return uint32(inc), int(r), b[n : n+int(size)]
}

// enter appends to the slab what key will read. shard.mu is held, and the slab has room (rebuild saw to that) or grows.
func (g *segment) enter(incarnation uint32, rule int, text []byte) uint32 {
	if need := len(g.slab) + len(text) + 3*binary.MaxVarintLen32; need > cap(g.slab) {
		g.slab = append(make([]byte, 0, need+need/8), g.slab...) // append would double it
	}
	ref := len(g.slab)
	g.slab = binary.AppendUvarint(g.slab, uint64(incarnation))
	g.slab = binary.AppendUvarint(g.slab, uint64(rule))
	g.slab = binary.AppendUvarint(g.slab, uint64(len(text)))
	g.slab = append(g.slab, text...)
	return uint32(ref)
}

// share is what the centre gave one key. It is guarded by the lock of the slot that refers to it.
type share struct {
	version  uint64
	given    bucket.Limit
	now      bucket.Limit // the limit in force, which the tokens are counted in
	entry    *entry       // the stated limit
	gen, idx uint32       // of entry
	granted  uint64       // sum of the grants taken
	dropped  bool         // given was cut from another limit than entry's
	isolated bool         // now is the share of the last known fleet because the centre is silent
}

const sharesPerChunk = 64

type shard struct {
	seg    atomic.Pointer[segment]
	shares atomic.Pointer[[]*[sharesPerChunk]share] // grows under mu; a chunk never moves
	hot    atomic.Bool                              // some bit of seg.hot is set
	_      [40]byte                                 // what follows changes

	mu          sync.Mutex
	free        []uint32 // shares that no slot refers to
	usedShares  uint32
	incarnation uint32 // of the keys entered now: counts the rebuilds that evicted
	quiet       int64  // no rebuild to shrink before this instant
	_           [16]byte
}

var _ [128]byte = [unsafe.Sizeof(shard{})]byte{} // two cache lines
var _ [64]byte = [unsafe.Sizeof(slot{})]byte{}

func (sh *shard) share(lim uint32) *share {
	n := lim &^ shareFlag
	return &(*sh.shares.Load())[n/sharesPerChunk][n%sharesPerChunk]
}

// newShare returns the slot.lim of an unused share. sh.mu is held.
func (sh *shard) newShare() uint32 {
	if k := len(sh.free); k > 0 {
		lim := sh.free[k-1]
		sh.free = sh.free[:k-1]
		return lim
	}
	n := sh.usedShares
	sh.usedShares++
	if n%sharesPerChunk == 0 {
		var chunks []*[sharesPerChunk]share
		if p := sh.shares.Load(); p != nil {
			chunks = *p
		}
		chunks = append(chunks[:len(chunks):len(chunks)], new([sharesPerChunk]share))
		sh.shares.Store(&chunks)
	}
	return n | shareFlag
}

// heat puts slot n on the list of what goes out at once.
func (sh *shard) heat(g *segment, n uint64) {
	g.hot[n/64].Or(1 << (n % 64))
	if !sh.hot.Load() {
		sh.hot.Store(true)
	}
}

// copies holds the slots of one segment while it is rebuilt.
var copies = sync.Pool{New: func() any { return new([]moving) }}

type moving struct {
	slot // ref is that of the old slab
	at   int
}

// copyTo copies everything but ref, word and fp. Both slots are locked or unpublished.
func (s *slot) copyTo(t *slot) {
	t.lim, t.reported, t.tokens, t.min = s.lim, s.reported, s.tokens, s.min
	t.rem, t.at, t.cum, t.taken, t.refused = s.rem, s.at, s.cum, s.taken, s.refused
}

// rebuild replaces the segment by one with room for more. Buckets that are full and reported are left out: they are the same
// as no bucket. Requests for a slot that has moved wait on sh.mu, which is held; others go on.
func (e *Enforcer) rebuild(sh *shard, now int64) (evicted int) {
	old := sh.seg.Load()
	buf := copies.Get().(*[]moving)
	keep := slices.Grow((*buf)[:0], old.n)[:old.n]
	live, slab := 0, 0
	for n := range old.slots {
		s := &old.slots[n]
		if s.ref == 0 {
			continue // no key is at 0: the slot is free
		}
		w, _ := s.lock()
		_, id, text := old.key(s.ref)
		if e.idle(sh, s, w, id, text, now) {
			if s.lim&shareFlag != 0 {
				sh.free = append(sh.free, s.lim)
			}
			evicted++
		} else {
			k := &keep[live]
			live++
			s.copyTo(&k.slot)
			k.ref = s.ref
			k.fp.Store(s.fp.Load())
			k.word.Store(w)
			slab += len(text) + 3
		}
		s.unlock(w | moved)
	}
	g := newSegment(live+1, slab)
	enter := func(k *moving, n int) {
		s := &g.slots[n]
		k.copyTo(s)
		inc, id, text := old.key(k.ref)
		s.ref = g.enter(inc, id, text)
		s.word.Store(k.word.Load())
		if k.word.Load()&hot != 0 {
			sh.heat(g, uint64(n))
		}
		g.publish(n, k.fp.Load())
	}
	for i := range keep[:live] { // first those that find their own slot free, so that as many as can be are in it
		k := &keep[i]
		if k.at = int(g.home(k.fp.Load())); g.slots[k.at].ref == 0 {
			enter(k, k.at)
			k.at = -1
		}
	}
	for i := range keep[:live] {
		if k := &keep[i]; k.at >= 0 {
			enter(k, g.claim(k.fp.Load()))
		}
	}
	*buf = keep
	copies.Put(buf)
	if evicted > 0 {
		sh.incarnation++
	}
	sh.seg.Store(g)
	return evicted
}

// idle says whether a locked slot may be left out: nothing to report, and full. A bucket of a rule that is gone needs no tokens.
func (e *Enforcer) idle(sh *shard, s *slot, w uint32, id int, text []byte, now int64) bool {
	if w&(touched|hot) != 0 || s.taken != 0 || s.refused != 0 {
		return false
	}
	v := e.view.Load()
	r := v.byID[id]
	if r == nil {
		return true
	}
	var tenant string
	if !v.current(s.lim) {
		var known bool
		if tenant, known = r.tenant(text); !known {
			return false // its next request tells whose it is
		}
	}
	lim, _ := e.limit(v, sh, s, r, tenant, now)
	return lim.Unlimited || s.state().Level(*lim, now).Tokens >= lim.Burst
}

// enter returns the segment, slot and number for a key that find did not see, entering a full bucket if there is none.
func (e *Enforcer) enter(sh *shard, v *view, r *rule, h uint64, h2 uint32, tenant string, text []byte, now int64) (*segment, *slot, uint64) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return e.enterLocked(sh, v, r, h, h2, tenant, text, now)
}

func (e *Enforcer) enterLocked(sh *shard, v *view, r *rule, h uint64, h2 uint32, tenant string, text []byte, now int64) (*segment, *slot, uint64) {
	g := sh.seg.Load()
	if s, n := g.find(h, h2); s != nil {
		return g, s, n
	}
	if g.full() {
		e.rebuild(sh, now)
		g = sh.seg.Load()
	}
	n := g.claim(h)
	s := &g.slots[n]
	idx := v.entryFor(r, tenant)
	s.lim = v.gen<<genShift | idx
	s.ref = g.enter(sh.incarnation, r.id, text)
	s.reported = uint32(now / 1e6)
	s.set(bucket.Full(v.entry(idx).limit, now))
	s.min = s.tokens
	s.word.Store(h2)
	g.publish(n, h)
	return g, s, uint64(n)
}

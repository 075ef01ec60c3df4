package enforcer

import (
	"encoding/binary"
	"math"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/weirhq/weir/enforcer/bucket"
)

// The table holds the bucket of every live key. It is cut into shards by hash. A shard's segment is one array of slots, one
// cache line each and free of pointers, so that a million of them cost the collector nothing. A key's hash points to a group of
// sixteen slots; one byte of tag per slot, eight to a word, tells which line is worth looking at (the layout is that of Abseil's
// Swiss tables). Nineteen keys in twenty are found at the first look, with no branch that goes one way or the other by chance: a
// processor that guesses wrong there cannot begin the next request's miss before this one's is over. A slab holds the keys' text,
// which only reports read. A key is recognised by 92 bits of hash under seeds that no caller knows.
//
// A decision takes no lock but the bit in its own slot, held for the arithmetic. New keys are entered under the shard's mutex.
// The one operation that grows, evicts and compacts is rebuild: it moves a segment of a few thousand slots to a new one.

const (
	shardBits = 8
	shardN    = 1 << shardBits
	wordLen   = 8  // slots per word of tags
	groupLen  = 16 // two words
	groupMax  = 14 // a segment is rebuilt when it holds this many per group, on average
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
	taken    int32  // of them, not reported yet; below 0 when more were given back than taken since a report told of them
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

// wait is lock for a slot that somebody else is in. It leaves the line to them for longer and longer: they do many operations on
// a line that stays theirs while we wait, and few when both pull at it.
func (s *slot) wait() (uint32, bool) {
	for pause := uint32(pauseMin); ; pause = min(pause*2, pauseMax) {
		procyield(pause)
		w := s.word.Load()
		if w&moved != 0 {
			return w, false
		}
		if w&locked == 0 && s.word.CompareAndSwap(w, w|locked) {
			return w, true
		}
		if pause == pauseMax { // its holder was most likely descheduled
			runtime.Gosched()
		}
	}
}

// unlock ends what lock began. w is the word that lock returned, with flags set or cleared.
func (s *slot) unlock(w uint32) { release(&s.word, w) }

const pauseMin, pauseMax = 16, 256 // PAUSE instructions

type segment struct {
	first  *slot          // slots, for find: one cache line of this struct and no bounds to check
	tag    *atomic.Uint64 // tags
	groups uint64

	slots []slot
	tags  []atomic.Uint64 // two words per group
	hot   []atomic.Uint64 // one bit per slot
	n     int             // slots in use; guarded by shard.mu
	slab  []byte          // per key: incarnation, rule, length, text; guarded by shard.mu
}

// newSegment returns one with room for live keys and an eighth more. Its slab is the caller's.
func newSegment(live int) *segment {
	groups := max(1, (live*9/8+groupMax-1)/groupMax)
	g := &segment{
		tags:   make([]atomic.Uint64, groups*groupLen/wordLen),
		slots:  make([]slot, groups*groupLen),
		hot:    make([]atomic.Uint64, (groups*groupLen+63)/64),
		groups: uint64(groups),
	}
	g.first, g.tag = &g.slots[0], &g.tags[0]
	return g
}

// full says whether the next key needs a rebuild first. shard.mu is held.
func (g *segment) full() bool {
	return g.n >= int(g.groups)*groupMax || len(g.slab) > math.MaxUint32-1024
}

// at returns slot n, which must be below the number of slots.
func (g *segment) at(n uint64) *slot {
	return (*slot)(unsafe.Add(unsafe.Pointer(g.first), n*uint64(unsafe.Sizeof(slot{}))))
}

// tagsAt returns a group's tags.
func (g *segment) tagsAt(group uint64) (low, high uint64) {
	p := (*[2]atomic.Uint64)(unsafe.Add(unsafe.Pointer(g.tag), group*groupLen))
	return p[0].Load(), p[1].Load()
}

// home returns the group that h points to: its top bits, scaled, so that a segment may have any size.
func (g *segment) home(h uint64) uint64 {
	n, _ := bits.Mul64(h, g.groups)
	return n
}

// tagOf is not 0, which is the tag of an empty slot.
func tagOf(h uint64) uint64 { return max(1, h>>shardBits&0xff) }

// zeros marks the bytes of x that are 0, in their high bits. Bytes above the lowest of them may be marked without cause.
func zeros(x uint64) uint64 { return (x - tagLow) &^ x & tagHigh }

// find returns the slot of a key, or nil.
func (g *segment) find(h uint64, h2 uint32) *slot {
	tag := tagOf(h) * tagLow
	for i := g.home(h); ; {
		low, high := g.tagsAt(i)
		for n, w := i*groupLen, low; ; n, w = n+wordLen, high {
			for m := zeros(w ^ tag); m != 0; m &= m - 1 {
				s := g.at(n + uint64(bits.TrailingZeros64(m)>>3))
				if s.fp.Load() == h && (s.word.Load()^h2)&^flags == 0 {
					return s
				}
			}
			if n%groupLen != 0 {
				break
			}
		}
		if zeros(high) != 0 {
			return nil
		}
		if i++; i == g.groups {
			i = 0
		}
	}
}

// claim returns the number of a free slot for h, for publish after it is filled. There must be one; shard.mu is held.
func (g *segment) claim(h uint64) int {
	for i := int(g.home(h)) * groupLen; ; {
		if free := zeros(g.tags[i/wordLen].Load()); free != 0 {
			return i + bits.TrailingZeros64(free)>>3
		}
		if i += wordLen; i == len(g.slots) {
			i = 0
		}
	}
}

// publish lets find see slot n. shard.mu is held.
func (g *segment) publish(n int, h uint64) {
	g.slots[n].fp.Store(h)
	t := &g.tags[n/wordLen]
	t.Store(t.Load() | tagOf(h)<<(n%wordLen*8))
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

// awaitRebuild returns when the rebuild that closed a slot is done, and its successor is there to be found.
func (sh *shard) awaitRebuild() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
}

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

// heat puts a slot on the list of what goes out at once. It is locked, so that the segment is still its own.
func (sh *shard) heat(s *slot) { sh.heatIn(sh.seg.Load(), s) }

func (sh *shard) heatIn(g *segment, s *slot) {
	n := (uintptr(unsafe.Pointer(s)) - uintptr(unsafe.Pointer(g.first))) / unsafe.Sizeof(slot{})
	g.hot[n/64].Or(1 << (n % 64))
	if !sh.hot.Load() {
		sh.hot.Store(true)
	}
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
	left := 0 // bytes of text whose keys are left out
	for n := range old.slots {
		s := &old.slots[n]
		if s.ref == 0 {
			continue // no key is at 0: the slot is free
		}
		w, _ := s.lock()
		if w&(touched|hot) == 0 {
			if _, id, text := old.key(s.ref); e.idle(sh, s, id, text, now) {
				if s.lim&shareFlag != 0 {
					sh.free = append(sh.free, s.lim)
				}
				evicted++
				left += len(text) + 3
				s.ref = 0
			}
		}
		s.unlock(w | moved) // nobody writes to it any more
	}
	g := newSegment(old.n - evicted + 1)
	g.slab = old.slab
	compact := left > len(old.slab)/8 || len(old.slab) > math.MaxUint32/2
	if compact {
		g.slab = make([]byte, 1, (len(old.slab)-left)*9/8+64)
	}
	enter := func(s *slot, n int) {
		t := &g.slots[n]
		s.copyTo(t)
		if t.ref = s.ref; compact {
			inc, id, text := old.key(s.ref)
			t.ref = g.enter(inc, id, text)
		}
		w := s.word.Load() &^ moved
		t.word.Store(w)
		if w&hot != 0 {
			sh.heatIn(g, t)
		}
		g.publish(n, s.fp.Load())
	}
	var crowd []int // their group is full: they come after all that find room in theirs
	for n := range old.slots {
		if s := &old.slots[n]; s.ref != 0 {
			h := s.fp.Load()
			if at := g.claim(h); uint64(at/groupLen) == g.home(h) {
				enter(s, at)
			} else {
				crowd = append(crowd, n)
			}
		}
	}
	for _, n := range crowd {
		enter(&old.slots[n], g.claim(old.slots[n].fp.Load()))
	}
	if evicted > 0 {
		sh.incarnation++
	}
	sh.seg.Store(g)
	return evicted
}

// settling is how long after a take its tokens may still be given back: the centre may be asked for them in between.
const settling = time.Second

// idle says whether a locked slot that was not touched may be left out: nothing to report or to give back, and full. A bucket of a rule that is gone needs no tokens.
func (e *Enforcer) idle(sh *shard, s *slot, id int, text []byte, now int64) bool {
	if s.taken > 0 || s.refused != 0 || now-s.at < int64(settling) {
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

// enter returns the slot of a key that find did not see, entering a full bucket if there is none.
func (e *Enforcer) enter(sh *shard, v *view, r *rule, h uint64, h2 uint32, tenant string, text []byte, now int64) *slot {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return e.enterLocked(sh, v, r, h, h2, tenant, text, now)
}

func (e *Enforcer) enterLocked(sh *shard, v *view, r *rule, h uint64, h2 uint32, tenant string, text []byte, now int64) *slot {
	g := sh.seg.Load()
	if s := g.find(h, h2); s != nil {
		return s
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
	return s
}

package ingest

import (
	"hash/maphash"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirhq/weir/schemas"
)

// usageKey is what requests are counted by.
type usageKey struct{ tenant, route, rule, layer string }

// cell is what was counted under one key since the last drain.
type cell struct {
	key   usageKey
	n     uint64
	cost  uint64
	first int64 // ns since 1970
}

// page is a shard's cells. Two of them take turns, so that a drain holds the lock only to exchange them.
type page struct {
	index map[uint64]int32 // by hash; a hash that another key has is counted up until it is free
	cells []cell
	n     uint64
}

const shards = 64 // a power of two

// counts counts requests. A key has a home shard; a goroutine that finds it taken goes on to a neighbour, so that a
// single hot key is spread as far as there are cores that want it, and a cold one lies in one place.
type counts struct {
	seed   maphash.Seed
	shards [shards]struct {
		mu    sync.Mutex // both pages
		page  *page
		spare *page
		_     [128 - 24]byte // one shard, one pair of cache lines
	}
}

func (c *counts) init() {
	c.seed = maphash.MakeSeed()
	for i := range c.shards {
		c.shards[i].page = &page{index: map[uint64]int32{}}
		c.shards[i].spare = &page{index: map[uint64]int32{}}
	}
}

func (c *counts) add(now time.Time, k usageKey, cost int64) {
	home := maphash.String(c.seed, k.tenant)
	h := home ^ bits.RotateLeft64(maphash.String(c.seed, k.route), 21) ^ bits.RotateLeft64(maphash.String(c.seed, k.rule), 42)
	s := &c.shards[home%shards]
	for i := uint64(1); !s.mu.TryLock(); i++ {
		if i == 8 { // many cores on few shards: wait at home
			s = &c.shards[home%shards]
			s.mu.Lock()
			break
		}
		s = &c.shards[(home+i)%shards]
	}
	p := s.page
	i, ok := p.index[h]
	for ok && p.cells[i].key != k {
		h++
		i, ok = p.index[h]
	}
	if !ok {
		i = int32(len(p.cells))
		p.index[h] = i
		p.cells = append(p.cells, cell{key: k, first: now.UnixNano()})
	}
	p.cells[i].n++
	p.cells[i].cost += uint64(min(max(cost, 0), schemas.MaxCount))
	p.n++
	s.mu.Unlock()
}

// drain hands over all cells and empties them. One goroutine at a time may call it.
func (c *counts) drain(take func(*cell)) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		if s.page.n == 0 {
			s.mu.Unlock()
			continue
		}
		p := s.page
		s.page, s.spare = s.spare, nil
		s.mu.Unlock()
		for i := range p.cells {
			take(&p.cells[i])
		}
		if len(p.cells)*8 < cap(p.cells) && cap(p.cells) > 64 { // a peak has passed: let go of its memory
			p.index, p.cells = map[uint64]int32{}, nil
		}
		clear(p.index)
		clear(p.cells) // the strings
		p.cells, p.n = p.cells[:0], 0
		s.mu.Lock()
		s.spare = p
		s.mu.Unlock()
	}
}

// len is the number of requests counted since the last drain.
func (c *counts) len() uint64 {
	var n uint64
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		n += s.page.n
		s.mu.Unlock()
	}
	return n
}

// samples keeps the first max rejections after a drain.
type samples struct {
	max int64
	n   atomic.Int64 // read first, so that a flood of refusals shares only a read of it
	mu  sync.Mutex   // kept
	all []schemas.Rejection
}

func (s *samples) add(j schemas.Rejection) bool {
	if s.n.Load() >= s.max || s.n.Add(1) > s.max {
		return false
	}
	s.mu.Lock()
	s.all = append(s.all, j)
	s.mu.Unlock()
	return true
}

func (s *samples) drain() []schemas.Rejection {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.all
	s.all = nil
	s.n.Store(0)
	return all
}

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

// cell is what was counted under one key, in one hour, in one generation.
type cell struct {
	key  usageKey
	hour int64 // since 1970
	at   *Cell
}

// page is a shard's cells of one generation. Two of them take turns, so that a drain holds the lock only to exchange them.
type page struct {
	index map[uint64]int32 // by hash; a hash that another key has is counted up until it is free
	cells []cell
}

const shards = 64 // a power of two

// counts counts requests. A key has a home shard; a goroutine that finds it taken goes on to a neighbour, so that a
// single hot key is spread as far as there are cores that want it, and a cold one lies in one place. The number itself
// lies in the spool.
type counts struct {
	seed   maphash.Seed
	spool  Spool
	shards [shards]struct {
		mu         sync.Mutex // the fields below
		page       *page
		spare      *page
		generation uint32 // of page
		total      uint64 // requests, ever
		_          [128 - 40]byte
	}
}

func (c *counts) init(spool Spool) {
	c.seed, c.spool = maphash.MakeSeed(), spool
	for i := range c.shards {
		s := &c.shards[i]
		s.page, s.spare, s.generation = &page{index: map[uint64]int32{}}, &page{index: map[uint64]int32{}}, 1
	}
}

func (c *counts) add(now time.Time, k usageKey, cost int64) {
	ns := now.UnixNano()
	hour := hourAt(ns)
	home := maphash.String(c.seed, k.tenant)
	h := home ^ bits.RotateLeft64(maphash.String(c.seed, k.route), 21) ^ bits.RotateLeft64(maphash.String(c.seed, k.rule), 42) + uint64(hour)
	at := home % shards
	s := &c.shards[at]
	for i := uint64(1); !s.mu.TryLock(); i++ {
		if i == 8 { // many cores on few shards: wait at home
			at = home % shards
			s = &c.shards[at]
			s.mu.Lock()
			break
		}
		at = (home + i) % shards
		s = &c.shards[at]
	}
	p := s.page
	i, ok := p.index[h]
	for ok && (p.cells[i].key != k || p.cells[i].hour != hour) {
		h++
		i, ok = p.index[h]
	}
	if !ok {
		i = int32(len(p.cells))
		p.index[h] = i
		p.cells = append(p.cells, cell{k, hour, c.spool.Cell(int(at), s.generation, ns, text(k.tenant), text(k.route), text(k.rule), text(k.layer))})
	}
	p.cells[i].at.Add(uint64(min(max(cost, 0), schemas.MaxReportCost)))
	s.total++
	s.mu.Unlock()
}

// drain hands over all cells, and begins generation next. It returns the number of requests ever counted up to here.
// One goroutine at a time may call it.
func (c *counts) drain(next uint32, take func(*cell)) (total uint64) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		s.generation = next
		total += s.total
		if len(s.page.cells) == 0 {
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
		p.cells = p.cells[:0]
		s.mu.Lock()
		s.spare = p
		s.mu.Unlock()
	}
	return total
}

// total is the number of requests ever counted, and cells the number of counts that wait for a drain.
func (c *counts) total() (total uint64, cells int) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		total += s.total
		cells += len(s.page.cells)
		s.mu.Unlock()
	}
	return total, cells
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

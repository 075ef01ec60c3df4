package ingest

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirhq/weir/schemas"
)

// Spool keeps a gateway's counts until they are sealed, and its sealed reports until they are stored for good. Cell may
// be called by many goroutines, one at a time for each lane; Append, Commit, Recover and Full by one; Next, Sent, Skip, Stored
// and Unconfirmed by one other; the rest by any.
type Spool interface {
	// Cell returns a count of nothing in a generation, in memory that lives as long as the spool promises. first is the
	// time of the first request, in nanoseconds since 1970.
	Cell(lane int, generation uint32, first int64, tenant, route, rule, layer string) *Cell
	// Seq is the sequence number of the last report of this boot.
	Seq() uint64
	// Recover keeps what earlier lives have left and could not be kept before, and returns how many reports that makes. It is
	// called now and then, between groups.
	Recover() (reports int)
	// Full says that no new group should begin.
	Full() bool
	// Append adds a report to a group, and Commit ends it: from then on all its reports are kept and all cells up to
	// generation are forgotten, in one step. After an error of either, nothing of the group is kept, and no cell is
	// forgotten, and the spool has told of it. Generation 0 forgets none, and the group need not survive a power cut.
	Append(r *schemas.Report) error
	Commit(generation uint32) error

	// Next returns the report to send now, or nil. again says that it was in the stream before, or may have been, and
	// must be sent nevertheless.
	Next() (r *schemas.Report, again bool)
	// Sent says that the report that Next returned is in the stream, at a position not above at; first, that it is so for
	// the first time. Skip puts it behind all others.
	Sent(at uint64) (first bool)
	Skip()
	// Own is the number of reports of this boot that are not in the stream. They go before those of earlier ones, of which there may be
	// many: the centre waits for what is so now.
	Own() int
	// Stored removes what is stored for good. A report that is not, though the history has passed its place in the
	// stream, or the stream has lost something since the last call, is to be sent again; again is the number of those.
	Stored(f schemas.Floor, s *schemas.Stored) (again int)
	// Unconfirmed is the number of reports that are in the stream and not known to be stored for good.
	Unconfirmed() int

	// InMemory is the number of requests that are gone with the process. Nobody may be counting.
	InMemory() (requests uint64)

	Filled() <-chan struct{}             // signalled after a Commit
	Len() (reports int, requests uint64) // that are not in the stream yet
}

// Cell is the count of one key. One goroutine at a time adds to it.
//
// It may lie in memory that outlives the process, which may end between any two instructions: a request is in n and in
// its cost or in neither. So a cost is written beside the one that holds, and n, whose parity says which one that is,
// last.
type Cell struct {
	n     uint64 // requests; atomic, for the order of the writes
	cost  [2]uint64
	first int64 // ns since 1970, of the first request
}

// Begin makes c a count of nothing.
func (c *Cell) Begin(first int64) {
	atomic.StoreUint64(&c.n, 0)
	c.cost[0], c.first = 0, first
}

// Add counts a request. Costs stop at the largest number, and do not begin again from 0.
func (c *Cell) Add(cost uint64) {
	n := c.n
	was := c.cost[n&1]
	c.cost[(n+1)&1] = was + min(cost, math.MaxUint64-was)
	atomic.StoreUint64(&c.n, n+1)
}

// Read returns the number of requests, their cost and the time of the first.
func (c *Cell) Read() (n, cost uint64, first int64) { return c.n, c.cost[c.n&1], c.first }

// Found gathers the counts that a spool finds when it is opened. The zero Found is ready.
type Found struct{ p pending }

// Add adds a count, which may be overwritten afterwards.
func (f *Found) Add(c *Cell, tenant, route, rule, layer string) {
	if f.p.usageAt == nil {
		f.p = newPending()
	}
	f.p.addUsage(&cell{key: usageKey{tenant, route, rule, layer}, at: c})
}

// Reports seals what was added, as the reports of boot that follow seq. They have no policy version, which tells that a process was killed.
func (f *Found) Reports(gateway, boot string, seq uint64) (all []*schemas.Report) {
	cfg, now := Config{}.withDefaults(), time.Now().UTC()
	for r, at := f.p.cut(cut{}, cfg.MaxEntries, cfg.MaxBytes); r != nil; r, at = f.p.cut(at, cfg.MaxEntries, cfg.MaxBytes) {
		seq++
		r.Gateway, r.Boot, r.Seq, r.SealedAt = gateway, boot, seq, now
		all = append(all, r)
	}
	return all
}

// memory is a spool that does not outlive the process. What is in the stream counts as stored.
type memory struct {
	max    int
	filled chan struct{}

	group []*schemas.Report // begun

	mu       sync.Mutex // the fields below
	reports  []kept
	requests uint64
}

type kept struct {
	*schemas.Report
	again bool
}

func newMemory(max int) *memory { return &memory{max: max, filled: make(chan struct{}, 1)} }

func (s *memory) Cell(_ int, _ uint32, first int64, _, _, _, _ string) *Cell {
	return &Cell{first: first}
}

func (s *memory) Seq() uint64 { return 0 }

func (s *memory) Recover() int { return 0 }

func (s *memory) Full() bool {
	n, _ := s.Len()
	return n >= s.max
}

func (s *memory) Append(r *schemas.Report) error {
	s.group = append(s.group, r)
	return nil
}

func (s *memory) Commit(uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.group {
		s.reports = append(s.reports, kept{Report: r})
		s.requests += r.Requests()
	}
	s.group = nil
	select {
	case s.filled <- struct{}{}:
	default:
	}
	return nil
}

func (s *memory) Next() (*schemas.Report, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.reports) == 0 {
		return nil, false
	}
	return s.reports[0].Report, s.reports[0].again
}

func (s *memory) Sent(uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests -= s.reports[0].Requests()
	s.reports[0].Report = nil
	s.reports = s.reports[1:]
	return true
}

func (s *memory) Skip() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reports = append(s.reports[1:], kept{s.reports[0].Report, true})
}

func (s *memory) Own() int { n, _ := s.Len(); return n }

func (s *memory) Stored(schemas.Floor, *schemas.Stored) int { return 0 }

func (s *memory) Unconfirmed() int { return 0 }

func (s *memory) InMemory() uint64 { _, n := s.Len(); return n }

func (s *memory) Filled() <-chan struct{} { return s.filled }

func (s *memory) Len() (int, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.reports), s.requests
}

// Stream is a Publisher whose far side says what it has stored for good.
type Stream interface {
	Publisher
	// Put is Publish, and returns a position in the stream that r's is not above. With again, r is stored even if it
	// is known to have been stored before: the stream may have lost it since.
	Put(ctx context.Context, r *schemas.Report, again bool) (at uint64, err error)
	// Stored returns what the history has of this gateway, which is nothing while there is no history.
	Stored(ctx context.Context) (schemas.Floor, *schemas.Stored, error)
}

// ErrTooLarge is in the chain of the error for a report that is larger than the stream takes.
var ErrTooLarge = errors.New("report is larger than the server's max_payload")

// direct is a Stream without a history.
type direct struct{ Publisher }

func (d direct) Put(ctx context.Context, r *schemas.Report, _ bool) (uint64, error) {
	return 0, d.Publish(ctx, r)
}

func (direct) Stored(context.Context) (schemas.Floor, *schemas.Stored, error) {
	return schemas.Floor{}, &schemas.Stored{}, nil
}

// confirmEvery is how often the history is asked while reports wait for its word.
const confirmEvery = time.Second

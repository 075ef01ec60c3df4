// Package spool keeps a gateway's counts and sealed reports on disk until the history has stored them.
package spool

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/schemas"
)

// Config says how much a spool keeps. A zero field means its default.
type Config struct {
	MaxBytes     int64 // of sealed reports; the last group may go over it by its own size (1 GiB)
	MaxLive      int64 // of counts that are not sealed; what is over it does not survive a kill (256 MiB)
	SegmentBytes int64 // a file of reports is closed at this size (8 MiB, or an eighth of MaxBytes)

	sync       func(*os.File) error // makes the content of a file outlive a power cut (fdatasync)
	syncHeader func([]byte) error   // the same for the mapped header of the counts (msync)
}

func (c Config) withDefaults() Config {
	num := func(n *int64, v int64) {
		if *n == 0 {
			*n = v
		}
	}
	num(&c.MaxBytes, 1<<30)
	num(&c.MaxLive, 256<<20)
	num(&c.SegmentBytes, min(8<<20, max(c.MaxBytes/8, 64<<10)))
	if c.sync == nil {
		c.sync = syncData
	}
	if c.syncHeader == nil {
		c.syncHeader = func(mapped []byte) error { return os.NewSyscallError("msync", unix.Msync(mapped, unix.MS_SYNC)) }
	}
	return c
}

// ErrInUse is in the chain of the error when another process has the folder, and ErrNotOurs when it is another gateway's.
var (
	ErrInUse   = errors.New("another process uses it")
	ErrNotOurs = errors.New("it is another gateway's")
)

// Metrics are shared by all spools of a process.
type Metrics struct {
	Degraded  prometheus.Gauge       // raised by one while a spool is full, cannot write, has lost files that it needs, or has some of a newer weir
	Bytes     prometheus.Gauge       // of reports on disk
	Forgotten prometheus.Counter     // reports in the stream that were let go of before the history had them
	Damaged   prometheus.Counter     // records, or runs of bytes, that could not be read
	Recovered prometheus.Counter     // requests that a killed process had counted and not sealed
	Errors    *prometheus.CounterVec // reason: full, no_space, read_only, version, gone, io
}

// NewMetrics registers the metrics with reg. Degraded is private until the wiring puts the shared one there.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Degraded:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_degraded", ConstLabels: prometheus.Labels{"part": "spool"}}),
		Bytes:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_spool_bytes", Help: "Size of the usage reports on disk."}),
		Forgotten: prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_spool_forgotten_total", Help: "Usage reports that the stream had and the history not yet, let go of because the spool was full."}),
		Damaged:   prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_spool_damaged_total", Help: "Records of the spool, or runs of bytes, that could not be read. Their files are kept as damaged-…."}),
		Recovered: prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_spool_recovered_requests_total", Help: "Requests that a killed process had counted and not sealed."}),
		Errors:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_spool_errors_total", Help: "Times that the spool did not take reports, which wait in memory, or that its files were taken away."}, []string{"reason"}),
	}
	for _, r := range []string{"full", "no_space", "read_only", "version", "gone", "io"} {
		m.Errors.WithLabelValues(r)
	}
	reg.MustRegister(m.Bytes, m.Forgotten, m.Damaged, m.Recovered, m.Errors)
	return m
}

func reason(err error) string {
	switch {
	case errors.Is(err, errFull):
		return "full"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "no_space"
	case errors.Is(err, syscall.EROFS), errors.Is(err, os.ErrPermission):
		return "read_only"
	case errors.Is(err, errNewer):
		return "version"
	case errors.Is(err, errGone):
		return "gone"
	}
	return "io"
}

var (
	errFull    = errors.New("it has reached its size")
	errRefuses = errors.New("the disk has just refused a group")
	errGone    = errors.New("they are not in the folder any more")
)

// Spool is an ingest.Spool in a folder. The counts of requests survive the end of the process at any instruction, and
// sealed reports also a power cut; a power cut takes at most the counts since the last seal.
type Spool struct {
	cfg     Config
	dir     string
	gateway string
	boot    string
	log     *slog.Logger
	m       *Metrics
	lock    *os.File
	live    *live
	filled  chan struct{}
	seq     uint64 // of the last report of boot, when it was opened

	// Of the goroutine that seals.
	nextID  uint64
	buf     []byte
	group   []*entry
	groupAt int64             // where the group begins in active
	held    []*schemas.Report // the group, where it need not be on disk
	holding bool              // it need not
	heldTo  bootKnown         // groups that were not
	heldErr error             // the next life may not know
	failed  error             // it cannot be
	gaveUp  int64             // bytes that the last group had which was given up
	late    []*life
	lateAt  time.Time // when to try late again

	reserveAt  time.Time
	reserveErr error

	mu       sync.Mutex // the fields below
	active   *segment   // the one that is written to; nil when the next group begins one
	bytes    int64      // of all segments
	unsent   []*entry   // of this boot
	behind   []*entry   // the same, of boots before it, and what is sent again
	turn     *[]*entry  // the one of them that Next has looked at
	requests uint64     // in both
	waiting  []*entry   // in the stream, and not known to be in the history
	buckets  []*entry   // the same, of buckets alone, which are let go of first
	life     string     // of the stream, as the history knows it
	lost     uint64     // as in the last Floor
	trouble  map[string]bool
	refused  time.Time  // the last group that the disk did not take
	refusal  int64      // bytes of the largest one since trouble began
	gone     []*segment // needed, and not in the folder any more
}

// segment is a file of reports. Its fields belong to Spool.mu.
type segment struct {
	f    *os.File
	seed uint32
	size int64 // up to the last commit
	left int   // reports that are still needed

	damaged bool // it is kept aside when none of them is
}

// entry is one report.
type entry struct {
	seg      *segment // nil when it is in memory only
	at       int64
	size     int
	boot     string
	seq      uint64
	requests uint64

	report *schemas.Report // of a young one
	place  uint64          // not above it in the stream, once sent
	sent   bool            // ever
	again  bool            // it must be sent even if it was
	tries  int             // after it was sent
	next   time.Time       // no sooner again than this
}

// Open opens the spool in dir for a new life of the gateway, named boot, and makes dir if there is none. The folder is that gateway's from
// its first life on, wherever it is moved or copied: under another name, what the history has would count again. What earlier
// lives have left is there to be sent: their reports, and their counts, sealed as further reports of theirs. After a
// power cut, counts are reports of this boot, for what the dead one sent last may not be on disk. m may be nil.
func Open(cfg Config, dir, gateway, boot string, log *slog.Logger, m *Metrics) (*Spool, error) {
	if err := schemas.ValidName(boot); err != nil {
		return nil, fmt.Errorf("open spool %s: boot: %w", dir, err)
	}
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	s := &Spool{cfg: cfg.withDefaults(), dir: dir, gateway: gateway, boot: boot, log: log.With("spool", dir), m: m, filled: make(chan struct{}, 1), trouble: map[string]bool{}}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("open spool %s: %w", dir, errors.Join(err, s.Close()))
	}
	if n := len(s.unsent) + len(s.behind); n > 0 {
		s.log.Info("reports of earlier lives are in the spool", "reports", n, "requests", s.requests, "bytes", s.bytes)
	}
	return s, nil
}

func (s *Spool) open() (err error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	if s.lock, err = lockDir(s.dir, s.gateway); err != nil {
		return err
	}
	known, err := s.readSegments()
	if err != nil {
		return err
	}
	names, err := filepath.Glob(filepath.Join(s.dir, "live-*"))
	if err != nil {
		return err
	}
	for _, name := range names {
		boot, _ := bootOf(name)
		s.late = append(s.late, &life{name, known[boot]})
	}
	s.recover()
	var seed [4]byte
	_, _ = rand.Read(seed[:])
	s.live = &live{dir: s.dir, boot: s.boot, kernel: kernelLife(), seed: binary.LittleEndian.Uint32(seed[:]), most: s.cfg.MaxLive, syncHeader: s.cfg.syncHeader,
		lastSeq: s.seq, taken: map[uint32][][]byte{}, gone: map[uint32][][]byte{}, volatile: map[uint32][]*ingest.Cell{}}
	if s.active != nil { // counts of earlier lives are in it
		s.live.setSegment(s.active.seed, s.active.size)
	}
	s.reserve()
	return nil
}

// lockDir takes the folder for a gateway, and writes down in the lock file whose it is. One that says nothing, of an older weir, is ours.
func lockDir(dir, gateway string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	for try := 0; errors.Is(err, syscall.EWOULDBLOCK) && try < 10; try++ { // perhaps somebody only looks whether it is held: see Abandoned
		time.Sleep(5 * time.Millisecond)
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	whose, process, failed := readLock(f)
	switch {
	case errors.Is(err, syscall.EWOULDBLOCK):
		err = fmt.Errorf("%w (process %s): each gateway needs a folder of its own", ErrInUse, process)
	case err == nil && failed != nil:
		err = failed
	case err == nil && whose != "" && whose != gateway:
		err = fmt.Errorf("%w: usage in it is %s's, and could count twice as %s's: move it back to where a gateway named %s looks, or away if it is a copy, and start again", ErrNotOurs, whose, gateway, whose)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	head := lockHead + gateway + "\n"
	if whose == "" {
		if err := errors.Join(f.Truncate(0), write(f, head, 0), f.Sync()); err != nil {
			return f, nil // a disk that is full: the next life says it
		}
	}
	_ = f.Truncate(int64(len(head)))
	_ = write(f, fmt.Sprintln(os.Getpid()), len(head)) // for the message above only
	return f, nil
}

func write(f *os.File, text string, at int) error {
	_, err := f.WriteAt([]byte(text), int64(at))
	return err
}

const (
	lockName = "lock"
	lockHead = "gateway " // before the name, in the first line; the second one is the process
)

// readLock reads whose a spool is, and which process had it last.
func readLock(f *os.File) (gateway, process string, err error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 256))
	if err != nil {
		return "", "", err
	}
	process = string(b)
	if line, rest, ok := strings.Cut(process, "\n"); ok && strings.HasPrefix(line, lockHead) {
		gateway, process = strings.TrimPrefix(line, lockHead), rest
	}
	return gateway, strings.TrimSpace(process), nil
}

// kernelLife names the time since the machine was started; it is empty when nobody knows.
func kernelLife() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

// Trouble with reports; and with the counts: of this life, what of them was told, of earlier lives, and of what a newer weir has left; and with
// whoever deletes our files.
const (
	noReports = "cannot be written"
	noCounts  = "counts do not survive a kill"
	noHeld    = "what goes to the stream from memory may be told again after a power cut"
	noRoom    = "counts of an earlier life wait until they can be sealed"
	newer     = "a file in it is not for this weir, and stays for the one that wrote it"
	deleted   = "files in use were deleted or moved away, a kill now loses what was in them and is not in the stream"
)

// probe asks the disk to keep so many bytes.
func (s *Spool) probe(size int64) error {
	name := filepath.Join(s.dir, "probe")
	f, err := create(name, func(f *os.File) (err error) {
		for zeros := make([]byte, min(size, 256<<10)); size > 0 && err == nil; size -= int64(len(zeros)) {
			_, err = f.Write(zeros[:min(size, int64(len(zeros)))])
		}
		if err == nil {
			err = s.cfg.sync(f)
		}
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(name))
}

// asked notes whether the disk has taken so many bytes of a group. Trouble ends when it takes as much as it has refused: what is smaller
// may find its room on a disk that is full for the next one.
func (s *Spool) asked(bytes int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		s.refusal = max(s.refusal, bytes)
	case bytes < s.refusal:
		return
	default:
		s.refusal = 0
	}
	s.noteLocked(noReports, err)
}

// Cell is ingest.Spool's. It makes no system call, save where a thousand new keys come at once.
func (s *Spool) Cell(lane int, generation uint32, first int64, tenant, route, rule, layer string) *ingest.Cell {
	return s.live.cell(lane, generation, first, [4]string{tenant, route, rule, layer})
}

// Seq is the sequence number of the last report of this boot.
func (s *Spool) Seq() uint64 { return s.seq }

// keepBuckets is how many reports of buckets alone, without requests, wait for the history: a quarter of an hour of a gateway whose
// buckets are hot all the time, in under 2 MB of memory.
const keepBuckets = 10_000

// Full says that the files have reached their size, or that the disk takes nothing and reports wait that are to go first. Before the
// size is reached, reports that are in the stream are let go of: the history may be away for days, and what they protect from is a
// stream that loses what it has acknowledged. Those of buckets alone go at half the size, the oldest first: the next one of its buckets
// says more.
func (s *Spool) Full() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.bytes >= s.cfg.MaxBytes/2 && len(s.buckets) > 0 {
		s.done(s.popBuckets())
	}
	forgotten := 0
	for ; s.bytes >= s.cfg.MaxBytes && forgotten < len(s.waiting); forgotten++ {
		s.done(s.waiting[forgotten])
	}
	if forgotten > 0 {
		s.waiting = slices.Delete(s.waiting, 0, forgotten)
		s.m.Forgotten.Add(float64(forgotten))
		s.log.Warn("the spool is full: reports that are in the stream are let go of before the history has them", "reports", forgotten)
	}
	if s.bytes >= s.cfg.MaxBytes && s.active != nil && s.active.left == 0 {
		s.roll()
	}
	full := s.bytes >= s.cfg.MaxBytes
	if full {
		s.noteLocked("full, counts merge until there is room", errFull)
	} else {
		s.noteLocked("full, counts merge until there is room", nil)
	}
	return full || s.refuses() && s.waits()
}

// refuses says that the disk did not take the last group, not long ago: it is not asked again. Its caller holds mu.
func (s *Spool) refuses() bool { return s.trouble[noReports] && time.Since(s.refused) < refusedFor }

const refusedFor = 2 * time.Second

// waits says that a report waits for its turn to be sent, other than those that go after all others. Its caller holds mu.
func (s *Spool) waits() bool {
	return slices.ContainsFunc(slices.Concat(s.unsent, s.behind), func(e *entry) bool { return !e.again })
}

// reserve has room made for counts, on a disk that had none now and then only.
func (s *Spool) reserve() {
	if now := time.Now(); s.reserveErr == nil || now.Sub(s.reserveAt) >= refusedFor {
		s.reserveAt, s.reserveErr = now, s.live.reserve()
		s.note(noCounts, s.reserveErr)
	}
}

// Append adds a report to the group. While the disk takes nothing, and nothing waits to be sent, the group is in memory only: what
// the stream takes need not wait for a disk.
func (s *Spool) Append(r *schemas.Report) error {
	if len(s.held) == 0 && len(s.group) == 0 {
		s.mu.Lock()
		if s.holding = s.trouble[noReports] && !s.waits(); s.holding && s.refuses() {
			s.failed = errRefuses
		}
		s.mu.Unlock()
	}
	if s.failed == nil {
		if s.failed = s.append(r); s.failed != nil {
			s.asked(s.gaveUp, s.failed)
		}
	}
	if s.holding {
		s.held = append(s.held, r)
		return nil
	}
	err := s.failed
	s.failed = nil
	return err
}

func (s *Spool) append(r *schemas.Report) (err error) {
	defer func() {
		if err != nil {
			s.giveUp()
		}
	}()
	if err := s.begin(); err != nil {
		return err
	}
	at := s.groupAt
	if n := len(s.group); n > 0 {
		at = s.group[n-1].at + int64(s.group[n-1].size)
	}
	before := len(s.buf)
	if s.buf, err = appendReport(s.buf, s.active.seed, r); err != nil {
		return err
	}
	e := &entry{seg: s.active, at: at, size: len(s.buf) - before, boot: r.Boot, seq: r.Seq, requests: r.Requests()}
	if len(s.group) < keepReports {
		e.report = r
	}
	s.group = append(s.group, e)
	if len(s.buf) < 256<<10 {
		return nil
	}
	return s.write()
}

// begin sees to it that there is a group.
func (s *Spool) begin() error {
	if len(s.group) > 0 {
		return nil
	}
	s.mu.Lock()
	if s.active != nil && s.active.size >= s.cfg.SegmentBytes {
		s.roll()
	}
	active := s.active
	s.mu.Unlock()
	if active == nil {
		var seed [4]byte
		_, _ = rand.Read(seed[:])
		seg := &segment{seed: binary.LittleEndian.Uint32(seed[:]), size: segHead}
		var err error
		if seg.f, err = create(filepath.Join(s.dir, fmt.Sprintf("%016x-%08x.seg", s.nextID, seg.seed)), func(f *os.File) error {
			_, err := f.Write(appendHeader(nil))
			return err
		}); err != nil {
			return err
		}
		s.nextID++
		s.mu.Lock()
		s.active, active = seg, seg
		s.bytes += seg.size
		s.m.Bytes.Add(float64(seg.size))
		s.mu.Unlock()
	}
	s.groupAt = active.size
	s.buf = s.buf[:0]
	return nil
}

// keepReports is how many unsent reports are kept in memory beside the disk.
const keepReports = 64

func (s *Spool) write() error {
	_, err := s.active.f.Write(s.buf)
	s.buf = s.buf[:0]
	return err
}

// giveUp forgets the group. What of it is in the file must not be followed by another one: a commit would keep both.
func (s *Spool) giveUp() {
	if s.active != nil {
		if err := s.active.f.Truncate(s.groupAt); err == nil {
			_, err = s.active.f.Seek(s.groupAt, 0)
			if err != nil {
				s.abandon()
			}
		} else {
			s.abandon()
		}
	}
	s.gaveUp = s.groupBytes()
	s.group, s.buf = nil, s.buf[:0]
}

// groupBytes is the size of the group's reports.
func (s *Spool) groupBytes() int64 {
	if len(s.group) == 0 {
		return 0
	}
	last := s.group[len(s.group)-1]
	return last.at + int64(last.size) - s.groupAt
}

func (s *Spool) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roll()
}

// roll ends the active segment. Its caller holds mu.
func (s *Spool) roll() {
	seg := s.active
	s.active = nil
	if seg.left == 0 {
		s.remove(seg)
	}
}

// Commit keeps the group. A group in memory is gone with the process, and so are its counts: a count that is told is not to be found
// by the next life and told again.
func (s *Spool) Commit(generation uint32) error {
	held, err := s.held, s.failed
	s.held, s.holding, s.failed = nil, false, nil
	if size := s.groupBytes(); err == nil && size > 0 {
		err = s.commit(s.boot, generation)
		s.asked(size, err)
	}
	switch {
	case err == nil:
		s.live.forget(generation)
		s.reserveErr = nil // the disk takes something again
		if s.heldErr != nil {
			s.keepHeld(s.heldTo)
		}
	case len(held) > 0:
		s.keepHeld(bootKnown{max(s.heldTo.sealed, generation), held[len(held)-1].Seq})
		s.live.forget(generation)
		s.hold(held)
	default:
		return err
	}
	s.reserve()
	return nil
}

// keepHeld makes known to the next life how far groups went out from memory.
func (s *Spool) keepHeld(to bootKnown) {
	s.heldTo, s.heldErr = to, s.live.setHeld(to)
	s.note(noHeld, s.heldErr)
}

// hold has a group sent that is in memory only.
func (s *Spool) hold(reports []*schemas.Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range reports {
		s.enqueue(&entry{boot: r.Boot, seq: r.Seq, requests: r.Requests(), report: r})
	}
	s.fill()
}

// fill tells whoever sends that there is something. Its caller holds mu.
func (s *Spool) fill() {
	select {
	case s.filled <- struct{}{}:
	default:
	}
}

func (s *Spool) commit(boot string, generation uint32) (err error) {
	defer func() {
		if err != nil {
			s.giveUp()
		}
	}()
	if len(s.group) == 0 {
		return nil
	}
	s.buf = appendCommit(s.buf, s.active.seed, boot, generation)
	last := s.group[len(s.group)-1]
	end := last.at + int64(last.size+2*(headBytes+6+len(boot)))
	if err := s.write(); err != nil {
		return err
	}
	if generation > 0 {
		if err := s.cfg.sync(s.active.f); err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.bytes += end - s.active.size
			s.m.Bytes.Add(float64(end - s.active.size))
			s.active.size = end // nobody knows what is there: write nothing behind it
			s.roll()
			return err
		}
	}
	if s.live != nil {
		s.live.setSegment(s.active.seed, end)
		if last.boot == s.boot {
			s.live.setLastSeq(last.seq)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += end - s.active.size
	s.m.Bytes.Add(float64(end - s.active.size))
	s.active.size = end
	s.active.left += len(s.group)
	for _, e := range s.group {
		if len(s.unsent)+len(s.behind) >= keepReports {
			e.report = nil
		}
		s.enqueue(e)
	}
	s.group = nil
	s.fill()
	return nil
}

// Next returns the oldest report of this boot that is not in the stream, or what comes behind.
func (s *Spool) Next() (*schemas.Report, bool) {
	for {
		s.mu.Lock()
		if s.turn = &s.unsent; len(s.unsent) == 0 {
			s.turn = &s.behind
		}
		if len(*s.turn) == 0 {
			s.mu.Unlock()
			return nil, false
		}
		e := (*s.turn)[0]
		s.mu.Unlock()
		if e.report == nil {
			r, err := readReport(e.seg.f, e.seg.seed, e.at, e.size)
			if err != nil {
				s.m.Damaged.Inc()
				s.log.Error("a report in the spool is damaged, the usage in it is lost, and its file is kept aside", "file", filepath.Base(e.seg.f.Name()), "offset", e.at, "boot", e.boot, "seq", e.seq, "requests", e.requests, "err", err)
				s.mu.Lock()
				e.seg.damaged = true
				s.pop()
				s.done(e)
				s.mu.Unlock()
				continue
			}
			e.report = r
		}
		e.report.Gateway = s.gateway
		return e.report, e.again
	}
}

// pop takes out what Next has returned. Its caller holds mu.
func (s *Spool) pop() *entry {
	e := (*s.turn)[0]
	(*s.turn)[0] = nil
	*s.turn = (*s.turn)[1:]
	s.requests -= e.requests
	return e
}

// popBuckets takes out the head of buckets. Its caller holds mu.
func (s *Spool) popBuckets() *entry {
	e := s.buckets[0]
	s.buckets[0] = nil
	s.buckets = s.buckets[1:]
	return e
}

// done lets go of a report. Its caller holds mu.
func (s *Spool) done(e *entry) {
	e.report = nil
	if e.seg == nil {
		return
	}
	if e.seg.left--; e.seg.left == 0 && e.seg != s.active {
		s.remove(e.seg)
	}
}

func (s *Spool) remove(seg *segment) {
	name, put := seg.f.Name(), os.Remove
	if seg.damaged {
		put = s.setAside
	}
	if err := errors.Join(seg.f.Close(), put(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("a file of the spool that is not needed any more stays", "file", filepath.Base(name), "err", err)
	}
	s.bytes -= seg.size
	s.m.Bytes.Sub(float64(seg.size))
}

// Sent says that Next's report is in the stream. One that is in memory only is done then.
func (s *Spool) Sent(place uint64) (first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.pop()
	first = !e.sent
	e.place, e.report, e.sent, e.again = place, nil, true, false
	switch {
	case e.seg == nil:
		s.done(e)
	case e.requests > 0:
		s.waiting = append(s.waiting, e)
	default:
		if s.buckets = append(s.buckets, e); len(s.buckets) > keepBuckets {
			s.done(s.popBuckets())
		}
	}
	return first
}

// Skip puts Next's report behind all others.
func (s *Spool) Skip() {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.pop()
	e.again = true // others of its boot will be in the stream before it
	s.enqueue(e)
}

// enqueue puts a report that is to be sent where it belongs. Its caller holds mu.
func (s *Spool) enqueue(e *entry) {
	list := s.list(e)
	*list = append(*list, e)
	s.requests += e.requests
}

// list is that which a report waits in. What goes once more has time.
func (s *Spool) list(e *entry) *[]*entry {
	if e.boot == s.boot && !e.again {
		return &s.unsent
	}
	return &s.behind
}

// A report that the history does not have though it has passed it is sent again at once, and then ever less often:
// perhaps the history cannot read it.
const (
	againMin = time.Minute
	againMax = time.Hour
)

// Stored removes what the history has.
func (s *Spool) Stored(f schemas.Floor, stored *schemas.Stored) (again int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	lost := f.Lost != s.lost || f.Stream != "" && s.life != "" && f.Stream != s.life // what we sent went into a stream that is gone, or may have
	s.life, s.lost = cmp.Or(f.Stream, s.life), f.Lost
	now := time.Now()
	there := func(e *entry) bool {
		if !stored.Has(e.boot, e.seq) {
			return false
		}
		s.requests -= e.requests
		s.done(e)
		return true
	}
	s.unsent, s.behind = slices.DeleteFunc(s.unsent, there), slices.DeleteFunc(s.behind, there)
	settled := func(e *entry) bool {
		switch {
		case stored.Has(e.boot, e.seq):
			s.done(e)
		case lost || f.Stream != "" && f.Seq >= e.place && now.After(e.next):
			e.again, e.next = true, now.Add(min(againMin<<min(e.tries, 10), againMax))
			e.tries++
			s.enqueue(e)
			again++
		default:
			return false
		}
		return true
	}
	s.waiting, s.buckets = slices.DeleteFunc(s.waiting, settled), slices.DeleteFunc(s.buckets, settled)
	return again
}

// Unconfirmed is the number of reports that wait for the history.
func (s *Spool) Unconfirmed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting) + len(s.buckets)
}

// Filled is signalled after a Commit.
func (s *Spool) Filled() <-chan struct{} { return s.filled }

// Len says what is not in the stream yet.
func (s *Spool) Len() (reports int, requests uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.unsent) + len(s.behind), s.requests
}

// Own says how many of them are of this boot.
func (s *Spool) Own() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.unsent)
}

// Bytes is the size of the reports on disk.
func (s *Spool) Bytes() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes
}

// Troubled says that it is full, cannot write, has lost files, or holds some of a newer weir: what waits is not all on disk, or will not go.
func (s *Spool) Troubled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.trouble) > 0
}

// note tells of trouble once, when it begins and when it ends.
func (s *Spool) note(what string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noteLocked(what, err)
}

func (s *Spool) noteLocked(what string, err error) {
	if err != nil {
		s.m.Errors.WithLabelValues(reason(err)).Inc()
	}
	if err != nil && what == noReports {
		s.refused = time.Now()
	}
	if (err != nil) == s.trouble[what] {
		return
	}
	if err != nil {
		if len(s.trouble) == 0 {
			s.m.Degraded.Inc()
		}
		s.trouble[what] = true
		s.log.Error("spool: "+what+"; requests go on", "bytes", s.bytes, "err", err)
		return
	}
	delete(s.trouble, what)
	if len(s.trouble) == 0 {
		s.m.Degraded.Dec()
	}
	s.log.Info("spool: no longer: " + what)
}

// InMemory is the number of requests that are gone with the process: in counts for which there was no room on disk, and in reports that
// are not in the stream yet; what was in files that are not in the folder any more is in memory too. It is called when nobody counts any
// more.
func (s *Spool) InMemory() (requests uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := map[*segment]bool{}
	for _, e := range slices.Concat(s.unsent, s.behind) {
		if _, looked := kept[e.seg]; !looked {
			kept[e.seg] = e.seg != nil && inPlace(e.seg.f)
		}
		if !kept[e.seg] {
			requests += e.requests
		}
	}
	return requests + s.live.inMemory()
}

// Close ends this life. What is in the spool stays there, and so do counts that were never sealed, save those for
// which there was no room on disk. Cells may be used even after it, so their memory is given back only at the end of the process.
func (s *Spool) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.live != nil {
		errs = append(errs, s.live.close())
	}
	files := map[*os.File]bool{}
	if s.active != nil {
		files[s.active.f] = true
		errs = append(errs, s.active.f.Sync())
	}
	for _, e := range slices.Concat(s.unsent, s.behind, s.waiting, s.buckets) {
		if e.seg != nil {
			files[e.seg.f] = true
		}
	}
	for f := range files {
		errs = append(errs, f.Close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	if len(s.trouble) > 0 {
		s.m.Degraded.Dec()
		s.trouble = map[string]bool{}
	}
	s.m.Bytes.Sub(float64(s.bytes))
	return errors.Join(errs...)
}

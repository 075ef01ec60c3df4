package spool

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/weirhq/weir/ingest"
)

// bootKnown is what the segments say of a boot.
type bootKnown struct {
	sealed uint32 // generation
	seq    uint64
}

// learn adds what a file of reports tells of the boots in it.
func learn(known map[string]bootKnown, c contents) {
	for _, r := range c.commits {
		k := known[r.boot]
		k.sealed = max(k.sealed, r.generation)
		known[r.boot] = k
	}
	for _, r := range c.reports {
		k := known[r.boot]
		k.seq = max(k.seq, r.seq)
		known[r.boot] = k
	}
}

// life is the file of counts of a process that has ended.
type life struct {
	name  string
	known bootKnown
}

// lateEvery is how long counts of an earlier life wait at least before they are tried again.
const lateEvery = 5 * time.Second

// segmentNames are those of dir's files of reports, oldest first; other is told of names that are none.
func segmentNames(dir string, other func(name string)) ([]string, error) {
	all, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil {
		return nil, err
	}
	names := all[:0]
	for _, name := range all {
		if strings.HasPrefix(filepath.Base(name), aside) {
			continue
		}
		if _, _, err := segmentID(name); err != nil || !maybeFile(name) {
			other(filepath.Base(name))
			continue
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

// noneOfOurs is what is told of a file that only looks like one of ours. It stays as it is.
const noneOfOurs = "a file that is none of ours is in the spool, and is passed over"

// maybeFile is false for a folder, and what else is no file. What is gone may have been one.
func maybeFile(name string) bool {
	info, err := os.Stat(name)
	return err != nil || info.Mode().IsRegular()
}

func segmentID(name string) (n uint64, seed uint32, err error) {
	_, err = fmt.Sscanf(filepath.Base(name), "%16x-%8x.seg", &n, &seed)
	return n, seed, err
}

func (s *Spool) readSegments() (map[string]bootKnown, error) {
	names, err := segmentNames(s.dir, func(name string) { s.log.Error(noneOfOurs, "file", name) })
	if err != nil {
		return nil, err
	}
	lives, err := lives(s.dir)
	if err != nil {
		return nil, err
	}
	wasAside, err := s.sweep()
	if err != nil {
		return nil, err
	}
	known := map[string]bootKnown{}
	type id struct {
		boot string
		seq  uint64
	}
	have := map[id]*entry{}
	for i, name := range names {
		n, seed, _ := segmentID(name)
		s.nextID = max(s.nextID, n+1)
		b, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		c, err := scan(b, seed)
		if err != nil {
			s.note(newer, fmt.Errorf("%s: %w", filepath.Base(name), err))
			continue
		}
		seg := &segment{seed: seed, size: int64(len(b)), damaged: slices.Contains(wasAside, aside+filepath.Base(name))}
		switch {
		case !ordinary(c, seg, lives, i == len(names)-1):
			c.damage = append(c.damage, span{c.end, seg.size - c.end})
		case c.end < seg.size && !seg.damaged: // a group that was being written when the process was killed: its counts are where they were
			if err := os.Truncate(name, c.end); err != nil {
				return nil, err
			}
			seg.size = c.end
		}
		if len(c.damage) > 0 {
			seg.damaged = true
			_ = os.Link(name, filepath.Join(s.dir, aside+filepath.Base(name))) // for who asks, and for the next life, which may not see it; else when it is done
			s.m.Damaged.Add(float64(len(c.damage)))
			var requests uint64
			for _, r := range c.tail {
				requests += r.requests
			}
			s.log.Error("a file of the spool is damaged, or cut off: what can be read is delivered, the usage in the rest is not, and the file is kept aside", "file", filepath.Base(name),
				"as", aside+filepath.Base(name), "offset", c.damage[0].at, "bytes", c.damage[0].size, "places", len(c.damage), "reports", len(c.reports), "uncommitted_requests", requests)
		}
		if seg.f, err = os.Open(name); err != nil {
			return nil, err
		}
		s.bytes += seg.size
		s.m.Bytes.Add(float64(seg.size))
		learn(known, c)
		for _, r := range c.reports {
			e := &entry{seg: seg, at: r.at, size: r.size, boot: r.boot, seq: r.seq, requests: r.requests}
			if old := have[id{e.boot, e.seq}]; old != nil { // its group was given up, and sealed again
				old.seg.left--
				list := s.list(e)
				(*list)[slices.Index(*list, old)] = e
				s.requests += e.requests - old.requests
			} else {
				s.enqueue(e)
			}
			have[id{e.boot, e.seq}] = e
			seg.left++
		}
		if seg.left == 0 {
			s.remove(seg)
		}
	}
	return known, nil
}

// lives are the headers of the files of counts in dir, by boot.
func lives(dir string) (map[string]*dead, error) {
	names, err := filepath.Glob(filepath.Join(dir, "live-*"))
	if err != nil {
		return nil, err
	}
	all := map[string]*dead{}
	for _, name := range names {
		d, err := openDead(name)
		if err != nil {
			continue // recover tells of it
		}
		if err := d.f.Close(); err != nil {
			return nil, err
		}
		all[d.boot] = d
	}
	return all, nil
}

// ordinary says whether a file ends as a kill or a power cut leaves it: behind the last commit there is nothing, or the beginning
// of a group that never was committed. That can be in the last file only. A life writes down the number of its last report
// once that is synced, beside its counts: up to this number nothing may be missing. It also writes down how long its last file is.
//
// A file that was just begun has a header: see create. What cannot be told from that: the last one, cut to its header when the counts
// of its life are gone, or after a power cut.
func ordinary(c contents, seg *segment, lives map[string]*dead, last bool) bool {
	if seg.size < segHead {
		return false
	}
	for _, d := range lives {
		if d.seg == segmentMark(seg.seed) && uint64(seg.size) < d.segEnd && d.kernel == kernelLife() {
			return false
		}
	}
	kept := map[string]uint64{}
	for _, r := range c.reports {
		kept[r.boot] = max(kept[r.boot], r.seq)
	}
	for boot, seq := range kept {
		if d := lives[boot]; last && d != nil && d.lastSeq > seq && d.kernel == kernelLife() { // a power cut takes reports of buckets alone
			return false
		}
	}
	if len(c.tail) == 0 && c.torn.size == 0 {
		return true
	}
	for _, r := range c.tail {
		if d := lives[r.boot]; r.requests > 0 && (d == nil || r.seq <= d.lastSeq) {
			return false
		}
	}
	return last && c.cut
}

// Recover seals counts of earlier lives that Open could not, for there was no room, and returns how many reports that makes; and it
// sees whether a disk that has refused takes something again, also when there is nothing to seal, and whether our files are still there.
// It is called now and then by the goroutine that seals, between groups.
func (s *Spool) Recover() (reports int) {
	s.look()
	s.reserve()
	s.mu.Lock()
	probe, size := s.trouble[noReports] && !s.refuses(), s.refusal
	s.mu.Unlock()
	if probe {
		s.asked(size, s.probe(max(size, 64<<10)))
	}
	if len(s.late) == 0 || time.Now().Before(s.lateAt) {
		return 0
	}
	return s.recover()
}

// look begins new files when those that we write are not in the folder any more. Nothing else would tell: they are open, and take what is
// written. What is in them can still be sent, and trouble lasts until the history has it.
func (s *Spool) look() {
	s.mu.Lock()
	active := s.active
	s.mu.Unlock()
	noFile, noLive := active != nil && !inPlace(active.f), !s.live.inPlace()
	if noFile || noLive {
		s.miss()
		if err := s.lockAgain(); err != nil { // the folder may be somebody else's now
			s.note(deleted, fmt.Errorf("%w, and no new ones can be made: %w", errGone, err))
			return
		}
	}
	if noLive {
		s.live.renew()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if noFile && s.active == active {
		s.roll()
	}
	s.gone = slices.DeleteFunc(s.gone, func(seg *segment) bool { return seg.left == 0 })
	switch {
	case noFile || noLive:
		s.noteLocked(deleted, errGone)
	case len(s.gone) == 0:
		s.noteLocked(deleted, nil)
	}
}

// miss notes which files with something that is needed are not in the folder any more.
func (s *Spool) miss() {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[*segment]bool{}
	for _, e := range slices.Concat(s.unsent, s.behind, s.waiting, s.buckets) {
		if e.seg != nil && !seen[e.seg] && !slices.Contains(s.gone, e.seg) && !inPlace(e.seg.f) {
			s.gone = append(s.gone, e.seg)
		}
		seen[e.seg] = true
	}
}

// inPlace says that a file is in its folder, under its name, or that nobody knows.
func inPlace(f *os.File) bool {
	ours, err := f.Stat()
	if err != nil {
		return true
	}
	there, err := os.Stat(f.Name())
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR)
	}
	return os.SameFile(ours, there)
}

// lockAgain makes the folder ours where it was deleted with all that was in it.
func (s *Spool) lockAgain() error {
	if inPlace(s.lock) {
		return nil
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	lock, err := lockDir(s.dir, s.gateway)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.lock
	s.lock = lock
	return old.Close()
}

// recover seals what dead processes had counted, as far as it can now.
func (s *Spool) recover() (reports int) {
	all := s.late
	s.late = nil
	var failed error
	for _, l := range all {
		n, err := s.take(l)
		if reports += n; err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", filepath.Base(l.name), err))
			s.late = append(s.late, l)
		}
	}
	s.note(noRoom, failed)
	s.lateAt = time.Now().Add(lateEvery)
	return reports
}

// take seals the counts of a life and removes its file.
func (s *Spool) take(l *life) (reports int, err error) {
	d, err := openDead(l.name)
	switch {
	case errors.Is(err, errNewer):
		s.note(newer, fmt.Errorf("%s: %w", filepath.Base(l.name), err))
		return 0, nil
	case errors.Is(err, errNone):
		s.log.Error(noneOfOurs, "file", filepath.Base(l.name), "err", err)
		return 0, nil
	case errors.Is(err, errDamaged):
		s.m.Damaged.Inc()
		s.log.Error("a file of counts is damaged, or cut off: the usage in it is not delivered, and it is kept aside", "file", filepath.Base(l.name), "as", aside+filepath.Base(l.name))
		return 0, s.setAside(l.name)
	case err != nil:
		return 0, err
	}
	reports, damaged, err := s.bury(d, &l.known)
	if err := errors.Join(err, d.f.Close()); err != nil {
		return reports, err
	}
	if damaged > 0 {
		s.m.Damaged.Add(float64(damaged))
		s.log.Error("a file of counts of an earlier life is damaged, or cut off: what can be read is delivered, the usage in the rest is not, and the file is kept aside",
			"file", filepath.Base(l.name), "as", aside+filepath.Base(l.name), "boot", d.boot, "places", damaged, "size_was", d.made)
		return reports, s.setAside(l.name)
	}
	return reports, os.Remove(l.name)
}

// aside is before the name of a file that could not be read whole.
const aside = "damaged-"

func (s *Spool) setAside(name string) error {
	to := filepath.Join(s.dir, aside+filepath.Base(name))
	if err := os.Link(name, to); err != nil && !errors.Is(err, fs.ErrExist) { // a disk that knows no links
		return os.Rename(name, to)
	}
	return os.Remove(name)
}

// sweep takes away what a kill has left half made, and tells of what was set aside: names are those.
func (s *Spool) sweep() (names []string, err error) {
	half, err := filepath.Glob(filepath.Join(s.dir, making+"*"))
	if err != nil {
		return nil, err
	}
	for _, name := range half {
		if !maybeFile(name) {
			continue
		}
		if err := os.Remove(name); err != nil {
			return nil, err
		}
	}
	if names, err = filepath.Glob(filepath.Join(s.dir, aside+"*")); err != nil {
		return nil, err
	}
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	if len(names) > 0 {
		s.log.Warn("damaged files of earlier lives lie in the spool: usage that was in them is not delivered, and history verify says so until somebody has looked and takes them away", "files", names)
	}
	return names, nil
}

// bury seals the counts of d above what is known to be sealed, and makes that known.
func (s *Spool) bury(d *dead, known *bootKnown) (reports, damaged int, err error) {
	var found ingest.Found
	var last uint32
	damaged, err = d.each(max(known.sealed, d.held.sealed), func(gen uint32, c *ingest.Cell, t [4]string) {
		last = max(last, gen)
		found.Add(c, t[0], t[1], t[2], t[3])
	})
	if err != nil || last == 0 {
		return 0, damaged, err
	}
	boot, seq := d.boot, max(d.lastSeq, d.held.seq, known.seq)
	if d.kernel == "" || d.kernel != kernelLife() {
		boot, seq = s.boot, s.seq
		if s.live != nil { // which is in use: nobody had this one
			boot, seq = rand.Text(), 0
		}
	}
	var requests uint64
	for _, r := range found.Reports(s.gateway, boot, seq) {
		if err := s.append(r); err != nil {
			return 0, damaged, err
		}
		seq = r.Seq
		requests += r.Requests()
		reports++
	}
	if err := s.commit(d.boot, last); err != nil {
		return 0, damaged, err
	}
	known.sealed, known.seq = last, seq
	if boot == s.boot {
		s.seq = seq
	}
	s.m.Recovered.Add(float64(requests))
	s.log.Info("counts of a life that was killed are sealed", "boot", d.boot, "under", boot, "requests", requests)
	return reports, damaged, nil
}

package spool

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/schemas"
)

// Abandoned returns what Read does, when no process has the spool in dir.
func Abandoned(dir, gateway string) ([]*schemas.Report, error) {
	if held, err := inUse(dir); held || err != nil {
		return nil, err
	}
	return Read(dir, gateway)
}

// inUse says whether a process has the spool in dir.
func inUse(dir string) (bool, error) {
	f, err := os.Open(filepath.Join(dir, lockName))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	held := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
	if err := f.Close(); err != nil { // which gives it back
		return false, err
	}
	if errors.Is(held, syscall.EWOULDBLOCK) {
		return true, nil
	}
	return false, os.NewSyscallError("flock", held)
}

// owner is the gateway whose spool is in dir, where the folder says so.
func owner(dir string) (string, error) {
	f, err := os.Open(filepath.Join(dir, lockName))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	whose, _, err := readLock(f)
	return whose, errors.Join(err, f.Close())
}

// Read returns what the spool in dir keeps, by boot and sequence number: the sealed reports that the history is not known to
// have, and some that it has, and what is counted and not sealed, as the reports that it would make now. It changes nothing and
// takes no lock, so that the gateway may run meanwhile. They are gateway's where the folder does not say whose it is.
func Read(dir, gateway string) ([]*schemas.Report, error) {
	whose, err := owner(dir)
	if err != nil {
		return nil, fmt.Errorf("read spool %s: %w", dir, err)
	}
	all, err := read(dir, cmp.Or(whose, gateway))
	if err != nil {
		return nil, fmt.Errorf("read spool %s: %w", dir, err)
	}
	slices.SortFunc(all, func(a, b *schemas.Report) int {
		return cmp.Or(cmp.Compare(a.Boot, b.Boot), cmp.Compare(a.Seq, b.Seq))
	})
	return all, nil
}

func read(dir, gateway string) ([]*schemas.Report, error) {
	lives, err := readLives(dir) // first: what is sealed meanwhile is in both, and left out below
	if err != nil {
		return nil, err
	}
	names, err := segmentNames(dir, func(string) {}) // the gateway tells of what is none of ours
	if err != nil {
		return nil, err
	}
	type id struct {
		boot string
		seq  uint64
	}
	kept := map[id]*schemas.Report{}
	known := map[string]bootKnown{}
	for _, name := range names {
		if err := readSegment(name, known, func(r *schemas.Report) {
			r.Gateway = gateway
			kept[id{r.Boot, r.Seq}] = r
		}); err != nil && !errors.Is(err, fs.ErrNotExist) { // done with while we looked
			return nil, fmt.Errorf("%s: %w", filepath.Base(name), err)
		}
	}
	all := make([]*schemas.Report, 0, len(kept))
	for _, r := range kept {
		all = append(all, r)
	}
	for _, l := range lives {
		k := known[l.boot]
		var found ingest.Found
		for gen, counts := range l.counts {
			if gen > max(k.sealed, l.held.sealed) {
				for i := range counts {
					c := &counts[i]
					found.Add(&c.cell, c.texts[0], c.texts[1], c.texts[2], c.texts[3])
				}
			}
		}
		all = append(all, found.Reports(gateway, l.boot, max(l.lastSeq, l.held.seq, k.seq))...)
	}
	return all, nil
}

func readSegment(name string, known map[string]bootKnown, note func(*schemas.Report)) error {
	_, seed, err := segmentID(name)
	if err != nil {
		return err
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	c, err := scan(b, seed)
	if err != nil {
		return err
	}
	learn(known, c)
	for _, rec := range c.reports {
		whole, ok, err := parse(b[rec.at:], seed)
		if err != nil || !ok {
			continue // damaged: the gateway tells of it
		}
		r, err := decodeReport(whole)
		if err != nil {
			return err
		}
		note(r)
	}
	return nil
}

// lifeCounts is what is in a file of counts, by generation.
type lifeCounts struct {
	boot    string
	lastSeq uint64
	held    bootKnown
	counts  map[uint32][]oneCount
}

type oneCount struct {
	cell  ingest.Cell
	texts [4]string
}

func readLives(dir string) (all []lifeCounts, err error) {
	names, err := filepath.Glob(filepath.Join(dir, "live-*"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		d, err := openDead(name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errDamaged) || errors.Is(err, errNone) { // sealed while we looked, or the gateway tells of it
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(name), err)
		}
		l := lifeCounts{boot: d.boot, lastSeq: d.lastSeq, held: d.held, counts: map[uint32][]oneCount{}}
		_, err = d.each(0, func(gen uint32, c *ingest.Cell, texts [4]string) {
			l.counts[gen] = append(l.counts[gen], oneCount{*c, texts})
		})
		if err := errors.Join(err, d.f.Close()); err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(name), err)
		}
		all = append(all, l)
	}
	return all, nil
}

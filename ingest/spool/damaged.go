package spool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/schemas"
)

// Damage is a file of a spool that cannot be read whole. Usage that was in it may be nowhere else.
type Damage struct {
	File string    // its name
	Boot string    // whose usage it is, where that is known
	At   time.Time // when it was written last: what it held is no younger
	What string    // what cannot be read, and what can

	Aside bool // nothing needs it any more but who looks into it
}

// lookAgain is how long after damage was seen in a file in use it must be there still.
const lookAgain = 100 * time.Millisecond

// Damaged returns the damage in the spool in dir: the files that were set aside, which are told of until somebody takes them away, and
// what is damaged and was not found by a gateway yet. Like Read it changes nothing, and the gateway may run meanwhile: what it is just
// writing is no damage.
func Damaged(dir string) ([]Damage, error) {
	used, err := inUse(dir)
	if err != nil {
		return nil, fmt.Errorf("look for damage in spool %s: %w", dir, err)
	}
	all, err := damaged(dir, used)
	if err == nil && used && slices.ContainsFunc(all, func(d Damage) bool { return !d.Aside }) {
		time.Sleep(lookAgain)
		first := all
		all, err = damaged(dir, used)
		all = slices.DeleteFunc(all, func(d Damage) bool {
			return !d.Aside && !slices.ContainsFunc(first, func(f Damage) bool { return f.File == d.File && f.What == d.What })
		})
	}
	if err != nil {
		return nil, fmt.Errorf("look for damage in spool %s: %w", dir, err)
	}
	return all, nil
}

// damaged looks once. The counts of a spool in use are its process's.
func damaged(dir string, used bool) (all []Damage, err error) {
	lives, err := lives(dir) // first: what they know of files of reports is then no newer than these
	if err != nil {
		return nil, err
	}
	names, err := segmentNames(dir, func(string) {})
	if err != nil {
		return nil, err
	}
	known := map[string]bootKnown{}
	for i, name := range names {
		c, size, err := scanFile(name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNewer) { // done with while we looked, or Read tells of it
			continue
		}
		if err != nil {
			return nil, err
		}
		learn(known, c)
		_, seed, _ := segmentID(name)
		if whole := ordinary(c, &segment{seed: seed, size: size}, lives, i == len(names)-1); !whole || len(c.damage) > 0 {
			all = append(all, lostReports(name, c, size, !whole))
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "live-*"))
	if err != nil {
		return nil, err
	}
	for _, name := range files {
		boot, _ := bootOf(name)
		if d, bad := lostCounts(name, known[boot].sealed); bad && !used {
			all = append(all, d)
		}
	}
	set, err := filepath.Glob(filepath.Join(dir, aside+"*")) // last: one that was set aside meanwhile is here
	if err != nil {
		return nil, err
	}
	for _, name := range set {
		was := strings.TrimPrefix(filepath.Base(name), aside)
		all = slices.DeleteFunc(all, func(d Damage) bool { return d.File == was })
		d := Damage{What: "it cannot be read"}
		if _, ok := bootOf(was); ok {
			d, _ = lostCounts(name, 0)
		} else if c, size, err := scanFile(name); err == nil {
			d = lostReports(name, c, size, true)
		}
		d.File, d.Aside = filepath.Base(name), true
		all = append(all, d)
	}
	for i := range all {
		if info, err := os.Stat(filepath.Join(dir, all[i].File)); err == nil {
			all[i].At = info.ModTime().UTC()
		}
	}
	return all, nil
}

func scanFile(name string) (c contents, size int64, err error) {
	_, seed, err := segmentID(strings.TrimPrefix(filepath.Base(name), aside))
	if err != nil {
		return c, 0, err
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return c, 0, err
	}
	c, err = scan(b, seed)
	return c, int64(len(b)), err
}

// lostReports tells of a damaged file of reports; cut says that it may have lost its end.
func lostReports(name string, c contents, size int64, cut bool) Damage {
	d := Damage{File: filepath.Base(name)}
	var bytes int64
	for _, s := range c.damage {
		bytes += s.size
	}
	var what []string
	if bytes > 0 {
		what = append(what, fmt.Sprintf("%d bytes in %d places cannot be read, the first at offset %d", bytes, len(c.damage), c.damage[0].at))
	}
	if cut && c.end < size {
		what = append(what, fmt.Sprintf("%d bytes from offset %d are not as a gateway leaves them, and more may have followed", size-c.end, c.end))
	} else if cut && bytes == 0 {
		what = append(what, fmt.Sprintf("what followed its %d bytes is gone", size))
	}
	boots := map[string]schemas.Ranges{}
	for _, r := range c.reports {
		boots[r.boot], _ = boots[r.boot].Add(r.seq)
	}
	for boot, seqs := range boots {
		if len(boots) == 1 {
			d.Boot = boot
		}
		what = append(what, fmt.Sprintf("of boot %s it has the reports %s", boot, rangesText(seqs)))
	}
	slices.Sort(what[len(what)-len(boots):])
	if len(boots) == 0 {
		what = append(what, "it has no report")
	}
	d.What = strings.Join(what, "; ")
	return d
}

// maxRanges is how many ranges are told one by one.
const maxRanges = 8

func rangesText(all schemas.Ranges) string {
	var parts []string
	for _, r := range all[:min(len(all), maxRanges)] {
		if r[0] == r[1] {
			parts = append(parts, fmt.Sprint(r[0]))
		} else {
			parts = append(parts, fmt.Sprintf("%d to %d", r[0], r[1]))
		}
	}
	if more := len(all) - maxRanges; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more runs up to %d", more, all[len(all)-1][1]))
	}
	return strings.Join(parts, ", ")
}

// lostCounts tells of a file of counts, of which generations up to sealed are in reports; bad says whether it is damaged.
func lostCounts(name string, sealed uint32) (d Damage, bad bool) {
	d.File = filepath.Base(name)
	d.Boot, _ = bootOf(strings.TrimPrefix(d.File, aside))
	info, err := os.Stat(name)
	if err != nil {
		return d, false // sealed while we looked
	}
	dead, err := openDead(name)
	switch {
	case errors.Is(err, errDamaged):
		d.What = fmt.Sprintf("no count in its %d bytes can be read", info.Size())
		return d, true
	case err != nil:
		return d, false // sealed while we looked, or Read tells of it
	}
	requests := uint64(0)
	places, err := dead.each(max(sealed, dead.held.sealed), func(_ uint32, c *ingest.Cell, _ [4]string) {
		n, _, _ := c.Read()
		requests += n
	})
	if err := errors.Join(err, dead.f.Close()); err != nil {
		d.What = fmt.Sprintf("it cannot be read: %v", err)
		return d, true
	}
	d.What = fmt.Sprintf("counts in %d places cannot be read, those of %d requests can", places, requests)
	if uint64(info.Size()) < dead.made {
		d.What += fmt.Sprintf("; it has %d bytes of %d", info.Size(), dead.made)
	}
	return d, places > 0
}

package spool

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/weirhq/weir/schemas"
)

// Read returns the sealed reports that the spool in dir keeps, by boot and sequence number: those that the history is not
// known to have, and some that it has. It changes nothing and takes no lock, so that the gateway may run meanwhile; what
// is counted and not yet sealed is not among them.
func Read(dir, gateway string) ([]*schemas.Report, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil {
		return nil, err
	}
	type id struct {
		boot string
		seq  uint64
	}
	kept := map[id]*schemas.Report{}
	slices.Sort(names)
	for _, name := range names {
		var n uint64
		var seed uint32
		if _, err := fmt.Sscanf(filepath.Base(name), "%16x-%8x.seg", &n, &seed); err != nil {
			continue // none of ours
		}
		if err := readSegment(name, seed, func(r *schemas.Report) {
			r.Gateway = gateway
			kept[id{r.Boot, r.Seq}] = r
		}); err != nil && !errors.Is(err, fs.ErrNotExist) { // done with while we looked
			return nil, fmt.Errorf("read spool %s: %w", dir, err)
		}
	}
	all := make([]*schemas.Report, 0, len(kept))
	for _, r := range kept {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b *schemas.Report) int {
		return cmp.Or(cmp.Compare(a.Boot, b.Boot), cmp.Compare(a.Seq, b.Seq))
	})
	return all, nil
}

func readSegment(name string, seed uint32, note func(*schemas.Report)) error {
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	for _, rec := range scan(b, seed).reports {
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

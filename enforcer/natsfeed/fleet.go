package natsfeed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/weirhq/weir/schemas"
)

// maxFleet is more gateways than any fleet has.
const maxFleet = 1 << 20

// Fleet is what a gateway last heard of its fleet. The zero value is nothing.
type Fleet struct {
	Gateways int
	Weight   int // of this one, in millionths of each limit
}

// fleetOf is what is known after u of a fleet of which this was known before. A centre that does not say a weight does not know it
// yet: of a fleet of the same size it is the old one.
func fleetOf(u *schemas.ThrottleUpdate, before Fleet) Fleet {
	f := Fleet{u.Gateways, u.Weight}
	switch {
	case f.Weight > 0:
	case f.Gateways == before.Gateways && before.Weight > 0:
		f.Weight = before.Weight
	default:
		f.Weight = schemas.EvenWeight(f.Gateways)
	}
	return f
}

// ReadFleet is what a feed kept in file, nothing when it never heard of a fleet. A gateway that starts while the centre is away
// keeps to it, so that a fleet that restarts does not admit each limit many times over.
func ReadFleet(file string) (Fleet, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return Fleet{}, nil
	}
	if err != nil {
		return Fleet{}, fmt.Errorf("read the last known fleet: %w", err)
	}
	gateways, weight, weighted := strings.Cut(strings.TrimSpace(string(b)), " ")
	n, err := strconv.Atoi(gateways)
	f := Fleet{Gateways: n}
	if weighted && err == nil {
		f.Weight, err = strconv.Atoi(weight)
	} else if n > 0 {
		f.Weight = schemas.EvenWeight(n)
	}
	if err != nil || n < 1 || n > maxFleet || f.Weight < 1 || f.Weight > schemas.WholeWeight {
		return Fleet{}, fmt.Errorf("read the last known fleet: %s holds %.40q, want a number of gateways and the millionths of this one", file, b)
	}
	return f, nil
}

// writeFleet keeps fleet in file. A crash leaves the old file or the new one, nothing between.
func writeFleet(file string, fleet Fleet) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), ".fleet-*")
	if err != nil {
		return fmt.Errorf("keep the last known fleet: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("keep the last known fleet: %w", errors.Join(err, os.Remove(f.Name())))
		}
	}()
	_, err = fmt.Fprintf(f, "%d %d\n", fleet.Gateways, fleet.Weight)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

// keepFleet writes each change down, beside the loop that applies updates, which no disk may hold up.
func (f *Feed) keepFleet(ctx context.Context, news <-chan Fleet) {
	if f.cfg.FleetFile == "" {
		<-ctx.Done() // news are replaced in the channel
		return
	}
	kept, told := Fleet{}, false
	for {
		select {
		case <-ctx.Done():
			return
		case n := <-news:
			if n == kept {
				continue
			}
			if err := writeFleet(f.cfg.FleetFile, n); err != nil {
				if !told {
					f.log.Warn("a restart while the centre is away will not know the fleet", "err", err)
				}
				told = true
				continue
			}
			kept, told = n, false
		}
	}
}

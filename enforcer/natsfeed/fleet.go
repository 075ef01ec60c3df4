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
)

// maxFleet is more gateways than any fleet has.
const maxFleet = 1 << 20

// ReadFleet is the size of the fleet that a feed kept in file, 0 when it never heard of one. A gateway that starts while the
// centre is away divides every limit by it, so that a fleet that restarts does not admit each limit many times over.
func ReadFleet(file string) (int, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the last known size of the fleet: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 1 || n > maxFleet {
		return 0, fmt.Errorf("read the last known size of the fleet: %s holds %.40q, want a number of gateways", file, b)
	}
	return n, nil
}

// writeFleet keeps n in file. A crash leaves the old file or the new one, nothing between.
func writeFleet(file string, n int) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), ".fleet-*")
	if err != nil {
		return fmt.Errorf("keep the size of the fleet: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("keep the size of the fleet: %w", errors.Join(err, os.Remove(f.Name())))
		}
	}()
	_, err = f.WriteString(strconv.Itoa(n) + "\n")
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

// keepFleet writes each new size down, beside the loop that applies updates, which no disk may hold up.
func (f *Feed) keepFleet(ctx context.Context, sizes <-chan int) {
	if f.cfg.FleetFile == "" {
		<-ctx.Done() // sizes are replaced in the channel
		return
	}
	kept, told := 0, false
	for {
		select {
		case <-ctx.Done():
			return
		case n := <-sizes:
			if n == kept {
				continue
			}
			if err := writeFleet(f.cfg.FleetFile, n); err != nil {
				if !told {
					f.log.Warn("a restart while the centre is away will not know the size of the fleet", "err", err)
				}
				told = true
				continue
			}
			kept, told = n, false
		}
	}
}

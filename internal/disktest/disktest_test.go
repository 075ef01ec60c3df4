package disktest

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestADiskThatIsFullUntilItIsEmptied(t *testing.T) {
	dir, fill, empty := New(t)
	write := func(name string) error {
		return os.WriteFile(filepath.Join(dir, name), make([]byte, 1<<20), 0o600)
	}
	if err := write("before"); err != nil {
		t.Fatal(err)
	}
	fill()
	if err := write("full"); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing to a full disk = %v, want ENOSPC", err)
	}
	empty()
	if err := write("after"); err != nil {
		t.Error(err)
	}
}

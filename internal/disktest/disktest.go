// Package disktest has a disk that tests can fill.
package disktest

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// New is a file system of its own until the test ends, which fill leaves without a free byte until empty. To mount one takes root:
// without, the test is skipped.
func New(t testing.TB) (dir string, fill, empty func()) {
	t.Helper()
	dir, fill, empty, err := Try(t)
	if err != nil {
		t.Skipf("NOT TESTED: no disk of our own to fill: %v", err)
	}
	return dir, fill, empty
}

// Try is New for a test that has more to do. After an error there is only dir, a folder.
func Try(t testing.TB) (dir string, fill, empty func(), err error) {
	t.Helper()
	dir = t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+roomy); err != nil {
		return dir, nil, nil, os.NewSyscallError("mount", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	resize := func(size string) error { return syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, "size="+size) }
	fill = func() {
		if err := os.WriteFile(filepath.Join(dir, "ballast"), []byte{0}, 0o600); err != nil { // a size of 0 would be none
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			var s syscall.Statfs_t
			if err := syscall.Statfs(dir, &s); err != nil {
				t.Fatal(err)
			}
			err := resize(fmt.Sprint((s.Blocks - s.Bfree) * uint64(s.Bsize))) // no when it has grown meanwhile
			if err == nil {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the disk cannot be filled: %v", err)
			}
		}
	}
	empty = func() {
		if err := resize(roomy); err != nil {
			t.Fatal(err)
		}
	}
	return dir, fill, empty, nil
}

const roomy = "16g"

package spool

import (
	"os"
	"syscall"
)

// syncData makes f's content outlive a power cut, its time of change not.
func syncData(f *os.File) error {
	for {
		if err := syscall.Fdatasync(int(f.Fd())); err != syscall.EINTR {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}

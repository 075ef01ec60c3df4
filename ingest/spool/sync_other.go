//go:build !linux

package spool

import "os"

func syncData(f *os.File) error { return f.Sync() }

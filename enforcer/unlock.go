//go:build !amd64 || race

package enforcer

import "sync/atomic"

// release stores v at p, after everything that was stored before.
func release(p *atomic.Uint32, v uint32) { p.Store(v) }

//go:build amd64 && !race

package enforcer

import "sync/atomic"

// release stores v at p, after everything that was stored before. On amd64 an ordinary store does that; sync/atomic would make
// it a locked exchange, which waits for the whole store buffer (a sixth of a check).
//
//go:noescape
func release(p *atomic.Uint32, v uint32)

//go:build amd64 && !race

package enforcer

import (
	"sync/atomic"
	"unsafe"
)

// release stores v at p, after everything that was stored before. On amd64 an ordinary store does that, and the compiler moves
// none across the call of a function that is not inlined; sync/atomic would make it a locked exchange, which waits for the whole
// store buffer (a sixth of a check).
//
//go:noinline
func release(p *atomic.Uint32, v uint32) { *(*uint32)(unsafe.Pointer(p)) = v }

package enforcer

import "unsafe"

// procPin and procUnpin name the P that runs us, which picks the stripe of a pool. The runtime keeps both reachable under these
// names (go.dev/issue/67401). They cost 2 ns. Without them a stripe could only be chosen by key, and one hot key would then make
// one contended line of the guard as well; or through a sync.Pool, at five times the price.
//
//go:linkname procPin runtime.procPin
func procPin() int

//go:linkname procUnpin runtime.procUnpin
func procUnpin()

// procyield spends so many PAUSE instructions, or what the processor has in their stead. It stays reachable as well.
//
//go:linkname procyield runtime.procyield
func procyield(cycles uint32)

// memhash is the keyed hash under hash/maphash (AES where there is AES), without the wrappers, which cost as much as the hash of
// a key. It stays reachable for the same reason.
//
//go:linkname memhash runtime.memhash
//go:noescape
func memhash(p unsafe.Pointer, seed, size uintptr) uintptr

var _ [8]byte = [unsafe.Sizeof(uintptr(0))]byte{} // half a fingerprint would not do

func hashString(seed uint64, s string) uint64 {
	return uint64(memhash(unsafe.Pointer(unsafe.StringData(s)), uintptr(seed), uintptr(len(s))))
}

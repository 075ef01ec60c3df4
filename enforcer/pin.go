package enforcer

import _ "unsafe" // for linkname

// procPin and procUnpin name the P that runs us, which picks the stripe of a pool. The runtime keeps both reachable under these
// names (go.dev/issue/67401). They cost 2 ns. Without them a stripe could only be chosen by key, and one hot key would then make
// one contended line of the guard as well; or through a sync.Pool, at five times the price.
//
//go:linkname procPin runtime.procPin
func procPin() int

//go:linkname procUnpin runtime.procUnpin
func procUnpin()

//go:build amd64 && !race

#include "textflag.h"

// func release(p *atomic.Uint32, v uint32)
TEXT ·release(SB), NOSPLIT, $0-12
	MOVQ p+0(FP), AX
	MOVL v+8(FP), CX
	MOVL CX, (AX)
	RET

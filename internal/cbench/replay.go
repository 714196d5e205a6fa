//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package cbench

// #include "cbench.h"
import "C"

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// The C side reads the Go slice as it lies.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(PoolOp{})-unsafe.Sizeof(C.cbench_op{})]
	_ = [1]struct{}{}[unsafe.Offsetof(PoolOp{}.Block)-unsafe.Offsetof(C.cbench_op{}.block)]
	_ = [1]struct{}{}[unsafe.Offsetof(PoolOp{}.Kind)-unsafe.Offsetof(C.cbench_op{}.kind)]
)

// PoolReplay does the operations through a memory pool of the driver's,
// made for it, on s: cuMemAllocFromPoolAsync and cuMemFreeAsync. The pool keeps
// at most so many free bytes when s was waited for. Every block is freed before
// it is allocated again; what the operations leave is freed at the end.
func (l *Library) PoolReplay(c driver.Context, d driver.Device, s driver.Stream, ops []PoolOp, keep uint64) (PoolReplayed, error) {
	blocks := uint64(0)
	for _, op := range ops {
		if op.Kind == PoolAlloc {
			blocks = max(blocks, uint64(op.Block)+1)
		}
	}
	for i, op := range ops {
		if op.Kind == PoolFree && uint64(op.Block) >= blocks {
			return PoolReplayed{}, fmt.Errorf("operation %d frees block %d, which none allocates", i, op.Block)
		}
	}
	r := C.cbench_replay(l.c, C.uintptr_t(c), C.int32_t(d), C.uintptr_t(s),
		(*C.cbench_op)(unsafe.Pointer(unsafe.SliceData(ops))), C.uint64_t(len(ops)), C.uint64_t(blocks), C.uint64_t(keep))
	if r.result != 0 {
		return PoolReplayed{}, fmt.Errorf("replaying through the driver's pool, operation %d of %d: %v", uint64(r.at), len(ops), driver.Result(r.result))
	}
	return PoolReplayed{time.Duration(r.ns), time.Duration(r.waited), uint64(r.reserved)}, nil
}

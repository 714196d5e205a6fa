//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func (t *table) MemRangeGetAttributes(c driver.Context, a []driver.RangeAttribute, counts []uint64, p driver.Ptr, n uint64, out []int32) driver.Result {
	room := uint64(len(out))
	for _, count := range counts {
		if count > room {
			return driver.InvalidValue
		}
		room -= count
	}
	if len(a) != len(counts) {
		return driver.InvalidValue
	}
	return driver.Result(C.cuvmm_MemRangeGetAttributes(t.c, C.uintptr_t(c), (*C.uint32_t)(unsafe.SliceData(a)), (*C.uint64_t)(unsafe.SliceData(counts)), C.uint64_t(len(a)),
		C.uint64_t(p), C.uint64_t(n), (*C.int32_t)(unsafe.SliceData(out))))
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_MemcpyHtoDAsync
#cgo nocallback cuvmm_MemcpyHtoDAsync
#cgo noescape cuvmm_MemcpyDtoHAsync
#cgo nocallback cuvmm_MemcpyDtoHAsync
#cgo noescape cuvmm_MemcpyDtoDAsync
#cgo nocallback cuvmm_MemcpyDtoDAsync
#cgo noescape cuvmm_MemsetD8Async
#cgo nocallback cuvmm_MemsetD8Async
#cgo noescape cuvmm_MemsetD32Async
#cgo nocallback cuvmm_MemsetD32Async
#cgo noescape cuvmm_MemcpyHtoD
#cgo nocallback cuvmm_MemcpyHtoD
#cgo noescape cuvmm_MemcpyDtoH
#cgo nocallback cuvmm_MemcpyDtoH
#cgo noescape cuvmm_MemcpyDtoD
#cgo nocallback cuvmm_MemcpyDtoD
#cgo noescape cuvmm_MemsetD8
#cgo nocallback cuvmm_MemsetD8
#include "csrc.h"
*/
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func (t *table) MemcpyHtoDAsync(c driver.Context, dst driver.Ptr, src unsafe.Pointer, n uint64, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemcpyHtoDAsync(t.c, C.uintptr_t(c), C.uint64_t(dst), src, C.uint64_t(n), C.uintptr_t(s)))
}

func (t *table) MemcpyDtoHAsync(c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemcpyDtoHAsync(t.c, C.uintptr_t(c), dst, C.uint64_t(src), C.uint64_t(n), C.uintptr_t(s)))
}

func (t *table) MemcpyDtoDAsync(c driver.Context, dst, src driver.Ptr, n uint64, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemcpyDtoDAsync(t.c, C.uintptr_t(c), C.uint64_t(dst), C.uint64_t(src), C.uint64_t(n), C.uintptr_t(s)))
}

func (t *table) MemsetD8Async(c driver.Context, dst driver.Ptr, v uint8, n uint64, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemsetD8Async(t.c, C.uintptr_t(c), C.uint64_t(dst), C.uint8_t(v), C.uint64_t(n), C.uintptr_t(s)))
}

func (t *table) MemsetD32Async(c driver.Context, dst driver.Ptr, v uint32, words uint64, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemsetD32Async(t.c, C.uintptr_t(c), C.uint64_t(dst), C.uint32_t(v), C.uint64_t(words), C.uintptr_t(s)))
}

func (f *foreign) MemcpyHtoD(c driver.Context, dst driver.Ptr, src unsafe.Pointer, n uint64) driver.Result {
	return driver.Result(C.cuvmm_MemcpyHtoD(f.c, C.uintptr_t(c), C.uint64_t(dst), src, C.uint64_t(n)))
}

func (f *foreign) MemcpyDtoH(c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64) driver.Result {
	return driver.Result(C.cuvmm_MemcpyDtoH(f.c, C.uintptr_t(c), dst, C.uint64_t(src), C.uint64_t(n)))
}

func (f *foreign) MemcpyDtoD(c driver.Context, dst, src driver.Ptr, n uint64) driver.Result {
	return driver.Result(C.cuvmm_MemcpyDtoD(f.c, C.uintptr_t(c), C.uint64_t(dst), C.uint64_t(src), C.uint64_t(n)))
}

func (f *foreign) MemsetD8(c driver.Context, dst driver.Ptr, v uint8, n uint64) driver.Result {
	return driver.Result(C.cuvmm_MemsetD8(f.c, C.uintptr_t(c), C.uint64_t(dst), C.uint8_t(v), C.uint64_t(n)))
}

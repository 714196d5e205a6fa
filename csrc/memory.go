//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_MemAlloc
#cgo nocallback cuvmm_MemAlloc
#cgo noescape cuvmm_MemFree
#cgo nocallback cuvmm_MemFree
#cgo noescape cuvmm_MemAllocAsync
#cgo nocallback cuvmm_MemAllocAsync
#cgo noescape cuvmm_MemFreeAsync
#cgo nocallback cuvmm_MemFreeAsync
#cgo noescape cuvmm_MemGetInfo
#cgo nocallback cuvmm_MemGetInfo
#cgo noescape cuvmm_MemHostAlloc
#cgo nocallback cuvmm_MemHostAlloc
#cgo noescape cuvmm_MemFreeHost
#cgo nocallback cuvmm_MemFreeHost
#cgo noescape cuvmm_MemHostRegister
#cgo nocallback cuvmm_MemHostRegister
#cgo noescape cuvmm_MemHostUnregister
#cgo nocallback cuvmm_MemHostUnregister
#cgo noescape cuvmm_MemHostGetDevicePointer
#cgo nocallback cuvmm_MemHostGetDevicePointer
#cgo noescape cuvmm_PointerGetAttribute
#cgo nocallback cuvmm_PointerGetAttribute
#include "csrc.h"
*/
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func (t *table) MemAlloc(c driver.Context, n uint64) (driver.Ptr, driver.Result) {
	v := C.cuvmm_MemAlloc(t.c, C.uintptr_t(c), C.uint64_t(n))
	return driver.Ptr(v.value), driver.Result(v.result)
}

func (t *table) MemFree(c driver.Context, p driver.Ptr) driver.Result {
	return driver.Result(C.cuvmm_MemFree(t.c, C.uintptr_t(c), C.uint64_t(p)))
}

func (t *table) MemAllocAsync(c driver.Context, n uint64, s driver.Stream) (driver.Ptr, driver.Result) {
	v := C.cuvmm_MemAllocAsync(t.c, C.uintptr_t(c), C.uint64_t(n), C.uintptr_t(s))
	return driver.Ptr(v.value), driver.Result(v.result)
}

func (t *table) MemFreeAsync(c driver.Context, p driver.Ptr, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemFreeAsync(t.c, C.uintptr_t(c), C.uint64_t(p), C.uintptr_t(s)))
}

func (t *table) MemGetInfo(c driver.Context) (free, total uint64, r driver.Result) {
	v := C.cuvmm_MemGetInfo(t.c, C.uintptr_t(c))
	return uint64(v.first), uint64(v.second), driver.Result(v.result)
}

func (t *table) MemHostAlloc(c driver.Context, n uint64, flags driver.HostAllocFlags) (unsafe.Pointer, driver.Result) {
	v := C.cuvmm_MemHostAlloc(t.c, C.uintptr_t(c), C.uint64_t(n), C.uint32_t(flags))
	return v.value, driver.Result(v.result)
}

func (t *table) MemFreeHost(c driver.Context, p unsafe.Pointer) driver.Result {
	return driver.Result(C.cuvmm_MemFreeHost(t.c, C.uintptr_t(c), p))
}

func (t *table) MemHostRegister(c driver.Context, p unsafe.Pointer, n uint64, flags driver.HostRegisterFlags) driver.Result {
	return driver.Result(C.cuvmm_MemHostRegister(t.c, C.uintptr_t(c), p, C.uint64_t(n), C.uint32_t(flags)))
}

func (t *table) MemHostUnregister(c driver.Context, p unsafe.Pointer) driver.Result {
	return driver.Result(C.cuvmm_MemHostUnregister(t.c, C.uintptr_t(c), p))
}

func (t *table) MemHostGetDevicePointer(c driver.Context, p unsafe.Pointer) (driver.Ptr, driver.Result) {
	v := C.cuvmm_MemHostGetDevicePointer(t.c, C.uintptr_t(c), p)
	return driver.Ptr(v.value), driver.Result(v.result)
}

func (t *table) PointerGetAttribute(c driver.Context, a driver.PointerAttribute, p driver.Ptr) (uint64, driver.Result) {
	v := C.cuvmm_PointerGetAttribute(t.c, C.uintptr_t(c), C.int32_t(a), C.uint64_t(p))
	return uint64(v.value), driver.Result(v.result)
}

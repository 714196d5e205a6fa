//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_MemAddressReserve
#cgo nocallback cuvmm_MemAddressReserve
#cgo noescape cuvmm_MemAddressFree
#cgo nocallback cuvmm_MemAddressFree
#cgo noescape cuvmm_MemCreate
#cgo nocallback cuvmm_MemCreate
#cgo noescape cuvmm_MemRelease
#cgo nocallback cuvmm_MemRelease
#cgo noescape cuvmm_MemMap
#cgo nocallback cuvmm_MemMap
#cgo noescape cuvmm_MemUnmap
#cgo nocallback cuvmm_MemUnmap
#cgo noescape cuvmm_MemSetAccess
#cgo nocallback cuvmm_MemSetAccess
#cgo noescape cuvmm_MemGetAccess
#cgo nocallback cuvmm_MemGetAccess
#cgo noescape cuvmm_MemGetAllocationGranularity
#cgo nocallback cuvmm_MemGetAllocationGranularity
#cgo noescape cuvmm_MemGetAllocationPropertiesFromHandle
#cgo nocallback cuvmm_MemGetAllocationPropertiesFromHandle
#cgo noescape cuvmm_MemRetainAllocationHandle
#cgo nocallback cuvmm_MemRetainAllocationHandle
#cgo noescape cuvmm_MemExportToShareableHandle
#cgo nocallback cuvmm_MemExportToShareableHandle
#cgo noescape cuvmm_MemImportFromShareableHandle
#cgo nocallback cuvmm_MemImportFromShareableHandle
#cgo noescape cuvmm_MemGetHandleForAddressRange
#cgo nocallback cuvmm_MemGetHandleForAddressRange
#include "csrc.h"
*/
import "C"

import (
	"encoding/binary"
	"syscall"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// The structs below are the same bytes on both sides: the Go side's layout is
// pinned by a test of internal/driver, the C side's by api.h.

func cProp(p *driver.AllocationProp) *C.cuvmm_prop { return (*C.cuvmm_prop)(unsafe.Pointer(p)) }

func (t *table) MemAddressReserve(size, align uint64, hint driver.Ptr) (driver.Ptr, driver.Result) {
	v := C.cuvmm_MemAddressReserve(t.c, C.uint64_t(size), C.uint64_t(align), C.uint64_t(hint))
	return driver.Ptr(v.value), driver.Result(v.result)
}

func (t *table) MemAddressFree(p driver.Ptr, size uint64) driver.Result {
	return driver.Result(C.cuvmm_MemAddressFree(t.c, C.uint64_t(p), C.uint64_t(size)))
}

func (t *table) MemCreate(size uint64, prop driver.AllocationProp) (driver.MemHandle, driver.Result) {
	v := C.cuvmm_MemCreate(t.c, C.uint64_t(size), cProp(&prop))
	return driver.MemHandle(v.value), driver.Result(v.result)
}

func (t *table) MemRelease(h driver.MemHandle) driver.Result {
	return driver.Result(C.cuvmm_MemRelease(t.c, C.uint64_t(h)))
}

func (t *table) MemMap(p driver.Ptr, size, offset uint64, h driver.MemHandle) driver.Result {
	return driver.Result(C.cuvmm_MemMap(t.c, C.uint64_t(p), C.uint64_t(size), C.uint64_t(offset), C.uint64_t(h)))
}

func (t *table) MemUnmap(p driver.Ptr, size uint64) driver.Result {
	return driver.Result(C.cuvmm_MemUnmap(t.c, C.uint64_t(p), C.uint64_t(size)))
}

func (t *table) MemSetAccess(p driver.Ptr, size uint64, desc []driver.AccessDesc) driver.Result {
	return driver.Result(C.cuvmm_MemSetAccess(t.c, C.uint64_t(p), C.uint64_t(size),
		(*C.cuvmm_access)(unsafe.Pointer(unsafe.SliceData(desc))), C.uint64_t(len(desc))))
}

func (t *table) MemGetAccess(l driver.Location, p driver.Ptr) (driver.AccessFlags, driver.Result) {
	v := C.cuvmm_MemGetAccess(t.c, (*C.cuvmm_location)(unsafe.Pointer(&l)), C.uint64_t(p))
	return driver.AccessFlags(v.value), driver.Result(v.result)
}

func (t *table) MemGetAllocationGranularity(prop driver.AllocationProp, g driver.GranularityOption) (uint64, driver.Result) {
	v := C.cuvmm_MemGetAllocationGranularity(t.c, cProp(&prop), C.uint32_t(g))
	return uint64(v.value), driver.Result(v.result)
}

func (t *table) MemGetAllocationPropertiesFromHandle(h driver.MemHandle) (driver.AllocationProp, driver.Result) {
	v := C.cuvmm_MemGetAllocationPropertiesFromHandle(t.c, C.uint64_t(h))
	return *(*driver.AllocationProp)(unsafe.Pointer(&v.value)), driver.Result(v.result)
}

func (t *table) MemRetainAllocationHandle(p driver.Ptr) (driver.MemHandle, driver.Result) {
	v := C.cuvmm_MemRetainAllocationHandle(t.c, C.uint64_t(p))
	return driver.MemHandle(v.value), driver.Result(v.result)
}

// MemExportToShareableHandle keeps a concurrent fork and exec from inheriting
// the new descriptor: not every driver promises close-on-exec.
func (t *table) MemExportToShareableHandle(h driver.MemHandle, kind driver.HandleTypes) (driver.ShareableHandle, driver.Result) {
	if kind == driver.HandlePosixFD {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
	}
	v := C.cuvmm_MemExportToShareableHandle(t.c, C.uint64_t(h), C.uint32_t(kind))
	s, r := *(*driver.ShareableHandle)(unsafe.Pointer(&v.value)), driver.Result(v.result)
	if kind == driver.HandlePosixFD && r == driver.Success {
		syscall.CloseOnExec(int(int32(binary.NativeEndian.Uint32(s[:]))))
	}
	return s, r
}

func (t *table) MemImportFromShareableHandle(s driver.ShareableHandle, kind driver.HandleTypes) (driver.MemHandle, driver.Result) {
	v := C.cuvmm_MemImportFromShareableHandle(t.c, (*C.cuvmm_shareable)(unsafe.Pointer(&s)), C.uint32_t(kind))
	return driver.MemHandle(v.value), driver.Result(v.result)
}

// MemGetHandleForAddressRange guards its descriptor as
// MemExportToShareableHandle does.
func (t *table) MemGetHandleForAddressRange(c driver.Context, p driver.Ptr, size uint64) (int32, driver.Result) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	v := C.cuvmm_MemGetHandleForAddressRange(t.c, C.uintptr_t(c), C.uint64_t(p), C.uint64_t(size))
	fd, r := int32(v.value), driver.Result(v.result)
	if r == driver.Success {
		syscall.CloseOnExec(int(fd))
	}
	return fd, r
}

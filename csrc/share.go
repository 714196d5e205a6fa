//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import (
	"encoding/binary"
	"syscall"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

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
func (t *table) MemGetHandleForAddressRange(c driver.Context, p driver.Ptr, size uint64, flags driver.RangeHandleFlags) (int32, driver.Result) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	v := C.cuvmm_MemGetHandleForAddressRange(t.c, C.uintptr_t(c), C.uint64_t(p), C.uint64_t(size), C.uint64_t(flags))
	fd, r := int32(v.value), driver.Result(v.result)
	if r == driver.Success {
		syscall.CloseOnExec(int(fd))
	}
	return fd, r
}

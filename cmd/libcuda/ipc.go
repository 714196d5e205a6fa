//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Legacy IPC: handles of cuMemAlloc's memory, which are bytes that any process of the
// machine can open.

//export cuvmm_ipc_get
func cuvmm_ipc_get(handle *C.cuvmm_shareable, p C.uint64_t) C.int32_t {
	if handle == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, _, r := current()
	if r != driver.Success {
		return code(r)
	}
	s, r := d.(driver.Hosted).IPCHandle(driver.Ptr(p))
	if r == driver.Success {
		*(*driver.ShareableHandle)(unsafe.Pointer(handle)) = s
	}
	return code(r)
}

//export cuvmm_ipc_open
func cuvmm_ipc_open(p *C.uint64_t, handle *C.cuvmm_shareable, flags C.uint32_t) C.int32_t {
	const enablePeerAccess = 1
	if p == nil || flags != enablePeerAccess {
		return C.int32_t(driver.InvalidValue)
	}
	d, _, r := current()
	if r != driver.Success {
		return code(r)
	}
	at, r := d.(driver.Hosted).IPCOpen(*(*driver.ShareableHandle)(unsafe.Pointer(handle)))
	if r == driver.Success {
		*p = C.uint64_t(at)
	}
	return code(r)
}

//export cuvmm_ipc_close
func cuvmm_ipc_close(p C.uint64_t) C.int32_t {
	d, _, r := current()
	if r == driver.Success {
		r = d.(driver.Hosted).IPCClose(driver.Ptr(p))
	}
	return code(r)
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_MulticastCreate
#cgo nocallback cuvmm_MulticastCreate
#cgo noescape cuvmm_MulticastAddDevice
#cgo nocallback cuvmm_MulticastAddDevice
#cgo noescape cuvmm_MulticastBindMem
#cgo nocallback cuvmm_MulticastBindMem
#cgo noescape cuvmm_MulticastBindMemV1
#cgo nocallback cuvmm_MulticastBindMemV1
#cgo noescape cuvmm_MulticastBindAddr
#cgo nocallback cuvmm_MulticastBindAddr
#cgo noescape cuvmm_MulticastBindAddrV1
#cgo nocallback cuvmm_MulticastBindAddrV1
#cgo noescape cuvmm_MulticastUnbind
#cgo nocallback cuvmm_MulticastUnbind
#cgo noescape cuvmm_MulticastGetGranularity
#cgo nocallback cuvmm_MulticastGetGranularity
#include "csrc.h"
*/
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func cMulticast(p *driver.MulticastProp) *C.cuvmm_multicast {
	return (*C.cuvmm_multicast)(unsafe.Pointer(p))
}

// MulticastCreate reaches the driver only where that was asked for with
// [Options.Multicast]: an object that goes wrong can take the fabric of a whole
// machine along.
func (t *table) MulticastCreate(p driver.MulticastProp) (driver.MemHandle, driver.Result) {
	if !t.multicast.Load() {
		return 0, driver.Withheld
	}
	v := C.cuvmm_MulticastCreate(t.c, cMulticast(&p))
	return driver.MemHandle(v.value), driver.Result(v.result)
}

func (t *table) MulticastAddDevice(mc driver.MemHandle, d driver.Device) driver.Result {
	return driver.Result(C.cuvmm_MulticastAddDevice(t.c, C.uint64_t(mc), C.int32_t(d)))
}

func (t *table) MulticastBindMem(mc driver.MemHandle, d driver.Device, mcOffset uint64, h driver.MemHandle, offset, size uint64) driver.Result {
	return driver.Result(C.cuvmm_MulticastBindMem(t.c, C.uint64_t(mc), C.int32_t(d), C.uint64_t(mcOffset), C.uint64_t(h), C.uint64_t(offset), C.uint64_t(size)))
}

func (t *table) MulticastBindMemV1(mc driver.MemHandle, mcOffset uint64, h driver.MemHandle, offset, size uint64) driver.Result {
	return driver.Result(C.cuvmm_MulticastBindMemV1(t.c, C.uint64_t(mc), C.uint64_t(mcOffset), C.uint64_t(h), C.uint64_t(offset), C.uint64_t(size)))
}

func (t *table) MulticastBindAddr(mc driver.MemHandle, d driver.Device, mcOffset uint64, p driver.Ptr, size uint64) driver.Result {
	return driver.Result(C.cuvmm_MulticastBindAddr(t.c, C.uint64_t(mc), C.int32_t(d), C.uint64_t(mcOffset), C.uint64_t(p), C.uint64_t(size)))
}

func (t *table) MulticastBindAddrV1(mc driver.MemHandle, mcOffset uint64, p driver.Ptr, size uint64) driver.Result {
	return driver.Result(C.cuvmm_MulticastBindAddrV1(t.c, C.uint64_t(mc), C.uint64_t(mcOffset), C.uint64_t(p), C.uint64_t(size)))
}

func (t *table) MulticastUnbind(mc driver.MemHandle, d driver.Device, mcOffset, size uint64) driver.Result {
	return driver.Result(C.cuvmm_MulticastUnbind(t.c, C.uint64_t(mc), C.int32_t(d), C.uint64_t(mcOffset), C.uint64_t(size)))
}

func (t *table) MulticastGetGranularity(p driver.MulticastProp, g driver.GranularityOption) (uint64, driver.Result) {
	v := C.cuvmm_MulticastGetGranularity(t.c, cMulticast(&p), C.uint32_t(g))
	return uint64(v.value), driver.Result(v.result)
}

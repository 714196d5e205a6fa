//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_DevicePrimaryCtxRetain
#cgo nocallback cuvmm_DevicePrimaryCtxRetain
#cgo noescape cuvmm_DevicePrimaryCtxRelease
#cgo nocallback cuvmm_DevicePrimaryCtxRelease
#cgo noescape cuvmm_DevicePrimaryCtxGetState
#cgo nocallback cuvmm_DevicePrimaryCtxGetState
#cgo noescape cuvmm_CtxCreate
#cgo nocallback cuvmm_CtxCreate
#cgo noescape cuvmm_CtxDestroy
#cgo nocallback cuvmm_CtxDestroy
#cgo noescape cuvmm_CtxGetCurrent
#cgo nocallback cuvmm_CtxGetCurrent
#cgo noescape cuvmm_CtxSetCurrent
#cgo nocallback cuvmm_CtxSetCurrent
#cgo noescape cuvmm_CtxGetDevice
#cgo nocallback cuvmm_CtxGetDevice
#cgo noescape cuvmm_CtxSynchronize
#cgo nocallback cuvmm_CtxSynchronize
#include "csrc.h"
*/
import "C"

import "github.com/cuvmm/cuvmm/internal/driver"

func (t *table) DevicePrimaryCtxRetain(dev driver.Device) (driver.Context, driver.Result) {
	v := C.cuvmm_DevicePrimaryCtxRetain(t.c, C.int32_t(dev))
	return driver.Context(v.value), driver.Result(v.result)
}

func (t *table) DevicePrimaryCtxRelease(dev driver.Device) driver.Result {
	return driver.Result(C.cuvmm_DevicePrimaryCtxRelease(t.c, C.int32_t(dev)))
}

func (t *table) DevicePrimaryCtxGetState(dev driver.Device) (flags uint32, active bool, r driver.Result) {
	v := C.cuvmm_DevicePrimaryCtxGetState(t.c, C.int32_t(dev))
	return uint32(v.first), v.second != 0, driver.Result(v.result)
}

func (t *table) CtxCreate(flags uint32, dev driver.Device) (driver.Context, driver.Result) {
	v := C.cuvmm_CtxCreate(t.c, C.uint32_t(flags), C.int32_t(dev))
	return driver.Context(v.value), driver.Result(v.result)
}

func (t *table) CtxDestroy(c driver.Context) driver.Result {
	return driver.Result(C.cuvmm_CtxDestroy(t.c, C.uintptr_t(c)))
}

func (t *table) CtxGetCurrent() (driver.Context, driver.Result) {
	v := C.cuvmm_CtxGetCurrent(t.c)
	return driver.Context(v.value), driver.Result(v.result)
}

func (t *table) CtxGetDevice(c driver.Context) (driver.Device, driver.Result) {
	v := C.cuvmm_CtxGetDevice(t.c, C.uintptr_t(c))
	return driver.Device(v.value), driver.Result(v.result)
}

func (f *foreign) CtxSetCurrent(c driver.Context) driver.Result {
	return driver.Result(C.cuvmm_CtxSetCurrent(f.c, C.uintptr_t(c)))
}

func (f *foreign) CtxSynchronize(c driver.Context) driver.Result {
	return driver.Result(C.cuvmm_CtxSynchronize(f.c, C.uintptr_t(c)))
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_Init
#cgo nocallback cuvmm_Init
#cgo noescape cuvmm_DriverGetVersion
#cgo nocallback cuvmm_DriverGetVersion
#cgo noescape cuvmm_DeviceGetCount
#cgo nocallback cuvmm_DeviceGetCount
#cgo noescape cuvmm_DeviceGet
#cgo nocallback cuvmm_DeviceGet
#cgo noescape cuvmm_DeviceGetName
#cgo nocallback cuvmm_DeviceGetName
#cgo noescape cuvmm_DeviceGetUUID
#cgo nocallback cuvmm_DeviceGetUUID
#cgo noescape cuvmm_DeviceTotalMem
#cgo nocallback cuvmm_DeviceTotalMem
#cgo noescape cuvmm_DeviceGetAttribute
#cgo nocallback cuvmm_DeviceGetAttribute
#cgo noescape cuvmm_DeviceCanAccessPeer
#cgo nocallback cuvmm_DeviceCanAccessPeer
#include "csrc.h"
*/
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func (t *table) Init() driver.Result { return driver.Result(C.cuvmm_Init(t.c)) }

func (t *table) DriverGetVersion() (int32, driver.Result) {
	v := C.cuvmm_DriverGetVersion(t.c)
	return int32(v.value), driver.Result(v.result)
}

func (t *table) DeviceGetCount() (int32, driver.Result) {
	v := C.cuvmm_DeviceGetCount(t.c)
	return int32(v.value), driver.Result(v.result)
}

func (t *table) DeviceGet(ordinal int32) (driver.Device, driver.Result) {
	v := C.cuvmm_DeviceGet(t.c, C.int32_t(ordinal))
	return driver.Device(v.value), driver.Result(v.result)
}

func (t *table) DeviceGetName(dev driver.Device) (string, driver.Result) {
	v := C.cuvmm_DeviceGetName(t.c, C.int32_t(dev))
	return C.GoString(&v.value[0]), driver.Result(v.result)
}

func (t *table) DeviceGetUUID(dev driver.Device) (driver.UUID, driver.Result) {
	v := C.cuvmm_DeviceGetUUID(t.c, C.int32_t(dev))
	return *(*driver.UUID)(unsafe.Pointer(&v.value)), driver.Result(v.result)
}

func (t *table) DeviceTotalMem(dev driver.Device) (uint64, driver.Result) {
	v := C.cuvmm_DeviceTotalMem(t.c, C.int32_t(dev))
	return uint64(v.value), driver.Result(v.result)
}

func (t *table) DeviceGetAttribute(a driver.DeviceAttribute, dev driver.Device) (int32, driver.Result) {
	v := C.cuvmm_DeviceGetAttribute(t.c, C.int32_t(a), C.int32_t(dev))
	return int32(v.value), driver.Result(v.result)
}

func (t *table) DeviceCanAccessPeer(dev, peer driver.Device) (bool, driver.Result) {
	v := C.cuvmm_DeviceCanAccessPeer(t.c, C.int32_t(dev), C.int32_t(peer))
	return v.value != 0, driver.Result(v.result)
}

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

func (d *Driver) Init() driver.Result { return driver.Result(C.cuvmm_Init(d.c)) }

func (d *Driver) DriverGetVersion() (int32, driver.Result) {
	v := C.cuvmm_DriverGetVersion(d.c)
	return int32(v.value), driver.Result(v.result)
}

func (d *Driver) DeviceGetCount() (int32, driver.Result) {
	v := C.cuvmm_DeviceGetCount(d.c)
	return int32(v.value), driver.Result(v.result)
}

func (d *Driver) DeviceGet(ordinal int32) (driver.Device, driver.Result) {
	v := C.cuvmm_DeviceGet(d.c, C.int32_t(ordinal))
	return driver.Device(v.value), driver.Result(v.result)
}

func (d *Driver) DeviceGetName(dev driver.Device) (string, driver.Result) {
	v := C.cuvmm_DeviceGetName(d.c, C.int32_t(dev))
	return C.GoString(&v.value[0]), driver.Result(v.result)
}

func (d *Driver) DeviceGetUUID(dev driver.Device) (driver.UUID, driver.Result) {
	v := C.cuvmm_DeviceGetUUID(d.c, C.int32_t(dev))
	return *(*driver.UUID)(unsafe.Pointer(&v.value)), driver.Result(v.result)
}

func (d *Driver) DeviceTotalMem(dev driver.Device) (uint64, driver.Result) {
	v := C.cuvmm_DeviceTotalMem(d.c, C.int32_t(dev))
	return uint64(v.value), driver.Result(v.result)
}

func (d *Driver) DeviceGetAttribute(a driver.DeviceAttribute, dev driver.Device) (int32, driver.Result) {
	v := C.cuvmm_DeviceGetAttribute(d.c, C.int32_t(a), C.int32_t(dev))
	return int32(v.value), driver.Result(v.result)
}

func (d *Driver) DeviceCanAccessPeer(dev, peer driver.Device) (bool, driver.Result) {
	v := C.cuvmm_DeviceCanAccessPeer(d.c, C.int32_t(dev), C.int32_t(peer))
	return v.value != 0, driver.Result(v.result)
}

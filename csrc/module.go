//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func (t *table) ModuleLoadData(c driver.Context, image []byte) (driver.Module, driver.Result) {
	v := C.cuvmm_ModuleLoadData(t.c, C.uintptr_t(c), (*C.uint8_t)(unsafe.SliceData(image)), C.uint64_t(len(image)))
	return driver.Module(v.value), driver.Result(v.result)
}

func (t *table) ModuleLoadDataEx(c driver.Context, image, log []byte) (driver.Module, driver.Result) {
	v := C.cuvmm_ModuleLoadDataEx(t.c, C.uintptr_t(c), (*C.uint8_t)(unsafe.SliceData(image)), C.uint64_t(len(image)),
		(*C.char)(unsafe.Pointer(unsafe.SliceData(log))), C.uint64_t(len(log)))
	return driver.Module(v.value), driver.Result(v.result)
}

func (t *table) ModuleGetFunction(c driver.Context, m driver.Module, name string) (driver.Function, driver.Result) {
	v := C.cuvmm_ModuleGetFunction(t.c, C.uintptr_t(c), C.uintptr_t(m),
		(*C.char)(unsafe.Pointer(unsafe.StringData(name))), C.uint64_t(len(name)))
	return driver.Function(v.value), driver.Result(v.result)
}

func (t *table) LaunchKernel(c driver.Context, f driver.Function, l driver.LaunchConfig, params []byte, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_LaunchKernel(t.c, C.uintptr_t(c), C.uintptr_t(f),
		(*C.cuvmm_launch)(unsafe.Pointer(&l)),
		(*C.uint8_t)(unsafe.SliceData(params)), C.uint64_t(len(params)), C.uintptr_t(s)))
}

func (t *table) LaunchKernelEx(c driver.Context, f driver.Function, l driver.LaunchConfig, params []byte, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_LaunchKernelEx(t.c, C.uintptr_t(c), C.uintptr_t(f),
		(*C.cuvmm_launch)(unsafe.Pointer(&l)),
		(*C.uint8_t)(unsafe.SliceData(params)), C.uint64_t(len(params)), C.uintptr_t(s)))
}

func (t *table) ModuleGetGlobal(c driver.Context, m driver.Module, name string) (driver.Ptr, uint64, driver.Result) {
	v := C.cuvmm_ModuleGetGlobal(t.c, C.uintptr_t(c), C.uintptr_t(m),
		(*C.char)(unsafe.Pointer(unsafe.StringData(name))), C.uint64_t(len(name)))
	return driver.Ptr(v.first), uint64(v.second), driver.Result(v.result)
}

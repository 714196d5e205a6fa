//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import "github.com/cuvmm/cuvmm/internal/driver"

func (t *foreign) CtxCreate(flags uint32, d driver.Device) (driver.Context, driver.Result) {
	v := C.cuvmm_CtxCreate(t.c, C.uint32_t(flags), C.int32_t(d))
	return driver.Context(v.value), driver.Result(v.result)
}

func (t *foreign) ThreadExchangeStreamCaptureMode(m driver.CaptureMode) (driver.CaptureMode, driver.Result) {
	v := C.cuvmm_ThreadExchangeStreamCaptureMode(t.c, C.uint32_t(m))
	return driver.CaptureMode(v.value), driver.Result(v.result)
}

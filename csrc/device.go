//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import "github.com/cuvmm/cuvmm/internal/driver"

func (t *table) DeviceGetName(d driver.Device) (string, driver.Result) {
	v := C.cuvmm_DeviceGetName(t.c, C.int32_t(d))
	return C.GoString(&v.value[0]), driver.Result(v.result)
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func (t *table) LogsDumpToMemory(from driver.LogPosition, text []byte) (driver.LogPosition, uint64, driver.Result) {
	v := C.cuvmm_LogsDumpToMemory(t.c, C.uint32_t(from), (*C.char)(unsafe.Pointer(unsafe.SliceData(text))), C.uint64_t(len(text)))
	return driver.LogPosition(v.first), uint64(v.second), driver.Result(v.result)
}

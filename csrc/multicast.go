//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// MulticastCreate reaches the driver only with [Options.Multicast]: an object
// that goes wrong can take down the fabric of a whole machine.
func (t *table) MulticastCreate(p driver.MulticastProp) (driver.MemHandle, driver.Result) {
	if !t.multicast.Load() {
		return 0, driver.Withheld
	}
	v := C.cuvmm_MulticastCreate(t.c, (*C.cuvmm_multicast)(unsafe.Pointer(&p)))
	return driver.MemHandle(v.value), driver.Result(v.result)
}

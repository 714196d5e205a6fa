//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo && cuvmm_libcuda

package csrc

// #include "csrc.h"
import "C"

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// OpenProcess opens a driver that is linked into the program, by the address of
// its cuGetProcAddress in the second form. Only tests of the software driver's
// exports do that, with the build tag cuvmm_libcuda: calls into C then come back
// to Go.
func OpenProcess(getProcAddress uintptr, version int32) (*Driver, error) {
	lib := C.cuvmm_library{proc: C.uintptr_t(getProcAddress), form: 2, has_init: 1, version: C.int32_t(version)}
	var refused error
	d, _ := newDriver(&lib, func(r Reason, format string, args ...any) (*Driver, Attempt) {
		refused = fmt.Errorf("%v: %s", r, fmt.Sprintf(format, args...))
		return nil, Attempt{}
	})
	if d == nil {
		return nil, refused
	}
	driver.Of(d).(*relaxed).multicast.Store(true)
	return d, nil
}

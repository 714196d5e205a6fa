//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo && cuvmm_fault_hook

package main

// #include "front.h"
import "C"

// cuvmm_fault_hook panics as a fault of the library would, for the test of what follows:
// in the call, or in the background if behind is not 0.
//
//export cuvmm_fault_hook
func cuvmm_fault_hook(behind C.int32_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error {
		if behind != 0 {
			background(func() { panic("a fault for a test") })
			return nil
		}
		panic("a fault for a test")
	})
}

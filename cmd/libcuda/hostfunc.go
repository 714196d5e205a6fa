//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// The stream calls the caller's function on a thread of Go's, and later work of the
// stream waits for it.
//
//export cuvmm_sim_LaunchHostFunc
func cuvmm_sim_LaunchHostFunc(s, f C.uintptr_t, data unsafe.Pointer) C.int32_t {
	if f == 0 {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	return code(d.(driver.Hosted).CallInOrder(0, driver.Stream(s), func() { C.cuvmm_call_host_func(f, data) }))
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo && cuvmm_libcuda

package main

// #include "libcuda.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/csrc"
)

// openLinked opens the exports as csrc opens a driver, within this program.
func openLinked() (*csrc.Driver, error) {
	return csrc.OpenProcess(uintptr(unsafe.Pointer(C.cuGetProcAddress_v2)), int32(cuvmm_driver_version()))
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// A link is begun and ended, and takes nothing: the software driver runs no machine code,
// and has no compiler that makes it.
var links struct {
	sync.Mutex
	last uintptr
	logs map[uintptr][]byte // of the errors, in the caller's memory
}

//export cuvmm_link_create
func cuvmm_link_create(n C.uint32_t, options *C.uint32_t, values *unsafe.Pointer, state *C.uintptr_t) C.int32_t {
	if state == nil || n > longest || n > 0 && (options == nil || values == nil) {
		return C.int32_t(driver.InvalidValue)
	}
	if _, _, r := current(); r != driver.Success {
		return code(r)
	}
	links.Lock()
	defer links.Unlock()
	if links.logs == nil {
		links.logs = map[uintptr][]byte{}
	}
	links.last += 16
	links.logs[links.last] = errorLog(n, options, values)
	*state = C.uintptr_t(links.last)
	return 0
}

// cuvmm_link_add refuses what the caller would link, and a result of that.
//
//export cuvmm_link_add
func cuvmm_link_add(state C.uintptr_t, name *C.char) C.int32_t {
	links.Lock()
	defer links.Unlock()
	log, ok := links.logs[uintptr(state)]
	if !ok {
		return C.int32_t(driver.InvalidHandle)
	}
	what := "nothing was linked"
	if name != nil {
		what = fmt.Sprintf("%q cannot be linked", C.GoString(name))
	}
	explain(log, what+": the software driver has no compiler: load PTX whose kernels are registered by sim.RegisterKernel, or run on a GPU")
	return C.int32_t(driver.JITCompilerNotFound)
}

//export cuvmm_link_destroy
func cuvmm_link_destroy(state C.uintptr_t) C.int32_t {
	links.Lock()
	defer links.Unlock()
	if _, ok := links.logs[uintptr(state)]; !ok {
		return C.int32_t(driver.InvalidHandle)
	}
	delete(links.logs, uintptr(state))
	return 0
}

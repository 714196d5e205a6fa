//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"runtime"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// The stream calls the caller's function on a thread of Go's, and later work of the
// stream waits for it. As with the vendor's driver, the function may make few calls:
// library.c lists them. They find the context by the stream or the event that they name;
// here it is the thread's, and the calls that would show that are refused. data is any
// number that fits a pointer, and Go must not take it for one.
//
//export cuvmm_sim_LaunchHostFunc
func cuvmm_sim_LaunchHostFunc(s, f, data C.uintptr_t) C.int32_t {
	if f == 0 {
		return C.int32_t(driver.InvalidValue)
	}
	return callInOrder(s, func() { C.cuvmm_call_host_func(f, data) })
}

// A callback is told that the work before it succeeded: if that failed, the software driver
// calls nothing. No capture takes one.
//
//export cuvmm_add_callback
func cuvmm_add_callback(s, f, data C.uintptr_t, flags C.uint32_t) C.int32_t {
	if f == 0 || flags != 0 {
		return C.int32_t(driver.InvalidValue)
	}
	if d, r := opened(); r == driver.Success && captures(d, driver.Stream(s)) {
		return C.int32_t(driver.CaptureUnsupported)
	}
	return callInOrder(s, func() { C.cuvmm_call_callback(f, s, 0, data) })
}

// callInOrder has the stream call f on a thread whose context is the stream's.
func callInOrder(s C.uintptr_t, f func()) C.int32_t {
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	c, r := d.StreamGetCtx(0, driver.Stream(s))
	if r != driver.Success {
		return code(r)
	}
	return code(d.(driver.Hosted).CallInOrder(0, driver.Stream(s), func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		cuvmm_new_thread()
		if d.CtxSetCurrent(c) == driver.Success { // or it is destroyed, and every call fails
			defer cuvmm_new_thread()
		}
		f()
	}))
}

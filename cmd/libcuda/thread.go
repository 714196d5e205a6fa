//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// stacks holds each thread's stack of contexts, if it is not empty. The software driver
// knows only the top, as the thread's current context.
var stacks struct {
	sync.Mutex
	of map[int][]driver.Context
}

// withStack changes the calling thread's stack and makes its top the current
// context.
func withStack(change func(d driver.Foreign, stack []driver.Context) ([]driver.Context, driver.Result)) C.int32_t {
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	stacks.Lock()
	defer stacks.Unlock()
	id := host.ThreadID()
	stack, r := change(d, slices.Clone(stacks.of[id]))
	if r != driver.Success {
		return code(r)
	}
	if stacks.of == nil {
		stacks.of = map[int][]driver.Context{}
	}
	stacks.of[id] = stack
	if len(stack) == 0 {
		delete(stacks.of, id)
		return code(d.CtxSetCurrent(0))
	}
	// A context that was destroyed stays on the stack, and calls in it fail.
	if r := d.CtxSetCurrent(stack[len(stack)-1]); r != driver.Success {
		return code(d.CtxSetCurrent(0))
	}
	return 0
}

// valid returns Success if the context exists.
func valid(d driver.Foreign, c driver.Context) driver.Result {
	if c == 0 {
		return driver.InvalidContext
	}
	return d.CtxSetCurrent(c)
}

//export cuvmm_new_thread
func cuvmm_new_thread() {
	stacks.Lock()
	delete(stacks.of, host.ThreadID())
	stacks.Unlock()
	if d, r := opened(); r == driver.Success {
		d.(driver.Hosted).NewThread()
	}
}

// The vendor's driver replaces the top; without a context it pops it.
//
//export cuvmm_sim_CtxSetCurrent
func cuvmm_sim_CtxSetCurrent(c C.uintptr_t) C.int32_t {
	return withStack(func(d driver.Foreign, stack []driver.Context) ([]driver.Context, driver.Result) {
		under := stack[:max(0, len(stack)-1)]
		if c == 0 {
			return under, driver.Success
		}
		r := valid(d, driver.Context(c))
		return append(under, driver.Context(c)), r
	})
}

//export cuvmm_push_context
func cuvmm_push_context(c C.uintptr_t) C.int32_t { return push(driver.Context(c)) }

func push(c driver.Context) C.int32_t {
	return withStack(func(d driver.Foreign, stack []driver.Context) ([]driver.Context, driver.Result) {
		return append(stack, c), valid(d, c)
	})
}

//export cuvmm_pop_context
func cuvmm_pop_context(c *C.uintptr_t) C.int32_t {
	return withStack(func(_ driver.Foreign, stack []driver.Context) ([]driver.Context, driver.Result) {
		if len(stack) == 0 {
			return nil, driver.InvalidContext
		}
		if c != nil {
			*c = C.uintptr_t(stack[len(stack)-1])
		}
		return stack[:len(stack)-1], driver.Success
	})
}

//export cuvmm_sim_CtxCreate
func cuvmm_sim_CtxCreate(made *C.uintptr_t, flags C.uint32_t, dev C.int32_t) C.int32_t {
	if made == nil {
		return C.int32_t(driver.InvalidValue)
	}
	return withStack(func(d driver.Foreign, stack []driver.Context) ([]driver.Context, driver.Result) {
		c, r := d.CtxCreate(uint32(flags), driver.Device(dev))
		if r != driver.Success {
			return nil, r
		}
		*made = C.uintptr_t(c)
		return append(stack, c), r
	})
}

// Destroying the thread's current context pops it.
//
//export cuvmm_sim_CtxDestroy
func cuvmm_sim_CtxDestroy(c C.uintptr_t) C.int32_t {
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	// It waits for the context's work, without the lock, so that other threads go on.
	if r := d.CtxDestroy(driver.Context(c)); r != driver.Success {
		return code(r)
	}
	return withStack(func(_ driver.Foreign, stack []driver.Context) ([]driver.Context, driver.Result) {
		if n := len(stack); n > 0 && stack[n-1] == driver.Context(c) {
			stack = stack[:n-1]
		}
		return stack, driver.Success
	})
}

//export cuvmm_sim_ThreadExchangeStreamCaptureMode
func cuvmm_sim_ThreadExchangeStreamCaptureMode(m *C.uint32_t) C.int32_t {
	if m == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	before, r := d.ThreadExchangeStreamCaptureMode(driver.CaptureMode(*m))
	if r == driver.Success {
		*m = C.uint32_t(before)
	}
	return code(r)
}

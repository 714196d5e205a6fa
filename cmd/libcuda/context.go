//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"sync"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// set are the limits that programs set and read again. On the software driver they have no
// effect. Handles of contexts are never used twice, so those of destroyed ones only take a
// little memory.
var set struct {
	sync.Mutex
	limits map[limitOf]uint64
}

type limitOf struct {
	context driver.Context
	limit   uint32
}

// The limits of a new context on the device on which the driver was measured: the stack of
// a thread, printf's queue, the heap of malloc, the depth and the number of launches by
// kernels, the bytes that the cache fetches at once, and what of it persists.
var limits = map[uint32]uint64{0: 1 << 10, 1: 1 << 20, 2: 8 << 20, 3: 2, 4: 2048, 5: 64, 6: 0}

// current returns the machine and the calling thread's context.
func current() (driver.Foreign, driver.Context, driver.Result) {
	d, r := opened()
	if r != driver.Success {
		return nil, 0, r
	}
	c, r := d.CtxGetCurrent()
	if r == driver.Success && c == 0 {
		r = driver.InvalidContext
	}
	return d, c, r
}

//export cuvmm_get_limit
func cuvmm_get_limit(value *C.size_t, limit C.uint32_t) C.int32_t {
	if value == nil {
		return C.int32_t(driver.InvalidValue)
	}
	_, c, r := current()
	if r != driver.Success {
		return code(r)
	}
	v, ok := limits[uint32(limit)]
	if !ok {
		return C.int32_t(driver.InvalidValue)
	}
	set.Lock()
	defer set.Unlock()
	if chosen, ok := set.limits[limitOf{c, uint32(limit)}]; ok {
		v = chosen
	}
	*value = C.size_t(v)
	return 0
}

//export cuvmm_set_limit
func cuvmm_set_limit(limit C.uint32_t, value C.size_t) C.int32_t {
	_, c, r := current()
	if r != driver.Success {
		return code(r)
	}
	if _, ok := limits[uint32(limit)]; !ok {
		return C.int32_t(driver.InvalidValue)
	}
	set.Lock()
	defer set.Unlock()
	if set.limits == nil {
		set.limits = map[limitOf]uint64{}
	}
	set.limits[limitOf{c, uint32(limit)}] = uint64(value)
	return 0
}

//export cuvmm_context_flags
func cuvmm_context_flags(flags *C.uint32_t) C.int32_t {
	if flags == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, c, r := current()
	if r == driver.Success {
		*flags = C.uint32_t(d.(driver.Hosted).ContextFlags(c))
	}
	return code(r)
}

//export cuvmm_primary_set_flags
func cuvmm_primary_set_flags(dev C.int32_t, flags C.uint32_t) C.int32_t {
	d, r := opened()
	if r == driver.Success {
		r = d.(driver.Hosted).SetPrimaryFlags(driver.Device(dev), uint32(flags))
	}
	return code(r)
}

//export cuvmm_primary_reset
func cuvmm_primary_reset(dev C.int32_t) C.int32_t {
	d, r := opened()
	if r == driver.Success {
		r = d.(driver.Hosted).ResetPrimary(driver.Device(dev))
	}
	return code(r)
}

//export cuvmm_enable_peer
func cuvmm_enable_peer(peer C.uintptr_t, flags C.uint32_t) C.int32_t {
	if flags != 0 {
		return C.int32_t(driver.InvalidValue)
	}
	return setPeer(peer, true)
}

//export cuvmm_disable_peer
func cuvmm_disable_peer(peer C.uintptr_t) C.int32_t { return setPeer(peer, false) }

func setPeer(peer C.uintptr_t, on bool) C.int32_t {
	d, _, r := current()
	if r == driver.Success {
		r = d.(driver.Hosted).SetPeerAccess(driver.Context(peer), on)
	}
	return code(r)
}

//export cuvmm_host_flags
func cuvmm_host_flags(flags *C.uint32_t, p unsafe.Pointer) C.int32_t {
	if flags == nil || p == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, _, r := current()
	if r != driver.Success {
		return code(r)
	}
	f, ok := d.(driver.Hosted).HostFlags(p)
	if !ok {
		return C.int32_t(driver.InvalidValue)
	}
	*flags = C.uint32_t(f)
	return 0
}

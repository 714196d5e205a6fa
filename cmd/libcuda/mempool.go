//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"structs"
	"sync"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// A memPool has a device and what programs set of it. Its memory is the device's: the
// software driver returns what is freed at once, so there is nothing to keep or to trim.
type memPool struct {
	device driver.Device
	reuse  [3]int32 // of freed memory: by events, when it is done, by added waits
	keep   uint64   // bytes that a pool does not return to the device
}

var memPools struct {
	sync.Mutex
	made    map[uintptr]*memPool
	last    uintptr
	initial map[driver.Device]uintptr // the device's own
	current map[driver.Device]uintptr // the one that cuDeviceSetMemPool has set
}

// newMemPool makes a pool. The handle is no address.
func newMemPool(d driver.Device) uintptr {
	if memPools.made == nil {
		memPools.made, memPools.initial, memPools.current = map[uintptr]*memPool{}, map[driver.Device]uintptr{}, map[driver.Device]uintptr{}
	}
	memPools.last += 16
	memPools.made[memPools.last] = &memPool{device: d, reuse: [3]int32{1, 1, 1}}
	return memPools.last
}

// hasPools returns Success if the device has memory pools.
func hasPools(dev driver.Device) driver.Result {
	d, r := opened()
	if r != driver.Success {
		return r
	}
	has, r := d.DeviceGetAttribute(driver.AttrMemoryPools, dev)
	if r == driver.Success && has == 0 {
		r = driver.NotSupported
	}
	return r
}

// withPool calls f with a pool.
func withPool(pool C.uintptr_t, f func(p *memPool) driver.Result) C.int32_t {
	if _, r := opened(); r != driver.Success {
		return code(r)
	}
	memPools.Lock()
	defer memPools.Unlock()
	p := memPools.made[uintptr(pool)]
	if p == nil {
		return C.int32_t(driver.InvalidValue)
	}
	return code(f(p))
}

//export cuvmm_sim_DeviceGetDefaultMemPool
func cuvmm_sim_DeviceGetDefaultMemPool(pool *C.uintptr_t, d C.int32_t) C.int32_t {
	return devicePool(pool, driver.Device(d), func(initial uintptr) uintptr { return initial })
}

//export cuvmm_current_pool
func cuvmm_current_pool(pool *C.uintptr_t, d C.int32_t) C.int32_t {
	return devicePool(pool, driver.Device(d), func(initial uintptr) uintptr {
		if set := memPools.current[driver.Device(d)]; set != 0 {
			return set
		}
		return initial
	})
}

func devicePool(pool *C.uintptr_t, d driver.Device, choose func(initial uintptr) uintptr) C.int32_t {
	if pool == nil {
		return C.int32_t(driver.InvalidValue)
	}
	if r := hasPools(d); r != driver.Success {
		return code(r)
	}
	memPools.Lock()
	defer memPools.Unlock()
	if memPools.initial[d] == 0 {
		initial := newMemPool(d)
		memPools.initial[d] = initial
	}
	*pool = C.uintptr_t(choose(memPools.initial[d]))
	return 0
}

//export cuvmm_set_pool
func cuvmm_set_pool(d C.int32_t, pool C.uintptr_t) C.int32_t {
	return withPool(pool, func(p *memPool) driver.Result {
		if p.device != driver.Device(d) {
			return driver.InvalidValue
		}
		memPools.current[p.device] = uintptr(pool)
		return driver.Success
	})
}

// poolProps is the beginning of CUmemPoolProps.
type poolProps struct {
	_        structs.HostLayout
	kind     driver.AllocationType
	handles  driver.HandleTypes
	location driver.Location
}

// A pool of the host's memory, or one that processes share, is refused.
//
//export cuvmm_create_pool
func cuvmm_create_pool(pool *C.uintptr_t, props unsafe.Pointer) C.int32_t {
	if pool == nil || props == nil {
		return C.int32_t(driver.InvalidValue)
	}
	p := (*poolProps)(props)
	if p.kind != driver.AllocationPinned {
		return C.int32_t(driver.InvalidValue)
	}
	if p.handles != driver.HandleNone || p.location.Type != driver.LocationDevice {
		return C.int32_t(driver.NotSupported)
	}
	if r := hasPools(driver.Device(p.location.ID)); r != driver.Success {
		return code(r)
	}
	memPools.Lock()
	defer memPools.Unlock()
	*pool = C.uintptr_t(newMemPool(driver.Device(p.location.ID)))
	return 0
}

// What was allocated from the pool stays. A device's own pool cannot be destroyed.
//
//export cuvmm_destroy_pool
func cuvmm_destroy_pool(pool C.uintptr_t) C.int32_t {
	return withPool(pool, func(p *memPool) driver.Result {
		if memPools.initial[p.device] == uintptr(pool) {
			return driver.InvalidValue
		}
		if memPools.current[p.device] == uintptr(pool) {
			delete(memPools.current, p.device)
		}
		delete(memPools.made, uintptr(pool))
		return driver.Success
	})
}

//export cuvmm_sim_MemPoolTrimTo
func cuvmm_sim_MemPoolTrimTo(pool C.uintptr_t, _ C.size_t) C.int32_t {
	return withPool(pool, func(*memPool) driver.Result { return driver.Success })
}

// The attributes of pools that are kept: 1 to 3 say how freed memory is used again, and 4
// how much stays in the pool. What counts memory is known of the device's own pool, and
// refused of others.
const (
	firstReuse, lastReuse = 1, 3
	releaseThreshold      = 4
	lastPoolAttribute     = 8
)

//export cuvmm_sim_MemPoolGetAttribute
func cuvmm_sim_MemPoolGetAttribute(pool C.uintptr_t, a C.int32_t, to *C.uint64_t) C.int32_t {
	attribute, value := C.uint32_t(a), unsafe.Pointer(to)
	if counts := driver.MemPoolAttribute(a); value != nil && (counts == driver.MemPoolReserved || counts == driver.MemPoolUsed) {
		if of, is := initialPoolOf(pool); is {
			return countOfPool(of, counts, to)
		}
	}
	return poolAttribute(pool, attribute, value, func(p *memPool) {
		if attribute == releaseThreshold {
			*(*uint64)(value) = p.keep
		} else {
			*(*int32)(value) = p.reuse[attribute-firstReuse]
		}
	})
}

// initialPoolOf returns the device whose own pool it is.
func initialPoolOf(pool C.uintptr_t) (of driver.Device, is bool) {
	memPools.Lock()
	defer memPools.Unlock()
	p := memPools.made[uintptr(pool)]
	if p == nil || memPools.initial[p.device] != uintptr(pool) {
		return 0, false
	}
	return p.device, true
}

// countOfPool returns what a device's own pool counts.
func countOfPool(of driver.Device, a driver.MemPoolAttribute, to *C.uint64_t) C.int32_t {
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	pool, r := d.DeviceGetDefaultMemPool(of)
	if r != driver.Success {
		return code(r)
	}
	n, r := d.MemPoolGetAttribute(pool, a)
	if r == driver.Success {
		*to = C.uint64_t(n)
	}
	return code(r)
}

//export cuvmm_set_pool_attribute
func cuvmm_set_pool_attribute(pool C.uintptr_t, attribute C.uint32_t, value unsafe.Pointer) C.int32_t {
	return poolAttribute(pool, attribute, value, func(p *memPool) {
		if attribute == releaseThreshold {
			p.keep = *(*uint64)(value)
		} else {
			p.reuse[attribute-firstReuse] = *(*int32)(value)
		}
	})
}

func poolAttribute(pool C.uintptr_t, attribute C.uint32_t, value unsafe.Pointer, f func(p *memPool)) C.int32_t {
	return withPool(pool, func(p *memPool) driver.Result {
		switch {
		case value == nil || attribute < firstReuse || attribute > lastPoolAttribute:
			return driver.InvalidValue
		case attribute > releaseThreshold:
			return driver.NotSupported
		}
		f(p)
		return driver.Success
	})
}

// The memory is the stream's device's, so the pool must be of that device.
//
//export cuvmm_alloc_from_pool
func cuvmm_alloc_from_pool(p *C.uint64_t, n C.size_t, pool, s C.uintptr_t) C.int32_t {
	if p == nil {
		return C.int32_t(driver.InvalidValue)
	}
	var of driver.Device
	if r := withPool(pool, func(p *memPool) driver.Result { of = p.device; return driver.Success }); r != 0 {
		return r
	}
	d, _ := opened()
	c, r := d.StreamGetCtx(0, driver.Stream(s))
	if r != driver.Success {
		return code(r)
	}
	if on, r := d.CtxGetDevice(c); r != driver.Success || on != of {
		return C.int32_t(driver.NotSupported)
	}
	at, r := d.MemAllocAsync(c, uint64(n), driver.Stream(s))
	if r == driver.Success {
		*p = C.uint64_t(at)
	}
	return code(r)
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

//export cuvmm_sim_DeviceGetName
func cuvmm_sim_DeviceGetName(name *C.char, room C.int32_t, dev C.int32_t) C.int32_t {
	if name == nil || room <= 0 {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	text, r := d.DeviceGetName(driver.Device(dev))
	if r == driver.Success {
		to := unsafe.Slice((*byte)(unsafe.Pointer(name)), room)
		to[copy(to[:room-1], text)] = 0
	}
	return code(r)
}

// A null iterator means the whole log.
//
//export cuvmm_sim_LogsDumpToMemory
func cuvmm_sim_LogsDumpToMemory(iterator *C.uint32_t, buffer *C.char, size *C.size_t, flags C.uint32_t) C.int32_t {
	if buffer == nil || size == nil || *size == 0 || *size > longest || flags != 0 {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	from := driver.LogPosition(0)
	if iterator != nil {
		from = driver.LogPosition(*iterator)
	}
	end, n, r := d.LogsDumpToMemory(from, unsafe.Slice((*byte)(unsafe.Pointer(buffer)), *size))
	if r == driver.Success {
		*size = C.size_t(n)
		if iterator != nil {
			*iterator = C.uint32_t(end)
		}
	}
	return code(r)
}

// longest bounds the lists that callers give, in elements or bytes: a longer one is a
// number that went wrong, and no memory of the caller's.
const longest = 1 << 30

// Each attribute has an array of its own for the output.
//
//export cuvmm_sim_MemRangeGetAttributes
func cuvmm_sim_MemRangeGetAttributes(out *unsafe.Pointer, sizes *C.size_t, a *C.uint32_t, count C.size_t, p C.uint64_t, n C.size_t) C.int32_t {
	if count == 0 || count > longest || out == nil || sizes == nil || a == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	const element = 4
	arrays := unsafe.Slice(out, count)
	counts := make([]uint64, count)
	total := uint64(0)
	for i, size := range unsafe.Slice(sizes, count) {
		if arrays[i] == nil || size%element != 0 || uint64(size) > longest-total {
			return C.int32_t(driver.InvalidValue)
		}
		counts[i] = uint64(size) / element
		total += uint64(size)
	}
	values := make([]int32, total/element)
	attributes := unsafe.Slice((*driver.RangeAttribute)(unsafe.Pointer(a)), count)
	if r := d.MemRangeGetAttributes(0, attributes, counts, driver.Ptr(p), uint64(n), values); r != driver.Success {
		return code(r)
	}
	for i, to := range arrays {
		copy(unsafe.Slice((*int32)(to), counts[i]), values[:counts[i]])
		values = values[counts[i]:]
	}
	return 0
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"encoding/binary"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// dmaBuf is the only kind of handle for a range of addresses.
const dmaBuf = 1

// The caller gives four bytes for a descriptor, and 64 for a fabric handle.
//
//export cuvmm_sim_MemExportToShareableHandle
func cuvmm_sim_MemExportToShareableHandle(out unsafe.Pointer, h C.uint64_t, t C.uint32_t, flags C.uint64_t) C.int32_t {
	if out == nil || flags != 0 {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	s, r := d.MemExportToShareableHandle(driver.MemHandle(h), driver.HandleTypes(t))
	switch {
	case r != driver.Success:
	case driver.HandleTypes(t) == driver.HandlePosixFD:
		*(*[4]byte)(out) = [4]byte(s[:4])
	default:
		*(*driver.ShareableHandle)(out) = s
	}
	return code(r)
}

// A descriptor is passed as the pointer's value, which Go must not take for a pointer.
//
//export cuvmm_sim_MemImportFromShareableHandle
func cuvmm_sim_MemImportFromShareableHandle(h *C.uint64_t, os C.uintptr_t, t C.uint32_t) C.int32_t {
	fd := driver.HandleTypes(t) == driver.HandlePosixFD
	if h == nil || os == 0 && !fd {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	var s driver.ShareableHandle
	if fd {
		binary.NativeEndian.PutUint32(s[:], uint32(os))
	} else {
		s = **(**driver.ShareableHandle)(unsafe.Pointer(&os))
	}
	imported, r := d.MemImportFromShareableHandle(s, driver.HandleTypes(t))
	if r == driver.Success {
		*h = C.uint64_t(imported)
	}
	return code(r)
}

//export cuvmm_sim_MemGetHandleForAddressRange
func cuvmm_sim_MemGetHandleForAddressRange(out unsafe.Pointer, p C.uint64_t, size C.size_t, t C.uint32_t, flags C.uint64_t) C.int32_t {
	if out == nil || t != dmaBuf {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	fd, r := d.MemGetHandleForAddressRange(0, driver.Ptr(p), uint64(size), driver.RangeHandleFlags(flags))
	if r == driver.Success {
		*(*C.int32_t)(out) = C.int32_t(fd)
	}
	return code(r)
}

//export cuvmm_sim_MulticastCreate
func cuvmm_sim_MulticastCreate(h *C.uint64_t, p *C.cuvmm_multicast) C.int32_t {
	if h == nil || p == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	made, r := d.MulticastCreate(*(*driver.MulticastProp)(unsafe.Pointer(p)))
	if r == driver.Success {
		*h = C.uint64_t(made)
	}
	return code(r)
}

// PointerGetAttribute writes as many bytes as the attribute has, since programs pass an int
// or less.
//
//export cuvmm_sim_PointerGetAttribute
func cuvmm_sim_PointerGetAttribute(value *C.uint64_t, a C.int32_t, p C.uint64_t) C.int32_t {
	if value == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	attribute := driver.PointerAttribute(a)
	v, r := d.PointerGetAttribute(0, attribute, driver.Ptr(p))
	if r == driver.Success {
		switch out := unsafe.Pointer(value); attribute.Bytes() {
		case 1:
			*(*uint8)(out) = uint8(v)
		case 4:
			*(*uint32)(out) = uint32(v)
		default:
			*(*uint64)(out) = v
		}
	}
	return code(r)
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include <string.h>
// #include "libcuda.h"
import "C"

import (
	"fmt"
	"strings"
	"structs"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

//export cuvmm_sim_ModuleLoadData
func cuvmm_sim_ModuleLoadData(m *C.uintptr_t, image unsafe.Pointer) C.int32_t {
	if m == nil || image == nil {
		return C.int32_t(driver.InvalidValue)
	}
	return load(m, image, nil)
}

// The options that the software driver implements: the buffer for the log of errors, and
// its size in bytes. The others concern machine code.
const (
	optionErrorLog     = 5
	optionErrorLogSize = 6
)

//export cuvmm_sim_ModuleLoadDataEx
func cuvmm_sim_ModuleLoadDataEx(m *C.uintptr_t, image unsafe.Pointer, n C.uint32_t, options *C.uint32_t, values *unsafe.Pointer) C.int32_t {
	if m == nil || image == nil || n > longest || n > 0 && (options == nil || values == nil) {
		return C.int32_t(driver.InvalidValue)
	}
	return load(m, image, errorLog(n, options, values))
}

// errorLog returns the caller's buffer for the log of errors, or nil.
func errorLog(n C.uint32_t, options *C.uint32_t, values *unsafe.Pointer) []byte {
	var log unsafe.Pointer
	var room uint32
	given := unsafe.Slice(values, n)
	for i, option := range unsafe.Slice(options, n) {
		switch option {
		case optionErrorLog:
			log = given[i]
		case optionErrorLogSize:
			room = uint32(number(&given[i]))
		}
	}
	if log == nil || room == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(log), room)
}

// explain writes to the log, or to standard error.
func explain(log []byte, why string) {
	if log == nil {
		complain("%s", why)
		return
	}
	log[copy(log[:len(log)-1], why)] = 0
}

// load loads PTX if every kernel in it has a Go function. Otherwise it explains that in
// the log, or on standard error.
func load(m *C.uintptr_t, image unsafe.Pointer, log []byte) C.int32_t {
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	var said [1024]byte
	module, r := d.ModuleLoadDataEx(0, bytesOf(image), said[:])
	why, _, _ := strings.Cut(string(said[:]), "\x00")
	if r == driver.Success {
		names := d.(driver.Hosted).WithoutFunction(module)
		if len(names) == 0 {
			*m = C.uintptr_t(module)
			return 0
		}
		d.ModuleUnload(0, module)
		r = driver.NoBinaryForGPU
		why = fmt.Sprintf("no Go function stands for the kernels %s, so the software driver cannot run them: "+
			"register one for each with sim.RegisterKernel in a build of libcuda, or run on a GPU", strings.Join(names, ", "))
	}
	if why != "" {
		explain(log, why)
	}
	return code(r)
}

// bytesOf returns PTX text up to its NUL. Of a binary image, which the software driver
// cannot run, it returns the bytes that identify one.
func bytesOf(image unsafe.Pointer) []byte {
	first := *(*[4]byte)(image) // text is longer, and shorter text is no PTX
	switch string(first[:]) {
	case "\x7fELF":
		return first[:]
	case "\x50\xed\x55\xba": // a fat binary, which may hold PTX in a form of its own
		return []byte("\x7fELF")
	}
	return unsafe.Slice((*byte)(image), C.strlen((*C.char)(image)))
}

//export cuvmm_sim_ModuleGetFunction
func cuvmm_sim_ModuleGetFunction(f *C.uintptr_t, m C.uintptr_t, name *C.char) C.int32_t {
	if f == nil || name == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	found, r := d.ModuleGetFunction(0, driver.Module(m), C.GoString(name))
	if r == driver.Success {
		*f = C.uintptr_t(found)
	}
	return code(r)
}

//export cuvmm_sim_ModuleGetGlobal
func cuvmm_sim_ModuleGetGlobal(p *C.uint64_t, bytes *C.size_t, m C.uintptr_t, name *C.char) C.int32_t {
	if name == nil || p == nil && bytes == nil {
		return C.int32_t(driver.InvalidValue)
	}
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	at, n, r := d.ModuleGetGlobal(0, driver.Module(m), C.GoString(name))
	if r == driver.Success && p != nil {
		*p = C.uint64_t(at)
	}
	if r == driver.Success && bytes != nil {
		*bytes = C.size_t(n)
	}
	return code(r)
}

// launchConfig is CUlaunchConfig, and launchAttribute is CUlaunchAttribute.
type (
	launchConfig struct {
		_          structs.HostLayout
		gx, gy, gz uint32
		bx, by, bz uint32
		shared     uint32
		stream     uintptr
		attributes *launchAttribute
		count      uint32
	}
	launchAttribute struct {
		_     structs.HostLayout
		id    uint32
		_     uint32
		value [16]uint32
	}
)

// launchCooperative is the only attribute that the software driver implements: the
// others concern speed.
const launchCooperative = 2

//export cuvmm_sim_LaunchKernelEx
func cuvmm_sim_LaunchKernelEx(config unsafe.Pointer, f C.uintptr_t, params, extra *unsafe.Pointer) C.int32_t {
	if config == nil {
		return C.int32_t(driver.InvalidValue)
	}
	l := (*launchConfig)(config)
	if l.count > longest || l.count > 0 && l.attributes == nil {
		return C.int32_t(driver.InvalidValue)
	}
	cooperative := false
	for _, a := range unsafe.Slice(l.attributes, l.count) {
		cooperative = cooperative || a.id == launchCooperative && a.value[0] != 0
	}
	return launch(cooperative, f, driver.LaunchConfig{
		GridX: l.gx, GridY: l.gy, GridZ: l.gz, BlockX: l.bx, BlockY: l.by, BlockZ: l.bz, SharedBytes: l.shared,
	}, C.uintptr_t(l.stream), params, extra)
}

// The markers of a list that passes the parameters as one block.
const (
	extraEnd  = 0
	extraData = 1
	extraSize = 2
)

//export cuvmm_sim_LaunchKernel
func cuvmm_sim_LaunchKernel(f C.uintptr_t, gx, gy, gz, bx, by, bz, shared C.uint32_t, s C.uintptr_t, params, extra *unsafe.Pointer) C.int32_t {
	return launch(false, f, driver.LaunchConfig{
		GridX: uint32(gx), GridY: uint32(gy), GridZ: uint32(gz),
		BlockX: uint32(bx), BlockY: uint32(by), BlockZ: uint32(bz), SharedBytes: uint32(shared),
	}, s, params, extra)
}

//export cuvmm_launch_cooperative
func cuvmm_launch_cooperative(f C.uintptr_t, gx, gy, gz, bx, by, bz, shared C.uint32_t, s C.uintptr_t, params *unsafe.Pointer) C.int32_t {
	return launch(true, f, driver.LaunchConfig{
		GridX: uint32(gx), GridY: uint32(gy), GridZ: uint32(gz),
		BlockX: uint32(bx), BlockY: uint32(by), BlockZ: uint32(bz), SharedBytes: uint32(shared),
	}, s, params, nil)
}

func launch(cooperative bool, f C.uintptr_t, l driver.LaunchConfig, s C.uintptr_t, params, extra *unsafe.Pointer) C.int32_t {
	d, r := opened()
	if r != driver.Success {
		return code(r)
	}
	var block []byte
	ok := true
	switch {
	case params != nil && extra != nil:
		ok = false
	case params != nil:
		block, ok = gather(d.(driver.Hosted).KernelParams(driver.Function(f)), params)
	case extra != nil:
		block, ok = given(extra)
	}
	if !ok {
		return C.int32_t(driver.InvalidValue)
	}
	if cooperative && extra != nil && captures(d, driver.Stream(s)) {
		return C.int32_t(driver.InvalidValue)
	}
	if cooperative {
		return code(d.LaunchKernelEx(0, driver.Function(f), l, block, driver.Stream(s)))
	}
	return code(d.LaunchKernel(0, driver.Function(f), l, block, driver.Stream(s)))
}

// captures reports whether the stream captures. It also invalidates the capture, by a
// query of the stream, because the real driver does so when it refuses a launch.
func captures(d driver.Driver, s driver.Stream) bool {
	status, r := d.StreamIsCapturing(0, s)
	if r != driver.Success || status == driver.CaptureNone {
		return false
	}
	d.StreamQuery(0, s)
	return true
}

// gather copies parameters into one block.
func gather(layout []driver.KernelParam, params *unsafe.Pointer) (block []byte, ok bool) {
	for i, p := range unsafe.Slice(params, len(layout)) {
		if p == nil {
			return nil, false
		}
		l := layout[i]
		block = append(block, make([]byte, l.Offset+l.Size-uint64(len(block)))...)
		copy(block[l.Offset:], unsafe.Slice((*byte)(p), l.Size))
	}
	return block, true
}

// given reads the block from a list with markers.
func given(extra *unsafe.Pointer) (block []byte, ok bool) {
	var data unsafe.Pointer
	var size C.size_t
	for i := uintptr(0); ; i += 2 {
		at := func(i uintptr) *unsafe.Pointer {
			return (*unsafe.Pointer)(unsafe.Add(unsafe.Pointer(extra), i*unsafe.Sizeof(*extra)))
		}
		switch number(at(i)) {
		case extraEnd:
			if size > longest || data == nil && size != 0 {
				return nil, false
			}
			return unsafe.Slice((*byte)(data), size), true
		case extraData:
			data = *at(i + 1)
		case extraSize:
			n := (*C.size_t)(*at(i + 1))
			if n == nil {
				return nil, false
			}
			size = *n
		default:
			return nil, false
		}
	}
}

// number reads a number that the caller passes as a pointer, which Go must not take for one.
func number(p *unsafe.Pointer) uintptr { return *(*uintptr)(unsafe.Pointer(p)) }

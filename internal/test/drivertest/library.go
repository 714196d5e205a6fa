package drivertest

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// library is this library's form of a driver, with the calls that it never
// makes in the relaxed mode, too.
type library struct {
	driver.Driver
	f driver.Foreign
}

var _ driver.Foreign = library{}

// relaxed makes a call as the library's own form does: a mode that cannot be
// exchanged does not stop the call.
func (l library) relaxed(call func()) {
	if before, r := l.f.ThreadExchangeStreamCaptureMode(driver.CaptureRelaxed); r == driver.Success {
		defer func() { _, _ = l.f.ThreadExchangeStreamCaptureMode(before) }()
	}
	call()
}

func (l library) ThreadExchangeStreamCaptureMode(m driver.CaptureMode) (driver.CaptureMode, driver.Result) {
	return l.f.ThreadExchangeStreamCaptureMode(m)
}

func (l library) CtxSetCurrent(c driver.Context) driver.Result { return l.f.CtxSetCurrent(c) }

func (l library) CtxGetCurrent() (driver.Context, driver.Result) { return l.f.CtxGetCurrent() }

func (l library) CtxCreate(flags uint32, d driver.Device) (made driver.Context, r driver.Result) {
	l.relaxed(func() { made, r = l.f.CtxCreate(flags, d) })
	return made, r
}

func (l library) CtxDestroy(c driver.Context) (r driver.Result) {
	l.relaxed(func() { r = l.f.CtxDestroy(c) })
	return r
}

func (l library) CtxSynchronize(c driver.Context) (r driver.Result) {
	l.relaxed(func() { r = l.f.CtxSynchronize(c) })
	return r
}

func (l library) StreamGetFlags(c driver.Context, s driver.Stream) (flags driver.StreamFlags, r driver.Result) {
	l.relaxed(func() { flags, r = l.f.StreamGetFlags(c, s) })
	return flags, r
}

func (l library) StreamGetID(c driver.Context, s driver.Stream) (id uint64, r driver.Result) {
	l.relaxed(func() { id, r = l.f.StreamGetID(c, s) })
	return id, r
}

func (l library) GraphGetNodeCount(g driver.Graph) (n uint64, r driver.Result) {
	l.relaxed(func() { n, r = l.f.GraphGetNodeCount(g) })
	return n, r
}

func (l library) MemcpyHtoD(c driver.Context, dst driver.Ptr, src unsafe.Pointer, n uint64) (r driver.Result) {
	l.relaxed(func() { r = l.f.MemcpyHtoD(c, dst, src, n) })
	return r
}

func (l library) MemcpyDtoH(c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64) (r driver.Result) {
	l.relaxed(func() { r = l.f.MemcpyDtoH(c, dst, src, n) })
	return r
}

func (l library) MemcpyDtoD(c driver.Context, dst, src driver.Ptr, n uint64) (r driver.Result) {
	l.relaxed(func() { r = l.f.MemcpyDtoD(c, dst, src, n) })
	return r
}

func (l library) MemsetD8(c driver.Context, dst driver.Ptr, v uint8, n uint64) (r driver.Result) {
	l.relaxed(func() { r = l.f.MemsetD8(c, dst, v, n) })
	return r
}

func (l library) MemsetD32Async(c driver.Context, dst driver.Ptr, v uint32, words uint64, s driver.Stream) (r driver.Result) {
	l.relaxed(func() { r = l.f.MemsetD32Async(c, dst, v, words, s) })
	return r
}

func (l library) MemRetainAllocationHandle(p driver.Ptr) (h driver.MemHandle, r driver.Result) {
	l.relaxed(func() { h, r = l.f.MemRetainAllocationHandle(p) })
	return h, r
}

func (l library) MemDiscardBatchAsync(c driver.Context, p []driver.Ptr, sizes []uint64, s driver.Stream) (r driver.Result) {
	l.relaxed(func() { r = l.f.MemDiscardBatchAsync(c, p, sizes, s) })
	return r
}

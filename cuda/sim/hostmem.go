package sim

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// adopt makes host memory known to the device.
func (c *gpuContext) adopt(kind string, b []byte, in *piece) bool {
	lo := addressOf(b)
	r := &backing{m: c.m, kind: kind, span: span{lo, lo + uint64(len(b))}, context: c, host: b, piece: in}
	if !c.m.backing.insert(r.lo, r.hi, r) {
		return false
	}
	r.object = c.m.track(kind, lo, uint64(len(b)))
	return true
}

// hostRange finds the host memory of a kind that starts at p.
func (m *Machine) hostRange(kind string, p unsafe.Pointer) *backing {
	r, ok := m.backing.find(uint64(uintptr(p)))
	if !ok || r.lo != uint64(uintptr(p)) || r.v.kind != kind {
		return nil
	}
	return r.v
}

func (a *api) MemHostAlloc(c driver.Context, n uint64, flags driver.HostAllocFlags) (unsafe.Pointer, driver.Result) {
	ctx, r := a.enterContext(driver.CallMemHostAlloc, c)
	if r != driver.Success {
		return nil, r
	}
	defer a.leave()
	const writeCombined = 4
	if n == 0 || flags&^(driver.HostAllocPortable|driver.HostAllocDeviceMap|writeCombined) != 0 {
		return nil, driver.InvalidValue
	}
	m, size := a.m, roundUp(n, host.PageSize())
	if size < n || !m.charge(m.host, size) {
		return nil, driver.OutOfMemory
	}
	b, in, err := m.pinnedBytes(n, size)
	if err != nil {
		m.host.give(size)
		m.explain(driver.CallMemHostAlloc, "pinned memory: %v", err)
		return nil, driver.OutOfMemory
	}
	if m.options.Poison {
		fill(b, PoisonByte)
	}
	if !ctx.adopt(KindHostMemory, b, in) {
		panic("sim: the system gave the same memory twice")
	}
	m.hostRange(KindHostMemory, unsafe.Pointer(unsafe.SliceData(b))).flags = flags
	return unsafe.Pointer(unsafe.SliceData(b)), driver.Success
}

// pinnedBytes returns n zeroed bytes in whole pages. A small n comes from a slab, and then it
// returns the piece too.
func (m *Machine) pinnedBytes(n, size uint64) ([]byte, *piece, error) {
	if size > slabPiece {
		b, err := osmem.Alloc(n)
		return b, nil, err
	}
	in, err := m.pinnedSlabs.acquire(size)
	if err != nil {
		return nil, nil, err
	}
	return in.bytes[:n], in, nil
}

func (a *api) MemFreeHost(c driver.Context, p unsafe.Pointer) driver.Result {
	return a.freeAlone(driver.CallMemFreeHost, c, driver.InvalidValue, func() *backing { return a.m.hostRange(KindHostMemory, p) })
}

func (a *api) MemHostUnregister(c driver.Context, p unsafe.Pointer) driver.Result {
	return a.freeAlone(driver.CallMemHostUnregister, c, driver.HostNotRegistered, func() *backing { return a.m.hostRange(KindRegistration, p) })
}

func (a *api) MemHostRegister(c driver.Context, p unsafe.Pointer, n uint64, flags driver.HostRegisterFlags) driver.Result {
	ctx, r := a.enterContext(driver.CallMemHostRegister, c)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	const addresses = 1 << 48 // more than a process has
	if p == nil || n == 0 || n > addresses || flags&^(driver.HostRegisterPortable|driver.HostRegisterDeviceMap) != 0 {
		return driver.InvalidValue
	}
	lo := uint64(uintptr(p))
	if osmem.Linux && (space.overlaps(span{lo, lo + n}) || !host.Mapped(lo, n)) {
		a.m.explain(driver.CallMemHostRegister, "registration of [%#x, %#x+%#x): not all of it is memory of this process", lo, lo, n)
		return driver.InvalidValue
	}
	if !ctx.adopt(KindRegistration, unsafe.Slice((*byte)(p), n), nil) {
		return driver.HostRegistered
	}
	return driver.Success
}

// MemHostGetDevicePointer returns the host address itself: addresses are
// unified.
func (a *api) MemHostGetDevicePointer(c driver.Context, p unsafe.Pointer) (driver.Ptr, driver.Result) {
	if _, r := a.enterContext(driver.CallMemHostGetDevicePointer, c); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	r, ok := a.m.backing.find(uint64(uintptr(p)))
	if !ok || r.v.host == nil {
		return 0, driver.InvalidValue
	}
	return driver.Ptr(uintptr(p)), driver.Success
}

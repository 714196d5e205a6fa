package sim

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// async is the state of memory that is allocated and freed in the order of a
// stream: it has its address from the call on, but is only there between.
type async struct {
	there   bool // the allocation was done
	freeing bool // a free was submitted
}

func (a *async) refuses() string {
	if a.there {
		return ""
	}
	return "the memory is allocated by work that was not done yet: put this work behind it, on its stream or by an event"
}

// lease is what a captured allocation holds: addresses, for as long as the
// graph or anything made of it exists, and memory from the first launch on.
type lease struct {
	m       *Machine
	context *gpuContext
	span
	mem  *memory
	refs int
}

// furnish gives the lease its memory.
func (l *lease) furnish() driver.Result {
	if l.mem != nil {
		if r, ok := l.m.backing.find(l.lo); ok && !r.v.async.freeing {
			return driver.InvalidValue // an earlier launch's memory was not freed
		}
		return driver.Success
	}
	mem, r := l.m.newMemory(l.context.device.pool, l.size(), l.context.device.prop())
	l.mem = mem
	return r
}

func holdAll(leases []*lease) {
	for _, l := range leases {
		l.refs++
	}
}

func dropAll(leases []*lease) {
	for _, l := range leases {
		l.drop()
	}
}

func (l *lease) drop() {
	l.refs--
	if l.refs > 0 || l.m.dismantled {
		return
	}
	l.m.leased.remove(l.lo)
	l.m.giveAddresses(l.span)
	if l.mem != nil {
		l.mem.drop()
	}
}

func (a *api) MemAllocAsync(c driver.Context, n uint64, h driver.Stream) (driver.Ptr, driver.Result) {
	s, r := a.enterStream(driver.CallMemAllocAsync, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	switch {
	case s.context.device.attributes[driver.AttrMemoryPools] == 0:
		return 0, driver.NotSupported
	case n == 0:
		return 0, driver.InvalidValue
	case s.joined != nil:
		return s.captureAlloc(n)
	}
	if r := a.guardUnsafe(); r != driver.Success {
		return 0, r
	}
	res, r := s.context.allocate(n)
	if r != driver.Success {
		return 0, r
	}
	state := &async{}
	res.async = state
	_, r = s.submit(task{run: func(at site) *fault {
		m.mu.Lock()
		defer m.mu.Unlock()
		state.there = true
		m.touch(at, driver.CallMemAllocAsync, res.lo, n, true)
		return nil
	}})
	if r != driver.Success {
		m.untrack(res.object)
		m.evict(res)
		return 0, r
	}
	return driver.Ptr(res.lo), driver.Success
}

// captureAlloc makes an allocation part of a capture.
func (s *stream) captureAlloc(n uint64) (driver.Ptr, driver.Result) {
	m, c := s.m, s.context
	p, ok := m.acquireAddresses(n, 512, 0)
	if !ok {
		return 0, driver.OutOfMemory
	}
	l := &lease{m: m, context: c, span: span{p, p + n}, refs: 1}
	r := s.capture(task{run: func(at site) *fault {
		m.mu.Lock()
		defer m.mu.Unlock()
		res := &backing{m: m, kind: KindDeviceMemory, span: l.span, context: c, mem: l.mem, lease: l, async: &async{there: true}}
		if !m.backing.insert(l.lo, l.hi, res) {
			return &fault{driver.InvalidValue, fmt.Sprintf("the graph allocates the memory at %#x again before it was freed", l.lo)}
		}
		res.object = m.track(KindDeviceMemory, l.lo, n)
		l.refs++
		l.mem.refs++
		l.mem.poison() // an earlier launch left something there
		m.touch(at, driver.CallMemAllocAsync, l.lo, n, true)
		return nil
	}})
	if r != driver.Success {
		m.giveAddresses(l.span)
		return 0, r
	}
	m.leased.insert(l.lo, l.hi, l)
	s.joined.leases = append(s.joined.leases, l)
	return driver.Ptr(p), driver.Success
}

// MemFreeAsync frees memory of MemAllocAsync in the order of a stream.
func (a *api) MemFreeAsync(c driver.Context, p driver.Ptr, h driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallMemFreeAsync, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	m := a.m
	res := m.allocated(p)
	if res != nil && (res.async == nil || res.async.freeing) {
		return driver.InvalidValue
	}
	leased, ok := m.leased.find(uint64(p))
	if res == nil && (!ok || leased.lo != uint64(p)) {
		return driver.InvalidValue
	}
	_, r = s.submit(task{run: func(at site) *fault {
		m.mu.Lock()
		defer m.mu.Unlock()
		res := m.allocated(p)
		if res == nil {
			return m.illegal(at, driver.CallMemFreeAsync, uint64(p), uint64(p), 1, "it is not allocated, or was freed before")
		}
		m.touch(at, driver.CallMemFreeAsync, res.lo, res.size(), true)
		m.untrack(res.object)
		m.evict(res)
		return nil
	}})
	if r == driver.Success && res != nil && s.joined == nil {
		res.async.freeing = true
		m.untrack(res.object) // the program did its part, even if the context is lost before the work is done
	}
	return r
}

// DeviceGetDefaultMemPool returns the pool that MemAllocAsync takes from. Its handle is the device's
// number and 1.
func (a *api) DeviceGetDefaultMemPool(d driver.Device) (driver.MemPool, driver.Result) {
	dev, r := a.enterDevice(driver.CallDeviceGetDefaultMemPool, d)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if dev.attributes[driver.AttrMemoryPools] == 0 {
		return 0, driver.NotSupported
	}
	return driver.MemPool(d + 1), driver.Success
}

// MemPoolGetAttribute returns what a pool has. Freed memory goes back to the device at once, and
// not with the next synchronization, so what is reserved is used.
func (a *api) MemPoolGetAttribute(pool driver.MemPool, attr driver.MemPoolAttribute) (n uint64, r driver.Result) {
	dev, r := a.enterMemPool(driver.CallMemPoolGetAttribute, pool)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if attr != driver.MemPoolReserved && attr != driver.MemPoolUsed {
		return 0, driver.InvalidValue
	}
	for b := range a.m.backing.all() {
		if r := b.v; r.async != nil && r.lease == nil && r.context.device == dev {
			n += r.mem.size
		}
	}
	return n, driver.Success
}

// MemPoolTrimTo finds nothing to give back.
func (a *api) MemPoolTrimTo(pool driver.MemPool, keep uint64) driver.Result {
	if _, r := a.enterMemPool(driver.CallMemPoolTrimTo, pool); r != driver.Success {
		return r
	}
	a.leave()
	return driver.Success
}

func (a *api) enterMemPool(call driver.Call, pool driver.MemPool) (*device, driver.Result) {
	if r := a.enter(call); r != driver.Success {
		return nil, r
	}
	if dev := a.m.device(driver.Device(pool) - 1); dev != nil {
		return dev, driver.Success
	}
	a.leave()
	return nil, driver.InvalidValue
}

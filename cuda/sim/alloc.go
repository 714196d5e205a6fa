package sim

import "github.com/cuvmm/cuvmm/internal/driver"

// allocate takes n bytes of a context's device and addresses for them.
func (c *gpuContext) allocate(n uint64) (*backing, driver.Result) {
	m := c.m
	if n == 0 {
		return nil, driver.InvalidValue
	}
	mem, r := m.newMemory(c.device.pool, n, c.device.prop())
	if r != driver.Success {
		return nil, r
	}
	align := uint64(512)
	if n >= addressAlign {
		align = addressAlign
	}
	p, ok := m.acquireAddresses(n, align, 0)
	if !ok {
		mem.drop()
		return nil, driver.OutOfMemory
	}
	res := &backing{m: m, kind: KindDeviceMemory, span: span{p, p + n}, context: c, mem: mem}
	res.object = m.track(KindDeviceMemory, p, n)
	m.backing.insert(p, p+n, res)
	return res, driver.Success
}

// allocated finds the allocation that starts at p.
func (m *Machine) allocated(p driver.Ptr) *backing {
	r, ok := m.backing.find(uint64(p))
	if !ok || r.lo != uint64(p) || r.v.owner != nil || r.v.kind != KindDeviceMemory && r.v.kind != KindManagedMemory {
		return nil
	}
	return r.v
}

func (a *api) MemAlloc(c driver.Context, n uint64) (driver.Ptr, driver.Result) {
	ctx, r := a.enterContext(driver.CallMemAlloc, c)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	res, r := ctx.allocate(n)
	if r != driver.Success {
		return 0, r
	}
	return driver.Ptr(res.lo), driver.Success
}

func (a *api) MemFree(c driver.Context, p driver.Ptr) driver.Result {
	return a.freeAlone(driver.CallMemFree, c, driver.InvalidValue, func() *backing {
		r := a.m.allocated(p)
		if r != nil && r.async != nil && r.async.freeing {
			return nil
		}
		return r
	})
}

// freeAlone frees what find returns, or returns absent if that is nil. It waits for all
// work of the context that owns the memory, and lets no call submit more to it meanwhile.
func (a *api) freeAlone(call driver.Call, c driver.Context, absent driver.Result, find func() *backing) driver.Result {
	owner := func() *gpuContext {
		if r := find(); r != nil {
			return r.context
		}
		return nil
	}
	if _, r := a.enterToDestroy(call, c, owner); r != driver.Success {
		return r
	}
	defer a.leave()
	m, r := a.m, find()
	if r == nil {
		return absent
	}
	r.context.drainAlone()
	if m.closed {
		return driver.Deinitialized
	}
	if find() != r {
		return absent // another call freed it meanwhile
	}
	m.untrack(r.object)
	m.evict(r)
	return m.outcome(r.context)
}

func (a *api) MemGetInfo(c driver.Context) (free, total uint64, r driver.Result) {
	ctx, r := a.enterContext(driver.CallMemGetInfo, c)
	if r != driver.Success {
		return 0, 0, r
	}
	defer a.leave()
	p := ctx.device.pool
	return a.m.available(p), p.limit, driver.Success
}

// PointerGetAttribute returns attributes of addresses with memory behind them. Of an
// address that is reserved and not mapped it returns only that it is not mapped.
func (a *api) PointerGetAttribute(c driver.Context, attr driver.PointerAttribute, p driver.Ptr) (uint64, driver.Result) {
	if _, r := a.enterContext(driver.CallPointerGetAttribute, c); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	found, ok := a.m.backing.find(uint64(p))
	if !ok {
		if _, reserved := a.m.reserved.find(uint64(p)); reserved && attr == driver.PointerMapped {
			return 0, driver.Success
		}
		return 0, driver.InvalidValue
	}
	const onHost, onDevice = 1, 2
	r := found.v
	switch attr {
	case driver.PointerContext:
		if r.context == nil {
			return 0, driver.Success
		}
		return uint64(r.context.handle), driver.Success
	case driver.PointerMemoryType:
		if r.mem == nil || r.mem.onHost() {
			return onHost, driver.Success
		}
		return onDevice, driver.Success
	case driver.PointerIsManaged:
		if r.managed != nil {
			return 1, driver.Success
		}
		return 0, driver.Success
	case driver.PointerDeviceOrdinal:
		switch {
		case r.mem != nil && !r.mem.onHost():
			return uint64(r.mem.prop.Location.ID), driver.Success
		case r.context != nil:
			return uint64(r.context.device.ordinal), driver.Success
		}
		return 0, driver.Success
	case driver.PointerRangeStart:
		return r.lo, driver.Success
	case driver.PointerRangeSize:
		return r.size(), driver.Success
	case driver.PointerMapped:
		return 1, driver.Success
	}
	return 0, driver.InvalidValue
}

package sim

import "github.com/cuvmm/cuvmm/internal/driver"

// Legacy IPC is for other programs than this library's, by cmd/libcuda. A handle names the
// machine and the memory, as a fabric handle does, so it needs a machine that processes
// share. What one process frees stays for those that have opened it.

func (a *api) IPCHandle(p driver.Ptr) (s driver.ShareableHandle, r driver.Result) {
	if _, r := a.enterContext(driver.CallMemExportToShareableHandle, 0); r != driver.Success {
		return s, r
	}
	defer a.leave()
	m := a.m
	at, ok := m.backing.find(uint64(p))
	switch {
	case !ok || at.lo != uint64(p) || at.v.kind != KindDeviceMemory || at.v.owner != nil || at.v.async != nil:
		return s, driver.InvalidValue
	case m.books == nil:
		m.note("legacy IPC: processes share memory if they give one Folder (%s)", MachineEnv)
		return s, driver.NotSupported
	}
	mem := at.v.mem
	mem.refs++
	defer mem.drop()
	return m.exportFabric(mem)
}

// IPCOpen maps the memory for the calling thread's context. A process cannot open memory of
// its own.
func (a *api) IPCOpen(s driver.ShareableHandle) (driver.Ptr, driver.Result) {
	c, r := a.enterContext(driver.CallMemImportFromShareableHandle, 0)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	if m.books == nil {
		return 0, driver.NotSupported
	}
	mem, r := m.acceptOffer(m.openOffer(s))
	if r != driver.Success {
		return 0, r
	}
	if mem.pool != nil {
		mem.drop()
		return 0, driver.InvalidContext
	}
	p, ok := m.acquireAddresses(mem.size, addressAlign, 0)
	if !ok {
		mem.drop()
		return 0, driver.OutOfMemory
	}
	opened := &backing{m: m, kind: KindIPCMemory, span: span{p, p + mem.size}, context: c, mem: mem}
	opened.object = m.track(KindIPCMemory, p, mem.size)
	m.backing.insert(p, p+mem.size, opened)
	return driver.Ptr(p), driver.Success
}

func (a *api) IPCClose(p driver.Ptr) driver.Result {
	return a.freeAlone(driver.CallMemFree, 0, driver.InvalidValue, func() *backing {
		if r, ok := a.m.backing.find(uint64(p)); ok && r.lo == uint64(p) && r.v.kind == KindIPCMemory {
			return r.v
		}
		return nil
	})
}

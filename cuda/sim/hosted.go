package sim

import (
	"maps"
	"slices"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

var _ driver.Hosted = (*api)(nil)

func (a *api) NewThread() {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	delete(a.m.threads, host.ThreadID())
}

func (a *api) WithoutFunction(h driver.Module) []string {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	mod := a.m.modules[h]
	if mod == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(mod.entries)), func(name string) bool { return kernelTwin(name) != nil })
}

func (a *api) KernelParams(h driver.Function) []driver.KernelParam {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	f := a.m.functions[h]
	if f == nil {
		return nil
	}
	var all []driver.KernelParam
	for _, p := range f.entry.params {
		all = append(all, driver.KernelParam{Offset: p.offset, Size: p.size})
	}
	return all
}

func (a *api) ContextFlags(h driver.Context) uint32 {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	if c := a.m.contexts[h]; c != nil {
		return c.flags
	}
	return 0
}

func (a *api) SetPrimaryFlags(d driver.Device, flags uint32) driver.Result {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	dev := a.m.device(d)
	switch {
	case dev == nil:
		return driver.InvalidDevice
	case flags&^contextFlags != 0:
		return driver.InvalidValue
	}
	dev.primaryFlags = flags
	if dev.primary != nil {
		dev.primary.flags = flags
	}
	return driver.Success
}

func (a *api) ResetPrimary(d driver.Device) driver.Result {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	dev := a.m.device(d)
	switch {
	case dev == nil:
		return driver.InvalidDevice
	case dev.primary == nil:
		return driver.Success
	}
	old := dev.primary
	dev.primary = nil
	old.reset = true
	old.destroy()
	if a.m.closed || dev.primary != nil {
		return driver.Success // another call made one while this waited for the old one's work
	}
	c, r := a.m.newContext(dev, old.handle)
	if r != driver.Success {
		dev.retained = 0
		return r
	}
	c.object.note, c.flags = old.object.note, old.flags
	c.lost = driver.ContextDestroyed // until it is retained again
	dev.primary = c
	return driver.Success
}

func (a *api) SetPeerAccess(h driver.Context, on bool) driver.Result {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	c, peer := a.m.resolve(0), a.m.contexts[h]
	switch {
	case c == nil || peer == nil:
		return driver.InvalidContext
	case !on && !c.peers[peer]:
		return driver.PeerNotEnabled
	case !c.device.reaches(peer.device):
		return driver.PeerUnsupported
	case on && c.peers[peer]:
		return driver.PeerEnabled
	case !on:
		delete(c.peers, peer)
	case c.peers == nil:
		c.peers = map[*gpuContext]bool{peer: true}
	default:
		c.peers[peer] = true
	}
	return driver.Success
}

func (a *api) HostFlags(p unsafe.Pointer) (driver.HostAllocFlags, bool) {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	r, ok := a.m.backing.find(uint64(uintptr(p)))
	if !ok || r.v.kind != KindHostMemory {
		return 0, false
	}
	return r.v.flags | driver.HostAllocDeviceMap, true // all pinned memory is mapped, since addresses are unified
}

package sim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// handle is one driver handle of physical memory. An import makes a handle of
// its own for the same memory.
type handle struct {
	value    driver.MemHandle
	mem      *memory
	prop     driver.AllocationProp // as it reads from this handle
	imported bool
	refs     int // from creation, import and MemRetainAllocationHandle
	object   *object
}

// newHandle takes over a reference to mem.
func (m *Machine) newHandle(mem *memory, prop driver.AllocationProp, imported bool) driver.MemHandle {
	h := &handle{value: driver.MemHandle(newHandle()), mem: mem, prop: prop, imported: imported, refs: 1}
	h.object = m.track(mem.kind(), uint64(h.value), mem.size)
	if imported {
		h.object.note = "imported"
	}
	m.handles[h.value] = h
	return h.value
}

func (mem *memory) kind() string {
	if mem.team != nil {
		return KindMulticast
	}
	return KindAllocation
}

// granularity is the unit of memory with the given properties.
func (m *Machine) granularity(prop driver.AllocationProp) uint64 {
	if prop.Location.Type == driver.LocationDevice {
		return uint64(m.devices[prop.Location.ID].options.Granularity)
	}
	return 2 << 20
}

// finest is the unit of ranges of addresses.
func (m *Machine) finest() uint64 {
	unit := uint64(addressAlign)
	for _, d := range m.devices {
		unit = min(unit, uint64(d.options.Granularity))
	}
	return unit
}

// checkProp checks that memory with these properties can be created.
func (m *Machine) checkProp(p driver.AllocationProp) driver.Result {
	const known = driver.HandlePosixFD | driver.HandleWin32 | driver.HandleKMT | driver.HandleFabric
	types := p.RequestedHandleTypes
	if p.Type != driver.AllocationPinned || types&^known != 0 ||
		p.Flags.CompressionType > driver.CompressionGeneric || p.Flags.GPUDirectRDMACapable > 1 {
		return driver.InvalidValue
	}
	d := m.devices[0] // speaks for the host
	switch p.Location.Type {
	case driver.LocationDevice:
		d = m.device(driver.Device(p.Location.ID))
		switch {
		case d == nil:
			return driver.InvalidDevice
		case d.attributes[driver.AttrVirtualMemoryManagement] == 0,
			p.Flags.GPUDirectRDMACapable == 1 && d.attributes[driver.AttrRDMAWithVMM] == 0:
			return driver.NotSupported
		}
	case driver.LocationHost:
		if types != driver.HandleNone {
			return driver.InvalidValue
		}
		return m.hostSupport(driver.AttrHostVirtualMemory)
	case driver.LocationHostNUMA:
		if p.Location.ID != 0 { // the only node
			return driver.InvalidValue
		}
		if r := m.hostSupport(driver.AttrHostNUMAVirtualMemory); r != driver.Success {
			return r
		}
	default:
		return driver.InvalidValue
	}
	if !d.exports(types) {
		return driver.NotSupported
	}
	return driver.Success
}

// exports reports whether memory of the device can have handles of all these types.
func (d *device) exports(types driver.HandleTypes) bool {
	return types&(driver.HandleWin32|driver.HandleKMT) == 0 &&
		(types&driver.HandlePosixFD == 0 || d.attributes[driver.AttrHandlePosixFD] != 0) &&
		(types&driver.HandleFabric == 0 || d.attributes[driver.AttrHandleFabric] != 0)
}

func (m *Machine) hostSupport(attr driver.DeviceAttribute) driver.Result {
	for _, d := range m.devices {
		if d.attributes[attr] != 0 {
			return driver.Success
		}
	}
	return driver.InvalidValue
}

func (a *api) MemGetAllocationGranularity(prop driver.AllocationProp, g driver.GranularityOption) (uint64, driver.Result) {
	if r := a.enter(driver.CallMemGetAllocationGranularity); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if g > driver.GranularityRecommended {
		return 0, driver.InvalidValue
	}
	if r := a.m.checkProp(prop); r != driver.Success {
		return 0, r
	}
	return a.m.granularity(prop), driver.Success
}

func (a *api) MemCreate(size uint64, prop driver.AllocationProp) (driver.MemHandle, driver.Result) {
	if r := a.enter(driver.CallMemCreate); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	if r := m.checkProp(prop); r != driver.Success {
		return 0, r
	}
	if size == 0 || size%m.granularity(prop) != 0 {
		return 0, driver.InvalidValue
	}
	pool := m.host
	if prop.Location.Type == driver.LocationDevice {
		d := m.devices[prop.Location.ID]
		pool = d.pool
		if d.attributes[driver.AttrGenericCompression] == 0 || prop.Flags.GPUDirectRDMACapable != 0 {
			prop.Flags.CompressionType = driver.CompressionNone // not granted
		}
	}
	if prop.RequestedHandleTypes&driver.HandleFabric != 0 {
		switch {
		case !m.options.Fabric.open():
			return 0, driver.NotPermitted
		case prop.Location.Type != driver.LocationDevice:
			return 0, driver.NotSupported
		}
	}
	mem, r := m.newMemory(pool, size, prop)
	if r != driver.Success {
		return 0, r
	}
	return m.newHandle(mem, prop, false), driver.Success
}

func (a *api) MemRelease(v driver.MemHandle) driver.Result {
	if r := a.enter(driver.CallMemRelease); r != driver.Success {
		return r
	}
	defer a.leave()
	h := a.m.handles[v]
	if h == nil {
		panic(fmt.Sprintf("sim: cuMemRelease of %#x, which is no live handle of machine %s: the real driver crashes the process here; release each handle once per creation, import and retain", uint64(v), a.m.name))
	}
	h.refs--
	if h.refs == 0 {
		delete(a.m.handles, v)
		a.m.untrack(h.object)
		h.mem.drop()
	}
	return driver.Success
}

func (a *api) MemGetAllocationPropertiesFromHandle(v driver.MemHandle) (driver.AllocationProp, driver.Result) {
	if r := a.enter(driver.CallMemGetAllocationPropertiesFromHandle); r != driver.Success {
		return driver.AllocationProp{}, r
	}
	defer a.leave()
	h := a.m.handles[v]
	if h == nil || h.mem.team != nil {
		return driver.AllocationProp{}, driver.InvalidValue
	}
	return h.prop, driver.Success
}

func (a *api) MemAddressReserve(size, align uint64, hint driver.Ptr) (driver.Ptr, driver.Result) {
	if r := a.enter(driver.CallMemAddressReserve); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	unit, at := a.m.finest(), uint64(hint)
	switch {
	case size == 0 || size%unit != 0 || align&(align-1) != 0 || at%max(align, unit) != 0:
		return 0, driver.InvalidValue
	case at >= hintLimit || at != 0 && size >= hintLimit-at:
		return 0, driver.OutOfMemory
	}
	p, ok := a.m.acquireAddresses(size, max(align, unit), at)
	if !ok {
		return 0, driver.OutOfMemory
	}
	a.m.reserved.insert(p, p+size, a.m.track(KindReservation, p, size))
	return driver.Ptr(p), driver.Success
}

func (a *api) MemAddressFree(p driver.Ptr, size uint64) driver.Result {
	if r := a.enter(driver.CallMemAddressFree); r != driver.Success {
		return r
	}
	defer a.leave()
	m, lo := a.m, uint64(p)
	r, ok := m.reserved.find(lo)
	if !ok || r.lo != lo || r.hi-r.lo != size {
		return driver.InvalidValue
	}
	for range m.backing.overlapping(r.lo, r.hi) {
		return driver.InvalidValue
	}
	m.finishStuck()
	if slices.ContainsFunc(m.stuck, func(b *backing) bool { return b.lo < r.hi && r.lo < b.hi }) {
		return driver.OperatingSystem
	}
	m.reserved.remove(r.lo)
	m.untrack(r.v)
	m.forget(span{r.lo, r.hi})
	m.giveAddresses(span{r.lo, r.hi})
	return driver.Success
}

// acquireAddresses returns size addresses: at the hint, if they are free there.
func (m *Machine) acquireAddresses(size, align, hint uint64) (uint64, bool) {
	if hint != 0 && hint&(align-1) == 0 && hint+size > hint && space.acquireAt(span{hint, hint + size}) {
		return hint, true
	}
	for i := len(m.freed) - 1; i >= 0; i-- {
		at := m.freed[i].lo
		if at&(align-1) == 0 && space.acquireAt(span{at, at + size}) {
			m.freed = append(m.freed[:i], m.freed[i+1:]...)
			return at, true
		}
	}
	return space.acquire(size, align)
}

func (m *Machine) giveAddresses(s span) {
	space.put(s)
	if m.options.ReuseAddresses {
		const enough = 64
		m.freed = append(m.freed, s)
		m.freed = m.freed[max(0, len(m.freed)-enough):]
	}
}

func (a *api) MemMap(p driver.Ptr, size, offset uint64, v driver.MemHandle) driver.Result {
	if r := a.enter(driver.CallMemMap); r != driver.Success {
		return r
	}
	defer a.leave()
	m, lo := a.m, uint64(p)
	h := m.handles[v]
	if h == nil {
		return driver.InvalidValue
	}
	unit := m.granularity(h.mem.prop)
	if t := h.mem.team; t != nil {
		unit = m.multicastGranularity()
		if size == h.mem.size && offset == 0 && lo%unit == 0 {
			if r := t.await(); r != driver.Success {
				return r
			}
			if m.handles[v] != h {
				return driver.InvalidValue // released meanwhile
			}
		}
	}
	switch reserved, ok := m.reserved.find(lo); {
	case size == 0 || size%unit != 0 || lo%unit != 0:
		return driver.InvalidValue
	case offset != 0 || size != h.mem.size:
		return driver.NotSupported
	case !ok || reserved.hi-lo < size:
		return driver.InvalidValue
	}
	r := &backing{m: m, kind: KindMapping, span: span{lo, lo + size}, mem: h.mem, handle: h}
	r.access = make([]driver.AccessFlags, len(m.devices))
	if !m.backing.insert(lo, lo+size, r) {
		return driver.InvalidValue
	}
	h.mem.refs++
	r.object = m.track(KindMapping, lo, size)
	return driver.Success
}

// wholeMappings are the mappings in [p, p+size), unless the range cuts one, or
// leaves the reservations, or, if gapless, is not covered.
func (m *Machine) wholeMappings(p driver.Ptr, size uint64, gapless bool) ([]*backing, bool) {
	lo, hi := uint64(p), uint64(p)+size
	unit := m.finest()
	if size == 0 || hi < lo || lo%unit != 0 || size%unit != 0 {
		return nil, false
	}
	at := lo
	for r := range m.reserved.overlapping(lo, hi) {
		if r.lo > at {
			return nil, false
		}
		at = r.hi
	}
	if at < hi {
		return nil, false
	}
	var whole []*backing
	at = lo
	for r := range m.backing.overlapping(lo, hi) {
		if r.lo < lo || r.hi > hi || gapless && r.lo != at {
			return nil, false
		}
		at = r.hi
		whole = append(whole, r.v)
	}
	return whole, !gapless || at == hi
}

func (a *api) MemUnmap(p driver.Ptr, size uint64) driver.Result {
	r, cut := a.enterRun(driver.CallMemUnmap)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	mappings, ok := a.m.wholeMappings(p, size, false)
	if !ok {
		return driver.InvalidValue
	}
	return run(mappings, cut, func(r *backing) driver.Result {
		a.m.untrack(r.object)
		a.m.remember(r.span)
		a.m.evict(r)
		return driver.Success
	})
}

func (a *api) MemSetAccess(p driver.Ptr, size uint64, desc []driver.AccessDesc) driver.Result {
	r, cut := a.enterRun(driver.CallMemSetAccess)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	mappings, ok := a.m.wholeMappings(p, size, true)
	if !ok || len(desc) == 0 {
		return driver.InvalidValue
	}
	for _, d := range desc {
		for _, mapping := range mappings {
			if r := mapping.checkAccess(d); r != driver.Success {
				return r
			}
		}
	}
	return run(mappings, cut, func(mapping *backing) driver.Result {
		for _, d := range desc {
			if r := mapping.setAccess(d); r != driver.Success {
				return r
			}
		}
		return driver.Success
	})
}

// run calls do for each mapping until one fails or an injected fault cuts the run short.
func run(mappings []*backing, cut *cut, do func(*backing) driver.Result) driver.Result {
	result := driver.Success
	if cut != nil {
		mappings, result = mappings[:min(cut.after, len(mappings))], cut.result
	}
	for _, mapping := range mappings {
		if r := do(mapping); r != driver.Success {
			return r
		}
	}
	return result
}

func (r *backing) checkAccess(d driver.AccessDesc) driver.Result {
	switch d.Flags {
	case driver.AccessNone, driver.AccessRead, driver.AccessReadWrite:
	default:
		return driver.InvalidValue
	}
	switch d.Location.Type {
	case driver.LocationDevice:
		to := r.m.device(driver.Device(d.Location.ID))
		if to == nil {
			return driver.InvalidDevice
		}
		switch {
		case r.mem.team != nil:
			if !r.mem.team.has(to.number()) {
				return driver.InvalidDevice
			}
		case !r.mem.onHost():
			if on := r.m.devices[r.mem.prop.Location.ID]; to != on && !to.reaches(on) {
				return driver.InvalidDevice
			}
		}
		return driver.Success
	case driver.LocationHost, driver.LocationHostNUMA:
		if !r.mem.onHost() {
			return driver.NotSupported
		}
		return driver.Success
	}
	return driver.InvalidValue
}

// setAccess fails only if the system cannot give the CPU access, and has then changed
// nothing.
func (r *backing) setAccess(d driver.AccessDesc) driver.Result {
	host, numa := r.hostAccess, r.numaAccess
	switch d.Location.Type {
	case driver.LocationDevice:
		r.access[d.Location.ID] = d.Flags
		return driver.Success
	case driver.LocationHost:
		host = d.Flags
	case driver.LocationHostNUMA:
		numa = d.Flags
	}
	if err := r.expose(max(host, numa)); err != nil {
		r.m.note("access of the CPU to host memory at %#x: %v", r.lo, err)
		return driver.OperatingSystem
	}
	r.hostAccess, r.numaAccess = host, numa
	return driver.Success
}

// expose gives the CPU the granted access to host memory at its mapped address.
func (r *backing) expose(granted driver.AccessFlags) error {
	access := osmem.AccessNone
	switch granted {
	case driver.AccessRead:
		access = osmem.AccessRead
	case driver.AccessReadWrite:
		access = osmem.AccessReadWrite
	}
	switch {
	case r.placed:
		return osmem.Protect(r.lo, r.size(), access)
	case access == osmem.AccessNone:
		return nil
	case !space.reaches(r.lo):
		return fmt.Errorf("the address is none of this process's: reserve fewer than %d bytes", uint64(windowSize))
	}
	if err := r.mem.place(r.lo, access); err != nil {
		return errors.Join(err, osmem.Clear(r.lo, r.size())) // of what came to be there
	}
	r.placed = true
	return nil
}

func (a *api) MemGetAccess(l driver.Location, p driver.Ptr) (driver.AccessFlags, driver.Result) {
	if r := a.enter(driver.CallMemGetAccess); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	r, ok := a.m.backing.find(uint64(p))
	if !ok || r.v.kind != KindMapping {
		return 0, driver.InvalidValue
	}
	switch l.Type {
	case driver.LocationDevice:
		if a.m.device(driver.Device(l.ID)) == nil {
			return 0, driver.InvalidDevice
		}
		return r.v.access[l.ID], driver.Success
	case driver.LocationHost:
		return r.v.hostAccess, driver.Success
	case driver.LocationHostNUMA:
		return r.v.numaAccess, driver.Success
	}
	return 0, driver.InvalidValue
}

func (a *api) MemRetainAllocationHandle(p driver.Ptr) (driver.MemHandle, driver.Result) {
	if r := a.enter(driver.CallMemRetainAllocationHandle); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	r, ok := m.backing.find(uint64(p))
	if !ok || r.v.kind != KindMapping {
		return 0, driver.InvalidValue
	}
	h := r.v.handle
	if h.refs == 0 { // released, and alive by its mappings alone
		h.mem.refs++
		h.object = m.track(h.mem.kind(), uint64(h.value), h.mem.size)
		m.handles[h.value] = h
	}
	h.refs++
	return h.value, driver.Success
}

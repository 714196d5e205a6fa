package sim

import (
	"slices"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// Every device of a machine that has multicast is on the same switches.

// checkMulticast says whether an object with these properties can be made.
func (m *Machine) checkMulticast(p driver.MulticastProp) driver.Result {
	const known = uint64(driver.HandlePosixFD | driver.HandleWin32 | driver.HandleKMT | driver.HandleFabric)
	if p.NumDevices == 0 || p.NumDevices > maxTeam || p.Flags != 0 || p.HandleTypes&^known != 0 {
		return driver.InvalidValue
	}
	first := slices.IndexFunc(m.devices, func(d *device) bool { return d.attributes[driver.AttrMulticast] != 0 })
	if first < 0 || !m.devices[first].exports(driver.HandleTypes(p.HandleTypes)) {
		return driver.NotSupported
	}
	return driver.Success
}

// multicastGranularity is the unit of objects and of what is bound to them.
func (m *Machine) multicastGranularity() uint64 {
	unit := uint64(multicastUnit)
	for _, d := range m.devices {
		unit = max(unit, uint64(d.options.Granularity))
	}
	return unit
}

// MulticastGetGranularity takes any size, 0 as well.
func (a *api) MulticastGetGranularity(p driver.MulticastProp, g driver.GranularityOption) (uint64, driver.Result) {
	if r := a.enter(driver.CallMulticastGetGranularity); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if g > driver.GranularityRecommended {
		return 0, driver.InvalidValue
	}
	if r := a.m.checkMulticast(p); r != driver.Success {
		return 0, r
	}
	unit := a.m.multicastGranularity()
	if g == driver.GranularityRecommended {
		unit = max(unit, uint64(a.m.options.MulticastRecommended))
	}
	return unit, driver.Success
}

func (a *api) MulticastCreate(p driver.MulticastProp) (driver.MemHandle, driver.Result) {
	if r := a.enter(driver.CallMulticastCreate); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	if r := m.checkMulticast(p); r != driver.Success {
		return 0, r
	}
	types := driver.HandleTypes(p.HandleTypes)
	switch {
	case p.Size == 0 || p.Size%m.multicastGranularity() != 0:
		return 0, driver.InvalidValue
	case types&driver.HandleFabric != 0 && !m.options.Fabric.open():
		return 0, driver.NotPermitted
	}
	mem := &memory{machine: m, size: p.Size, refs: 1}
	mem.prop.RequestedHandleTypes = types
	state := new(teamState)
	if types != driver.HandleNone {
		// Its state lies where processes that import it find it.
		s, id, err := m.newShared(mem)
		if err == nil && id != 0 {
			err = m.books.Publish(s, id, m.host.index, 0)
		}
		if err != nil {
			if s != nil {
				_ = s.Close()
			}
			m.explain(driver.CallMulticastCreate, "a multicast object: %v", err)
			return 0, driver.OperatingSystem
		}
		mem.shared, mem.id = s, id
		m.shared[s.ID()] = mem
		state = stateIn(s)
	}
	state.devices.Store(uint64(p.NumDevices))
	state.size.Store(p.Size)
	state.types.Store(p.HandleTypes)
	fabric := m.options.Fabric
	state.clique.Store(uint64(fabric.Clique))
	for i, v := range clusterWords(fabric) {
		state.cluster[i].Store(v)
	}
	m.newTeam(mem, state)
	return m.newHandle(mem, mem.prop, false), driver.Success
}

func stateIn(s *osmem.Shared) *teamState {
	return (*teamState)(unsafe.Pointer(unsafe.SliceData(s.Bytes())))
}

func clusterWords(f Fabric) [2]uint64 { return *(*[2]uint64)(unsafe.Pointer(&f.Cluster)) }

// newTeam gives an object its team.
func (m *Machine) newTeam(mem *memory, state *teamState) {
	mem.team = &team{m: m, mem: mem, state: state, files: map[uint64]*osmem.Shared{}}
	m.teams[mem.team] = struct{}{}
}

// team finds a multicast object by its handle, and whether it was imported.
func (m *Machine) team(v driver.MemHandle) (t *team, imported bool) {
	h := m.handles[v]
	if h == nil || h.mem.team == nil {
		return nil, false
	}
	return h.mem.team, h.imported
}

func (a *api) MulticastAddDevice(v driver.MemHandle, d driver.Device) driver.Result {
	dev, r := a.enterDevice(driver.CallMulticastAddDevice, d)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	m := a.m
	t, _ := m.team(v)
	if t == nil {
		return driver.InvalidValue
	}
	s, here := t.state, m.options.Fabric
	cluster := clusterWords(here)
	if dev.attributes[driver.AttrMulticast] == 0 || s.clique.Load() != uint64(here.Clique) ||
		s.cluster[0].Load() != cluster[0] || s.cluster[1].Load() != cluster[1] {
		return driver.InvalidDevice
	}
	t.do(func() {
		n := s.added.Load()
		if t.has(dev.number()) || n >= min(s.devices.Load(), maxTeam) {
			r = driver.InvalidValue
			return
		}
		s.members[n].Store(dev.number())
		s.added.Store(n + 1)
	})
	return r
}

// bound is the argument of a bind call: memory, and the part of it to bind.
type bound struct {
	mem      *memory
	at, size uint64
}

func (a *api) MulticastBindMem(mc driver.MemHandle, d driver.Device, mcOffset uint64, v driver.MemHandle, offset, size uint64) driver.Result {
	return a.bindMem(driver.CallMulticastBindMem, mc, &d, mcOffset, v, offset, size)
}

func (a *api) MulticastBindMemV1(mc driver.MemHandle, mcOffset uint64, v driver.MemHandle, offset, size uint64) driver.Result {
	return a.bindMem(driver.CallMulticastBindMemV1, mc, nil, mcOffset, v, offset, size)
}

func (a *api) bindMem(call driver.Call, mc driver.MemHandle, d *driver.Device, mcOffset uint64, v driver.MemHandle, offset, size uint64) driver.Result {
	return a.bind(call, mc, d, mcOffset, func() (bound, bool) {
		h := a.m.handles[v]
		if h == nil {
			return bound{}, false
		}
		return bound{h.mem, offset, size}, true
	})
}

func (a *api) MulticastBindAddr(mc driver.MemHandle, d driver.Device, mcOffset uint64, p driver.Ptr, size uint64) driver.Result {
	return a.bindAddr(driver.CallMulticastBindAddr, mc, &d, mcOffset, p, size)
}

func (a *api) MulticastBindAddrV1(mc driver.MemHandle, mcOffset uint64, p driver.Ptr, size uint64) driver.Result {
	return a.bindAddr(driver.CallMulticastBindAddrV1, mc, nil, mcOffset, p, size)
}

// bindAddr takes mapped memory, and memory that was allocated in the order of a
// stream.
func (a *api) bindAddr(call driver.Call, mc driver.MemHandle, d *driver.Device, mcOffset uint64, p driver.Ptr, size uint64) driver.Result {
	return a.bind(call, mc, d, mcOffset, func() (bound, bool) {
		r, ok := a.m.backing.find(uint64(p))
		if !ok || r.v.mem == nil || r.v.kind != KindMapping && r.v.async == nil || size > r.hi-uint64(p) {
			return bound{}, false
		}
		return bound{r.v.mem, uint64(p) - r.lo, size}, true
	})
}

func (a *api) bind(call driver.Call, mc driver.MemHandle, d *driver.Device, mcOffset uint64, what func() (bound, bool)) driver.Result {
	if r := a.enter(call); r != driver.Success {
		return r
	}
	defer a.leave()
	m := a.m
	t, imported := m.team(mc)
	b, ok := what()
	if t == nil || !ok {
		return driver.InvalidValue
	}
	if r := t.checkBind(mcOffset, b, imported); r != driver.Success {
		return r
	}
	b.mem.refs++
	defer b.mem.drop()
	t.mem.refs++
	defer t.mem.drop()
	if r := t.await(); r != driver.Success {
		return r
	}
	dev, r := t.deviceOf(b.mem, d)
	if r != driver.Success {
		return r
	}
	t.forget()
	if !t.acquireSlot() {
		return driver.OutOfMemory
	}
	number, err := t.numberOf(b.mem)
	if err != nil {
		m.note("bind: %v", err)
		return driver.OperatingSystem
	}
	return t.bind(dev, mcOffset, number, b.at, b.size)
}

func (t *team) checkBind(mcOffset uint64, b bound, imported bool) driver.Result {
	unit := t.m.multicastGranularity()
	within := func(off, n, all uint64) bool { return off <= all && n <= all-off }
	switch {
	case b.mem.team != nil,
		b.size == 0 || b.size%unit != 0 || mcOffset%unit != 0 || b.at%unit != 0,
		!within(mcOffset, b.size, t.mem.size) || !within(b.at, b.size, b.mem.size),
		(imported || t.state.types.Load() != 0) && !b.mem.shareable():
		return driver.InvalidValue
	}
	return driver.Success
}

// shareable reports whether the memory could be exported by its maker.
func (mem *memory) shareable() bool {
	return mem.prop.RequestedHandleTypes != driver.HandleNone || mem.pool == nil && mem.shared != nil
}

// deviceOf is the device whose replica memory becomes: the one that is named, or
// the one that it is on.
func (t *team) deviceOf(mem *memory, named *driver.Device) (*device, driver.Result) {
	m := t.m
	var on *device
	if !mem.onHost() {
		on = m.devices[mem.prop.Location.ID]
	}
	d := on
	if named != nil {
		d = m.device(*named)
	}
	switch {
	case named != nil && d == nil:
		return nil, driver.InvalidDevice
	case d == nil: // host memory without a device's name
		return nil, driver.InvalidValue
	case !t.has(d.number()):
		return nil, driver.InvalidDevice
	case on == nil && (mem.prop.Location.Type != driver.LocationHostNUMA || mem.prop.Location.ID != d.attributes[driver.AttrHostNUMAID]),
		on != nil && on != d:
		return nil, driver.InvalidValue
	}
	return d, driver.Success
}

// MulticastUnbind takes the offset and size of a bind. Anything else is undefined on the
// real driver, and refused here.
func (a *api) MulticastUnbind(v driver.MemHandle, d driver.Device, mcOffset, size uint64) driver.Result {
	dev, r := a.enterDevice(driver.CallMulticastUnbind, d)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	m := a.m
	t, _ := m.team(v)
	unit := m.multicastGranularity()
	switch {
	case t == nil || size == 0 || size%unit != 0 || mcOffset%unit != 0:
		return driver.InvalidValue
	case !t.unbind(dev, mcOffset, size):
		m.explain(driver.CallMulticastUnbind, "unbind of [%#x, %#x+%#x) of a multicast object for device %d: nothing was bound with this offset and size", mcOffset, mcOffset, size, d)
		return driver.InvalidValue
	}
	return driver.Success
}

package sim

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// Managed memory lies in one arena of the machine, so that
// the CPU reaches it at its address. What moves is the account: each page is
// charged to the device or the host where it would lie on a real machine.

// managed is what a range of managed memory has beside its bytes.
type managed struct {
	pages  pages
	made   driver.AttachFlags // as it was allocated
	attach driver.AttachFlags
	stream *stream // attached to it alone
	// touched is when a device last touched it: what was not for the longest
	// time is paged out first.
	touched uint64
}

func (d *device) concurrent() bool { return d.attributes[driver.AttrConcurrentManagedAccess] != 0 }

func (a *api) MemAllocManaged(c driver.Context, n uint64, flags driver.AttachFlags) (driver.Ptr, driver.Result) {
	ctx, r := a.enterContext(driver.CallMemAllocManaged, c)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m, d := a.m, ctx.device
	switch {
	case n == 0 || flags != driver.AttachGlobal && flags != driver.AttachHost:
		return 0, driver.InvalidValue
	case d.attributes[driver.AttrManagedMemory] == 0:
		return 0, driver.NotSupported
	}
	prop := d.prop()
	prop.Type = driver.AllocationManaged
	size := roundUp(n, host.PageSize())
	if size < n {
		return 0, driver.OutOfMemory
	}
	// A device that cannot fault has all of its memory from the beginning.
	first := page{at: driver.DeviceInvalid}
	if !d.concurrent() {
		if !m.charge(d.pool, size) {
			return 0, driver.OutOfMemory
		}
		first.at = int32(d.ordinal)
	}
	res := &backing{m: m, kind: KindManagedMemory, context: ctx, managed: &managed{pages: newPages(size, first), made: flags, attach: flags}}
	if r := res.obtain(n, size, prop); r != driver.Success {
		res.managed.pages.each(span{0, size}, m.unpage)
		return 0, r
	}
	res.object = m.track(KindManagedMemory, res.lo, n)
	return driver.Ptr(res.lo), driver.Success
}

// obtain gives a managed range its bytes and its address.
func (r *backing) obtain(n, size uint64, prop driver.AllocationProp) driver.Result {
	if size <= slabPiece && osmem.Linux {
		return r.obtainPiece(n, size, prop)
	}
	mem, result := r.m.newMemory(r.m.managed, size, prop)
	if result != driver.Success {
		return result
	}
	align := host.PageSize()
	if size >= addressAlign {
		align = addressAlign
	}
	p, ok := r.m.acquireAddresses(size, align, 0)
	if !ok {
		mem.drop()
		return driver.OutOfMemory
	}
	r.span, r.mem = span{p, p + n}, mem
	if space.reaches(p) {
		if err := mem.place(p, osmem.AccessReadWrite); err != nil {
			r.m.note("managed memory at %#x: %v", p, errors.Join(err, osmem.Clear(p, size)))
			r.m.giveAddresses(span{p, p + size})
			mem.drop()
			return driver.OutOfMemory
		}
		r.placed = true
	}
	r.m.backing.insert(r.lo, r.hi, r)
	return driver.Success
}

// obtainPiece is obtain for a small size, in a slab.
func (r *backing) obtainPiece(n, size uint64, prop driver.AllocationProp) driver.Result {
	m := r.m
	if !m.charge(m.managed, size) {
		return driver.OutOfMemory
	}
	in, err := m.managedSlabs.acquire(size)
	if err != nil {
		m.managed.give(size)
		m.explain(driver.CallMemAllocManaged, "managed memory: %v", err)
		return driver.OutOfMemory
	}
	r.mem = &memory{machine: m, pool: m.managed, size: size, prop: prop, piece: in, refs: 1}
	r.mem.poison()
	lo := addressOf(in.bytes)
	r.span, r.placed = span{lo, lo + n}, true
	m.backing.insert(r.lo, r.hi, r)
	return driver.Success
}

// pagesAt returns the pages that hold n bytes of managed memory at p, within one
// allocation.
func (m *Machine) pagesAt(p driver.Ptr, n uint64) (*backing, span, bool) {
	r, ok := m.backing.find(uint64(p))
	unit := host.PageSize()
	switch {
	case !ok && m.isSystem(uint64(p), n):
		return m.system, span{uint64(p) / unit * unit, roundUp(uint64(p)+n, unit)}, true
	case !ok || r.v.managed == nil || n == 0 || n > r.hi-uint64(p):
		return nil, span{}, false
	}
	off := uint64(p) - r.lo
	return r.v, span{off / unit * unit, roundUp(off+n, unit)}, true
}

// checkPlace checks that managed pages can lie at a location, and resolves the calling
// thread's node.
func (m *Machine) checkPlace(l driver.Location) (driver.Location, driver.Result) {
	switch l.Type {
	case driver.LocationDevice:
		d := m.device(driver.Device(l.ID))
		switch {
		case d == nil:
			return l, driver.InvalidDevice
		case !d.concurrent():
			return l, driver.InvalidDevice
		}
		return l, driver.Success
	case driver.LocationHost:
		return driver.Location{Type: driver.LocationHost, ID: driver.DeviceCPU}, driver.Success
	case driver.LocationHostNUMA:
		if l.ID == 0 { // the only node
			return l, driver.Success
		}
	case driver.LocationHostNUMACurrent:
		return driver.Location{Type: driver.LocationHostNUMACurrent}, driver.Success
	}
	return l, driver.InvalidValue
}

// ordinalOf returns a location as the account names it.
func ordinalOf(l driver.Location) int32 {
	if l.Type == driver.LocationDevice {
		return l.ID
	}
	return driver.DeviceCPU
}

// ofOrdinal returns the location that a device's ordinal means in the older forms.
func ofOrdinal(device int32) driver.Location {
	if device == driver.DeviceCPU {
		return driver.Location{Type: driver.LocationHost}
	}
	return driver.Location{Type: driver.LocationDevice, ID: device}
}

func (a *api) MemAdvise(c driver.Context, p driver.Ptr, n uint64, advice driver.Advice, l driver.Location) driver.Result {
	return a.advise(driver.CallMemAdvise, c, p, n, advice, l)
}

func (a *api) MemAdviseV1(c driver.Context, p driver.Ptr, n uint64, advice driver.Advice, device int32) driver.Result {
	return a.advise(driver.CallMemAdviseV1, c, p, n, advice, ofOrdinal(device))
}

func (a *api) advise(call driver.Call, c driver.Context, p driver.Ptr, n uint64, advice driver.Advice, l driver.Location) driver.Result {
	if _, r := a.enterContext(call, c); r != driver.Success {
		return r
	}
	defer a.leave()
	r, s, ok := a.m.pagesAt(p, n)
	if !ok {
		return driver.InvalidValue
	}
	switch advice {
	case driver.AdviseSetPreferredLocation, driver.AdviseSetAccessedBy, driver.AdviseUnsetAccessedBy:
		if advice != driver.AdviseSetPreferredLocation && l.Type != driver.LocationDevice && l.Type != driver.LocationHost {
			return driver.InvalidValue
		}
		if l.Type == driver.LocationDevice && a.m.device(driver.Device(l.ID)) == nil {
			return driver.InvalidValue
		}
		var result driver.Result
		if l, result = a.m.checkPlace(l); result != driver.Success {
			return result
		}
	case driver.AdviseSetReadMostly, driver.AdviseUnsetReadMostly, driver.AdviseUnsetPreferredLocation:
	default:
		return driver.InvalidValue
	}
	r.managed.pages.each(s, func(s span, pg *page) {
		switch advice {
		case driver.AdviseSetReadMostly:
			pg.readMostly = true
		case driver.AdviseUnsetReadMostly:
			pg.readMostly = false
			a.m.dropCopies(s, pg)
		case driver.AdviseSetPreferredLocation:
			if l.Type == driver.LocationDevice || l.Type == driver.LocationHost {
				pg.preferred = l // as the real driver, which takes nodes and keeps what was there
			}
		case driver.AdviseUnsetPreferredLocation:
			pg.preferred = driver.Location{}
		case driver.AdviseSetAccessedBy:
			pg.accessedBy |= placeBit(ordinalOf(l))
		case driver.AdviseUnsetAccessedBy:
			pg.accessedBy &^= placeBit(ordinalOf(l))
		}
	})
	return driver.Success
}

// StreamAttachMemAsync says which streams may work on managed memory of a
// device without concurrent access.
func (a *api) StreamAttachMemAsync(c driver.Context, h driver.Stream, p driver.Ptr, n uint64, flags driver.AttachFlags) driver.Result {
	s, r := a.enterStream(driver.CallStreamAttachMemAsync, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	m := a.m
	find := func() *backing {
		if at, ok := m.backing.find(uint64(p)); ok && at.v.managed != nil && at.lo == uint64(p) {
			return at.v
		}
		return nil
	}
	res := find()
	switch {
	case res == nil || n != 0 && n != res.size():
		return driver.InvalidValue
	case flags != driver.AttachGlobal && flags != driver.AttachHost && flags != driver.AttachSingle:
		return driver.InvalidValue
	case flags == driver.AttachSingle && s.isLegacy():
		return driver.InvalidValue
	}
	if r := s.refuseCapture(); r != driver.Success {
		return r
	}
	_, r = s.submit(task{run: func(site) *fault {
		m.mu.Lock()
		defer m.mu.Unlock()
		if now := find(); now == res {
			res.managed.attach, res.managed.stream = flags, nil
			if flags == driver.AttachSingle {
				res.managed.stream = s
			}
		}
		return nil
	}})
	return r
}

// detach ends the attachments to a stream that was destroyed.
func (s *stream) detach() {
	if s.context.device.concurrent() {
		return
	}
	for r := range s.m.backing.all() {
		if at := r.v.managed; at != nil && at.stream == s {
			at.attach, at.stream = at.made, nil
		}
	}
}

// refuseCapture refuses work that no graph can have, and ends the capture of
// the stream that it was submitted to.
func (s *stream) refuseCapture() driver.Result {
	if s.joined == nil {
		return driver.Success
	}
	s.joined.invalidate()
	return driver.CaptureUnsupported
}

// HostTouch moves the pages to where an access of the CPU moves them. It refuses the access
// while a device without concurrent access has work that could touch the pages.
func (a *api) HostTouch(p driver.Ptr, n uint64, write bool) driver.Result {
	m := a.m
	m.mu.Lock()
	defer m.mu.Unlock()
	r, s, ok := m.pagesAt(p, n)
	switch {
	case m.closed:
		return driver.Deinitialized
	case !ok:
		return driver.InvalidValue
	case r == m.system:
		r.touch(driver.DeviceCPU, s, write)
		return driver.Success
	case !r.placed:
		return driver.NotSupported
	}
	if d := r.kept(); d != nil {
		m.note("the CPU touches managed memory [%#x, %#x+%#x) while device %d, which has no concurrent managed access, works: "+
			"on a real one the process would crash here; wait for the device first", uint64(p), uint64(p), n, d.ordinal)
		return driver.IllegalState
	}
	if !r.context.device.concurrent() {
		return driver.Success
	}
	if why := r.touch(driver.DeviceCPU, s, write); why != "" {
		m.note("the CPU touches managed memory at %#x: %s", uint64(p), why)
		return driver.OutOfMemory
	}
	return driver.Success
}

// kept returns a device without concurrent access that has work on a stream that the
// memory is attached to, so that the CPU must not touch the memory, or nil.
func (r *backing) kept() *device {
	for _, c := range r.m.contexts {
		if c.device.concurrent() {
			continue
		}
		for s := range c.working {
			if at := r.managed; at.attach == driver.AttachGlobal || at.attach == driver.AttachSingle && at.stream == s {
				return c.device
			}
		}
	}
	return nil
}

// attached returns why work must not touch the memory, or "".
func (r *backing) attached(at site) string {
	const remedy = "and device %d has no concurrent managed access: attach it to %s with cuStreamAttachMemAsync"
	d, now := at.device, r.managed
	switch {
	case d.concurrent() || now.attach == driver.AttachGlobal:
	case now.attach == driver.AttachHost:
		return fmt.Sprintf("the managed memory is attached to the host, "+remedy, d.ordinal, "a stream or to all")
	case now.stream != at.stream:
		return fmt.Sprintf("the managed memory is attached to stream %#x alone, this is work of stream %#x, "+remedy,
			uintptr(now.stream.handle), uintptr(at.stream.handle), d.ordinal, "that one or to all")
	}
	return ""
}

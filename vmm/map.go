package vmm

import (
	"fmt"
	"slices"
	"sort"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Map maps all of p at an offset of the range, which must be free there. No device can
// access the memory until SetAccess grants it. The mapping keeps its memory alive, and
// the range cannot be closed before it; the caller closes the mapping.
func (r *Reservation) Map(off int, p Physical) (*Mapping, error) {
	const op = "vmm.Reservation.Map"
	in, err := r.acquire(op)
	if err != nil {
		return nil, err
	}
	defer in.closer.Release()
	if err := in.checkOffset(op, off); err != nil {
		return nil, err
	}
	h, err := phys.Hold(op, in.System(), p)
	if err != nil {
		return nil, err
	}
	if err := mappable(op, h); err != nil {
		return nil, phys.Abandon(op, err, h)
	}
	m := &Mapping{}
	var one [1]*mapping
	maps, err := in.mapRun(op, one[:0], uint64(off), []*phys.Handle{h}, nil)
	if err != nil {
		return nil, phys.Abandon(op, err, h)
	}
	m.m = maps[0]
	m.m.Watch(&m.watched)
	return m, nil
}

// MapRun maps several pieces of memory one behind the other, from an offset of the
// range on, and grants access to the whole run in one driver call, which is far cheaper
// than one call each, especially for peers. The memory may be on several devices.
// Without access no device can access it until SetAccess grants it. Each mapping is
// closed separately, as one of Map is. After an error nothing is mapped.
func (r *Reservation) MapRun(off int, access []Access, memory ...Physical) (made []*Mapping, err error) {
	const op = "vmm.Reservation.MapRun"
	in, err := r.acquire(op)
	if err != nil {
		return nil, err
	}
	defer in.closer.Release()
	if len(memory) == 0 {
		return nil, errs.Invalid(op, "no memory", "pass at least one Allocation")
	}
	if err := in.checkOffset(op, off); err != nil {
		return nil, err
	}
	handles := make([]*phys.Handle, 0, len(memory))
	defer func() {
		if err != nil {
			err = phys.Abandon(op, err, handles...)
		}
	}()
	var list accessList
	for i, p := range memory {
		h, err := phys.Hold(op, in.System(), p)
		if err != nil {
			return nil, err
		}
		handles = append(handles, h)
		if err := mappable(op, h); err != nil {
			return nil, err
		}
		if len(access) > 0 && (i == 0 || h.Asked.Location != handles[i-1].Asked.Location) {
			if list, err = checkAccess(op, in.system, h.Asked.Location, access); err != nil {
				return nil, err
			}
		}
	}
	// No device had access before, so none is to be taken.
	maps, err := in.mapRun(op, nil, uint64(off), handles, accessList(nil).with(list))
	if err != nil {
		return nil, err
	}
	made = make([]*Mapping, len(maps))
	for i, m := range maps {
		made[i] = &Mapping{m: m}
		m.Watch(&made[i].watched)
	}
	return made, nil
}

// checkOffset refuses an offset at which nothing can be mapped.
func (r *reservation) checkOffset(op string, off int) error {
	if off < 0 {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("offset %d", off),
			Hint: "offsets are not negative"})
	}
	if gran := int(r.gran); off%gran != 0 {
		return errs.Invalid(op, fmt.Sprintf("offset %d", off), "offsets are multiples of the granularity, "+errs.Bytes(gran))
	}
	return nil
}

// mapRun maps handles one behind the other, grants access in one call if there is any,
// and takes over one reference to each handle. After an error nothing has changed, and
// the references are still the caller's. maps is empty; the mappings are appended to it
// to use its capacity.
func (r *reservation) mapRun(op string, maps []*mapping, off uint64, handles []*phys.Handle, access accessList) ([]*mapping, error) {
	var size uint64
	for _, h := range handles {
		size += h.Size
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closer.Closed() {
		return nil, errs.ClosedError(op, "reservation")
	}
	at := r.findLocked(off)
	if err := r.checkFreeLocked(op, off, size, at); err != nil {
		return nil, err
	}
	if err := r.checkLossLocked(op, handles); err != nil {
		return nil, err
	}
	sys := r.System()
	end := off
	used := 0 // until the mappings are counted, which whoever takes the memory reads
	defer func() {
		for _, h := range handles[:used] {
			h.Done()
		}
	}()
	for _, h := range handles {
		d, err := h.Use(op)
		if err != nil {
			return nil, r.undoRunLocked(maps, err)
		}
		used++
		if res := sys.Drv.MemMap(r.base+driver.Ptr(end), h.Size, 0, d); res != driver.Success {
			return nil, r.undoRunLocked(maps, sys.CallError(op, driver.CallMemMap, res,
				fmt.Sprintf("%s at %#x", errs.Bytes(h.Size), uint64(r.base)+end), h.Devices()...))
		}
		maps = append(maps, &mapping{res: r, phys: h, off: end, access: access})
		end += h.Size
	}
	if len(access) > 0 {
		if res := sys.Drv.MemSetAccess(r.base+driver.Ptr(off), size, access); res != driver.Success {
			return nil, r.undoRunLocked(maps, sys.CallError(op, driver.CallMemSetAccess, res,
				fmt.Sprintf("%s at %#x", errs.Bytes(size), uint64(r.base)+off), concerned(maps, access)...))
		}
	}
	for _, m := range maps {
		m.phys.Mappings.Add(1)
		sys.Track(m, life.KindMapping, m.phys.Size)
	}
	r.maps = slices.Insert(r.maps, at, maps...)
	return maps, nil
}

// checkFreeLocked refuses a part that exceeds the reservation, has a mapping, or has a
// stuck one.
func (r *reservation) checkFreeLocked(op string, off, size uint64, at int) error {
	if off > r.size || size > r.size-off {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s of %s", errs.Bytes(size), errs.Bytes(off), errs.Bytes(r.size)),
			Hint:  "map inside the range, or reserve a larger one"})
	}
	if at < len(r.maps) && r.maps[at].off < off+size {
		m, hint := r.maps[at], "map elsewhere, or close that mapping first"
		if m.closing != nil {
			hint = "that mapping is closing: map elsewhere, or wait for its Released, which tells when the addresses are free"
		}
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
			Asked: fmt.Sprintf("%s at offset %s, where %s are mapped at offset %s",
				errs.Bytes(size), errs.Bytes(off), errs.Bytes(m.phys.Size), errs.Bytes(m.off)),
			Hint: hint})
	}
	for _, m := range r.stuck {
		if !m.unmapped && m.off < off+size && off < m.off+m.phys.Size {
			return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
				Asked: fmt.Sprintf("%s at offset %s, where %s at offset %s could not be unmapped after an earlier failure",
					errs.Bytes(size), errs.Bytes(off), errs.Bytes(m.phys.Size), errs.Bytes(m.off)),
				Hint: "use another range; Close of the range, or Clip of the buffer, tries the unmapping again"})
		}
	}
	return nil
}

// checkLossLocked refuses memory on a lost device, and a range in which mappings were
// dropped with their device.
func (r *reservation) checkLossLocked(op string, handles []*phys.Handle) error {
	if r.dropped != driver.Success {
		return errs.New(errs.Failure{Op: op, Kind: errs.DeviceLost, Result: r.dropped,
			Asked: fmt.Sprintf("the range at %#x, of which a part was dropped with its device", uint64(r.base)),
			Hint:  "reserve another range for memory of the devices that go on"})
	}
	for _, h := range handles {
		if res := h.Lost(); res != driver.Success {
			return errs.New(errs.Failure{Op: op, Call: driver.CallMemMap, Result: res, Asked: errs.Bytes(h.Size)})
		}
	}
	return nil
}

// findLocked returns the index of the first mapping that ends behind off.
func (r *reservation) findLocked(off uint64) int {
	return sort.Search(len(r.maps), func(i int) bool { return r.maps[i].off+r.maps[i].phys.Size > off })
}

// concerned returns the devices that a call on mappings can involve: those that hold
// the memory, and those that have or get access.
func concerned(maps []*mapping, access accessList) []driver.Device {
	devices := access.devices()
	for _, m := range maps {
		devices = append(append(devices, m.phys.Devices()...), m.access.devices()...)
	}
	return devices
}

// mappable refuses a mapping that the driver would wait for without end.
func mappable(op string, h *phys.Handle) error {
	if h.NotYet == nil {
		return nil
	}
	return h.NotYet(op)
}

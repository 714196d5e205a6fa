package vmm

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// SetAccess changes the access of places to a part of the range that consists of whole
// mappings, in one driver call. If it takes access away it first waits for the devices
// concerned, as Close does.
func (r *Reservation) SetAccess(off, size int, access ...Access) error {
	const op = "vmm.Reservation.SetAccess"
	in, err := r.acquire(op)
	if err != nil {
		return err
	}
	defer in.closer.Release()
	if off < 0 || size <= 0 {
		return errPart(op, off, size)
	}
	return in.setAccess(op, uint64(off), uint64(size), access)
}

// errPart returns the error for a part that no range has.
func errPart(op string, off, size int) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("offset %d, %s", off, errs.Count(size, "byte")),
		Hint: "name a part of the range"})
}

// setAccess changes the access of the whole mappings in a part of the range.
func (r *reservation) setAccess(op string, off, size uint64, access []Access) error {
	changes, from, err := r.planAccess(op, off, size, access)
	if err != nil {
		return err
	}
	// Devices that lose access must not be using the memory.
	if err := r.System().WaitDevices(op, from); err != nil {
		return err
	}
	return r.applyAccess(op, off, size, changes)
}

// planAccess checks a change, and returns the devices that it takes access from.
func (r *reservation) planAccess(op string, off, size uint64, access []Access) (changes accessList, from []driver.Device, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	run, err := r.runLocked(op, off, size)
	if err != nil {
		return nil, nil, err
	}
	for i, m := range run {
		if i == 0 || m.phys.Asked.Location != run[i-1].phys.Asked.Location {
			if changes, err = checkAccess(op, r.system, m.phys.Asked.Location, access); err != nil {
				return nil, nil, err
			}
		}
		if err := m.mayLose(op, changes); err != nil {
			return nil, nil, err
		}
		if i == 0 || !m.access.same(run[i-1].access) {
			from = append(from, m.access.lowered(changes)...)
		}
	}
	return changes, from, nil
}

// applyAccess makes a change that was checked and waited for. After an error the access
// is unchanged.
func (r *reservation) applyAccess(op string, off, size uint64, changes accessList) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	run, err := r.runLocked(op, off, size)
	if err != nil {
		return err
	}
	sys := r.System()
	for _, m := range run {
		if res := m.phys.Lost(); res != driver.Success {
			return errs.New(errs.Failure{Op: op, Call: driver.CallMemSetAccess, Result: res,
				Asked: fmt.Sprintf("%s at %#x", errs.Bytes(m.phys.Size), uint64(m.ptr()))})
		}
		if err := m.mayLose(op, changes); err != nil {
			return err
		}
	}
	if res := sys.Drv.MemSetAccess(r.base+driver.Ptr(off), size, changes); res != driver.Success {
		err := sys.CallError(op, driver.CallMemSetAccess, res,
			fmt.Sprintf("%s at %#x", errs.Bytes(size), uint64(r.base)+off), concerned(run, changes)...)
		if res.Lost() {
			return err // closing drops the mappings
		}
		return r.undoAccessLocked(run, changes, err)
	}
	var before, after accessList
	for i, m := range run {
		if i == 0 || !m.access.same(before) {
			before, after = m.access, m.access.with(changes)
		}
		m.access = after
		if len(m.unsure) > 0 {
			m.unsure = m.unsure.except(changes, 0)
		}
	}
	return nil
}

// mayLose refuses to take memory from the host that a Host function uses.
func (m *mapping) mayLose(op string, changes accessList) error {
	home := m.phys.Asked.Location
	if home.Type == driver.LocationDevice || !changes.names(home) || changes.mode(home) >= m.access.mode(home) {
		return nil
	}
	return m.res.views.none(op, m.off, m.off+m.phys.Size)
}

// undoAccessLocked restores the access of a run after a change that may have applied to
// a part of it. A mapping for which that fails too is unsure until a change succeeds.
func (r *reservation) undoAccessLocked(run []*mapping, changes accessList, cause error) error {
	sys := r.System()
	var unsure uint64
	last := driver.Success
	for _, m := range run {
		res := sys.Drv.MemSetAccess(m.ptr(), m.phys.Size, m.access.of(changes))
		if res == driver.Success {
			m.unsure = m.unsure.except(changes, 0)
			continue
		}
		m.access = m.access.upper(changes)
		m.unsure = append(m.unsure.except(changes, len(changes)), changes...)
		unsure, last = unsure+m.phys.Size, sys.Observe(res, concerned([]*mapping{m}, changes)...)
	}
	if unsure == 0 || last.Lost() {
		return cause
	}
	return fmt.Errorf("%w (and undoing it failed: %v returned %v, so the access to %s of it is not known until a change of access succeeds)",
		cause, driver.CallMemSetAccess, last, errs.Bytes(unsure))
}

// unsure reports whether the access of any mapping is unknown.
func (r *reservation) unsure() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.maps, func(m *mapping) bool { return len(m.unsure) > 0 })
}

// devices returns those that have access to any mapping, as far as the driver is
// concerned.
func (r *reservation) devices() (with []driver.Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, m := range r.maps {
		if i > 0 && m.access.same(r.maps[i-1].access) {
			continue
		}
		for _, d := range m.access.devices() {
			if !slices.Contains(with, d) {
				with = append(with, d)
			}
		}
	}
	return with
}

// runLocked returns the mappings that make up exactly a part of the range.
func (r *reservation) runLocked(op string, off, size uint64) ([]*mapping, error) {
	from := r.findLocked(off)
	to := from
	end := off
	for to < len(r.maps) && r.maps[to].off == end && end < off+size {
		end += r.maps[to].phys.Size
		to++
	}
	if to == from || end != off+size || r.maps[from].off != off {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s, which is no run of whole mappings", errs.Bytes(size), errs.Bytes(off)),
			Hint:  "a mapping changes access as a whole, and gaps have none"})
	}
	return r.maps[from:to], nil
}

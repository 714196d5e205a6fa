package vrange

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
)

// SetAccess changes the access of places to a part of the range that consists of whole
// mappings, in one driver call. check returns the change for memory at a location, or
// refuses it. If access is taken away SetAccess first waits for the devices concerned.
func (r *Range) SetAccess(op string, off, size uint64, check func(memory driver.Location) (memspec.Access, error)) error {
	changes, from, err := r.planAccess(op, off, size, check)
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
func (r *Range) planAccess(op string, off, size uint64, check func(memory driver.Location) (memspec.Access, error)) (changes memspec.Access, from []driver.Device, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var few [4]*Mapping
	run, err := r.runLocked(op, few[:0], off, size)
	if err != nil {
		return nil, nil, err
	}
	for i, m := range run {
		if i == 0 || m.Memory.Asked.Location != run[i-1].Memory.Asked.Location {
			if changes, err = check(m.Memory.Asked.Location); err != nil {
				return nil, nil, err
			}
		}
		if err := m.mayChange(op, changes); err != nil {
			return nil, nil, err
		}
		if m.presence == here && (i == 0 || !m.access.Same(run[i-1].access)) {
			from = append(from, m.access.Lowered(changes)...)
		}
	}
	return changes, from, nil
}

// applyAccess makes a change that was checked and waited for. After an error the access
// is unchanged.
func (r *Range) applyAccess(op string, off, size uint64, changes memspec.Access) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var few [4]*Mapping
	run, err := r.runLocked(op, few[:0], off, size)
	if err != nil {
		return err
	}
	for _, m := range run {
		if res := m.Memory.Lost(); res != driver.Success {
			return errs.New(errs.Failure{Op: op, Call: driver.CallMemSetAccess, Result: res,
				Asked: fmt.Sprintf("%s at %#x", errs.Bytes(m.Memory.Size), uint64(m.Ptr()))})
		}
		if err := m.mayChange(op, changes); err != nil {
			return err
		}
	}
	// Memory that is away gets its access when it is put back.
	for part := range runs(run, (*Mapping).mapped, adjacent) {
		if err := r.grantLocked(op, part, changes); errors.Is(err, cuda.ErrDeviceLost) {
			return err // closing drops the mappings
		} else if err != nil {
			return r.undoAccessLocked(run, changes, err)
		}
	}
	var before, after memspec.Access
	for i, m := range run {
		if i == 0 || !m.access.Same(before) {
			before, after = m.access, m.access.With(changes)
		}
		m.access = after
		if len(m.unsure) > 0 {
			m.unsure = m.unsure.Except(changes, 0)
		}
	}
	return nil
}

// mayChange refuses to change the access of a mapping whose memory moves, to give access to
// one whose memory is away, and to take memory from a Host function.
func (m *Mapping) mayChange(op string, changes memspec.Access) error {
	if m.presence == paused || m.presence == away && !m.access.Lowers(changes) {
		return m.sleep.Error(op)
	}
	return m.mayLose(op, changes)
}

// mayLose refuses to take memory from the host that a Host function uses.
func (m *Mapping) mayLose(op string, changes memspec.Access) error {
	home := m.Memory.Asked.Location
	if home.Type == driver.LocationDevice || !changes.Names(home) || changes.Mode(home) >= m.access.Mode(home) {
		return nil
	}
	return m.Range.Views.None(op, m.Off, m.end())
}

// undoAccessLocked restores the access of a run after a change that may have applied to
// a part of it. A mapping for which that fails too is unsure until a change succeeds.
func (r *Range) undoAccessLocked(run []*Mapping, changes memspec.Access, cause error) error {
	sys := r.System()
	var unsure uint64
	last := driver.Success
	for _, m := range run {
		if !m.mapped() {
			continue
		}
		res := sys.Drv.MemSetAccess(m.Ptr(), m.Memory.Size, m.access.Of(changes))
		if res == driver.Success {
			m.unsure = m.unsure.Except(changes, 0)
			continue
		}
		m.access = m.access.Upper(changes)
		m.unsure = append(m.unsure.Except(changes, len(changes)), changes...)
		unsure, last = unsure+m.Memory.Size, sys.Observe(res, concerned([]*Mapping{m}, changes)...)
	}
	if unsure == 0 || last.Lost() {
		return cause
	}
	return fmt.Errorf("%w (and undoing it failed: %v returned %v, so the access to %s of it is not known until a change of access succeeds)",
		cause, driver.CallMemSetAccess, last, errs.Bytes(unsure))
}

// Unsure reports whether the access of any mapping is unknown.
func (r *Range) Unsure() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for m := range r.maps.from(0) {
		if len(m.unsure) > 0 {
			return true
		}
	}
	return false
}

// runLocked appends the mappings that make up exactly a part of the range to run.
func (r *Range) runLocked(op string, run []*Mapping, off, size uint64) ([]*Mapping, error) {
	end := off
	for m := range r.maps.from(off) {
		if m.Off != end || end >= off+size {
			break
		}
		run = append(run, m)
		end = m.end()
	}
	if len(run) == 0 || end != off+size {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s, which is no run of whole mappings", errs.Bytes(size), errs.Bytes(off)),
			Hint:  "a mapping changes access as a whole, and gaps have none"})
	}
	return run, nil
}

package vmm

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// unmapRun takes adjacent mappings out of use, unmaps them in one call and releases their
// handles. It goes forward: mappings for which that fails are stuck, and it may be called
// again with the same mappings.
func (r *reservation) unmapRun(op string, maps []*mapping) error {
	if len(maps) == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.findLocked(maps[0].off); at < len(r.maps) && r.maps[at] == maps[0] {
		r.maps = slices.Delete(r.maps, at, at+len(maps))
	}
	return r.unmapAndReleaseLocked(op, maps)
}

// finish tries the stuck mappings again.
func (r *reservation) finish(op string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.stuck) == 0 {
		return nil
	}
	return r.unmapAndReleaseLocked(op, slices.Clone(r.stuck))
}

// unmapAndReleaseLocked unmaps mappings that are out of use, and releases their memory. A
// run that failed once may be half unmapped, so it is tried again one by one: unmapping a
// part that is not mapped is not an error (measured). The caller holds mu.
func (r *reservation) unmapAndReleaseLocked(op string, maps []*mapping) (err error) {
	sys := r.System()
	unmap := func(maps []*mapping) error {
		first, last := maps[0], maps[len(maps)-1]
		size := last.off + last.phys.Size - first.off
		switch res := sys.Drv.MemUnmap(first.ptr(), size); {
		case res == driver.Success:
		case sys.Observe(res, concerned(maps, nil)...).Lost():
			r.dropped = res
		case first.phys.Lost() != driver.Success:
			r.dropped = first.phys.Lost()
		default:
			for _, m := range maps {
				m.tried = true
			}
			return sys.CallError(op, driver.CallMemUnmap, res, fmt.Sprintf("%s at %#x", errs.Bytes(size), uint64(first.ptr())))
		}
		for _, m := range maps {
			m.unmapped = true
			m.phys.Mappings.Add(-1)
			m.Untrack()
		}
		return nil
	}
	if !maps[0].tried && !maps[0].unmapped {
		err = unmap(maps)
	}
	for i := 0; i < len(maps) && err == nil; i++ {
		m := maps[i]
		if !m.unmapped {
			err = unmap(maps[i : i+1])
		}
		if err == nil && !m.released {
			if res := m.phys.Release(); res != driver.Success {
				err = sys.CallError(op, driver.CallMemRelease, res, errs.Bytes(m.phys.Size), m.phys.Devices()...)
			} else {
				m.released = true
			}
		}
	}
	if err != nil {
		r.keepLocked(maps)
	}
	r.stuck = slices.DeleteFunc(r.stuck, func(m *mapping) bool {
		if m.released {
			r.stuckBytes.Add(-m.phys.Size)
		}
		return m.released
	})
	return err
}

// undoRunLocked unmaps a run that has not been used yet. If that fails too the run is
// stuck, with a reference to its memory, and the error names it.
func (r *reservation) undoRunLocked(maps []*mapping, cause error) error {
	if len(maps) == 0 {
		return cause
	}
	sys := r.System()
	first, last := maps[0], maps[len(maps)-1]
	size := last.off + last.phys.Size - first.off
	res := sys.Drv.MemUnmap(first.ptr(), size)
	if res == driver.Success {
		return cause
	}
	if sys.Observe(res, concerned(maps, nil)...).Lost() {
		r.dropped = res
		return cause
	}
	for _, m := range maps {
		m.phys.Retain()
		m.tried = true
		m.phys.Mappings.Add(1)
		sys.Track(m, life.KindMapping, m.phys.Size)
	}
	r.keepLocked(maps)
	return fmt.Errorf("%w (and undoing it failed: %v returned %v, so %s at %#x are out of use)",
		cause, driver.CallMemUnmap, res, errs.Bytes(size), uint64(first.ptr()))
}

// keepLocked adds mappings to the stuck ones.
func (r *reservation) keepLocked(maps []*mapping) {
	for _, m := range maps {
		if !m.released && !slices.Contains(r.stuck, m) {
			r.stuck = append(r.stuck, m)
			r.stuckBytes.Add(m.phys.Size)
		}
	}
}

// stuckInLocked returns the stuck mappings in a part of the range.
func (r *reservation) stuckInLocked(off, size uint64) (stuck []*mapping) {
	for _, m := range r.stuck {
		if m.off < off+size && off < m.off+m.phys.Size {
			stuck = append(stuck, m)
		}
	}
	return stuck
}

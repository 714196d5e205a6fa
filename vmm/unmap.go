package vmm

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// unmapRun takes adjacent mappings out of use, unmaps them in one call and gives
// up their handles. It goes forward: what it does not manage is left, and it may
// be called again with the same mappings.
func (r *reservation) unmapRun(op string, maps []*mapping) error {
	if len(maps) == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.findLocked(maps[0].off); at < len(r.maps) && r.maps[at] == maps[0] {
		r.maps = slices.Delete(r.maps, at, at+len(maps))
	}
	return r.giveBackLocked(op, maps)
}

// finish gives back what was left, as far as the driver lets it.
func (r *reservation) finish(op string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.left) == 0 {
		return nil
	}
	return r.giveBackLocked(op, slices.Clone(r.left))
}

// giveBackLocked is unmapRun for mappings that are out of use, with the lock held. A
// run that failed once may be half unmapped, so it is tried again piece by
// piece: unmapping what is not mapped is no error (measured).
func (r *reservation) giveBackLocked(op string, maps []*mapping) (err error) {
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
	r.left = slices.DeleteFunc(r.left, func(m *mapping) bool {
		if m.released {
			r.leftBytes.Add(-m.phys.Size)
		}
		return m.released
	})
	return err
}

// undoRunLocked unmaps a run that has not been used yet. Where that fails too the run
// is left, with a count of its memory: the error names it.
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

// keepLocked remembers mappings as left.
func (r *reservation) keepLocked(maps []*mapping) {
	for _, m := range maps {
		if !m.released && !slices.Contains(r.left, m) {
			r.left = append(r.left, m)
			r.leftBytes.Add(m.phys.Size)
		}
	}
}

// release lets go of memory whose mapping failed with cause. Where that fails
// too the memory is left, and the error says so.
func (r *reservation) release(cause error, handles ...*phys.Handle) error {
	for _, h := range handles {
		if res := h.Release(); res != driver.Success {
			r.mu.Lock()
			r.keepLocked([]*mapping{{res: r, phys: h, tried: true, unmapped: true}})
			r.mu.Unlock()
			cause = fmt.Errorf("%w (and undoing it failed: %v returned %v, so %s stay taken)",
				cause, driver.CallMemRelease, res, errs.Bytes(h.Size))
		}
	}
	return cause
}

func (r *reservation) leftInLocked(off, size uint64) (left []*mapping) {
	for _, m := range r.left {
		if m.off < off+size && off < m.off+m.phys.Size {
			left = append(left, m)
		}
	}
	return left
}

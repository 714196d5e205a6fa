package vrange

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Unmap takes adjacent mappings out of use, unmaps them in one call and releases their
// memory. It goes forward: mappings for which that fails are stuck, and it may be called
// again with the same mappings.
func (r *Range) Unmap(op string, maps ...*Mapping) error {
	if len(maps) == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.maps.get(maps[0].Off) == maps[0] {
		r.maps.remove(maps)
	}
	return r.unmapAndReleaseLocked(op, maps)
}

// UnmapRun is Unmap of the mappings that make up a part of the range. The caller knows that
// the GPU has passed. After an error the run is out of use; Close, or UnmapRun of the same
// run, tries again.
func (r *Range) UnmapRun(op string, off, size uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if stuck := r.stuckInLocked(off, size); len(stuck) > 0 {
		return r.unmapAndReleaseLocked(op, stuck)
	}
	maps, err := r.runLocked(op, nil, off, size)
	if err != nil {
		return err
	}
	r.maps.remove(maps)
	return r.unmapAndReleaseLocked(op, maps)
}

// Left returns how much memory, in bytes, failures left in a part: a Map that could not be
// undone, or an Unmap. Its addresses are out of use until it is gone.
func (r *Range) Left(off, size uint64) (bytes uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.stuckInLocked(off, size) {
		bytes += m.Memory.Size
	}
	return bytes
}

// Finish tries the stuck mappings again.
func (r *Range) Finish(op string) error {
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
func (r *Range) unmapAndReleaseLocked(op string, maps []*Mapping) (err error) {
	unmap := func(maps []*Mapping) error {
		if err := r.unmapLocked(op, maps); err != nil {
			return err
		}
		for _, m := range maps {
			m.gone()
		}
		return nil
	}
	if err := r.unguardMapsLocked(op, maps); err != nil {
		r.keepLocked(maps)
		return err
	}
	for _, m := range maps {
		if m.presence == away && m.untouched() {
			m.gone()
		}
	}
	for run := range runs(maps, (*Mapping).untouched, adjacent) {
		if err = unmap(run); err != nil {
			break
		}
	}
	for i := 0; i < len(maps) && err == nil; i++ {
		m := maps[i]
		if !m.unmapped {
			err = unmap(maps[i : i+1])
		}
		if err == nil && !m.released {
			if res := m.Memory.Release(); res != driver.Success {
				err = r.System().CallError(op, driver.CallMemRelease, res, errs.Bytes(m.Memory.Size), m.Memory.Devices()...)
			} else {
				m.released = true
			}
		}
	}
	if err != nil {
		r.keepLocked(maps)
	}
	r.stuck = slices.DeleteFunc(r.stuck, func(m *Mapping) bool {
		if m.released {
			r.stuckBytes.Add(-m.Memory.Size)
		}
		return m.released
	})
	return err
}

// gone records that nothing is mapped there any more.
func (m *Mapping) gone() {
	m.unmapped = true
	m.Memory.Mappings.Add(-1)
	m.Untrack()
}

// undoRunLocked unmaps a run that has not been used yet. If that fails too the run is
// stuck, with a reference to its memory, and the error names it.
func (r *Range) undoRunLocked(maps []*Mapping, cause error) error {
	if len(maps) == 0 {
		return cause
	}
	sys := r.System()
	first, last := maps[0], maps[len(maps)-1]
	size := last.end() - first.Off
	res := sys.Drv.MemUnmap(first.Ptr(), size)
	if res == driver.Success {
		return cause
	}
	if sys.Observe(res, concerned(maps, nil)...).Lost() {
		r.dropped = res
		return cause
	}
	for _, m := range maps {
		m.Memory.Retain()
		m.tried = true
		m.Memory.Mappings.Add(1)
		sys.Track(m, life.KindMapping, m.Memory.Size)
	}
	r.keepLocked(maps)
	return fmt.Errorf("%w (and undoing it failed: %v returned %v, so %s at %#x are out of use)",
		cause, driver.CallMemUnmap, res, errs.Bytes(size), uint64(first.Ptr()))
}

// keepLocked adds mappings to the stuck ones.
func (r *Range) keepLocked(maps []*Mapping) {
	for _, m := range maps {
		if !m.released && !slices.Contains(r.stuck, m) {
			r.stuck = append(r.stuck, m)
			r.stuckBytes.Add(m.Memory.Size)
		}
	}
}

// stuckInLocked returns the stuck mappings in a part of the range.
func (r *Range) stuckInLocked(off, size uint64) (stuck []*Mapping) {
	for _, m := range r.stuck {
		if m.Off < off+size && off < m.end() {
			stuck = append(stuck, m)
		}
	}
	return stuck
}

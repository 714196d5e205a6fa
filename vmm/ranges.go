package vmm

import (
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/ranges"
)

type ranged = ranges.Holder

func init() {
	ranges.SetHooks(func(op string, d *cuda.Device, p Properties) (driver.AllocationProp, uint64, error) {
		return p.resolve(op, d)
	}, func(op string, d *cuda.Device, memory driver.Location, access []Access) ([]driver.AccessDesc, error) {
		return checkAccess(op, d.System(), memory, access)
	}, func(op string, m *Mapping) (*phys.Handle, func(), error) {
		if err := m.acquire(op); err != nil {
			return nil, nil, err
		}
		m.m.phys.Retain()
		return m.m.phys, m.closer.Release, nil
	})
}

// MapRun implements ranges.Range.
func (r *reservation) MapRun(op string, off uint64, chunks []*phys.Handle, access []driver.AccessDesc) error {
	_, err := r.mapRun(op, make([]*mapping, 0, len(chunks)), off, chunks, access)
	return err
}

// UnmapRun implements ranges.Range.
func (r *reservation) UnmapRun(op string, off, size uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if stuck := r.stuckInLocked(off, size); len(stuck) > 0 {
		return r.unmapAndReleaseLocked(op, stuck)
	}
	found, err := r.runLocked(op, off, size)
	if err != nil {
		return err
	}
	maps := slices.Clone(found)
	at := r.findLocked(off)
	r.maps = slices.Delete(r.maps, at, at+len(maps))
	return r.unmapAndReleaseLocked(op, maps)
}

// Left implements ranges.Range.
func (r *reservation) Left(off, size uint64) (bytes uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.stuckInLocked(off, size) {
		bytes += m.phys.Size
	}
	return bytes
}

package vrange

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// guard is a place where scratch memory lies under mappings that are away: work of others that uses
// their addresses all the same reads and writes something of no meaning there, and does not fail.
type guard struct {
	off    uint64
	memory *phys.Handle // with a count
}

func (g guard) end() uint64 { return g.off + g.memory.Size }

// Guard lays scratch memory under mappings that are away, which are in order and of one location: as
// often as its whole size fits in each run of adjacent ones. All places that have any access there
// can read and write it. It returns how many bytes it covers. After an error those are fewer, or none.
func (r *Range) Guard(op string, maps []*Mapping, scratch *phys.Handle) (covered uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dropped != driver.Success {
		return 0, nil
	}
	d, err := scratch.Use(op)
	if err != nil {
		return 0, err
	}
	defer scratch.Done()
	for run := range runs(maps, (*Mapping).empty, adjacent) {
		n, err := r.guardLocked(op, run, scratch, d)
		covered += n
		if err != nil {
			return covered, err
		}
	}
	return covered, nil
}

// empty reports whether nothing is mapped there.
func (m *Mapping) empty() bool { return m.presence == away && !m.tried && !m.unmapped }

// guardLocked lays scratch memory under a run.
func (r *Range) guardLocked(op string, run []*Mapping, scratch *phys.Handle, d driver.MemHandle) (covered uint64, err error) {
	sys, size := r.System(), scratch.Size
	first, end := run[0].Off, run[len(run)-1].end()
	off := first
	for ; off+size <= end; off += size {
		if res := sys.Drv.MemMap(r.Base+driver.Ptr(off), size, 0, d); res != driver.Success {
			err = r.guardError(op, driver.CallMemMap, res, off, size, scratch)
			break
		}
		scratch.Retain()
		r.guards = append(r.guards, guard{off, scratch})
	}
	access := run[0].access
	for i, m := range run[1:] {
		if !m.access.Same(run[i].access) {
			access = access.Upper(m.access)
		}
	}
	access = access.All(driver.AccessReadWrite)
	if off == first || len(access) == 0 {
		return off - first, err
	}
	if res := sys.Drv.MemSetAccess(r.Base+driver.Ptr(first), off-first, access); res != driver.Success {
		_ = r.unguardLocked(op, first, off) // what is refused is tried again by the next change there
		return 0, r.guardError(op, driver.CallMemSetAccess, res, first, off-first, scratch)
	}
	return off - first, err
}

func (r *Range) guardError(op string, call driver.Call, res driver.Result, off, size uint64, scratch *phys.Handle) error {
	return r.System().CallError(op, call, res, fmt.Sprintf("a guard of %s at %#x", errs.Bytes(size), uint64(r.Base)+off), scratch.Devices()...)
}

// Unguard takes scratch memory away from under mappings.
func (r *Range) Unguard(op string, maps []*Mapping) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unguardMapsLocked(op, maps)
}

func (r *Range) unguardMapsLocked(op string, maps []*Mapping) error {
	if len(r.guards) == 0 {
		return nil
	}
	for run := range runs(maps, all, adjacent) {
		if err := r.unguardLocked(op, run[0].Off, run[len(run)-1].end()); err != nil {
			return err
		}
	}
	return nil
}

// unguardLocked takes away all guards that reach into a part of the range. What the driver refuses
// stays, and is an error.
func (r *Range) unguardLocked(op string, from, to uint64) (err error) {
	sys := r.System()
	r.guards = slices.DeleteFunc(r.guards, func(g guard) bool {
		if err != nil || g.end() <= from || to <= g.off {
			return false
		}
		switch res := sys.Drv.MemUnmap(r.Base+driver.Ptr(g.off), g.memory.Size); {
		case res == driver.Success:
		case sys.Observe(res, g.memory.Devices()...).Lost():
			r.dropped = res
		case g.memory.Lost() != driver.Success:
			r.dropped = g.memory.Lost()
		default:
			err = r.guardError(op, driver.CallMemUnmap, res, g.off, g.memory.Size, g.memory)
			return false
		}
		_ = g.memory.Let(op) // what is refused is one of the System's leftovers
		return true
	})
	return err
}

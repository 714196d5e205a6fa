package vrange

import (
	"errors"
	"fmt"
	"iter"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
)

// presence says whether the memory of a mapping is mapped. The table of the range, the
// mapping's access and its count of the memory are the same in all of them, so that what was
// mapped is known while it is away.
//
//	      Pause    Continue  TakeOut  PutBack  Unmap    SetAccess       Host functions,
//	                                                                    exports
//	here  paused   -         -        -        unmaps   yes             yes
//	paused  no     here      away     -        unmaps   no              no
//	away  -        -         -        paused   no call  lower: no call  no
//
// Whoever moves the bytes pauses the mapping: to take it out, and until they are back. "no" is
// ErrSuspended.
type presence uint8

const (
	here presence = iota
	paused
	away
)

// Pause begins a move of the mappings' bytes. While a Host function uses them it returns
// ErrInUse, and for a mapping that is not here ErrSuspended; then nothing has changed.
func (r *Range) Pause(op string, maps []*Mapping, sleep *core.Sleep) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range maps {
		if err := m.hereLocked(op); err != nil {
			return err
		}
		if err := r.Views.None(op, m.Off, m.end()); err != nil {
			return err
		}
	}
	for _, m := range maps {
		m.presence, m.sleep = paused, sleep
	}
	return nil
}

// Continue ends the move of paused mappings. Mappings that are away stay so.
func (r *Range) Continue(maps []*Mapping) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range maps {
		if m.presence == paused {
			m.presence, m.sleep = here, nil
		}
	}
}

// hereLocked refuses an operation on a mapping whose memory is away or on its way.
func (m *Mapping) hereLocked(op string) error {
	if m.presence == here {
		return nil
	}
	return m.sleep.Error(op)
}

// Here refuses an operation on a mapping whose memory is away or on its way.
func (m *Mapping) Here(op string) error {
	m.Range.mu.Lock()
	defer m.Range.mu.Unlock()
	return m.hereLocked(op)
}

// Away reports whether the memory was taken out.
func (m *Mapping) Away() bool {
	m.Range.mu.Lock()
	defer m.Range.mu.Unlock()
	return m.presence == away
}

// Access returns the access that places have to the mapping, which they have again after
// PutBack.
func (m *Mapping) Access() memspec.Access {
	m.Range.mu.Lock()
	defer m.Range.mu.Unlock()
	return m.access
}

// TakeOut unmaps paused mappings, each run of adjacent ones in one call. The caller knows that
// the GPU has passed. It goes forward: a run that the driver refuses is tried again mapping by
// mapping. Mappings for which that fails, too, are away as well, but still pin their memory
// (Pinned); Unpin tries them again.
func (r *Range) TakeOut(op string, maps []*Mapping) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range maps {
		m.presence = away
	}
	var failed error
	for run := range runs(maps, all, adjacent) {
		if r.unmapLocked(op, run) == nil {
			continue
		}
		for i := range run {
			failed = errors.Join(failed, r.unmapLocked(op, run[i:i+1]))
		}
	}
	return failed
}

// Pin is TakeOut of mappings on which work may be in flight that could not be waited for: it
// makes no driver call, and all of them are pinned.
func (r *Range) Pin(maps []*Mapping) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range maps {
		m.presence, m.tried = away, true
	}
}

// Pinned reports whether the mapping, which is away, could not be unmapped: its memory is
// mapped, as far as is known.
func (m *Mapping) Pinned() bool {
	m.Range.mu.Lock()
	defer m.Range.mu.Unlock()
	return m.presence == away && m.tried && !m.unmapped
}

// Unpin tries to unmap again what TakeOut could not.
func (m *Mapping) Unpin(op string) error {
	m.Range.mu.Lock()
	defer m.Range.mu.Unlock()
	return m.unpinLocked(op)
}

func (m *Mapping) unpinLocked(op string) error {
	if m.presence != away || !m.tried || m.unmapped {
		return nil
	}
	if err := m.Range.unmapLocked(op, []*Mapping{m}); err != nil {
		return err
	}
	m.tried = false
	return nil
}

// unmapLocked has the driver unmap a run. After a failure it is not known what of it is
// mapped: unmapping a part that is not mapped is not an error (measured).
func (r *Range) unmapLocked(op string, run []*Mapping) error {
	sys := r.System()
	first := run[0]
	size := run[len(run)-1].end() - first.Off
	switch res := sys.Drv.MemUnmap(first.Ptr(), size); {
	case res == driver.Success:
	case sys.Observe(res, concerned(run, nil)...).Lost():
		r.dropped = res
	case first.Memory.Lost() != driver.Success:
		r.dropped = first.Memory.Lost()
	default:
		for _, m := range run {
			m.tried = true
		}
		return sys.CallError(op, driver.CallMemUnmap, res, fmt.Sprintf("%s at %#x", errs.Bytes(size), uint64(first.Ptr())))
	}
	for _, m := range run {
		m.tried = false
	}
	return nil
}

// PutBack maps mappings that are away again, and grants each run of adjacent ones its access
// in one call. Their memory was given back before. They are paused then. The device reach can
// read and write them until Regrant; the zero Location names none. After an error all are away.
func (r *Range) PutBack(op string, maps []*Mapping, reach driver.Location) (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dropped != driver.Success {
		return errs.New(errs.Failure{Op: op, Kind: errs.DeviceLost, Result: r.dropped,
			Asked: fmt.Sprintf("the range at %#x, of which a part was dropped with its device", uint64(r.Base))})
	}
	if err := r.unguardMapsLocked(op, maps); err != nil {
		return err
	}
	for _, m := range maps {
		if err := m.unpinLocked(op); err != nil {
			return err
		}
	}
	sys := r.System()
	back := 0
	defer func() {
		for _, m := range maps[:back] {
			m.Memory.Done()
			if err == nil {
				m.presence = paused
			}
		}
		if err != nil {
			err = r.takeOutAgainLocked(op, maps[:back], err)
		}
	}()
	for _, m := range maps {
		d, err := m.Memory.Use(op)
		if err != nil {
			return err
		}
		if res := sys.Drv.MemMap(m.Ptr(), m.Memory.Size, 0, d); res != driver.Success {
			m.Memory.Done()
			return sys.CallError(op, driver.CallMemMap, res,
				fmt.Sprintf("%s at %#x", errs.Bytes(m.Memory.Size), uint64(m.Ptr())), m.Memory.Devices()...)
		}
		back++
	}
	for run := range runs(maps, all, granted) {
		if err := r.grantLocked(op, run, run[0].access.Upper(writing(reach))); err != nil {
			return err
		}
	}
	return nil
}

// takeOutAgainLocked undoes a PutBack that failed with cause.
func (r *Range) takeOutAgainLocked(op string, maps []*Mapping, cause error) error {
	var failed error
	for run := range runs(maps, all, adjacent) {
		failed = errors.Join(failed, r.unmapLocked(op, run))
	}
	if failed == nil {
		return cause
	}
	return core.UndoError(cause, failed)
}

// Regrant ends the access of the device that PutBack let reach the mappings, unless it has
// such access of its own.
func (r *Range) Regrant(op string, maps []*Mapping, reach driver.Location) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for run := range runs(maps, all, granted) {
		access := run[0].access
		if access.Mode(reach) == driver.AccessReadWrite {
			continue
		}
		if err := r.grantLocked(op, run, access.Of(writing(reach))); err != nil {
			return err
		}
	}
	return nil
}

func writing(at driver.Location) memspec.Access {
	if at == (driver.Location{}) {
		return nil
	}
	return memspec.Access{{Location: at, Flags: driver.AccessReadWrite}}
}

// grantLocked gives places access to a run.
func (r *Range) grantLocked(op string, run []*Mapping, access memspec.Access) error {
	if len(access) == 0 {
		return nil
	}
	sys, at, size := r.System(), run[0].Ptr(), run[len(run)-1].end()-run[0].Off
	if res := sys.Drv.MemSetAccess(at, size, access); res != driver.Success {
		return sys.CallError(op, driver.CallMemSetAccess, res,
			fmt.Sprintf("%s at %#x", errs.Bytes(size), uint64(at)), concerned(run, access)...)
	}
	return nil
}

// runs iterates over the longest runs of mappings that are to be in one, of which each goes
// with the one before.
func runs(maps []*Mapping, in func(m *Mapping) bool, together func(a, b *Mapping) bool) iter.Seq[[]*Mapping] {
	return func(yield func([]*Mapping) bool) {
		for len(maps) > 0 {
			n := 0
			for ; n < len(maps) && in(maps[n]) && (n == 0 || together(maps[n-1], maps[n])); n++ {
			}
			if n > 0 && !yield(maps[:n]) {
				return
			}
			maps = maps[max(n, 1):]
		}
	}
}

// What runs are made of.
func all(*Mapping) bool            { return true }
func (m *Mapping) mapped() bool    { return m.presence != away }
func (m *Mapping) untouched() bool { return !m.tried && !m.unmapped }

// Mappings that one driver call unmaps, and those that one call grants their access.
func adjacent(a, b *Mapping) bool { return a.end() == b.Off }
func granted(a, b *Mapping) bool  { return adjacent(a, b) && a.access.Same(b.access) }

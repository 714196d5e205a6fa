package pages

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Submit runs the submission of work of this library on a part of the range, which stays
// mapped until then. It refuses holes, and devices without the access.
func (r *Range) Submit(op string, off, size uint64, st *core.Stream, need driver.AccessFlags, submit func() error) error {
	leave, err := r.Enter(op, off, size, st, need)
	if err != nil {
		return err
	}
	defer leave()
	return submit()
}

// Enter is Submit for a caller that calls leave when it has submitted the work.
func (r *Range) Enter(op string, off, size uint64, st *core.Stream, need driver.AccessFlags) (leave func(), err error) {
	if err := r.acquire(op); err != nil {
		return nil, err
	}
	l := r.source.lane(st)
	r.mu.RLock()
	if err := r.allows(op, off, size, st, need); err != nil {
		r.mu.RUnlock()
		r.Closer.Release()
		return nil, err
	}
	return func() {
		r.source.mu.Lock()
		r.copied.add(point{l, l.clock.Touch()})
		r.source.mu.Unlock()
		r.mu.RUnlock()
		r.Closer.Release()
	}, nil
}

// SubmitBoth is Submit for work that reads a part of one range and writes one of another, or of
// the same.
func SubmitBoth(op string, to *Range, off uint64, from *Range, fromOff, size uint64, st *core.Stream, submit func() error) error {
	if to == from {
		return to.Submit(op, off, size, st, driver.AccessReadWrite, func() error {
			if err := to.allows(op, fromOff, size, st, driver.AccessRead); err != nil {
				return err
			}
			return submit()
		})
	}
	type side struct {
		r    *Range
		off  uint64
		need driver.AccessFlags
	}
	first, second := side{to, off, driver.AccessReadWrite}, side{from, fromOff, driver.AccessRead}
	if first.r.Base() > second.r.Base() {
		first, second = second, first // so that copies in opposite directions do not block each other
	}
	return first.r.Submit(op, first.off, size, st, first.need, func() error {
		return second.r.Submit(op, second.off, size, st, second.need, submit)
	})
}

// Check refuses a part of the range that is not mapped throughout.
func (r *Range) Check(op string, off, size uint64) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.Closer.Release()
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.checkLocked(op, off, size)
}

func (r *Range) checkLocked(op string, off, size uint64) error {
	if err := r.awake(op); err != nil {
		return err
	}
	if off > r.res.Size || size > r.res.Size-off {
		return r.fail(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s of %s", errs.Bytes(size), errs.Bytes(off), errs.Bytes(r.res.Size)), Hint: "stay inside the range"})
	}
	if size == 0 {
		return nil
	}
	if hole := r.live.lacks(int(off/r.Page()), int((off+size-1)/r.Page())+1); hole >= 0 {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s of %s, where page %d is a hole", errs.Bytes(size), errs.Bytes(off), r.What(), hole),
			Hint:  "map the page first, with Map or Share"})
	}
	return nil
}

func (r *Range) allows(op string, off, size uint64, st *core.Stream, need driver.AccessFlags) error {
	if err := r.checkLocked(op, off, size); err != nil {
		return err
	}
	at := driver.Location{Type: driver.LocationDevice, ID: int32(st.Ctx.Device)}
	if mode := r.access.Mode(at); mode < need {
		return r.fail(errs.Failure{Op: op, Kind: errs.NotPermitted,
			Asked: fmt.Sprintf("a stream of device %d, which has no such access to the range", st.Ctx.Device),
			Hint:  "name the device in SparseOptions.Access"})
	}
	return nil
}

package managed

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// SetReadMostly advises that the range is mostly read: every processor that reads it then
// gets a copy, and a write discards the copies.
func (r Range) SetReadMostly(mostly bool) error {
	const op = "managed.Range.SetReadMostly"
	advice := driver.AdviseUnsetReadMostly
	if mostly {
		advice = driver.AdviseSetReadMostly
	}
	return r.advised(op, func(m *memory) error { return r.advise(op, advice, theHost) })
}

// ReadMostly reports whether all of the range has that advice.
func (r Range) ReadMostly() (bool, error) {
	var v [1]int32
	err := r.attribute("managed.Range.ReadMostly", driver.RangeReadMostly, v[:])
	return v[0] != 0, err
}

// SetPreferred sets the preferred location of the range: a processor that accesses it then
// does so remotely, if it can, instead of moving the pages. The zero Location removes the
// advice. If the driver refuses a node of the host, the range has no preferred location.
func (r Range) SetPreferred(l cuda.Location) error {
	const op = "managed.Range.SetPreferred"
	return r.advised(op, func(m *memory) error {
		if l == (cuda.Location{}) {
			return r.advise(op, driver.AdviseUnsetPreferredLocation, theHost)
		}
		p, err := m.checkPlace(op, l, false)
		if err == nil {
			err = p.supported(op, m)
		}
		if err == nil && p.Type == driver.LocationHostNUMA {
			// Otherwise the driver would still report the previous location.
			err = r.advise(op, driver.AdviseUnsetPreferredLocation, theHost)
		}
		if err != nil {
			return err
		}
		return r.advise(op, driver.AdviseSetPreferredLocation, p.Location)
	})
}

// Preferred returns the preferred location of all of the range: the zero Location if it
// was never set, or differs within the range. The driver (CUDA 13.0) does not
// report a preferred node of the host: it reads as the zero Location too.
func (r Range) Preferred() (cuda.Location, error) {
	return r.location("managed.Range.Preferred", driver.RangePreferredLocation, driver.RangePreferredType, driver.RangePreferredID)
}

// LastPrefetch returns the location of the last prefetch of all of the range, whether or
// not that is complete, and regardless of accesses since. It is the zero Location if there
// was none, or if it differs within the range.
func (r Range) LastPrefetch() (cuda.Location, error) {
	return r.location("managed.Range.LastPrefetch", driver.RangeLastPrefetch, driver.RangeLastPrefetchType, driver.RangeLastPrefetchID)
}

// location reads a location. Only drivers for CUDA 12.2 or later return nodes.
func (r Range) location(op string, old, kind, id driver.RangeAttribute) (cuda.Location, error) {
	if err := r.acquire(op); err != nil {
		return cuda.Location{}, err
	}
	defer r.release()
	m := r.h.m
	if !m.sys.Drv.Has(driver.CallMemAdvise) {
		var v [1]int32
		if err := r.read(op, old, v[:]); err != nil || m.kind == hinted {
			return cuda.Location{}, err
		}
		return ofOrdinal(v[0]), nil
	}
	var v [2]int32
	if m.kind == hinted {
		return cuda.Location{}, nil
	}
	res := m.ctx.Observe(m.sys.Drv.MemRangeGetAttributes(m.ctx.Handle, []driver.RangeAttribute{kind, id}, []uint64{1, 1}, driver.Ptr(r.Ptr()), r.n, v[:]))
	if res != driver.Success {
		return cuda.Location{}, m.ctx.CallError(op, driver.CallMemRangeGetAttributes, res, r.asked("attributes"))
	}
	l := cuda.Location{Type: cuda.LocationType(v[0])}
	switch l.Type {
	case cuda.LocationDevice, cuda.LocationHostNUMA:
		l.ID = int(v[1]) // of the others it means nothing
	}
	return l, nil
}

// attribute is read for a range that is not acquired yet.
func (r Range) attribute(op string, a driver.RangeAttribute, out []int32) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.release()
	return r.read(op, a, out)
}

// read fills out with an attribute. For memory that is not managed it leaves out
// unchanged.
func (r Range) read(op string, a driver.RangeAttribute, out []int32) error {
	m := r.h.m
	if m.kind == hinted {
		return nil
	}
	res := m.ctx.Observe(m.sys.Drv.MemRangeGetAttribute(m.ctx.Handle, a, driver.Ptr(r.Ptr()), r.n, out))
	if res != driver.Success {
		return m.ctx.CallError(op, driver.CallMemRangeGetAttribute, res, r.asked("an attribute"))
	}
	return nil
}

// advised acquires the range and excludes other changes of advice during do.
func (r Range) advised(op string, do func(m *memory) error) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.release()
	m := r.h.m
	m.advice.Lock()
	defer m.advice.Unlock()
	return do(m)
}

// advise gives one piece of advice, by the entry point that the driver has.
func (r Range) advise(op string, a driver.Advice, l driver.Location) error {
	m := r.h.m
	if m.kind == hinted {
		return nil
	}
	call := driver.CallMemAdvise
	var res driver.Result
	if m.sys.Drv.Has(call) {
		res = m.sys.Drv.MemAdvise(m.ctx.Handle, driver.Ptr(r.Ptr()), r.n, a, l)
	} else {
		call = driver.CallMemAdviseV1
		res = m.sys.Drv.MemAdviseV1(m.ctx.Handle, driver.Ptr(r.Ptr()), r.n, a, ordinal(l))
	}
	if m.ctx.Observe(res) != driver.Success {
		return m.ctx.CallError(op, call, res, r.asked("advice for "+cuda.Location{Type: cuda.LocationType(l.Type), ID: int(l.ID)}.String()+", about"))
	}
	return nil
}

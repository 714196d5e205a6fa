package managed

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// SetReadMostly says that the range is read much and written seldom: every
// reader then gets a copy of its own, which a write takes away.
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

// SetPreferred sets where the range should lie: a device or the CPU that touches
// it then reaches it there, if it can, instead of moving it. The zero Location
// takes the advice back. If the driver refuses a node of the host, the range is
// left without a preferred location.
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
			// The driver would go on to report the location before it.
			err = r.advise(op, driver.AdviseUnsetPreferredLocation, theHost)
		}
		if err != nil {
			return err
		}
		return r.advise(op, driver.AdviseSetPreferredLocation, p.Location)
	})
}

// Preferred returns where all of the range should lie: the zero Location if that
// was never set, or differs within the range. The driver (CUDA 13.0) does not
// report a preferred node of the host: it reads as the zero Location too.
func (r Range) Preferred() (cuda.Location, error) {
	return r.location("managed.Range.Preferred", driver.RangePreferredLocation, driver.RangePreferredType, driver.RangePreferredID)
}

// LastPrefetch is where all of the range was last asked to be prefetched to,
// whether or not that is done, and whoever has touched it since. It is the zero
// Location where that never happened, or not the same for all.
func (r Range) LastPrefetch() (cuda.Location, error) {
	return r.location("managed.Range.LastPrefetch", driver.RangeLastPrefetch, driver.RangeLastPrefetchType, driver.RangeLastPrefetchID)
}

// location reads a location. Only drivers from 12.2 on know nodes.
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

// attribute is read with the range held.
func (r Range) attribute(op string, a driver.RangeAttribute, out []int32) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.release()
	return r.read(op, a, out)
}

// read fills out with an attribute. Of memory that is not managed it stays as it
// is.
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

// advised holds the range, and keeps others from changing advice meanwhile.
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

// advise gives one advice, in the form that the driver has.
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

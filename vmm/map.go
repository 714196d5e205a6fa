package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Map maps all of p at an offset of the range, which must be free there. No device can
// access the memory until SetAccess grants it. The mapping keeps its memory alive, and
// the range cannot be closed before it; the caller closes the mapping.
func (r *Reservation) Map(off int, p Physical) (*Mapping, error) {
	const op = "vmm.Reservation.Map"
	in, err := r.acquire(op)
	if err != nil {
		return nil, err
	}
	defer in.Closer.Release()
	if err := checkOffset(op, in, off); err != nil {
		return nil, err
	}
	h, err := phys.Hold(op, in.System(), p)
	if err != nil {
		return nil, err
	}
	if err := mappable(op, h); err != nil {
		return nil, phys.Abandon(op, err, h)
	}
	var one [1]*vrange.Mapping
	maps, err := in.Map(op, one[:0], uint64(off), []*phys.Handle{h}, nil)
	if err != nil {
		return nil, phys.Abandon(op, err, h)
	}
	return newMapping(maps[0]), nil
}

// MapRun maps several pieces of memory one behind the other, from an offset of the
// range on, and grants access to the whole run in one driver call, which is far cheaper
// than one call each, especially for peers. The memory may be on several devices.
// Without access no device can access it until SetAccess grants it. Each mapping is
// closed separately, as one of Map is. After an error nothing is mapped.
func (r *Reservation) MapRun(off int, access []Access, memory ...Physical) (made []*Mapping, err error) {
	const op = "vmm.Reservation.MapRun"
	in, err := r.acquire(op)
	if err != nil {
		return nil, err
	}
	defer in.Closer.Release()
	if len(memory) == 0 {
		return nil, errs.Invalid(op, "no memory", "pass at least one Allocation")
	}
	if err := checkOffset(op, in, off); err != nil {
		return nil, err
	}
	handles := make([]*phys.Handle, 0, len(memory))
	defer func() {
		if err != nil {
			err = phys.Abandon(op, err, handles...)
		}
	}()
	var list accessList
	for i, p := range memory {
		h, err := phys.Hold(op, in.System(), p)
		if err != nil {
			return nil, err
		}
		handles = append(handles, h)
		if err := mappable(op, h); err != nil {
			return nil, err
		}
		if len(access) > 0 && (i == 0 || h.Asked.Location != handles[i-1].Asked.Location) {
			if list, err = checkAccess(op, in.CUDA, h.Asked.Location, access); err != nil {
				return nil, err
			}
		}
	}
	// No device had access before, so none is to be taken.
	maps, err := in.Map(op, nil, uint64(off), handles, accessList(nil).With(list))
	if err != nil {
		return nil, err
	}
	made = make([]*Mapping, len(maps))
	for i, m := range maps {
		made[i] = newMapping(m)
	}
	return made, nil
}

// checkOffset refuses an offset at which nothing can be mapped.
func checkOffset(op string, r *reservation, off int) error {
	if off < 0 {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("offset %d", off),
			Hint: "offsets are not negative"})
	}
	if gran := int(r.Granularity); off%gran != 0 {
		return errs.Invalid(op, fmt.Sprintf("offset %d", off), "offsets are multiples of the granularity, "+errs.Bytes(gran))
	}
	return nil
}

// mappable refuses a mapping that the driver would wait for without end.
func mappable(op string, h *phys.Handle) error {
	if h.NotYet == nil {
		return nil
	}
	return h.NotYet(op)
}

package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// MapRun puts several memories one behind the other, from an offset of the range
// on, and grants the whole run in one call of the driver, which is far cheaper
// than one by one, above all for peers. They may lie on several devices. Without
// access nobody may touch the memory until SetAccess says so. Each mapping is
// closed by itself, as one of Map is. Where it fails nothing is mapped.
func (r *Reservation) MapRun(off int, access []Access, memory ...Physical) (made []*Mapping, err error) {
	const op = "vmm.Reservation.MapRun"
	if len(memory) == 0 {
		return nil, core.Invalid(op, "no memory", "pass at least one Allocation")
	}
	if off < 0 {
		return nil, core.Error(core.Failure{Op: op, Kind: core.OutOfRange, Asked: fmt.Sprintf("offset %d", off),
			Hint: "offsets are not negative"})
	}
	if !r.r.closer.Hold() {
		return nil, core.ClosedError(op, "reservation")
	}
	defer r.r.closer.Drop()
	if gran := int(r.r.gran); off%gran != 0 {
		return nil, core.Invalid(op, fmt.Sprintf("offset %d", off), "offsets are multiples of the granularity, "+core.Bytes(gran))
	}
	handles := make([]*phys.Handle, 0, len(memory))
	defer func() {
		if err != nil {
			err = r.r.release(err, handles...)
		}
	}()
	var list accessList
	for i, p := range memory {
		h, err := hold(op, r.r.System(), p)
		if err != nil {
			return nil, err
		}
		handles = append(handles, h)
		if err := mappable(op, h); err != nil {
			return nil, err
		}
		if len(access) > 0 && (i == 0 || h.Asked.Location != handles[i-1].Asked.Location) {
			if list, err = checkAccess(op, r.r.system, h.Asked.Location, access); err != nil {
				return nil, err
			}
		}
	}
	// Nobody had access before, so none is to be taken.
	maps, err := r.r.mapRun(op, nil, uint64(off), handles, accessList(nil).with(list))
	if err != nil {
		return nil, err
	}
	made = make([]*Mapping, len(maps))
	for i, in := range maps {
		made[i] = &Mapping{m: in}
		made[i].watched.Begin(&in.Object)
	}
	return made, nil
}

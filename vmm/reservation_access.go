package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// SetAccess changes the access of places to a part of the range that consists of whole
// mappings, in one driver call. If it takes access away it first waits for the devices
// concerned, as Close does.
func (r *Reservation) SetAccess(off, size int, access ...Access) error {
	const op = "vmm.Reservation.SetAccess"
	in, err := r.acquire(op)
	if err != nil {
		return err
	}
	defer in.Closer.Release()
	if off < 0 || size <= 0 {
		return errPart(op, off, size)
	}
	return setAccess(op, in, uint64(off), uint64(size), access)
}

// errPart returns the error for a part that no range has.
func errPart(op string, off, size int) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("offset %d, %s", off, errs.Count(size, "byte")),
		Hint: "name a part of the range"})
}

// setAccess changes the access of the whole mappings in a part of the range.
func setAccess(op string, r *reservation, off, size uint64, access []Access) error {
	return r.SetAccess(op, off, size, func(memory driver.Location) (accessList, error) {
		return checkAccess(op, r.CUDA, memory, access)
	})
}

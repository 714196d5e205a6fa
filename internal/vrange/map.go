package vrange

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Map maps handles one behind the other, grants access in one call if there is any,
// and takes over one reference to each handle. After an error nothing has changed, and
// the references are still the caller's. maps is empty; the mappings are appended to it
// to use its capacity.
func (r *Range) Map(op string, maps []*Mapping, off uint64, handles []*phys.Handle, access memspec.Access) ([]*Mapping, error) {
	var size uint64
	for _, h := range handles {
		size += h.Size
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Closer.Closed() {
		return nil, errs.ClosedError(op, "reservation")
	}
	if err := r.checkFreeLocked(op, off, size); err != nil {
		return nil, err
	}
	if err := r.checkLossLocked(op, handles); err != nil {
		return nil, err
	}
	sys := r.System()
	end := off
	used := 0 // until the mappings are counted, which whoever takes the memory reads
	defer func() {
		for _, h := range handles[:used] {
			h.Done()
		}
	}()
	for _, h := range handles {
		d, err := h.Use(op)
		if err != nil {
			return nil, r.undoRunLocked(maps, err)
		}
		used++
		if res := sys.Drv.MemMap(r.Base+driver.Ptr(end), h.Size, 0, d); res != driver.Success {
			return nil, r.undoRunLocked(maps, sys.CallError(op, driver.CallMemMap, res,
				fmt.Sprintf("%s at %#x", errs.Bytes(h.Size), uint64(r.Base)+end), h.Devices()...))
		}
		maps = append(maps, &Mapping{Range: r, Memory: h, Off: end, access: access})
		end += h.Size
	}
	if len(access) > 0 {
		if res := sys.Drv.MemSetAccess(r.Base+driver.Ptr(off), size, access); res != driver.Success {
			return nil, r.undoRunLocked(maps, sys.CallError(op, driver.CallMemSetAccess, res,
				fmt.Sprintf("%s at %#x", errs.Bytes(size), uint64(r.Base)+off), concerned(maps, access)...))
		}
	}
	for _, m := range maps {
		m.Memory.Mappings.Add(1)
		sys.Track(m, life.KindMapping, m.Memory.Size)
	}
	r.maps.insert(maps)
	return maps, nil
}

// MapRun is Map for a caller that names mappings by their offsets (UnmapRun). What Left
// reports after an error has counts of its own.
func (r *Range) MapRun(op string, off uint64, chunks []*phys.Handle, access memspec.Access) error {
	_, err := r.Map(op, make([]*Mapping, 0, len(chunks)), off, chunks, access)
	return err
}

// checkFreeLocked refuses a part that exceeds the reservation, has a mapping, or has a
// stuck one.
func (r *Range) checkFreeLocked(op string, off, size uint64) error {
	if off > r.Size || size > r.Size-off {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s of %s", errs.Bytes(size), errs.Bytes(off), errs.Bytes(r.Size)),
			Hint:  "map inside the range, or reserve a larger one"})
	}
	if m := r.maps.get(off); m != nil && m.Off < off+size {
		hint := "map elsewhere, or close that mapping first"
		if m.closing != nil {
			hint = "that mapping is closing: map elsewhere, or wait for its Released, which tells when the addresses are free"
		}
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
			Asked: fmt.Sprintf("%s at offset %s, where %s are mapped at offset %s",
				errs.Bytes(size), errs.Bytes(off), errs.Bytes(m.Memory.Size), errs.Bytes(m.Off)),
			Hint: hint})
	}
	for _, m := range r.stuck {
		if !m.unmapped && m.Off < off+size && off < m.end() {
			return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
				Asked: fmt.Sprintf("%s at offset %s, where %s at offset %s could not be unmapped after an earlier failure",
					errs.Bytes(size), errs.Bytes(off), errs.Bytes(m.Memory.Size), errs.Bytes(m.Off)),
				Hint: "use another range; Close of the range, or Clip of the buffer, tries the unmapping again"})
		}
	}
	return nil
}

// checkLossLocked refuses memory on a lost device, and a range in which mappings were
// dropped with their device.
func (r *Range) checkLossLocked(op string, handles []*phys.Handle) error {
	if r.dropped != driver.Success {
		return errs.New(errs.Failure{Op: op, Kind: errs.DeviceLost, Result: r.dropped,
			Asked: fmt.Sprintf("the range at %#x, of which a part was dropped with its device", uint64(r.Base)),
			Hint:  "reserve another range for memory of the devices that go on"})
	}
	for _, h := range handles {
		if res := h.Lost(); res != driver.Success {
			return errs.New(errs.Failure{Op: op, Call: driver.CallMemMap, Result: res, Asked: errs.Bytes(h.Size)})
		}
	}
	return nil
}

// concerned returns the devices that a call on mappings can involve: those that hold
// the memory, and those that have or get access.
func concerned(maps []*Mapping, access memspec.Access) []driver.Device {
	devices := access.Devices()
	for _, m := range maps {
		devices = append(append(devices, m.Memory.Devices()...), m.access.Devices()...)
	}
	return devices
}

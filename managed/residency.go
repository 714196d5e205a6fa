package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/share"
)

// Residency returns where the range is: for each part bytes of it, the location of most of
// those pages that the driver samples, and the zero Location if no processor has touched them.
// Pages may move meanwhile. If the driver cannot tell, as no real one can so far, it returns
// ErrNotSupported; LastPrefetch then returns what was last asked for.
func (r Range) Residency(part int) ([]cuda.Location, error) {
	const op = "managed.Range.Residency"
	if err := r.acquire(op); err != nil {
		return nil, err
	}
	defer r.release()
	if part <= 0 || part > r.Len() {
		return nil, errs.Invalid(op, fmt.Sprintf("parts of %s of a range of %s", errs.Count(part, "byte"), errs.Bytes(r.n)),
			"a part has at least one byte, and no more than the range")
	}
	at := make([]driver.Location, (r.Len()-1)/part+1)
	if err := r.locate(op, uint64(part), at); err != nil {
		return nil, err
	}
	all := make([]cuda.Location, len(at))
	for i, l := range at {
		all[i] = cuda.Location{Type: cuda.LocationType(l.Type), ID: int(l.ID)}
	}
	return all, nil
}

// locate fills at with the location of each part. For memory that is not managed it leaves at
// unchanged.
func (r Range) locate(op string, part uint64, at []driver.Location) error {
	m := r.h.m
	if m.kind == hinted {
		return nil
	}
	f := errs.Failure{Op: op, Kind: errs.NotSupported, Asked: r.asked("the residency")}
	d, ok := m.sys.Drv.(driver.Locator)
	if !ok {
		f.Hint = "drivers for CUDA " + driver.VersionString(driver.LocatorVersion) + " or later know it, but the declaration of cuMemGetLocationInfo in C was " +
			"not public when this was written: LastPrefetch returns what was last asked for"
		return errs.New(f)
	}
	switch res := d.MemGetLocationInfo(driver.Ptr(r.Ptr()), r.n, part, 0, at); res {
	case driver.Success:
		return nil
	case driver.MissingEntryPoint:
		f.Hint = "this driver lacks cuMemGetLocationInfo; it needs a driver for CUDA " + driver.VersionString(driver.LocatorVersion) + " or later"
	default:
		f.Kind, f.Asked = errs.Unspecified, fmt.Sprintf("%s: %v", f.Asked, res)
	}
	return errs.New(f)
}

// A snapshot has at most so many parts of an allocation, each of at least a common size of
// pages.
const (
	mostParts = 1024
	leastPart = 64 << 10
)

// InspectManaged makes memory a share.Managed.
func (m *memory) InspectManaged() share.ManagedMemory {
	const op = "inspect.Take"
	to := share.ManagedMemory{Base: m.ptr, Bytes: m.size, Device: m.ctx.Device}
	r := Range{h: &handle{m: m}, n: m.size}
	if r.acquire(op) != nil {
		return to // it is being freed
	}
	defer r.release()
	if l, err := r.LastPrefetch(); err == nil {
		to.Prefetched = driver.Location{Type: driver.LocationType(l.Type), ID: int32(l.ID)}
	}
	part := min(m.size, max(leastPart, (m.size/mostParts+leastPart-1)/leastPart*leastPart))
	at := make([]driver.Location, (m.size-1)/part+1)
	if r.locate(op, part, at) != nil {
		return to
	}
	to.Located = true
	for i, l := range at {
		if l.Type == driver.LocationNone {
			continue
		}
		off := uint64(i) * part
		n := min(part, m.size-off)
		if last := len(to.Resident) - 1; last >= 0 && to.Resident[last].At == l && to.Resident[last].Off+to.Resident[last].Bytes == off {
			to.Resident[last].Bytes += n
			continue
		}
		to.Resident = append(to.Resident, share.Resident{Off: off, Bytes: n, At: l})
	}
	return to
}

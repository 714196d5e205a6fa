package ranges

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Inspected is the inner state of a vmm.Reservation for snapshots.
type Inspected interface {
	// Span is the range of addresses in bytes, and what it is a multiple of.
	Span() (base driver.Ptr, size, granularity uint64)
	// Mappings appends the mappings from an offset on to the list until it has no
	// room left, in the order of their offsets. It holds the range's lock meanwhile.
	Mappings(off uint64, to []Mapping) []Mapping
	// Stuck is how many bytes could not be unmapped or released.
	Stuck() uint64
}

// Mapping is memory at an offset of a range. The handle is only to be read: the
// mapping may be gone by now.
type Mapping struct {
	Off    uint64
	Memory *phys.Handle
	// Access is never changed in place.
	Access []driver.AccessDesc
	// Closing mappings wait for the GPU.
	Closing bool
}

package vrange

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// MappingAt is a mapping as a snapshot shows it. The handle is only to be read: the mapping
// may be gone by now.
type MappingAt struct {
	Off    uint64
	Memory *phys.Handle
	Access memspec.Access
	// Closing mappings wait for the GPU.
	Closing bool
	// Away memory was suspended: nothing is mapped.
	Away bool
}

// Mappings appends the mappings from an offset on to the list until it has no room left,
// in the order of their offsets. It holds the range's lock meanwhile.
func (r *Range) Mappings(off uint64, to []MappingAt) []MappingAt {
	r.mu.Lock()
	defer r.mu.Unlock()
	for m := range r.maps.from(off) {
		if len(to) == cap(to) {
			break
		}
		to = append(to, MappingAt{Off: m.Off, Memory: m.Memory, Access: m.access, Closing: m.closing != nil, Away: m.presence == away})
	}
	return to
}

// All returns the mappings, in the order of their offsets.
func (r *Range) All() []*Mapping {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(r.maps.from(0))
}

// Stuck returns how many bytes could not be unmapped or released.
func (r *Range) Stuck() uint64 { return r.stuckBytes.Load() }

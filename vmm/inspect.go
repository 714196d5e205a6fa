package vmm

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/ranges"
)

// Span implements ranges.Inspected.
func (r *reservation) Span() (base driver.Ptr, size, granularity uint64) {
	return r.base, r.size, r.gran
}

// Mappings implements ranges.Inspected.
func (r *reservation) Mappings(off uint64, to []ranges.Mapping) []ranges.Mapping {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.maps[r.findLocked(off):] {
		if len(to) == cap(to) {
			break
		}
		to = append(to, ranges.Mapping{Off: m.off, Memory: m.phys, Access: m.access, Closing: m.closing != nil})
	}
	return to
}

// Stuck implements ranges.Inspected.
func (r *reservation) Stuck() uint64 { return r.stuckBytes.Load() }

package suspend

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// guardGranules is how large a guard is: 64 MiB on a GPU. Mapping one takes as long as mapping a
// small chunk does, so that of a whole GPU's memory takes some 40 ms.
const guardGranules = 32

// Guard says what scratch memory lies under memory that has gone.
type Guard struct {
	// Memory is what it takes, and Covered how many bytes of addresses it lies under.
	Memory, Covered uint64
	// Err is why it does not lie under more, or nil.
	Err error
}

// lay lays scratch memory under chunks that were given back, one piece of memory for each device. What
// is refused is left out: nothing depends on it.
func (s *Suspension) lay(op string, chunks []*chunk) (g Guard) {
	chunks = slices.DeleteFunc(chunks, func(c *chunk) bool { return c.owed != nil || c.h.Asked.Location.Type != driver.LocationDevice })
	for _, there := range byDevice(chunks) {
		var scratch *phys.Handle // once there is a run that is long enough
		for _, r := range ranges(there, nil) {
			size := r.maps[0].Range.Granularity * guardGranules
			if r.maps[len(r.maps)-1].Off+r.maps[len(r.maps)-1].Memory.Size-r.maps[0].Off < size {
				continue
			}
			if scratch == nil {
				if scratch = s.scratch(op, there[0], size, &g); scratch == nil {
					break
				}
			}
			n, err := r.maps[0].Range.Guard(op, r.maps, scratch)
			g.Covered += n
			if err != nil {
				g.Err = err
			}
		}
		if scratch == nil {
			continue
		}
		if scratch.Owners() > 1 {
			g.Memory += scratch.Size
		}
		_ = scratch.Let(op) // the places where it lies have counts
	}
	return g
}

// scratch makes memory like a chunk's, which is no other process's and in no budget.
func (s *Suspension) scratch(op string, like *chunk, size uint64, g *Guard) *phys.Handle {
	prop := like.h.Asked
	prop.RequestedHandleTypes = 0
	h, r, err := phys.TryCreate(s.sys, size, prop, nil)
	if h == nil {
		if g.Err = err; err == nil {
			g.Err = s.sys.CallError(op, driver.CallMemCreate, r, "scratch memory for a guard", like.h.Devices()...)
		}
	}
	return h
}

// lift takes away what lies under chunks, and reports whether there was any: Resume may need its memory.
func (s *Suspension) lift(op string, chunks []*chunk) bool {
	if s.guard.Memory == 0 {
		return false
	}
	s.guard.Memory = 0
	for _, r := range ranges(chunks, nil) {
		_ = r.maps[0].Range.Unguard(op, r.maps) // what is refused is tried again before anything is mapped there
	}
	return true
}

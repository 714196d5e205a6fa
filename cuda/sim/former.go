package sim

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// former is a mapping that was unmapped. The machine remembers the last one at each
// address of a reservation: a fault can then name the page that the work missed, and work
// on its way to that page is not done on what is mapped there later.
type former struct {
	span
	unmapped uint64 // in the order of object.order and op.order
}

// remember replaces the former mappings at these addresses.
func (m *Machine) remember(s span) {
	m.forget(s)
	m.former.insert(s.lo, s.hi, former{s, created.Add(1)})
}

// forget keeps the parts of former mappings that lie outside of s.
func (m *Machine) forget(s span) {
	for _, f := range slices.Collect(m.former.overlapping(s.lo, s.hi)) {
		m.former.remove(f.lo)
		m.former.insert(f.lo, s.lo, f.v)
		m.former.insert(s.hi, f.hi, f.v)
	}
}

// replaces says why work must not be done on the part of a mapping, or "": the part was
// unmapped under the work and then mapped again. A kernel may be told of new memory while
// it runs, so only the calls whose addresses are fixed at the submission are wrong.
func (r *backing) replaces(at site, call driver.Call, part span) string {
	if r.kind != KindMapping || r.object.order < at.submitted || call == driver.CallLaunchKernel {
		return ""
	}
	for f := range r.m.former.overlapping(part.lo, part.hi) {
		if f.v.unmapped > at.submitted {
			return fmt.Sprintf("the mapping [%#x, %#x) was unmapped after this work was submitted, and what is mapped there now came later: unmap memory once the work on it is done",
				f.v.lo, f.v.hi)
		}
	}
	return ""
}

// whatIsAt describes what is at an address that work, submitted at some time, could not use.
func (m *Machine) whatIsAt(p, submitted uint64) string {
	r, ok := m.reserved.find(p)
	if !ok {
		return "no memory of this machine is there: was it freed before the work was done, or is the end of an allocation overrun?"
	}
	where := fmt.Sprintf("nothing is mapped there in the reservation [%#x, %#x)", r.lo, r.hi)
	f, was := m.former.find(p)
	switch {
	case !was:
		return where + ", and nothing was: map memory first"
	case f.v.unmapped > submitted:
		return fmt.Sprintf("%s: the mapping [%#x, %#x) was unmapped after this work was submitted: unmap memory once the work on it is done", where, f.v.lo, f.v.hi)
	}
	return fmt.Sprintf("%s: the mapping [%#x, %#x) was unmapped before this work was submitted", where, f.v.lo, f.v.hi)
}

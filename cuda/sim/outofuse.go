package sim

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// outOfUse is a part of a range that no work submitted since may use, although it may be
// mapped.
type outOfUse struct {
	span
	in    driver.Paged
	since uint64 // in the order of op.order
}

var _ driver.Watcher = (*api)(nil)

// OutOfUse implements driver.Watcher.
func (a *api) OutOfUse(at driver.Ptr, n uint64, in driver.Paged) {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	s := span{uint64(at), uint64(at) + n}
	a.m.used(s)
	a.m.unused.insert(s.lo, s.hi, outOfUse{s, in, created.Add(1)})
}

// InUse implements driver.Watcher.
func (a *api) InUse(at driver.Ptr, n uint64) {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	a.m.used(span{uint64(at), uint64(at) + n})
}

// used keeps the parts of what is out of use that lie outside of s.
func (m *Machine) used(s span) {
	for _, o := range slices.Collect(m.unused.overlapping(s.lo, s.hi)) {
		m.unused.remove(o.lo)
		m.unused.insert(o.lo, s.lo, o.v)
		m.unused.insert(s.hi, o.hi, o.v)
	}
}

// mustNotUse says why work submitted at some time must not use a part of the address space, or
// "".
func (m *Machine) mustNotUse(part span, submitted uint64) string {
	for o := range m.unused.overlapping(part.lo, part.hi) {
		if o.v.since > submitted {
			continue
		}
		at := max(part.lo, o.lo)
		return fmt.Sprintf("it is in page %d of %s, which was a hole when this work was submitted: map the page first, and unmap it behind the last work that uses it",
			(at-uint64(o.v.in.Base))/o.v.in.Page, o.v.in.Name)
	}
	return ""
}

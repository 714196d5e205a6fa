package vrange

import (
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Holder is embedded, unexported, by vmm.Reservation. Its only method is
// unexported too, so other modules cannot reach the inner state.
type Holder struct{ r *Range }

// Hold makes the holder.
func Hold(r *Range) Holder { return Holder{r} }

func (h *Holder) inner() *Range { return h.r }

// Of looks inside a vmm.Reservation.
func Of(r interface{ inner() *Range }) *Range { return r.inner() }

// MappingHolder is embedded, unexported, by vmm.Mapping.
type MappingHolder struct {
	m     *Mapping
	owner *life.Life
}

// HoldMapping makes the holder. The life is that of the owner.
func HoldMapping(m *Mapping, owner *life.Life) MappingHolder { return MappingHolder{m, owner} }

func (h *MappingHolder) mapped() (*Mapping, *life.Life) { return h.m, h.owner }

// MemoryOf returns the memory of a vmm.Mapping, with a count that the caller releases, and
// keeps the mapping open until drop.
func MemoryOf(op string, of interface{ mapped() (*Mapping, *life.Life) }) (h *phys.Handle, drop func(), err error) {
	m, owner := of.mapped()
	if m == nil {
		return nil, nil, errs.Invalid(op, "a nil mapping", "make one with Reservation.Map")
	}
	if !owner.Acquire() {
		return nil, nil, errs.ClosedError(op, "mapping")
	}
	if err := m.Here(op); err != nil {
		owner.Release()
		return nil, nil, err
	}
	m.Memory.Retain()
	return m.Memory, owner.Release, nil
}

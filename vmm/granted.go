package vmm

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Granted returns the properties that the driver reports for the memory; they may
// lack what was requested, such as compression. Granularity is not a property of the
// memory and keeps its zero value.
func (a *Allocation) Granted() (Properties, error) {
	const op = "vmm.Allocation.Granted"
	if _, err := a.inner(op); err != nil {
		return Properties{}, err
	}
	if !a.closer.Acquire() {
		return Properties{}, errs.ClosedError(op, "allocation")
	}
	defer a.closer.Release()
	return granted(op, a.h)
}

// Granted returns the properties that the driver reports for all of the buffer's
// memory: it is compressible if every chunk is. Granularity is not a property of the
// memory and keeps its zero value. A buffer without memory returns ErrOutOfRange.
func (b *Buffer) Granted() (Properties, error) { return b.inner().granted("vmm.Buffer.Granted") }

func (b *buffer) granted(op string) (p Properties, err error) {
	if err := b.acquire(op); err != nil {
		return Properties{}, err
	}
	defer b.closer.Release()
	if err := b.allow(op, exporting); err != nil {
		return Properties{}, err
	}
	chunks := b.retained()
	defer func() { err = errors.Join(err, chunks.Release()) }()
	if len(chunks.Chunks) == 0 {
		return Properties{}, b.fail(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: "a buffer without memory yet",
			Hint: "let it grow first"})
	}
	for i, c := range chunks.Chunks {
		one, err := granted(op, c.Handle)
		if err != nil {
			return Properties{}, err
		}
		if i == 0 {
			p = one
		}
		p.Compressible = p.Compressible && one.Compressible
		if one.RDMA == RDMAOff {
			p.RDMA = RDMAOff
		}
	}
	return p, nil
}

func granted(op string, h *phys.Handle) (Properties, error) {
	prop, err := h.Reported(op)
	if err != nil {
		return Properties{}, err
	}
	return properties(prop, MinimumGranularity), nil
}

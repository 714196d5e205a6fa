package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

type mapped = vrange.MappingHolder

// Mapping is physical memory at an address. It keeps the memory alive, and the range
// cannot be closed before it. All methods are safe for concurrent use.
type Mapping struct {
	mapped
	sleeper
	m       *mapping
	watched life.Watched
}

// mapping is the inner state.
type mapping struct {
	*vrange.Mapping
	closer life.Closer
	status suspend.Status
	mu     lock.Mutex[lock.Leaf] // guards steps of the status
}

// newMapping takes a mapping over.
func newMapping(in *vrange.Mapping) *Mapping {
	m := &Mapping{m: &mapping{Mapping: in}}
	m.mapped = vrange.HoldMapping(in, &m.m.closer.Life)
	m.sleeper = suspend.Hold(sleepingMapping{m.m})
	in.Watch(&m.watched)
	return m
}

// Ptr returns the address of the memory.
func (m *Mapping) Ptr() cuda.Ptr { return cuda.Ptr(m.m.Ptr()) }

// Size returns the size in bytes.
func (m *Mapping) Size() int { return int(m.m.Memory.Size) }

// inner returns the inner state, or an error for a Mapping that no function made.
func (m *Mapping) inner(op string) (*mapping, error) {
	if m == nil || m.m == nil {
		return nil, errs.Invalid(op, "a nil mapping", "make one with Reservation.Map")
	}
	return m.m, nil
}

// acquire starts an operation on the mapping; the caller calls closer.Release.
func (m *Mapping) acquire(op string) error {
	_, err := m.inner(op)
	if err == nil && !m.m.closer.Acquire() {
		err = errs.ClosedError(op, "mapping")
	}
	return err
}

// SetAccess changes the access of places to the memory at this address; places that
// are not named keep what they have. If it takes access away it first waits for the
// devices concerned, as Close does.
func (m *Mapping) SetAccess(access ...Access) error {
	const op = "vmm.Mapping.SetAccess"
	if err := m.acquire(op); err != nil {
		return err
	}
	defer m.m.closer.Release()
	return setAccess(op, m.m.Range, m.m.Off, m.m.Memory.Size, access)
}

// Access returns the access that the driver reports for a place.
func (m *Mapping) Access(l cuda.Location) (AccessMode, error) {
	const op = "vmm.Mapping.Access"
	if err := m.acquire(op); err != nil {
		return NoAccess, err
	}
	defer m.m.closer.Release()
	if err := memspec.CheckLocation(op, m.m.Range.CUDA, l); err != nil {
		return NoAccess, err
	}
	if err := m.m.Here(op); err != nil {
		return NoAccess, err
	}
	sys := m.m.System()
	flags, r := sys.Drv.MemGetAccess(driver.Location{Type: driver.LocationType(l.Type), ID: int32(l.ID)}, m.m.Ptr())
	if r != driver.Success {
		return NoAccess, sys.CallError(op, driver.CallMemGetAccess, r, fmt.Sprintf("%v at %v", l, m.Ptr()), m.m.Memory.Devices()...)
	}
	return AccessMode(flags), nil
}

// Close waits for all work that could use the memory at this address (see the
// package documentation) and unmaps it. It is idempotent, and after an error it may be
// called again. While a Host function uses it, it returns ErrInUse and the mapping stays
// open.
func (m *Mapping) Close() error {
	const op = "vmm.Mapping.Close"
	in, err := m.inner(op)
	if err != nil {
		return err
	}
	if err := in.Shut(op, &m.m.closer.Life); err != nil {
		return err
	}
	return m.m.closer.Close(func() error {
		if err := in.Wait(op); err != nil {
			return err
		}
		return m.unmap(op)
	})
}

// CloseAfter takes the mapping out of use at once and unmaps it when the work that is on
// the streams now is done. It never blocks. Without a stream it returns
// ErrInvalidArgument; with one that captures a graph it returns ErrCapturing and nothing
// has changed.
func (m *Mapping) CloseAfter(streams ...*cuda.Stream) error {
	const op = "vmm.Mapping.CloseAfter"
	in, err := m.inner(op)
	if err != nil {
		return err
	}
	sys := in.System()
	err = life.CloseAfter(&m.m.closer, sys,
		func() (*core.Fence, error) { return core.FenceOf(sys, op, streams) },
		func() error { return m.unmap(op) })
	if err == nil {
		in.Closing(&m.m.closer.Life)
	}
	return err
}

// Released returns the completion of the mapping's closing: from then on the memory is
// not mapped at this address.
func (m *Mapping) Released() cuda.Completion {
	return m.m.closer.Completion()
}

func (m *Mapping) unmap(op string) error {
	if err := m.m.Range.Unmap(op, m.m.Mapping); err != nil {
		return err
	}
	m.m.status.Closed()
	m.watched.Stop()
	return nil
}

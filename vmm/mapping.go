package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Mapping is physical memory at an address. It keeps the memory alive, and the range
// cannot be closed before it. All methods are safe for concurrent use.
type Mapping struct {
	m       *mapping
	closer  life.Closer
	watched life.Watched
}

// mapping is the inner state. The reservation's lock guards access; the slice may be
// shared by many mappings and is never changed in place.
type mapping struct {
	core.Object
	res    *reservation
	phys   *phys.Handle
	off    uint64
	access accessList
	clip   *clip // the last ClipAfter that took it, if it is a buffer's chunk
	// unsure holds places whose access is unknown, since changing it failed and could
	// not be undone. access is then the most that they may have, so that enough is
	// waited for.
	unsure accessList
	// closing is set once CloseAfter was called: the range may then be closed first,
	// when no operation runs on the mapping any more.
	closing *life.Life
	// The progress of tearing down. After an unmapping that failed it is unknown
	// whether the mapping is still there.
	tried, unmapped, released bool
}

func (m *mapping) ptr() driver.Ptr { return m.res.base + driver.Ptr(m.off) }

// Ptr returns the address of the memory.
func (m *Mapping) Ptr() cuda.Ptr { return cuda.Ptr(errs.Must(m.inner("vmm.Mapping.Ptr")).ptr()) }

// Size returns the size in bytes.
func (m *Mapping) Size() int { return int(errs.Must(m.inner("vmm.Mapping.Size")).phys.Size) }

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
	if err == nil && !m.closer.Acquire() {
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
	defer m.closer.Release()
	return m.m.res.setAccess(op, m.m.off, m.m.phys.Size, access)
}

// Access returns the access that the driver reports for a place.
func (m *Mapping) Access(l cuda.Location) (AccessMode, error) {
	const op = "vmm.Mapping.Access"
	if err := m.acquire(op); err != nil {
		return NoAccess, err
	}
	defer m.closer.Release()
	if err := checkLocation(op, m.m.res.system, l); err != nil {
		return NoAccess, err
	}
	sys := m.m.res.System()
	flags, r := sys.Drv.MemGetAccess(driver.Location{Type: driver.LocationType(l.Type), ID: int32(l.ID)}, m.m.ptr())
	if r != driver.Success {
		return NoAccess, sys.CallError(op, driver.CallMemGetAccess, r, fmt.Sprintf("%v at %v", l, m.Ptr()), m.m.phys.Devices()...)
	}
	return AccessMode(flags), nil
}

// Close waits for all work that could use the memory at this address (see the
// package documentation) and unmaps it. It is idempotent, and after an error it may be
// called again. While a Host function uses it, it returns ErrInUse and the mapping stays
// open.
func (m *Mapping) Close() error {
	const op = "vmm.Mapping.Close"
	if _, err := m.inner(op); err != nil {
		return err
	}
	if err := m.shut(op); err != nil {
		return err
	}
	return m.closer.Close(func() error {
		if err := m.m.wait(op); err != nil {
			return err
		}
		return m.unmap(op)
	})
}

// shut lets no operation start, unless a Host function runs.
func (m *Mapping) shut(op string) error {
	in := m.m
	in.res.mu.Lock()
	defer in.res.mu.Unlock()
	if err := in.res.views.none(op, in.off, in.off+in.phys.Size); err != nil {
		return err
	}
	m.closer.Life.Close()
	return nil
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
	sys := in.res.System()
	err = life.CloseAfter(&m.closer, sys,
		func() (*core.Fence, error) { return core.FenceOf(sys, op, streams) },
		func() error { return m.unmap(op) })
	if err == nil {
		in.res.mu.Lock()
		in.closing = &m.closer.Life
		in.res.mu.Unlock()
	}
	return err
}

// Released returns the completion of the mapping's closing: from then on the memory is
// not mapped at this address.
func (m *Mapping) Released() cuda.Completion {
	errs.Must(m.inner("vmm.Mapping.Released"))
	return m.closer.Completion()
}

func (m *Mapping) unmap(op string) error {
	if err := m.m.res.unmapRun(op, []*mapping{m.m}); err != nil {
		return err
	}
	m.watched.Stop()
	return nil
}

// wait waits for the devices that have access.
func (m *mapping) wait(op string) error {
	m.res.mu.Lock()
	devices := m.access.devices()
	m.res.mu.Unlock()
	return m.res.System().WaitDevices(op, devices)
}

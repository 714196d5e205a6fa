package vrange

import (
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Mapping is memory at an offset of a range, which it retains. The range's lock guards its
// access.
type Mapping struct {
	core.Object
	Range  *Range
	Memory *phys.Handle
	Off    uint64
	access memspec.Access
	// unsure holds places whose access is unknown, since changing it failed and could
	// not be undone. access is then the most that they may have, so that enough is
	// waited for.
	unsure memspec.Access
	// closing is set once its owner closes it behind a fence: the range may then be closed
	// first, when no operation runs on the mapping any more.
	closing *life.Life
	// presence says whether the memory is mapped, and sleep, while it is not here, why.
	presence presence
	sleep    *core.Sleep
	// The progress of tearing down. After an unmapping that failed it is unknown
	// whether the mapping is still there.
	tried, unmapped, released bool
}

// Ptr returns the address of the memory.
func (m *Mapping) Ptr() driver.Ptr { return m.Range.Base + driver.Ptr(m.Off) }

func (m *Mapping) end() uint64 { return m.Off + m.Memory.Size }

// Wait waits for the devices that have access.
func (m *Mapping) Wait(op string) error {
	m.Range.mu.Lock()
	devices := m.devices()
	m.Range.mu.Unlock()
	return m.Range.System().WaitDevices(op, devices)
}

// devices returns the devices that have access to what is mapped.
func (m *Mapping) devices() []driver.Device {
	if m.presence == away {
		return nil
	}
	return m.access.Devices()
}

// Shut ends the life of the mapping's owner, unless a Host function uses the memory.
func (m *Mapping) Shut(op string, owner *life.Life) error {
	r := m.Range
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.Views.None(op, m.Off, m.end()); err != nil {
		return err
	}
	owner.Close()
	return nil
}

// Closing lets the range be closed before the mapping, whose owner waits for the GPU.
func (m *Mapping) Closing(owner *life.Life) {
	m.Range.mu.Lock()
	defer m.Range.mu.Unlock()
	m.closing = owner
}

// View registers a Host function that uses the mapping's memory.
func (m *Mapping) View(op string, owner *life.Life) (*View, error) {
	r := m.Range
	r.mu.Lock()
	defer r.mu.Unlock()
	// The Close of the owner, or that of the range, saw no function.
	if owner.Closed() || r.Closer.Closed() {
		return nil, errs.ClosedError(op, "mapping")
	}
	if err := m.hereLocked(op); err != nil {
		return nil, err
	}
	home := m.Memory.Asked.Location
	mode := m.access.Mode(home)
	if len(m.unsure) > 0 {
		mode = driver.AccessNone
	}
	if err := memspec.CheckHost(op, home, mode); err != nil {
		return nil, err
	}
	return r.Views.Open(m.Off, m.Memory.Size), nil
}

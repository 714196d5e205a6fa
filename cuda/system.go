package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

type systemHolder = core.SystemHolder

// System is one opened driver and everything made with it. Objects of two Systems do
// not mix: using one with the other returns ErrForeign.
type System struct {
	systemHolder
	core      *core.System
	info      DriverInfo
	devices   []*Device
	mu        lock.Mutex[lock.Leaf]
	transfers []*Stream // the devices' own streams
	pinned    pinnedPool
	shared    *shared // the users that opened it together, if there can be several
	closing   lock.Mutex[lock.Long]
	gone      bool // guarded by closing
	// captures are those that WithCapture began.
	captures captures
}

// DriverInfo describes the driver in use.
type DriverInfo struct {
	// Software is true for the software driver.
	Software bool
	// Version is the CUDA version that the driver implements: 13000 is 13.0.
	Version int
	// Path is the file of the real driver's library.
	Path string
	// Machine names the software driver's machine.
	Machine string
}

// String returns "CUDA 13.0 (libcuda.so.1)" or "software driver, CUDA 13.0".
func (d DriverInfo) String() string {
	version := driver.VersionString(int32(d.Version))
	if d.Software {
		return "software driver, CUDA " + version
	}
	return fmt.Sprintf("CUDA %s (%s)", version, d.Path)
}

func newSystem(d driver.Driver, c core.Config) (*System, error) {
	const op = "cuda.Open"
	fail := func(call driver.Call, r driver.Result, asked string) error {
		return errs.New(errs.Failure{Op: op, Call: call, Result: r, Asked: asked})
	}
	if r := d.Init(); r != driver.Success {
		return nil, fail(driver.CallInit, r, "")
	}
	version, r := d.DriverGetVersion()
	if r != driver.Success {
		return nil, fail(driver.CallDriverGetVersion, r, "")
	}
	count, r := d.DeviceGetCount()
	if r != driver.Success {
		return nil, fail(driver.CallDeviceGetCount, r, "")
	}
	about := d.Describe()
	s := &System{info: DriverInfo{about.Software, int(version), about.Path, about.Machine}}
	s.core = core.NewSystem(d, version, c)
	s.core.SkipLog()
	s.systemHolder = core.NewSystemHolder(s.core)
	for i := range count {
		dev, call, r := s.newDevice(i)
		if r != driver.Success {
			return nil, fail(call, r, fmt.Sprintf("device %d of %d", i, count))
		}
		s.devices = append(s.devices, dev)
		s.core.Devices = append(s.core.Devices, dev.dev)
	}
	return s, nil
}

// inner returns the System, or an error for one that no function made.
func (s *System) inner(op string) (*System, error) {
	if s == nil || s.core == nil {
		return nil, errs.Invalid(op, "a nil System", "open one with cuda.Open, auto.Open or sim.Open")
	}
	return s, nil
}

// Driver reports the driver in use.
func (s *System) Driver() DriverInfo { return s.info }

// Devices returns the devices that this process sees, by ordinal.
func (s *System) Devices() []*Device {
	return slices.Clone(s.devices)
}

// Device returns the device with that ordinal. If there is none the error is
// ErrInvalidArgument, and once the System is closed ErrClosed.
func (s *System) Device(ordinal int) (*Device, error) {
	const op = "cuda.System.Device"
	if _, err := s.inner(op); err != nil {
		return nil, err
	}
	if s.core.Closed() {
		return nil, errs.ClosedError(op, "System")
	}
	if ordinal < 0 || ordinal >= len(s.devices) {
		hint := "devices are numbered from 0; CUDA_VISIBLE_DEVICES may hide some"
		if s.info.Software {
			hint = "devices are numbered from 0; sim.Options.Devices, or the machine that CUVMM_SIM describes, says how many the software driver has"
		}
		return nil, errs.Invalid(op, fmt.Sprintf("device %d of %d", ordinal, len(s.devices)), hint)
	}
	return s.devices[ordinal], nil
}

// Drain waits until everything that was closed with CloseAfter is torn down and every
// function of Stream.Callback has returned, or until ctx ends. It tries the Leftovers again.
// It returns the errors of teardowns that failed since the last Drain, and those of the
// leftovers that remain.
func (s *System) Drain(ctx context.Context) error {
	const op = "cuda.System.Drain"
	if _, err := s.inner(op); err != nil {
		return err
	}
	err := s.core.Drain(ctx)
	switch {
	case err == nil:
		return nil
	case ctx.Err() == nil || !errors.Is(err, ctx.Err()): // teardowns that failed
		return fmt.Errorf("%s: %w", op, err)
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Err: err,
		Asked: s.core.Waiting(),
		Hint:  "a stream that was named runs on or waits for something, or a function of Callback or OnClose has not returned"})
}

// waitAll waits for all work on all devices, as far as contexts are known.
func (s *System) waitAll(op string) error { return s.core.WaitAll(op) }

// Stats are counts of a System's live objects.
type Stats struct {
	// Reservations and their bytes of address space.
	Reservations  int `json:"reservations"`
	ReservedBytes int `json:"reserved_bytes"`
	// Allocations of physical memory, imported ones included, and their bytes.
	Allocations    int `json:"allocations"`
	AllocatedBytes int `json:"allocated_bytes"`
	// Suspended allocations, whose memory is away, and their bytes. They are not among the
	// Allocations.
	Suspended      int `json:"suspended"`
	SuspendedBytes int `json:"suspended_bytes"`
	// KeptBytes are host memory that keeps the contents of suspended memory.
	KeptBytes int `json:"kept_bytes"`
	// SharedReleased counts memory that was shared with other processes and has
	// been released here since the System was opened, and its bytes: other processes
	// may still hold it, so do not assume that it is free.
	SharedReleased      int `json:"shared_released"`
	SharedReleasedBytes int `json:"shared_released_bytes"`
	// Mappings and their bytes. Aliases count each time.
	Mappings    int `json:"mappings"`
	MappedBytes int `json:"mapped_bytes"`
	// Streams and Events that are open.
	Streams int `json:"streams"`
	Events  int `json:"events"`
	// Graphs that are open, and the bytes of pinned memory that their uploads
	// keep.
	Graphs     int `json:"graphs"`
	GraphBytes int `json:"graph_bytes"`
	// Modules that are open.
	Modules int `json:"modules"`
	// HostBuffers that are open, and their bytes.
	HostBuffers int `json:"host_buffers"`
	HostBytes   int `json:"host_bytes"`
	// IdleHostBytes are pinned host memory that is retained for the next use: TrimHost
	// releases it.
	IdleHostBytes int `json:"idle_host_bytes"`
	// Managed allocations of managed memory, and their bytes.
	Managed      int `json:"managed"`
	ManagedBytes int `json:"managed_bytes"`
	// Pending closed objects and callbacks, which wait for the GPU.
	Pending int `json:"pending"`
	// Leftovers are what operations could not give back, and LeftoverBytes their memory:
	// see System.Leftovers.
	Leftovers     int `json:"leftovers"`
	LeftoverBytes int `json:"leftover_bytes"`
	// Lost objects were collected without Close.
	Lost int `json:"lost"`
}

// Stats counts the live objects.
func (s *System) Stats() Stats {
	var st Stats
	st.Reservations, st.ReservedBytes = s.core.Live.Count(life.KindReservation)
	st.Allocations, st.AllocatedBytes = s.core.Live.Count(life.KindAllocation)
	st.Suspended, st.SuspendedBytes = s.core.Away.Now()
	st.Allocations -= st.Suspended
	_, st.KeptBytes = s.core.Live.Count(life.KindSuspension)
	st.SharedReleased, st.SharedReleasedBytes = s.core.Shared.Released()
	st.Mappings, st.MappedBytes = s.core.Live.Count(life.KindMapping)
	st.Streams, _ = s.core.Live.Count(life.KindStream)
	st.Events, _ = s.core.Live.Count(life.KindEvent)
	st.Graphs, st.GraphBytes = s.core.Live.Count(life.KindGraph)
	st.Modules, _ = s.core.Live.Count(life.KindModule)
	st.HostBuffers, st.HostBytes = s.core.Live.Count(life.KindHostBuffer)
	st.IdleHostBytes = s.pinned.idle() + s.core.IdleAttached()
	st.Managed, st.ManagedBytes = s.core.Live.Count(life.KindManaged)
	st.Pending = s.core.PendingReclaims()
	for _, l := range s.core.Leftovers() {
		st.Leftovers++
		st.LeftoverBytes += l.Bytes
	}
	st.Lost = s.core.Live.Lost()
	return st
}

// Live describes every live object, with the stack that made it if Options.TraceLeaks
// is set.
func (s *System) Live() []string { return s.core.Live.Describe() }

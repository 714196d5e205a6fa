package cuda

import (
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

type contextHolder = core.ContextHolder

// Device is a GPU as this process sees it. Devices live as long as their
// System and need no Close.
//
// A device works in a context. Unless [Device.WithContext] gave it one, it
// retains the device's primary context, which the CUDA runtime and the
// frameworks use too, at the first operation that needs memory. Making the
// primary context costs several hundred megabytes of device memory and a fraction
// of a second unless the process has it already; without any context the driver's
// virtual memory calls are forty times slower. System.Close releases it.
type Device struct {
	contextHolder
	sys     *System
	ordinal int
	dev     driver.Device
	name    string
	uuid    UUID
	memory  int

	ctx      atomic.Pointer[core.Context]
	mu       lock.Mutex[lock.Long] // held over the making of the context
	transfer *Stream
	probing  lock.Mutex[lock.Long] // held over a trial
	probed   *Probe
}

// UUID identifies a GPU across processes and reboots.
type UUID [16]byte

// String writes the form that nvidia-smi shows: "GPU-xxxxxxxx-xxxx-...".
func (u UUID) String() string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
}

func (s *System) newDevice(ordinal int32) (*Device, driver.Call, driver.Result) {
	drv := s.core.Drv
	dev, r := drv.DeviceGet(ordinal)
	if r != driver.Success {
		return nil, driver.CallDeviceGet, r
	}
	d := &Device{sys: s, ordinal: int(ordinal), dev: dev}
	if d.name, r = drv.DeviceGetName(dev); r != driver.Success {
		return nil, driver.CallDeviceGetName, r
	}
	uuid, r := drv.DeviceGetUUID(dev)
	if r != driver.Success && r != driver.MissingEntryPoint {
		return nil, driver.CallDeviceGetUUID, r
	}
	d.uuid = UUID(uuid)
	total, r := drv.DeviceTotalMem(dev)
	if r != driver.Success {
		return nil, driver.CallDeviceTotalMem, r
	}
	d.memory = int(total)
	d.contextHolder = core.NewContextHolder(s.core, d.context)
	return d, driver.CallDeviceGet, driver.Success
}

// WithContext returns the same device working in the caller's context, for programs
// that made one of their own. The caller keeps the context alive until the System
// closes, because waits for the device's work use it. A context of another device
// returns ErrInvalidArgument.
func (d *Device) WithContext(handle uintptr) (*Device, error) {
	const op = "cuda.Device.WithContext"
	if err := d.open(op); err != nil {
		return nil, err
	}
	if handle == 0 {
		return nil, errs.Invalid(op, "context 0", "pass the handle of a live CUcontext")
	}
	on, r := d.sys.core.Drv.CtxGetDevice(driver.Context(handle))
	if r != driver.Success {
		return nil, d.sys.core.CallError(op, driver.CallCtxGetDevice, r, fmt.Sprintf("context %#x", handle))
	}
	if on != d.dev {
		return nil, errs.Invalid(op, fmt.Sprintf("context %#x of device %d for device %d", handle, on, d.dev),
			"pass a context of this device")
	}
	with := &Device{sys: d.sys, ordinal: d.ordinal, dev: d.dev, name: d.name, uuid: d.uuid, memory: d.memory}
	with.ctx.Store(d.sys.core.AddContext(driver.Context(handle), d.dev, false))
	with.contextHolder = core.NewContextHolder(d.sys.core, with.context)
	return with, nil
}

// inner returns the device, or an error for one that no function made.
func (d *Device) inner(op string) (*Device, error) {
	if d == nil || d.sys == nil {
		return nil, errs.NilDevice(op)
	}
	return d, nil
}

// open refuses what would ask the driver after the System's Close.
func (d *Device) open(op string) error {
	if _, err := d.inner(op); err != nil {
		return err
	}
	if d.sys.core.Closed() {
		return errs.ClosedError(op, "System")
	}
	return nil
}

// context is the context that the device works in, retained at the first call.
func (d *Device) context(op string) (*core.Context, error) {
	if err := d.open(op); err != nil {
		return nil, err
	}
	if c := d.ctx.Load(); c != nil {
		return c, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.ctx.Load(); c != nil {
		return c, nil
	}
	h, r := d.sys.core.Drv.DevicePrimaryCtxRetain(d.dev)
	if r != driver.Success {
		return nil, d.sys.core.CallError(op, driver.CallDevicePrimaryCtxRetain, r,
			fmt.Sprintf("retain the primary context of %v", d), d.dev)
	}
	c := d.sys.core.AddContext(h, d.dev, true)
	d.ctx.Store(c)
	return c, nil
}

// String returns the device's name: "device 0 (NVIDIA H200)".
func (d *Device) String() string {
	if d == nil || d.sys == nil {
		return "nil device"
	}
	return fmt.Sprintf("device %d (%s)", d.ordinal, d.name)
}

// System returns the device's System.
func (d *Device) System() *System { return d.sys }

// Ordinal returns the device's number in this process.
func (d *Device) Ordinal() int { return d.ordinal }

// Name returns the product's name.
func (d *Device) Name() string { return d.name }

// UUID returns what identifies the GPU. It is zero with a driver before CUDA 11.4,
// which does not tell the instances of a partitioned GPU apart.
func (d *Device) UUID() UUID { return d.uuid }

// TotalMemory returns the size of the device's memory in bytes.
func (d *Device) TotalMemory() int { return d.memory }

// Location returns the device as a place for memory and access.
func (d *Device) Location() Location {
	return OnDevice(d.ordinal)
}

// Context returns the handle of the CUcontext that the device works in. It belongs to
// the System or to the caller of WithContext: do not destroy it.
func (d *Device) Context() (uintptr, error) {
	c, err := d.context("cuda.Device.Context")
	if err != nil {
		return 0, err
	}
	return uintptr(c.Handle), nil
}

// MemoryInfo returns the free and the total memory in bytes as the driver counts
// them, other processes' use included.
func (d *Device) MemoryInfo() (free, total int, err error) {
	const op = "cuda.Device.MemoryInfo"
	c, err := d.context(op)
	if err != nil {
		return 0, 0, err
	}
	unused, all, r := d.sys.core.Drv.MemGetInfo(c.Handle)
	if r != driver.Success {
		return 0, 0, c.CallError(op, driver.CallMemGetInfo, r, d.String())
	}
	return int(unused), int(all), nil
}

// CanAccess reports whether this device can be granted access to memory that
// lies on the other one.
func (d *Device) CanAccess(other *Device) (bool, error) {
	const op = "cuda.Device.CanAccess"
	if err := d.open(op); err != nil {
		return false, err
	}
	if _, err := other.inner(op); err != nil {
		return false, err
	}
	if d.sys != other.sys {
		return false, errs.ForeignError(op, "device")
	}
	if d.dev == other.dev {
		return true, nil
	}
	ok, r := d.sys.core.Drv.DeviceCanAccessPeer(d.dev, other.dev)
	if r != driver.Success {
		return false, d.sys.core.CallError(op, driver.CallDeviceCanAccessPeer, r,
			fmt.Sprintf("%v to %v", d, other), d.dev, other.dev)
	}
	return ok, nil
}

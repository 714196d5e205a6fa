package multicast

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
	"github.com/cuvmm/cuvmm/vmm"
)

// Binding is memory that is a device's replica of a part of an object. It keeps both alive.
// All methods are safe for concurrent use.
type Binding struct {
	b       *binding
	closer  life.Closer
	watched life.Watched
}

// binding is the inner state.
type binding struct {
	core.Object
	in        *object
	mem       *phys.Handle
	dev       driver.Device
	off, size uint64
	// The progress of tearing down.
	unbound, releasedMemory bool
}

// Keeps implements suspend.Keeper.
func (b *binding) Keeps() (what string, memory []*phys.Handle) {
	return fmt.Sprintf("a multicast binding of %s on device %d", errs.Bytes(b.size), b.dev), []*phys.Handle{b.mem}
}

// Bind makes size bytes of memory, from memOff on, the device's replica of the object from
// off on. Offsets and size are multiples of the minimum granularity. The memory is on the
// device or, with a driver for CUDA 13.1 or later, on the NUMA node closest to it. The
// device must have been added through this Object. The caller closes the binding; the memory
// may be closed before.
//
// Bind blocks in the driver until all devices were added, and cannot be canceled.
func (o *Object) Bind(d *cuda.Device, off int, memory vmm.Physical, memOff, size int) (*Binding, error) {
	const op = "multicast.Object.Bind"
	own, err := o.inner(op)
	if err != nil {
		return nil, err
	}
	h, err := phys.Hold(op, own.h.System(), memory)
	if err != nil {
		return nil, err
	}
	return o.bind(op, d, off, h, memOff, size, func(drv driver.Driver, object, mem driver.MemHandle, b *binding) (driver.Call, driver.Result) {
		if drv.Has(driver.CallMulticastBindMem) {
			return driver.CallMulticastBindMem, drv.MulticastBindMem(object, b.dev, b.off, mem, uint64(memOff), b.size)
		}
		return driver.CallMulticastBindMemV1, drv.MulticastBindMemV1(object, b.off, mem, uint64(memOff), b.size)
	})
}

// BindMapping is Bind with memory that is named by a mapping of it. The mapping may be
// closed before the binding, which keeps the memory alive.
func (o *Object) BindMapping(d *cuda.Device, off int, m *vmm.Mapping, memOff, size int) (*Binding, error) {
	const op = "multicast.Object.BindMapping"
	if _, err := o.inner(op); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, errs.Invalid(op, "a nil mapping", "make one with vmm.Reservation.Map")
	}
	h, drop, err := vrange.MemoryOf(op, m)
	if err != nil {
		return nil, err
	}
	defer drop()
	p := driver.Ptr(m.Ptr()) + driver.Ptr(memOff)
	return o.bind(op, d, off, h, memOff, size, func(drv driver.Driver, object, _ driver.MemHandle, b *binding) (driver.Call, driver.Result) {
		if drv.Has(driver.CallMulticastBindAddr) {
			return driver.CallMulticastBindAddr, drv.MulticastBindAddr(object, b.dev, b.off, p, b.size)
		}
		return driver.CallMulticastBindAddrV1, drv.MulticastBindAddrV1(object, b.off, p, b.size)
	})
}

// bind takes over one reference to the memory, which the binding uses until it is unbound:
// the object would still name memory that is taken away.
func (o *Object) bind(op string, d *cuda.Device, off int, mem *phys.Handle, memOff, size int,
	call func(drv driver.Driver, object, mem driver.MemHandle, b *binding) (driver.Call, driver.Result)) (*Binding, error) {
	// It retains the handle and not the Object, so that Close does not wait for a bind
	// that waits for other processes.
	h, open := phys.Acquire(o)
	if !open {
		return nil, phys.Abandon(op, errs.ClosedError(op, "multicast object"), mem)
	}
	b := &binding{in: o.o, mem: mem, off: uint64(off), size: uint64(size)}
	if err := o.check(op, d, b, off, memOff, size); err != nil {
		return nil, phys.Abandon(op, err, mem, h)
	}
	in, sys := o.o, o.o.h.System()
	if err := in.claim(op, b); err != nil {
		return nil, phys.Abandon(op, err, mem, h)
	}
	if err := in.use(op, mem, func(object, memory driver.MemHandle) error {
		c, r := call(sys.Drv, object, memory, b)
		if r == driver.Success {
			return nil
		}
		return sys.CallError(op, c, r, fmt.Sprintf("%v of %v at offset %s of a %v", errs.Bytes(b.size), d, errs.Bytes(b.off), o), b.dev)
	}); err != nil {
		in.forget(b)
		return nil, phys.Abandon(op, err, mem, h)
	}
	sys.Track(b, life.KindBinding, b.size)
	shell := &Binding{b: b}
	b.Watch(&shell.watched)
	return shell, nil
}

// use calls bind with the driver's handles of the object and of memory. Unless that fails
// the memory stays in use.
func (o *object) use(op string, mem *phys.Handle, bind func(object, memory driver.MemHandle) error) error {
	object, err := o.h.Use(op)
	if err != nil {
		return err
	}
	defer o.h.Done()
	memory, err := mem.Use(op)
	if err != nil {
		return err
	}
	if err := bind(object, memory); err != nil {
		mem.Done()
		return err
	}
	return nil
}

// check refuses what cannot work, before the driver is called.
func (o *Object) check(op string, d *cuda.Device, b *binding, off, memOff, size int) (err error) {
	in, mem := o.o, b.mem
	if mem.System() != in.h.System() {
		return errs.ForeignError(op, "memory")
	}
	if b.dev, err = o.device(op, d); err != nil {
		return err
	}
	if mem.NotYet != nil {
		return errs.Invalid(op, "a multicast object as memory", "bind an Allocation")
	}
	gran, within := int(in.gran), func(off int, all uint64) bool { return uint64(off) <= all && uint64(size) <= all-uint64(off) }
	switch {
	case off < 0 || memOff < 0 || size <= 0:
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("%s at offset %d, from offset %d of the memory", errs.Count(size, "byte"), off, memOff),
			Hint: "offsets are not negative, and sizes positive"})
	case off%gran != 0 || memOff%gran != 0 || size%gran != 0:
		return errs.Invalid(op, fmt.Sprintf("%s at offset %s, from offset %s of the memory", errs.Bytes(size), errs.Bytes(off), errs.Bytes(memOff)),
			"offsets and sizes are multiples of the minimum granularity, "+errs.Bytes(gran))
	case !within(off, in.h.Size):
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("%s at offset %s of a %v", errs.Bytes(size), errs.Bytes(off), o),
			Hint: "bind inside the object"})
	case !within(memOff, mem.Size):
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("%s from offset %s of %s of memory", errs.Bytes(size), errs.Bytes(memOff), errs.Bytes(mem.Size)),
			Hint: "name a part of the memory"})
	case in.shared && !mem.Imported && mem.Asked.RequestedHandleTypes == driver.HandleNone:
		return errs.Invalid(op, "memory that cannot be shared", "an object that can be shared accepts only shareable memory: create it with vmm.Properties.Handles")
	}
	return o.checkPlace(op, d, b)
}

// checkPlace refuses memory that is not on the device.
func (o *Object) checkPlace(op string, d *cuda.Device, b *binding) error {
	in, sys := o.o, o.o.h.System()
	if r := sys.DeviceLost(b.dev); r != driver.Success {
		return errs.New(errs.Failure{Op: op, Call: driver.CallMulticastBindMem, Result: r, Asked: d.String()})
	}
	in.mu.Lock()
	added := slices.Contains(in.added, b.dev)
	in.mu.Unlock()
	if !added {
		return errs.Invalid(op, fmt.Sprintf("%v, which was not added through this object", d), "call AddDevice first, or the driver waits for it without end")
	}
	place := cuda.Location{Type: cuda.LocationType(b.mem.Asked.Location.Type), ID: int(b.mem.Asked.Location.ID)}
	switch place.Type {
	case cuda.LocationDevice:
		if place.ID != d.Ordinal() {
			return errs.Invalid(op, fmt.Sprintf("memory of %v for %v", place, d), "each device binds its own memory")
		}
	case cuda.LocationHostNUMA:
		if !sys.Drv.Has(driver.CallMulticastBindMem) {
			return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: fmt.Sprintf("memory of %v", place),
				Hint: "binding host memory needs a driver for CUDA 13.1 or later: update the driver, or bind device memory"})
		}
		if near := sys.Attribute(b.dev, driver.AttrHostNUMAID); place.ID != int(near) {
			return errs.Invalid(op, fmt.Sprintf("memory of %v for %v", place, d), fmt.Sprintf("the node closest to the device is %d", near))
		}
	default:
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: fmt.Sprintf("memory of %v", place), Hint: "bind device memory"})
	}
	return in.notYet(op)
}

// claim reserves a part of the device's replica for a binding.
func (o *object) claim(op string, b *binding) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, other := range o.binds {
		if other.dev == b.dev && b.off < other.off+other.size && other.off < b.off+b.size {
			return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
				Asked: fmt.Sprintf("%s at offset %s, where device %d has %s bound at offset %s", errs.Bytes(b.size), errs.Bytes(b.off), b.dev, errs.Bytes(other.size), errs.Bytes(other.off)),
				Hint:  "close that binding first, or bind elsewhere"})
		}
	}
	o.binds = append(o.binds, b)
	return nil
}

func (o *object) forget(b *binding) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.binds = slices.DeleteFunc(o.binds, func(other *binding) bool { return other == b })
}

// Device returns the ordinal of the device whose replica it is.
func (b *Binding) Device() int { return int(b.b.dev) }

// Offset returns where in the object the part begins, in bytes.
func (b *Binding) Offset() int { return int(b.b.off) }

// Size in bytes.
func (b *Binding) Size() int { return int(b.b.size) }

// inner returns the inner state, or an error for a Binding that no function made.
func (b *Binding) inner(op string) (*binding, error) {
	if b == nil || b.b == nil {
		return nil, errs.Invalid(op, "a nil binding", "make one with Object.Bind")
	}
	return b.b, nil
}

// Released returns the completion of the binding's closing.
func (b *Binding) Released() cuda.Completion {
	return b.closer.Completion()
}

// Close waits for all work of this System, since any of it could access the memory through
// the object, and unbinds the memory. It does not wait for other processes: their work on
// the object must be done. It is idempotent, and after an error it may be called again.
func (b *Binding) Close() error {
	const op = "multicast.Binding.Close"
	in, err := b.inner(op)
	if err != nil {
		return err
	}
	return b.closer.Close(func() error {
		if err := in.System().WaitAll(op); err != nil {
			return err
		}
		return b.unbind(op)
	})
}

// closeUnused is Close for a caller that knows that no work uses the object.
func (b *Binding) closeUnused() error {
	return b.closer.Close(func() error { return b.unbind("multicast.Binding.Close") })
}

// CloseAfter takes the binding out of use at once and unbinds when the work that is on the
// streams now is done. It never blocks. Without a stream it returns ErrInvalidArgument;
// with one that captures a graph it returns ErrCapturing and nothing has changed.
func (b *Binding) CloseAfter(streams ...*cuda.Stream) error {
	const op = "multicast.Binding.CloseAfter"
	in, err := b.inner(op)
	if err != nil {
		return err
	}
	sys := in.System()
	return life.CloseAfter(&b.closer, sys,
		func() (*core.Fence, error) { return core.FenceOf(sys, op, streams) },
		func() error { return b.unbind(op) })
}

// unbind goes forward, and may be called again after an error.
func (b *Binding) unbind(op string) error {
	in := b.b
	object := in.in.h
	if !in.unbound {
		if err := in.unbind(op); err != nil {
			return err
		}
		in.unbound = true
		in.mem.Done()
		in.in.forget(in)
	}
	if !in.releasedMemory {
		if r := in.mem.Release(); r != driver.Success {
			return in.mem.ReleaseError(op, r)
		}
		in.releasedMemory = true
	}
	if r := object.Release(); r != driver.Success {
		return object.ReleaseError(op, r)
	}
	in.Untrack()
	b.watched.Stop()
	return nil
}

func (b *binding) unbind(op string) error {
	object, err := b.in.h.Use(op)
	if err != nil {
		return err
	}
	defer b.in.h.Done()
	sys := b.System()
	unbind := func() driver.Result { return sys.Drv.MulticastUnbind(object, b.dev, b.off, b.size) }
	if r := sys.Teardown(unbind, b.dev); r != driver.Success {
		return sys.CallError(op, driver.CallMulticastUnbind, r,
			fmt.Sprintf("%s at offset %s for device %d", errs.Bytes(b.size), errs.Bytes(b.off), b.dev), b.dev)
	}
	return nil
}

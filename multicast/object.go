package multicast

import (
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/vmm"
)

type holder = phys.Holder

// Object is a multicast object. It is a vmm.Physical: vmm.Reservation.Map maps it as a
// whole, and blocks until all devices were added. All methods are safe for concurrent use.
type Object struct {
	holder
	closer  life.Closer
	o       *object
	watched life.Watched
}

// object is the inner state, which bindings also retain.
type object struct {
	h    *phys.Handle
	prop Properties
	// gran is what offsets and sizes of binds are multiples of: the minimum, even if the
	// object's size was rounded up to the recommended one.
	gran uint64
	// shared is set if other processes, or other imports in this one, may add devices.
	shared bool

	// mu guards the fields below. It is not held during driver calls that can block.
	mu    sync.Mutex
	added []driver.Device // through this Object
	binds []*binding
}

// maxBytes exceeds the memory of any device; rounding larger sizes up would overflow.
const maxBytes = 1 << 60

// Create makes a multicast object of size bytes, rounded up to the granularity.
// The caller closes it. No device is added yet.
func Create(s *cuda.System, size int, p Properties) (*Object, error) {
	const op = "multicast.Create"
	if core.SystemOf(s) == nil {
		return nil, errNilSystem(op)
	}
	if size <= 0 || size > maxBytes {
		return nil, errs.Invalid(op, "a size of "+errs.Count(size, "byte"), "ask for as much as each device binds")
	}
	prop, err := p.prop(op)
	if err != nil {
		return nil, err
	}
	sys := core.SystemOf(s)
	step, err := granularity(op, sys, p)
	if err != nil {
		return nil, err
	}
	least := p
	least.Granularity = vmm.MinimumGranularity
	gran, err := granularity(op, sys, least)
	if err != nil {
		return nil, err
	}
	prop.Size = (uint64(size) + step - 1) / step * step
	h, err := phys.CreateMulticast(op, sys, prop)
	if err != nil {
		return nil, err
	}
	return newObject(h, p, gran), nil
}

// newObject takes over the reference to the handle.
func newObject(h *phys.Handle, p Properties, gran uint64) *Object {
	in := &object{h: h, prop: p, gran: gran, shared: h.Imported || h.Asked.RequestedHandleTypes != driver.HandleNone}
	h.NotYet = in.notYet
	o := &Object{o: in}
	o.holder = phys.NewHolder(h, &o.closer.Life)
	h.Watch(&o.watched)
	return o
}

// notYet returns an error if binding and mapping would block without end: devices are
// missing, and only this Object can add them.
func (o *object) notYet(op string) error {
	o.mu.Lock()
	n := len(o.added)
	o.mu.Unlock()
	if o.shared || n >= o.prop.Devices {
		return nil
	}
	return errs.Invalid(op, fmt.Sprintf("a multicast object with %d of its %s added", n, errs.Count(o.prop.Devices, "device")),
		"add all of them first: the driver waits for them, and the wait cannot be canceled")
}

// Size in bytes.
func (o *Object) Size() int { return int(o.o.h.Size) }

// Properties returns those that the object was created with; of an imported one its
// number of devices.
func (o *Object) Properties() Properties {
	return o.o.prop
}

// String writes "multicast object of 2 MiB for 4 devices".
func (o *Object) String() string {
	in, err := o.inner("multicast.Object.String")
	if err != nil {
		return "no multicast object"
	}
	return fmt.Sprintf("multicast object of %s for %s", errs.Bytes(in.h.Size), errs.Count(in.prop.Devices, "device"))
}

// inner returns the inner state, or an error for an Object that no function made.
func (o *Object) inner(op string) (*object, error) {
	if o == nil || o.o == nil {
		return nil, errs.Invalid(op, "a nil multicast object", "make one with Create or Import")
	}
	return o.o, nil
}

// acquire starts an operation on the object; the caller calls closer.Release.
func (o *Object) acquire(op string) error {
	_, err := o.inner(op)
	if err == nil && !o.closer.Acquire() {
		err = errs.ClosedError(op, "multicast object")
	}
	return err
}

// device checks a device of the object's System and retains its context: without any
// context the driver is slow.
func (o *Object) device(op string, d *cuda.Device) (driver.Device, error) {
	if core.SystemOf(d) == nil {
		return 0, errs.NilDevice(op)
	}
	if core.SystemOf(d) != o.o.h.System() {
		return 0, errs.ForeignError(op, "device")
	}
	if _, err := core.ContextOf(op, d); err != nil {
		return 0, err
	}
	return driver.Device(d.Ordinal()), nil
}

// AddDevice adds a device, for the object's life. Each process adds its own devices.
func (o *Object) AddDevice(d *cuda.Device) error {
	const op = "multicast.Object.AddDevice"
	if err := o.acquire(op); err != nil {
		return err
	}
	defer o.closer.Release()
	dev, err := o.device(op, d)
	if err != nil {
		return err
	}
	in := o.o
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case slices.Contains(in.added, dev):
		return errs.Invalid(op, fmt.Sprintf("%v twice", d), "a device is added once, for the object's life")
	case len(in.added) >= in.prop.Devices:
		return errs.Invalid(op, fmt.Sprintf("%v to a %v, which has them all", d, o), "create it for more devices")
	}
	sys := in.h.System()
	if r := sys.DeviceLost(dev); r != driver.Success {
		return errs.New(errs.Failure{Op: op, Call: driver.CallMulticastAddDevice, Result: r, Asked: d.String()})
	}
	h, err := in.h.Use(op)
	if err != nil {
		return err
	}
	defer in.h.Done()
	if r := sys.Drv.MulticastAddDevice(h, dev); r != driver.Success {
		return sys.CallError(op, driver.CallMulticastAddDevice, r, fmt.Sprintf("%v to a %v", d, o), dev)
	}
	in.added = append(in.added, dev)
	return nil
}

// Close releases the object. Mappings and bindings stay valid: the object lives until the
// last of them is closed, in this process and in those that imported it. Close is
// idempotent.
func (o *Object) Close() error {
	const op = "multicast.Object.Close"
	in, err := o.inner(op)
	if err != nil {
		return err
	}
	return o.closer.Close(func() error {
		if r := in.h.Release(); r != driver.Success {
			return in.h.ReleaseError(op, r)
		}
		o.watched.Stop()
		return nil
	})
}

// Released returns the completion of the object's closing.
func (o *Object) Released() cuda.Completion {
	return o.closer.Completion()
}

// addedHere reports whether the device was added through this Object.
func (o *Object) addedHere(d *cuda.Device) bool {
	o.o.mu.Lock()
	defer o.o.mu.Unlock()
	return slices.Contains(o.o.added, driver.Device(d.Ordinal()))
}

// Package phys has the one owner of a driver's memory handle. Allocations,
// imports, multicast objects and mappings each hold a count of it; the handle
// is released when the last one lets go.
//
// The driver's memory of a handle can be taken and given back beneath its owners
// (memory.go), so it is only read between [Handle.Use] and [Handle.Done].
//
// Memory that changes its owner may hold the previous owner's data, so it is marked
// (Recycle), and Export refuses it. Only the chunks of vmm/pool change owners, with their
// blocks. They are marked when they are made: no public call exports a block's memory.
package phys

import (
	"reflect"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Handle is physical memory. It is made with a count of one.
type Handle struct {
	core.Object
	refs atomic.Int64
	gone atomic.Bool // the memory was given back, which TakeGone has yet to tell
	// memory is the driver's, which can be taken and given back.
	memory memory
	// Size in bytes. The driver does not tell it of a handle.
	Size uint64
	// Asked are the properties that the memory was created with, or, of imported
	// memory, the properties that the driver reports.
	Asked driver.AllocationProp
	// Mappings is how many mappings of this process the memory has.
	Mappings atomic.Int32
	// Imported memory was made elsewhere. The driver does not export it; a kept
	// descriptor of it can be passed on (KeepSource).
	Imported bool
	// NotYet says why mapping would block for ever; nil for memory.
	NotYet  func(op string) error
	sharing atomic.Int32
	outside outside
	kept    atomic.Int64 // a descriptor and 1; 0: none
	source  *source      // nil unless KeepSource
	// account is charged with Size while the driver has the memory; nil for none.
	account *budget.Account
}

// Create makes physical memory; see core.System.Allocate for what it does where
// there is none. On a device that is lost none is made. The account, nil for none, is charged
// until the memory is released; if that does not fit, the error is a *budget.Shortage and the
// driver is not called.
func Create(s *core.System, size uint64, prop driver.AllocationProp, a *budget.Account) (*Handle, driver.Result, error) {
	return create(s, size, prop, a, s.Allocate)
}

// TryCreate is Create for a caller that handles want of memory itself: it calls the
// driver once.
func TryCreate(s *core.System, size uint64, prop driver.AllocationProp, a *budget.Account) (*Handle, driver.Result, error) {
	return create(s, size, prop, a, func(_ uint64, try func() driver.Result) driver.Result {
		s.PollReclaim()
		return try()
	})
}

func create(s *core.System, size uint64, prop driver.AllocationProp, a *budget.Account, with allocator) (*Handle, driver.Result, error) {
	h, r, err := charged(s, size, prop, a, with)
	if err != nil || r != driver.Success {
		return nil, r, err
	}
	made := New(s, h, size, prop)
	made.account = a
	return made, r, nil
}

// allocator calls try, which creates size bytes, perhaps several times.
type allocator func(size uint64, try func() driver.Result) driver.Result

// charged creates the driver's memory, and charges the account for it.
func charged(s *core.System, size uint64, prop driver.AllocationProp, a *budget.Account, with allocator) (h driver.MemHandle, r driver.Result, err error) {
	on := core.DevicesOf(prop.Location)
	if r := s.DeviceLost(on...); r != driver.Success {
		return 0, r, nil
	}
	if err := a.Charge(size); err != nil {
		return 0, driver.Success, err
	}
	r = with(size, func() (r driver.Result) {
		h, r = s.Drv.MemCreate(size, prop)
		return r
	})
	if s.Observe(r, on...) != driver.Success {
		a.Credit(size)
	}
	return h, r, nil
}

// New takes over a driver's handle.
func New(s *core.System, h driver.MemHandle, size uint64, prop driver.AllocationProp) *Handle {
	p := &Handle{Size: size, Asked: prop}
	p.memory.init(h)
	p.refs.Store(1)
	s.Track(p, life.KindAllocation, size)
	return p
}

// Retain adds to the count. The caller must hold one.
func (h *Handle) Retain() { h.refs.Add(1) }

// Owners returns the number of counts.
func (h *Handle) Owners() int64 { return h.refs.Load() }

// TakeGone reports whether the memory was given back, to one caller alone: where
// several let go of a handle at the same time, one of them accounts for it.
func (h *Handle) TakeGone() bool { return h.gone.CompareAndSwap(true, false) }

// Devices is the device that the memory lies on, if it is one.
func (h *Handle) Devices() []driver.Device { return core.DevicesOf(h.Asked.Location) }

// BytesOn implements core.Occupant.
func (h *Handle) BytesOn(d driver.Device) uint64 {
	if h.memory.users.Load() == away || core.DeviceOf(h.Asked.Location) != d {
		return 0
	}
	return h.Size
}

// Lost returns the result that lost the memory's device, or Success. Such memory
// can only be given back.
func (h *Handle) Lost() driver.Result { return h.System().DeviceLost(h.Devices()...) }

// Release takes from the count; the last one gives the memory back, unless it was
// dropped. After a failure the caller still holds its count and may try again.
func (h *Handle) Release() driver.Result {
	if h.refs.Add(-1) > 0 {
		return driver.Success
	}
	if h.memory.users.Load() == away {
		h.System().Away.Sub(h.Size)
	} else if r := h.free(); r != driver.Success {
		h.refs.Add(1)
		return r
	}
	h.Untrack()
	h.gone.Store(true)
	return driver.Success
}

// Holder is embedded, unexported, by the owners that users see.
type Holder struct {
	h    *Handle
	life *life.Life
}

// NewHolder makes the holder. The life is the owner's.
func NewHolder(h *Handle, alive *life.Life) Holder { return Holder{h, alive} }

func (h *Holder) owned() (*Handle, *life.Life) { return h.h, h.life }

// Sealed is what only owners of this library implement.
type Sealed interface {
	owned() (*Handle, *life.Life)
}

// Of looks inside an owner. It returns nil for a nil owner, a nil pointer to one, and one
// that no function made.
func Of(s Sealed) *Handle {
	if v := reflect.ValueOf(s); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil
	}
	h, _ := s.owned()
	return h
}

// Hold returns an owner's handle for an operation of sys, with a count that the caller
// releases.
func Hold(op string, sys *core.System, s Sealed) (*Handle, error) {
	h := Of(s)
	if h == nil {
		return nil, errs.Invalid(op, "nil memory", "pass an Allocation")
	}
	if h.System() != sys {
		return nil, errs.ForeignError(op, "memory")
	}
	if _, open := Acquire(s); !open {
		return nil, errs.ClosedError(op, "memory")
	}
	return h, nil
}

// Acquire adds to the count of an owner's handle, unless the owner is closed. The
// caller keeps the count or releases it.
func Acquire(s Sealed) (*Handle, bool) {
	h, alive := s.owned()
	if h == nil || !alive.Acquire() { // h is nil in a zero value
		return nil, false
	}
	defer alive.Release()
	h.Retain()
	return h, true
}

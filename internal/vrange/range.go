// Package vrange provides ranges of virtual addresses and what is mapped in them: runs of
// memory are mapped, granted and unmapped in one driver call each, and what the driver refuses
// to unmap is kept out of use. Reservations, buffers and pools stand on it. Users never import
// it and no public signature needs it: vmm.Reservation embeds a [Holder], and [Of] looks
// inside.
package vrange

import (
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Range is a range of addresses, which its mappings retain. Its methods are safe for
// concurrent use; changes of one range run one after the other. The operation's name is the
// caller's, for errors.
type Range struct {
	core.Object
	// Closer is the life of the range: nothing is mapped once it is closed.
	Closer life.Closer
	// CUDA is the System as users hold it.
	CUDA *cuda.System
	Base driver.Ptr
	Size uint64
	// Granularity is that of the device that the range was reserved by, in bytes.
	Granularity uint64
	// Views are the Host functions that use its memory.
	Views Views

	// mu guards the table, and the access of its mappings. It is held during driver calls
	// on the range, so that two changes of one range do not interleave.
	mu   lock.Mutex[lock.Range]
	maps table
	// stuck holds mappings that are out of use but could not be unmapped or released:
	// a teardown failed, or an undo. Their addresses are not used again until that
	// succeeds; only teardowns (Close, UnmapRun, and Finish) try it again.
	stuck []*Mapping
	// stuckBytes is the memory in stuck.
	stuckBytes atomic.Uint64
	// guards lie under mappings that are away.
	guards []guard
	// dropped is the result that lost the device of mappings that the driver refused to
	// unmap. They may still be mapped, so nothing else is mapped into the range.
	dropped driver.Result
}

// Reserve reserves size bytes of addresses. It makes no object for users.
func Reserve(op string, d *cuda.Device, size, align int, hint cuda.Ptr) (*Range, error) {
	gran, err := Granularity(op, d)
	if err != nil {
		return nil, err
	}
	if err := memspec.CheckSize(op, size, gran); err != nil {
		return nil, err
	}
	if align < 0 || bits.OnesCount(uint(align)) > 1 {
		return nil, errs.Invalid(op, fmt.Sprintf("an alignment of %d", align), "use a power of two, or 0 for the granularity")
	}
	sys := core.SystemOf(d)
	sys.PollReclaim()
	at := driver.Ptr(hint) &^ (max(driver.Ptr(align), driver.Ptr(gran)) - 1)
	base, res := sys.Drv.MemAddressReserve(uint64(size), uint64(align), at)
	if at != 0 && (res == driver.InvalidValue || res == driver.OutOfMemory) { // perhaps because of the hint
		base, res = sys.Drv.MemAddressReserve(uint64(size), uint64(align), 0)
	}
	if res != driver.Success {
		return nil, sys.CallError(op, driver.CallMemAddressReserve, res, errs.Bytes(size)+" of address space")
	}
	r := &Range{CUDA: d.System(), Base: base, Size: uint64(size), Granularity: gran}
	sys.Track(r, life.KindReservation, r.Size)
	return r, nil
}

// Granularity returns what ranges that a device reserves are multiples of, in bytes.
func Granularity(op string, d *cuda.Device) (uint64, error) {
	c, err := core.ContextOf(op, d)
	if err != nil {
		return 0, err
	}
	if g := c.AddressGranularity.Load(); g != 0 {
		return g, nil
	}
	_, g, err := memspec.Default(op, d)
	if err == nil {
		c.AddressGranularity.Store(g)
	}
	return g, err
}

// Mapped reports whether the range has a mapping.
func (r *Range) Mapped() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.maps.n > 0
}

// Shut prevents further mappings, unless a mapping is open that is not closing.
func (r *Range) Shut(op string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shutLocked(op)
}

func (r *Range) shutLocked(op string) error {
	i := 0
	for m := range r.maps.from(0) {
		if m.closing == nil {
			return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
				Asked: fmt.Sprintf("%s, the first %s at %#x", errs.Count(r.maps.n-i, "mapping"), errs.Bytes(m.Memory.Size), m.Ptr()),
				Hint:  "close the mappings first"})
		}
		i++
	}
	// No mapping can be added from now on: Map checks under the lock.
	r.Closer.Life.Close()
	return nil
}

// Close gives the range back. It unmaps mappings that are closing, after all work that could
// use them. While another mapping is open, or a Host function runs, it returns ErrInUse and
// the range stays open. It is idempotent, and after another error it may be called again.
func (r *Range) Close(op string) error {
	r.mu.Lock()
	err := r.Views.None(op, 0, End)
	if err == nil {
		err = r.shutLocked(op)
	}
	r.mu.Unlock()
	if err != nil {
		return err
	}
	return r.Closer.Close(func() error {
		if err := r.unmapClosing(op); err != nil {
			return err
		}
		return r.Free(op)
	})
}

// unmapClosing unmaps mappings that are closing, after all work of the devices that can
// access them. The reclaimer then finds them unmapped.
func (r *Range) unmapClosing(op string) error {
	maps := r.All()
	if len(maps) == 0 {
		return nil
	}
	for _, m := range maps {
		m.closing.Wait()
	}
	if err := r.System().WaitDevices(op, r.Devices()); err != nil {
		return err
	}
	for _, m := range maps {
		if err := r.Unmap(op, m); err != nil {
			return err
		}
	}
	return nil
}

// Free gives the range, in which nothing is mapped, back to the driver, and before that
// what is stuck in it.
func (r *Range) Free(op string) error {
	if err := r.Finish(op); err != nil {
		return err
	}
	sys := r.System()
	res := sys.Teardown(func() driver.Result { return sys.Drv.MemAddressFree(r.Base, r.Size) })
	if res != driver.Success && r.dropped == driver.Success {
		return sys.CallError(op, driver.CallMemAddressFree, res, fmt.Sprintf("%s at %#x", errs.Bytes(r.Size), uint64(r.Base)))
	}
	r.Untrack()
	return nil
}

// Abandon gives back a range that no other object uses, after an operation that failed
// with cause.
func (r *Range) Abandon(op string, cause error) error { return r.Undo(op).After(cause) }

// Undo returns a transaction that owns the range, with what is stuck in it, and that no
// other object uses.
func (r *Range) Undo(op string) *core.Undo {
	r.mu.Lock()
	on := core.NoDevice
	for _, m := range r.stuck {
		on = core.DeviceOf(m.Memory.Asked.Location)
	}
	r.mu.Unlock()
	u := r.System().NewUndo(on)
	u.Own("address range", int(r.stuckBytes.Load()), func() error { return r.Close(op) })
	return u
}

// Devices returns those that have access to any mapping, as far as the driver is
// concerned.
func (r *Range) Devices() (with []driver.Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var before memspec.Access
	for m := range r.maps.from(0) {
		if len(before) > 0 && m.access.Same(before) || m.presence == away {
			continue
		}
		before = m.access
		for _, d := range m.access.Devices() {
			if !slices.Contains(with, d) {
				with = append(with, d)
			}
		}
	}
	return with
}

// Count returns how many mappings of some memory the range has.
func (r *Range) Count(h *phys.Handle) (n int32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for m := range r.maps.from(0) {
		if m.Memory == h {
			n++
		}
	}
	return n
}

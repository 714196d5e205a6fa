package vmm

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/ranges"
)

// Reservation is a range of address space. Nothing is behind it until memory
// is mapped into it. Address space is nearly free: a range of terabytes costs
// microseconds and no memory.
type Reservation struct {
	ranged
	r       *reservation
	watched life.Watched
}

// ReserveOptions change where Reserve reserves. The zero value lets the driver
// choose.
type ReserveOptions struct {
	// Align is a power of two that the address is a multiple of; 0 is the
	// granularity.
	Align int
	// Hint is the preferred address, rounded down to the alignment. A hint that
	// the driver refuses is dropped, never an error: check Ptr.
	Hint cuda.Ptr
}

// Reserve reserves size bytes of address space, a multiple of the device's
// granularity. Memory of any location can be mapped into it; the device only
// says how. The caller closes it.
func Reserve(d *cuda.Device, size int, o ReserveOptions) (*Reservation, error) {
	r, err := reserve("vmm.Reserve", d, size, o)
	if err != nil {
		return nil, err
	}
	shell := &Reservation{ranged: ranges.Hold(r), r: r}
	r.Watch(&shell.watched)
	return shell, nil
}

// reservation is the inner state: what mappings keep alive.
type reservation struct {
	core.Object
	closer life.Closer
	system *cuda.System
	base   driver.Ptr
	size   uint64
	gran   uint64 // of the device that it was reserved by

	// mu guards maps, which are sorted by offset and never overlap, and their
	// access. Driver calls on the range are made under it, so that two changes
	// of one range never mix.
	mu   sync.Mutex
	maps []*mapping
	one  [1]*mapping // where maps lies while there is one
	// left are mappings that are out of use and could not be given back: a
	// teardown failed, or the undo of something that failed. Their addresses
	// are not used again before they went, and only what tears down (Close,
	// UnmapRun, and Clip of a buffer) tries that.
	left []*mapping
	// leftBytes is the memory in left.
	leftBytes atomic.Uint64
	// dropped is what lost the device of mappings that the driver refused to
	// unmap. They may still be there, so nothing else is mapped into the range.
	dropped driver.Result
	views   views
}

func reserve(op string, d *cuda.Device, size int, o ReserveOptions) (*reservation, error) {
	gran, err := granule(op, d)
	if err != nil {
		return nil, err
	}
	if err := checkSize(op, size, gran); err != nil {
		return nil, err
	}
	if o.Align < 0 || bits.OnesCount(uint(o.Align)) > 1 {
		return nil, errs.Invalid(op, fmt.Sprintf("an alignment of %d", o.Align), "use a power of two, or 0 for the granularity")
	}
	sys := core.SystemOf(d)
	sys.PollReclaim()
	hint := driver.Ptr(o.Hint) &^ (max(driver.Ptr(o.Align), driver.Ptr(gran)) - 1)
	base, res := sys.Drv.MemAddressReserve(uint64(size), uint64(o.Align), hint)
	if hint != 0 && (res == driver.InvalidValue || res == driver.OutOfMemory) { // it may be the hint that is refused
		base, res = sys.Drv.MemAddressReserve(uint64(size), uint64(o.Align), 0)
	}
	if res != driver.Success {
		return nil, sys.CallError(op, driver.CallMemAddressReserve, res, errs.Bytes(size)+" of address space")
	}
	r := &reservation{system: d.System(), base: base, size: uint64(size), gran: gran}
	r.maps = r.one[:0]
	sys.Track(r, life.KindReservation, r.size)
	return r, nil
}

// granule is what address ranges are multiples of.
func granule(op string, d *cuda.Device) (uint64, error) {
	if d == nil {
		return 0, errNilDevice(op)
	}
	c, err := core.ContextOf(d)
	if err != nil {
		return 0, err
	}
	if g := c.Granule.Load(); g != 0 {
		return g, nil
	}
	_, g, err := Properties{}.resolve(op, d)
	if err == nil {
		c.Granule.Store(g)
	}
	return g, err
}

// Ptr is the address of the range, fixed for life.
func (r *Reservation) Ptr() cuda.Ptr { return cuda.Ptr(r.made("vmm.Reservation.Ptr").base) }

// Size is the size of the range in bytes.
func (r *Reservation) Size() int { return int(r.made("vmm.Reservation.Size").size) }

// inner returns the inner state, or an error for a Reservation that no function made.
func (r *Reservation) inner(op string) (*reservation, error) {
	if r == nil || r.r == nil {
		return nil, errs.Invalid(op, "a nil reservation", "make one with Reserve")
	}
	return r.r, nil
}

// made is inner for methods that return no error: they panic with one.
func (r *Reservation) made(op string) *reservation {
	in, err := r.inner(op)
	if err != nil {
		panic(err)
	}
	return in
}

// acquire starts an operation on the range; the caller calls closer.Release.
func (r *Reservation) acquire(op string) (*reservation, error) {
	in, err := r.inner(op)
	if err == nil && !in.closer.Acquire() {
		err = errs.ClosedError(op, "reservation")
	}
	return in, err
}

// Close gives the range back. What is still mapped there and was closed with
// CloseAfter goes with it, after all work that could use it (see the package
// documentation). While anything else is mapped into the range the error is
// ErrInUse, and it stays open. After another error it may be called again.
func (r *Reservation) Close() error {
	const op = "vmm.Reservation.Close"
	in, err := r.inner(op)
	if err == nil {
		err = in.views.notInside(op, 0, rest)
	}
	if err != nil {
		return err
	}
	err = in.close(op)
	if err == nil {
		r.watched.Stop()
	}
	return err
}

// CloseAfter takes the range out of use at once and gives it back when the work
// that is on the streams now is done and everything that was mapped there is gone.
// It never blocks. While anything is mapped into the range that was not closed with
// CloseAfter the error is ErrInUse, without a stream it is ErrInvalidArgument, with
// one that captures a graph ErrCapturing, and nothing has changed.
func (r *Reservation) CloseAfter(streams ...*cuda.Stream) error {
	const op = "vmm.Reservation.CloseAfter"
	in, err := r.inner(op)
	if err != nil {
		return err
	}
	sys := in.System()
	return life.CloseAfter(&in.closer, sys, func() (*core.Fence, error) {
		f, err := core.FenceOf(sys, op, streams)
		if err != nil {
			return nil, err
		}
		if err := in.shut(op); err != nil {
			f.Release()
			return nil, err
		}
		return f, nil
	}, func() error {
		in.mu.Lock()
		mapped := len(in.maps)
		in.mu.Unlock()
		if mapped > 0 {
			return life.ErrAgain
		}
		if err := in.free(op); err != nil {
			return err
		}
		r.watched.Stop()
		return nil
	})
}

// Released returns the end of the range's closing.
func (r *Reservation) Released() cuda.Completion {
	return r.made("vmm.Reservation.Released").closer.Completion()
}

// shut lets nothing more be mapped, unless something is that does not go by itself.
func (r *reservation) shut(op string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, m := range r.maps {
		if m.closing == nil {
			return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
				Asked: fmt.Sprintf("%s, the first %s at %#x", errs.Count(len(r.maps)-i, "mapping"), errs.Bytes(m.phys.Size), m.ptr()),
				Hint:  "close the mappings first"})
		}
	}
	// No mapping can come any more: mapRun asks under the lock.
	r.closer.Life.Close()
	return nil
}

func (r *reservation) close(op string) error {
	if err := r.shut(op); err != nil {
		return err
	}
	return r.closer.Close(func() error {
		if err := r.unmapClosing(op); err != nil {
			return err
		}
		return r.free(op)
	})
}

// unmapClosing unmaps what was closed with CloseAfter and still waits, after all
// work of the devices that reach it. The reclaimer then finds nothing to do.
func (r *reservation) unmapClosing(op string) error {
	r.mu.Lock()
	maps := slices.Clone(r.maps)
	r.mu.Unlock()
	if len(maps) == 0 {
		return nil
	}
	if err := r.views.await(op, 0, rest); err != nil {
		return err
	}
	for _, m := range maps {
		m.closing.Wait()
	}
	if err := r.System().WaitDevices(op, r.devices()); err != nil {
		return err
	}
	for _, m := range maps {
		if err := r.unmapRun(op, []*mapping{m}); err != nil {
			return err
		}
	}
	return nil
}

// lacks reports whether a mapping is not in the range any more.
func (r *reservation) lacks(m *mapping) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !slices.Contains(r.maps, m)
}

// free gives the range back to the driver, and before that what was left in it.
func (r *reservation) free(op string) error {
	if err := r.finish(op); err != nil {
		return err
	}
	sys := r.System()
	res := sys.Teardown(func() driver.Result { return sys.Drv.MemAddressFree(r.base, r.size) })
	if res != driver.Success && r.dropped == driver.Success {
		return sys.CallError(op, driver.CallMemAddressFree, res, fmt.Sprintf("%s at %#x", errs.Bytes(r.size), uint64(r.base)))
	}
	r.Untrack()
	return nil
}

// abandon gives back a range that no other object has, after what failed with
// cause.
func (r *reservation) abandon(op string, cause error) error {
	return r.undone(cause, func() error { return r.close(op) })
}

// undone undoes what failed with cause. If that fails too the reclaimer tries it
// once more.
func (r *reservation) undone(cause error, undo func() error) error {
	err := undo()
	if err == nil {
		return cause
	}
	r.System().Reclaim(new(core.Fence), nil, undo)
	return fmt.Errorf("%w (and undoing it failed, which System.Drain tries again: %w)", cause, err)
}

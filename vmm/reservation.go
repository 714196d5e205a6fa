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

// Reservation is a range of address space, without memory until some is mapped into it.
// Address space is nearly free: reserving terabytes takes microseconds and no memory.
// All methods are safe for concurrent use.
type Reservation struct {
	ranged
	r       *reservation
	watched life.Watched
}

// ReserveOptions determine where Reserve reserves. The zero value lets the driver
// choose.
type ReserveOptions struct {
	// Align is a power of two that the address is a multiple of; 0 is the
	// granularity.
	Align int
	// Hint is the preferred address, rounded down to the alignment. If the driver
	// refuses it another address is reserved: check Ptr.
	Hint cuda.Ptr
}

// Reserve reserves size bytes of address space, a multiple of the device's granularity.
// Memory of any location can be mapped into it; the device only determines the
// granularity. The caller closes it.
func Reserve(d *cuda.Device, size int, o ReserveOptions) (*Reservation, error) {
	r, err := reserve("vmm.Reserve", d, size, o)
	if err != nil {
		return nil, err
	}
	made := &Reservation{ranged: ranges.Hold(r), r: r}
	r.Watch(&made.watched)
	return made, nil
}

// reservation is the inner state, which mappings retain.
type reservation struct {
	core.Object
	closer life.Closer
	system *cuda.System
	base   driver.Ptr
	size   uint64
	gran   uint64 // of the device that it was reserved by

	// mu guards maps, which are sorted by offset and never overlap, and their
	// access. It is held during driver calls on the range, so that two changes of one
	// range do not interleave.
	mu   sync.Mutex
	maps []*mapping
	one  [1]*mapping // the array of maps while there is at most one
	// stuck holds mappings that are out of use but could not be unmapped or released:
	// a teardown failed, or an undo. Their addresses are not used again until that
	// succeeds; only teardowns (Close, UnmapRun, and Clip of a buffer) try it again.
	stuck []*mapping
	// stuckBytes is the memory in stuck.
	stuckBytes atomic.Uint64
	// dropped is the result that lost the device of mappings that the driver refused to
	// unmap. They may still be mapped, so nothing else is mapped into the range.
	dropped driver.Result
	views   views
}

func reserve(op string, d *cuda.Device, size int, o ReserveOptions) (*reservation, error) {
	gran, err := addressGranularity(op, d)
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
	if hint != 0 && (res == driver.InvalidValue || res == driver.OutOfMemory) { // perhaps because of the hint
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

// alignFor returns an alignment of at least the granularity. One that is invalid stays as
// it is, for reserve to refuse.
func alignFor(align int, gran uint64) int {
	if align < 0 || bits.OnesCount(uint(align)) > 1 {
		return align
	}
	return max(align, int(gran))
}

// addressGranularity returns what address ranges are multiples of.
func addressGranularity(op string, d *cuda.Device) (uint64, error) {
	c, err := core.ContextOf(op, d)
	if err != nil {
		return 0, err
	}
	if g := c.AddressGranularity.Load(); g != 0 {
		return g, nil
	}
	_, g, err := Properties{}.resolve(op, d)
	if err == nil {
		c.AddressGranularity.Store(g)
	}
	return g, err
}

// Ptr returns the address of the range, fixed for life.
func (r *Reservation) Ptr() cuda.Ptr { return cuda.Ptr(errs.Must(r.inner("vmm.Reservation.Ptr")).base) }

// Size returns the size of the range in bytes.
func (r *Reservation) Size() int { return int(errs.Must(r.inner("vmm.Reservation.Size")).size) }

// inner returns the inner state, or an error for a Reservation that no function made.
func (r *Reservation) inner(op string) (*reservation, error) {
	if r == nil || r.r == nil {
		return nil, errs.Invalid(op, "a nil reservation", "make one with Reserve")
	}
	return r.r, nil
}

// acquire starts an operation on the range; the caller calls closer.Release.
func (r *Reservation) acquire(op string) (*reservation, error) {
	in, err := r.inner(op)
	if err == nil && !in.closer.Acquire() {
		err = errs.ClosedError(op, "reservation")
	}
	return in, err
}

// Close gives the range back. It unmaps mappings that were closed with CloseAfter and
// still wait, after all work that could use them (see the package documentation). If
// other mappings are open it returns ErrInUse and the range stays open. It is idempotent,
// and after another error it may be called again.
func (r *Reservation) Close() error {
	const op = "vmm.Reservation.Close"
	in, err := r.inner(op)
	if err != nil {
		return err
	}
	err = in.close(op)
	if err == nil {
		r.watched.Stop()
	}
	return err
}

// CloseAfter takes the range out of use at once and gives it back when the work that is
// on the streams now is done and no mapping is left. It never blocks. If a mapping is
// open that was not closed with CloseAfter it returns ErrInUse, without a stream
// ErrInvalidArgument, and with one that captures a graph ErrCapturing; then nothing has
// changed.
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
		in.mu.Lock()
		err = in.shutLocked(op)
		in.mu.Unlock()
		if err != nil {
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

// Released returns the completion of the range's closing.
func (r *Reservation) Released() cuda.Completion {
	return errs.Must(r.inner("vmm.Reservation.Released")).closer.Completion()
}

// shutLocked prevents further mappings, unless a mapping is open that is not closing.
func (r *reservation) shutLocked(op string) error {
	for i, m := range r.maps {
		if m.closing == nil {
			return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
				Asked: fmt.Sprintf("%s, the first %s at %#x", errs.Count(len(r.maps)-i, "mapping"), errs.Bytes(m.phys.Size), m.ptr()),
				Hint:  "close the mappings first"})
		}
	}
	// No mapping can be added from now on: mapRun checks under the lock.
	r.closer.Life.Close()
	return nil
}

func (r *reservation) close(op string) error {
	r.mu.Lock()
	err := r.views.none(op, 0, rest)
	if err == nil {
		err = r.shutLocked(op)
	}
	r.mu.Unlock()
	if err != nil {
		return err
	}
	return r.closer.Close(func() error {
		if err := r.unmapClosing(op); err != nil {
			return err
		}
		return r.free(op)
	})
}

// unmapClosing unmaps mappings whose CloseAfter is pending, after all work of the
// devices that can access them. The reclaimer then finds them unmapped.
func (r *reservation) unmapClosing(op string) error {
	r.mu.Lock()
	maps := slices.Clone(r.maps)
	r.mu.Unlock()
	if len(maps) == 0 {
		return nil
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

// free gives the range back to the driver, and before that its stuck mappings.
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

// abandon gives back a range that no other object uses, after an operation that failed
// with cause.
func (r *reservation) abandon(op string, cause error) error { return r.undo(op).After(cause) }

// undo returns a transaction that owns the range, with what is stuck in it, and that no other
// object uses.
func (r *reservation) undo(op string) *core.Undo {
	r.mu.Lock()
	on := core.NoDevice
	for _, m := range r.stuck {
		on = core.DeviceOf(m.phys.Asked.Location)
	}
	r.mu.Unlock()
	u := r.System().NewUndo(on)
	u.Own("address range", int(r.stuckBytes.Load()), func() error { return r.close(op) })
	return u
}

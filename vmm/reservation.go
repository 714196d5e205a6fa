package vmm

import (
	"math/bits"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

type ranged = vrange.Holder

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
	made := &Reservation{ranged: vrange.Hold(r), r: r}
	r.Watch(&made.watched)
	return made, nil
}

// reservation is the inner state, which mappings retain.
type reservation = vrange.Range

func reserve(op string, d *cuda.Device, size int, o ReserveOptions) (*reservation, error) {
	return vrange.Reserve(op, d, size, o.Align, o.Hint)
}

// alignFor returns an alignment of at least the granularity. One that is invalid stays as
// it is, for reserve to refuse.
func alignFor(align int, gran uint64) int {
	if align < 0 || bits.OnesCount(uint(align)) > 1 {
		return align
	}
	return max(align, int(gran&-gran)) // sizes of pages need be no power of two
}

// Ptr returns the address of the range, fixed for life.
func (r *Reservation) Ptr() cuda.Ptr { return cuda.Ptr(r.r.Base) }

// Size returns the size of the range in bytes.
func (r *Reservation) Size() int { return int(r.r.Size) }

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
	if err == nil && !in.Closer.Acquire() {
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
	err = in.Close(op)
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
	return life.CloseAfter(&in.Closer, sys, func() (*core.Fence, error) {
		f, err := core.FenceOf(sys, op, streams)
		if err != nil {
			return nil, err
		}
		if err := in.Shut(op); err != nil {
			f.Release()
			return nil, err
		}
		return f, nil
	}, func() error {
		if in.Mapped() {
			return life.ErrAgain
		}
		if err := in.Free(op); err != nil {
			return err
		}
		r.watched.Stop()
		return nil
	})
}

// Released returns the completion of the range's closing.
func (r *Reservation) Released() cuda.Completion {
	return r.r.Closer.Completion()
}

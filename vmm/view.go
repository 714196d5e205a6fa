package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/pages"
)

// View is a part of a sparse range, as elements of type T. It is a value and owns nothing: once
// one of its pages is a hole its copies return ErrOutOfRange, and name the page. Copies are work
// on the stream that the caller names. Without one (nil) they run on the device's own stream,
// which is unordered with any other, and return when they are done.
//
// UnmapAfter and CloseAfter take effect behind the copies of views, whichever streams they name.
type View[T any] struct {
	s   *Sparse
	off uint64 // bytes
	len int    // elements
}

// ViewOf returns n elements of a range from byte off on, all of whose pages must be mapped
// (ErrOutOfRange). Elements have a fixed size and no pointers.
func ViewOf[T any](s *Sparse, off, n int) (View[T], error) {
	const op = "vmm.ViewOf"
	in, err := s.inner(op)
	if err != nil {
		return View[T]{}, err
	}
	if err := errs.CheckElement[T](op); err != nil {
		return View[T]{}, err
	}
	size := int(sizeOf[T]())
	if off < 0 || n < 0 || n > in.Elements(size) {
		return View[T]{}, errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s of %s from byte %d on, in a range of %s", errs.Count(n, "element"), errs.Bytes(size), off, errs.Bytes(in.Size())),
			Hint:  "stay inside the range"})
	}
	if err := in.Check(op, uint64(off), uint64(n*size)); err != nil {
		return View[T]{}, err
	}
	return View[T]{s, uint64(off), n}, nil
}

// Len returns the number of elements.
func (v View[T]) Len() int { return v.len }

// Size returns the length in bytes.
func (v View[T]) Size() int { return v.len * int(sizeOf[T]()) }

// Ptr returns the address of the first element, for kernels. It is 0 for a zero View.
func (v View[T]) Ptr() cuda.Ptr {
	if v.s == nil {
		return 0
	}
	return v.s.Ptr() + cuda.Ptr(v.off)
}

// Slice returns the part from element from up to, not including, element to.
func (v View[T]) Slice(from, to int) (View[T], error) {
	if err := errs.CheckSlice("vmm.View.Slice", from, to, v.len, "stay inside the view"); err != nil {
		return View[T]{}, err
	}
	return View[T]{v.s, v.off + uint64(from)*uint64(sizeOf[T]()), to - from}, nil
}

// CopyFrom copies as many Go elements to the view. On a stream it returns once they are staged.
func (v View[T]) CopyFrom(on *cuda.Stream, src []T) error {
	const op = "vmm.View.CopyFrom"
	return v.staged(op, on, driver.AccessReadWrite, len(src), func(st *cuda.Stream, pieces core.Guard) error {
		err := core.StagingOf(st).UploadPieces(driver.Ptr(v.Ptr()), asBytes(src), pieces)
		if on == nil { // also after an error, for pieces that were submitted before
			if waited := st.Synchronize(); err == nil {
				err = waited
			}
		}
		return err
	})
}

// CopyTo copies the view to as many Go elements, after the work that is on the stream. It
// returns when the last one has arrived.
func (v View[T]) CopyTo(on *cuda.Stream, dst []T) error {
	const op = "vmm.View.CopyTo"
	return v.staged(op, on, driver.AccessRead, len(dst), func(st *cuda.Stream, pieces core.Guard) error {
		return core.StagingOf(st).DownloadPieces(asBytes(dst), driver.Ptr(v.Ptr()), pieces)
	})
}

// CopyFromView copies another view of the same length to this one. If the two overlap the
// result is undefined; the software driver reports it.
func (v View[T]) CopyFromView(on *cuda.Stream, src View[T]) error {
	const op = "vmm.View.CopyFromView"
	st, err := v.stream(op, on, src.len)
	if err != nil || v.len == 0 {
		return err
	}
	switch {
	case src.s == nil:
		return errZeroView(op)
	case src.s.r.System() != v.s.r.System():
		return errs.ForeignError(op, "view")
	}
	err = pages.SubmitBoth(op, v.s.r, v.off, src.s.r, src.off, uint64(v.Size()), core.StreamOf(st), func() error {
		return wrap(op, st.Copy(v.Ptr(), src.Ptr(), v.Size()))
	})
	if err != nil {
		return err
	}
	return done(op, on, st)
}

// Zero sets the view to zero.
func (v View[T]) Zero(on *cuda.Stream) error {
	const op = "vmm.View.Zero"
	st, err := v.stream(op, on, v.len)
	if err != nil || v.len == 0 {
		return err
	}
	err = v.s.r.Submit(op, v.off, uint64(v.Size()), core.StreamOf(st), driver.AccessReadWrite, func() error {
		return wrap(op, st.Memset(v.Ptr(), 0, v.Size()))
	})
	if err != nil {
		return err
	}
	return done(op, on, st)
}

// stream returns the stream that an operation on n elements runs on.
func (v View[T]) stream(op string, on *cuda.Stream, n int) (*cuda.Stream, error) {
	if v.s == nil {
		return nil, errZeroView(op)
	}
	if n != v.len {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s for a view of %d", errs.Count(n, "element"), v.len), Hint: "both sides must be equally long"})
	}
	if on == nil {
		return v.s.Device().Transfer()
	}
	st := core.StreamOf(on)
	if err := st.UseWithoutWork(op, v.s.r.System()); err != nil { // nil is refused, too
		return nil, err
	}
	st.Release()
	return on, nil
}

func errZeroView(op string) error {
	return errs.Invalid(op, "a zero View", "make one with ViewOf")
}

// staged copies n Go elements, in pieces. Each is checked and submitted while its pages cannot
// be taken away, and waits for the GPU happen between pieces.
func (v View[T]) staged(op string, on *cuda.Stream, need driver.AccessFlags, n int, move func(*cuda.Stream, core.Guard) error) error {
	st, err := v.stream(op, on, n)
	if err != nil || n == 0 {
		return err
	}
	return wrap(op, move(st, &viewGuard{v.s.r, op, v.off, uint64(v.Size()), core.StreamOf(st), need, nil}))
}

// viewGuard checks each piece of a copy, and holds the pages of the whole during its submission.
type viewGuard struct {
	r         *pages.Range
	op        string
	off, size uint64
	st        *core.Stream
	need      driver.AccessFlags
	leave     func()
}

func (g *viewGuard) Enter() (err error) {
	g.leave, err = g.r.Enter(g.op, g.off, g.size, g.st, g.need)
	return err
}

func (g *viewGuard) Leave() { g.leave() }

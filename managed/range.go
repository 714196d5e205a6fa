package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Range is a part of a Buffer. It is a value and owns nothing: once the buffer or its
// allocator is closed, its operations return ErrClosed. All methods are safe for
// concurrent use.
type Range struct {
	h      *handle
	off, n uint64
}

// Slice returns the part from byte from up to, not including, byte to: at least
// one byte.
func (r Range) Slice(from, to int) (Range, error) {
	return r.slice("managed.Range.Slice", from, to, 1)
}

// slice counts in elements of a size.
func (r Range) slice(op string, from, to, size int) (Range, error) {
	if err := r.acquire(op); err != nil {
		return Range{}, err
	}
	defer r.release()
	if err := checkSlice(op, from, to, r.Len()/size); err != nil {
		return Range{}, err
	}
	return Range{r.h, r.off + uint64(from*size), uint64((to - from) * size)}, nil
}

// checkSlice refuses a part that is empty or not inside n.
func checkSlice(op string, from, to, n int) error {
	if from == to {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("%d to %d of %d", from, to, n),
			Hint: "the driver has no empty ranges: name at least one byte or element"})
	}
	return errs.CheckSlice(op, from, to, n, "stay inside the memory")
}

// Ptr returns the address, for kernels and copies. It is 0 for a zero Range.
func (r Range) Ptr() cuda.Ptr {
	if r.h == nil {
		return 0
	}
	return cuda.Ptr(r.h.m.ptr) + cuda.Ptr(r.off)
}

// Len returns the length in bytes.
func (r Range) Len() int { return int(r.n) }

// acquire starts an operation on the buffer and its memory; the caller calls release.
func (r Range) acquire(op string) error {
	if r.h == nil {
		return errNilBuffer(op)
	}
	if !r.h.closer.Acquire() {
		return errs.ClosedError(op, "buffer")
	}
	if !r.h.m.life.Acquire() {
		r.h.closer.Release()
		return r.h.m.closedError(op)
	}
	return nil
}

func (r Range) release() {
	r.h.m.life.Release()
	r.h.closer.Release()
}

// asked describes the range in an error.
func (r Range) asked(what string) string {
	return fmt.Sprintf("%s of %s at %v on %v", what, errs.Bytes(r.n), r.Ptr(), r.h.m.dev)
}

// on calls do with a stream for work on the memory, which no graph can contain. Without one
// it takes the device's own and waits for the work.
func (m *memory) on(op string, s *cuda.Stream, do func(st *core.Stream) error) error {
	wait := s == nil
	if wait {
		var err error
		if s, err = m.dev.Transfer(); err != nil {
			return err
		}
	}
	st := core.StreamOf(s)
	if err := st.Use(op, m.sys); err != nil {
		return err
	}
	defer st.Release()
	if err := st.Uncaptured(op, func() error { return do(st) }); err != nil || !wait {
		return err
	}
	return s.Synchronize()
}

// notCapturing refuses work that no graph can contain: the driver would end the capture.
func notCapturing(op string, st *core.Stream) error {
	capturing, r := st.Capturing()
	switch {
	case capturing:
		return core.CapturingError(op, st)
	case r != driver.Success:
		return st.Ctx.CallError(op, driver.CallStreamIsCapturing, r, fmt.Sprintf("stream %#x", uintptr(st.Handle)))
	}
	return nil
}

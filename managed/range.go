package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Range is a part of a Buffer. It is a value and owns nothing: when the buffer or
// its allocator was closed, its operations answer ErrClosed.
type Range struct {
	h      *handle
	off, n uint64
}

// Slice is the part of n bytes at an offset.
func (r Range) Slice(off, n int) (Range, error) {
	const op = "managed.Range.Slice"
	if err := r.hold(op); err != nil {
		return Range{}, err
	}
	defer r.drop()
	if off < 0 || n <= 0 || uint64(off) > r.n || uint64(n) > r.n-uint64(off) {
		return Range{}, core.Error(core.Failure{Op: op, Kind: core.OutOfRange,
			Asked: fmt.Sprintf("offset %d, length %d of %s", off, n, core.Count(r.n, "byte")), Hint: "stay inside, with at least one byte"})
	}
	return Range{r.h, r.off + uint64(off), uint64(n)}, nil
}

// Ptr is the address, for kernels and copies. It is 0 for a zero Range.
func (r Range) Ptr() cuda.Ptr {
	if r.h == nil {
		return 0
	}
	return cuda.Ptr(r.h.m.ptr) + cuda.Ptr(r.off)
}

// Len is the length in bytes.
func (r Range) Len() int { return int(r.n) }

// hold keeps the buffer and the memory for an operation; the caller calls drop.
func (r Range) hold(op string) error {
	if r.h == nil {
		return core.Invalid(op, "a zero Range", "take it from a Buffer")
	}
	if !r.h.closer.Hold() {
		return core.ClosedError(op, "buffer")
	}
	if !r.h.m.life.Hold() {
		r.h.closer.Drop()
		return r.h.m.closedError(op)
	}
	return nil
}

func (r Range) drop() {
	r.h.m.life.Drop()
	r.h.closer.Drop()
}

// asked is the range in an error.
func (r Range) asked(what string) string {
	return fmt.Sprintf("%s of %s at %v on %v", what, core.Bytes(r.n), r.Ptr(), r.h.m.dev)
}

// on holds a stream for work on the memory. Without one it is the device's own,
// and the work is waited for.
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
	defer st.Drop()
	if err := notCapturing(op, st); err != nil {
		return err
	}
	if err := do(st); err != nil || !wait {
		return err
	}
	return s.Synchronize()
}

// notCapturing refuses what no graph can hold: the driver would end the capture.
func notCapturing(op string, st *core.Stream) error {
	capturing, r := st.Capturing()
	switch {
	case capturing:
		return core.CapturingError(op, st)
	case r != driver.Success:
		return st.Ctx.Fail(op, driver.CallStreamIsCapturing, r, fmt.Sprintf("stream %#x", uintptr(st.Handle)))
	}
	return nil
}

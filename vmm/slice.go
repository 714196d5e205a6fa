package vmm

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Slice is a part of a buffer or an array, as elements of type T. It is a value and owns
// nothing: once its memory is out of use its operations return ErrClosed or
// ErrOutOfRange. Copies are work on the stream that the caller names. Without one (nil)
// they run on the device's own stream, which is unordered with any other, and return when
// they are done: wait first for streams that still work on the same memory.
type Slice[T any] struct {
	buf *buffer
	off uint64 // bytes
	len int    // elements
}

// Slice returns the part from byte from up to, not including, byte to, which must
// be in use (ErrOutOfRange).
func (b *Buffer) Slice(from, to int) (Slice[byte], error) {
	return slice[byte]("vmm.Buffer.Slice", b.inner(), from, to)
}

// slice returns a part of a buffer, in elements.
func slice[T any](op string, b *buffer, from, to int) (Slice[T], error) {
	if b == nil {
		return Slice[T]{}, errNilBuffer(op)
	}
	if b.closer.Closed() {
		return Slice[T]{}, b.errClosed(op)
	}
	size := int(sizeOf[T]())
	used := int(b.used.Load()) / size
	if err := errs.CheckSlice(op, from, to, used, "stay inside what is in use; Append, AppendUndefined or Resize make it longer"); err != nil {
		return Slice[T]{}, err
	}
	return Slice[T]{b, uint64(from) * uint64(size), to - from}, nil
}

func sizeOf[T any]() uintptr {
	var zero T
	return unsafe.Sizeof(zero)
}

// asBytes returns the memory of Go elements.
func asBytes[T any](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), len(s)*int(sizeOf[T]()))
}

// Len returns the number of elements.
func (s Slice[T]) Len() int { return s.len }

// Size returns the length in bytes.
func (s Slice[T]) Size() int { return s.len * int(sizeOf[T]()) }

// Ptr returns the address of the first element, for kernels. It is 0 for a zero Slice.
func (s Slice[T]) Ptr() cuda.Ptr {
	if s.buf == nil {
		return 0
	}
	return cuda.Ptr(s.buf.res.Base) + cuda.Ptr(s.off)
}

// Slice returns the part from element from up to, not including, element to.
func (s Slice[T]) Slice(from, to int) (Slice[T], error) {
	if err := errs.CheckSlice("vmm.Slice.Slice", from, to, s.len, "stay inside the slice"); err != nil {
		return Slice[T]{}, err
	}
	return Slice[T]{s.buf, s.off + uint64(from)*uint64(sizeOf[T]()), to - from}, nil
}

// CopyFrom copies Go elements into the slice, which must have the same length. On a
// stream it returns once they are staged.
func (s Slice[T]) CopyFrom(on *cuda.Stream, src []T) error {
	const op = "vmm.Slice.CopyFrom"
	return s.staged(op, on, driver.AccessReadWrite, len(src), func(st *cuda.Stream, pieces core.Guard) error {
		err := core.StagingOf(st).UploadPieces(driver.Ptr(s.Ptr()), asBytes(src), pieces)
		if on == nil { // also after an error, for pieces that were submitted before
			if waited := st.Synchronize(); err == nil {
				err = waited
			}
		}
		return err
	})
}

// CopyTo copies the slice into as many Go elements, after the work that is on the stream.
// It returns when the last one has arrived.
func (s Slice[T]) CopyTo(on *cuda.Stream, dst []T) error {
	const op = "vmm.Slice.CopyTo"
	return s.staged(op, on, driver.AccessRead, len(dst), func(st *cuda.Stream, pieces core.Guard) error {
		return core.StagingOf(st).DownloadPieces(asBytes(dst), driver.Ptr(s.Ptr()), pieces)
	})
}

// CopyFromHost copies pinned host memory of as many bytes into the slice.
func (s Slice[T]) CopyFromHost(on *cuda.Stream, src cuda.HostSlice) error {
	const op = "vmm.Slice.CopyFromHost"
	return s.with(op, on, driver.AccessReadWrite, src.Len(), func(on *cuda.Stream) error {
		return on.CopyFromHost(s.Ptr(), src)
	})
}

// CopyToHost copies the slice into pinned host memory of as many bytes.
func (s Slice[T]) CopyToHost(on *cuda.Stream, dst cuda.HostSlice) error {
	const op = "vmm.Slice.CopyToHost"
	return s.with(op, on, driver.AccessRead, dst.Len(), func(on *cuda.Stream) error {
		return on.CopyToHost(dst, s.Ptr())
	})
}

// CopyFromSlice copies another slice of the same length into this one. If the two overlap
// the result is undefined; the software driver reports it.
func (s Slice[T]) CopyFromSlice(on *cuda.Stream, src Slice[T]) error {
	const op = "vmm.Slice.CopyFromSlice"
	if s.buf == nil || src.buf == nil {
		return errZeroSlice(op)
	}
	if src.buf.dev.System() != s.buf.dev.System() {
		return errs.ForeignError(op, "slice")
	}
	if !s.buf.closer.Acquire() {
		return s.buf.errClosed(op)
	}
	defer s.buf.closer.Release() // not in a loop: its defers would be allocated
	if !src.buf.closer.Acquire() {
		return src.buf.errClosed(op)
	}
	defer src.buf.closer.Release()
	st, err := s.buf.stream(op, on)
	if err != nil {
		return err
	}
	defer s.buf.copies.end(s.buf.copies.begin(st))
	defer src.buf.copies.end(src.buf.copies.begin(st))
	if err := s.copyFrom(op, st, src); err != nil {
		return err
	}
	return done(op, on, st)
}

// copyFrom submits the copy while neither memory can be taken away.
func (s Slice[T]) copyFrom(op string, st *cuda.Stream, src Slice[T]) error {
	rlockBoth(s.buf, src.buf)
	defer runlockBoth(s.buf, src.buf)
	if err := src.check(op, st, driver.AccessRead); err != nil {
		return err
	}
	if err := s.check(op, st, driver.AccessReadWrite); err != nil {
		return err
	}
	if err := s.sameSize(op, src.Size()); err != nil || s.len == 0 {
		return err
	}
	return wrap(op, st.Copy(s.Ptr(), src.Ptr(), s.Size()))
}

// Zero sets the slice to zero.
func (s Slice[T]) Zero(on *cuda.Stream) error {
	const op = "vmm.Slice.Zero"
	return s.with(op, on, driver.AccessReadWrite, s.Size(), func(on *cuda.Stream) error {
		return on.Memset(s.Ptr(), 0, s.Size())
	})
}

// within adds the operation to an error of one that it calls.
func within(op string, err error) error {
	if strings.HasPrefix(err.Error(), op+":") {
		return err
	}
	return fmt.Errorf("%s: %w", op, err)
}

func errZeroSlice(op string) error {
	return errs.Invalid(op, "a zero Slice", "take it from Buffer.Slice or Array.Slice")
}

// wrap is within for an error that may be nil.
func wrap(op string, err error) error {
	if err == nil {
		return nil
	}
	return within(op, err)
}

// done waits for an operation if its caller named no stream.
func done(op string, named, st *cuda.Stream) error {
	if named != nil {
		return nil
	}
	return wrap(op, st.Synchronize())
}

// with submits an operation on the slice's memory while that cannot be taken away. If the
// caller named no stream it then waits, without holding mu: Close and other operations
// that take the memory away wait for the same work.
func (s Slice[T]) with(op string, on *cuda.Stream, need driver.AccessFlags, n int, submit func(*cuda.Stream) error) error {
	if s.buf == nil {
		return errZeroSlice(op)
	}
	if !s.buf.closer.Acquire() {
		return s.buf.errClosed(op)
	}
	defer s.buf.closer.Release()
	st, err := s.buf.stream(op, on)
	if err != nil {
		return err
	}
	defer s.buf.copies.end(s.buf.copies.begin(st))
	if err := s.locked(op, st, need, n, submit); err != nil || s.len == 0 {
		return err
	}
	return done(op, on, st)
}

func (s Slice[T]) locked(op string, st *cuda.Stream, need driver.AccessFlags, n int, submit func(*cuda.Stream) error) error {
	s.buf.mu.RLock()
	defer s.buf.mu.RUnlock()
	if err := s.check(op, st, need); err != nil {
		return err
	}
	if err := s.sameSize(op, n); err != nil || n == 0 {
		return err
	}
	return wrap(op, submit(st))
}

// staged copies n Go elements, in pieces. Each piece is checked and submitted with mu held,
// and waits for the GPU happen between pieces. So if the buffer becomes shorter or loses
// access during the copy, the rest of the copy is refused.
func (s Slice[T]) staged(op string, on *cuda.Stream, need driver.AccessFlags, n int, move func(*cuda.Stream, core.Guard) error) error {
	if s.buf == nil {
		return errZeroSlice(op)
	}
	if !s.buf.closer.Acquire() {
		return s.buf.errClosed(op)
	}
	defer s.buf.closer.Release()
	st, err := s.buf.stream(op, on)
	if err != nil {
		return err
	}
	defer s.buf.copies.end(s.buf.copies.begin(st))
	pieces := &guard[T]{s, op, st, need}
	if err := pieces.Enter(); err != nil {
		return err
	}
	pieces.Leave()
	if err := s.sameSize(op, n*int(sizeOf[T]())); err != nil || n == 0 {
		return err
	}
	return wrap(op, move(st, pieces))
}

// guard checks each piece of a copy and holds mu during its submission.
type guard[T any] struct {
	s    Slice[T]
	op   string
	st   *cuda.Stream
	need driver.AccessFlags
}

func (g *guard[T]) Enter() error {
	g.s.buf.mu.RLock()
	err := g.s.check(g.op, g.st, g.need)
	if err != nil {
		g.s.buf.mu.RUnlock()
	}
	return err
}

func (g *guard[T]) Leave() { g.s.buf.mu.RUnlock() }

// check refuses a slice that is not in use any more, and a stream whose device lacks the
// access. The caller holds the buffer and its mu.
func (s Slice[T]) check(op string, st *cuda.Stream, need driver.AccessFlags) error {
	o := reading
	if need == driver.AccessReadWrite {
		o = writing
	}
	if err := s.buf.checkStill(op, o, s.off, uint64(s.Size()), int(sizeOf[T]())); err != nil {
		return err
	}
	return s.buf.allowsLocked(op, st, need)
}

func (s Slice[T]) sameSize(op string, n int) error {
	if n == s.Size() {
		return nil
	}
	size := int(sizeOf[T]())
	if n%size != 0 {
		size = 1 // the other side counts bytes
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
		Asked: fmt.Sprintf("%s for a slice of %d", counted(n, size), s.Size()/size), Hint: "both sides must be equally long"})
}

// rlockBoth locks two buffers for reading, in the order of their addresses, so that copies
// in opposite directions do not deadlock when a writer waits for each. The caller has
// acquired both.
func rlockBoth(a, b *buffer) {
	if a.res.Base > b.res.Base {
		a, b = b, a
	}
	a.mu.RLock()
	if a != b {
		b.mu.RLock()
	}
}

func runlockBoth(a, b *buffer) {
	a.mu.RUnlock()
	if a != b {
		b.mu.RUnlock()
	}
}

// appendSlice appends device memory to a buffer, which may be the source's buffer.
func appendSlice[T any](op string, b *buffer, on *cuda.Stream, src Slice[T]) (at int, err error) {
	if b == nil {
		return 0, errNilBuffer(op)
	}
	if src.buf == nil {
		return 0, errZeroSlice(op)
	}
	if src.buf.dev.System() != b.dev.System() {
		return 0, errs.ForeignError(op, "slice")
	}
	err = b.withRoom(func() error {
		at, err = appendSliceOnce(op, b, on, src)
		return err
	})
	return at, err
}

func appendSliceOnce[T any](op string, b *buffer, on *cuda.Stream, src Slice[T]) (at int, err error) {
	if err := b.enterGrowth(op, (*buffer).plus, src.Size()); err != nil {
		return 0, err
	}
	defer b.leave()
	// Held until the copy was submitted and, without a stream, waited for.
	if !src.buf.closer.Acquire() {
		return 0, src.buf.errClosed(op)
	}
	defer src.buf.closer.Release()
	may := func(st *cuda.Stream, then func() error) error {
		src.buf.mu.RLock()
		defer src.buf.mu.RUnlock()
		if err := src.check(op, st, driver.AccessRead); err != nil {
			return err
		}
		return then()
	}
	st, err := b.stream(op, on)
	if err != nil {
		return 0, err
	}
	defer src.buf.copies.end(src.buf.copies.begin(st))
	if err := may(st, func() error { return nil }); err != nil { // before memory is created
		return 0, err
	}
	return b.appendLocked(op, on, src.Size(), int(sizeOf[T]()), func(on *cuda.Stream, at cuda.Ptr) error {
		return may(on, func() error { return on.Copy(at, src.Ptr(), src.Size()) })
	})
}

package vmm

import (
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Array is a Buffer of elements of type T. It holds no state of its own:
// Buffer is the same memory by the byte.
//
// Elements have a fixed size and no pointers: numbers, booleans, and arrays and
// structs of those. Their layout is Go's.
type Array[T any] struct {
	sleeper
	buf *Buffer
}

func arrayOf[T any](b *Buffer) *Array[T] { return &Array[T]{b.sleeper, b} }

// NewArray makes an empty array. The options count in bytes. The caller closes
// it.
func NewArray[T any](d *cuda.Device, o BufferOptions) (*Array[T], error) {
	const op = "vmm.NewArray"
	if err := errs.CheckElement[T](op); err != nil {
		return nil, err
	}
	b, err := makeBuffer(op, d, o)
	if err != nil {
		return nil, err
	}
	return arrayOf[T](b), nil
}

// ArrayOf returns a buffer as an array. Both are the same object: closing either
// closes it.
func ArrayOf[T any](b *Buffer) (*Array[T], error) {
	const op = "vmm.ArrayOf"
	in := b.inner()
	if in == nil {
		return nil, errNilBuffer(op)
	}
	if err := errs.CheckElement[T](op); err != nil {
		return nil, err
	}
	if err := checkWhole(op, in.used.Load(), int(sizeOf[T]())); err != nil {
		return nil, err
	}
	return arrayOf[T](b), nil
}

// Buffer returns the array's memory by the byte.
func (a *Array[T]) Buffer() *Buffer {
	if a == nil {
		return nil
	}
	return a.buf
}

// inner returns the buffer's inner state, nil for an Array that no function made.
func (a *Array[T]) inner() *buffer { return a.Buffer().inner() }

// Ptr returns the address of the first element, fixed for life.
func (a *Array[T]) Ptr() cuda.Ptr { return cuda.Ptr(a.Buffer().b.res.Base) }

// Name returns the name that the array was given, if any.
func (a *Array[T]) Name() string { return a.Buffer().Name() }

// Tag returns the tag that the array was given, if any.
func (a *Array[T]) Tag() cuda.Tag { return a.Buffer().Tag() }

// Len returns the number of elements in use.
func (a *Array[T]) Len() int { return int(a.Buffer().b.used.Load()) / int(sizeOf[T]()) }

// Cap returns how many elements the reserved range can hold.
func (a *Array[T]) Cap() int { return int(a.Buffer().b.res.Size / uint64(sizeOf[T]())) }

// Append copies src behind the last element and returns the index of its first
// one, as Buffer.Append does. Goroutines may append concurrently.
func (a *Array[T]) Append(s *cuda.Stream, src []T) (at int, err error) {
	size := int(sizeOf[T]())
	at, err = a.inner().append("vmm.Array.Append", s, len(src)*size, size, func(s *cuda.Stream, at cuda.Ptr) error {
		return s.Upload(at, asBytes(src))
	})
	return at / size, err
}

// AppendHost copies pinned host memory, a whole number of elements, behind the
// last one and returns the index of its first, as Buffer.AppendHost does.
func (a *Array[T]) AppendHost(s *cuda.Stream, src cuda.HostSlice) (at int, err error) {
	const op = "vmm.Array.AppendHost"
	size := int(sizeOf[T]())
	if src.Len()%size != 0 {
		return 0, errs.Invalid(op, fmt.Sprintf("%s for elements of %d", errs.Count(src.Len(), "byte"), size),
			"append a whole number of elements")
	}
	at, err = a.inner().appendHost(op, s, src, size)
	return at / size, err
}

// AppendSlice copies elements in device memory behind the last one and returns
// the index of the first, as Buffer.AppendSlice does.
func (a *Array[T]) AppendSlice(s *cuda.Stream, src Slice[T]) (at int, err error) {
	at, err = appendSlice("vmm.Array.AppendSlice", a.inner(), s, src)
	return at / int(sizeOf[T]()), err
}

// AppendUndefined makes the array n elements longer, without defining what is in
// them, and returns the index of the first, as Buffer.AppendUndefined does.
func (a *Array[T]) AppendUndefined(n int) (at int, err error) {
	const op = "vmm.Array.AppendUndefined"
	bytes, err := elementBytes[T](op, n)
	if err != nil {
		return 0, err
	}
	size := int(sizeOf[T]())
	at, err = a.inner().appendUndefined(op, bytes, size)
	return at / size, err
}

// Grow makes room for n more elements without changing Len, as Buffer.Grow does.
func (a *Array[T]) Grow(n int) error {
	const op = "vmm.Array.Grow"
	bytes, err := elementBytes[T](op, n)
	if err != nil {
		return err
	}
	return a.inner().grow(op, bytes, int(sizeOf[T]()))
}

// Resize makes the array n elements long, new ones zero, as Buffer.Resize does.
func (a *Array[T]) Resize(s *cuda.Stream, n int) error {
	const op = "vmm.Array.Resize"
	bytes, err := elementBytes[T](op, n)
	if err != nil {
		return err
	}
	return a.inner().resize(op, s, bytes, int(sizeOf[T]()))
}

// elementBytes returns the size of n elements.
func elementBytes[T any](op string, n int) (int, error) {
	size := int(sizeOf[T]())
	if n < 0 {
		return 0, errs.Invalid(op, fmt.Sprintf("%d elements", n), "lengths are not negative")
	}
	if n > math.MaxInt/size {
		return 0, errs.New(errs.Failure{Op: op, Kind: errs.Capacity,
			Asked: fmt.Sprintf("%s of %s", errs.Count(n, "element"), errs.Bytes(size)), Hint: "no address space holds that many: ask for fewer"})
	}
	return n * size, nil
}

// Move makes a second array over the same memory, with a range of its own, as
// Buffer.Move does.
func (a *Array[T]) Move(o MoveOptions) (*Array[T], error) {
	b, err := a.inner().move("vmm.Array.Move", o)
	if err != nil {
		return nil, err
	}
	return arrayOf[T](b), nil
}

// Fork makes a second array that begins with the first n elements, as
// Buffer.Fork does.
func (a *Array[T]) Fork(s *cuda.Stream, n int, o ForkOptions) (*Array[T], error) {
	const op = "vmm.Array.Fork"
	bytes, err := elementBytes[T](op, n)
	if err != nil {
		return nil, err
	}
	b, err := a.inner().fork(op, s, bytes, int(sizeOf[T]()), o)
	if err != nil {
		return nil, err
	}
	return arrayOf[T](b.public()), nil
}

// Clip gives back the memory behind the last element, as Buffer.Clip does.
func (a *Array[T]) Clip() error { return a.inner().clip("vmm.Array.Clip") }

// ClipAfter gives back the memory behind the last element when the work that is
// on the streams now is done, as Buffer.ClipAfter does.
func (a *Array[T]) ClipAfter(streams ...*cuda.Stream) error {
	return a.inner().clipAfter("vmm.Array.ClipAfter", streams)
}

// SetAccess changes which places may read and write the array's memory, as
// Buffer.SetAccess does.
func (a *Array[T]) SetAccess(access ...Access) error {
	return a.inner().setAccess("vmm.Array.SetAccess", access)
}

// Device returns the device that the array was made on.
func (a *Array[T]) Device() *cuda.Device { return a.Buffer().b.dev }

// Granted returns the properties that the driver reports for the array's memory, as
// Buffer.Granted does.
func (a *Array[T]) Granted() (Properties, error) { return a.inner().granted("vmm.Array.Granted") }

// Slice returns the part from element from up to, not including, element to,
// which must be in use (ErrOutOfRange).
func (a *Array[T]) Slice(from, to int) (Slice[T], error) {
	return slice[T]("vmm.Array.Slice", a.inner(), from, to)
}

// All returns every element in use now.
func (a *Array[T]) All() Slice[T] {
	in := a.Buffer().b
	return Slice[T]{in, 0, int(in.used.Load()) / int(sizeOf[T]())}
}

// Stats returns the numbers of the array's buffer, in bytes.
func (a *Array[T]) Stats() BufferStats { return a.Buffer().b.stats() }

// Close waits for all work that could use the array and gives everything back,
// as Buffer.Close does.
func (a *Array[T]) Close() error { return a.Buffer().end("vmm.Array.Close") }

// CloseAfter gives everything back when the work that is on the streams now is
// done, as Buffer.CloseAfter does.
func (a *Array[T]) CloseAfter(streams ...*cuda.Stream) error {
	return a.Buffer().endAfter("vmm.Array.CloseAfter", streams)
}

// Released returns the completion of the array's closing, as Buffer.Released does.
func (a *Array[T]) Released() cuda.Completion {
	return a.Buffer().b.closer.Completion()
}

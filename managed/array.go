package managed

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Array is a Buffer of elements of type T. It has no state of its own: Buffer returns the
// same memory in bytes. Elements have a fixed size and no pointers: numbers, booleans, and
// arrays and structs of those, in Go's layout.
type Array[T any] struct{ buf *Buffer }

// NewArray makes n elements in the allocator's memory, as Allocator.New does.
func NewArray[T any](s *cuda.Stream, a *Allocator, n int) (*Array[T], error) {
	const op = "managed.NewArray"
	if err := errs.CheckElement[T](op); err != nil {
		return nil, err
	}
	size := int(sizeOf[T]())
	if n <= 0 || n > math.MaxInt/size {
		return nil, errs.Invalid(op, fmt.Sprintf("%d elements of %s", n, errs.Count(size, "byte")), "ask for at least one, and no more than there can be")
	}
	b, err := a.make(op, s, n*size)
	if err != nil {
		return nil, err
	}
	return &Array[T]{b}, nil
}

// ArrayOf returns a buffer as an array. Both are the same object: closing either
// closes it. The buffer must hold a whole number of elements, aligned for them.
func ArrayOf[T any](b *Buffer) (*Array[T], error) {
	const op = "managed.ArrayOf"
	if b.inner() == nil {
		return nil, errNilBuffer(op)
	}
	if err := errs.CheckElement[T](op); err != nil {
		return nil, err
	}
	var zero T
	if size := int(sizeOf[T]()); b.Len()%size != 0 || uint64(b.Ptr())%uint64(unsafe.Alignof(zero)) != 0 {
		return nil, errs.Invalid(op, fmt.Sprintf("%s at %v for elements of %d", errs.Count(b.Len(), "byte"), b.Ptr(), size),
			"use a whole number of elements, at an address that is a multiple of their alignment")
	}
	return &Array[T]{b}, nil
}

func sizeOf[T any]() uintptr {
	var zero T
	return unsafe.Sizeof(zero)
}

// Buffer returns the array's memory in bytes.
func (a *Array[T]) Buffer() *Buffer {
	if a == nil {
		return nil
	}
	return a.buf
}

// all returns all of the memory, a zero Range for an Array that no function made.
func (a *Array[T]) all() Range {
	if b := a.Buffer(); b != nil {
		return b.Range
	}
	return Range{}
}

// Ptr returns the address of the first element.
func (a *Array[T]) Ptr() cuda.Ptr { return a.all().Ptr() }

// Len returns the number of elements.
func (a *Array[T]) Len() int { return a.all().Len() / int(sizeOf[T]()) }

// Slice returns the part from element from up to, not including, element to: at
// least one element.
func (a *Array[T]) Slice(from, to int) (Range, error) {
	return a.all().slice("managed.Array.Slice", from, to, int(sizeOf[T]()))
}

// Host calls f with the elements as a Go slice, as Range.Host does with the bytes.
func (a *Array[T]) Host(on *cuda.Stream, f func(data []T) error) error {
	var bytes func(data []byte) error
	if f != nil {
		bytes = func(data []byte) error {
			return f(unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(data))), a.Len()))
		}
	}
	return a.all().host("managed.Array.Host", on, bytes)
}

// Close takes the array out of use, as Buffer.Close does.
func (a *Array[T]) Close() error { return a.Buffer().end("managed.Array.Close") }

// CloseAfter takes the array out of use without waiting, as Buffer.CloseAfter does.
func (a *Array[T]) CloseAfter(streams ...*cuda.Stream) error {
	return a.Buffer().endAfter("managed.Array.CloseAfter", streams)
}

// Released returns the completion of the array's closing, as Buffer.Released does.
func (a *Array[T]) Released() cuda.Completion {
	return a.Buffer().h.closer.Completion()
}

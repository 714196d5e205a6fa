package managed

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Array is a Buffer of elements of type T. It holds no state of its own: Buffer
// is the same memory by the byte. Elements have a fixed size and no pointers:
// numbers, booleans, and arrays and structs of those, in Go's layout.
type Array[T any] struct{ buf *Buffer }

// NewArray makes n elements in memory of the allocator's, as Allocator.New does.
func NewArray[T any](a *Allocator, s *cuda.Stream, n int) (*Array[T], error) {
	const op = "managed.NewArray"
	if a == nil {
		return nil, errs.Invalid(op, "a nil allocator", "make one with NewAllocator")
	}
	if err := errs.CheckElement[T](op); err != nil {
		return nil, err
	}
	size := int(sizeOf[T]())
	if n <= 0 || n > math.MaxInt/size {
		return nil, errs.Invalid(op, fmt.Sprintf("%d elements of %s", n, errs.Count(size, "byte")), "ask for at least one, and no more than there can be")
	}
	b, err := a.New(s, n*size)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return &Array[T]{b}, nil
}

// ArrayOf is a buffer as an array. Both are the same object: closing either
// closes it. The buffer must hold a whole number of elements, at an address that
// suits them.
func ArrayOf[T any](b *Buffer) (*Array[T], error) {
	const op = "managed.ArrayOf"
	if b == nil {
		return nil, errs.Invalid(op, "a nil buffer", "make one with New, an Allocator or View")
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

// Buffer is the array's memory by the byte.
func (a *Array[T]) Buffer() *Buffer { return a.buf }

// Ptr is the address of the first element.
func (a *Array[T]) Ptr() cuda.Ptr { return a.buf.Ptr() }

// Len is the number of elements.
func (a *Array[T]) Len() int { return a.buf.Len() / int(sizeOf[T]()) }

// Slice returns the part from element from up to, not including, element to: at
// least one element.
func (a *Array[T]) Slice(from, to int) (Range, error) {
	if err := checkSlice("managed.Array.Slice", from, to, a.Len()); err != nil {
		return Range{}, err
	}
	size := int(sizeOf[T]())
	return a.buf.Slice(from*size, to*size)
}

// Host gives f the elements as a Go slice, as Range.Host gives the bytes.
func (a *Array[T]) Host(on *cuda.Stream, f func(data []T) error) error {
	if f == nil {
		return a.buf.Host(on, nil)
	}
	return a.buf.Host(on, func(data []byte) error {
		return f(unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(data))), a.Len()))
	})
}

// Close is Buffer.Close.
func (a *Array[T]) Close() error { return a.buf.Close() }

// CloseAfter is Buffer.CloseAfter.
func (a *Array[T]) CloseAfter(streams ...*cuda.Stream) error { return a.buf.CloseAfter(streams...) }

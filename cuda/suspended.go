package cuda

import (
	"reflect"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Span is a part of the address space: n bytes at an address.
type Span struct {
	At    Ptr
	Bytes int
}

// checkNotSuspended refuses work on memory that was suspended. It finds the mistake of a program that
// forgot to resume; memory that is suspended after the query is the caller's to order.
func (s *Stream) checkNotSuspended(op string, at Ptr, n int) error {
	return s.sys().CheckNotSuspended(op, driver.Ptr(at), uint64(n))
}

// checkArguments is checkNotSuspended for the addresses among the arguments of a kernel.
func (s *Stream) checkArguments(op string, args []any) error {
	if !s.sys().AnySuspended() {
		return nil
	}
	for _, arg := range args {
		if err := s.checkArgument(op, reflect.ValueOf(arg)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Stream) checkArgument(op string, v reflect.Value) error {
	if v.IsValid() && v.Type() == reflect.TypeFor[Ptr]() {
		return s.checkNotSuspended(op, Ptr(v.Uint()), 1)
	}
	switch v.Kind() { // calls by name, else the arguments of each launch were allocated
	case reflect.Struct:
		for i := range v.NumField() {
			if err := s.checkArgument(op, v.Field(i)); err != nil {
				return err
			}
		}
	case reflect.Array:
		for i := range v.Len() {
			if err := s.checkArgument(op, v.Index(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

package core

import (
	"fmt"
	"reflect"
)

// CheckElement refuses types that cannot be elements in GPU memory: those
// without a size, and those with pointers to Go memory.
func CheckElement[T any](op string) error {
	t := reflect.TypeFor[T]()
	if t.Size() == 0 {
		return Invalid(op, fmt.Sprintf("elements of type %v, which have no size", t), "use a type with a size")
	}
	if path := pointerIn(t); path != "" {
		return Invalid(op, fmt.Sprintf("elements of type %v, in which %s is a pointer to Go memory", t, path),
			"use numbers, booleans, and arrays and structs of those: the GPU cannot follow Go's pointers")
	}
	return nil
}

// pointerIn names a part of the type that is no plain data, or nothing.
func pointerIn(t reflect.Type) string {
	switch k := t.Kind(); {
	case k >= reflect.Bool && k <= reflect.Complex128:
		return ""
	case k == reflect.Array:
		return pointerIn(t.Elem())
	case k == reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			if inner := pointerIn(f.Type); inner != "" {
				return f.Name + " (" + inner + ")"
			}
		}
		return ""
	}
	return t.String()
}

// CheckSlice refuses the part from element from up to, not including, element to
// of n, if Go would panic for it.
func CheckSlice(op string, from, to, n int, hint string) error {
	if from >= 0 && from <= to && to <= n {
		return nil
	}
	return Error(Failure{Op: op, Kind: OutOfRange, Asked: fmt.Sprintf("%d to %d of %d", from, to, n), Hint: hint})
}

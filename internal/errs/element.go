package errs

import (
	"fmt"
	"reflect"
	"strings"
)

// CheckElement refuses types that cannot be elements in GPU memory: those
// without a size, and those with pointers to Go memory.
func CheckElement[T any](op string) error {
	t := reflect.TypeFor[T]()
	if t.Size() == 0 {
		return Invalid(op, fmt.Sprintf("elements of type %v, which have no size", t), "use a type with a size")
	}
	if path, of := pointerIn(t); of != nil {
		what := fmt.Sprintf("which contain a Go pointer (%v)", of)
		if strings.Trim(path, "[]") != "" {
			what = fmt.Sprintf("of which field %s (%v) contains a Go pointer", path, of)
		}
		return Invalid(op, fmt.Sprintf("elements of type %v, %s", t, what),
			"use numbers, booleans, and arrays and structs of those: the GPU cannot follow Go's pointers")
	}
	return nil
}

// pointerIn returns the first part of the type that is not plain data, and the path of
// fields that leads to it; nil if there is none.
func pointerIn(t reflect.Type) (path string, of reflect.Type) {
	switch k := t.Kind(); {
	case k >= reflect.Bool && k <= reflect.Complex128:
		return "", nil
	case k == reflect.Array:
		inner, of := pointerIn(t.Elem())
		return "[]" + dotted(inner), of
	case k == reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			if inner, of := pointerIn(f.Type); of != nil {
				return f.Name + dotted(inner), of
			}
		}
		return "", nil
	}
	return "", t
}

// dotted returns a path as the rest of another.
func dotted(path string) string {
	if path == "" || path[0] == '[' {
		return path
	}
	return "." + path
}

// CheckSlice refuses the part from element from up to, not including, element to of n
// elements, if Go would panic for it.
func CheckSlice(op string, from, to, n int, hint string) error {
	if from >= 0 && from <= to && to <= n {
		return nil
	}
	return New(Failure{Op: op, Kind: OutOfRange, Asked: fmt.Sprintf("%d to %d of %d", from, to, n), Hint: hint})
}

package handles

import (
	"fmt"
	"reflect"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// ElementType is the type of an array's elements, in terms that every language has.
type ElementType uint8

// The values are part of the binary form.
const (
	// NoElement is that of bytes, and of unknown elements.
	NoElement ElementType = iota
	Bool
	Int8
	Int16
	Int32
	Int64
	Uint8
	Uint16
	Uint32
	Uint64
	Float32
	Float64
	Complex64
	Complex128
	// Record is any other type of a fixed size, which both sides know.
	Record
	// Go has no numbers of these types: their arrays are of the marker types, such as [BF16].
	BFloat16
	Float16
	// Float8E4M3 has no infinities, and one NaN for each sign.
	Float8E4M3
	Float8E5M2
	elementTypes
)

// Markers of element types that Go has no numbers of: their values are the bits. Other processes see a
// vmm.Array[BF16] as an array of bfloat16, and one of uint16 as one of integers.
type (
	// BF16 has the bits of a bfloat16.
	BF16 uint16
	// F16 has the bits of an IEEE 754 half.
	F16 uint16
	// F8E4M3 has the bits of a float8 with 4 bits of exponent, which torch calls float8_e4m3fn.
	F8E4M3 uint8
	// F8E5M2 has the bits of a float8 with 5 bits of exponent.
	F8E5M2 uint8
)

var markers = map[reflect.Type]ElementType{
	reflect.TypeFor[BF16](): BFloat16, reflect.TypeFor[F16](): Float16, reflect.TypeFor[F8E4M3](): Float8E4M3, reflect.TypeFor[F8E5M2](): Float8E5M2,
}

var elements = [elementTypes]struct {
	name string
	size int
	kind reflect.Kind
}{
	NoElement:  {name: "none"},
	Bool:       {"bool", 1, reflect.Bool},
	Int8:       {"int8", 1, reflect.Int8},
	Int16:      {"int16", 2, reflect.Int16},
	Int32:      {"int32", 4, reflect.Int32},
	Int64:      {"int64", 8, reflect.Int64},
	Uint8:      {"uint8", 1, reflect.Uint8},
	Uint16:     {"uint16", 2, reflect.Uint16},
	Uint32:     {"uint32", 4, reflect.Uint32},
	Uint64:     {"uint64", 8, reflect.Uint64},
	Float32:    {"float32", 4, reflect.Float32},
	Float64:    {"float64", 8, reflect.Float64},
	Complex64:  {"complex64", 8, reflect.Complex64},
	Complex128: {"complex128", 16, reflect.Complex128},
	Record:     {name: "record"},
	BFloat16:   {name: "bfloat16", size: 2},
	Float16:    {name: "float16", size: 2},
	Float8E4M3: {name: "float8_e4m3", size: 1},
	Float8E5M2: {name: "float8_e5m2", size: 1},
}

// String names the type.
func (e ElementType) String() string {
	if e < elementTypes {
		return elements[e].name
	}
	return fmt.Sprintf("ElementType(%d)", uint8(e))
}

// Size returns the size of an element in bytes. It is 0 for NoElement and for Record, whose
// size the type does not tell.
func (e ElementType) Size() int {
	if e < elementTypes {
		return elements[e].size
	}
	return 0
}

// MarshalText returns the name.
func (e ElementType) MarshalText() ([]byte, error) {
	if e >= elementTypes {
		return nil, errs.PeerInvalid("handles.ElementType.MarshalText", e.String(), "use a type of this package")
	}
	return []byte(elements[e].name), nil
}

// UnmarshalText is the reverse of MarshalText.
func (e *ElementType) UnmarshalText(name []byte) error {
	for i, is := range elements {
		if is.name == string(name) {
			*e = ElementType(i)
			return nil
		}
	}
	return errs.PeerInvalid("handles.ElementType.UnmarshalText", fmt.Sprintf("an element type %q", name), "name a type of this package, as float32")
}

// ElementOf returns the element type of T and its size in bytes. Go's int and uint
// count as the types of 64 or 32 bits that they are on this system, and markers such as BF16 as
// what they mark; structs and arrays are Records.
func ElementOf[T any]() (ElementType, int) {
	t := reflect.TypeFor[T]()
	if e, marked := markers[t]; marked {
		return e, int(t.Size())
	}
	kind := t.Kind()
	switch kind {
	case reflect.Int:
		kind = map[uintptr]reflect.Kind{4: reflect.Int32, 8: reflect.Int64}[t.Size()]
	case reflect.Uint, reflect.Uintptr:
		kind = map[uintptr]reflect.Kind{4: reflect.Uint32, 8: reflect.Uint64}[t.Size()]
	}
	for e, is := range elements {
		if is.kind == kind && is.size != 0 {
			return ElementType(e), int(t.Size())
		}
	}
	return Record, int(t.Size())
}

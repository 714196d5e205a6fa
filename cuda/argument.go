package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"strconv"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// pack packs the arguments of a launch, and refuses those that the kernel does not take.
func (k *Kernel) pack(op string, p *parameters, args []any) error {
	for i, arg := range args {
		if i < len(k.declared) {
			p.pad(k.declared[i].off)
		}
		if converted, err := k.addInt(op, p, i, arg); err != nil {
			return err
		} else if converted {
			continue
		}
		before := len(p.block)
		if !p.add(arg) {
			return k.refuse(op, i, reflect.TypeOf(arg))
		}
		if i < len(k.declared) {
			if err := k.fits(op, i, reflect.TypeOf(arg), before, len(p.block)); err != nil {
				return err
			}
		}
	}
	if len(p.block) > maxParameters {
		return errs.Invalid(op, fmt.Sprintf("%d bytes of arguments for kernel %q", len(p.block), k.name),
			fmt.Sprintf("a kernel takes at most %d bytes: pass the address of memory that holds them", maxParameters))
	}
	if k.known && len(args) != len(k.declared) {
		return errs.Invalid(op, fmt.Sprintf("%s for kernel %q, which declares %d", errs.Count(len(args), "argument"), k.name, len(k.declared)),
			"pass one for each parameter, in order")
	}
	return nil
}

// add packs an argument behind the others, at its alignment. It reports false
// for one that no kernel can take.
func (p *parameters) add(arg any) bool {
	switch v := arg.(type) {
	case Ptr:
		p.add64(uint64(v))
	case uint64:
		p.add64(v)
	case int64:
		p.add64(uint64(v))
	case uint32:
		p.add32(v)
	case int32:
		p.add32(uint32(v))
	case float32:
		p.add32(math.Float32bits(v))
	case float64:
		p.add64(math.Float64bits(v))
	default:
		value := reflect.ValueOf(arg)
		if !value.IsValid() || unpackable(value.Type()) != nil {
			return false
		}
		p.addAny(value)
	}
	return true
}

// addInt packs an int or a uint as an integer of the size that the kernel declares
// in its place. It reports false for arguments of other types.
func (k *Kernel) addInt(op string, p *parameters, i int, arg any) (converted bool, err error) {
	var bits uint64
	var negative bool
	switch v := arg.(type) {
	case int:
		bits, negative = uint64(v), v < 0
	case uint:
		bits = uint64(v)
	default:
		value := reflect.ValueOf(arg)
		switch value.Kind() {
		case reflect.Int:
			bits, negative = uint64(value.Int()), value.Int() < 0
		case reflect.Uint:
			bits = value.Uint()
		default:
			return false, nil
		}
	}
	switch {
	case i < len(k.declared):
	case k.known: // one argument too many, which pack refuses
		return true, nil
	default:
		return true, k.refuse(op, i, reflect.TypeOf(arg))
	}
	size := k.declared[i].size
	width := 8 * min(size, 8)
	if width < 64 && !negative && bits>>width != 0 || negative && int64(bits) < -1<<(width-1) {
		number := strconv.FormatUint(bits, 10)
		if negative {
			number = strconv.FormatInt(int64(bits), 10)
		}
		return true, errs.Invalid(op, fmt.Sprintf("argument %d of kernel %q, %s, where the kernel declares %s", i, k.name, number, errs.Count(size, "byte")),
			"pass a number that fits there")
	}
	switch size { // where it is declared, so without alignment
	case 1:
		p.block = append(p.block, byte(bits))
	case 2:
		p.block = binary.NativeEndian.AppendUint16(p.block, uint16(bits))
	case 4:
		p.block = binary.NativeEndian.AppendUint32(p.block, uint32(bits))
	case 8:
		p.block = binary.NativeEndian.AppendUint64(p.block, bits)
	default:
		return true, errs.Invalid(op, fmt.Sprintf("argument %d of kernel %q, of type %v, where the kernel declares %s", i, k.name, reflect.TypeOf(arg), errs.Count(size, "byte")),
			"pass a value of the type that the kernel takes there")
	}
	return true, nil
}

func (p *parameters) add32(v uint32) {
	p.align(4)
	p.block = binary.NativeEndian.AppendUint32(p.block, v)
}

func (p *parameters) add64(v uint64) {
	p.align(8)
	p.block = binary.NativeEndian.AppendUint64(p.block, v)
}

// pad goes to an offset that is not passed yet.
func (p *parameters) pad(to int) {
	for len(p.block) < to {
		p.block = append(p.block, 0)
	}
}

func (p *parameters) align(to int) {
	for len(p.block)%to != 0 {
		p.block = append(p.block, 0)
	}
}

// addAny packs a value of any type without references. Natural alignment gives
// the fields of a struct the places that they have in Go and in C.
func (p *parameters) addAny(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		b := byte(0)
		if v.Bool() {
			b = 1
		}
		p.block = append(p.block, b)
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		p.addBytes(uint64(v.Int()), int(v.Type().Size()))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		p.addBytes(v.Uint(), int(v.Type().Size()))
	case reflect.Float32:
		p.add32(math.Float32bits(float32(v.Float())))
	case reflect.Float64:
		p.add64(math.Float64bits(v.Float()))
	case reflect.Array:
		for i := range v.Len() {
			p.addAny(v.Index(i))
		}
	case reflect.Struct:
		align := v.Type().Align()
		p.align(align)
		for i := range v.NumField() {
			p.addAny(v.Field(i))
		}
		p.align(align)
	}
}

func (p *parameters) addBytes(v uint64, size int) {
	switch size {
	case 1:
		p.block = append(p.block, byte(v))
	case 2:
		p.align(2)
		p.block = binary.NativeEndian.AppendUint16(p.block, uint16(v))
	case 4:
		p.add32(uint32(v))
	default:
		p.add64(v)
	}
}

// fits refuses an argument that is not as large as the parameter that the kernel
// declares in its place, or not where that lies. It was packed between before,
// with padding, and end.
func (k *Kernel) fits(op string, i int, t reflect.Type, before, end int) error {
	align, want := t.Align(), k.declared[i]
	at := (before + align - 1) / align * align
	if (parameter{at, end - at}) == want {
		return nil
	}
	hint := "pass a type of the size that the kernel declares, such as uint64 or cuda.Ptr for 8 bytes and uint32 for 4"
	if end-at == want.size {
		hint = "pass an array of smaller elements, which may lie there"
	}
	return errs.Invalid(op, fmt.Sprintf("argument %d of kernel %q, of type %v: it takes %s at offset %d, where the kernel declares %d at offset %d",
		i, k.name, t, errs.Count(end-at, "byte"), at, want.size, want.off), hint)
}

// refuse is the error for an argument of a type that no kernel can take.
func (k *Kernel) refuse(op string, i int, t reflect.Type) error {
	if t == nil {
		return errs.Invalid(op, fmt.Sprintf("argument %d of kernel %q is nil", i, k.name), "pass cuda.Ptr(0) for a null address")
	}
	u := unpackable(t)
	return errs.Invalid(op, fmt.Sprintf("argument %d of kernel %q, of type %v: %s", i, k.name, t, u.why), u.remedy)
}

// unpackableType says why values of a type cannot be passed to a kernel.
type unpackableType struct{ why, remedy string }

func unpackable(t reflect.Type) *unpackableType {
	switch k := t.Kind(); k {
	case reflect.Bool, reflect.Float32, reflect.Float64,
		reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return nil
	case reflect.Int, reflect.Uint:
		return &unpackableType{k.String() + " has another size in C, and here it is not known which",
			fmt.Sprintf("convert it to %[1]v32 or %[1]v64, whichever the kernel declares", k)}
	case reflect.Uintptr:
		return &unpackableType{"uintptr has no counterpart in C", "pass a device address as cuda.Ptr"}
	case reflect.Complex64, reflect.Complex128:
		return &unpackableType{k.String() + " is aligned differently in CUDA", "pass the real and the imaginary part"}
	case reflect.Array:
		if t.Size() > 0 {
			return unpackable(t.Elem())
		}
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			if f.Type.Size() == 0 {
				continue
			}
			if u := unpackable(f.Type); u != nil {
				return &unpackableType{"in " + f.Name + ", " + u.why, u.remedy}
			}
		}
		if t.Size() > 0 {
			return nil
		}
	default:
		return &unpackableType{t.String() + " refers to Go memory, where the GPU cannot follow",
			"pass device addresses as cuda.Ptr, as the Ptr method of a Buffer, an Array, a Slice or a Mapping gives them"}
	}
	return &unpackableType{t.String() + " has no size", "leave it out"}
}

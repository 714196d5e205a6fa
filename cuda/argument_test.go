package cuda

import (
	"encoding/binary"
	"math"
	"reflect"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

type (
	flag   bool
	colour uint16
	// mixed has every alignment, padding inside and at its end.
	mixed struct {
		A uint8
		B float64
		C [3]int16
		_ [2]uint8
		D struct {
			E int8
			F float32
		}
		G bool
	}
)

func TestArgumentsLieAsTheyDoInC(t *testing.T) {
	le := binary.LittleEndian
	if le.Uint16(binary.NativeEndian.AppendUint16(nil, 1)) != 1 {
		t.Skip("the table is written for little-endian machines")
	}
	m := mixed{A: 1, B: 2.5, C: [3]int16{-1, 2, -3}, G: true}
	m.D.E, m.D.F = -4, 5.5
	for _, row := range []struct {
		what string
		args []any
		want []byte
	}{
		{"nothing", nil, nil},
		{"an address", []any{Ptr(0x0102030405060708)}, []byte{8, 7, 6, 5, 4, 3, 2, 1}},
		{"each size", []any{int8(-1), int16(-2), int32(-3), int64(-4)},
			[]byte{255, 0, 254, 255, 253, 255, 255, 255, 252, 255, 255, 255, 255, 255, 255, 255}},
		{"each unsigned size", []any{uint8(1), uint16(2), uint32(3), uint64(4)},
			[]byte{1, 0, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0}},
		{"alignment", []any{uint8(1), uint64(2), uint8(3), uint32(4), true, uint16(5)},
			[]byte{1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 1, 0, 5, 0}},
		{"floats", []any{float32(1.5), 2.5}, append(le.AppendUint32(nil, math.Float32bits(1.5)),
			append(make([]byte, 4), le.AppendUint64(nil, math.Float64bits(2.5))...)...)},
		{"types based on those", []any{flag(true), colour(0x0203), time.Duration(4), flag(false)},
			[]byte{1, 0, 3, 2, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0}},
		{"an array", []any{uint8(9), [3]uint16{1, 2, 3}, uint8(8)}, []byte{9, 0, 1, 0, 2, 0, 3, 0, 8}},
		{"a struct", []any{uint8(9), m, uint8(8)}, append(append([]byte{9, 0, 0, 0, 0, 0, 0, 0},
			unsafe.Slice((*byte)(unsafe.Pointer(&m)), unsafe.Sizeof(m))...), 8)},
	} {
		t.Run(row.what, func(t *testing.T) {
			var p parameters
			for _, a := range row.args {
				require.True(t, p.add(a))
			}
			require.Equal(t, row.want, p.block)
		})
	}
}

func TestArgumentsThatNoKernelCanTake(t *testing.T) {
	for _, row := range []struct {
		arg  any
		says string
	}{
		{nil, "argument 0 of kernel \"k\" is nil; pass cuda.Ptr(0)"},
		{5, "of type int: int has another size in C, and here it is not known which; convert it to int32 or int64"},
		{uint(5), "convert it to uint32 or uint64"},
		{uintptr(5), "pass a device address as cuda.Ptr"},
		{complex64(1), "complex64 is aligned differently in CUDA; pass the real and the imaginary part"},
		{new(int32), "of type *int32: *int32 refers to Go memory, where the GPU cannot follow; pass device addresses as cuda.Ptr"},
		{[]float32{1}, "of type []float32: []float32 refers to Go memory"},
		{"text", "of type string: string refers to Go memory"},
		{map[int]int{}, "refers to Go memory"},
		{func() {}, "refers to Go memory"},
		{make(chan int), "refers to Go memory"},
		{unsafe.Pointer(nil), "refers to Go memory"},
		{HostSlice{}, "of type cuda.HostSlice: in buf, *cuda.HostBuffer refers to Go memory"},
		{struct{ A [2]struct{ B []int8 } }{}, "in A, in B, []int8 refers to Go memory"},
		{struct{ A any }{}, "in A, interface {} refers to Go memory"},
		{struct{ A, B int }{}, "in A, int has another size in C"},
		{struct{}{}, "struct {} has no size; leave it out"},
		{[0]int32{}, "has no size"},
	} {
		var p parameters
		require.False(t, p.add(row.arg), "%T", row.arg)
		err := (&Kernel{name: "k"}).refuse("cuda.Kernel.Launch", 0, reflect.TypeOf(row.arg))
		require.ErrorIs(t, err, ErrInvalidArgument)
		require.ErrorContains(t, err, row.says)
	}
}

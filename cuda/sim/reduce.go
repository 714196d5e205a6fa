package sim

import (
	"math"

	"github.com/cuvmm/cuvmm/csrc/kernels"
)

// adder adds two units, given as bits.
func adder(e kernels.Element) func(a, b uint64) uint64 {
	switch e {
	case kernels.U32:
		return func(a, b uint64) uint64 { return a + b } // the width is cut on storing
	case kernels.F16:
		return pairs(fromHalf, toHalf)
	case kernels.BF16:
		return pairs(fromBrain, toBrain)
	case kernels.F32:
		return func(a, b uint64) uint64 {
			return uint64(math.Float32bits(math.Float32frombits(uint32(a)) + math.Float32frombits(uint32(b))))
		}
	default: // F64
		return func(a, b uint64) uint64 {
			return math.Float64bits(math.Float64frombits(a) + math.Float64frombits(b))
		}
	}
}

// pairs adds two 16-bit elements at a time.
func pairs(from func(uint16) float32, to func(float32) uint16) func(a, b uint64) uint64 {
	one := func(a, b uint16) uint64 { return uint64(to(from(a) + from(b))) }
	return func(a, b uint64) uint64 { return one(uint16(a), uint16(b)) | one(uint16(a>>16), uint16(b>>16))<<16 }
}

// wideSum adds up units of 16-bit elements in 32 bits, and rounds once; nil for
// other elements.
func wideSum(e kernels.Element) func(units []uint64) uint64 {
	from, to := fromHalf, toHalf
	switch e {
	case kernels.F16:
	case kernels.BF16:
		from, to = fromBrain, toBrain
	default:
		return nil
	}
	return func(units []uint64) uint64 {
		var low, high float32
		for i, u := range units {
			l, h := from(uint16(u)), from(uint16(u>>16))
			if i == 0 {
				low, high = l, h // a sum of nothing but -0 is -0
				continue
			}
			low, high = low+l, high+h
		}
		return uint64(to(low)) | uint64(to(high))<<16
	}
}

func isNaN(f float32) bool { return math.IsNaN(float64(f)) }

// fromBrain and toBrain convert bfloat16, which is the upper half of a float32.

func fromBrain(v uint16) float32 { return math.Float32frombits(uint32(v) << 16) }

func toBrain(f float32) uint16 {
	bits := math.Float32bits(f)
	if isNaN(f) {
		return uint16(bits>>16) | 0x40 // stays no number
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16) // to nearest, ties to even
}

// fromHalf and toHalf convert IEEE half precision.

func fromHalf(v uint16) float32 {
	sign, exp, frac := uint32(v>>15)<<31, uint32(v>>10&0x1f), uint32(v&0x3ff)
	switch exp {
	case 0: // frac * 2^-24
		f := float32(frac) / (1 << 24)
		return math.Float32frombits(math.Float32bits(f) | sign)
	case 0x1f:
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

func toHalf(f float32) uint16 {
	bits := math.Float32bits(f)
	sign := uint16(bits >> 16 & 0x8000)
	size := math.Abs(float64(f))
	switch {
	case isNaN(f):
		return sign | 0x7e00
	case size >= 65520: // rounds to infinity
		return sign | 0x7c00
	case size < 1.0/(1<<14): // subnormal: a multiple of 2^-24
		return sign | uint16(math.RoundToEven(size*(1<<24)))
	}
	_, exp := math.Frexp(size) // size is in [2^(exp-1), 2^exp)
	frac := uint16(math.RoundToEven(math.Ldexp(size, 11-exp)))
	// A fraction of 2^11 carries into the exponent by itself.
	return sign | uint16(exp+14)<<10 + (frac - 1<<10)
}

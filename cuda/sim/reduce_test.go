package sim

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHalves(t *testing.T) {
	for v := range 1 << 16 {
		bits := uint16(v)
		if f := fromHalf(bits); isNaN(f) {
			require.True(t, isNaN(fromHalf(toHalf(f))), "%#x", bits)
		} else {
			require.Equal(t, bits, toHalf(f), "%#x is %v", bits, f)
		}
		if f := fromBrain(bits); isNaN(f) {
			require.True(t, isNaN(fromBrain(toBrain(f))), "%#x", bits)
		} else {
			require.Equal(t, bits, toBrain(f), "%#x is %v", bits, f)
		}
	}
	for _, row := range []struct {
		f           float32
		half, brain uint16
	}{
		{1, 0x3c00, 0x3f80}, {-2, 0xc000, 0xc000}, {65504, 0x7bff, 0x4780}, {65519, 0x7bff, 0x4780}, {65520, 0x7c00, 0x4780},
		{float32(math.Inf(-1)), 0xfc00, 0xff80}, {1.0 / (1 << 24), 0x0001, 0x3380}, {1.0 / (1 << 25), 0x0000, 0x3300},
		{3.0 / (1 << 25), 0x0002, 0x33c0}, {1 + 1.0/(1<<11), 0x3c00, 0x3f80}, {1 + 3.0/(1<<11), 0x3c02, 0x3f80},
		{1 + 1.0/(1<<8), 0x3c04, 0x3f80}, {1 + 3.0/(1<<8), 0x3c0c, 0x3f82}, {1.0/(1<<14) - 1.0/(1<<26), 0x0400, 0x3880},
	} {
		require.Equal(t, row.half, toHalf(row.f), "half of %v", row.f)
		require.Equal(t, row.brain, toBrain(row.f), "bfloat16 of %v", row.f)
	}
}

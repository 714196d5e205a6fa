package pool

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// A million small blocks cost what their headers take from the caches.
func TestTheHeaderOfABlockIsHalfACacheLine(t *testing.T) {
	require.EqualValues(t, 32, unsafe.Sizeof(header{}))
}

func TestClasses(t *testing.T) {
	for _, limit := range []uint64{512, 8 << 10, 100 << 10, 256 << 10} {
		c := newClasses(limit, 2<<20)
		require.Equal(t, limit, c.sizes[c.small-1])
		require.EqualValues(t, 2<<20, c.sizes[len(c.sizes)-1])
		for bytes := uint64(0); bytes <= limit; bytes++ {
			class := c.find(bytes)
			if c.sizes[class] < bytes || class > 0 && c.sizes[class-1] >= bytes {
				require.Failf(t, "not the least that fits", "%d bytes are of class %d, %d bytes", bytes, class, c.sizes[class])
			}
		}
		for i, size := range c.sizes {
			require.Zero(t, size%quantum)
			if i > 0 {
				require.LessOrEqual(t, float64(size)/float64(c.sizes[i-1]), 2.0)
			}
		}
		for align := uint64(1); align <= 2<<20; align *= 2 {
			if class := c.aligned(300, align); class >= 0 {
				require.Zero(t, c.sizes[class]%align)
			} else {
				require.Greater(t, align*2, limit)
			}
		}
	}
}

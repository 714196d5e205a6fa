package pool_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

func TestBlocksOfAllSizes(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{ExactFrom: 64 * mib})
		var all []pool.Block
		for _, bytes := range []int{0, 1, 511, 512, 513, 100 * kib, 256 * kib, 256*kib + 1, mib, 3*mib + 7, 16 * mib, 40 * mib, 64 * mib, 65*mib + 1} {
			for _, align := range []int{0, 1, 4096, 64 * kib, 2 * mib} {
				b, err := p.Alloc(pool.Request{Bytes: bytes, Align: align, Stream: s})
				require.NoError(t, err)
				require.Equal(t, bytes, b.Bytes())
				require.Zero(t, uint64(b.Ptr())%uint64(max(align, 512)))
				if bytes > 0 {
					require.NoError(t, s.Memset(b.Ptr(), 1, bytes))
				}
				found, ok := p.Find(b.Ptr())
				require.True(t, ok)
				require.Equal(t, b, found)
				all = append(all, b)
			}
			require.NoError(t, p.Check())
		}
		require.EqualValues(t, len(all), p.Stats().Blocks)
		require.Len(t, p.Live(), len(all))
		for i, b := range all {
			if i%2 == 0 {
				free(t, p, b)
			} else {
				require.NoError(t, p.FreePtr(b.Ptr()))
			}
			require.ErrorIs(t, p.Free(b), cuda.ErrClosed)
			require.NoError(t, p.Check())
		}
		require.Zero(t, p.Stats().Blocks)
	})
}

package pool_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

func TestBlocksOfAllSizes(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{})
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
		require.Equal(t, len(all), p.Stats().Blocks)
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

// Of many holes that are large enough, the one with the right alignment is found.
func TestAnAlignedRequestFindsItsHole(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Chunk: 64 * mib})
	var live, gone []pool.Block
	for range 10 {
		live = append(live, alloc(t, p, s, mib/2))
		gone = append(gone, alloc(t, p, s, 7*mib/2))
	}
	live = append(live, alloc(t, p, s, 2*mib))
	fits := alloc(t, p, s, 4*mib)
	require.Zero(t, uint64(fits.Ptr())%(2*mib))
	live = append(live, alloc(t, p, s, 64*mib-46*mib))
	for _, b := range append(gone, fits) {
		free(t, p, b)
	}
	m.ResetCounts()
	b, err := p.Alloc(pool.Request{Bytes: 3 * mib, Align: 2 * mib, Stream: s})
	require.NoError(t, err)
	require.Zero(t, m.Count("cuMemCreate"))
	require.Equal(t, fits.Ptr(), b.Ptr())
	for _, b := range append(live, b) {
		free(t, p, b)
	}
}

// A tag may be any number.
func TestATagThatWasNeverMade(t *testing.T) {
	require.NotPanics(t, func() { _ = pool.Tag(60000).String() })
}

package pool_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// Empty slab chunks serve requests up to the granularity when there is no other memory,
// those of other streams too.
func TestEmptySlabsServeLargerRequests(t *testing.T) {
	_, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{Chunk: 32 * mib, Limit: 40 * mib, Wait: -1})
	live := []pool.Block{alloc(t, p, s, 32*mib)}
	var small []pool.Block
	for i := range 8 { // a slab each
		small = append(small, alloc(t, p, []*cuda.Stream{s, other}[i%2], 200*kib), alloc(t, p, other, 256*kib))
	}
	for _, b := range small {
		free(t, p, b)
	}
	require.NoError(t, s.Synchronize())
	require.NoError(t, other.Synchronize())
	had := p.Stats().Reserved
	for _, r := range []pool.Request{{Bytes: 300 * kib}, {Bytes: 2 * mib}, {Bytes: mib, Align: mib}} {
		r.Stream = s
		b, err := p.Alloc(r)
		require.NoError(t, err)
		require.NoError(t, s.Memset(b.Ptr(), 1, b.Bytes()))
		require.NoError(t, p.Check())
		found, ok := p.Find(b.Ptr())
		require.True(t, ok)
		require.Equal(t, b, found)
		live = append(live, b)
	}
	require.Equal(t, had, p.Stats().Reserved)
	_, err := p.Alloc(pool.Request{Bytes: 3 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	for _, b := range live {
		free(t, p, b)
	}
}

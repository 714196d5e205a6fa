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

// A chunk that goes from size class to size class, because the stream needs the one and then
// the other, takes neither a driver call nor memory of Go.
func TestAChunkOfManyClasses(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	sizes := []int{512, 1024, 10 * kib, 256 * kib}
	round := func() {
		for _, bytes := range sizes {
			b, err := p.Alloc(pool.Request{Bytes: bytes, Stream: s})
			if err == nil {
				err = p.Free(b)
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	round()
	m.ResetCounts()
	if !thorough { // the checks allocate
		require.Zero(t, testing.AllocsPerRun(100, round))
	}
	require.Empty(t, calls(m))
	require.Equal(t, 2*mib, p.Stats().Reserved)
}

// A block stays stale when its slot serves another chunk.
func TestAStaleBlockOfAChunkThatServesAnotherClass(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	old := alloc(t, p, s, 512)
	free(t, p, old)
	other := alloc(t, p, s, 1024) // in the chunk of old
	require.Equal(t, old.Ptr(), other.Ptr())
	b := alloc(t, p, s, 512) // in another chunk, with the slots of old
	require.NotEqual(t, old.Ptr(), b.Ptr())
	require.ErrorIs(t, p.Free(old), cuda.ErrClosed)
	found, ok := p.Find(b.Ptr())
	require.True(t, ok)
	require.Equal(t, b, found)
	found, ok = p.Find(old.Ptr())
	require.True(t, ok)
	require.Equal(t, other, found)
	require.NoError(t, p.Check())
	free(t, p, b)
	free(t, p, other)
	require.ErrorIs(t, p.Free(old), cuda.ErrClosed)
}

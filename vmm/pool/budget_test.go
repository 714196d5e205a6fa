package pool_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// A pool's memory counts in its budget, its own limit counts within that, and free memory of
// pools goes before users are asked.
func TestAPoolInABudget(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	b := cuda.NewBudget(16*mib, cuda.BudgetOptions{Name: "gpu"})
	p := newPool(t, d, pool.Options{Name: "own", Chunk: 2 * mib, Limit: 8 * mib, Budget: b, Wait: -1})
	other := newPool(t, d, pool.Options{Name: "other", Chunk: 2 * mib, Budget: b, Wait: -1})
	first := alloc(t, p, s, 8*mib)
	_, err := p.Alloc(pool.Request{Bytes: 4 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, "the limit is 8 MiB", "of the pool")
	require.Equal(t, 8*mib, b.Stats().Committed)

	second := alloc(t, other, s, 8*mib)
	asked := 0
	remove, err := b.OnPressure(0, func(need int) int {
		asked++
		require.Equal(t, 4*mib, b.Stats().Owners[0].InUse/2)
		return 0
	})
	require.NoError(t, err)
	_, err = other.Alloc(pool.Request{Bytes: 4 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, `of budget "gpu", which has 16 MiB of 16 MiB committed: pool "other" 8 MiB, pool "own" 8 MiB`)
	require.ErrorContains(t, err, "Budget.SetLimit")
	require.Positive(t, asked)
	remove()

	free(t, p, first)
	require.NoError(t, s.Synchronize())
	third := alloc(t, other, s, 4*mib) // of what the other pool has free
	require.LessOrEqual(t, b.Stats().Committed, 16*mib)
	buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * mib, Budget: b, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	require.NoError(t, buf.Grow(4*mib))
	require.NoError(t, buf.Close())
	free(t, other, second)
	free(t, other, third)
	require.NoError(t, p.Close())
	require.NoError(t, other.Close())
	require.Zero(t, b.Stats().Committed)
	_, err = pool.New(d, pool.Options{Budget: new(cuda.Budget)})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

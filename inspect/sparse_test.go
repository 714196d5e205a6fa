package inspect_test

import (
	"context"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A snapshot has the holes of sparse ranges, and their sources.
func TestSparseRangesInASnapshot(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{})
	d, ctx := sys.Devices()[0], context.Background()
	on, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	pages, err := vmm.NewPages(d, vmm.PagesOptions{Name: "kv", Tag: "llm"})
	require.NoError(t, err)
	s, err := vmm.NewSparse(d, vmm.SparseOptions{Pages: pages, Reserve: 16 * pages.Page(), Name: "seq 1", Tag: "llm"})
	require.NoError(t, err)
	require.NoError(t, s.Map(ctx, on, vmm.Span{First: 2, N: 3}, vmm.Span{First: 9, N: 2}))
	require.NoError(t, s.Share(ctx, s, 15, vmm.Span{First: 2, N: 1}))
	require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 4, N: 1}))
	snap, err := inspect.Take(sys)
	require.NoError(t, err)
	require.Len(t, snap.Sparse, 1)
	got := snap.Sparse[0]
	require.NotZero(t, got.Stack)
	got.Stack = 0
	require.Equal(t, inspect.Sparse{Ptr: inspect.Address(s.Ptr()), Name: "seq 1", Tag: "llm", Page: pages.Page(), Pages: 16, Mapped: 5, Shared: 2, Freed: 1,
		Spans: []inspect.Span{{First: 2, N: 2}, {First: 9, N: 2}, {First: 15, N: 1}}}, got)
	require.Len(t, snap.Sources, 1)
	source := snap.Sources[0]
	require.Equal(t, []any{"kv", "llm", 5, 4}, []any{source.Name, source.Tag, source.Pages, source.Used})
	require.Empty(t, snap.Others[1:], "only the stream is another object")

	tagged := vmm.Tagged(sys, "llm")
	require.Len(t, tagged, 1)
	require.Equal(t, s.Ptr(), tagged[0].(*vmm.Sparse).Ptr())
	z, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, tagged...)
	require.NoError(t, err)
	require.Equal(t, 5, s.Stats().Suspended)
	require.NoError(t, z.Resume(ctx))
	for _, c := range []interface{ Close() error }{s, pages, on} {
		require.NoError(t, c.Close())
	}
}

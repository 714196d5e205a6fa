package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Pages of one device are written from another that has access, and recycled behind its streams.
func TestPagesThatTwoDevicesUse(t *testing.T) {
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		on, far := stream(t, d), stream(t, peer)
		p := source(t, d, vmm.PagesOptions{})
		both := []vmm.Access{{Location: peer.Location(), Mode: vmm.ReadWrite}}
		a, b := sparse(t, d, 4, vmm.SparseOptions{Pages: p, Access: both}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
		two := vmm.Span{First: 0, N: 2}
		require.NoError(t, a.Map(background, far, two))
		write(t, far, a, 1, 11)
		require.NoError(t, far.Synchronize())
		require.EqualValues(t, 11, read(t, on, a, 1))
		require.NoError(t, a.UnmapAfter([]*cuda.Stream{on, far}, two))
		require.NoError(t, on.Synchronize())
		require.NoError(t, far.Synchronize())
		passed(t, p)
		require.NoError(t, b.Map(background, on, two))
		st := p.Stats()
		require.Equal(t, []int{2, 2}, []int{st.Made, st.Recycled})
		write(t, on, b, 1, 22)
		require.EqualValues(t, 22, read(t, on, b, 1))
	})
}

// What the other device's stream has under way holds pages back, as work of the source's own does.
func TestPagesWaitForTheOtherDevice(t *testing.T) {
	m, d, peer := twoDevices(t)
	on, far := stream(t, d), stream(t, peer)
	p := source(t, d, vmm.PagesOptions{})
	one := vmm.Span{First: 0, N: 1}
	a := sparse(t, d, 4, vmm.SparseOptions{Pages: p, Access: []vmm.Access{{Location: peer.Location(), Mode: vmm.ReadWrite}}})
	b := sparse(t, d, 4, vmm.SparseOptions{Pages: p})
	require.NoError(t, a.Map(background, far, one))
	m.Hold(far.Handle())
	require.NoError(t, far.Memset(a.Ptr(), 1, 100))
	require.NoError(t, a.UnmapAfter([]*cuda.Stream{far}, one))
	require.NoError(t, b.Map(background, on, one))
	require.Equal(t, 2, p.Stats().Made, "the page is in use by the peer")
	require.NoError(t, on.Memset(b.Ptr(), 2, 100))
	m.Release(far.Handle())
	require.NoError(t, far.Synchronize())
	passed(t, p)
	require.NoError(t, b.Map(background, on, vmm.Span{First: 1, N: 1}))
	require.Equal(t, 2, p.Stats().Made)
	consistent(t, p)
}

// Ranges that two devices made share the pages of one source, and Replace gives each its own.
func TestRangesOfTwoDevicesShare(t *testing.T) {
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		on, far := stream(t, d), stream(t, peer)
		p := source(t, d, vmm.PagesOptions{})
		a, b := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, peer, 4, vmm.SparseOptions{Pages: p})
		require.NoError(t, a.Map(background, on, vmm.Span{First: 0, N: 2}))
		write(t, on, a, 0, 11)
		write(t, on, a, 1, 12)
		require.NoError(t, on.Synchronize())
		require.NoError(t, b.Share(background, a, 2, vmm.Span{First: 0, N: 2}))
		require.EqualValues(t, 12, read(t, far, b, 3))
		require.NoError(t, far.Synchronize())
		require.NoError(t, b.Replace(background, far, 3))
		write(t, far, b, 3, 22)
		require.NoError(t, far.Synchronize())
		require.EqualValues(t, 12, read(t, on, a, 1))
		require.EqualValues(t, 22, read(t, far, b, 3))
		require.EqualValues(t, 11, read(t, far, b, 2))
		require.Equal(t, 3, p.Stats().Used)
		consistent(t, p)
	})
}

// A budget over the sources of two devices has what one source has free go for the other.
func TestABudgetOverTheSourcesOfTwoDevices(t *testing.T) {
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		on, far := stream(t, d), stream(t, peer)
		b := cuda.NewBudget(4*sparsePage, cuda.BudgetOptions{Name: "cache"})
		near, there := source(t, d, vmm.PagesOptions{Page: sparsePage, Budget: b}), source(t, peer, vmm.PagesOptions{Page: sparsePage, Budget: b})
		s, r := sparse(t, d, 4, vmm.SparseOptions{Pages: near}), sparse(t, peer, 4, vmm.SparseOptions{Pages: there})
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 3}))
		require.NoError(t, r.Map(background, far, vmm.Span{First: 0, N: 1}))
		require.ErrorIs(t, r.Map(background, far, vmm.Span{First: 1, N: 2}), cuda.ErrBudget)
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 2}))
		require.NoError(t, on.Synchronize())
		passed(t, near) // as far as the source knows: a Map for another one gives it a moment to see that
		require.NoError(t, r.Map(background, far, vmm.Span{First: 1, N: 2}))
		require.Equal(t, []int{1, 3}, []int{near.Stats().Pages, there.Stats().Pages})
		require.Equal(t, 4*sparsePage, b.Stats().Committed)
	})
}

// Ranges on two devices sleep and wake together, each with its bytes, also pages that both map.
func TestSuspendingRangesOfTwoDevices(t *testing.T) {
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		on, far := stream(t, d), stream(t, peer)
		p, q := source(t, d, vmm.PagesOptions{}), source(t, peer, vmm.PagesOptions{})
		a, c := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, peer, 4, vmm.SparseOptions{Pages: q})
		b := sparse(t, peer, 4, vmm.SparseOptions{Pages: p})
		require.NoError(t, a.Map(background, on, vmm.Span{First: 0, N: 2}))
		require.NoError(t, c.Map(background, far, vmm.Span{First: 1, N: 2}))
		write(t, on, a, 1, 11)
		write(t, far, c, 2, 22)
		require.NoError(t, on.Synchronize())
		require.NoError(t, b.Share(background, a, 0, vmm.Span{First: 1, N: 1}))
		z, err := vmm.Suspend(background, vmm.SuspendOptions{}, a, b, c)
		require.NoError(t, err)
		given := 0
		for _, held := range z.Report().Memory {
			given += held.Given
		}
		require.Equal(t, 4*sparsePage, given, "a page that two ranges map counts once")
		require.NoError(t, z.Resume(background))
		require.EqualValues(t, 11, read(t, on, a, 1))
		require.EqualValues(t, 11, read(t, far, b, 0))
		require.EqualValues(t, 22, read(t, far, c, 2))
		consistent(t, p)
		consistent(t, q)
	})
}

package vmm_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Pages that ranges share are one memory, which is free when the last place is unmapped.
func TestSharedPages(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		p := source(t, d, vmm.PagesOptions{})
		a, b := sparse(t, d, 8, vmm.SparseOptions{Pages: p}), sparse(t, d, 8, vmm.SparseOptions{Pages: p})
		require.NoError(t, a.Map(background, on, vmm.Span{First: 2, N: 3}))
		for i := 2; i < 5; i++ {
			write(t, on, a, i, uint64(i))
		}
		require.NoError(t, b.Share(background, a, 1, vmm.Span{First: 4, N: 1}, vmm.Span{First: 2, N: 2}))
		for i, want := range []uint64{4, 2, 3} {
			require.Equal(t, want, read(t, on, b, 1+i))
		}
		require.NoError(t, a.Share(background, a, 7, vmm.Span{First: 2, N: 1}), "a range shares its own")
		write(t, on, a, 7, 22)
		require.EqualValues(t, 22, read(t, on, b, 2))
		require.Equal(t, vmm.SparseStats{Pages: 8, Mapped: 3, Shared: 3}, b.Stats())
		require.Equal(t, "[hole shared shared shared hole hole hole hole]", fmt.Sprint(b.States()))
		st := p.Stats()
		require.Equal(t, []int{3, 3}, []int{st.Pages, st.Used})

		require.NoError(t, a.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 8}))
		require.Equal(t, 3, p.Stats().Used)
		require.EqualValues(t, 22, read(t, on, b, 2))
		require.NoError(t, b.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 1, N: 1}))
		require.Equal(t, 2, p.Stats().Used)
		require.NoError(t, b.Unmap(background, vmm.Span{First: 0, N: 8}))
		require.Zero(t, p.Stats().Used)
		require.NoError(t, on.Synchronize())
		passed(t, p)
		require.NoError(t, gputest.Err(p.Trim(0)))
		require.Zero(t, p.Stats().Pages)
	})
}

// What Share refuses has changed nothing.
func TestWhatShareRefuses(t *testing.T) {
	_, d := open(t)
	a, b := sparse(t, d, 4, vmm.SparseOptions{Name: "prefix"}), sparse(t, d, 4, vmm.SparseOptions{})
	require.NoError(t, a.Map(background, nil, vmm.Span{First: 0, N: 2}))
	require.ErrorIs(t, b.Share(background, a, 0, vmm.Span{First: 0, N: 1}), cuda.ErrInvalidArgument, "another source")
	err := a.Share(background, a, 2, vmm.Span{First: 1, N: 2})
	require.ErrorIs(t, err, cuda.ErrOutOfRange)
	require.ErrorContains(t, err, `page 2 of the sparse range "prefix"`)
	require.ErrorIs(t, a.Share(background, a, 3, vmm.Span{First: 0, N: 2}), cuda.ErrOutOfRange, "beyond the range")
	err = a.Share(background, a, 0, vmm.Span{First: 1, N: 1})
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "page 0 of")
	require.NoError(t, a.Share(background, a, 0, vmm.Span{First: 0, N: 2}), "they are there")
	require.Equal(t, vmm.SparseStats{Pages: 4, Mapped: 2}, a.Stats())
}

// A prefix that comes back to the places where it was takes no driver call.
func TestSharingInPlaceTakesNoCall(t *testing.T) {
	m, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	prefix, slot := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
	all := vmm.Span{First: 0, N: 4}
	require.NoError(t, prefix.Map(background, on, all))
	require.NoError(t, slot.Share(background, prefix, 0, all))
	calls := vmmCalls(m)
	for range 5 {
		require.NoError(t, slot.UnmapAfter([]*cuda.Stream{on}, all))
		require.NoError(t, slot.Share(background, prefix, 0, all))
	}
	require.Equal(t, calls, vmmCalls(m))
	require.Equal(t, vmm.SparseStats{Pages: 4, Mapped: 4, Shared: 4}, slot.Stats())
}

// A page that lies freed under two holes goes to one of them alone.
func TestAPageUnderTwoHoles(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		s := sparse(t, d, 4, vmm.SparseOptions{})
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 1}))
		require.NoError(t, s.Share(background, s, 2, vmm.Span{First: 0, N: 1}))
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 4}))
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 3}))
		for i := range 3 {
			write(t, on, s, i, uint64(i+1))
		}
		for i := range 3 {
			require.EqualValues(t, i+1, read(t, on, s, i))
		}
		require.Equal(t, 3, s.Pages().Stats().Used)
		require.Zero(t, s.Stats().Shared)
	})
}

// A page that is replaced has its bytes, and is written without the others.
func TestReplacedPages(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		for _, named := range []bool{true, false} {
			on := stream(t, d)
			p := source(t, d, vmm.PagesOptions{})
			a, b := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
			require.NoError(t, a.Map(background, on, vmm.Span{First: 0, N: 2}))
			write(t, on, a, 1, 11)
			require.NoError(t, b.Share(background, a, 0, vmm.Span{First: 0, N: 2}))
			by := on
			if !named {
				require.NoError(t, on.Synchronize())
				by = nil
			}
			require.NoError(t, b.Replace(background, by, 1))
			write(t, on, b, 1, 22)
			require.EqualValues(t, 11, read(t, on, a, 1))
			require.EqualValues(t, 22, read(t, on, b, 1))
			st := p.Stats()
			require.Equal(t, []int{3, 3}, []int{st.Pages, st.Used})
			require.NoError(t, b.Replace(background, by, 1), "nothing else uses it")
			require.Equal(t, st, p.Stats())
			require.ErrorIs(t, b.Replace(background, by, 2), cuda.ErrOutOfRange, "a hole")
			require.Equal(t, vmm.SparseStats{Pages: 4, Mapped: 2, Shared: 1}, b.Stats())
		}
	})
}

// Replace waits for all work that could use the range, until its context ends.
func TestReplaceWaits(t *testing.T) {
	w := newWorld(t, false)
	a, b := w.sparse(2), w.sparse(0)
	require.NoError(t, b.Share(w.ctx(), a, 0, vmm.Span{First: 0, N: 2}))
	w.m.Hold(w.s.Handle())
	require.NoError(t, w.s.Memset(b.Ptr(), 1, 100)) // of the other page
	short, cancel := context.WithTimeout(w.ctx(), 10*time.Millisecond)
	defer cancel()
	before := b.Stats()
	require.ErrorIs(t, b.Replace(short, nil, 1), context.DeadlineExceeded)
	require.Equal(t, before, b.Stats())
	replaced := make(chan error, 1)
	go func() { replaced <- b.Replace(w.ctx(), nil, 1) }()
	require.Never(t, func() bool { return len(replaced) > 0 }, 10*time.Millisecond, time.Millisecond)
	w.m.Release(w.s.Handle())
	require.NoError(t, <-replaced)
	require.Equal(t, 1, b.Stats().Shared)
	w.end()
}

// Views copy what is mapped, and refuse holes by name.
func TestViewsOfASparseRange(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		s := sparse(t, d, 4, vmm.SparseOptions{Name: "kv"})
		require.NoError(t, s.Map(background, on, vmm.Span{First: 1, N: 2}))
		n := 2 * sparsePage / 4
		v, err := vmm.ViewOf[float32](s, sparsePage, n)
		require.NoError(t, err)
		require.Equal(t, []int{n, 2 * sparsePage}, []int{v.Len(), v.Size()})
		require.Equal(t, pageAt(s, 1), v.Ptr())
		data := make([]float32, n)
		for i := range data {
			data[i] = float32(i)
		}
		require.NoError(t, v.CopyFrom(on, data))
		got := make([]float32, n)
		require.NoError(t, v.CopyTo(on, got))
		require.Equal(t, data, got)
		first, err := v.Slice(0, 100)
		require.NoError(t, err)
		other, err := v.Slice(n-100, n)
		require.NoError(t, err)
		require.NoError(t, first.CopyFromView(on, other))
		require.NoError(t, other.Zero(on))
		got = got[:100]
		require.NoError(t, first.CopyTo(on, got))
		require.Equal(t, data[n-100:], got)
		require.NoError(t, other.CopyTo(on, got))
		require.Equal(t, make([]float32, 100), got)

		_, err = vmm.ViewOf[float32](s, 0, 1)
		require.ErrorIs(t, err, cuda.ErrOutOfRange)
		require.ErrorContains(t, err, `where page 0 is a hole`)
		require.ErrorContains(t, err, `sparse range "kv"`)
		require.ErrorIs(t, gputest.Err(vmm.ViewOf[float32](s, 0, n*100)), cuda.ErrOutOfRange)
		require.ErrorIs(t, gputest.Err(vmm.ViewOf[string](s, sparsePage, 1)), cuda.ErrInvalidArgument)
		require.ErrorIs(t, v.CopyFrom(on, data[1:]), cuda.ErrOutOfRange)

		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 2, N: 1}))
		for what, err := range map[string]error{
			"CopyFrom": v.CopyFrom(on, data), "CopyTo": v.CopyTo(on, data), "Zero": v.Zero(nil), "CopyFromView": first.CopyFromView(on, other),
		} {
			require.ErrorIs(t, err, cuda.ErrOutOfRange, what)
			require.ErrorContains(t, err, "page 2 is a hole", what)
		}
		require.NoError(t, first.CopyTo(on, got), "its page is mapped")
	})
}

// A free comes behind the copies of views on streams that it does not name.
func TestFreesComeBehindCopies(t *testing.T) {
	m, d := open(t)
	on, other := stream(t, d), stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	a, b := sparse(t, d, 1, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
	page := vmm.Span{First: 0, N: 1}
	require.NoError(t, a.Map(background, on, page))
	v, err := vmm.ViewOf[byte](a, 0, sparsePage)
	require.NoError(t, err)
	m.Hold(other.Handle())
	require.NoError(t, v.Zero(other))
	require.NoError(t, a.UnmapAfter([]*cuda.Stream{on}, page))
	made := p.Stats().Made
	require.NoError(t, b.Map(background, on, page))
	require.Equal(t, made+1, p.Stats().Made, "the copy is not done")
	m.Release(other.Handle())
	require.NoError(t, other.Synchronize())
	passed(t, p)
	require.NoError(t, b.Map(background, on, vmm.Span{First: 1, N: 1}))
	require.Equal(t, made+1, p.Stats().Made)
}

// A range sleeps with its pages, and what is free goes back to the driver first.
func TestSuspendingASparseRange(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		s := sparse(t, d, 8, vmm.SparseOptions{Name: "kv"})
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 2}, vmm.Span{First: 5, N: 2}))
		for _, i := range []int{0, 1, 5, 6} {
			write(t, on, s, i, uint64(i+1))
		}
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 1, N: 1}))
		v, err := vmm.ViewOf[byte](s, 0, 8)
		require.NoError(t, err)
		z, err := vmm.Suspend(background, vmm.SuspendOptions{}, s)
		require.NoError(t, err)
		require.Equal(t, vmm.SparseStats{Pages: 8, Mapped: 3, Suspended: 3}, s.Stats())
		require.Equal(t, []vmm.PageState{vmm.PageSuspended, vmm.PageHole}, s.States()[:2])
		require.Equal(t, 3, s.Pages().Stats().Pages, "the free page is gone")
		require.Equal(t, 3*sparsePage, z.Report().Memory[0].Given)
		for what, err := range map[string]error{
			"Map": s.Map(background, on, vmm.Span{First: 3, N: 1}), "Unmap": s.Unmap(background, vmm.Span{First: 0, N: 1}),
			"UnmapAfter": s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 1}), "Share": s.Share(background, s, 3, vmm.Span{First: 0, N: 1}),
			"Replace": s.Replace(background, on, 0), "Zero": v.Zero(on), "ViewOf": gputest.Err(vmm.ViewOf[byte](s, 0, 8)),
		} {
			require.ErrorIs(t, err, cuda.ErrSuspended, what)
		}
		require.NoError(t, z.Resume(background))
		for _, i := range []int{0, 5, 6} {
			require.EqualValues(t, i+1, read(t, on, s, i))
		}
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 1}))
		require.Equal(t, "[freed hole hole hole hole mapped mapped hole]", fmt.Sprint(s.States()))
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 8}))
		z, err = vmm.Suspend(background, vmm.SuspendOptions{Keep: vmm.Drop}, s)
		require.NoError(t, err)
		require.NoError(t, s.Close(), "while it sleeps")
		require.NoError(t, z.Resume(background))
	})
}

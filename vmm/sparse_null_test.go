package vmm_test

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Work in the holes of a range with a null page reads and writes something, before pages are
// mapped there, between, and after.
func TestTheNullPage(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		p := source(t, d, vmm.PagesOptions{})
		s := sparse(t, d, 6, vmm.SparseOptions{Pages: p, Null: true})
		everywhere := func() {
			t.Helper()
			require.NoError(t, on.Memset(s.Ptr(), 1, s.Size()))
			require.NoError(t, on.Synchronize())
		}
		everywhere()
		require.Zero(t, p.Stats().Pages, "it is none of the source's")
		require.NoError(t, s.Map(background, on, vmm.Span{First: 1, N: 2}, vmm.Span{First: 5, N: 1}))
		everywhere()
		for _, i := range []int{1, 2, 5} {
			write(t, on, s, i, uint64(i))
		}
		require.EqualValues(t, 2, read(t, on, s, 2))
		require.ErrorIs(t, gputest.Err(vmm.ViewOf[byte](s, 0, 1)), cuda.ErrOutOfRange, "a hole is none the less one")
		require.NoError(t, s.Unmap(background, vmm.Span{First: 1, N: 1}))
		everywhere()
		require.Equal(t, vmm.SparseStats{Pages: 6, Mapped: 2}, s.Stats(), "the page is gone")
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 2, N: 4}))
		require.Equal(t, vmm.SparseStats{Pages: 6, Freed: 2}, s.Stats())
		everywhere()
		passed(t, p) // so that they are free for all, and still lie where they were
		require.NoError(t, s.Map(background, on, vmm.Span{First: 2, N: 1}), "where it was")
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 2}))
		everywhere()
		require.Equal(t, 3, p.Stats().Pages, "the range takes its own free pages")

		other := sparse(t, d, 6, vmm.SparseOptions{Pages: p, Null: true})
		require.NoError(t, other.Share(background, s, 3, vmm.Span{First: 0, N: 2}))
		require.NoError(t, other.Replace(background, on, 4))
		require.NoError(t, on.Memset(other.Ptr(), 2, other.Size()))
		require.NoError(t, on.Synchronize())
		z, err := vmm.Suspend(background, vmm.SuspendOptions{}, s, other)
		require.NoError(t, err)
		require.NoError(t, z.Resume(background))
		everywhere()
	})
}

// Map and Unmap wait for work in the holes, because nothing lies under a hole while they change
// it. Other ranges do not take what lies there.
func TestWorkInHolesIsWaitedFor(t *testing.T) {
	w := newWorld(t, false)
	p, err := vmm.NewPages(w.d, vmm.PagesOptions{Page: kib64})
	require.NoError(t, err)
	w.own(p)
	s, err := vmm.NewSparse(w.d, vmm.SparseOptions{Pages: p, Reserve: 8 * kib64, Null: true})
	require.NoError(t, err)
	w.own(s)
	plain, err := vmm.NewSparse(w.d, vmm.SparseOptions{Pages: p, Reserve: 8 * kib64})
	require.NoError(t, err)
	w.own(plain)
	require.NoError(t, s.Map(w.ctx(), w.s, vmm.Span{First: 0, N: 2}))
	for name, change := range map[string]func(ctx context.Context) error{
		"Map":   func(ctx context.Context) error { return s.Map(ctx, w.s, vmm.Span{First: 4, N: 1}) },
		"Unmap": func(ctx context.Context) error { return s.Unmap(ctx, vmm.Span{First: 1, N: 1}) },
	} {
		w.m.Hold(w.far.Handle())
		w.m.Hold(w.s.Handle())
		require.NoError(t, w.s.Memset(s.Ptr(), 1, s.Size()), name)
		short, cancel := context.WithTimeout(w.ctx(), 10*time.Millisecond)
		before := s.Stats()
		require.ErrorIs(t, change(short), context.DeadlineExceeded, name)
		cancel()
		require.Equal(t, before, s.Stats(), name)
		changed := make(chan error, 1)
		go func() { changed <- change(w.ctx()) }()
		require.Never(t, func() bool { return len(changed) > 0 }, 10*time.Millisecond, time.Millisecond, name)
		w.m.Release(w.s.Handle())
		w.m.Release(w.far.Handle())
		require.NoError(t, <-changed, name)
	}
	require.NoError(t, s.UnmapAfter([]*cuda.Stream{w.s}, vmm.Span{First: 0, N: 1}))
	made := p.Stats().Made
	require.NoError(t, w.s.Synchronize())
	passed(t, p)
	require.NoError(t, plain.Map(w.ctx(), w.s, vmm.Span{First: 0, N: 2}))
	require.Greater(t, p.Stats().Made, made, "what lies under the hole is not taken")
	require.Equal(t, 1, s.Stats().Freed)
	require.NoError(t, gputest.Err(p.Trim(0)))
	require.Equal(t, 1, s.Stats().Freed)
	w.end()
}

// A hole that the null page could not be taken from is tried alone, and the others with it.
func TestAHoleThatKeepsItsNullPage(t *testing.T) {
	m, d := open(t)
	s := sparse(t, d, 8, vmm.SparseOptions{Null: true})
	m.Inject(sim.Fault{Call: "cuMemUnmap", Times: 1, Result: code})
	require.ErrorContains(t, s.Map(background, nil, vmm.Span{First: 5, N: 1}), "cuMemUnmap")
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 4, N: 1}))
	require.NoError(t, s.Close())
}

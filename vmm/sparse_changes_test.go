package vmm_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// consistent checks a source after a change.
func consistent(t testing.TB, p *vmm.Pages) {
	t.Helper()
	require.NoError(t, vmm.CheckPages(p))
}

// at runs a function once, in the next driver call of a name, on a goroutine of its own: what makes the call
// holds locks.
func at(m *sim.Machine, call string, f func()) {
	var once sync.Once
	m.OnCall(func(name string) {
		if name != call {
			return
		}
		once.Do(func() {
			done := make(chan struct{})
			go func() {
				defer close(done)
				f()
			}()
			<-done
		})
	})
}

// A page that lies freed under several holes is given back once, when a range is suspended.
func TestAPageUnderSeveralHolesIsGivenBackOnce(t *testing.T) {
	_, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	a, b := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
	two := vmm.Span{First: 0, N: 2}
	require.NoError(t, a.Map(background, on, two))
	require.NoError(t, a.Share(background, a, 2, two))
	require.NoError(t, b.Share(background, a, 0, two))
	require.NoError(t, a.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 4}))
	require.NoError(t, b.UnmapAfter([]*cuda.Stream{on}, two))
	require.NoError(t, on.Synchronize())
	z, err := vmm.Suspend(background, vmm.SuspendOptions{}, a)
	require.NoError(t, err)
	consistent(t, p)
	require.Zero(t, p.Stats().Pages)
	require.NoError(t, z.Resume(background))
	consistent(t, p)
}

// A page that lies freed under two holes goes into use at one of them, and is on no list then.
func TestAPageThatGoesIntoUseAtOneOfTwoHoles(t *testing.T) {
	_, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	s := sparse(t, d, 3, vmm.SparseOptions{Pages: p})
	require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 1}))
	require.NoError(t, s.Share(background, s, 1, vmm.Span{First: 0, N: 1}))
	require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 2}))
	require.NoError(t, on.Synchronize())
	passed(t, p)
	require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 2}))
	consistent(t, p)
	require.NoError(t, s.Map(background, on, vmm.Span{First: 2, N: 1}))
	consistent(t, p)
	require.Equal(t, "[mapped mapped mapped]", fmt.Sprint(s.States()))
}

// Where neither a page nor the null page could be mapped, and undoing that failed, too, the null
// page stays: a page that is mapped there later is not taken for it.
func TestANullPageThatCouldNotBeMappedAgain(t *testing.T) {
	m, d := open(t)
	p := source(t, d, vmm.PagesOptions{})
	s := sparse(t, d, 4, vmm.SparseOptions{Pages: p, Null: true})
	two := vmm.Span{First: 0, N: 2}
	require.NoError(t, s.Map(background, nil, two))
	m.Inject(sim.Fault{Call: "cuMemSetAccess", Result: code})
	m.Inject(sim.Fault{Call: "cuMemUnmap", After: 1, Times: 2, Result: code})
	require.ErrorContains(t, s.Unmap(background, two), "out of use")
	consistent(t, p)
	require.Error(t, s.Map(background, nil, two), "what is there could not be unmapped")
	consistent(t, p)
	require.NoError(t, s.Map(background, nil, two))
	consistent(t, p)
	require.Equal(t, "[mapped mapped hole hole]", fmt.Sprint(s.States()))
}

// A page that a Share maps once more is not free when its other place is unmapped meanwhile.
func TestAPageIsFreedWhileItIsShared(t *testing.T) {
	m, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	a, b := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
	one := vmm.Span{First: 0, N: 1}
	require.NoError(t, a.Map(background, on, one))
	write(t, on, a, 0, 11)
	at(m, "cuMemMap", func() { require.NoError(t, a.UnmapAfter([]*cuda.Stream{on}, one)) })
	require.NoError(t, b.Share(background, a, 0, one))
	consistent(t, p)
	require.NoError(t, a.Map(background, on, vmm.Span{First: 1, N: 1}))
	write(t, on, a, 1, 22)
	require.EqualValues(t, 11, read(t, on, b, 0), "it is another page")
}

// A page that a Replace takes from a place is free when its other place was unmapped meanwhile.
func TestAPageIsFreedWhileItIsReplaced(t *testing.T) {
	for name, refused := range map[string]bool{"replaced": false, "refused": true} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			on := stream(t, d)
			p := source(t, d, vmm.PagesOptions{})
			a, b := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
			one := vmm.Span{First: 0, N: 1}
			require.NoError(t, a.Map(background, on, one))
			write(t, on, a, 0, 11)
			require.NoError(t, b.Share(background, a, 0, one))
			at(m, "cuMemUnmap", func() { // of the address to which the page was copied
				require.NoError(t, a.UnmapAfter([]*cuda.Stream{on}, one))
				if refused {
					m.Inject(sim.Fault{Call: "cuMemMap", Result: code})
				}
			})
			err := b.Replace(background, on, 0)
			require.Equal(t, refused, err != nil)
			consistent(t, p)
			require.EqualValues(t, 11, read(t, on, b, 0))
			require.Equal(t, 1, p.Stats().Used)
		})
	}
}

// A page to which a Replace copies is that Replace's, also while the place where it lay before
// sleeps, and after the Replace has ended without it.
func TestAPageThatAReplaceCopiesTo(t *testing.T) {
	for name, ends := range map[string]bool{"replaced": false, "given up": true} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			on, far := stream(t, d), stream(t, d)
			p := source(t, d, vmm.PagesOptions{})
			a, b, c := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
			one := vmm.Span{First: 0, N: 1}
			require.NoError(t, a.Map(background, on, one))
			write(t, on, a, 0, 11)
			require.NoError(t, b.Share(background, a, 0, one))
			require.NoError(t, c.Map(background, on, one))
			require.NoError(t, c.Map(background, far, vmm.Span{First: 1, N: 1}))
			m.Hold(on.Handle())
			m.Hold(far.Handle())
			require.NoError(t, on.Memset(c.Ptr(), 1, 100))
			require.NoError(t, far.Memset(pageAt(c, 1), 1, 100))
			require.NoError(t, c.UnmapAfter([]*cuda.Stream{on}, one))
			ctx, cancel := context.WithCancel(background)
			defer cancel()
			replaced := make(chan error, 1)
			go func() { replaced <- b.Replace(ctx, on, 0) }()
			require.Eventually(t, func() bool { return m.Count("cuMemcpyDtoDAsync") > 0 }, time.Second, time.Millisecond)
			consistent(t, p)
			if ends {
				cancel()
				require.ErrorIs(t, <-replaced, context.Canceled)
				consistent(t, p)
			}
			m.Release(on.Handle())
			require.NoError(t, on.Synchronize())
			if ends {
				m.Release(far.Handle())
				require.NoError(t, d.System().Drain(background))
				consistent(t, p)
				return
			}
			passed(t, p)
			slept := make(chan error, 1)
			var z *vmm.Suspension
			go func() (err error) {
				defer func() { slept <- err }()
				z, err = vmm.Suspend(background, vmm.SuspendOptions{}, c)
				return err
			}()
			require.Eventually(t, func() bool { return c.Stats().Freed == 0 }, time.Second, time.Millisecond)
			m.Release(far.Handle())
			require.NoError(t, <-replaced)
			require.NoError(t, <-slept)
			require.NoError(t, z.Resume(background))
			consistent(t, p)
			require.EqualValues(t, 11, read(t, on, b, 0))
		})
	}
}

// A range with far more addresses than pages has them wherever they are mapped.
func TestPagesFarApart(t *testing.T) {
	_, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	s := sparse(t, d, 2000, vmm.SparseOptions{Pages: p})
	around, last := vmm.Span{First: 510, N: 4}, vmm.Span{First: 1999, N: 1}
	require.NoError(t, s.Map(background, on, around, last))
	pages := []int{510, 511, 512, 513, 1999}
	for _, i := range pages {
		write(t, on, s, i, uint64(i))
	}
	for _, i := range pages {
		require.EqualValues(t, i, read(t, on, s, i))
	}
	require.Equal(t, vmm.SparseStats{Pages: 2000, Mapped: 5}, s.Stats())
	require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, around))
	states := s.States()
	require.Equal(t, "[hole freed freed freed freed hole]", fmt.Sprint(states[509:515]))
	require.Equal(t, vmm.PageMapped, states[1999])
	consistent(t, p)
}

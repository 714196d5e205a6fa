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

// becomes waits until a source has so many pages, and sees that they stay.
func becomes(t *testing.T, p *vmm.Pages, pages int) {
	t.Helper()
	require.Eventually(t, func() bool { return p.Stats().Pages == pages }, testTimeout, time.Millisecond, "%+v", p.Stats())
	require.Never(t, func() bool { return p.Stats().Pages != pages }, 20*time.Millisecond, time.Millisecond)
}

// Pages are made ahead between the marks, and a Map that takes them makes none.
func TestPagesAreMadeAhead(t *testing.T) {
	m, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{Low: 4, High: 8})
	s := sparse(t, d, 64, vmm.SparseOptions{Pages: p})
	becomes(t, p, 8)
	require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 4}))
	becomes(t, p, 8)
	creations := m.Count("cuMemCreate")
	require.NoError(t, s.Map(background, on, vmm.Span{First: 4, N: 1}))
	becomes(t, p, 13)
	require.Equal(t, creations+5, m.Count("cuMemCreate"), "up to the high mark again")

	// Not while a stream captures.
	g, err := on.WithCapture(cuda.CaptureOptions{}, func() error {
		require.NoError(t, s.Map(background, nil, vmm.Span{First: 5, N: 8}))
		becomes(t, p, 13)
		return on.Memset(s.Ptr(), 1, 100)
	})
	require.NoError(t, err)
	becomes(t, p, 21)
	require.NoError(t, g.Close())
}

// After a burst the source has what is used and the high mark, once that was not needed for a
// while. Then it does nothing.
func TestIdlePagesAreGivenBack(t *testing.T) {
	m, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{High: 3, Idle: 10 * time.Millisecond})
	s := sparse(t, d, 64, vmm.SparseOptions{Pages: p})
	require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 64}))
	require.NoError(t, on.Memset(s.Ptr(), 1, s.Size()))
	require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 10, N: 54}))
	becomes(t, p, 13)
	calls := vmmCalls(m) + m.Count("cuEventQuery") + m.Count("cuStreamIsCapturing")
	time.Sleep(50 * time.Millisecond)
	require.Equal(t, calls, vmmCalls(m)+m.Count("cuEventQuery")+m.Count("cuStreamIsCapturing"), "it is silent")
	require.Equal(t, 54-3, p.Stats().Returned)
}

// After a burst the device's memory that is taken is at most 1.2 of what is live, wherever in the
// ranges that lies.
func TestTheFootprintAfterABurst(t *testing.T) {
	_, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{High: 8, Idle: 10 * time.Millisecond})
	before := free(t, d)
	var ranges []*vmm.Sparse
	for range 8 {
		s := sparse(t, d, 64, vmm.SparseOptions{Pages: p})
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 64}))
		ranges = append(ranges, s)
	}
	live := 0
	for _, s := range ranges {
		for i := range 64 {
			if i%8 == 3 {
				live++
				continue
			}
			require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: i, N: 1}))
		}
	}
	becomes(t, p, live+8)
	require.LessOrEqual(t, before-free(t, d), live*sparsePage*12/10)
}

// A page for each block takes a driver's map and grant for each; a page of many blocks takes them
// once, and none for the blocks that follow.
func TestAPageForEachBlockCostsCallsForEachBlock(t *testing.T) {
	const blocks, block = 64, sparsePage
	calls := func(page int) int {
		m, d := open(t)
		on := stream(t, d)
		s := sparse(t, d, blocks*block/page, vmm.SparseOptions{Page: page})
		before := vmmCalls(m)
		for i := range blocks { // as a sequence grows
			require.NoError(t, s.Map(background, on, vmm.Span{First: i * block / page, N: 1}))
		}
		return vmmCalls(m) - before
	}
	require.Equal(t, 3*blocks, calls(block))
	require.Equal(t, 3*blocks/16, calls(16*block))
}

// Pages that are needed within the time are not given back.
func TestPagesInUseNowAndThenStay(t *testing.T) {
	_, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{Idle: 40 * time.Millisecond})
	s := sparse(t, d, 16, vmm.SparseOptions{Pages: p})
	all := vmm.Span{First: 0, N: 16}
	for range 40 {
		require.NoError(t, s.Map(background, on, all))
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, all))
		time.Sleep(4 * time.Millisecond)
	}
	require.Equal(t, 16, p.Stats().Made)
	becomes(t, p, 0)
}

// Free pages go when others lack memory: of the device, or of the budget.
func TestFreePagesGoUnderPressure(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	b := cuda.NewBudget(50*mib, cuda.BudgetOptions{})
	for name, o := range map[string]struct {
		budget *cuda.Budget
		more   int // what fits only without the free pages
	}{"the budget": {b, 40 * mib}, "the device": {nil, 50 * mib}} {
		t.Run(name, func(t *testing.T) {
			p := source(t, d, vmm.PagesOptions{Low: 1, High: 2, Budget: o.budget})
			s := sparse(t, d, 16, vmm.SparseOptions{Pages: p})
			require.NoError(t, s.Map(background, nil, vmm.Span{First: 0, N: 12}))
			require.NoError(t, s.Unmap(background, vmm.Span{First: 2, N: 10}))
			buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib), Budget: o.budget})
			require.NoError(t, err)
			require.NoError(t, buf.Grow(o.more))
			st := p.Stats()
			require.Equal(t, 2, st.Used)
			require.Less(t, st.Pages, 12)
			require.Never(t, func() bool { return p.Stats().Made > st.Made }, 30*time.Millisecond, time.Millisecond, "none is made for a while")
			require.NoError(t, buf.Close())
		})
	}
}

// evictor is a function of OnPressure that unmaps all of a range behind a stream, and counts.
func evictor(t *testing.T, b *cuda.Budget, s *vmm.Sparse, on *cuda.Stream) (asked *int) {
	asked = new(int)
	stop, err := b.OnPressure(0, func(int) int {
		*asked++
		before := s.Stats().Mapped
		if err := s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: s.Stats().Pages}); err != nil {
			t.Error(err)
		}
		return (before - s.Stats().Mapped) * s.Page()
	})
	require.NoError(t, err)
	t.Cleanup(stop)
	return asked
}

// What a function of the budget unmaps in a range of the same source serves the Map that lacked
// memory, though the budget counts it still. Free pages under the places that Map is for are not
// given back meanwhile.
func TestEvictedPagesServeTheMapThatLackedThem(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b := cuda.NewBudget(4*sparsePage, cuda.BudgetOptions{})
		p := source(t, d, vmm.PagesOptions{Budget: b})
		old, next := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
		on := stream(t, d)
		require.NoError(t, old.Map(background, on, vmm.Span{First: 0, N: 2}))
		require.NoError(t, next.Map(background, on, vmm.Span{First: 0, N: 2}))
		require.NoError(t, next.Unmap(background, vmm.Span{First: 0, N: 2}))
		asked := evictor(t, b, old, on)
		require.NoError(t, next.Map(background, on, vmm.Span{First: 0, N: 4}))
		require.Equal(t, 1, *asked)
		require.Equal(t, 4, p.Stats().Made)
	})
}

// While pages that were freed wait for the GPU no more are asked for: a Map with a deadline
// waits for them, and one without returns the error.
func TestEvictedPagesAreWaitedForAndNoMoreAsked(t *testing.T) {
	m, d := open(t)
	b := cuda.NewBudget(2*sparsePage, cuda.BudgetOptions{})
	p := source(t, d, vmm.PagesOptions{Budget: b})
	old, next := sparse(t, d, 2, vmm.SparseOptions{Pages: p}), sparse(t, d, 2, vmm.SparseOptions{Pages: p})
	busy, on, all := stream(t, d), stream(t, d), vmm.Span{First: 0, N: 2}
	require.NoError(t, old.Map(background, busy, all))
	m.Hold(busy.Handle())
	write(t, busy, old, 0, 1)
	asked := evictor(t, b, old, busy)
	require.ErrorIs(t, next.Map(background, on, all), cuda.ErrBudget)
	require.Equal(t, 1, *asked)

	ctx, cancel := context.WithTimeout(background, testTimeout)
	defer cancel()
	time.AfterFunc(20*time.Millisecond, func() { m.Release(busy.Handle()) })
	require.NoError(t, next.Map(ctx, on, all))
	require.Equal(t, 1, *asked)
	require.Equal(t, 2, p.Stats().Made)
}

// What no source can be made with.
func TestPagesOptions(t *testing.T) {
	_, d := open(t)
	bad := cuda.NewBudget(-1, cuda.BudgetOptions{})
	for name, o := range map[string]vmm.PagesOptions{
		"Page": {Page: 2*mib + 1}, "Low": {Low: -1}, "High": {High: -1}, "Name": {Name: " x"}, "Budget": {Budget: bad},
	} {
		require.ErrorIs(t, gputest.Err(vmm.NewPages(d, o)), cuda.ErrInvalidArgument, name)
	}
	p := source(t, d, vmm.PagesOptions{Page: 6 * mib, Name: "kv", Tag: "llm"})
	require.Equal(t, []any{6 * mib, "kv", cuda.Tag("llm"), d}, []any{p.Page(), p.Name(), p.Tag(), p.Device()})
	s := sparse(t, d, 3, vmm.SparseOptions{Pages: p})
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 1, N: 1}))
	require.Equal(t, 18*mib, s.Size())
	for name, o := range map[string]vmm.SparseOptions{
		"Reserve": {Reserve: -1}, "Page beside Pages": {Pages: p, Page: 2 * mib}, "Tag": {Tag: "\n"}, "Pages": {Pages: &vmm.Pages{}},
	} {
		require.ErrorIs(t, gputest.Err(vmm.NewSparse(d, o)), cuda.ErrInvalidArgument, name)
	}
	_, other := open(t)
	require.ErrorIs(t, gputest.Err(vmm.NewSparse(other, vmm.SparseOptions{Pages: p})), cuda.ErrForeign)
}

// Zeroed pages are zero, new or recycled, whatever their last user wrote.
func TestZeroedPages(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		p := source(t, d, vmm.PagesOptions{Zero: true})
		a, b := sparse(t, d, 2, vmm.SparseOptions{Pages: p}), sparse(t, d, 2, vmm.SparseOptions{Pages: p})
		both := vmm.Span{First: 0, N: 2}
		for _, s := range []*vmm.Sparse{a, a, b} {
			require.NoError(t, s.Map(background, on, both))
			for i := range 2 {
				require.Zero(t, read(t, on, s, i))
				write(t, on, s, i, 7)
			}
			require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, both))
		}
		require.NoError(t, on.Synchronize())
		require.NoError(t, b.Map(background, nil, both))
		require.Zero(t, read(t, on, b, 1))
	})
}

// Bytes are exact under many goroutines: a page counts once, from its making to its release.
func TestBudgetsOfPagesAreExact(t *testing.T) {
	_, d := open(t)
	b := cuda.NewBudget(24*sparsePage, cuda.BudgetOptions{})
	p := source(t, d, vmm.PagesOptions{Budget: b})
	done := make(chan error)
	for g := range 16 {
		go func() {
			done <- func() error {
				on, err := d.NewStream(cuda.StreamOptions{})
				if err != nil {
					return err
				}
				s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: 8 * sparsePage, Pages: p})
				if err != nil {
					return err
				}
				for i := range 30 {
					part := vmm.Span{First: (g + i) % 5, N: 3}
					if err := s.Map(background, on, part); err == nil && i%3 > 0 {
						if err := s.UnmapAfter([]*cuda.Stream{on}, part); err != nil {
							return err
						}
					}
					if st := b.Stats(); st.Committed > st.Limit {
						return cuda.ErrBudget
					}
				}
				if err := s.CloseAfter(on); err != nil {
					return err
				}
				return on.Close()
			}()
		}()
	}
	for range 16 {
		require.NoError(t, <-done)
	}
	require.NoError(t, d.System().Drain(background))
	require.NoError(t, vmm.CheckPages(p))
	require.Equal(t, p.Stats().Pages*sparsePage, b.Stats().Committed)
	require.NoError(t, gputest.Err(p.Trim(0)))
	require.Zero(t, b.Stats().Committed)
}

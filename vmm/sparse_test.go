package vmm_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// sparsePage is the size of a page in these tests.
const sparsePage = 2 * mib

// source makes a source of pages that the test closes after its ranges.
func source(t testing.TB, d *cuda.Device, o vmm.PagesOptions) *vmm.Pages {
	t.Helper()
	p, err := vmm.NewPages(d, o)
	require.NoError(t, err)
	closed(t, p)
	return p
}

// sparse makes a range of n pages.
func sparse(t testing.TB, d *cuda.Device, n int, o vmm.SparseOptions) *vmm.Sparse {
	t.Helper()
	page := o.Page
	if o.Pages != nil {
		page = o.Pages.Page()
	}
	o.Reserve = n * max(page, sparsePage)
	s, err := vmm.NewSparse(d, o)
	require.NoError(t, err)
	closed(t, s)
	return s
}

// pageAt is the address of a page.
func pageAt(s *vmm.Sparse, i int) cuda.Ptr { return s.Ptr() + cuda.Ptr(i*s.Page()) }

// write writes a word at the beginning of a page.
func write(t testing.TB, on *cuda.Stream, s *vmm.Sparse, i int, word uint64) {
	t.Helper()
	require.NoError(t, cuda.UploadOf(on, pageAt(s, i), []uint64{word}))
}

// read reads what write wrote.
func read(t testing.TB, on *cuda.Stream, s *vmm.Sparse, i int) uint64 {
	t.Helper()
	var word [1]uint64
	require.NoError(t, cuda.DownloadOf(on, word[:], pageAt(s, i)))
	return word[0]
}

var background = context.Background()

// Pages are mapped anywhere in any order, and each holds what is written to it.
func TestPagesOfASparseRange(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		s := sparse(t, d, 16, vmm.SparseOptions{Name: "kv", Tag: "llm"})
		require.Equal(t, sparsePage, s.Page())
		require.NoError(t, s.Map(background, on, vmm.Span{First: 7, N: 2}, vmm.Span{First: 3, N: 1}, vmm.Span{First: 8, N: 3}))
		require.Equal(t, vmm.SparseStats{Pages: 16, Mapped: 5}, s.Stats())
		for _, i := range []int{3, 7, 8, 9, 10} {
			write(t, on, s, i, uint64(i))
		}
		for _, i := range []int{3, 7, 8, 9, 10} {
			require.EqualValues(t, i, read(t, on, s, i))
		}
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 9}))
		require.Equal(t, vmm.SparseStats{Pages: 16, Mapped: 2, Freed: 3}, s.Stats())
		require.EqualValues(t, 9, read(t, on, s, 9))
		require.NoError(t, s.Unmap(background, vmm.Span{First: 0, N: 16}))
		require.Equal(t, vmm.SparseStats{Pages: 16, Freed: 5}, s.Stats())
	})
}

// passed waits until the source knows that the GPU has passed its free pages.
func passed(t testing.TB, p *vmm.Pages) {
	t.Helper()
	require.Eventually(t, func() bool { return !vmm.Advance(p) }, testTimeout, time.Millisecond)
}

// vmmCalls counts the driver calls that make, map, grant, unmap and release memory.
func vmmCalls(m *sim.Machine) (n int) {
	for _, call := range []string{"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"} {
		n += m.Count(call)
	}
	return n
}

// A batch is mapped in runs: one map for each page, one grant for each run.
func TestABatchIsMappedInRuns(t *testing.T) {
	m, d := open(t)
	s := sparse(t, d, 64, vmm.SparseOptions{})
	grants, maps := m.Count("cuMemSetAccess"), m.Count("cuMemMap")
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 0, N: 8}, vmm.Span{First: 20, N: 8}, vmm.Span{First: 8, N: 4}))
	require.Equal(t, maps+20, m.Count("cuMemMap"))
	require.Equal(t, grants+2, m.Count("cuMemSetAccess"))
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 0, N: 28}))
	require.Equal(t, maps+28, m.Count("cuMemMap"))
	require.Equal(t, grants+3, m.Count("cuMemSetAccess"))
	unmaps := m.Count("cuMemUnmap")
	require.NoError(t, s.Close())
	require.Equal(t, unmaps+1, m.Count("cuMemUnmap"))
}

// What a stream frees it has again at once, without any call, if it maps the same pages.
func TestPagesAreReusedInPlaceWithoutACall(t *testing.T) {
	m, d := open(t)
	on := stream(t, d)
	s := sparse(t, d, 8, vmm.SparseOptions{})
	all := vmm.Span{First: 0, N: 8}
	require.NoError(t, s.Map(background, on, all))
	m.Hold(on.Handle())
	require.NoError(t, on.Memset(s.Ptr(), 1, s.Size()))
	calls := vmmCalls(m)
	events := m.Count("cuEventRecord")
	for range 10 {
		require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, all))
		require.NoError(t, s.Map(background, on, all))
	}
	require.Equal(t, calls, vmmCalls(m))
	require.Equal(t, events, m.Count("cuEventRecord"), "nor is an event recorded")
	require.Equal(t, 80, s.Pages().Stats().Reused)
	m.Release(on.Handle())
	require.NoError(t, on.Synchronize())
}

// A page that the GPU has passed goes to another place, and none is made.
func TestPagesAreRecycled(t *testing.T) {
	m, d := open(t)
	on := stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	a, b := sparse(t, d, 8, vmm.SparseOptions{Pages: p}), sparse(t, d, 8, vmm.SparseOptions{Pages: p})
	require.NoError(t, a.Map(background, on, vmm.Span{First: 0, N: 8}))
	require.NoError(t, on.Memset(a.Ptr(), 1, a.Size()))
	require.NoError(t, a.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 8}))
	require.NoError(t, on.Synchronize())
	passed(t, p)
	creations, unmaps := m.Count("cuMemCreate"), m.Count("cuMemUnmap")
	other := stream(t, d)
	require.NoError(t, b.Map(background, other, vmm.Span{First: 0, N: 8}))
	require.Equal(t, creations, m.Count("cuMemCreate"))
	require.Equal(t, unmaps+1, m.Count("cuMemUnmap"), "they are unmapped in one run")
	require.Equal(t, vmm.SparseStats{Pages: 8}, a.Stats())
	require.NoError(t, other.Memset(b.Ptr(), 2, b.Size()))
	require.Equal(t, vmm.PagesStats{Pages: 8, Used: 8, Made: 8, Recycled: 8}, p.Stats())
}

// A stream's own pages move at once, and their old places are unmapped when the GPU has passed
// them. Another stream gets new ones meanwhile.
func TestPagesMoveAtOnceWithinAStream(t *testing.T) {
	m, d := open(t)
	on, other := stream(t, d), stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	a, b := sparse(t, d, 4, vmm.SparseOptions{Pages: p}), sparse(t, d, 8, vmm.SparseOptions{Pages: p})
	all := vmm.Span{First: 0, N: 4}
	require.NoError(t, a.Map(background, on, all))
	m.Hold(on.Handle())
	require.NoError(t, on.Memset(a.Ptr(), 1, a.Size()))
	require.NoError(t, a.UnmapAfter([]*cuda.Stream{on}, all))
	unmaps, creations := m.Count("cuMemUnmap"), m.Count("cuMemCreate")
	require.NoError(t, b.Map(background, other, vmm.Span{First: 4, N: 1}))
	require.Equal(t, creations+1, m.Count("cuMemCreate"), "the GPU has not passed the others")
	require.NoError(t, b.Map(background, on, all))
	require.NoError(t, on.Memset(b.Ptr(), 2, 4*sparsePage))
	require.Equal(t, creations+1, m.Count("cuMemCreate"))
	require.Equal(t, unmaps, m.Count("cuMemUnmap"), "the work there is not done")
	m.Release(on.Handle())
	require.NoError(t, on.Synchronize())
	require.EqualValues(t, 0x0202020202020202, read(t, on, b, 3))
	passed(t, p)
	require.NoError(t, b.Map(background, nil, vmm.Span{First: 5, N: 2}))
	require.Equal(t, unmaps+1, m.Count("cuMemUnmap"), "a later Map cleans up")
	require.Equal(t, vmm.SparseStats{Pages: 4}, a.Stats())
}

// Pages that move on within a stream leave old places behind, which are unmapped once the GPU has
// passed them, though nothing waits for them.
func TestOldPlacesDoNotPileUp(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on := stream(t, d)
		p := source(t, d, vmm.PagesOptions{})
		const slots = 400
		s := sparse(t, d, slots, vmm.SparseOptions{Pages: p})
		mappings := 0
		for i := range slots {
			require.NoError(t, s.Map(background, on, vmm.Span{First: i, N: 1}))
			write(t, on, s, i, uint64(i))
			require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: i, N: 1}))
			require.NoError(t, on.Synchronize())
			mappings = max(mappings, d.System().Stats().Mappings)
		}
		require.Equal(t, 1, p.Stats().Made)
		require.Less(t, mappings, 100)
	})
}

// Map waits for the work of another stream under the hole, until its context ends.
func TestMapWaitsForWorkUnderTheHole(t *testing.T) {
	m, d := open(t)
	on, other := stream(t, d), stream(t, d)
	s := sparse(t, d, 4, vmm.SparseOptions{})
	page := vmm.Span{First: 1, N: 1}
	require.NoError(t, s.Map(background, on, page))
	m.Hold(on.Handle())
	require.NoError(t, on.Memset(pageAt(s, 1), 1, sparsePage))
	require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, page))
	ctx, cancel := context.WithTimeout(background, 10*time.Millisecond)
	defer cancel()
	before := s.Pages().Stats()
	err := s.Map(ctx, other, vmm.Span{First: 0, N: 3})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, before, s.Pages().Stats(), "nothing has changed")
	require.Equal(t, vmm.SparseStats{Pages: 4, Freed: 1}, s.Stats())
	mapped := make(chan error, 1)
	go func() { mapped <- s.Map(background, other, page) }()
	require.Never(t, func() bool { return len(mapped) > 0 }, 10*time.Millisecond, time.Millisecond)
	m.Release(on.Handle())
	require.NoError(t, <-mapped)
	require.NoError(t, other.Memset(pageAt(s, 1), 2, sparsePage))
	require.EqualValues(t, 0x0202020202020202, read(t, other, s, 1))
}

// Several streams free a page together: it is free when the GPU has passed all of them.
func TestAPageThatSeveralStreamsUsed(t *testing.T) {
	m, d := open(t)
	one, two := stream(t, d), stream(t, d)
	p := source(t, d, vmm.PagesOptions{})
	a, b := sparse(t, d, 1, vmm.SparseOptions{Pages: p}), sparse(t, d, 4, vmm.SparseOptions{Pages: p})
	page := vmm.Span{First: 0, N: 1}
	require.NoError(t, a.Map(background, one, page))
	m.Hold(one.Handle())
	m.Hold(two.Handle())
	for i, st := range []*cuda.Stream{one, two} {
		require.NoError(t, st.Memset(a.Ptr()+cuda.Ptr(4096*i), 1, 4096))
	}
	require.NoError(t, a.UnmapAfter([]*cuda.Stream{one, two}, page))
	creations := m.Count("cuMemCreate")
	for i, st := range []*cuda.Stream{one, two} {
		require.NoError(t, b.Map(background, st, vmm.Span{First: i, N: 1}))
		require.Equal(t, creations+i+1, m.Count("cuMemCreate"), "neither stream alone may have it")
	}
	m.Release(one.Handle())
	require.NoError(t, one.Synchronize())
	require.NoError(t, b.Map(background, two, vmm.Span{First: 2, N: 1}))
	require.Equal(t, creations+2, m.Count("cuMemCreate"), "the stream that has yet to pass it may")
	m.Release(two.Handle())
	require.NoError(t, two.Synchronize())
}

// All or nothing: what a budget refuses has changed nothing, and says who has the memory.
func TestMapIsATransaction(t *testing.T) {
	m, d := open(t)
	b := cuda.NewBudget(4*sparsePage, cuda.BudgetOptions{Name: "kv"})
	p := source(t, d, vmm.PagesOptions{Budget: b, Name: "pages", Tag: "llm"})
	s := sparse(t, d, 16, vmm.SparseOptions{Pages: p})
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 0, N: 2}))
	calls := vmmCalls(m)
	err := s.Map(background, nil, vmm.Span{First: 1, N: 4})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, `page source "pages" tagged "llm" 8 MiB`)
	require.Equal(t, calls+4, vmmCalls(m), "two were made and released")
	require.Equal(t, vmm.SparseStats{Pages: 16, Mapped: 2}, s.Stats())
	require.Equal(t, 2*sparsePage, b.Stats().Committed)
	require.Equal(t, 2*sparsePage, b.Stats().Owners[0].InUse)

	// The owners of the budget are asked, and may free pages of this very range.
	asked := 0
	remove, err := b.OnPressure(0, func(need int) int {
		asked++
		require.NoError(t, s.Unmap(background, vmm.Span{First: 0, N: 1}))
		freed, err := p.Trim(need)
		require.NoError(t, err)
		return freed
	})
	require.NoError(t, err)
	defer remove()
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 5, N: 3}))
	require.Equal(t, 1, asked)
	require.Equal(t, vmm.SparseStats{Pages: 16, Mapped: 4}, s.Stats())

	// With a deadline Map waits for what others free.
	remove()
	go func() {
		time.Sleep(5 * time.Millisecond)
		_ = s.Unmap(background, vmm.Span{First: 1, N: 1})
	}()
	ctx, cancel := context.WithTimeout(background, testTimeout)
	defer cancel()
	require.NoError(t, s.Map(ctx, nil, vmm.Span{First: 9, N: 1}))
	short, cancel := context.WithTimeout(background, 5*time.Millisecond)
	defer cancel()
	err = s.Map(short, nil, vmm.Span{First: 10, N: 1})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, cuda.ErrBudget)
}

// A graph holds no change of what is mapped. What is mapped already may be named.
func TestSparseRangesAndCaptures(t *testing.T) {
	_, d := open(t)
	on := stream(t, d)
	s := sparse(t, d, 4, vmm.SparseOptions{})
	require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 2}))
	g, err := on.WithCapture(cuda.CaptureOptions{}, func() error {
		require.NoError(t, s.Map(background, on, vmm.Span{First: 0, N: 2}))
		require.ErrorIs(t, s.Map(background, on, vmm.Span{First: 0, N: 3}), cuda.ErrCapturing)
		require.ErrorIs(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: 1}), cuda.ErrCapturing)
		require.Equal(t, vmm.SparseStats{Pages: 4, Mapped: 2}, s.Stats())
		return on.Memset(s.Ptr(), 1, 2*sparsePage)
	})
	require.NoError(t, err)
	require.NoError(t, g.Launch(on))
	require.NoError(t, on.Synchronize())
	require.NoError(t, g.Close())
}

// A page that a stream has before the GPU has passed its last use on another is a race of the
// same memory, at whatever addresses. This is how it looks if the caller names the wrong
// stream.
func TestAPageThatIsRecycledTooEarlyIsNamed(t *testing.T) {
	m, err := sim.New(sim.Options{Races: true})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	on, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	wrong, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p, err := vmm.NewPages(d, vmm.PagesOptions{})
	require.NoError(t, err)
	var ranges [2]*vmm.Sparse
	for i := range ranges {
		ranges[i], err = vmm.NewSparse(d, vmm.SparseOptions{Pages: p, Reserve: 4 * sparsePage})
		require.NoError(t, err)
	}
	page := vmm.Span{First: 0, N: 1}
	require.NoError(t, ranges[0].Map(background, on, page))
	m.Hold(on.Handle())
	m.Hold(wrong.Handle())
	require.NoError(t, on.Memset(ranges[0].Ptr(), 1, sparsePage))
	require.NoError(t, wrong.Memset(ranges[0].Ptr()+4096, 1, 1)) // so that it has work, too
	require.NoError(t, ranges[0].UnmapAfter([]*cuda.Stream{wrong}, page))
	require.NoError(t, ranges[1].Map(background, wrong, page))
	require.NoError(t, wrong.Memset(ranges[1].Ptr()+8192, 2, 4096))
	m.Release(on.Handle())
	m.Release(wrong.Handle())
	require.NoError(t, errors.Join(on.Synchronize(), wrong.Synchronize()))
	races := fmt.Sprint(m.Races())
	require.Contains(t, races, "a race for 4096 bytes of memory")
	for _, c := range []closer{ranges[0], ranges[1], p, on, wrong, sys} {
		require.NoError(t, c.Close())
	}
	require.ErrorContains(t, m.Close(), "raced", "which fails a test that uses sim.Open")
}

// Work in a hole is named by range and page, also where a freed page lies under it.
func TestWorkInAHoleIsNamed(t *testing.T) {
	for name, row := range map[string]struct {
		page int
		ok   bool
	}{"a hole": {5, false}, "a hole with a freed page": {2, false}, "a page": {3, true}} {
		t.Run(name, func(t *testing.T) {
			m, err := sim.New(sim.Options{})
			require.NoError(t, err)
			sys, err := m.Open(cuda.Options{})
			require.NoError(t, err)
			d := sys.Devices()[0]
			on, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(t, err)
			s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: 8 * sparsePage, Name: "kv"})
			require.NoError(t, err)
			require.NoError(t, s.Map(background, on, vmm.Span{First: 2, N: 2}))
			m.Hold(on.Handle())
			require.NoError(t, on.Memset(pageAt(s, 2), 1, 100), "behind it the page is freed")
			require.NoError(t, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 2, N: 1}))
			m.Release(on.Handle())
			require.NoError(t, on.Synchronize())
			err = errors.Join(on.Memset(pageAt(s, row.page), 1, 100), on.Synchronize())
			if row.ok {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
				if fault := m.Fault(); fault != "" {
					require.Contains(t, fault, fmt.Sprintf(`page %d of the sparse range "kv"`, row.page))
				} else {
					require.Equal(t, 5, row.page, "the driver refuses what is not mapped at all")
				}
			}
			for _, c := range []closer{s, on, sys} {
				require.NoError(t, c.Close())
			}
			_ = m.Close() // of the context that is lost
		})
	}
}

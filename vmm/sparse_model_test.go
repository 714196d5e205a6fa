package vmm_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// sparseModel is what ranges of two sources are, as their user sees it: which pages are mapped,
// which of them are the same memory, and what is written there. Each source has a budget within one
// of all, in which other memory counts, too.
type sparseModel struct {
	t       *rapid.T
	m       *sim.Machine
	sys     *cuda.System
	streams []*cuda.Stream
	held    []bool
	budget  *cuda.Budget
	within  [3]*cuda.Budget // of the sources, and of others
	sources [2]*vmm.Pages
	others  []*vmm.Buffer
	ranges  []*modelRange
	closing []closer // whose teardown may fail
	words   uint64
	faults  bool
	zero    bool
	nulls   int // ranges that had a null page
	next    int
	limit   int // of the budget of all, in pages
	before  int // bytes committed
	evicts  int // pages that the running Map may take from others
}

// modelRange is a range, and its pages: nil for a hole.
type modelRange struct {
	s     *vmm.Sparse
	of    int  // its source
	null  bool // lies under its holes
	pages [modelPages]*modelPage
}

const (
	modelPages  = 12
	modelLimit  = 16
	modelWithin = 12 // of a source
	modelRanges = 3
)

// modelPage is memory that some places have. All its work is on one stream, so that it is
// ordered.
type modelPage struct {
	stream int
	known  bool
	word   uint64
}

func newSparseModel(t *rapid.T, faults bool) *sparseModel {
	m, err := sim.New(sim.Options{Races: true, Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 64 * mib}}})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{NamedStreamsOnly: true}) // a wait for other streams stalls launches
	require.NoError(t, err)
	md := &sparseModel{t: t, m: m, sys: sys, faults: faults}
	d := sys.Devices()[0]
	for range 3 {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		md.streams, md.held = append(md.streams, s), append(md.held, false)
	}
	md.limit, md.zero = modelLimit, rapid.Bool().Draw(t, "zero")
	md.budget = cuda.NewBudget(modelLimit*kib64, cuda.BudgetOptions{})
	_, err = md.budget.OnPressure(0, md.evict)
	require.NoError(t, err)
	for i := range md.within {
		md.within[i] = cuda.NewBudget(modelWithin*kib64, cuda.BudgetOptions{Parent: md.budget})
	}
	for i := range md.sources {
		md.sources[i], err = vmm.NewPages(d, vmm.PagesOptions{Page: kib64, Budget: md.within[i], Zero: md.zero})
		require.NoError(t, err)
	}
	for i := range modelRanges {
		md.ranges = append(md.ranges, md.open(i == 0 && rapid.Bool().Draw(t, "null"), i/2))
	}
	return md
}

func (md *sparseModel) open(null bool, of int) *modelRange {
	md.next++
	s, err := vmm.NewSparse(md.sys.Devices()[0], vmm.SparseOptions{Reserve: modelPages * kib64, Pages: md.sources[of], Null: null, Name: fmt.Sprintf("range %d", md.next)})
	require.NoError(md.t, err)
	if null {
		md.nulls++
	}
	return &modelRange{s: s, of: of, null: null}
}

func (md *sparseModel) pick() *modelRange {
	return md.ranges[rapid.IntRange(0, len(md.ranges)-1).Draw(md.t, "range")]
}

func (md *sparseModel) span() vmm.Span {
	first := rapid.IntRange(0, modelPages-1).Draw(md.t, "first")
	return vmm.Span{First: first, N: rapid.IntRange(0, modelPages-first).Draw(md.t, "pages")}
}

// soon bounds what waits for a stream that is held.
func soon() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Millisecond)
}

// expected says whether an operation may fail so.
func (md *sparseModel) expected(err error, kinds ...error) {
	if slices.ContainsFunc(kinds, func(kind error) bool { return errors.Is(err, kind) }) {
		return
	}
	var at *cuda.Error
	if md.faults && errors.As(err, &at) && at.Code == code {
		return
	}
	if err != nil {
		md.t.Fatalf("%v", err) // which rapid shows even of a failure that it cannot reproduce
	}
}

func (md *sparseModel) mapPages(*rapid.T) {
	r, sp, on := md.pick(), md.span(), rapid.IntRange(0, len(md.streams)-1).Draw(md.t, "stream")
	ctx, cancel := soon()
	defer cancel()
	md.evicts = rapid.IntRange(0, 3).Draw(md.t, "evicts")
	err := r.s.Map(ctx, md.streams[on], sp)
	md.evicts = 0
	if err != nil {
		md.expected(err, cuda.ErrBudget, context.DeadlineExceeded)
		return // check compares what is mapped
	}
	for i := sp.First; i < sp.First+sp.N; i++ {
		if r.pages[i] == nil {
			r.pages[i] = &modelPage{stream: on, known: md.zero}
		}
	}
}

// evict is called when the budget of all lacks memory. A page of the first range that has one goes.
func (md *sparseModel) evict(int) (freed int) {
	for _, r := range md.ranges {
		for i, p := range r.pages {
			if p == nil || md.evicts == 0 {
				continue
			}
			md.evicts--
			require.NoError(md.t, r.s.UnmapAfter(md.streams[p.stream:p.stream+1], vmm.Span{First: i, N: 1}))
			r.pages[i] = nil
			return kib64
		}
	}
	return 0
}

// setLimit changes the limit of all while they have memory.
func (md *sparseModel) setLimit(*rapid.T) {
	md.limit = rapid.IntRange(4, modelLimit).Draw(md.t, "limit")
	require.NoError(md.t, md.budget.SetLimit(md.limit*kib64))
}

// other makes a buffer, or closes those that there are.
func (md *sparseModel) other(*rapid.T) {
	if len(md.others) > 2 {
		for _, b := range md.others {
			require.NoError(md.t, b.CloseAfter(md.streams...))
			md.closing = append(md.closing, b)
		}
		md.others = nil
		return
	}
	b, err := vmm.NewBuffer(md.sys.Devices()[0], vmm.BufferOptions{Reserve: kib64, Chunks: vmm.FixedChunks(kib64), Budget: md.within[2]})
	require.NoError(md.t, err)
	md.others = append(md.others, b)
	md.expected(b.Grow(kib64), cuda.ErrBudget)
}

func (md *sparseModel) unmapAfter(*rapid.T) {
	r, sp := md.pick(), md.span()
	var on []*cuda.Stream
	for i := sp.First; i < sp.First+sp.N; i++ {
		if p := r.pages[i]; p != nil && !slices.Contains(on, md.streams[p.stream]) {
			on = append(on, md.streams[p.stream])
		}
	}
	if len(on) == 0 {
		on = md.streams[:1]
	}
	require.NoError(md.t, r.s.UnmapAfter(on, sp))
	clear(r.pages[sp.First : sp.First+sp.N])
}

func (md *sparseModel) unmap(*rapid.T) {
	r, sp := md.pick(), md.span()
	ctx, cancel := soon()
	defer cancel()
	if err := r.s.Unmap(ctx, sp); err != nil {
		md.expected(err, context.DeadlineExceeded)
		if errors.Is(err, context.DeadlineExceeded) || !r.null {
			return
		}
		// They are holes, under which the driver did not map the null page.
	}
	clear(r.pages[sp.First : sp.First+sp.N])
}

// write writes a page on its stream.
func (md *sparseModel) write(*rapid.T) {
	r := md.pick()
	i := rapid.IntRange(0, modelPages-1).Draw(md.t, "page")
	if p := r.pages[i]; p != nil {
		md.words++
		b := byte(md.words%255) + 1
		require.NoError(md.t, md.streams[p.stream].Memset(pageAt(r.s, i), b, kib64))
		p.word, p.known = uint64(b)*0x0101010101010101, true
	}
}

// share maps pages of a range in holes of another, or of its own.
func (md *sparseModel) share(*rapid.T) {
	from, sp, to := md.pick(), md.span(), md.pick()
	if from.of != to.of {
		require.ErrorIs(md.t, to.s.Share(background, from.s, 0, vmm.Span{First: 0, N: 1}), cuda.ErrInvalidArgument, "another source")
		return
	}
	at := rapid.IntRange(0, modelPages-1).Draw(md.t, "at")
	if sp.N = min(sp.N, modelPages-at); from == to && sp.First < at+sp.N && at < sp.First+sp.N {
		return
	}
	ctx, cancel := soon()
	defer cancel()
	before := to.s.Stats()
	if err := to.s.Share(ctx, from.s, at, sp); err != nil {
		md.expected(err, cuda.ErrOutOfRange, cuda.ErrInUse, context.DeadlineExceeded)
		require.Equal(md.t, before.Mapped, to.s.Stats().Mapped)
		return
	}
	copy(to.pages[at:], from.pages[sp.First:sp.First+sp.N])
}

func (md *sparseModel) replace(*rapid.T) {
	r := md.pick()
	i := rapid.IntRange(0, modelPages-1).Draw(md.t, "page")
	on := 0
	if r.pages[i] != nil {
		on = r.pages[i].stream
	}
	ctx, cancel := soon()
	defer cancel()
	switch err := r.s.Replace(ctx, md.streams[on], i); {
	case err != nil:
		md.expected(err, cuda.ErrOutOfRange, cuda.ErrBudget, context.DeadlineExceeded)
		if _, err := vmm.ViewOf[byte](r.s, i*kib64, 1); err != nil {
			r.pages[i] = nil // as the error said
		}
	case md.uses(r.pages[i]) > 1:
		own := *r.pages[i]
		r.pages[i] = &own
	}
}

// uses counts the places of a page.
func (md *sparseModel) uses(p *modelPage) (n int) {
	for _, r := range md.ranges {
		for _, o := range r.pages {
			if o == p {
				n++
			}
		}
	}
	return n
}

func (md *sparseModel) hold(*rapid.T) {
	i := rapid.IntRange(0, len(md.streams)-1).Draw(md.t, "stream")
	if md.held[i] = !md.held[i]; md.held[i] {
		md.m.Hold(md.streams[i].Handle())
	} else {
		md.m.Release(md.streams[i].Handle())
	}
}

func (md *sparseModel) trim(*rapid.T) {
	_, err := md.sources[rapid.IntRange(0, 1).Draw(md.t, "source")].Trim(rapid.IntRange(0, 5).Draw(md.t, "pages") * kib64)
	md.expected(err)
}

// drain has what was closed or refused tried again now, and not only by timers.
func (md *sparseModel) drain(*rapid.T) {
	ctx, cancel := soon()
	defer cancel()
	_ = md.sys.Drain(ctx) // errors of teardowns that faults ended
}

// reopen closes a range behind the work of all streams, and makes another one.
func (md *sparseModel) reopen(*rapid.T) {
	i := rapid.IntRange(0, len(md.ranges)-1).Draw(md.t, "range")
	require.NoError(md.t, md.ranges[i].s.CloseAfter(md.streams...))
	md.closing = append(md.closing, md.ranges[i].s)
	md.ranges[i] = md.open(false, rapid.IntRange(0, 1).Draw(md.t, "source"))
}

// capture records a graph that writes a page, and launches it. What a stream that captures maps
// and unmaps is refused. A wait whose context has ended goes on, and if it meets a capture it
// waits for all work of the context, which stalls launches: so none is held.
func (md *sparseModel) capture(*rapid.T) {
	r := md.pick()
	i := rapid.IntRange(0, modelPages-1).Draw(md.t, "page")
	p := r.pages[i]
	if p == nil || slices.Contains(md.held, true) {
		return
	}
	on := md.streams[p.stream]
	md.words++
	b := byte(md.words%255) + 1
	g, err := on.WithCapture(cuda.CaptureOptions{}, func() error {
		require.NoError(md.t, r.s.Map(background, on, vmm.Span{First: i, N: 1}), "it is mapped")
		require.ErrorIs(md.t, r.s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: i, N: 1}), cuda.ErrCapturing)
		if hole := slices.Index(r.pages[:], nil); hole >= 0 {
			require.ErrorIs(md.t, r.s.Map(background, on, vmm.Span{First: hole, N: 1}), cuda.ErrCapturing)
		}
		return on.Memset(pageAt(r.s, i), b, kib64)
	})
	require.NoError(md.t, err)
	require.NoError(md.t, g.Launch(on))
	require.NoError(md.t, g.CloseAfter(on))
	p.word, p.known = uint64(b)*0x0101010101010101, true
}

// suspend has all ranges sleep and wake, so that pages that they share go, too.
func (md *sparseModel) suspend(*rapid.T) {
	var all []vmm.Memory
	for _, r := range md.ranges {
		all = append(all, r.s)
	}
	ctx, cancel := context.WithCancel(background)
	if slices.Contains(md.held, true) {
		cancel()
		ctx, cancel = soon()
	}
	defer cancel()
	z, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, all...)
	if err != nil {
		md.expected(err, context.DeadlineExceeded, cuda.ErrInUse) // what is stuck
		return
	}
	require.ErrorIs(md.t, md.ranges[0].s.UnmapAfter(md.streams[:1], vmm.Span{First: 0, N: 1}), cuda.ErrSuspended)
	if err := z.Resume(background); err != nil {
		md.expected(err, cuda.ErrBudget) // whose limit was lowered
		md.m.ClearFaults()
		md.limit = modelLimit
		require.NoError(md.t, md.budget.SetLimit(md.limit*kib64))
		require.NoError(md.t, z.Resume(background))
	}
}

func (md *sparseModel) fault(*rapid.T) {
	if md.faults {
		md.m.Inject(sim.Fault{
			Call:  rapid.SampledFrom([]string{"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"}).Draw(md.t, "call"),
			After: rapid.IntRange(0, 3).Draw(md.t, "after"), Times: rapid.IntRange(1, 2).Draw(md.t, "times"), Result: cuda.Code(driver.Unknown),
		})
	}
}

func (md *sparseModel) check(*rapid.T) {
	for _, p := range md.sources {
		if err := vmm.CheckPages(p); err != nil {
			md.t.Fatalf("%v", err) // see expected
		}
	}
	for _, r := range md.ranges {
		mapped := 0
		for _, p := range r.pages {
			if p != nil {
				mapped++
			}
		}
		require.Equal(md.t, mapped, r.s.Stats().Mapped)
	}
	all := md.budget.Stats().Committed
	require.LessOrEqual(md.t, all, max(md.limit*kib64, md.before), "of a limit that was lowered nothing is taken, and nothing added")
	md.before = all
	for i, b := range md.within {
		have := b.Stats().Committed
		require.LessOrEqual(md.t, have, modelWithin*kib64)
		if md.faults || i == len(md.sources) {
			continue
		}
		nulls := have/kib64 - md.sources[i].Stats().Pages
		require.LessOrEqual(md.t, nulls, md.nulls)
		if i == 0 && md.ranges[0].null {
			require.Equal(md.t, 1, nulls)
		}
	}
}

// contents reads every page whose word is known.
func (md *sparseModel) contents() {
	for i := range md.held {
		if md.held[i] {
			md.m.Release(md.streams[i].Handle())
			md.held[i] = false
		}
	}
	for _, s := range md.streams {
		require.NoError(md.t, s.Synchronize())
	}
	for _, r := range md.ranges {
		for i, p := range r.pages {
			if p == nil || !p.known {
				continue
			}
			var word [1]uint64
			if err := cuda.DownloadOf(md.streams[p.stream], word[:], pageAt(r.s, i)); err != nil {
				md.t.Fatalf("page %d of %s: %v", i, r.s.Name(), err) // see expected
			}
			require.Equal(md.t, p.word, word[0])
		}
	}
}

func (md *sparseModel) end() {
	if md.t.Failed() {
		return // closing says less
	}
	md.m.ClearFaults()
	md.contents()
	for _, b := range md.others {
		require.NoError(md.t, b.Close())
	}
	for _, r := range md.ranges {
		require.NoError(md.t, r.s.Close())
	}
	_ = md.sys.Drain(context.Background()) // errors of teardowns that faults ended
	for _, s := range md.closing {
		require.NoError(md.t, s.Close())
	}
	require.NoError(md.t, md.sys.Drain(context.Background()))
	for _, p := range md.sources {
		require.NoError(md.t, p.Close())
	}
	for _, s := range md.streams {
		require.NoError(md.t, s.Close())
	}
	for _, b := range append(md.within[:], md.budget) {
		require.Zero(md.t, b.Stats().Committed)
	}
	require.NoError(md.t, md.sys.Close())
	require.NoError(md.t, md.m.Close())
}

// Random operations on ranges, sources and budgets, with streams that are held, faults of the driver,
// captures and memory that others lack, keep every page's bytes and every budget's, and races are none.
func TestSparseRangesBesideAModel(t *testing.T) {
	for name, faults := range map[string]bool{"without faults": false, "with faults": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(rt *rapid.T) {
				md := newSparseModel(rt, faults)
				defer md.end()
				rt.Repeat(map[string]func(*rapid.T){
					"map": md.mapPages, "map again": md.mapPages, "unmapAfter": md.unmapAfter, "unmap": md.unmap, "write": md.write,
					"write again": md.write, "hold": md.hold, "trim": md.trim, "reopen": md.reopen, "share": md.share, "replace": md.replace,
					"capture": md.capture, "suspend": md.suspend, "drain": md.drain, "fault": md.fault, "limit": md.setLimit, "other": md.other, "read": func(*rapid.T) { md.contents() },
					"": md.check,
				})
			})
		})
	}
}

//go:build linux

package vmm_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/cbench"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// plainPages are pages as the C loops make them.
func plainPages(page int) vmm.PagesOptions {
	return vmm.PagesOptions{Page: page, Memory: vmm.Properties{Handles: vmm.NoHandles, RDMA: vmm.RDMAOff}}
}

// perPage is the median of times, in microseconds a page.
func perPage(times []time.Duration, pages int) float64 {
	return float64(middle(times).Nanoseconds()) / 1e3 / float64(pages)
}

// BenchmarkSparseBatch maps 64 pages at once: new ones against a loop of the same calls in C, and
// recycled ones against the raw calls that move a run (unmap, map, grant). Promised: ratios of at
// most 1.05, and no page is made for the recycled ones.
func BenchmarkSparseBatch(b *testing.B) {
	const n = 64
	for _, page := range []int{2 * mib, 16 * mib} {
		b.Run(fmt.Sprintf("%dMiB", page/mib), func(b *testing.B) {
			if !cbench.Available {
				b.Skip("this build has no C loops")
			}
			d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
			lib, err := cbench.Open(d.System().Driver().Path)
			require.NoError(b, err)
			pages, err := vmm.NewPages(d, plainPages(page))
			require.NoError(b, err)
			var ranges [2]*vmm.Sparse
			for i := range ranges {
				ranges[i], err = vmm.NewSparse(d, vmm.SparseOptions{Reserve: n * page, Pages: pages})
				require.NoError(b, err)
			}
			all, ctx := vmm.Span{First: 0, N: n}, context.Background()
			sizes := slices.Repeat([]uint64{uint64(page)}, n)
			mv := newMover(b, d, n, uint64(page))
			var made, inC, moved, raw []time.Duration
			for b.Loop() {
				for range 9 {
					start := time.Now()
					require.NoError(b, ranges[0].Map(ctx, nil, all))
					made = append(made, time.Since(start))
					require.NoError(b, ranges[0].Unmap(ctx, all))
					before := pages.Stats().Made
					start = time.Now()
					require.NoError(b, ranges[1].Map(ctx, nil, all))
					moved = append(moved, time.Since(start))
					require.Equal(b, before, pages.Stats().Made)
					raw = append(raw, mv.move())
					require.NoError(b, ranges[1].Unmap(ctx, all))
					require.NoError(b, gputest.Err(pages.Trim(0)))
					took, r := lib.GrowLoop(driver.Device(d.Ordinal()), uint64(n*page), [][]uint64{sizes})
					require.Equal(b, driver.Success, r)
					inC = append(inC, took)
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(perPage(made, n), "new-us/page")
			b.ReportMetric(perPage(inC, n), "c-us/page")
			b.ReportMetric(perPage(made, n)/perPage(inC, n), "new/c")
			b.ReportMetric(perPage(moved, n), "recycled-us/page")
			b.ReportMetric(perPage(raw, n), "raw-us/page")
			b.ReportMetric(perPage(moved, n)/perPage(raw, n), "recycled/raw")
			mv.close()
			for _, c := range []closer{ranges[0], ranges[1], pages} {
				require.NoError(b, c.Close())
			}
		})
	}
}

// mover moves a run of memory from one place of a range to another by raw calls.
type mover struct {
	testing.TB
	drv     driver.Driver
	base    driver.Ptr
	page    uint64
	handles []driver.MemHandle
	access  []driver.AccessDesc
	at      int // 0 or 1: which half has the run
}

func newMover(tb testing.TB, d *cuda.Device, n int, page uint64) *mover {
	m := &mover{TB: tb, drv: core.SystemOf(d).Drv, page: page}
	m.reserve(d, n)
	for range n {
		m.create()
	}
	m.mapAt(0)
	return m
}

func (m *mover) ok(r driver.Result) {
	if r != driver.Success { // which costs less than require
		m.Fatal(r)
	}
}

// reserve reserves a range for two runs of n pages.
func (m *mover) reserve(d *cuda.Device, n int) {
	at := driver.Location{Type: driver.LocationDevice, ID: int32(d.Ordinal())}
	m.access = []driver.AccessDesc{{Location: at, Flags: driver.AccessReadWrite}}
	var r driver.Result
	m.base, r = m.drv.MemAddressReserve(2*uint64(n)*m.page, 0, 0)
	m.ok(r)
}

func (m *mover) create() {
	h, r := m.drv.MemCreate(m.page, driver.AllocationProp{Type: driver.AllocationPinned, Location: m.access[0].Location})
	m.ok(r)
	m.handles = append(m.handles, h)
}

func (m *mover) bytes() uint64 { return uint64(len(m.handles)) * m.page }

func (m *mover) mapAt(half int) {
	at := m.base + driver.Ptr(half)*driver.Ptr(m.bytes())
	for i, h := range m.handles {
		m.ok(m.drv.MemMap(at+driver.Ptr(i)*driver.Ptr(m.page), m.page, 0, h))
	}
	m.ok(m.drv.MemSetAccess(at, m.bytes(), m.access))
	m.at = half
}

func (m *mover) move() time.Duration {
	start := time.Now()
	m.ok(m.drv.MemUnmap(m.base+driver.Ptr(m.at)*driver.Ptr(m.bytes()), m.bytes()))
	m.mapAt(1 - m.at)
	return time.Since(start)
}

func (m *mover) close() {
	m.ok(m.drv.MemUnmap(m.base+driver.Ptr(m.at)*driver.Ptr(m.bytes()), m.bytes()))
	for _, h := range m.handles {
		m.ok(m.drv.MemRelease(h))
	}
	m.ok(m.drv.MemAddressFree(m.base, 2*m.bytes()))
}

// BenchmarkSparseDecode is a decode loop: a model of 8 billion parameters with 32 layers, each
// with a range for K and one for V, in which 64 sequences have a slot each. They begin together. A
// token takes 2 KiB in each range, so a page of 2 MiB lasts 1,024 steps, and one of 4,096 pages is
// due in each quarter of a step. A step is 10 ms of GPU work; the next steps' pages are mapped
// meanwhile. Promised against steps that map nothing: mean-added below 1 %, longest-added below
// 1 ms. Then all sequences end and begin again in their slots: steady-made and steady-recycled
// are 0, which is to say that no VMM call is made.
func BenchmarkSparseDecode(b *testing.B) {
	const (
		ranges, sequences, slot = 64, 64, 2 // pages of a slot
		due                     = ranges * sequences
		steps, each             = 400, 4 // pages a step: all of a page's tokens take 1,024
	)
	d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
	on, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(b, err)
	busy, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: gib, Chunks: vmm.FixedChunks(64 * mib)})
	require.NoError(b, err)
	require.NoError(b, busy.Resize(on, gib))
	require.NoError(b, on.Synchronize())
	memset := func(n int) time.Duration {
		start := time.Now()
		for range n {
			require.NoError(b, on.Memset(busy.Ptr(), 1, gib))
		}
		require.NoError(b, on.Synchronize())
		return time.Since(start)
	}
	memset(4)
	n := max(1, int(10*time.Millisecond/(memset(16)/16)))

	pages, err := vmm.NewPages(d, plainPages(2*mib))
	require.NoError(b, err)
	var all []*vmm.Sparse
	for range ranges {
		s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: sequences * slot * 2 * mib, Pages: pages})
		require.NoError(b, err)
		all = append(all, s)
	}
	ctx, next := context.Background(), 0
	step := func(pages int) time.Duration {
		start := time.Now()
		for range n {
			require.NoError(b, on.Memset(busy.Ptr(), 1, gib))
		}
		for ; pages > 0 && next < due; pages-- { // one sequence's page in each range
			require.NoError(b, all[next%ranges].Map(ctx, on, vmm.Span{First: next / ranges * slot, N: 1}))
			next++
		}
		require.NoError(b, on.Synchronize())
		return time.Since(start)
	}
	run := func(pages int) (mean, longest time.Duration) {
		for range steps {
			t := step(pages)
			mean, longest = mean+t, max(longest, t)
		}
		return mean / steps, longest
	}
	for b.Loop() {
		plain, plainLongest := run(0)
		ahead, aheadLongest := run(each)
		for next < due {
			step(64)
		}
		before := pages.Stats()
		for i := range ranges {
			require.NoError(b, all[i].UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: 0, N: sequences * slot}))
		}
		next = 0
		steady, steadyLongest := run(due / steps)
		after := pages.Stats()
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(plain.Microseconds()), "step-us")
		b.ReportMetric(100*(float64(ahead)/float64(plain)-1), "mean-added-%")
		b.ReportMetric(float64((aheadLongest - plainLongest).Microseconds()), "longest-added-us")
		b.ReportMetric(100*(float64(steady)/float64(plain)-1), "steady-added-%")
		b.ReportMetric(float64((steadyLongest - plainLongest).Microseconds()), "steady-longest-added-us")
		b.ReportMetric(float64(after.Made-before.Made), "steady-made")
		b.ReportMetric(float64(after.Recycled-before.Recycled), "steady-recycled")
		for i := range ranges {
			require.NoError(b, all[i].Unmap(ctx, vmm.Span{First: 0, N: sequences * slot}))
		}
		require.NoError(b, gputest.Err(pages.Trim(0)))
		next = 0
	}
	for _, s := range all {
		require.NoError(b, s.Close())
	}
	for _, c := range []closer{pages, busy, on} {
		require.NoError(b, c.Close())
	}
}

// BenchmarkSparseLayout grows a sequence by blocks of 16 tokens of 128 KiB: with a page for each
// block, and with a page for 16 of them. Promised: the first is slower, by block/many, some 16 times.
func BenchmarkSparseLayout(b *testing.B) {
	const blocks, block, many = 1024, 2 * mib, 16
	d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
	grow := func(page int) time.Duration {
		s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: blocks * block, Page: page, Memory: plainPages(page).Memory})
		require.NoError(b, err)
		start := time.Now()
		for i := range blocks {
			require.NoError(b, s.Map(context.Background(), nil, vmm.Span{First: i * block / page, N: 1}))
		}
		took := time.Since(start)
		require.NoError(b, s.Close())
		return took
	}
	var each, shared []time.Duration
	for b.Loop() {
		for range 3 {
			each, shared = append(each, grow(block)), append(shared, grow(many*block))
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(perPage(each, blocks), "each-us/block")
	b.ReportMetric(perPage(shared, blocks), "many-us/block")
	b.ReportMetric(perPage(each, blocks)/perPage(shared, blocks), "each/many")
}

// BenchmarkSparseFootprint is what the device has taken once a burst has ended, beside what is
// live. Promised: taken/live of at most 1.2.
func BenchmarkSparseFootprint(b *testing.B) {
	const n, live, high = 1024, 256, 16
	d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
	on, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(b, err)
	before := free(b, d)
	for b.Loop() {
		o := plainPages(2 * mib)
		o.High, o.Idle = high, 100*time.Millisecond
		pages, err := vmm.NewPages(d, o)
		require.NoError(b, err)
		s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: n * 2 * mib, Pages: pages})
		require.NoError(b, err)
		require.NoError(b, s.Map(context.Background(), on, vmm.Span{First: 0, N: n}))
		for i := range n {
			if i%(n/live) > 0 {
				require.NoError(b, s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: i, N: 1}))
			}
		}
		require.Eventually(b, func() bool { return pages.Stats().Pages == live+high }, testTimeout, 10*time.Millisecond, "%+v", pages.Stats())
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(before-free(b, d))/float64(live*2*mib), "taken/live")
		require.NoError(b, s.Close())
		require.NoError(b, pages.Close())
	}
	require.NoError(b, on.Close())
}

// BenchmarkSparseCommit reserves as much as the device has, maps what warming up needs, captures
// and launches a graph, and commits all but a headroom of 1 GiB. Promised: unused is below the
// size of a page. What mapping takes besides, for page tables, is tables-bytes/page.
func BenchmarkSparseCommit(b *testing.B) {
	const headroom, warm = gib, 8
	for _, page := range []int{2 * mib, 16 * mib} {
		b.Run(fmt.Sprintf("%dMiB", page/mib), func(b *testing.B) {
			d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
			on, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(b, err)
			for b.Loop() {
				s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: d.TotalMemory(), Page: page, Memory: plainPages(page).Memory})
				require.NoError(b, err)
				require.NoError(b, s.Map(context.Background(), on, vmm.Span{First: 0, N: warm}))
				g, err := on.WithCapture(cuda.CaptureOptions{}, func() error { return on.Memset(s.Ptr(), 1, warm*page) })
				require.NoError(b, err)
				require.NoError(b, g.Launch(on))
				require.NoError(b, on.Synchronize())
				start := time.Now()
				n, err := s.Pages().Fill(context.Background(), headroom)
				require.NoError(b, err)
				filled, left := time.Since(start), free(b, d)
				require.NoError(b, s.Map(context.Background(), on, vmm.Span{First: 0, N: warm + n}))
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(float64(left-headroom)/float64(page), "unused-pages")
				b.ReportMetric(float64(left-free(b, d))/float64(n), "tables-bytes/page")
				b.ReportMetric(float64(filled.Microseconds())/float64(n), "fill-us/page")
				require.NoError(b, g.Launch(on))
				require.NoError(b, on.Synchronize())
				require.NoError(b, g.Close())
				require.NoError(b, s.Close())
			}
			require.NoError(b, on.Close())
		})
	}
}

// cpu is the processor time of this process so far, which other processes do not lengthen.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// silent succeeds in the calls that make, map, grant, unmap and release pages, and does nothing.
type silent struct {
	driver.Driver
	handle driver.MemHandle
}

func (d *silent) MemCreate(uint64, driver.AllocationProp) (driver.MemHandle, driver.Result) {
	d.handle++
	return d.handle, driver.Success
}
func (d *silent) MemRelease(driver.MemHandle) driver.Result { return driver.Success }
func (d *silent) MemMap(driver.Ptr, uint64, uint64, driver.MemHandle) driver.Result {
	return driver.Success
}
func (d *silent) MemSetAccess(driver.Ptr, uint64, []driver.AccessDesc) driver.Result {
	return driver.Success
}
func (d *silent) MemUnmap(driver.Ptr, uint64) driver.Result { return driver.Success }

// plainPage has as much memory as the library has for a page: for the page itself, the driver's
// handle, where it is mapped, and when the GPU has passed it.
type plainPage struct {
	parts [5]*[128]byte
	next  *plainPage
}

func (p *plainPage) touch() {
	for _, part := range p.parts {
		part[0]++
	}
}

func (p *plainPage) renew(parts int) {
	for i := range parts {
		p.parts[i] = new([128]byte)
	}
}

// BenchmarkSparsePages maps n pages of a range in random order, one by one, frees them in another,
// and has other places take them. No driver takes part, and the garbage collector rests, so all of
// the time is the library's own. plain does no more than to make and to visit as much memory for each
// page, in the same order: it shows what memory costs that no cache of the processor holds. Promised:
// from 100 to 100,000 pages own grows by no larger a factor than plain. collect is what one
// collection takes for each of 100,000 pages. Times are of the processor.
func BenchmarkSparsePages(b *testing.B) {
	const page, most = 2 * mib, 100_000
	for n := 100; n <= most; n *= 10 {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m, err := sim.New(sim.Options{})
			require.NoError(b, err)
			sys, err := m.OpenOwned(cuda.Options{NamedStreamsOnly: true})
			require.NoError(b, err)
			d := sys.Devices()[0]
			on, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(b, err)
			inner := core.SystemOf(d)
			loud := inner.Drv
			took := map[string]time.Duration{}
			each := func(what string, order []int, f func(i int) error) {
				start := cpu()
				for _, i := range order {
					if err := f(i); err != nil {
						b.Fatal(err)
					}
				}
				took[what] += cpu() - start
			}
			ctx := context.Background()
			defer debug.SetGCPercent(debug.SetGCPercent(-1))
			order, back := rand.New(rand.NewPCG(1, 2)).Perm(n), rand.New(rand.NewPCG(3, 4)).Perm(n)
			for b.Loop() {
				runtime.GC()
				inner.Drv = &silent{Driver: loud}
				for range most / n { // as many pages in all
					s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: 2 * n * page, Page: page})
					require.NoError(b, err)
					each("map", order, func(i int) error { return s.Map(ctx, on, vmm.Span{First: i, N: 1}) })
					each("free", back, func(i int) error { return s.UnmapAfter([]*cuda.Stream{on}, vmm.Span{First: i, N: 1}) })
					each("move", order, func(i int) error { return s.Map(ctx, on, vmm.Span{First: n + i, N: 1}) })
					if n == most {
						each("collect", []int{0}, func(int) error { runtime.GC(); return nil })
					}
					require.NoError(b, s.Unmap(ctx, vmm.Span{First: 0, N: 2 * n}))
					require.NoError(b, s.Close())
				}
				inner.Drv = loud
				runtime.GC()
				for range most / n {
					table, last := make([]*plainPage, 2*n), new(plainPage)
					first := last
					each("plain-map", order, func(i int) error {
						table[i] = new(plainPage)
						table[i].renew(len(table[i].parts))
						return nil
					})
					each("plain-free", back, func(i int) error {
						table[i].touch()
						last.next, last = table[i], table[i]
						return nil
					})
					each("plain-move", order, func(i int) error {
						first = first.next
						first.touch()
						first.renew(2)
						table[n+i] = first
						return nil
					})
				}
			}
			b.ReportMetric(0, "ns/op")
			for what, t := range took {
				b.ReportMetric(float64(t.Nanoseconds())/float64(b.N*most), what+"-ns/page")
			}
			require.NoError(b, on.Close())
			require.NoError(b, sys.Close())
		})
	}
}

// BenchmarkSparseSequences begins and ends 10,000 sequences that have a range of 64 GiB each, which
// at once would take more addresses than there are. Slots are reused: there are as many ranges as
// sequences at a time. Promised: flat, however many slots there are. Times are of the processor.
func BenchmarkSparseSequences(b *testing.B) {
	const sequences, reserve = 10_000, 64 * gib
	for _, slots := range []int{10, 100, 1_000} {
		b.Run(fmt.Sprint(slots), func(b *testing.B) {
			m, err := sim.New(sim.Options{})
			require.NoError(b, err)
			sys, err := m.OpenOwned(cuda.Options{NamedStreamsOnly: true})
			require.NoError(b, err)
			d := sys.Devices()[0]
			on, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(b, err)
			pages, err := vmm.NewPages(d, vmm.PagesOptions{})
			require.NoError(b, err)
			var all []*vmm.Sparse
			for range slots {
				s, err := vmm.NewSparse(d, vmm.SparseOptions{Reserve: reserve, Pages: pages})
				require.NoError(b, err)
				all = append(all, s)
			}
			part := vmm.Span{First: 0, N: 4}
			begin := func(s *vmm.Sparse) { require.NoError(b, s.Map(context.Background(), on, part)) }
			for _, s := range all {
				begin(s)
			}
			start := cpu()
			for b.Loop() {
				for i := range sequences {
					require.NoError(b, all[i%slots].UnmapAfter([]*cuda.Stream{on}, part))
					begin(all[i%slots])
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64((cpu()-start).Nanoseconds())/float64(b.N*sequences), "ns/sequence")
			for _, s := range all {
				require.NoError(b, s.Close())
			}
			for _, c := range []closer{pages, on, sys} {
				require.NoError(b, c.Close())
			}
		})
	}
}

package managed_test

import (
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// The promises are ratios of two ways that are taken in turn in the same run.

// pair is the median time of each.
func pair(rounds int, ours, theirs func() time.Duration) (a, b time.Duration) {
	var as, bs []time.Duration
	ours()
	theirs()
	for i := range rounds {
		if i%2 == 0 {
			as, bs = append(as, ours()), append(bs, theirs())
		} else {
			bs, as = append(bs, theirs()), append(as, ours())
		}
	}
	slices.Sort(as)
	slices.Sort(bs)
	return as[rounds/2], bs[rounds/2]
}

func took(do func()) time.Duration {
	start := time.Now()
	do()
	return time.Since(start)
}

type benchWorld struct {
	tb  testing.TB
	d   *cuda.Device
	s   *cuda.Stream
	ctx *core.Context
	drv driver.Driver
	raw driver.Stream
}

func newBench(b *testing.B) *benchWorld {
	b.Helper()
	w := &benchWorld{tb: b, d: gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})}
	w.s = stream(b, w.d)
	ctx, err := core.ContextOf("test", w.d)
	require.NoError(b, err)
	w.ctx, w.drv, w.raw = ctx, ctx.System().Drv, driver.Stream(w.s.Handle())
	return w
}

func (w *benchWorld) must(err error) {
	if err != nil {
		w.tb.Helper()
		w.tb.Fatal(err)
	}
}

func (w *benchWorld) ok(r driver.Result) {
	if r != driver.Success {
		w.tb.Helper()
		w.tb.Fatal(r)
	}
}

// touched is memory whose pages are there.
func (w *benchWorld) touched(n int) *managed.Buffer {
	w.tb.Helper()
	b := buffer(w.tb, w.d, n)
	w.must(w.s.Memset(b.Ptr(), 1, n))
	w.must(w.s.Synchronize())
	return b
}

// BenchmarkPrefetch moves 1 GiB to the host and back to the device. Promised: at
// most 1.02 of the driver's own calls.
func BenchmarkPrefetch(b *testing.B) {
	const n = 1 << 30
	w := newBench(b)
	ours, theirs := w.touched(n), w.touched(n)
	there := w.d.Location()
	way := func() {
		w.must(ours.Prefetch(w.s, cuda.OnHost()))
		w.must(ours.Prefetch(w.s, there))
		w.must(w.s.Synchronize())
	}
	b.SetBytes(2 * n)
	for b.Loop() {
		way()
	}
	host, dev := driver.Location{Type: driver.LocationHost}, driver.Location{Type: driver.LocationDevice, ID: int32(there.ID)}
	x, y := pair(11, func() time.Duration { return took(way) }, func() time.Duration {
		return took(func() {
			w.ok(w.drv.MemPrefetchAsync(w.ctx.Handle, driver.Ptr(theirs.Ptr()), n, host, w.raw))
			w.ok(w.drv.MemPrefetchAsync(w.ctx.Handle, driver.Ptr(theirs.Ptr()), n, dev, w.raw))
			w.ok(w.drv.StreamSynchronize(w.ctx.Handle, w.raw))
		})
	})
	b.ReportMetric(float64(2*n)/x.Seconds()/1e9, "ours-GB/s")
	b.ReportMetric(float64(x)/float64(y), "ratio")
}

// BenchmarkBatch prefetches 1,000 ranges in one call, against 1,000 calls.
// Promised: at least 5 times faster, or the measurement that shows why the driver
// does not allow it: so it also tells what the driver's own calls take.
func BenchmarkBatch(b *testing.B) {
	const count = 1000
	for _, c := range []struct {
		name string
		size int
		// still: the pages are there already, so that only the calls cost.
		still bool
	}{{"4KiB, nothing to move", 4 << 10, true}, {"64KiB, nothing to move", 64 << 10, true}, {"4KiB", 4 << 10, false}, {"64KiB", 64 << 10, false}, {"1MiB", 1 << 20, false}} {
		b.Run(c.name, func(b *testing.B) {
			w := newBench(b)
			all := w.touched(2 * count * c.size)
			var parts []managed.Range
			var ptrs []driver.Ptr
			var sizes []uint64
			for i := range count {
				r, err := all.Slice(2*i*c.size, (2*i+1)*c.size) // with gaps, or the driver could join them
				w.must(err)
				parts, ptrs, sizes = append(parts, r), append(ptrs, driver.Ptr(r.Ptr())), append(sizes, uint64(c.size))
			}
			round, places := 0, []cuda.Location{cuda.OnHost(), w.d.Location()}
			next := func() (cuda.Location, driver.Location) {
				if round++; c.still {
					round = 1
				}
				l := places[round%2]
				return l, driver.Location{Type: driver.LocationType(l.Type), ID: int32(l.ID)}
			}
			timed := func(submit func(to cuda.Location, raw driver.Location)) func() time.Duration {
				return func() time.Duration {
					to, raw := next()
					return took(func() {
						submit(to, raw)
						w.must(w.s.Synchronize())
					})
				}
			}
			batch := timed(func(to cuda.Location, _ driver.Location) { w.must(managed.PrefetchBatch(w.s, parts, to)) })
			single := timed(func(to cuda.Location, _ driver.Location) {
				for _, r := range parts {
					w.must(r.Prefetch(w.s, to))
				}
			})
			rawBatch := timed(func(_ cuda.Location, to driver.Location) {
				w.ok(w.drv.MemPrefetchBatchAsync(w.ctx.Handle, ptrs, sizes, []driver.Location{to}, []uint64{0}, w.raw))
			})
			rawSingle := timed(func(_ cuda.Location, to driver.Location) {
				for i := range ptrs {
					w.ok(w.drv.MemPrefetchAsync(w.ctx.Handle, ptrs[i], sizes[i], to, w.raw))
				}
			})
			for b.Loop() {
				batch()
			}
			x, y := pair(21, batch, single)
			rx, ry := pair(21, rawBatch, rawSingle)
			b.ReportMetric(float64(x.Nanoseconds()), "batch-ns")
			b.ReportMetric(float64(y)/float64(x), "singles-over-batch")
			b.ReportMetric(float64(ry)/float64(rx), "driver-singles-over-batch")
			b.ReportMetric(float64(x)/float64(rx), "batch-over-driver")
		})
	}
}

// BenchmarkFirstTouch has the GPU read 512 MiB that the CPU has written: as it
// comes, by faults, and prefetched before.
func BenchmarkFirstTouch(b *testing.B) {
	const n = 512 << 20
	w := newBench(b)
	module, err := w.d.LoadModule(kernels.Basic)
	w.must(err)
	closed(b, module)
	sum, err := module.Kernel(kernels.Sum)
	w.must(err)
	data, total := w.touched(n), w.touched(8)
	read := func(prefetch bool) func() time.Duration {
		return func() time.Duration {
			w.must(data.Prefetch(w.s, cuda.OnHost())) // as if the CPU had written it now
			w.must(w.s.Synchronize())
			return took(func() {
				if prefetch {
					w.must(data.Prefetch(w.s, w.d.Location()))
				}
				w.must(sum.Launch(w.s, cuda.Threads(1<<20), data.Ptr(), uint64(n/4), total.Ptr()))
				w.must(w.s.Synchronize())
			})
		}
	}
	b.SetBytes(n)
	for b.Loop() {
		read(true)()
	}
	x, y := pair(9, read(true), read(false))
	b.ReportMetric(float64(n)/x.Seconds()/1e9, "prefetched-GB/s")
	b.ReportMetric(float64(n)/y.Seconds()/1e9, "first-touch-GB/s")
	b.ReportMetric(float64(y)/float64(x), "first-touch-over-prefetch")
}

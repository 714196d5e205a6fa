package bulk_test

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/stretchr/testify/require"
)

// deep is how copyDeep copies: with pieces of so many bytes, of which at most depth are in flight. It
// looks for the end of the oldest after each pause. late, if it is not 0, is how much of its time a
// piece that is alone in flight has had before the next is submitted, so that less waits behind it.
type deep struct {
	piece, depth int
	pause        time.Duration
	late         float64
}

func (d deep) String() string {
	s := fmt.Sprintf("%gMiBx%d", float64(d.piece)/mib, d.depth)
	if d.late > 0 {
		s += fmt.Sprintf("-late%g", d.late)
	}
	return s
}

func (r *rawMemory) copyDeep(b *testing.B, streams [2]driver.Stream, out bool, dev driver.Ptr, d deep) {
	drv, c, piece := r.g.ctx.System().Drv, r.g.ctx.Handle, d.piece
	var sent []driver.Event
	passed, shortest := time.Now(), time.Hour // when the last piece had passed, and the least time of one
	pass := func(most int) {
		for len(sent) > most {
			for drv.EventQuery(c, sent[0]) == driver.NotReady {
				host.Pause(d.pause)
			}
			require.Equal(b, driver.Success, drv.EventDestroy(c, sent[0]))
			sent = sent[1:]
			now := time.Now()
			shortest, passed = max(min(shortest, now.Sub(passed)), time.Duration(float64(piece)/60)), now // 60 GB/s: more than any link has
		}
	}
	for at := 0; at < len(r.mem); at += piece {
		pass(d.depth - 1)
		for d.late > 0 && len(sent) > 0 && time.Since(passed) < time.Duration(d.late*float64(shortest)) && shortest < time.Hour {
			host.Pause(d.pause)
		}
		n, s := uint64(min(piece, len(r.mem)-at)), streams[at/piece%2]
		var res driver.Result
		if out {
			res = drv.MemcpyDtoHAsync(c, unsafe.Pointer(&r.mem[at]), dev+driver.Ptr(at), n, s)
		} else {
			res = drv.MemcpyHtoDAsync(c, dev+driver.Ptr(at), unsafe.Pointer(&r.mem[at]), n, s)
		}
		require.Equal(b, driver.Success, res)
		e, res := drv.EventCreate(c, driver.EventDisableTiming)
		require.Equal(b, driver.Success, res)
		require.Equal(b, driver.Success, drv.EventRecord(c, e, s))
		sent = append(sent, e)
	}
	pass(0)
}

// smallCopies returns the times of copies of 4 KiB on a stream of their own while during runs.
func smallCopies(b *testing.B, g gpu, toHost bool, during func()) []time.Duration {
	small, page := g.memory(b, 4096), hostPage(b, g)
	done := make(chan struct{})
	go func() {
		defer close(done)
		during()
	}()
	var times []time.Duration
	for {
		select {
		case <-done:
			return times
		default:
		}
		start := time.Now()
		if toHost {
			require.NoError(b, g.stream.CopyToHost(page, cuda.Ptr(small)))
		} else {
			require.NoError(b, g.stream.CopyFromHost(cuda.Ptr(small), page))
		}
		require.NoError(b, g.stream.Synchronize())
		times = append(times, time.Since(start))
	}
}

func p99(times []time.Duration) float64 {
	slices.Sort(times)
	return float64(times[len(times)*99/100].Nanoseconds()) / 1e3
}

// BenchmarkDepth copies by raw calls with pieces and depths of several sizes: the rate, and the
// 99th percentile of a copy of 4 KiB on another stream meanwhile, which goes the same way or the
// other. It promises nothing, and decides how much an operation has in flight. What is sought: 100 µs
// beside copies out (same-p99-µs) at 0.98 of the rate with 32 pieces. A small copy waits for what is in
// flight, so that is 4 MiB at most: two pieces of 2 MiB, or larger ones of which the second is late.
func BenchmarkDepth(b *testing.B) {
	const n = 2 * gib
	g := roomFor(b, 2*n, n)
	dev, streams := g.memory(b, n), rawStreams(b, g)
	raw := newRaw(b, g, n)
	raw.pin(b)
	defer raw.free(b)
	for b.Loop() {
		raw.copy(b, streams, true, dev)
	}
	const µs = time.Microsecond
	for _, c := range []deep{
		{4 * mib, 32, 50 * µs, 0}, {4 * mib, 8, 50 * µs, 0}, {4 * mib, 4, 20 * µs, 0}, {4 * mib, 2, 5 * µs, 0},
		{2 * mib, 4, 10 * µs, 0}, {2 * mib, 8, 20 * µs, 0}, {mib, 4, 5 * µs, 0}, {mib, 8, 10 * µs, 0},
		{2 * mib, 2, 2 * µs, 0}, {2*mib + mib/2, 2, 2 * µs, 0}, {3 * mib, 2, 2 * µs, 0}, {mib, 2, 2 * µs, 0},
		{4 * mib, 2, 2 * µs, 0.7}, {3 * mib, 2, 2 * µs, 0.5}, {3 * mib, 2, 2 * µs, 0.7}, {2*mib + mib/2, 2, 2 * µs, 0.5},
	} {
		for way, out := range map[string]bool{"out": true, "in": false} {
			name := fmt.Sprintf("%v-%s-", c, way)
			copies := func() { raw.copyDeep(b, streams, out, dev, c) }
			t := turns(5, copies)
			rate(b, n, t[0], name[:len(name)-1])
			b.ReportMetric(p99(smallCopies(b, g, out, copies)), name+"same-p99-µs")
			b.ReportMetric(p99(smallCopies(b, g, !out, copies)), name+"other-p99-µs")
		}
	}
	for way, out := range map[string]bool{"out": true, "in": false} {
		all := []bulk.Segment{{Ptr: dev, Bytes: n}}
		kept, err := g.Reserve(b.Context(), n, true, bulk.Options{Op: "benchmark"})
		require.NoError(b, err)
		copies := func() {
			if out {
				require.NoError(b, kept.Out(b.Context(), all, 0, bulk.Options{Op: "benchmark"}))
			} else {
				require.NoError(b, kept.In(b.Context(), all, 0, bulk.Options{Op: "benchmark"}))
			}
		}
		b.ReportMetric(p99(smallCopies(b, g, out, copies)), "bulk-"+way+"-same-p99-µs")
		b.ReportMetric(p99(smallCopies(b, g, !out, copies)), "bulk-"+way+"-other-p99-µs")
		kept.Release()
	}
}

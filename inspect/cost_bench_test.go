package inspect_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// BenchmarkCost measures what a snapshot costs a program at work: requests that a pool
// serves from memory that it has, and a buffer that grows. It reports how much of the
// program's time each snapshot takes, which is also the cost in percent of a snapshot each
// second, divided by ten; and the longest operation with and without snapshots, beyond
// which no lock was held. Promised: less than 10 ms a snapshot, no lock for longer than 1 ms.
func BenchmarkCost(b *testing.B) {
	for _, on := range []struct {
		name string
		open func(tb testing.TB) *cuda.Device
	}{{"software", gputest.Software}, {"real", func(tb testing.TB) *cuda.Device { tb.Helper(); return gputest.RealWith(tb, cuda.Options{}) }}} {
		for _, blocks := range []int{1_000, 10_000, 100_000} {
			b.Run(fmt.Sprintf("%s/pool/%d", on.name, blocks), func(b *testing.B) {
				d := on.open(b)
				cost(b, d.System(), poolAtWork(b, d, blocks))
			})
		}
		b.Run(on.name+"/growth", func(b *testing.B) {
			d := on.open(b)
			cost(b, d.System(), growth(b, d))
		})
	}
}

// poolAtWork fills a pool with blocks and returns an operation on it.
func poolAtWork(b *testing.B, d *cuda.Device, blocks int) func() error {
	b.Helper()
	stream, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(b, err)
	p, err := pool.New(d, pool.Options{})
	require.NoError(b, err)
	live := make([]pool.Block, blocks)
	for i := range live {
		live[i], err = p.Alloc(pool.Request{Bytes: 512 << (i % 6), Stream: stream})
		require.NoError(b, err)
	}
	b.Cleanup(func() {
		for _, x := range live {
			require.NoError(b, p.Free(x))
		}
		require.NoError(b, p.Close())
		require.NoError(b, stream.Close())
	})
	i := 0
	return func() error {
		i = (i + 7919) % len(live)
		if err := p.Free(live[i]); err != nil {
			return err
		}
		live[i], err = p.Alloc(pool.Request{Bytes: 512 << (i % 6), Stream: stream})
		return err
	}
}

// growth returns an operation that grows a buffer by a chunk, or shrinks it.
func growth(b *testing.B, d *cuda.Device) func() error {
	b.Helper()
	buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 << 30, Chunks: vmm.FixedChunks(granule)})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, buffer.Close()) })
	chunks := 0
	return func() error {
		if chunks++; chunks == 256 {
			chunks = 0
			if err := buffer.Resize(nil, 0); err != nil {
				return err
			}
			return buffer.Clip()
		}
		return buffer.Resize(nil, chunks*granule)
	}
}

// cost measures the operation alone, and beside snapshots one after the other, in turn.
func cost(b *testing.B, sys *cuda.System, do func() error) {
	b.Helper()
	var took []time.Duration
	// window runs the operation until done, and returns how often and its longest time.
	window := func(done func(lasted time.Duration) bool) (n int, longest, lasted time.Duration) {
		runtime.GC()
		start := time.Now()
		for last := start; !done(lasted); n++ {
			if err := do(); err != nil {
				b.Fatal(err)
			}
			now := time.Now()
			longest, last = max(longest, now.Sub(last)), now
			lasted = now.Sub(start)
		}
		return n, longest, lasted
	}
	const least = 100 * time.Millisecond
	var lost []float64
	var alone, beside time.Duration
	for b.Loop() {
		n, longest, lasted := window(func(lasted time.Duration) bool { return lasted > least })
		alone = max(alone, longest)
		mean := float64(lasted) / float64(n)

		var stop, stopped atomic.Bool
		snapshots := make(chan []time.Duration)
		go func() {
			var all []time.Duration
			for !stop.Load() {
				if s, err := inspect.Take(sys); err == nil {
					all = append(all, s.Took)
				}
			}
			stopped.Store(true)
			snapshots <- all
		}()
		n, longest, lasted = window(func(lasted time.Duration) bool {
			stop.Store(lasted > least)
			return stopped.Load() // after a whole snapshot
		})
		all := <-snapshots
		beside = max(beside, longest)
		took = append(took, all...)
		lost = append(lost, (float64(lasted)-float64(n)*mean)/1e6/float64(len(all)))
	}
	slices.Sort(lost)
	slices.Sort(took)
	b.ReportMetric(lost[len(lost)/2], "ms-lost/snapshot")
	b.ReportMetric(float64(took[len(took)/2])/1e6, "ms-taken")
	b.ReportMetric(float64(beside)/1e3, "longest-µs")
	b.ReportMetric(float64(alone)/1e3, "longest-alone-µs")
	b.ReportMetric(0, "ns/op")
}

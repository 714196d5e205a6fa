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
	"github.com/cuvmm/cuvmm/internal/gputest"
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

// cost measures windows of the operation with and without snapshots, in turn.
func cost(b *testing.B, sys *cuda.System, do func() error) {
	b.Helper()
	var taken atomic.Int64
	var snapshots atomic.Bool
	took := make(chan time.Duration, 1<<12)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			if !snapshots.Load() {
				continue
			}
			s, err := inspect.Take(sys)
			if err != nil {
				panic(err)
			}
			select {
			case took <- s.Took:
			default:
			}
			taken.Add(1)
		}
	}()
	window := func(with bool) (mean time.Duration, longest time.Duration, n int, lasted time.Duration) {
		runtime.GC()
		snapshots.Store(with)
		defer snapshots.Store(false)
		start := time.Now()
		for last := start; lasted < 300*time.Millisecond; {
			if err := do(); err != nil {
				b.Fatal(err)
			}
			now := time.Now()
			longest, last = max(longest, now.Sub(last)), now
			lasted = now.Sub(start)
			n++
		}
		return lasted / time.Duration(n), longest, n, lasted
	}
	var lost []float64
	var alone, beside time.Duration
	for b.Loop() {
		mean, longest, _, _ := window(false)
		alone = max(alone, longest)
		before := taken.Load()
		_, longest, n, lasted := window(true)
		beside = max(beside, longest)
		if k := taken.Load() - before; k > 0 {
			lost = append(lost, float64(lasted-time.Duration(n)*mean)/1e6/float64(k))
		}
	}
	close(stop)
	<-stopped
	close(took)
	var times []time.Duration
	for t := range took {
		times = append(times, t)
	}
	if len(lost) == 0 {
		b.Fatal("no snapshot was taken")
	}
	slices.Sort(lost)
	slices.Sort(times)
	b.ReportMetric(lost[len(lost)/2], "ms-lost/snapshot")
	b.ReportMetric(float64(times[len(times)/2])/1e6, "ms-taken")
	b.ReportMetric(float64(beside)/1e3, "longest-µs")
	b.ReportMetric(float64(alone)/1e3, "longest-alone-µs")
	b.ReportMetric(0, "ns/op")
}

package pool_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/limits"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// BenchmarkSuspendWithHoles suspends and resumes a pool that is full of blocks of 1 MiB, and then
// with a hole behind each, in host memory that is pinned already. Beside it are raw pinned copies
// of the same blocks on two streams. Promised: with holes at most 0.6 of the time.
func BenchmarkSuspendWithHoles(b *testing.B) {
	const rounds, host = 5, 256 * mib
	for _, n := range []int{1 << 30, 16 << 30} {
		b.Run(fmt.Sprintf("%dGiB", n>>30), func(b *testing.B) {
			d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
			h, _ := limits.OfHost()
			if err := h.Check(uint64(n + host)); err != nil {
				b.Skip(err)
			}
			if free, _, err := d.MemoryInfo(); err == nil && free < n+1<<30 {
				b.Skipf("the device has %d MiB free", free>>20)
			}
			p, err := pool.New(d, pool.Options{Decay: -1})
			require.NoError(b, err)
			streams := [2]*cuda.Stream{stream(b, d), stream(b, d)}
			var blocks []pool.Block
			for range n / mib {
				blocks = append(blocks, alloc(b, p, streams[0], mib))
			}
			require.NoError(b, streams[0].Synchronize())
			ctx, err := core.ContextOf("bench", d)
			require.NoError(b, err)
			bulk.Of(ctx).Retain(uint64(n))
			staging, err := d.NewHostBuffer(host)
			require.NoError(b, err)
			raw := func(way func(s *cuda.Stream, part cuda.HostSlice, at cuda.Ptr) error) time.Duration {
				start := time.Now()
				for i, block := range blocks {
					in := i * mib % host
					part, err := staging.Slice(in, in+mib)
					require.NoError(b, err)
					require.NoError(b, way(streams[i%2], part, block.Ptr()))
				}
				for _, s := range streams {
					require.NoError(b, s.Synchronize())
				}
				return time.Since(start)
			}
			cycle := func() (out, in time.Duration) {
				start := time.Now()
				z, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{}, p)
				out = time.Since(start)
				require.NoError(b, err)
				start = time.Now()
				require.NoError(b, z.Resume(context.Background()))
				return out, time.Since(start)
			}
			middle := func(all []time.Duration) time.Duration { return slices.Sorted(slices.Values(all))[len(all)/2] }
			measure := func(name string) (out, in time.Duration) {
				var outs, ins, rawOut, rawIn []time.Duration
				cycle() // pins
				for range rounds {
					rawOut = append(rawOut, raw(func(s *cuda.Stream, part cuda.HostSlice, at cuda.Ptr) error { return s.CopyToHost(part, at) }))
					rawIn = append(rawIn, raw(func(s *cuda.Stream, part cuda.HostSlice, at cuda.Ptr) error { return s.CopyFromHost(at, part) }))
					o, i := cycle()
					outs, ins = append(outs, o), append(ins, i)
				}
				b.ReportMetric(float64(len(blocks))*mib/middle(outs).Seconds()/1e9, name+"-out-GB/s")
				b.ReportMetric(float64(len(blocks))*mib/middle(ins).Seconds()/1e9, name+"-in-GB/s")
				b.ReportMetric(float64(middle(rawOut))/float64(middle(outs)), name+"-out-raw-ratio")
				b.ReportMetric(float64(middle(rawIn))/float64(middle(ins)), name+"-in-raw-ratio")
				return middle(outs), middle(ins)
			}
			for b.Loop() {
				cycle()
			}
			fullOut, fullIn := measure("full")
			for i := len(blocks) - 1; i > 0; i -= 2 {
				free(b, p, blocks[i])
				blocks = slices.Delete(blocks, i, i+1)
			}
			holesOut, holesIn := measure("holes")
			b.ReportMetric(float64(holesOut)/float64(fullOut), "holes/full-out")
			b.ReportMetric(float64(holesIn)/float64(fullIn), "holes/full-in")
			for _, block := range blocks {
				free(b, p, block)
			}
			require.NoError(b, p.Close())
			require.NoError(b, staging.Close())
		})
	}
}

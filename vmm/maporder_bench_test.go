package vmm_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// BenchmarkMapInRandomOrder maps n pages of a range in random order, and unmaps them in
// another. Most of it is the software driver, whose own tables grow; BenchmarkTable of
// internal/vrange has the part of the range.
func BenchmarkMapInRandomOrder(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m, err := sim.New(sim.Options{})
			require.NoError(b, err)
			sys, err := m.OpenOwned(cuda.Options{NamedStreamsOnly: true})
			require.NoError(b, err)
			d := sys.Devices()[0]
			r, err := vmm.Reserve(d, n*2*mib, vmm.ReserveOptions{})
			require.NoError(b, err)
			page, err := vmm.Create(d, 2*mib, vmm.Properties{})
			require.NoError(b, err)
			mapped := make([]*vmm.Mapping, n)
			var maps, unmaps time.Duration
			for b.Loop() {
				order, back := rand.New(rand.NewPCG(1, 2)).Perm(n), rand.New(rand.NewPCG(3, 4)).Perm(n)
				start := time.Now()
				for _, i := range order {
					if mapped[i], err = r.Map(i*2*mib, page); err != nil {
						b.Fatal(err)
					}
				}
				maps += time.Since(start)
				start = time.Now()
				for _, i := range back {
					if err := mapped[i].Close(); err != nil {
						b.Fatal(err)
					}
				}
				unmaps += time.Since(start)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(maps.Nanoseconds())/float64(b.N*n), "map-ns/page")
			b.ReportMetric(float64(unmaps.Nanoseconds())/float64(b.N*n), "unmap-ns/page")
			require.NoError(b, page.Close())
			require.NoError(b, r.Close())
			require.NoError(b, sys.Close())
		})
	}
}

// BenchmarkAppendCommitted appends to memory that a buffer has already.
func BenchmarkAppendCommitted(b *testing.B) {
	bench(b, func(b *testing.B, d *cuda.Device, s *cuda.Stream) {
		buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
		require.NoError(b, err)
		require.NoError(b, buf.Grow(64*mib))
		b.ReportAllocs()
		n := 0
		for b.Loop() {
			if _, err := buf.AppendUndefined(64); err != nil {
				b.Fatal(err)
			}
			if n++; n == 64*mib/64 {
				n = 0
				require.NoError(b, buf.Resize(s, 0))
			}
		}
		require.NoError(b, buf.Close())
	})
}

// BenchmarkGrowAndClip makes memory and gives it back.
func BenchmarkGrowAndClip(b *testing.B) {
	bench(b, func(b *testing.B, d *cuda.Device, s *cuda.Stream) {
		buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(b, err)
		b.ReportAllocs()
		for b.Loop() {
			if err := buf.Grow(8 * mib); err != nil {
				b.Fatal(err)
			}
			if err := buf.Clip(); err != nil {
				b.Fatal(err)
			}
		}
		require.NoError(b, buf.Close())
	})
}

// bench runs a benchmark on a machine of its own.
func bench(b *testing.B, f func(b *testing.B, d *cuda.Device, s *cuda.Stream)) {
	m, err := sim.New(sim.Options{})
	require.NoError(b, err)
	sys, err := m.OpenOwned(cuda.Options{NamedStreamsOnly: true})
	require.NoError(b, err)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(b, err)
	f(b, d, s)
	require.NoError(b, s.Close())
	require.NoError(b, sys.Close())
}

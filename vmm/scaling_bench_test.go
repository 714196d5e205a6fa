package vmm_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// BenchmarkBesidePending reserves and closes beside n objects that were closed and
// wait for a stream that stands still.
func BenchmarkBesidePending(b *testing.B) {
	for _, n := range []int{0, 10, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m, err := sim.New(sim.Options{})
			require.NoError(b, err)
			sys, err := m.OpenOwned(cuda.Options{})
			require.NoError(b, err)
			d := sys.Devices()[0]
			s, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(b, err)
			m.Hold(s.Handle())
			in := core.SystemOf(d)
			for range n {
				f, err := in.NewFence("bench", []*core.Stream{core.StreamOf(s)})
				require.NoError(b, err)
				in.Reclaim(f, nil, func() error { return nil })
			}
			time.Sleep(100 * time.Millisecond) // the reclaimer has taken them in
			for b.Loop() {
				r, err := vmm.Reserve(d, 2<<20, vmm.ReserveOptions{})
				if err == nil {
					err = r.Close()
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			m.Release(s.Handle())
			require.NoError(b, sys.Drain(b.Context()))
			require.NoError(b, s.Close())
			require.NoError(b, sys.Close())
		})
	}
}

// BenchmarkCloseBesideStreams closes a buffer beside n idle streams, and counts the
// calls of the driver.
func BenchmarkCloseBesideStreams(b *testing.B) {
	for _, n := range []int{0, 10, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m, err := sim.New(sim.Options{})
			require.NoError(b, err)
			sys, err := m.OpenOwned(cuda.Options{})
			require.NoError(b, err)
			d := sys.Devices()[0]
			all := make([]*cuda.Stream, n)
			for i := range all {
				all[i], err = d.NewStream(cuda.StreamOptions{})
				require.NoError(b, err)
			}
			calls, rounds := 0, 0
			for b.Loop() {
				b.StopTimer()
				buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 << 20})
				if err == nil {
					err = buffer.Grow(100)
				}
				m.ResetCounts()
				b.StartTimer()
				if err == nil {
					err = buffer.Close()
				}
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				for _, k := range m.Counts() {
					calls += k
				}
				rounds++
				b.StartTimer()
			}
			b.ReportMetric(float64(calls)/float64(rounds), "calls/op")
			for _, s := range all {
				require.NoError(b, s.Close())
			}
			require.NoError(b, sys.Close())
		})
	}
}

//go:build linux

package publish_test

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// BenchmarkSuspendingWithFollowers suspends memory that three followers in processes of their own
// have mapped, and drops it: out-µs is Suspend, and back-µs is from Resume until each follower has
// it again, in order. alone-out-µs and alone-back-µs are those of as much memory that is not
// published, taken in turn in the same run.
func BenchmarkSuspendingWithFollowers(b *testing.B) {
	b.Run("software", func(b *testing.B) {
		m, s := sim.Open(b)
		peertest.WithCosts(m)
		benchSuspending(b, s.Devices()[0], "software", 64*mib)
	})
	b.Run("real", func(b *testing.B) {
		benchSuspending(b, gputest.RealWith(b, cuda.Options{}), "real", 1024*mib)
	})
}

func benchSuspending(b *testing.B, d *cuda.Device, which string, size int) {
	r := newBenchReaders(b, d, which, size)
	defer r.end()
	alone, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: size, Chunks: vmm.FixedChunks(32 * mib)})
	require.NoError(b, err)
	defer func() { require.NoError(b, alone.Close()) }()
	require.NoError(b, alone.Resize(nil, size))
	ctx := context.Background()
	round := func(a *vmm.Array[byte], announce func() error, seen func() int64) (out, back time.Duration) {
		time.Sleep(time.Millisecond) // the readers wait by now
		start := peertest.Monotonic()
		s, err := vmm.Suspend(ctx, vmm.SuspendOptions{Keep: vmm.Drop}, a)
		require.NoError(b, err)
		asleep := peertest.Monotonic()
		require.NoError(b, s.Resume(ctx))
		require.NoError(b, announce())
		return time.Duration(asleep - start), time.Duration(seen() - asleep)
	}
	announce := func() error { return r.p.Announce(ctx, size, r.s) } // since the bytes were dropped
	r.seen()
	for b.Loop() {
		round(r.array, announce, r.seen)
	}
	var times [4][]time.Duration
	for range 31 {
		for i, of := range []*vmm.Array[byte]{r.array, alone} {
			announce, seen := announce, r.seen
			if of == alone {
				announce, seen = func() error { return nil }, peertest.Monotonic
			}
			out, back := round(of, announce, seen)
			times[2*i], times[2*i+1] = append(times[2*i], out), append(times[2*i+1], back)
		}
	}
	b.ReportMetric(0, "ns/op")
	for i, name := range []string{"out-µs", "back-µs", "alone-out-µs", "alone-back-µs"} {
		b.ReportMetric(micros(middle(times[i])), name)
	}
}

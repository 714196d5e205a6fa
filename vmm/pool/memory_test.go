package pool_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/poolreplay"
	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// With the GPU behind the program, as in life, the pool holds little more than was
// requested: on programs that were recorded, and on generated ones. That is 1.10 times
// what was requested at most, and differs by 0.03 from run to run.
func TestHoldsLittleWithTheGPUBehind(t *testing.T) {
	if thorough {
		t.Skip("checking everything after each operation, full traces take too long")
	}
	patient(t) // so that a slow machine costs time and no memory
	programs := recorded(t, "testdata/traces/*.gz")
	require.Len(t, programs, 5)
	for _, tr := range programs {
		holdsAtMost(t, tr, 1.15)
	}
	for _, g := range tracegen.Generators() {
		holdsAtMost(t, g.Make(tracegen.Config{Seed: 8}), 1.15)
	}
}

func holdsAtMost(t *testing.T, tr *trace.Trace, times float64) {
	t.Run(tr.Name, func(t *testing.T) {
		t.Parallel()
		_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 256 << 30}}})
		want, err := tr.Summary()
		require.NoError(t, err)
		p, err := pool.New(d, pool.Options{})
		require.NoError(t, err)
		defer func() { require.NoError(t, p.Close()) }()
		r := &poolreplay.Replayer{Pool: p, Work: true}
		for range tr.Streams {
			r.Streams = append(r.Streams, stream(t, d))
		}
		_, err = trace.Replay(tr, r)
		require.NoError(t, err)
		require.NoError(t, r.Sync())
		held := float64(p.Stats().PeakReserved) / float64(want.PeakBytes)
		t.Logf("held %.3f times what was requested", held)
		require.LessOrEqual(t, held, times)
	})
}

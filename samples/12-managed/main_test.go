package main

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

var small = []string{"-layers", "2", "-mib", "1"}

func TestSampleShowsEveryPlacement(t *testing.T) {
	for seed := range uint64(4) {
		_, sys := sim.Open(t, sim.Options{Seed: seed, Poison: true})
		var out strings.Builder
		require.NoError(t, sample.Test(t.Context(), sys, small, nil, &out))
		for _, s := range []string{
			"placement  none\n  before   layer 0 [........]  layer 1 [........]  scratch [........]\n" +
				"  after    layer 0 [DDDDDDDD]  layer 1 [DDDDDDDD]  scratch [HHHHHHHH]\n",
			"placement  GPU first, CPU mapped\n  before   layer 0 [DDDDDDDD]",
			"placement  read mostly\n  before   layer 0 [rrrrrrrr]",
			"placement  a callback: halves\n  before   layer 0 [hhhh....]",
			"verified 3 is the sum of the layers, which have 2 MiB",
		} {
			require.Contains(t, out.String(), s)
		}
	}
}

// On an older driver there is no discard, and the sample says so.
func TestSampleOnAnOlderDriver(t *testing.T) {
	_, sys := sim.Open(t, sim.OlderDriver(12010))
	var out strings.Builder
	require.NoError(t, sample.Test(t.Context(), sys, small, nil, &out))
	require.Contains(t, out.String(), "needs a driver for CUDA 13.0")
	require.Equal(t, 4, strings.Count(out.String(), "verified"))
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemAllocManaged": 3, "cuMemAdvise": 0, "cuMemPrefetchBatchAsync": 1, "cuMemRangeGetAttribute": 5,
		"cuMemRangeGetAttributes": 7, "cuMemDiscardAndPrefetchBatchAsync": 0, "cuLaunchKernel": 1, "cuMemsetD8Async": 0, "cuStreamCreate": 1} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, small, nil, io.Discard), call)
			require.NoError(t, sys.Drain(t.Context()))
			require.Empty(t, sys.Live())
		})
	}
}

func TestSampleRefusesBadInput(t *testing.T) {
	for _, args := range [][]string{{"-layers", "0"}, {"-layers", "101"}, {"-mib", "0"}, {"-mib", "2000"}} {
		require.ErrorContains(t, sample.Test(t.Context(), nil, append(args, "-driver", "sim"), nil, io.Discard), "use 1 to 100 layers, of 1 to 1024 MiB")
	}
}

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

var small = model{layers: 2, elements: 64 << 10}

func TestSampleShowsEveryPlacement(t *testing.T) {
	for seed := range uint64(4) {
		_, sys := sim.Open(t, sim.Options{Seed: seed, Poison: true})
		var out strings.Builder
		require.NoError(t, everyPlacement(sys.Devices()[0], small, &out))
		for _, s := range []string{
			"placement  none\n  before     layer 0 [........]  layer 1 [........]  scratch [........]\n" +
				"  after      layer 0 [DDDDDDDD]  layer 1 [DDDDDDDD]  scratch [HHHHHHHH]\n",
			"placement  GPU first, CPU mapped\n  before     layer 0 [DDDDDDDD]",
			"placement  read mostly\n  before     layer 0 [rrrrrrrr]",
			"placement  a callback: halves\n  before     layer 0 [hhhh....]",
			"verified   3 is the sum of the layers",
		} {
			require.Contains(t, out.String(), s)
		}
	}
}

// On an older driver there is no discard, and the sample says so.
func TestSampleOnAnOlderDriver(t *testing.T) {
	_, sys := sim.Open(t, sim.OlderDriver(12010))
	var out strings.Builder
	require.NoError(t, everyPlacement(sys.Devices()[0], small, &out))
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
			require.ErrorContains(t, everyPlacement(sys.Devices()[0], small, &strings.Builder{}), call)
			require.NoError(t, sys.Drain(t.Context()))
			require.Empty(t, sys.Live())
		})
	}
}

func TestSampleTakesItsFlags(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run([]string{"-driver", "sim", "-layers", "1", "-mib", "1"}, &out))
	for _, s := range []string{"software driver", "device 0 (Software GPU)", "verified"} {
		require.Contains(t, out.String(), s)
	}
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-driver", "gpu"}, `use "auto", "real" or "sim"`},
		{[]string{"-layers", "0"}, "1 to 100"},
		{[]string{"-mib", "2000"}, "1 to 1024"},
		{[]string{"-driver", "sim", "file"}, `argument "file"`},
		{[]string{"-help"}, "help requested"},
	} {
		require.ErrorContains(t, run(row.args, &strings.Builder{}), row.says)
	}
}

// What cannot be written is an error.
func TestSampleNoticesThatNobodyReadsIt(t *testing.T) {
	out, err := os.Open(os.DevNull) // for reading alone
	require.NoError(t, err)
	defer out.Close()
	require.ErrorContains(t, run([]string{"-driver", "sim"}, out), "write "+os.DevNull)
}

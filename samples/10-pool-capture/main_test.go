package main

import (
	"os"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

func TestSampleGivesTheGraphsMemoryBack(t *testing.T) {
	for seed := range uint64(8) {
		_, sys := sim.Open(t, sim.Options{Seed: seed, Poison: true})
		var out strings.Builder
		require.NoError(t, replay(sys.Devices()[0], 2, &out))
		require.Contains(t, out.String(), "captured   1 request of 8 MiB at 0x")
		require.Contains(t, out.String(), "replays    2, beside others, verified")
		require.Contains(t, out.String(), "destroyed  and 2 MiB: the graph's memory came back")
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemCreate": 0, "cuMemAddressReserve": 0, "cuMemMap": 1, "cuMemSetAccess": 0,
		"cuStreamCreate": 1, "cuStreamBeginCapture": 0, "cuGraphInstantiateWithFlags": 0, "cuGraphLaunch": 1, "cuMemcpyDtoHAsync": 1, "cuMemsetD8Async": 2} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, replay(sys.Devices()[0], 3, &strings.Builder{}), call)
			require.Empty(t, sys.Live())
		})
	}
}

func TestSampleTakesItsFlags(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run([]string{"-driver", "sim", "-replays", "1"}, &out))
	for _, s := range []string{"software driver", "device 0 (Software GPU)", "replays    1,"} {
		require.Contains(t, out.String(), s)
	}
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-driver", "gpu"}, `use "auto", "real" or "sim"`},
		{[]string{"-fast"}, "not defined: -fast"},
		{[]string{"-replays", "0"}, "at least 1"},
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

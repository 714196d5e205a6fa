package main

import (
	"encoding/binary"
	"os"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

func TestSampleReadsWhatItWroteThroughTheOtherAddress(t *testing.T) {
	for seed := range uint64(8) {
		_, sys := sim.Open(t, sim.Options{Seed: seed, Poison: true})
		var out strings.Builder
		require.NoError(t, alias(sys.Devices()[0], &out))
		require.Contains(t, out.String(), "memory     2 MiB, at 0x")
		require.Equal(t, 2, strings.Count(out.String(), "verified"))
	}
}

func TestSampleNoticesWrongElements(t *testing.T) {
	got := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 5), 6)
	require.NoError(t, compare(got, 5))
	require.EqualError(t, compare(got, 4), "element 0 is 5, not 4")
	binary.NativeEndian.PutUint32(got[4:], 9)
	require.EqualError(t, compare(got, 5), "element 1 is 9, not 6")
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemCreate": 0, "cuMemAddressReserve": 0, "cuMemMap": 1, "cuMemSetAccess": 0,
		"cuModuleLoadData": 0, "cuModuleGetFunction": 1, "cuStreamCreate": 1, "cuEventRecord": 0, "cuStreamWaitEvent": 0,
		"cuLaunchKernel": 1, "cuMemcpyDtoHAsync": 0} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, alias(sys.Devices()[0], &strings.Builder{}), call)
			require.Empty(t, sys.Live())
		})
	}
}

func TestSampleTakesItsFlags(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run([]string{"-driver", "sim"}, &out))
	for _, s := range []string{"software driver", "device 0 (Software GPU)", "verified"} {
		require.Contains(t, out.String(), s)
	}
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-driver", "gpu"}, `use "auto", "real" or "sim"`},
		{[]string{"-fast"}, "not defined: -fast"},
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

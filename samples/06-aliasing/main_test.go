package main

import (
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

func TestSampleReadsWhatItWroteThroughTheOtherAddress(t *testing.T) {
	for seed := range uint64(8) {
		_, sys := sim.Open(t, sim.Options{Seed: seed, Poison: true})
		var out strings.Builder
		require.NoError(t, sample.Test(t.Context(), sys, nil, nil, &out))
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
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

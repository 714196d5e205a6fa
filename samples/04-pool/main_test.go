package main

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

func TestSampleReusesAndStitches(t *testing.T) {
	for seed := range uint64(8) {
		m, sys := sim.Open(t, sim.Options{Seed: seed, Poison: true})
		var out strings.Builder
		require.NoError(t, sample.Test(t.Context(), sys, nil, nil, &out))
		for _, s := range []string{"next block: true", "4 blocks of 8 MiB, in 32 MiB", "still in 32 MiB", "verified   every block", "32 MiB went back to the driver, 0 MiB stay"} {
			require.Contains(t, out.String(), s)
		}
		require.Zero(t, m.Count("cuMemcpyDtoDAsync"), "nothing is copied")
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemCreate": 2, "cuMemAddressReserve": 0, "cuMemMap": 3, "cuMemSetAccess": 2,
		"cuStreamCreate": 0, "cuMemsetD8Async": 5, "cuMemcpyDtoHAsync": 2} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

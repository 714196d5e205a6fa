package main

import (
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

func TestSampleRunsItsKernel(t *testing.T) {
	for _, n := range []string{"1", "255", "257", "100000"} {
		_, sys := sim.Open(t, sim.Options{Poison: true})
		var out strings.Builder
		require.NoError(t, sample.Test(t.Context(), sys, []string{"-n", n}, nil, &out))
		require.Contains(t, out.String(), "blocks of 256 threads")
		require.Contains(t, out.String(), "verified   y = 2x + y in "+n+" elements")
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuModuleLoadData": 0, "cuModuleGetFunction": 0, "cuStreamCreate": 0, "cuMemAddressReserve": 1,
		"cuMemCreate": 1, "cuMemcpyHtoDAsync": 1, "cuLaunchKernel": 0, "cuMemcpyDtoHAsync": 0} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

func TestSampleRefusesBadInput(t *testing.T) {
	require.ErrorContains(t, sample.Test(t.Context(), nil, []string{"-n", "0"}, nil, io.Discard), "use 1 to")
	require.ErrorContains(t, sample.Test(t.Context(), nil, []string{"-n", "99999999999"}, nil, io.Discard), "use 1 to")
}

// On the driver that this machine has, the PTX gives the same sums.
func TestSampleOnThisMachine(t *testing.T) {
	if os.Getenv("CUVMM_REQUIRE_GPU") == "" {
		t.Skip("set CUVMM_REQUIRE_GPU=1 to run on this machine's GPU")
	}
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "real"}, nil, io.Discard))
}

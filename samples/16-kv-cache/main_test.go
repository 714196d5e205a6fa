package main

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

func TestSequencesShareTheirPrompt(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{Poison: true})
	var out strings.Builder
	require.NoError(t, sample.Test(t.Context(), sys, nil, nil, &out))
	for _, s := range []string{"20000 tokens in 10 MiB", "4 of 20050 tokens", "18 MiB with the prompt, of which each sequence shares 8 MiB; apart they would have 50 MiB",
		"gave back 2 MiB", "verified   every sequence"} {
		require.Contains(t, out.String(), s)
	}
}

func TestPromptsOfAnyLength(t *testing.T) {
	for _, length := range []string{"1", "4096", "4097"} {
		_, sys := sim.Open(t)
		require.NoError(t, sample.Test(t.Context(), sys, []string{"-prompt", length}, nil, io.Discard), length)
	}
	for _, length := range []string{"0", "9999999"} {
		require.ErrorContains(t, sample.Test(t.Context(), nil, []string{"-driver", "sim", "-prompt", length}, nil, io.Discard), "use 1 to")
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemCreate": 6, "cuMemAddressReserve": 3, "cuMemMap": 8, "cuMemSetAccess": 2,
		"cuStreamCreate": 0, "cuMemcpyDtoDAsync": 1, "cuMemcpyHtoDAsync": 20} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

package main

import (
	"context"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

func TestSampleGivesTheGraphsMemoryBack(t *testing.T) {
	for seed := range uint64(8) {
		_, sys := sim.Open(t, sim.Options{Seed: seed, Poison: true})
		var out strings.Builder
		require.NoError(t, sample.Test(t.Context(), sys, []string{"-replays", "2"}, nil, &out))
		for _, s := range []string{"captured   1 request of 8 MiB at 0x", "replays    2, beside another stream, verified",
			"trimmed    the pool keeps 10 MiB", "destroyed  and 2 MiB: the graph's memory came back"} {
			require.Contains(t, out.String(), s)
		}
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemCreate": 0, "cuMemAddressReserve": 0, "cuMemMap": 1, "cuMemSetAccess": 0,
		"cuStreamCreate": 1, "cuStreamBeginCapture": 0, "cuGraphInstantiateWithFlags": 0, "cuGraphLaunch": 1, "cuMemcpyDtoHAsync": 1, "cuMemsetD8Async": 2} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

func TestSampleEndsWithAnInterrupt(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	_, sys := sim.Open(t)
	err := sample.Test(ctx, sys, nil, nil, io.Discard)
	require.ErrorContains(t, err, "interrupted after 0 of 3 replays")
	require.ErrorIs(t, err, context.Canceled)
}

func TestSampleRefusesBadInput(t *testing.T) {
	require.ErrorContains(t, sample.Test(t.Context(), nil, []string{"-driver", "sim", "-replays", "0"}, nil, io.Discard), "at least 1")
}

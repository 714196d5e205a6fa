package main

import (
	"io"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

func TestSampleComputesTheNormInBothWays(t *testing.T) {
	for seed := range uint64(4) {
		o := sim.WithMulticast(4)
		o.Seed, o.Poison = seed, true
		m, sys := sim.Open(t, o)
		var out strings.Builder
		require.NoError(t, sample.Test(t.Context(), sys, []string{"-n", "1000"}, nil, &out))
		for _, s := range []string{
			"vector     of length 4000",
			"copies     each device sends 24 bytes and receives 24",
			"multicast  each device sends 36 bytes and receives 24",
			"verified   every device has the norm, the same in both ways",
		} {
			require.Contains(t, out.String(), s)
		}
		require.Equal(t, 12, m.Count("cuMemcpyDtoDAsync"), "3 for each device")
		require.Empty(t, m.Fault())
	}
}

func TestSampleWithoutMulticastCopies(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	var out strings.Builder
	require.NoError(t, sample.Test(t.Context(), sys, []string{"-n", "100"}, nil, &out))
	require.Contains(t, out.String(), "multicast  not used: ")
	require.Contains(t, out.String(), "verified   every device has the norm\n")
}

func TestSampleNoticesWrongNorms(t *testing.T) {
	require.NoError(t, check([]float64{3, 3}, 3))
	require.EqualError(t, check([]float64{3, 4}, 3), "device 1 has the norm 4, not 3")
	require.Error(t, check([]float64{math.NaN()}, 3))
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemCreate": 4, "cuMemAddressReserve": 9, "cuMemMap": 8, "cuMemSetAccess": 5,
		"cuModuleLoadData": 4, "cuModuleGetFunction": 10, "cuStreamCreate": 1, "cuLaunchKernel": 10, "cuMemcpyDtoDAsync": 3,
		"cuMulticastCreate": 0, "cuMulticastAddDevice": 2, "cuMulticastBindMem_v1": 1} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t, sim.WithMulticast(4))
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, []string{"-n", "100"}, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

// Without a GPU the sample has four devices.
func TestSampleOnTheSoftwareDriver(t *testing.T) {
	var out strings.Builder
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim", "-n", "5000"}, nil, &out))
	for _, s := range []string{"software driver", "length 20000", "same in both ways"} {
		require.Contains(t, out.String(), s)
	}
	require.ErrorContains(t, sample.Test(t.Context(), nil, []string{"-driver", "sim", "-n", "0"}, nil, io.Discard), "1 to")
}

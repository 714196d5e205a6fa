package main

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

func TestSampleAddsOnEveryMachine(t *testing.T) {
	for _, row := range []struct {
		what    string
		devices []sim.DeviceOptions
		grants  int
		says    []string
	}{
		{"one device", []sim.DeviceOptions{{}}, 1, []string{
			"12 MiB", "every device to everything", "device 0 (Software GPU): chunks [0 1] of each vector", "in 1048576 elements"}},
		{"three devices", make([]sim.DeviceOptions, 3), 1, []string{
			"36 MiB", "device 0 (Software GPU): chunks [0 3]", "device 2 (Software GPU): chunks [2 5]", "in 3145728 elements"}},
		{"two that cannot reach each other", []sim.DeviceOptions{{}, {Unreachable: []int{0}}}, 12, []string{
			"each device to what it owns", "device 1 (Software GPU): chunks [1 3]", "in 2097152 elements"}},
		{"two of different granularity", []sim.DeviceOptions{{}, {Granularity: 4 << 20}}, 1, []string{"48 MiB", "verified"}},
	} {
		t.Run(row.what, func(t *testing.T) {
			m, sys := sim.Open(t, sim.Options{Devices: row.devices, Poison: true})
			var out strings.Builder
			require.NoError(t, sample.Test(t.Context(), sys, nil, nil, &out))
			require.Equal(t, row.grants, m.Count("cuMemSetAccess"))
			for _, s := range row.says {
				require.Contains(t, out.String(), s)
			}
		})
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemAddressReserve": 0, "cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 0,
		"cuModuleLoadData": 1, "cuModuleGetFunction": 1, "cuStreamCreate": 1, "cuMemcpyHtoDAsync": 1, "cuLaunchKernel": 1,
		"cuMemcpyDtoHAsync": 1} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

// Without a GPU the sample has two devices.
func TestSampleOnTheSoftwareDriver(t *testing.T) {
	var out strings.Builder
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out))
	for _, s := range []string{"software driver", "24 MiB", "device 1 (Software GPU): chunks [1 3]", "verified   c = a + b"} {
		require.Contains(t, out.String(), s)
	}
}

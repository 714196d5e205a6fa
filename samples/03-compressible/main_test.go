package main

import (
	"os"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// genericCompression is the number of the device attribute.
const genericCompression = 107

func TestSampleTakesEitherAnswer(t *testing.T) {
	for _, row := range []struct {
		what string
		can  int
		says []string
	}{
		{"granted", 1, []string{"can compress: true", "asked      32 MiB, compressible: true", "granted    compressible: true"}},
		{"refused", 0, []string{"can compress: false", "asked      32 MiB, compressible: true", "granted    compressible: false", "plain memory"}},
	} {
		t.Run(row.what, func(t *testing.T) {
			_, sys := sim.Open(t, sim.Options{Poison: true, Devices: []sim.DeviceOptions{{Attributes: map[int]int{genericCompression: row.can}}}})
			var out strings.Builder
			require.NoError(t, compressible(sys.Devices()[0], &out))
			for _, s := range append(row.says, "verified   8388608 words") {
				require.Contains(t, out.String(), s)
			}
		})
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for _, call := range []string{"cuMemCreate", "cuMemGetAllocationPropertiesFromHandle", "cuMemAddressReserve", "cuMemMap",
		"cuMemSetAccess", "cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreate", "cuLaunchKernel", "cuMemcpyDtoHAsync"} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, Result: 999})
			require.ErrorContains(t, compressible(sys.Devices()[0], &strings.Builder{}), call)
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

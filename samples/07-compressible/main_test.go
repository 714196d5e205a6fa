package main

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

// genericCompression is the number of the device attribute.
const genericCompression = 107

func TestSampleWorksWithAndWithoutCompression(t *testing.T) {
	for _, row := range []struct {
		what string
		can  int
		says []string
	}{
		{"granted", 1, []string{"supported  true", "requested  32 MiB, compressible: true", "granted    compressible: true"}},
		{"refused", 0, []string{"supported  false", "requested  32 MiB, compressible: true", "granted    compressible: false", "plain memory"}},
	} {
		t.Run(row.what, func(t *testing.T) {
			_, sys := sim.Open(t, sim.Options{Poison: true, Devices: []sim.DeviceOptions{{Attributes: map[int]int{genericCompression: row.can}}}})
			var out strings.Builder
			require.NoError(t, sample.Test(t.Context(), sys, nil, nil, &out))
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
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

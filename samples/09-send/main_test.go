//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// The sample runs itself again as the receiver, which in a test is the test.
func TestMain(m *testing.M) {
	if app.Started() {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestSampleSendsToAnotherProcess(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out))
	require.Regexp(t, fmt.Sprintf(`sender     process %d, 1000 elements at 0x`, os.Getpid()), out.String())
	require.Regexp(t, `receiver   process \d+, 1000 elements at 0x`, out.String())
	require.NotContains(t, out.String(), fmt.Sprintf("receiver   process %d,", os.Getpid()))
	require.Contains(t, out.String(), "verified   the other process doubled all 1000 elements")
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for _, call := range []string{"cuMemAddressReserve", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemcpyDtoHAsync"} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, []string{"-driver", "sim"}, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

// On the driver that this machine has, the other process gets the memory too.
func TestSampleOnThisMachine(t *testing.T) {
	if os.Getenv("CUVMM_REQUIRE_GPU") == "" {
		t.Skip("set CUVMM_REQUIRE_GPU=1 to run on this machine's GPU")
	}
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "real"}, nil, io.Discard))
}

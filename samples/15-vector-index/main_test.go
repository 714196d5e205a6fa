//go:build linux

package main

import (
	"bytes"
	"io"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// The sample runs itself again as its readers, which in a test are the test.
func TestMain(m *testing.M) {
	if app.Started() {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestReadersFindWhatWritersAppend(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out))
	require.Len(t, regexp.MustCompile(`(?m)^reader     process \d+, the index is at 0x`).FindAllString(out.String(), -1), readers, out.String())
	require.Contains(t, out.String(), "verified   3 readers found each of 4096 vectors once, appended by 4 writers")
}

// Nothing stays in this process, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for _, call := range []string{"cuMemAddressReserve", "cuMemCreate", "cuStreamCreate", "cuMemcpyHtoDAsync"} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, []string{"-driver", "sim"}, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

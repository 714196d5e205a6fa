//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// A segment that cannot be made leaves nothing, even if the driver refuses its end at first.
func TestSegmentThatFailsIsGivenBack(t *testing.T) {
	m, sys := sim.Open(t)
	e := &entry{dev: sys.Devices()[0], closed: true} // its pool is about to be closed
	for _, refused := range []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"} {
		m.Inject(sim.Fault{Call: refused, Result: 999})
		_, err := e.newSegment(1<<20, "")
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.ErrorContains(t, err, refused)
		require.NoError(t, sys.Drain(t.Context()))
		require.Zero(t, sys.Stats().Allocations+sys.Stats().Mappings+sys.Stats().Reservations)
	}
}

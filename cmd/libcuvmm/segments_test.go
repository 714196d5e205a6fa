//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"math"
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

// A segment is one handle, whatever its size: other processes import it as one, and it comes back as one.
func TestASegmentIsOneHandle(t *testing.T) {
	m, sys := sim.Open(t)
	w := newWorld(t, sys.Devices()[0], 1)
	for _, bytes := range []int{1, 2 << 20, 2<<20 + 1, 300 << 20} {
		created := m.Count("cuMemCreate")
		s, err := w.e.newSegment(bytes, "weights")
		require.NoError(t, err)
		require.Equal(t, created+1, m.Count("cuMemCreate"), bytes)
		w.drop(filled{ptr: s})
	}
	_, err := w.e.newSegment(math.MaxInt, "weights")
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

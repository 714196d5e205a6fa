package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// What was asked for can be asked for again: memory made with it is of the same
// kind.
func TestRequestedKeepsTheGranularity(t *testing.T) {
	_, d := open(t)
	asked := vmm.Properties{Granularity: vmm.RecommendedGranularity}
	a, err := vmm.Create(d, 32*mib, asked)
	require.NoError(t, err)
	closed(t, a)
	require.Equal(t, vmm.RecommendedGranularity, a.Requested().Granularity)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Memory: asked})
	require.NoError(t, err)
	closed(t, b)
	require.Equal(t, a.Requested(), b.Requested())
	again, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Memory: b.Requested()})
	require.NoError(t, err)
	closed(t, again)
	require.Equal(t, b.Requested(), again.Requested())
	moved, err := b.Move(vmm.MoveOptions{Reserve: 128 * mib})
	require.NoError(t, err)
	closed(t, moved)
	require.Equal(t, b.Requested(), moved.Requested())
}

package vmm_test

import (
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// An operation on a lost device says once what lost it, however much of the
// operation failed for that.
func TestTheCulpritOfALossIsNamedOnce(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() }) // what was dropped is still there
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	s := stream(t, d)
	a, err := vmm.NewArray[float32](d, vmm.BufferOptions{})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(a.Append(nil, make([]float32, 1000))))
	module, err := d.LoadModule(kernels.Basic)
	require.NoError(t, err)
	fill, err := module.Kernel(kernels.Fill)
	require.NoError(t, err)
	require.NoError(t, fill.Launch(s, cuda.Threads(6), cuda.Ptr(0x1000), uint64(6), uint32(10), uint32(2)))
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	_, err = a.Append(nil, make([]float32, 1000))
	require.ErrorIs(t, err, cuda.ErrDeviceLost)
	require.Equal(t, 1, strings.Count(err.Error(), kernels.Fill), "%v", err)
	require.Less(t, len(err.Error()), 700)
	require.NoError(t, a.Close())
	require.NoError(t, module.Close())
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
}

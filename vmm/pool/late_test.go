package pool_test

import (
	"bytes"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// A copy into a block that fails after it was submitted is still on its stream, which the
// caller does not name when it frees the block: the memory is free only behind that copy.
func TestBlocksOfCopiesThatFailed(t *testing.T) {
	m, d := open(t)
	s, failing := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	b := alloc(t, p, s, mib)
	release := m.Hold(failing.Handle())
	m.Inject(sim.Fault{Call: "cuEventRecord", Times: -1, Result: cuda.Code(driver.Unknown)})
	require.Error(t, failing.Upload(b.Ptr(), bytes.Repeat([]byte{'A'}, 100)))
	m.ClearFaults()
	free(t, p, b)
	next := alloc(t, p, s, mib)
	require.NoError(t, s.Upload(next.Ptr(), bytes.Repeat([]byte{'B'}, 100)))
	require.NoError(t, s.Synchronize())
	free(t, p, alloc(t, p, s, 8*mib))
	_, err := p.Trim(0)
	require.NoError(t, err)
	release()
	require.NoError(t, failing.Synchronize())
	got := make([]byte, 100)
	require.NoError(t, s.Download(got, next.Ptr()))
	require.Equal(t, string(bytes.Repeat([]byte{'B'}, 100)), string(got))
	free(t, p, next)
	require.Empty(t, m.Fault())

	// Once a wait has succeeded, freed memory is the stream's own again.
	release = m.Hold(failing.Handle())
	b = alloc(t, p, s, mib)
	free(t, p, b)
	require.Equal(t, b.Ptr(), alloc2(t, p, s, mib))
	release()
}

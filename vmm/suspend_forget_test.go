package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// What is forgotten gives its host memory back at once; what sleeps beside it keeps its bytes,
// also those that both have.
func TestForgetGivesUpWhatIsKept(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	kept, dropped := w.buffer(2), w.buffer(3)
	shared, err := dropped.Fork(w.s, 2*kib64, vmm.ForkOptions{}) // which shares two chunks
	require.NoError(t, err)
	w.own(shared)
	want, before := w.bytes(kept), w.free(0)
	s := w.suspend(kept, dropped, shared)
	require.Equal(t, 5*kib64, w.d.System().Stats().KeptBytes, "%+v", s.Report())

	require.NoError(t, s.Forget(w.ctx(), dropped))
	require.Equal(t, 4*kib64, w.d.System().Stats().KeptBytes, "the fork needs two chunks")
	require.NoError(t, s.Forget(w.ctx(), dropped, shared))
	require.Equal(t, 2*kib64, w.d.System().Stats().KeptBytes)
	require.NoError(t, s.Forget(w.ctx(), shared), "idempotent")
	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, before, w.free(0))
	require.Equal(t, want, w.bytes(kept))
	require.NoError(t, s.Forget(w.ctx(), kept), "it is awake")
	require.Equal(t, want, w.bytes(kept))

	other := w.suspend(kept)
	require.ErrorIs(t, other.Forget(w.ctx(), dropped), cuda.ErrInvalidArgument)
	require.NoError(t, other.Forget(w.ctx()))
	require.Zero(t, w.d.System().Stats().KeptBytes)
	require.NoError(t, other.Resume(w.ctx()))
	require.ErrorIs(t, (*vmm.Suspension)(nil).Forget(w.ctx()), cuda.ErrInvalidArgument)
}

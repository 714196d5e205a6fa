package vmm_test

import (
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Errors about a buffer say what the program calls it, and so do those about its copies.
func TestErrorsNameTheBuffer(t *testing.T) {
	const title = `buffer "cache" tagged "llm"`
	m, d := open(t)
	a, err := vmm.NewArray[int32](d, vmm.BufferOptions{Reserve: 8 * mib, Name: "cache", Tag: "llm"})
	require.NoError(t, err)
	require.Equal(t, "cache", a.Name())
	require.Equal(t, cuda.Tag("llm"), a.Tag())
	_, err = a.Append(nil, []int32{1, 2})
	require.NoError(t, err)

	_, err = a.Append(nil, make([]int32, 4*mib))
	require.ErrorIs(t, err, cuda.ErrCapacity)
	require.ErrorContains(t, err, title+": ")
	all := a.All()
	require.NoError(t, a.Resize(nil, 0))
	err = all.CopyTo(nil, make([]int32, 2))
	require.ErrorIs(t, err, cuda.ErrOutOfRange)
	require.ErrorContains(t, err, title+": ")
	lift := m.Inject(sim.Fault{Call: "cuMemCreate", Result: 2, Times: -1})
	err = a.Grow(mib)
	lift()
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, title+": ")

	fork, err := a.Fork(nil, 0, vmm.ForkOptions{})
	require.NoError(t, err)
	moved, err := a.Move(vmm.MoveOptions{})
	require.NoError(t, err)
	for _, b := range []*vmm.Array[int32]{fork, moved} {
		require.Equal(t, "cache", b.Name())
		require.Equal(t, cuda.Tag("llm"), b.Tag())
	}
	err = a.Grow(1)
	require.ErrorIs(t, err, cuda.ErrMoved)
	require.ErrorContains(t, err, title+": ")
	require.Contains(t, strings.Join(d.System().Live(), "\n"), title)
	for _, b := range []*vmm.Array[int32]{fork, a, moved} {
		require.NoError(t, b.Close())
	}
	err = moved.Grow(1)
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.ErrorContains(t, err, "the "+title+" is closed")
}

// A name that cannot be shown is refused before anything is made.
func TestNamesAreChecked(t *testing.T) {
	m, d := open(t)
	m.ResetCounts()
	for _, o := range []vmm.BufferOptions{{Name: "a\nb"}, {Tag: cuda.Tag(strings.Repeat("x", 129))}} {
		_, err := vmm.NewBuffer(d, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		_, err = vmm.NewArray[byte](d, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	require.Empty(t, m.Counts())
}

package vmm_test

import (
	"math"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

type particle struct {
	Position [3]float32
	Charge   int8
	Alive    bool
}

func TestArrayOfStructs(t *testing.T) {
	_, d := open(t)
	a, err := vmm.NewArray[particle](d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, a)
	src := make([]particle, 1000)
	for i := range src {
		src[i] = particle{[3]float32{float32(i), 2, 3}, int8(i), i%2 == 0}
	}
	require.NoError(t, a.Append(nil, src))
	require.Equal(t, 1000, a.Len())
	require.Equal(t, 64*mib/16, a.Cap())
	part, err := a.Slice(100, 200)
	require.NoError(t, err)
	got := make([]particle, 100)
	require.NoError(t, part.CopyTo(nil, got))
	require.Equal(t, src[100:200], got)
	require.Equal(t, a.Ptr()+1600, part.Ptr())
	require.NoError(t, a.Resize(nil, 1100))
	tail, err := a.Slice(1000, 1100)
	require.NoError(t, err)
	require.NoError(t, tail.CopyTo(nil, got))
	require.Equal(t, make([]particle, 100), got)
	require.NoError(t, a.AppendSlice(nil, part))
	require.Equal(t, 1200, a.Len())
	front, err := a.Slice(0, 100)
	require.NoError(t, err)
	require.NoError(t, front.CopyFromSlice(nil, part))
	require.NoError(t, front.CopyTo(nil, got))
	require.Equal(t, src[100:200], got)
	require.NoError(t, front.Zero(nil))
	require.NoError(t, a.Grow(5))
	require.Equal(t, 1205, a.All().Len())
	require.ErrorIs(t, a.Grow(math.MaxInt), cuda.ErrCapacity)
	require.ErrorIs(t, a.Resize(nil, -1), cuda.ErrInvalidArgument)
	_, err = a.Slice(5, 4)
	require.ErrorIs(t, err, cuda.ErrOutOfRange)
}

func TestElementsMustBePlainData(t *testing.T) {
	_, d := open(t)
	refused := func(err error) string {
		t.Helper()
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		return err.Error()
	}
	_, err := vmm.NewArray[string](d, vmm.BufferOptions{})
	require.Contains(t, refused(err), "string")
	_, err = vmm.NewArray[[2]struct{ A, B *int }](d, vmm.BufferOptions{})
	require.Contains(t, refused(err), "A (*int)")
	_, err = vmm.NewArray[struct{}](d, vmm.BufferOptions{})
	require.Contains(t, refused(err), "no size")
	_, err = vmm.NewArray[any](d, vmm.BufferOptions{})
	refused(err)
	_, err = vmm.NewArray[[]int](d, vmm.BufferOptions{})
	refused(err)
	_, err = vmm.NewArray[complex128](d, vmm.BufferOptions{Reserve: -1})
	refused(err)
	require.Empty(t, d.System().Live())
}

package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t, []any{
		(*vmm.Buffer)(nil), &vmm.Buffer{}, (*vmm.Array[uint32])(nil), &vmm.Array[uint32]{}, vmm.Slice[uint32]{},
		(*vmm.Reservation)(nil), &vmm.Reservation{}, (*vmm.Mapping)(nil), &vmm.Mapping{}, (*vmm.Allocation)(nil), &vmm.Allocation{},
	}, "Slice.Slice")
	_, d := open(t)
	space, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	closed(t, space)
	for _, none := range []vmm.Physical{nil, (*vmm.Allocation)(nil), &vmm.Allocation{}} {
		_, err := space.Map(0, none)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	for _, none := range []*vmm.Buffer{nil, {}} {
		require.ErrorIs(t, gputest.Err(vmm.Move(none, vmm.MoveOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.Fork(nil, none, 0, vmm.ForkOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.ArrayOf[uint32](none)), cuda.ErrInvalidArgument)
		_, err := vmm.NewReader(none).Read(make([]byte, 1))
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		_, err = vmm.NewWriter(none).Write(make([]byte, 1))
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
}

// An error names the function that was called and counts what it counts.
func TestArraysCountElements(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	a, err := vmm.NewArray[uint64](d, vmm.BufferOptions{Reserve: 2 * mib})
	require.NoError(t, err)
	closed(t, a)
	require.NoError(t, gputest.Err(a.Append(nil, []uint64{1, 2, 3})))
	part, err := a.Slice(1, 3)
	require.NoError(t, err)
	held, err := a.Move(vmm.MoveOptions{})
	require.NoError(t, err)
	require.Equal(t, 2*a.Cap(), held.Cap(), "no options: twice the range")
	for op, err := range map[string]error{
		"vmm.NewArray: ":          gputest.Err(vmm.NewArray[uint64](nil, vmm.BufferOptions{})),
		"vmm.Array.Append: ":      gputest.Err(a.Append(nil, []uint64{1})),
		"vmm.Array.Move: ":        gputest.Err(a.Move(vmm.MoveOptions{})),
		"vmm.Array.Fork: ":        gputest.Err(a.Fork(nil, 1, vmm.ForkOptions{})),
		"vmm.Array.Clip: ":        a.Clip(),
		"vmm.Array.ClipAfter: ":   a.ClipAfter(s),
		"vmm.Array.SetAccess: ":   held.SetAccess(),
		"vmm.Array.RevokeAfter: ": held.RevokeAfter(cuda.OnDevice(9), s),
		"vmm.Array.CloseAfter: ":  held.CloseAfter(),
		"vmm.Array.Slice: ":       gputest.Err(held.Slice(0, 9)),
	} {
		require.ErrorContains(t, err, op)
	}
	for want, err := range map[string]error{
		"1000000 more elements, with 3 used of 524288 reserved": gputest.Err(held.Append(nil, make([]uint64, 1_000_000))),
		"a length of 1 element, with 3 that":                    held.Resize(nil, 1),
		"-1 elements":                                           held.Resize(nil, -1),
		"1 element for a slice of 2":                            part.CopyFrom(nil, []uint64{1}),
		"elements 0 to 9, with 3 in use":                        gputest.Err(held.Fork(nil, 9, vmm.ForkOptions{})),
	} {
		require.ErrorContains(t, err, want)
	}
	require.NoError(t, held.Close())
}

package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t,
		(*vmm.Buffer)(nil), &vmm.Buffer{}, (*vmm.Array[uint32])(nil), &vmm.Array[uint32]{},
		(*vmm.Reservation)(nil), &vmm.Reservation{}, (*vmm.Mapping)(nil), &vmm.Mapping{}, (*vmm.Allocation)(nil), &vmm.Allocation{},
		(*vmm.Sparse)(nil), &vmm.Sparse{}, (*vmm.Pages)(nil), &vmm.Pages{},
	)
	var part vmm.Slice[uint32] // a part of which is another
	for what, err := range map[string]error{
		"CopyFrom": part.CopyFrom(nil, nil), "CopyTo": part.CopyTo(nil, nil), "CopyFromSlice": part.CopyFromSlice(nil, part),
		"Zero": part.Zero(nil), "Host": part.Host(nil),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, what)
		require.ErrorContains(t, err, "a zero Slice", what)
	}
	_, d := open(t)
	space, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	closed(t, space)
	type wrapped struct{ vmm.Physical }
	for _, none := range []vmm.Physical{nil, (*vmm.Allocation)(nil), &vmm.Allocation{}, wrapped{&vmm.Allocation{}}} {
		require.ErrorIs(t, gputest.Err(space.Map(0, none)), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(space.MapRun(0, nil, none)), cuda.ErrInvalidArgument)
	}
	for _, none := range []*cuda.Device{nil, {}} {
		require.ErrorIs(t, gputest.Err(vmm.NewBuffer(none, vmm.BufferOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.NewArray[byte](none, vmm.BufferOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.Create(none, 2*mib, vmm.Properties{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.Reserve(none, 2*mib, vmm.ReserveOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.NewSparse(none, vmm.SparseOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.NewPages(none, vmm.PagesOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(vmm.GranularityOf(none, vmm.Properties{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(space.DMABuf(none, 0, 2*mib, vmm.DMABufOptions{})), cuda.ErrInvalidArgument)
	}
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1, 2})))
	all, err := b.Slice(0, 2)
	require.NoError(t, err)
	none := &cuda.Stream{}
	for what, err := range map[string]error{
		"Append": gputest.Err(b.Append(none, []byte{1})), "AppendSlice": gputest.Err(b.AppendSlice(none, all)),
		"Resize": b.Resize(none, 3), "Fork": gputest.Err(b.Fork(none, 1, vmm.ForkOptions{})),
		"CopyFrom": all.CopyFrom(none, []byte{1, 2}), "CopyTo": all.CopyTo(none, []byte{1, 2}),
		"CopyFromSlice": all.CopyFromSlice(none, all), "Zero": all.Zero(none), "ClipAfter": b.ClipAfter(none),
		"CloseAfter": b.CloseAfter(none),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, what)
		require.ErrorContains(t, err, "a nil stream", what)
	}
	m := mappedAt(t, d, space, 0)
	defer func() { require.NoError(t, m.Close()) }()
	for what, err := range map[string]error{
		"Slice.Host":      all.Host(nil),
		"Mapping.Host":    m.Host(nil),
		"Writer.ReadFrom": gputest.Err(vmm.NewWriter(b).ReadFrom(nil)),
		"Reader.WriteTo":  gputest.Err(vmm.NewReader(b).WriteTo(nil)),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, what)
		require.ErrorContains(t, err, what)
	}
	for _, none := range []*vmm.Buffer{nil, {}} {
		require.ErrorIs(t, gputest.Err(none.Move(vmm.MoveOptions{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(none.Fork(nil, 0, vmm.ForkOptions{})), cuda.ErrInvalidArgument)
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
		"vmm.NewArray: ":         gputest.Err(vmm.NewArray[uint64](nil, vmm.BufferOptions{})),
		"vmm.Array.Append: ":     gputest.Err(a.Append(nil, []uint64{1})),
		"vmm.Array.Move: ":       gputest.Err(a.Move(vmm.MoveOptions{})),
		"vmm.Array.Fork: ":       gputest.Err(a.Fork(nil, 1, vmm.ForkOptions{})),
		"vmm.Array.Clip: ":       a.Clip(),
		"vmm.Array.ClipAfter: ":  a.ClipAfter(s),
		"vmm.Array.SetAccess: ":  held.SetAccess(),
		"vmm.Array.CloseAfter: ": held.CloseAfter(),
		"vmm.Array.Slice: ":      gputest.Err(held.Slice(0, 9)),
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

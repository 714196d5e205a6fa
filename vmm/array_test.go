package vmm_test

import (
	"math"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

type particle struct {
	Position [3]float32
	Charge   int8
	Alive    bool
}

func TestAnArrayGivesBackLikeItsBuffer(t *testing.T) {
	_, d, peer := twoDevices(t)
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, a)
	_, err = a.Granted()
	require.ErrorIs(t, err, cuda.ErrOutOfRange)
	require.ErrorContains(t, err, "without memory yet")
	s := stream(t, d)
	require.NoError(t, gputest.Err(a.AppendUndefined(3*mib)))
	require.Equal(t, d, a.Device())
	g, err := a.Granted()
	require.NoError(t, err)
	require.Equal(t, d.Location(), g.Location)
	require.NoError(t, a.SetAccess(vmm.Access{Location: peer.Location(), Mode: vmm.ReadWrite}))
	far := stream(t, peer)
	require.NoError(t, a.All().Zero(far))
	require.NoError(t, a.SetAccess(vmm.Access{Location: peer.Location()}))
	require.ErrorIs(t, a.All().Zero(far), cuda.ErrNotPermitted)
	require.NoError(t, a.Resize(nil, 10))
	require.NoError(t, a.ClipAfter(s, far))
	require.NoError(t, d.System().Drain(t.Context()))
	require.Equal(t, 2*mib, a.Stats().Committed)
}

func TestCompressibleBuffersSayWhatAllOfThemHas(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib), Memory: vmm.Properties{Compressible: true}})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.AppendUndefined(6*mib)))
	g, err := b.Granted()
	require.NoError(t, err)
	require.True(t, g.Compressible)
	m.Inject(sim.Fault{Call: "cuMemGetAllocationPropertiesFromHandle", After: 1, Result: code})
	_, err = b.Granted()
	require.ErrorContains(t, err, "vmm.Buffer.Granted: ")
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
	require.NoError(t, gputest.Err(a.Append(nil, src)))
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
	require.NoError(t, gputest.Err(a.AppendSlice(nil, part)))
	require.Equal(t, 1200, a.Len())
	front, err := a.Slice(0, 100)
	require.NoError(t, err)
	require.NoError(t, front.CopyFromSlice(nil, part))
	require.NoError(t, front.CopyTo(nil, got))
	require.Equal(t, src[100:200], got)
	require.NoError(t, front.Zero(nil))
	require.NoError(t, gputest.Err(a.AppendUndefined(5)))
	require.Equal(t, 1205, a.All().Len())
	require.ErrorIs(t, gputest.Err(a.AppendUndefined(math.MaxInt)), cuda.ErrCapacity)
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

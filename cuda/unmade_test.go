package cuda_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t,
		(*cuda.System)(nil), &cuda.System{}, (*cuda.Device)(nil), &cuda.Device{}, (*cuda.Stream)(nil), &cuda.Stream{},
		(*cuda.Event)(nil), &cuda.Event{}, (*cuda.Graph)(nil), &cuda.Graph{}, (*cuda.Module)(nil), &cuda.Module{},
		(*cuda.Kernel)(nil), &cuda.Kernel{}, (*cuda.HostBuffer)(nil), &cuda.HostBuffer{},
	)
	require.Zero(t, cuda.HostSlice{}.Len())
	require.Nil(t, cuda.HostSlice{}.Bytes())
	require.Equal(t, "nil device", (&cuda.Device{}).String())
}

func TestNilAndZeroArgumentsAreRefused(t *testing.T) {
	_, d := open(t)
	s, e := stream(t, d), event(t, d)
	h, err := d.NewHostBuffer(1)
	require.NoError(t, err)
	m, err := d.LoadModule(kernels.Basic)
	require.NoError(t, err)
	fill, err := m.Kernel(kernels.Fill)
	require.NoError(t, err)
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return nil })
	require.NoError(t, err)
	refused := func(err error) {
		t.Helper()
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, ": a ")
	}
	for _, none := range []*cuda.Device{nil, {}} {
		refused(gputest.Err(d.CanAccess(none)))
	}
	for _, none := range []*cuda.Stream{nil, {}} {
		refused(e.Record(none))
		refused(g.Launch(none))
		refused(fill.Launch(none, cuda.Threads(1), cuda.Ptr(0), uint64(0), uint32(0), uint32(0)))
		refused(g.CloseAfter(none))
		refused(m.CloseAfter(none))
		refused(h.CloseAfter(s, none))
	}
	for _, none := range []*cuda.Event{nil, {}} {
		refused(s.Wait(none))
		refused(gputest.Err(e.Since(none)))
	}
	refused(s.CopyFromHost(0, cuda.HostSlice{}))
	refused(s.CopyToHost(cuda.HostSlice{}, 0))
	require.NoError(t, g.Close())
	require.NoError(t, m.Close())
	require.NoError(t, h.Close())
}

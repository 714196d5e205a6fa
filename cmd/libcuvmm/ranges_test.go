//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"bytes"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func (w *world) grown(bytes int, null bool, tag cuda.Tag) *grown {
	p, err := w.e.newRange(bytes, 0, null, tag)
	require.NoError(w.t, err)
	r, err := w.e.rangeAt("test", p)
	require.NoError(w.t, err)
	return r
}

// A graph that was captured while the range was short works on what was committed since: its
// first bytes stay where they are.
func TestARangeGrowsUnderAGraph(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 1)
		s := w.streams[0]
		r := w.grown(64<<20, false, "")
		require.Equal(t, 1, r.Stats().Mapped, "the first page has memory from the beginning")
		require.NoError(t, r.commit(3*r.Page(), s))
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
			require.ErrorIs(t, r.commit(4*r.Page(), s), cuda.ErrCapturing)
			require.NoError(t, r.commit(2*r.Page(), s), "nothing is to be done")
			return s.Memset(r.Ptr(), 7, 3*r.Page())
		})
		require.NoError(t, err)
		require.NoError(t, r.commit(9*r.Page()+1, s))
		require.Equal(t, 10, r.Stats().Mapped)
		require.NoError(t, s.Memset(r.Ptr(), 1, 10*r.Page()))
		require.NoError(t, g.Launch(s))
		got := make([]byte, 10*r.Page())
		require.NoError(t, s.Download(got, r.Ptr()))
		require.True(t, bytes.Equal(got, append(bytes.Repeat([]byte{7}, 3*r.Page()), bytes.Repeat([]byte{1}, 7*r.Page())...)))

		require.NoError(t, r.release(3*r.Page()))
		require.Equal(t, 3, r.Stats().Mapped)
		require.Equal(t, 3, r.Pages().Stats().Pages, "the driver has the others")
		require.NoError(t, g.Launch(s))
		require.NoError(t, g.Close())
		require.NoError(t, r.release(0))
		require.Equal(t, 1, r.Stats().Mapped)
		require.NoError(t, w.e.closeRange(uintptr(r.Ptr())))
	})
}

func TestWhatARangeRefuses(t *testing.T) {
	_, sys := sim.Open(t)
	w := newWorld(t, sys.Devices()[0], 1)
	for _, wrong := range [][2]int{{0, 0}, {-1, 0}, {100, -1}, {100, 1000}} {
		_, err := w.e.newRange(wrong[0], wrong[1], false, "")
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, "%v", wrong)
	}
	r := w.grown(8<<20, true, "grows")
	require.ErrorIs(t, r.commit(8<<20+1, nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, r.commit(-1, nil), cuda.ErrInvalidArgument)
	_, err := w.e.rangeAt("test", uintptr(r.Ptr())+1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorIs(t, closePool(w.handle), cuda.ErrInUse)
	require.NoError(t, w.streams[0].Memset(r.Ptr()+5<<20, 1, 100), "the null page lies there")

	_, err = suspendTags("suspend", []cuda.Tag{"grows"}, vmm.SuspendOptions{})
	require.NoError(t, err)
	require.ErrorIs(t, r.commit(4<<20, nil), cuda.ErrSuspended)
	require.NoError(t, resumeTags(nil, 0))
	require.NoError(t, r.commit(4<<20, nil))
	require.NoError(t, w.e.closeRange(uintptr(r.Ptr())))
	require.ErrorIs(t, w.e.closeRange(uintptr(r.Ptr())), cuda.ErrInvalidArgument)
}

// A range that cannot be made leaves nothing, even if the driver refuses its end at first.
func TestRangeThatFailsIsGivenBack(t *testing.T) {
	m, sys := sim.Open(t)
	e := &entry{dev: sys.Devices()[0], closed: true} // its pool is about to be closed
	for _, refused := range []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"} {
		m.Inject(sim.Fault{Call: refused, Result: 999})
		_, err := e.newRange(1<<20, 0, false, "")
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.NoError(t, sys.Drain(t.Context()))
		require.Zero(t, sys.Stats().Allocations+sys.Stats().Mappings+sys.Stats().Reservations, refused)
	}
}

package cuda_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

// theirs is a context of another library's, with a stream in it that is
// borrowed. destroy does what the library may do once the stream was closed.
func theirs(t *testing.T, d *cuda.Device) (s *cuda.Stream, destroy func()) {
	t.Helper()
	drv := core.SystemOf(d.System()).Drv.Foreign()
	c, r := drv.CtxCreate(0, driver.Device(d.Ordinal()))
	require.Equal(t, driver.Success, r)
	h, r := drv.StreamCreate(c, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	s, err := d.BorrowStream(uintptr(h))
	require.NoError(t, err)
	return s, func() {
		require.Equal(t, driver.Success, drv.StreamDestroy(c, h))
		require.Equal(t, driver.Success, drv.CtxDestroy(c))
	}
}

// The memory through which a borrowed stream copied outlives the stream's
// context, with which the driver frees what was pinned there.
func TestStagingOutlivesABorrowedStreamsContext(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		own := stream(t, d)
		p := words(t, d, 64)
		for name, use := range map[string]func(s *cuda.Stream) *cuda.Graph{
			"a copy": func(s *cuda.Stream) *cuda.Graph {
				require.NoError(t, s.Upload(p, []byte("through their context")))
				return nil
			},
			"a graph": func(s *cuda.Stream) *cuda.Graph {
				g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Upload(p, []byte("by a graph")) })
				require.NoError(t, err)
				return g
			},
		} {
			t.Run(name, func(t *testing.T) {
				s, destroy := theirs(t, d)
				if g := use(s); g != nil {
					require.NoError(t, g.Close())
				}
				require.NoError(t, s.Close())
				destroy()
				next, err := d.NewStream(cuda.StreamOptions{})
				require.NoError(t, err)
				require.NoError(t, next.Upload(p, []byte("what comes next")))
				require.NoError(t, next.Close())
				got := make([]byte, 15)
				require.NoError(t, own.Download(got, p))
				require.Equal(t, "what comes next", string(got))
			})
		}
	})
}

// What a borrowed stream's context did has passed once the stream is closed, and
// that context is not queried again.
func TestAGraphsLaunchInAContextThatIsGone(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		own := stream(t, d)
		p := words(t, d, 64)
		for name, end := range map[string]func(g *cuda.Graph) error{
			"Close":      func(g *cuda.Graph) error { return g.Close() },
			"CloseAfter": func(g *cuda.Graph) error { return g.CloseAfter(own) },
			"launched again": func(g *cuda.Graph) error {
				return errors.Join(g.Launch(own), g.CloseAfter(own))
			},
		} {
			t.Run(name, func(t *testing.T) {
				g, err := own.WithCapture(cuda.CaptureOptions{}, func() error { return own.Upload(p, []byte("launched")) })
				require.NoError(t, err)
				s, destroy := theirs(t, d)
				require.NoError(t, g.Launch(s))
				require.NoError(t, s.Close())
				destroy()
				require.NoError(t, end(g))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				require.NoError(t, d.System().Drain(ctx))
				got := make([]byte, 8)
				require.NoError(t, own.Download(got, p), "the device is whole")
				require.Equal(t, "launched", string(got))
			})
		}
	})
}

// A wait for a device makes no call for the context of a borrowed stream that is being
// closed: its streams were waited for, and its owner may have destroyed it.
func TestWaitingWhileABorrowedStreamsContextGoes(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	own := stream(t, d)
	h, err := d.NewHostBuffer(64)
	require.NoError(t, err)
	s, destroy := theirs(t, d)
	closing := false
	m.OnCall(func(call string) {
		if call == "cuMemFree" && !closing { // of the device's own context, which is asked first
			closing = true
			var err error
			elsewhere(func() {
				err = s.Close()
				destroy()
			})
			require.NoError(t, err)
		}
	})
	require.NoError(t, h.Close())
	require.NoError(t, own.Synchronize(), "nothing was lost")
}

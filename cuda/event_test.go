package cuda_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

func TestAnEventMarksAPoint(t *testing.T) {
	m, d := open(t)
	s, p, e := stream(t, d), memory(t, d, 64), event(t, d)
	done, err := e.Done()
	require.NoError(t, err)
	require.True(t, done, "it was never recorded")
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(p, 1, 64))
	require.NoError(t, e.Record(s))
	done, err = e.Done()
	require.NoError(t, err)
	require.False(t, done)
	waits(t, e.Synchronize, func() { m.Release(s.Handle()) })
	done, err = e.Done()
	require.NoError(t, err)
	require.True(t, done)
}

func TestEventsMeasureTime(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p := stream(t, d), memory(t, d, 64<<20)
		from, err := d.NewEvent(cuda.EventOptions{Timing: true})
		require.NoError(t, err)
		closed(t, from)
		to, err := d.NewEvent(cuda.EventOptions{Timing: true})
		require.NoError(t, err)
		closed(t, to)
		began := time.Now()
		require.NoError(t, from.Record(s))
		require.NoError(t, s.Memset(p, 1, 64<<20))
		require.NoError(t, to.Record(s))
		require.NoError(t, to.Synchronize())
		took, err := to.Since(from)
		require.NoError(t, err)
		require.Positive(t, took)
		require.Less(t, took, time.Since(began)+time.Millisecond)

		plain := event(t, d)
		require.NoError(t, plain.Record(s))
		require.NoError(t, plain.Synchronize())
		_, err = to.Since(plain)
		require.Error(t, err)
		require.ErrorContains(t, err, "Timing")
	})
}

func TestWhatAnEventRefuses(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, e := stream(t, d), event(t, d)
		gone, err := d.NewEvent(cuda.EventOptions{})
		require.NoError(t, err)
		require.NoError(t, gone.Close())
		require.NoError(t, gone.Close())
		for name, f := range map[string]func() error{
			"Record":      func() error { return gone.Record(s) },
			"Done":        func() error { _, err := gone.Done(); return err },
			"Synchronize": gone.Synchronize,
			"Wait":        func() error { return s.Wait(gone) },
			"Since":       func() error { _, err := e.Since(gone); return err },
		} {
			require.ErrorIs(t, f(), cuda.ErrClosed, name)
		}
		_, err = e.Since(nil)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		strange := another(t, d)
		require.ErrorIs(t, e.Record(stream(t, strange)), cuda.ErrForeign)
		_, err = e.Since(event(t, strange))
		require.ErrorIs(t, err, cuda.ErrForeign)
	})
}

func TestCloseOfAnEventGoesOnWhereItFailed(t *testing.T) {
	m, d := open(t)
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	m.Inject(sim.Fault{Call: "cuEventDestroy", Result: cuda.Code(driver.Unknown)})
	require.Error(t, e.Close())
	require.NoError(t, e.Close())
	require.Zero(t, d.System().Stats().Events)
}

package cuda_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open gives a test a machine of its own and its first device. Everything must
// be closed when the test ends.
func open(t testing.TB, o ...sim.Options) (*sim.Machine, *cuda.Device) {
	t.Helper()
	m, s := sim.Open(t, o...)
	d, err := s.Device(0)
	require.NoError(t, err)
	return m, d
}

// another makes a second System round the same driver.
func another(t testing.TB, d *cuda.Device) *cuda.Device {
	t.Helper()
	sys, err := gputest.Wrap(core.SystemOf(d.System()).Drv, nil)
	require.NoError(t, err)
	closed(t, sys)
	return sys.Devices()[0]
}

func stream(t testing.TB, d *cuda.Device) *cuda.Stream {
	t.Helper()
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	closed(t, s)
	return s
}

func event(t testing.TB, d *cuda.Device) *cuda.Event {
	t.Helper()
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	closed(t, e)
	return e
}

type closer interface{ Close() error }

func closed(t testing.TB, c closer) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

// memory is n bytes of device memory that do not go before the test ends.
func memory(t testing.TB, d *cuda.Device, n int) cuda.Ptr {
	t.Helper()
	c, err := core.ContextOf("test", d)
	require.NoError(t, err)
	drv := c.System().Drv
	p, r := drv.MemAlloc(c.Handle, uint64(n))
	require.Equal(t, driver.Success, r)
	t.Cleanup(func() {
		r := drv.MemFree(c.Handle, p)
		require.True(t, r == driver.Success || r.Lost(), r.String())
	})
	return cuda.Ptr(p)
}

// read is what device memory holds once the stream has passed.
func read(t testing.TB, s *cuda.Stream, p cuda.Ptr, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	require.NoError(t, s.Download(b, p))
	return b
}

// pattern is n bytes that differ from place to place.
func pattern(n, seed int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8*13 + i>>16*29 + i>>24*31 + seed)
	}
	return p
}

// elsewhere has another goroutine call f, as one that runs beside the caller would: a
// goroutine within a driver call holds locks that f must not find held by its own.
func elsewhere(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

package core_test

import (
	"log/slog"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// system is a System round a software driver, with a context and a stream.
func system(t *testing.T, c core.Config) (*sim.Machine, *core.System, *core.Stream) {
	t.Helper()
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return systemOn(t, m, c)
}

func systemOn(t *testing.T, m *sim.Machine, c core.Config) (*sim.Machine, *core.System, *core.Stream) {
	t.Helper()
	d := driver.Of(m)
	require.Equal(t, driver.Success, d.Init())
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := core.NewSystem(d, 13000, c)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	h, r := d.DevicePrimaryCtxRetain(0)
	require.Equal(t, driver.Success, r)
	ctx := s.AddContext(h, 0, true)
	require.Same(t, ctx, s.AddContext(h, 0, false), "the same handle twice is one context")
	stream, r := d.StreamCreate(h, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	st := ctx.AddStream(stream, false, false)
	t.Cleanup(func() {
		st.Forget()
		require.Equal(t, driver.Success, d.StreamDestroy(h, stream))
	})
	return m, s, st
}

// work puts something on a stream that takes no memory, as an operation does.
func work(t *testing.T, s *core.Stream) {
	t.Helper()
	require.True(t, s.Acquire())
	defer s.Release()
	unseenWork(t, s.Ctx.System().Drv, s.Ctx.Handle, s.Handle)
}

// unseenWork is work that this library knows nothing of.
func unseenWork(t *testing.T, d driver.Driver, c driver.Context, s driver.Stream) {
	t.Helper()
	e, r := d.EventCreate(c, driver.EventDisableTiming)
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.Success, d.EventRecord(c, e, s))
	require.Equal(t, driver.Success, d.EventDestroy(c, e))
}

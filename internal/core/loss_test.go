package core_test

import (
	"log/slog"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// many is a System with a context on each of n devices.
func many(t *testing.T, n int) (*sim.Machine, *core.System, []*core.Context) {
	t.Helper()
	m, err := sim.New(sim.Options{Devices: make([]sim.DeviceOptions, n)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() }) // what was dropped is still there
	d := driver.Of(m)
	require.Equal(t, driver.Success, d.Init())
	s := core.NewSystem(d, 13000, core.Config{Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	var all []*core.Context
	for i := range driver.Device(n) {
		h, r := d.DevicePrimaryCtxRetain(i)
		require.Equal(t, driver.Success, r)
		all = append(all, s.AddContext(h, i, true))
	}
	return m, s, all
}

func TestALossIsTheContextsThatWasNamed(t *testing.T) {
	_, s, c := many(t, 3)
	require.Equal(t, driver.Unknown, c[1].Observe(driver.Unknown))
	require.Zero(t, s.Losses())
	require.Equal(t, driver.LaunchFailed, c[1].Observe(driver.LaunchFailed))
	require.Equal(t, driver.IllegalAddress, c[1].Observe(driver.IllegalAddress), "the first stays")
	require.Equal(t, driver.LaunchFailed, c[1].Lost())
	require.Equal(t, driver.Success, c[0].Lost())
	require.Equal(t, driver.LaunchFailed, s.DeviceLost(0, 1))
	require.Equal(t, driver.Success, s.DeviceLost(0, 2))
	require.Equal(t, driver.Success, s.DeviceLost(), "some device lives")
	require.EqualValues(t, 1, s.Losses())
	c[0].Observe(driver.LaunchFailed)
	c[2].Observe(driver.LaunchFailed)
	require.Equal(t, driver.LaunchFailed, s.DeviceLost(), "none does")
}

func TestADriverThatGoesTakesAllContextsAlong(t *testing.T) {
	_, s, c := many(t, 2)
	c[1].Observe(driver.Deinitialized)
	require.Equal(t, driver.Deinitialized, s.DeviceLost(0))
	require.Equal(t, driver.Deinitialized, s.DeviceLost(1))
}

// A call without a context that returns a loss: the contexts that it could concern are
// queried.
func TestALossWithoutAContextIsLookedFor(t *testing.T) {
	for _, c := range []struct {
		name     string
		devices  []driver.Device
		admits   int // which context returns the loss when it is queried, in order
		already  int // which is known to be lost
		wantLost []bool
	}{
		{"one returns it", []driver.Device{0, 2}, 1, -1, []bool{false, false, true}},
		{"any device may be lost", nil, 1, -1, []bool{false, true, false}},
		{"no context returns it", []driver.Device{0, 2}, -1, -1, []bool{true, false, true}},
		{"none of all contexts returns it", nil, -1, -1, []bool{true, true, true}},
		{"it is an old one", []driver.Device{0, 1}, -1, 1, []bool{false, true, false}},
		{"a device without a context", []driver.Device{7}, -1, -1, []bool{false, false, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s, contexts := many(t, 3)
			if c.already >= 0 {
				contexts[c.already].Observe(driver.LaunchFailed)
			}
			if c.admits >= 0 {
				m.Inject(sim.Fault{Call: "cuMemGetInfo", After: c.admits, Result: cuda.Code(driver.LaunchFailed)})
			}
			require.Equal(t, driver.LaunchFailed, s.Observe(driver.LaunchFailed, c.devices...))
			var lost []bool
			for i := range contexts {
				lost = append(lost, s.DeviceLost(driver.Device(i)) != driver.Success)
			}
			require.Equal(t, c.wantLost, lost)
			require.Equal(t, c.devices != nil && c.devices[0] == 7, s.DeviceLost(7) != driver.Success)
		})
	}
}

package gputest

import (
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// judged is a test that records whether it failed, and ends when it is told to.
type judged struct {
	testing.TB
	failed bool
	ends   []func()
}

func (j *judged) Cleanup(f func())      { j.ends = append(j.ends, f) }
func (j *judged) Errorf(string, ...any) { j.failed = true }
func (j *judged) FailNow()              {}

func TestACaptureBesideARealDeviceIsWatched(t *testing.T) {
	for name, row := range map[string]struct {
		call  func(d *cuda.Device, f driver.Foreign, c driver.Context)
		fails bool
	}{
		"a call of the library":  {func(d *cuda.Device, _ driver.Foreign, _ driver.Context) { _, _ = d.Transfer() }, false},
		"a call in its own mode": {func(_ *cuda.Device, f driver.Foreign, c driver.Context) { f.StreamSynchronize(c, driver.StreamNull) }, true},
		"a wait for the context": {func(_ *cuda.Device, f driver.Foreign, c driver.Context) { f.CtxSynchronize(c) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			Alone(t)
			d := Software(t)
			c, err := core.ContextOf("test", d)
			require.NoError(t, err)
			j := &judged{TB: t}
			beside(j, d)
			row.call(d, core.SystemOf(d.System()).Drv.Foreign(), c.Handle)
			require.False(t, j.failed)
			for _, end := range j.ends {
				end()
			}
			require.Equal(t, row.fails, j.failed)
		})
	}
}

func TestARaceFailsTheTest(t *testing.T) {
	for name, unordered := range map[string]bool{"watched": false, "unordered on purpose": true} {
		t.Run(name, func(t *testing.T) {
			if unordered {
				Unordered(t)
			}
			j := &judged{TB: t}
			m, sys := sim.Open(j)
			d := sys.Devices()[0]
			h, err := d.NewHostBuffer(8)
			require.NoError(t, err)
			first, err1 := d.NewStream(cuda.StreamOptions{})
			second, err2 := d.NewStream(cuda.StreamOptions{})
			require.NoError(t, errors.Join(err1, err2))
			release := m.Hold(first.Handle())
			require.NoError(t, first.Memset(h.Ptr(), 1, 8))
			require.NoError(t, second.Memset(h.Ptr(), 2, 8))
			release()
			require.NoError(t, errors.Join(first.Close(), second.Close(), h.Close()))
			require.False(t, j.failed)
			for _, end := range j.ends {
				end()
			}
			require.Equal(t, !unordered, j.failed)
		})
	}
}

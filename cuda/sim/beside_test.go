package sim

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/bystander"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestACaptureBesideAMachineIsWatched(t *testing.T) {
	bystander.Captures.Store(true)
	t.Cleanup(func() { bystander.Captures.Store(false) })
	for name, row := range map[string]struct {
		call func(lib driver.Driver, f driver.Foreign, c driver.Context)
		by   string // what of the driver's ended the capture
	}{
		"in the library's mode": {call: func(lib driver.Driver, _ driver.Foreign, c driver.Context) {
			p, _ := lib.MemAlloc(c, 1)
			lib.MemFree(c, p)
		}},
		"in a thread's own mode": {call: func(_ driver.Driver, f driver.Foreign, c driver.Context) {
			f.MemAlloc(c, 1)
		}, by: "MemAlloc"},
		"a wait for the context": {call: func(_ driver.Driver, f driver.Foreign, c driver.Context) {
			f.CtxSynchronize(c)
		}, by: "CtxSynchronize"},
		"a wait for the legacy stream": {call: func(lib driver.Driver, _ driver.Foreign, c driver.Context) {
			lib.StreamSynchronize(c, driver.StreamLegacy)
		}, by: "StreamSynchronize"},
		"the first of two": {call: func(_ driver.Driver, f driver.Foreign, c driver.Context) {
			f.CtxSynchronize(c)
			f.StreamQuery(c, driver.StreamLegacy)
		}, by: "CtxSynchronize"},
		"a context that ends": {call: func(_ driver.Driver, f driver.Foreign, _ driver.Context) {
			c, _ := f.CtxCreate(0, 0)
			f.CtxDestroy(c)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := New(Options{})
			require.NoError(t, err)
			lib := driver.Of(m)
			require.Equal(t, driver.Success, lib.Init())
			c, r := lib.DevicePrimaryCtxRetain(0)
			require.Equal(t, driver.Success, r)
			row.call(lib, lib.Foreign(), c)
			require.Equal(t, driver.Success, lib.DevicePrimaryCtxRelease(0))
			if err := m.Close(); row.by == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "ended another library's capture")
				require.ErrorContains(t, err, "(*api)."+row.by)
			}
		})
	}
}

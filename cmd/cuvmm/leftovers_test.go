package main

import (
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect/serve"
	"github.com/stretchr/testify/require"
)

// What a driver does not take back is shown with its reason, until it does.
func TestLeftoversAreShown(t *testing.T) {
	dir, err := os.MkdirTemp("", "left") //nolint:usetesting // which makes longer paths than a socket's may be
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	t.Setenv("XDG_RUNTIME_DIR", dir)
	machine, sys := sim.Open(t)
	o, err := serve.Offer(sys)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, o.Close()) })

	remove := machine.Inject(sim.Fault{Call: "cuMemRelease", Result: 999, Times: -1})
	_, err = sys.Devices()[0].Probe()
	require.NoError(t, err)
	out, _ := cuvmm(t, exitOK, "map")
	require.Regexp(t, `could not be given back, and is tried again: memory of 2 MiB: .*cuMemRelease`, out)
	out, _ = cuvmm(t, exitOK, "map", "-json")
	require.Contains(t, out, `"leftovers":[{"what":"memory","bytes":2097152,"device":0,"error":"`)
	out, _ = cuvmm(t, exitOK, "top")
	require.Regexp(t, `\d resources? that could not be given back, tried again: \d MiB of memory`, out)

	remove()
	require.NoError(t, sys.Drain(t.Context()))
	out, _ = cuvmm(t, exitOK, "map")
	require.NotContains(t, out, "given back")
}

package cuda_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// owner is what every owner has for its end.
type owner interface {
	Close() error
	Released() cuda.Completion
}

// deferred is what owners have that GPU work can use.
type deferred interface {
	CloseAfter(streams ...*cuda.Stream) error
}

// owners makes one of each.
func owners(t *testing.T, d *cuda.Device) map[string]owner {
	t.Helper()
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	h, err := d.NewHostBuffer(64)
	require.NoError(t, err)
	m, err := d.LoadModule([]byte(testText))
	require.NoError(t, err)
	p, on := memory(t, d, 64), stream(t, d)
	g, err := on.WithCapture(cuda.CaptureOptions{}, func() error { return on.Memset(p, 1, 64) })
	require.NoError(t, err)
	return map[string]owner{"Stream": s, "Event": e, "HostBuffer": h, "Module": m, "Graph": g}
}

func TestReleasedIsTheEndOfEachOwnersClosing(t *testing.T) {
	m, d := open(t)
	busy := stream(t, d)
	for name, o := range owners(t, d) {
		t.Run(name, func(t *testing.T) {
			before := o.Released()
			select {
			case <-before.Done():
				t.Fatal("it is open")
			default:
			}
			after, ok := o.(deferred)
			if !ok {
				require.NoError(t, o.Close())
			} else {
				release := m.Hold(busy.Handle())
				defer release()
				require.NoError(t, busy.Callback(func(error) {}))
				require.NoError(t, after.CloseAfter(busy))
				select {
				case <-before.Done():
					t.Fatal("the stream has not passed")
				default:
				}
				release()
			}
			require.NoError(t, before.Wait(t.Context()))
			require.NoError(t, o.Released().Wait(t.Context()), "afterwards, too")
		})
	}
	drained(t, d)
}

func TestReleasedSaysWhyAClosingFailed(t *testing.T) {
	m, d := open(t)
	for name, o := range owners(t, d) {
		call := map[string]string{"Stream": "cuStreamDestroy", "Event": "cuEventDestroy", "Module": "cuModuleUnload", "Graph": "cuGraphExecDestroy"}[name]
		if call != "" {
			first := o.Released()
			remove := m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.Unknown)})
			err := o.Close()
			require.Error(t, err, name)
			remove()
			require.Equal(t, err, first.Wait(t.Context()), name)
		}
		require.NoError(t, o.Close(), name)
		require.NoError(t, o.Released().Wait(t.Context()), name)
	}
}

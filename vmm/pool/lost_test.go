package pool_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// What a trim cannot unmap or release is a leftover of the System, which says what it holds,
// and goes without a Close. Its place serves again.
func TestWhatATrimLosesIsALeftover(t *testing.T) {
	for _, call := range []string{"cuMemUnmap", "cuMemRelease"} {
		for kind, bytes := range map[string]int{"slabs": kib, "regions": 16 * mib} {
			t.Run(call+" of "+kind, func(t *testing.T) {
				m, d := open(t)
				s := stream(t, d)
				p := newPool(t, d, pool.Options{Decay: -1})
				free(t, p, alloc(t, p, s, bytes))
				require.NoError(t, s.Synchronize())
				had := p.Stats().Reserved

				m.Inject(sim.Fault{Call: call, Times: -1, Result: 999})
				_, err := p.Trim(0)
				require.ErrorContains(t, err, "System.Drain tries it again")
				require.NoError(t, p.Check())
				require.Equal(t, had, p.Stats().Reserved, "what is not back counts")
				left := d.System().Leftovers()
				require.NotEmpty(t, left)
				require.Equal(t, had, d.System().Stats().LeftoverBytes)
				require.ErrorContains(t, d.System().Drain(t.Context()), "is left of an operation that failed")
				_, err = p.Trim(0)
				require.NoError(t, err, "the trim of what is left")

				m.ClearFaults()
				require.NoError(t, d.System().Drain(t.Context()))
				require.Empty(t, d.System().Leftovers())
				require.Zero(t, p.Stats().Reserved)
				require.NoError(t, p.Check())
				free(t, p, alloc(t, p, s, bytes))
			})
		}
	}
}

// One failure costs nothing: the System tries it again by itself.
func TestALostPieceComesBackByItself(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Decay: -1})
	free(t, p, alloc(t, p, s, 64*mib))
	require.NoError(t, s.Synchronize())
	m.Inject(sim.Fault{Call: "cuMemUnmap", Result: 999})
	_, err := p.Trim(0)
	require.Error(t, err)
	_, err = p.Trim(0)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.Stats().Reserved == 0 }, testTimeout, time.Millisecond)
}

// A pool that is closed with its leftovers takes them along, and what remains of them does
// nothing.
func TestCloseTakesLeftoversAlong(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p, err := pool.New(d, pool.Options{Decay: -1, Chunk: 2 * mib})
	require.NoError(t, err)
	free(t, p, alloc(t, p, s, 64*mib))
	require.NoError(t, s.Synchronize())
	m.Inject(sim.Fault{Call: "cuMemUnmap", Times: -1, Result: 999})
	_, err = p.Trim(0)
	require.Error(t, err)
	m.ClearFaults()
	require.NoError(t, p.Close())
	require.Zero(t, p.Stats().Reserved)
	require.NoError(t, d.System().Drain(t.Context()))
	require.Empty(t, d.System().Leftovers())
}

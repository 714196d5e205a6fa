package pool_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Decay gives back memory that is not needed any more, without another request.
func TestDecay(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Decay: 20 * time.Millisecond})
	kept := alloc(t, p, s, 4*mib)
	free(t, p, alloc(t, p, s, 256*mib))
	for range 3 {
		free(t, p, alloc(t, p, s, 100*kib))
	}
	require.NoError(t, s.Synchronize())
	require.Eventually(t, func() bool { return p.Stats().Reserved < 20*mib }, testTimeout, time.Millisecond)
	free(t, p, kept)
}

// Decay and Trim give back what is free beside steady work on a stream, whose latest frees
// the GPU has never passed: what is freed is coalesced with the largest free extent.
func TestFreeMemoryGoesBesideSteadyWork(t *testing.T) {
	for name, give := range map[string]func(p *pool.Pool) error{
		"decay": func(p *pool.Pool) error { p.Tend(300 * mib); return nil },
		"trim":  func(p *pool.Pool) error { _, err := p.Trim(300 * mib); return err },
	} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			s := stream(t, d)
			p := newPool(t, d, pool.Options{Decay: time.Hour})
			free(t, p, alloc(t, p, s, 400*mib))
			n := 0
			m.OnCall(func(call string) {
				if call == "cuEventQuery" { // the pool looks how far the stream is, which works on
					n++
					pool.Nested(func() { free(t, p, alloc(t, p, s, mib+n%2*mib/2)) })
				}
			})
			for tries := 0; tries < 100 && p.Stats().Reserved > 120*mib; tries++ {
				require.NoError(t, give(p))
				require.NoError(t, s.Synchronize())
			}
			m.OnCall(nil)
			require.NoError(t, p.Check())
			require.Less(t, p.Stats().Reserved, 120*mib)
		})
	}
}

// What decay has set apart serves a request that would need new memory.
func TestWhatIsSetApartServesARequest(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Decay: time.Hour, Limit: 64 * mib})
	hold(t, m, s)
	b := alloc(t, p, s, 64*mib)
	require.NoError(t, s.Memset(b.Ptr(), 1, mib))
	free(t, p, b)
	p.Tend(64 * mib)
	m.ResetCounts()
	require.NoError(t, p.Check())
	free(t, p, alloc(t, p, s, 64*mib))
	require.Empty(t, calls(m)["cuMemCreate"])
}

// Decay keeps what is needed again and again.
func TestDecayKeepsWhatIsNeeded(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Decay: time.Hour})
	free(t, p, alloc(t, p, s, 256*mib))
	needed := func() {
		free(t, p, alloc(t, p, s, 64*mib))
		require.NoError(t, s.Synchronize())
		require.Eventually(t, func() bool { return !p.Ask() }, testTimeout, time.Millisecond)
	}
	p.EndWindow() // which had the large block
	needed()
	p.EndWindow()
	require.Less(t, p.Stats().Reserved, 90*mib)
	m.ResetCounts()
	for range 10 {
		needed()
		p.EndWindow()
	}
	require.Zero(t, m.Count("cuMemCreate"))
	require.GreaterOrEqual(t, p.Stats().Reserved, 68*mib)
}

// A pool without decay keeps what it has.
func TestNoDecay(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Decay: -1})
	free(t, p, alloc(t, p, s, 64*mib))
	require.NoError(t, s.Synchronize())
	time.Sleep(50 * time.Millisecond)
	require.Zero(t, m.Count("cuMemRelease"))
}

// Upkeep unmaps old places without another request, once the GPU has
// passed them and not before.
func TestWhatMovedIsUnmappedByItself(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(20 * time.Millisecond))
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	live := holes(t, p, s, 8, 8*mib)
	hold(t, m, s)
	late := alloc(t, p, s, 8*mib)
	require.NoError(t, s.Memset(late.Ptr(), 1, 8*mib))
	free(t, p, late)
	had := d.System().Stats().Mappings
	b := alloc(t, p, s, 32*mib)
	moved := d.System().Stats().Mappings - had
	require.Positive(t, moved)
	m.Release(s.Handle())
	require.Eventually(t, func() bool { return d.System().Stats().Mappings == had }, testTimeout, time.Millisecond)
	require.NoError(t, p.Check())
	free(t, p, b)
	for _, l := range live {
		free(t, p, l)
	}
}

// No driver call of a trim unmaps much, and other requests can be served between two of
// them.
func TestATrimGoesInPieces(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	free(t, p, alloc(t, p, s, 512*mib))
	require.NoError(t, s.Synchronize())
	var unmaps atomic.Int32
	var at int32
	served := make(chan pool.Block, 1)
	m.OnCall(func(call string) {
		if call == "cuMemUnmap" && unmaps.Add(1) == 1 {
			go func() {
				b, err := p.Alloc(pool.Request{Bytes: mib, Stream: other})
				at = unmaps.Load()
				assert.NoError(t, err)
				served <- b
			}()
			time.Sleep(5 * time.Millisecond)
		}
	})
	_, err := p.Trim(0)
	require.NoError(t, err)
	m.OnCall(nil)
	free(t, p, <-served)
	require.Equal(t, 32, int(unmaps.Load()))
	t.Logf("served after %d of 32 pieces", at)
}

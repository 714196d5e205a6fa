package pool_test

import (
	"math/rand/v2"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Goroutines on streams of their own and on one that they share, with frees by
// others and trims in between.
func TestManyGoroutines(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 512 * kib64}}})
	p := newPool(t, d, pool.Options{Statistics: true, ExactFrom: 20 * kib64})
	shared := stream(t, d)
	var g errgroup.Group
	passed := make(chan pool.Block, 64)
	var frees errgroup.Group
	for range 2 {
		frees.Go(func() error {
			for b := range passed {
				if err := p.Free(b, shared); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for i := range 6 {
		s := shared
		if i < 4 {
			s = stream(t, d)
		}
		g.Go(func() error {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			var live []pool.Block
			for j := range 300 {
				if len(live) > 8 || len(live) > 0 && r.IntN(2) == 0 {
					k := r.IntN(len(live))
					b := live[k]
					live = append(live[:k], live[k+1:]...)
					if r.IntN(4) == 0 {
						passed <- b
					} else if err := p.FreePtr(b.Ptr()); err != nil {
						return err
					}
					continue
				}
				b, err := p.Alloc(pool.Request{Bytes: r.IntN(1 << (6 + r.IntN(15))), Stream: s})
				if err != nil {
					return err
				}
				live = append(live, b)
				if j%100 == 0 {
					if _, err := p.Trim(4 * kib64); err != nil {
						return err
					}
				}
			}
			for _, b := range live {
				if err := p.Free(b); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
	close(passed)
	require.NoError(t, frees.Wait())
	require.NoError(t, p.Check())
	st := p.Stats()
	require.Zero(t, st.Blocks)
	require.Equal(t, st.Allocs, st.Frees)
}

func TestFreeNeverBlocks(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	b, c := alloc(t, p, s, 3*mib), alloc(t, p, s, 100)
	hold(t, m, s)
	hold(t, m, other)
	require.NoError(t, s.Memset(b.Ptr(), 1, 3*mib))
	m.ResetCounts()
	free(t, p, b)
	free(t, p, c, other)
	require.Empty(t, calls(m), "freeing makes no driver call")
	again := alloc(t, p, s, 3*mib)
	require.Equal(t, b.Ptr(), again.Ptr(), "the stream has its own memory back at once")
	require.NotEqual(t, c.Ptr(), alloc2(t, p, s, 100), "what another stream uses waits for it")
	elsewhere := alloc(t, p, other, 3*mib)
	require.NotEqual(t, b.Ptr(), elsewhere.Ptr())
	require.Equal(t, 1, p.Stats().Waiting)
	m.Release(s.Handle())
	m.Release(other.Handle())
	free(t, p, again)
	free(t, p, elsewhere)
}

// alloc2 is the address of a block that came and went.
func alloc2(t *testing.T, p *pool.Pool, s *cuda.Stream, bytes int) cuda.Ptr {
	b := alloc(t, p, s, bytes)
	free(t, p, b)
	return b.Ptr()
}

// What one stream freed and has passed is another's, without a driver call but
// the event's.
func TestMemoryGoesToAnotherStreamOnceItHasPassed(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{ExactFrom: 64 * mib})
	for _, bytes := range []int{1000, 20 * mib, 64 * mib} {
		b := alloc(t, p, s, bytes)
		hold(t, m, s)
		require.NoError(t, s.Memset(b.Ptr(), 1, bytes))
		free(t, p, b)
		early := alloc(t, p, other, bytes)
		require.NotEqual(t, b.Ptr(), early.Ptr())
		m.Release(s.Handle())
		require.NoError(t, s.Synchronize())
		m.ResetCounts()
		late := alloc(t, p, other, bytes)
		require.Zero(t, m.Count("cuMemCreate"))
		require.Zero(t, m.Count("cuMemMap"))
		free(t, p, early)
		free(t, p, late)
		require.NoError(t, p.Check())
		require.NoError(t, other.Synchronize())
	}
}

package pool_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// comesMeanwhile makes another stream's first request at the n-th call of a name, so that
// the pool forgets streams that are gone. The result waits for it.
func comesMeanwhile(t *testing.T, m *sim.Machine, p *pool.Pool, late *cuda.Stream, name string, n int) (wait func()) {
	type result struct {
		b   pool.Block
		err error
	}
	calls, came := 0, make(chan result, 1)
	m.OnCall(func(call string) {
		if call != name {
			return
		}
		if calls++; calls != n {
			return
		}
		within(t, "the pool's numbers wait for a driver call", func() {
			before := p.Stats().Streams
			go func() {
				b, err := p.Alloc(pool.Request{Bytes: 1024, Stream: late})
				came <- result{b, err}
			}()
			for range 100 { // it may have to wait for the request that goes on
				if p.Stats().Streams != before {
					break
				}
				time.Sleep(time.Millisecond)
			}
		})
	})
	return func() {
		m.OnCall(nil)
		require.GreaterOrEqual(t, calls, n)
		if r := <-came; r.err == nil {
			free(t, p, r.b)
		}
	}
}

// Chunks that are cut out of a closed stream's memory, to be moved or given back,
// and are put back because the driver refused, serve other streams as before.
func TestChunksOfAClosedStreamArePutBack(t *testing.T) {
	for name, failing := range map[string]struct {
		call string
		nth  int
		op   func(p *pool.Pool, s *cuda.Stream) error
	}{
		"a move": {"cuMemCreate", 2, func(p *pool.Pool, s *cuda.Stream) error {
			_, err := p.Alloc(pool.Request{Bytes: 16 * mib, Stream: s})
			return err
		}},
		"a trim": {"cuMemUnmap", 1, func(p *pool.Pool, _ *cuda.Stream) error {
			_, err := p.Trim(0)
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			p, err := pool.New(d, pool.Options{Chunk: 2 * mib, Wait: -1})
			require.NoError(t, err)
			var gone []*cuda.Stream
			var blocks []pool.Block
			for range 2 { // so that a trim has two runs, of which the first fails
				s, err := d.NewStream(cuda.StreamOptions{})
				require.NoError(t, err)
				gone, blocks = append(gone, s), append(blocks, alloc(t, p, s, 4*mib))
			}
			for i, s := range gone {
				free(t, p, blocks[i])
				require.NoError(t, s.Close())
			}
			s, late := stream(t, d), stream(t, d)
			free(t, p, alloc(t, p, s, mib)) // the pool knows the stream
			require.NoError(t, s.Synchronize())

			m.Inject(sim.Fault{Call: failing.call, Times: -1, Result: 2})
			wait := comesMeanwhile(t, m, p, late, failing.call, failing.nth)
			require.Error(t, failing.op(p, s))
			m.ClearFaults()
			wait()
			require.NoError(t, p.Check())
			require.NoError(t, late.Synchronize())
			require.NoError(t, p.Close())
			require.Zero(t, p.Stats().Reserved)
		})
	}
}

package pool_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// A large block grows in place when it comes back a little larger, whatever was
// allocated since: nothing was placed close behind it.
func TestALargeBlockHasRoomToGrow(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	live := []pool.Block{alloc(t, p, s, 3*mib)}
	first := alloc(t, p, s, 64*mib)
	live = append(live, alloc(t, p, s, 64*mib), alloc(t, p, s, 3*mib), alloc(t, p, s, 20*mib))
	free(t, p, first)
	m.ResetCounts()
	live = append(live, alloc(t, p, s, 70*mib))
	require.Equal(t, 3, calls(m)["cuMemMap"], "only what the block lacked")
	for _, b := range live {
		free(t, p, b)
	}
}

// A large request takes a place of its own rather than what a large block left of its last
// chunk, which would save little and take that block's room to grow.
func TestALargeRequestJoinsNoRest(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	one := alloc(t, p, s, 33*mib)
	other := alloc(t, p, s, 33*mib)
	small := alloc(t, p, s, mib)
	require.NotEqual(t, one.Ptr()+33*mib, other.Ptr())
	require.Contains(t, []cuda.Ptr{one.Ptr() + 33*mib, other.Ptr() + 33*mib}, small.Ptr(), "a small one takes such a rest")
	for _, b := range []pool.Block{one, other, small} {
		free(t, p, b)
	}
}

// What is cut out of a much larger free block comes from its back, so that the rest grows
// downward: only what the next large block lacks is mapped.
func TestAFreeBlockGrowsDownward(t *testing.T) {
	const large = 64 * mib
	for name, c := range map[string]struct{ bytes, align, from int }{
		"a chunk":               {2 * mib, 0, large - 2*mib},
		"aligned":               {3 * mib, 2 * mib, large - 4*mib},
		"less than most of one": {mib, 0, 0},
		"a large part of it":    {large / 2, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			s := stream(t, d)
			p := newPool(t, d, pool.Options{})
			live := []pool.Block{alloc(t, p, s, 4*mib)} // so that the next one lies in the middle of the addresses
			first := alloc(t, p, s, large)
			free(t, p, first)
			b, err := p.Alloc(pool.Request{Bytes: c.bytes, Align: c.align, Stream: s})
			require.NoError(t, err)
			require.Equal(t, first.Ptr()+cuda.Ptr(c.from), b.Ptr())
			live = append(live, b)
			if c.from > 0 {
				m.ResetCounts()
				next := alloc(t, p, s, large)
				require.Equal(t, first.Ptr()+cuda.Ptr(c.from-large), next.Ptr())
				require.Equal(t, (large-c.from)/(2*mib), calls(m)["cuMemMap"])
				live = append(live, next)
			}
			for _, b := range live {
				free(t, p, b)
			}
		})
	}
}

// oldPlaces makes a free block of 16 chunks, the last 4 of which move away. Live blocks
// are before it and where they move to.
func oldPlaces(t testing.TB, p *pool.Pool, s *cuda.Stream, chunk int) (live []pool.Block) {
	t.Helper()
	longer, shorter := alloc(t, p, s, 30*chunk), alloc(t, p, s, 17*chunk)
	free(t, p, longer)
	free(t, p, shorter)
	live = append(live, alloc(t, p, s, chunk/2))
	require.Equal(t, shorter.Ptr(), live[0].Ptr())
	return append(live, alloc(t, p, s, 34*chunk))
}

// A free block grows over old places of its chunks, if the GPU has passed them.
func TestAFreeBlockGrowsOverOldPlaces(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(time.Hour))
	for name, behind := range map[string]bool{"the GPU has passed them": false, "the GPU is behind": true} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			s := stream(t, d)
			p := newPool(t, d, pool.Options{})
			if behind {
				work := alloc(t, p, s, 100)
				hold(t, m, s)
				require.NoError(t, s.Memset(work.Ptr(), 1, 100))
				free(t, p, work)
			}
			live := oldPlaces(t, p, s, 2*mib)
			if !behind {
				for p.Ask() {
				}
			}
			m.ResetCounts()
			grown := alloc(t, p, s, 32*mib)
			require.NoError(t, p.Check())
			if behind {
				require.Equal(t, 16, calls(m)["cuMemMap"])
				require.Zero(t, calls(m)["cuMemUnmap"])
				m.Release(s.Handle())
			} else {
				require.Equal(t, 4, calls(m)["cuMemMap"])
				require.Equal(t, 1, calls(m)["cuMemUnmap"])
			}
			require.NoError(t, s.Memset(grown.Ptr(), 1, 32*mib))
			for _, b := range append(live, grown) {
				free(t, p, b)
			}
			require.NoError(t, s.Synchronize())
		})
	}
}

// Memory that moves, and what is mapped where it was, keep apart: what is written at one
// address is read there, and nowhere else.
func TestWhatIsMappedOverOldPlacesIsApart(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(time.Hour))
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		for range 5 {
			s := stream(t, d)
			p := newPool(t, d, pool.Options{})
			live := oldPlaces(t, p, s, 2*mib)
			set := func(b pool.Block, value byte) {
				require.NoError(t, s.Memset(b.Ptr(), value, b.Bytes()))
			}
			for i, b := range live {
				set(b, byte(i+1))
			}
			require.NoError(t, s.Synchronize())
			for p.Ask() {
			}
			live = append(live, alloc(t, p, s, 32*mib))
			set(live[2], 3)
			set(live[1], 4)
			for i, want := range []byte{1, 4, 3} {
				got := make([]byte, live[i].Bytes())
				require.NoError(t, s.Download(got, live[i].Ptr()))
				require.Equal(t, len(got), bytes.Count(got, []byte{want}))
			}
			for _, b := range live {
				free(t, p, b)
			}
		}
	})
}

// A request that fails leaves the places that it would have used as they were.
func TestOldPlacesOutliveARequestThatFails(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(time.Hour))
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	live := oldPlaces(t, p, s, 2*mib)
	for p.Ask() {
	}
	m.Inject(sim.Fault{Call: "cuMemCreate", Result: code})
	_, err := p.Alloc(pool.Request{Bytes: 32 * mib, Stream: s})
	require.Error(t, err)
	require.NoError(t, p.Check())
	m.ResetCounts()
	grown := alloc(t, p, s, 32*mib)
	require.Equal(t, 4, calls(m)["cuMemMap"])
	for _, b := range append(live, grown) {
		free(t, p, b)
	}
}

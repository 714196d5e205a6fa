package pool

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/stretchr/testify/require"
)

// Memory that is mapped at two places is counted as gone once, even if both are unmapped
// at the same time: by upkeep, which unmaps what moved, and by a trim.
func TestMemoryOfTwoPlacesGoesOnce(t *testing.T) {
	m, sys := sim.Open(t)
	p, err := New(sys.Devices()[0], Options{Chunk: 2 << 20})
	require.NoError(t, err)
	place := func(chunks ...*phys.Handle) *region {
		r, err := p.reserve(mid, 4*p.chunk, p.chunk, p.chunk, p.chunk)
		require.NoError(t, err)
		require.NoError(t, r.rng.MapRun("test", 0, chunks, *p.access.Load()))
		for i, h := range chunks {
			r.chunks[i].Store(&chunk{handle: h})
		}
		return r
	}
	moved, err := p.newChunk(p.chunk)
	require.NoError(t, err)
	stays, err := p.newChunk(p.chunk)
	require.NoError(t, err)
	moved.Retain()
	old, now := place(moved, stays), place(moved)

	// The new place goes while the old one's has gone, and not yet been counted.
	var trimmed uint64
	within := false
	m.OnCall(func(call string) {
		if call == "cuMemRelease" && !within {
			within = true
			done := make(chan struct{})
			go func() { // as another operation does
				defer close(done)
				n, err := now.vacate("test", 0, 1)
				if trimmed = n; err != nil {
					t.Error(err)
				}
			}()
			<-done
		}
	})
	left, err := old.vacate("test", 0, 2)
	m.OnCall(nil)
	require.NoError(t, err)
	require.True(t, within)
	p.gave(left + trimmed)
	require.Zero(t, p.reserved.Load(), "counted as gone: %d bytes of %d", left+trimmed, 2*p.chunk)
	require.NoError(t, p.Close())
}

// Memory that failures left at two places is counted once as gone, even if closing
// fails between the two.
func TestAFailedCloseCountsMemoryOnce(t *testing.T) {
	m, sys := sim.Open(t)
	p, err := New(sys.Devices()[0], Options{Chunk: 2 << 20})
	require.NoError(t, err)
	h, err := p.newChunk(p.chunk)
	require.NoError(t, err)
	h.Retain()
	m.Inject(sim.Fault{Call: "cuMemUnmap", Times: -1, Result: 999})
	for range 2 {
		r, err := p.reserve(mid, 4*p.chunk, p.chunk, p.chunk, p.chunk)
		require.NoError(t, err)
		require.NoError(t, r.rng.MapRun("test", 0, []*phys.Handle{h}, *p.access.Load()))
		r.chunks[0].Store(&chunk{handle: h})
		gone, err := r.vacate("test", 0, 1)
		require.Error(t, err)
		require.Zero(t, gone)
	}
	m.ClearFaults()
	m.Inject(sim.Fault{Call: "cuMemUnmap", After: 1, Result: 999})
	require.Error(t, p.Close())
	require.Equal(t, p.chunk, p.reserved.Load(), "the second place has it yet")
	require.NoError(t, p.Close())
	require.Zero(t, p.reserved.Load())
}

// Check finds a place that nothing will unmap, and a wrong count of waiting blocks.
func TestCheckSeesWhatIsForgotten(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer SetUpkeep(time.Hour)()
	p, err := New(d, Options{Chunk: 2 << 20})
	require.NoError(t, err)
	alloc := func(bytes int) Block {
		b, err := p.Alloc(Request{Bytes: bytes, Stream: s})
		require.NoError(t, err)
		return b
	}
	first, between, last := alloc(4<<20), alloc(4<<20), alloc(4<<20)
	require.NoError(t, p.Free(first))
	large := alloc(6 << 20) // what was free moves
	require.NotEmpty(t, p.deferred)
	require.NoError(t, p.Check())
	deferred := p.deferred
	p.deferred = nil
	require.ErrorContains(t, p.Check(), "nothing unmaps it")
	p.deferred = deferred
	sh := p.all()[0]
	sh.waiting.bytes++
	require.ErrorContains(t, p.Check(), "bytes of waiting blocks")
	sh.waiting.bytes--
	for _, b := range []Block{between, last, large} {
		require.NoError(t, p.Free(b))
	}
	require.NoError(t, p.Close())
	require.NoError(t, s.Close())
}

package pool_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// holes leaves every other block of n live, each with a byte of its own.
func holes(t *testing.T, p *pool.Pool, s *cuda.Stream, n, bytes int) (live []pool.Block) {
	t.Helper()
	var all []pool.Block
	for i := range n {
		b := alloc(t, p, s, bytes)
		require.NoError(t, s.Memset(b.Ptr(), byte(i+1), bytes))
		all = append(all, b)
	}
	for i, b := range all {
		if i%2 == 0 {
			live = append(live, b)
		} else {
			free(t, p, b)
		}
	}
	require.NoError(t, s.Synchronize())
	return live
}

// Free chunks move together; what is live keeps its address and its bytes.
func TestHolesAreStitched(t *testing.T) {
	patient(t)
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{})
		live := holes(t, p, s, 16, 8*mib)
		before := p.Stats().Reserved
		require.Equal(t, 16*8*mib, before)
		b := alloc(t, p, s, 60*mib)
		require.Equal(t, before, p.Stats().Reserved)
		require.NoError(t, p.Check())
		require.NoError(t, s.Memset(b.Ptr(), 0xff, 60*mib))
		got := make([]byte, 8*mib)
		for i, l := range live {
			require.NoError(t, s.Download(got, l.Ptr()))
			require.EqualValues(t, 2*i+1, got[0])
			require.EqualValues(t, 2*i+1, got[len(got)-1])
		}
		free(t, p, b)
		for _, l := range live {
			free(t, p, l)
		}
		require.NoError(t, p.Check())
	})
}

// A request whose chunks move maps and grants them, and asks the driver nothing
// else, whatever the GPU does.
func TestMovingMakesOnlyTheCallsThatItNeeds(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(time.Hour))
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	live := holes(t, p, s, 16, 8*mib)
	hold(t, m, s)
	late := alloc(t, p, s, 8*mib)
	require.NoError(t, s.Memset(late.Ptr(), 1, 8*mib))
	free(t, p, late)
	m.ResetCounts()
	b := alloc(t, p, s, 64*mib)
	moved := calls(m)["cuMemMap"]
	require.LessOrEqual(t, moved, 32)
	pieces := (moved + 15) / 16
	require.Equal(t, map[string]int{"cuMemMap": moved, "cuMemSetAccess": pieces, "cuStreamIsCapturing": 1}, calls(m))
	free(t, p, b)
	for _, l := range live {
		free(t, p, l)
	}
}

// Chunks that the GPU may still use also move, for the stream that freed them: they are
// mapped at both addresses until the GPU has passed the first.
func TestAGPUThatIsBehindCostsNoMemory(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	live := holes(t, p, s, 8, 8*mib)
	hold(t, m, s)
	late := alloc(t, p, s, 8*mib)
	require.NoError(t, s.Memset(late.Ptr(), 1, 8*mib))
	free(t, p, late)
	had := p.Stats().Reserved
	b := alloc(t, p, s, 32*mib)
	require.Equal(t, had, p.Stats().Reserved)
	require.NoError(t, s.Memset(b.Ptr(), 1, 32*mib))
	require.NoError(t, p.Check())
	free(t, p, b)
	for _, l := range live {
		free(t, p, l)
	}
	m.Release(s.Handle())
	require.NoError(t, s.Synchronize(), "no work met memory that had moved away")
}

// Peers are granted access to new chunks, and such chunks do not move.
func TestChunksOfAPoolForPeersStay(t *testing.T) {
	m, sys := twoDevices(t)
	d, peer := sys.Devices()[0], sys.Devices()[1]
	s, far := stream(t, d), stream(t, peer)
	p := newPool(t, d, pool.Options{Access: []vmm.Access{{Location: peer.Location(), Mode: vmm.ReadWrite}}})
	live := holes(t, p, s, 8, 8*mib)
	m.ResetCounts()
	b := alloc(t, p, s, 20*mib)
	require.Zero(t, m.Count("cuMemUnmap"))
	require.NoError(t, far.Memset(b.Ptr(), 1, 20*mib))
	free(t, p, b, far)
	for _, l := range live {
		free(t, p, l)
	}
	_, err := p.Alloc(pool.Request{Bytes: 1, Stream: far})
	require.NoError(t, err, "a stream of a device with access")
	for _, l := range p.Live() {
		free(t, p, l.Block)
	}
}

// A pool at its limit serves a request that fits into another stream's holes,
// whenever the GPU passes them while the request looks for memory.
func TestAFullPoolServesWhatItsHolesHold(t *testing.T) {
	t.Cleanup(pool.SetMostLag(0))
	for asked := range 8 {
		m, d := open(t)
		s, other := stream(t, d), stream(t, d)
		const chunk, runs, each = 2 * mib, 8, 4
		p := newPool(t, d, pool.Options{Chunk: chunk, Limit: 2 * runs * each * chunk})
		var live, gone []pool.Block
		for i := range 2 * runs {
			b := alloc(t, p, s, each*chunk)
			if i%2 == 0 {
				live = append(live, b)
			} else {
				gone = append(gone, b)
			}
		}
		for _, b := range gone {
			free(t, p, b)
		}
		hold(t, m, s)
		queries := 0
		m.OnCall(func(call string) {
			if call != "cuEventQuery" {
				return
			}
			if queries++; queries == asked+1 {
				m.Release(s.Handle())
				time.Sleep(5 * time.Millisecond) // this query reports that it has passed
			}
		})
		live = append(live, alloc(t, p, other, runs*each*chunk))
		m.OnCall(nil)
		require.Greater(t, queries, asked)
		require.Equal(t, 2*runs*each*chunk, p.Stats().Reserved)
		for _, b := range live {
			free(t, p, b)
		}
	}
}

// Memory that changes its stream waits for the GPU, and the pool does not grow
// meanwhile.
func TestThePoolDoesNotGrowWhileTheGPUCatchesUp(t *testing.T) {
	t.Cleanup(pool.SetMostLag(testTimeout))
	m, d := open(t)
	s, other, named := stream(t, d), stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	for _, used := range [][]*cuda.Stream{nil, {named}} {
		late := s
		if used != nil {
			late = named
		}
		b := alloc(t, p, s, 64*mib)
		had := p.Stats().Reserved
		m.Hold(late.Handle())
		require.NoError(t, late.Memset(b.Ptr(), 1, 64*mib))
		free(t, p, b, used...)
		time.AfterFunc(20*time.Millisecond, func() { m.Release(late.Handle()) })
		c := alloc(t, p, other, 32*mib)
		require.Equal(t, had, p.Stats().Reserved)
		require.NoError(t, other.Memset(c.Ptr(), 1, 32*mib))
		free(t, p, c)
		require.NoError(t, other.Synchronize())
	}
}

// A request waits only once for a stream that does not move on, whether the stream freed
// the memory or a free named it.
func TestAStreamThatIsStuckIsWaitedForOnce(t *testing.T) {
	m, d := open(t)
	s, other, named := stream(t, d), stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	for _, used := range [][]*cuda.Stream{nil, {named}} {
		late := append(used, s)[0]
		b := alloc(t, p, s, 64*mib)
		hold(t, m, late)
		require.NoError(t, late.Memset(b.Ptr(), 1, 64*mib))
		free(t, p, b, used...)
		t.Cleanup(pool.SetMostLag(10 * time.Millisecond))
		first := alloc(t, p, other, 32*mib)
		t.Cleanup(pool.SetMostLag(time.Hour))
		within(t, "it is waited for again", func() { free(t, p, alloc(t, p, other, 64*mib)) })
		free(t, p, first)
		m.Release(late.Handle())
		require.NoError(t, late.Synchronize())
	}
}

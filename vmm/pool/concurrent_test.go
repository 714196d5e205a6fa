package pool_test

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Goroutines on streams of their own and on one that they share, with frees by
// others and trims in between.
func TestManyGoroutines(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 512 * kib64}}})
	p := newPool(t, d, pool.Options{Statistics: true})
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

// alloc2 allocates a block, frees it, and returns its address.
func alloc2(t *testing.T, p *pool.Pool, s *cuda.Stream, bytes int) cuda.Ptr {
	b := alloc(t, p, s, bytes)
	free(t, p, b)
	return b.Ptr()
}

// Memory that one stream freed and the GPU has passed goes to another stream, with no
// driver call except the event's.
func TestMemoryGoesToAnotherStreamOnceItHasPassed(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
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

// A closed stream is refused, even if the pool has memory for it.
func TestAClosedStreamIsRefused(t *testing.T) {
	_, d := open(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p := newPool(t, d, pool.Options{})
	free(t, p, alloc(t, p, s, 100))
	require.NoError(t, s.Close())
	b, err := p.Alloc(pool.Request{Bytes: 100, Stream: s})
	require.ErrorIs(t, err, cuda.ErrClosed)
	_ = p.Free(b)
}

// Memory that was made for a stream which is closed meanwhile is not forgotten.
func TestAStreamThatIsClosedDuringARequest(t *testing.T) {
	m, d := open(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	other, third := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	b := alloc(t, p, other, 100)
	free(t, p, alloc(t, p, s, 64*mib))
	require.Eventually(t, func() bool {
		freed, err := p.Trim(0)
		return err == nil && freed >= 64*mib
	}, testTimeout, time.Millisecond)
	var once sync.Once
	freed := make(chan error, 1)
	m.OnCall(func(call string) {
		if call == "cuMemCreate" {
			once.Do(func() {
				require.NoError(t, s.Close())
				go func() { freed <- p.Free(b, third) }() // a stream that the pool does not know
				for p.Stats().Waiting == 0 {
					time.Sleep(time.Millisecond)
				}
			})
		}
	})
	c, err := p.Alloc(pool.Request{Bytes: 64 * mib, Stream: s})
	m.OnCall(nil)
	require.NoError(t, <-freed)
	if err == nil {
		free(t, p, c)
	}
	require.NoError(t, p.Check())
}

// What a peer used is free when its context is lost: nothing runs there any more.
func TestALostPeerHoldsUpNothing(t *testing.T) {
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{}, {}}})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d, peer := sys.Devices()[0], sys.Devices()[1]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	far, err := peer.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p, err := pool.New(d, pool.Options{Access: []vmm.Access{{Location: peer.Location(), Mode: vmm.ReadWrite}}})
	require.NoError(t, err)
	b := alloc(t, p, s, 3*mib)
	c := alloc(t, p, far, 3*mib)
	require.NoError(t, p.Free(c))
	require.NoError(t, p.Free(b, far))
	lose(t, m, peer, far)
	free(t, p, alloc(t, p, s, 3*mib))
	require.NoError(t, p.Close())
	require.NoError(t, far.Close())
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
	_ = m.Close()
}

// lose destroys the context of a device: memory goes while its stream works on it.
func lose(t *testing.T, m *sim.Machine, d *cuda.Device, s *cuda.Stream) {
	t.Helper()
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(100)))
	idle, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 100))
	require.NoError(t, b.CloseAfter(idle))
	require.NoError(t, d.System().Drain(t.Context()))
	m.Release(s.Handle())
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	require.NoError(t, idle.Close())
}

// Pools and others of a System take the free memory of each other while all of
// them allocate.
func TestPoolsThatPressEachOther(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 64 * kib64}}})
	var g errgroup.Group
	for i := range 2 {
		p := newPool(t, d, pool.Options{Chunk: kib64, Wait: -1})
		for j := range 2 {
			s := stream(t, d)
			g.Go(func() error {
				r := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				var live []pool.Block
				for range 300 {
					if len(live) > 3 || len(live) > 0 && r.IntN(3) == 0 {
						if err := p.Free(live[0]); err != nil {
							return err
						}
						live = live[1:]
						continue
					}
					b, err := p.Alloc(pool.Request{Bytes: r.IntN(1 << (10 + r.IntN(11))), Stream: s})
					if err == nil {
						live = append(live, b)
					} else if !errors.Is(err, cuda.ErrOutOfMemory) {
						return err
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
	}
	g.Go(func() error {
		for i := range 100 {
			a, err := vmm.Create(d, (1+i%30)*kib64, vmm.Properties{})
			if err == nil {
				err = a.Close()
			}
			if err != nil && !errors.Is(err, cuda.ErrOutOfMemory) {
				return err
			}
		}
		return nil
	})
	require.NoError(t, g.Wait())
}

// A pool waits for the work of a stream even if the stream is closed meanwhile.
func TestAPoolClosesBesideItsStreams(t *testing.T) {
	m, d := open(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p := newPool(t, d, pool.Options{})
	b := alloc(t, p, s, 3*mib)
	hold(t, m, s)
	require.NoError(t, s.Memset(b.Ptr(), 1, 3*mib))
	free(t, p, b)
	waits := make(chan struct{})
	var first atomic.Bool
	m.OnCall(func(call string) {
		if call == "cuEventSynchronize" && first.CompareAndSwap(false, true) {
			close(waits)
		}
	})
	streamClosed, poolClosed := make(chan error, 1), make(chan error, 1)
	handle := s.Handle()
	go func() { streamClosed <- s.Close() }()
	<-waits
	go func() { poolClosed <- p.Close() }()
	select {
	case err := <-poolClosed:
		t.Fatalf("closed while the stream works: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	m.Release(handle)
	require.NoError(t, <-streamClosed)
	require.NoError(t, <-poolClosed)
	m.OnCall(nil)
}

// Find looks at chunks whose size class and stream change meanwhile.
func TestFindBesideChunksThatChange(t *testing.T) {
	_, d := open(t)
	p := newPool(t, d, pool.Options{Limit: 4 * mib})
	rounds := 3000
	if thorough {
		rounds = 100
	}
	var last atomic.Uint64
	var users, finder sync.WaitGroup
	for range 2 {
		s := stream(t, d)
		users.Go(func() {
			for i := range rounds {
				b, err := p.Alloc(pool.Request{Bytes: 512 << (i % 10), Stream: s})
				if err == nil {
					last.Store(uint64(b.Ptr()))
					err = p.Free(b)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var stop atomic.Bool
	finder.Go(func() {
		for !stop.Load() {
			at := cuda.Ptr(last.Load())
			if b, ok := p.Find(at); ok && b.Ptr() != at {
				t.Errorf("%v was found at %v", b, at)
				return
			}
		}
	})
	users.Wait()
	stop.Store(true)
	finder.Wait()
}

// Check finds nothing beside frees of blocks that captures allocated.
func TestCheckBesideFreesOfCapturedBlocks(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 512 * kib64}}})
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	done := make(chan struct{})
	var checks sync.WaitGroup
	checks.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				assert.NoError(t, p.Check())
			}
		}
	})
	for range 400 {
		var b pool.Block
		g, _ := captured(t, p, s, pool.CaptureOptions{}, func() (err error) {
			b, err = p.Alloc(pool.Request{Bytes: 100000, Stream: s})
			return err
		})
		assert.NoError(t, p.Free(b))
		assert.NoError(t, g.Close())
		if t.Failed() {
			break
		}
	}
	close(done)
	checks.Wait()
}

package pool_test

import (
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

func twoDevices(t *testing.T) (*sim.Machine, *cuda.System) {
	t.Helper()
	return sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{}, {}}})
}

// openSmall is a device of 64 MiB.
func openSmall(t *testing.T) (*sim.Machine, *cuda.Device) {
	t.Helper()
	return open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64*mib + 2*mib}}})
}

func TestRefusalsTellWhatRanOut(t *testing.T) {
	m, d := openSmall(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Wait: -1})
	weights, err := p.Alloc(pool.Request{Bytes: 30 * mib, Stream: s, Tag: pool.NewTag("weights")})
	require.NoError(t, err)
	small, err := p.Alloc(pool.Request{Bytes: 100, Stream: s})
	require.NoError(t, err)

	_, err = p.Alloc(pool.Request{Bytes: 50 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, `50 MiB for stream`)
	require.ErrorContains(t, err, "free blocks")
	require.ErrorContains(t, err, `"weights" 30 MiB in 1, without a tag 100 bytes in 1`)
	require.NoError(t, p.Check())

	_, err = p.Alloc(pool.Request{Bytes: 1 << 40, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)

	require.NoError(t, p.SetLimit(40*mib))
	_, err = p.Alloc(pool.Request{Bytes: 20 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, "the limit is 40 MiB")
	_, err = p.Alloc(pool.Request{Bytes: 50 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.NoError(t, p.SetLimit(0))
	free(t, p, weights)
	free(t, p, small)
	require.NoError(t, p.Close())

	q := newPool(t, d, pool.Options{})
	m.Inject(sim.Fault{Call: "cuMemAddressReserve", Times: -1, Result: 2})
	defer m.ClearFaults()
	_, err = q.Alloc(pool.Request{Bytes: mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfAddressSpace)
	require.NotErrorIs(t, err, cuda.ErrOutOfMemory)

	m.ClearFaults()
	m.Inject(sim.Fault{Call: "cuMemCreate", Times: -1, Result: 2})
	_, err = q.Alloc(pool.Request{Bytes: mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "ulimit -v", "the device has memory left")
}

func TestWrongRequests(t *testing.T) {
	_, d := open(t)
	_, other := open(t)
	s, foreign := stream(t, d), stream(t, other)
	p, q := newPool(t, d, pool.Options{}), newPool(t, d, pool.Options{})
	for _, c := range []struct {
		r    pool.Request
		kind error
		says string
	}{
		{pool.Request{Bytes: 1}, cuda.ErrInvalidArgument, "no stream"},
		{pool.Request{Bytes: -1, Stream: s}, cuda.ErrInvalidArgument, "-1 bytes"},
		{pool.Request{Bytes: 1 << 60, Stream: s}, cuda.ErrInvalidArgument, "no device has that much"},
		{pool.Request{Bytes: 1, Align: 3, Stream: s}, cuda.ErrInvalidArgument, "an alignment of 3"},
		{pool.Request{Bytes: 1, Align: -4, Stream: s}, cuda.ErrInvalidArgument, "an alignment of -4"},
		{pool.Request{Bytes: 1, Align: 4 * mib, Stream: s}, cuda.ErrInvalidArgument, "power of two up to 2 MiB"},
		{pool.Request{Bytes: 1, Stream: foreign}, cuda.ErrForeign, "another System"},
	} {
		_, err := p.Alloc(c.r)
		require.ErrorIs(t, err, c.kind)
		require.ErrorContains(t, err, c.says)
	}
	require.ErrorIs(t, p.Free(pool.Block{}), cuda.ErrInvalidArgument)
	b := alloc(t, p, s, 100)
	require.ErrorIs(t, q.Free(b), cuda.ErrForeign)
	require.ErrorIs(t, p.Free(b, nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, p.Free(b, foreign), cuda.ErrForeign)
	require.ErrorIs(t, p.FreePtr(b.Ptr()+512), cuda.ErrInvalidArgument)
	require.ErrorIs(t, p.FreePtr(0), cuda.ErrInvalidArgument)
	err := p.Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "1 live block: 100 bytes at 0x")
	free(t, p, b)
	require.NoError(t, p.Close())
	_, err = p.Alloc(pool.Request{Bytes: 1, Stream: s})
	require.ErrorIs(t, err, cuda.ErrClosed)
	for _, o := range []pool.Options{{SmallMax: 3 * mib}, {SmallMax: 100}, {Chunk: mib}, {Chunk: -2 * mib}, {Limit: -1}, {Limit: 1}} {
		_, err := pool.New(d, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
}

// A request waits for freed memory until the GPU has passed it.
func TestARequestWaitsForTheGPU(t *testing.T) {
	m, d := openSmall(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{Wait: testTimeout})
	b := alloc(t, p, s, 60*mib)
	hold(t, m, s)
	require.NoError(t, s.Memset(b.Ptr(), 1, mib))
	free(t, p, b)
	go func() {
		time.Sleep(20 * time.Millisecond)
		m.Release(s.Handle())
	}()
	free(t, p, alloc(t, p, other, 50*mib))
}

// Every kind of memory turns into every other one, whenever the streams pass: on many
// threads that is between any two steps of a request.
func TestMemoryOfOneKindServesTheOthers(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	_, d := openSmall(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	fill := func(s *cuda.Stream, bytes int) {
		t.Helper()
		var all []pool.Block
		for n := 0; n+max(bytes, 512) <= 56*mib; n += max(bytes, 512) {
			all = append(all, alloc(t, p, s, bytes))
		}
		require.NoError(t, p.Check())
		for _, b := range all {
			free(t, p, b)
		}
	}
	rounds := 60
	if thorough {
		rounds = 6
	}
	for range rounds {
		for _, bytes := range []int{50 * kib, mib, 40 * mib, 256 * kib, 3 * mib, 50 * mib} {
			fill(s, bytes)
			fill(other, bytes)
		}
	}
}

// Other users of the System get the pool's free memory, and the pool gets theirs.
func TestOthersUnderPressure(t *testing.T) {
	patient(t)
	_, d := openSmall(t)
	s := stream(t, d)
	p, q := newPool(t, d, pool.Options{}), newPool(t, d, pool.Options{})
	free(t, p, alloc(t, p, s, 60*mib))
	require.NotZero(t, p.Stats().Reserved)
	free(t, q, alloc(t, q, s, 60*mib))
	require.Zero(t, p.Stats().Reserved)
	a, err := vmm.Create(d, 50*mib, vmm.Properties{})
	require.NoError(t, err)
	require.NoError(t, a.Close())
	free(t, p, alloc(t, p, s, 40*mib))
}

func TestTheCallbackMayMakeRoom(t *testing.T) {
	_, d := openSmall(t)
	s := stream(t, d)
	var p *pool.Pool
	var first pool.Block
	asked := 0
	p = newPool(t, d, pool.Options{OnExhausted: func(e pool.Exhausted) bool {
		asked++
		require.Equal(t, 50*mib, e.Bytes)
		require.ErrorIs(t, e.Reason, cuda.ErrOutOfMemory)
		require.Equal(t, 40*mib, e.Requested)
		if asked == 1 {
			free(t, p, first)
		}
		return asked == 1
	}})
	first = alloc(t, p, s, 40*mib)
	second := alloc(t, p, s, 50*mib)
	require.Equal(t, 1, asked)
	free(t, p, second)
	first = alloc(t, p, s, 40*mib)
	asked = 1
	_, err := p.Alloc(pool.Request{Bytes: 50 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.Equal(t, 2, asked)
	free(t, p, first)
}

func TestStatisticsAndTracking(t *testing.T) {
	_, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{Statistics: true, Track: true})
	a, err := p.Alloc(pool.Request{Bytes: 1000, Stream: s, Tag: pool.NewTag("a")})
	require.NoError(t, err)
	b, err := p.Alloc(pool.Request{Bytes: 3 * mib, Stream: other, Tag: pool.NewTag("b")})
	require.NoError(t, err)
	free(t, p, a)
	st := p.Stats()
	require.Equal(t, 1000+3*mib, st.PeakRequested)
	require.Equal(t, 2, st.PeakBlocks)
	require.Equal(t, 2, st.Allocs)
	require.Equal(t, 1, st.Frees)
	require.Equal(t, 1000+3*mib, st.AllocatedBytes)
	require.Equal(t, 2, st.Streams)
	require.Len(t, st.Tags, 2)
	require.Equal(t, "b", st.Tags[1].Tag.String())
	require.Equal(t, pool.TagStats{Tag: pool.NewTag("b"), Requested: 3 * mib, Blocks: 1, PeakRequested: 3 * mib, Allocs: 1, AllocatedBytes: 3 * mib}, st.Tags[1])
	live := p.Live()
	require.Len(t, live, 1)
	require.Contains(t, live[0].Stack[0].Function, "TestStatisticsAndTracking")
	require.Regexp(t, `^3 MiB at 0x[0-9a-f]+ \(b\), allocated at pressure_test.go:\d+$`, live[0].String())
	require.ErrorContains(t, p.Close(), "allocated at pressure_test.go")
	free(t, p, b)
	_, err = p.Trim(0)
	require.NoError(t, err)
	p.ResetPeaks()
	st = p.Stats()
	require.Equal(t, []int{0, 0, st.Reserved}, []int{st.PeakRequested, st.PeakBlocks, st.PeakReserved})
	require.Equal(t, 2, st.Allocs)
}

// A stream that is busy all the time passes something all the time. A request that
// nothing can serve is refused nevertheless.
func TestARefusalComesWhateverOthersDo(t *testing.T) {
	_, d := openSmall(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{Wait: -1})
	kept := alloc(t, p, s, 40*mib)
	var stop atomic.Bool
	var busy sync.WaitGroup
	busy.Go(func() {
		for !stop.Load() {
			b, err := p.Alloc(pool.Request{Bytes: 1000, Stream: other})
			if err == nil {
				_ = p.Free(b)
			}
		}
	})
	time.Sleep(10 * time.Millisecond)
	within(t, "no refusal", func() {
		_, err := p.Alloc(pool.Request{Bytes: 50 * mib, Stream: s})
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	})
	stop.Store(true)
	busy.Wait()
	free(t, p, kept)
}

// The peak does not count memory that the driver refused.
func TestThePeakIsWhatThereWas(t *testing.T) {
	_, d := openSmall(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Wait: -1, Chunk: 40 * mib})
	b := alloc(t, p, s, 40*mib)
	had := p.Stats().PeakReserved
	_, err := p.Alloc(pool.Request{Bytes: 30 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	free(t, p, b)
	require.Equal(t, had, p.Stats().PeakReserved)
}

// The callback is also called for a request that is larger than the limit.
func TestTheCallbackMayRaiseTheLimit(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	var p *pool.Pool
	p = newPool(t, d, pool.Options{Limit: 10 * mib, OnExhausted: func(e pool.Exhausted) bool {
		require.ErrorIs(t, e.Reason, cuda.ErrBudget)
		require.NoError(t, p.SetLimit(100*mib))
		return true
	}})
	b := alloc(t, p, s, 50*mib)
	free(t, p, b)
}

// An allocation outside of the pool gets the pool's memory while it closes.
func TestAPoolClosesWhileOthersTakeItsMemory(t *testing.T) {
	patient(t)
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 66 * mib}}})
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	free(t, p, alloc(t, p, s, 1000))
	free(t, p, alloc(t, p, s, 50*mib))
	require.NoError(t, s.Synchronize())
	closed := make(chan error, 1)
	var first atomic.Bool
	m.OnCall(func(call string) {
		if call == "cuMemUnmap" && first.CompareAndSwap(false, true) {
			go func() { closed <- p.Close() }()
			for n := 0; n < 100 && m.Count("cuMemAddressFree") == 0; n++ {
				time.Sleep(3 * time.Millisecond)
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	if a, err := vmm.Create(d, 60*mib, vmm.Properties{}); err == nil {
		require.NoError(t, a.Close())
	}
	within(t, "Close hangs", func() { require.NoError(t, <-closed) })
	m.OnCall(nil)
}

// A Close that waits for the GPU delays no allocation outside of the pool.
func TestPressureDoesNotWaitForAClose(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 66 * mib}}})
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	b := alloc(t, p, s, 50*mib)
	hold(t, m, s)
	require.NoError(t, s.Memset(b.Ptr(), 1, 50*mib))
	free(t, p, b)
	waiting := make(chan struct{})
	once := sync.Once{}
	m.OnCall(func(call string) {
		if call == "cuEventSynchronize" {
			once.Do(func() { close(waiting) })
		}
	})
	closed := make(chan error, 1)
	go func() { closed <- p.Close() }()
	<-waiting
	time.Sleep(10 * time.Millisecond)
	within(t, "pressure waits for the GPU", func() {
		_, err := vmm.Create(d, 60*mib, vmm.Properties{})
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	})
	m.OnCall(nil)
	m.Release(s.Handle())
	require.NoError(t, <-closed)
}

// A pool works with a limit below its default chunk. A chunk that is set and does not
// fit the limit is refused, by New or with the first request.
func TestALimitBelowAChunk(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p, err := pool.New(d, pool.Options{Limit: 16 * mib})
	require.NoError(t, err)
	b := alloc(t, p, s, 10*mib)
	free(t, p, alloc(t, p, s, 100))
	free(t, p, b)
	require.NoError(t, p.Close())
	_, err = pool.New(d, pool.Options{Limit: 16 * mib, Chunk: 32 * mib})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "use at most Options.Limit, 16 MiB")
	p = newPool(t, d, pool.Options{Chunk: 32 * mib})
	require.NoError(t, p.SetLimit(16*mib))
	_, err = p.Alloc(pool.Request{Bytes: mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, "chunks of 32 MiB: raise the limit with Pool.SetLimit")
	free(t, p, alloc(t, p, s, 100))
}

func TestSizesThatMakeNoSense(t *testing.T) {
	_, d := open(t)
	p := newPool(t, d, pool.Options{})
	for _, bytes := range []int{-1, 1, mib} {
		err := p.SetLimit(bytes)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "use at least the granularity, 2 MiB, or 0 for no limit")
		_, err = pool.New(d, pool.Options{Limit: bytes})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "use at least the granularity, 2 MiB, or 0 for no limit")
	}
	_, err := p.Trim(-5)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "use a size in bytes, or 0 for all")
	require.Zero(t, p.Stats().Limit)
}

// A pool that finds no memory makes other pools give some back. If one of those allocates
// itself meanwhile, this pool gives it what the GPU has passed.
func TestAPoolUnderPressureServesOthers(t *testing.T) {
	if thorough {
		t.Skip("every operation ends with a check, which waits for the request")
	}
	_, d := openSmall(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{Wait: -1})
	kept := alloc(t, p, s, 20*mib)
	idle := alloc(t, p, other, 32*mib)
	var beside error
	var asked atomic.Bool
	keeper := core.SystemOf(d).OnPressure(func(uint64) (uint64, bool) {
		if asked.Swap(true) {
			return 0, false
		}
		free(t, p, idle)
		require.NoError(t, other.Synchronize())
		done := make(chan struct{})
		go func() {
			defer close(done)
			var a *vmm.Allocation
			if a, beside = vmm.Create(d, 30*mib, vmm.Properties{}); beside == nil {
				beside = a.Close()
			}
		}()
		<-done
		return 0, false
	})
	_, err := p.Alloc(pool.Request{Bytes: 60 * mib, Stream: s})
	keeper.Remove()
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.NoError(t, beside, "the pool had 32 MiB that the GPU had passed")
	free(t, p, kept)
}

// System.Live lists a pool, with its size, until it is closed.
func TestAPoolIsListed(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p, err := pool.New(d, pool.Options{Chunk: 2 * mib})
	require.NoError(t, err)
	released := p.Released()
	b := alloc(t, p, s, 6*mib)
	listed := func(name string) bool {
		return slices.ContainsFunc(d.System().Live(), func(l string) bool { return strings.HasPrefix(l, name) })
	}
	require.True(t, listed("pool of 6 MiB"))
	require.ErrorIs(t, p.Close(), cuda.ErrInUse)
	require.ErrorIs(t, released.Wait(t.Context()), cuda.ErrInUse)
	released = p.Released()
	free(t, p, b)
	require.NoError(t, s.Synchronize())
	_, err = p.Trim(0)
	require.NoError(t, err)
	require.True(t, listed("pool"))
	require.False(t, listed("pool of"))
	require.NoError(t, p.Close())
	require.NoError(t, released.Wait(t.Context()))
	require.False(t, listed("pool"))
}

// The memory of a stream that the GPU has passed is found behind any number of streams
// that are stuck.
func TestStuckStreamsHideNoOther(t *testing.T) {
	t.Cleanup(pool.SetMostLag(10 * time.Millisecond))
	m, d := open(t)
	p := newPool(t, d, pool.Options{})
	const stuck = 70
	for range stuck {
		s := stream(t, d)
		b := alloc(t, p, s, 2*mib)
		hold(t, m, s)
		require.NoError(t, s.Memset(b.Ptr(), 1, 2*mib))
		free(t, p, b)
	}
	passed, s := stream(t, d), stream(t, d)
	b := alloc(t, p, s, 2*mib) // the stuck ones are waited for in vain
	late := alloc(t, p, passed, 32*mib)
	free(t, p, late)
	require.NoError(t, passed.Synchronize())
	had := p.Stats().Reserved
	c := alloc(t, p, s, 16*mib)
	require.Equal(t, had, p.Stats().Reserved)
	free(t, p, b)
	free(t, p, c)
}

// A function that panics refuses the request, and is logged.
func TestOnExhaustedThatPanics(t *testing.T) {
	_, d := open(t)
	p := newPool(t, d, pool.Options{Limit: 10 * mib, OnExhausted: func(pool.Exhausted) bool { panic("no") }})
	s := stream(t, d)
	require.NotPanics(t, func() {
		b, err := p.Alloc(pool.Request{Bytes: 9 * mib, Stream: s})
		require.NoError(t, err)
		_, err = p.Alloc(pool.Request{Bytes: 9 * mib, Stream: s})
		require.ErrorIs(t, err, cuda.ErrBudget)
		require.NoError(t, p.Free(b))
	})
}

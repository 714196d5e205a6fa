package vmm_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// openSmall is a device of 66 MiB whose System waits for pending memory.
func openSmall(t *testing.T, wait time.Duration) (*sim.Machine, *cuda.Device) {
	t.Helper()
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Memory: 66 * mib}}})
	require.NoError(t, err)
	closed(t, m)
	s, err := m.Open(cuda.Options{AllocationWait: wait, TraceLeaks: true})
	require.NoError(t, err)
	closed(t, s)
	return m, s.Devices()[0]
}

func TestAllocationWaitsForMemoryThatIsPending(t *testing.T) {
	m, d := openSmall(t, time.Minute)
	s := stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(16 * mib)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(48*mib)))
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, mib))
	require.NoError(t, b.CloseAfter(s))
	go func() {
		time.Sleep(20 * time.Millisecond)
		m.Release(s.Handle())
	}()
	again, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(16 * mib)})
	require.NoError(t, err)
	closed(t, again)
	require.NoError(t, gputest.Err(again.AppendUndefined(48*mib)), "the memory came back within the bound")
}

func TestAllocationGivesUpAtTheBound(t *testing.T) {
	m, d := openSmall(t, 20*time.Millisecond)
	s := stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(16 * mib)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(48*mib)))
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, mib))
	require.NoError(t, b.CloseAfter(s))
	again, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(16 * mib)})
	require.NoError(t, err)
	closed(t, again)
	_, err = again.AppendUndefined(48 * mib)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "1 closed object or callback waits for the GPU: call Drain")
	m.Release(s.Handle())
	require.NoError(t, d.System().Drain(t.Context()))
	require.NoError(t, gputest.Err(again.AppendUndefined(48*mib)))
}

// Where the software driver has memory left and returns that there is none, the
// advice is not to free some.
func TestARefusalOfTheSystemIsNoWantOfDeviceMemory(t *testing.T) {
	m, d := openSmall(t, 0)
	m.Inject(sim.Fault{Call: "cuMemCreate", Result: 2, Times: -1})
	_, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "ulimit -v")
	m.ClearFaults()
	_, err = vmm.Create(d, 68*mib, vmm.Properties{})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "free device memory, or ask for less")
}

func TestAllocationAsksThoseWhoKeepMemory(t *testing.T) {
	_, d := openSmall(t, 0)
	kept, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(16 * mib)})
	require.NoError(t, err)
	closed(t, kept)
	require.NoError(t, gputest.Err(kept.AppendUndefined(48*mib)))
	asked := uint64(0)
	keeper := core.SystemOf(d).OnPressure(func(need uint64) (uint64, bool) {
		asked = need
		if err := kept.Resize(nil, 0); err != nil {
			return 0, false
		}
		if err := kept.Clip(); err != nil {
			return 0, false
		}
		return 48 * mib, false
	})
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(32 * mib)})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.AppendUndefined(32*mib)))
	require.EqualValues(t, 32*mib, asked)
	keeper.Remove()
	require.ErrorIs(t, gputest.Err(kept.AppendUndefined(48*mib)), cuda.ErrOutOfMemory, "no trimmer is called any more")
}

// One of those that keep memory panics: the others are asked all the same.
func TestAPanicUnderPressureIsLogged(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	a, err := vmm.Create(d, 40*mib, vmm.Properties{})
	require.NoError(t, err)
	defer core.SystemOf(d).OnPressure(func(uint64) (uint64, bool) { panic("of the user") }).Remove()
	defer core.SystemOf(d).OnPressure(func(need uint64) (uint64, bool) {
		if a == nil {
			return 0, false
		}
		require.NoError(t, a.Close())
		a = nil
		return 40 * mib, false
	}).Remove()
	b, err := vmm.Create(d, 40*mib, vmm.Properties{})
	require.NoError(t, err, "%v", m.Log())
	require.NoError(t, b.Close())
}

// Where there is no memory for the chunk that the plan would take, the least
// that it allows and that is enough is taken instead.
func TestGrowthTakesASmallerChunkWhereALargeOneDoesNotFit(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 16 * mib}}})
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.GeometricChunks(2*kib64, 8*mib)})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(8*mib, 1))))
	free, _ := m.Memory(0)
	other, err := vmm.Create(d, int(free)/kib64*kib64-20*kib64, vmm.Properties{})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1})))
	require.Equal(t, 8*mib+2*kib64, b.Stats().Committed, "the floor")
	require.NoError(t, gputest.Err(b.AppendUndefined(5*kib64)))
	require.Equal(t, 8*mib+6*kib64, b.Stats().Committed, "as much as it needs")
	_, err = b.AppendUndefined(20 * kib64)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.Equal(t, 8*mib+6*kib64, b.Stats().Committed, "nothing has changed")
	require.NoError(t, other.Close())
	require.NoError(t, gputest.Err(b.AppendUndefined(20*kib64)))
}

// Without an option an append waits for what was closed while the GPU used it, as a pool
// does, however many objects that are.
func TestAnAppendWaitsForManyClosedBuffers(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 66 * mib, Granularity: kib64}}})
	s := stream(t, d)
	fill := func() (all []*vmm.Buffer) {
		for range 64 * mib / (8 * kib64) {
			b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * kib64, Chunks: vmm.FixedChunks(8 * kib64)})
			require.NoError(t, err)
			require.NoError(t, gputest.Err(b.AppendUndefined(8*kib64)))
			all = append(all, b)
		}
		return all
	}
	release := m.Hold(s.Handle())
	for _, b := range fill() {
		require.NoError(t, s.Memset(b.Ptr(), 1, 100))
		require.NoError(t, b.CloseAfter(s))
	}
	time.AfterFunc(100*time.Millisecond, release) // longer than an allocation waits for teardowns in progress
	for _, b := range fill() {
		require.NoError(t, b.Close())
	}
}

package pool_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t,
		(*pool.Pool)(nil), &pool.Pool{}, (*pool.Arena)(nil), &pool.Arena{}, (*pool.Capture)(nil), &pool.Capture{},
		(*pool.Workspaces)(nil), &pool.Workspaces{},
	)
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	require.ErrorContains(t, gputest.Err(p.BeginCapture(nil, pool.CaptureOptions{})), "pool.BeginCapture: invalid argument: a nil stream")
	for says, o := range map[string]pool.CaptureOptions{
		"a nil or zero arena":             {Arena: &pool.Arena{}},
		"a nil or zero set of workspaces": {Workspaces: &pool.Workspaces{}},
	} {
		_, _, err := p.Capture(s, o, func() error { return nil })
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, says)
	}
}

// A pool uses the arenas and workspaces that it made, and says so.
func TestWhatAnotherPoolMade(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p, q := newPool(t, d, pool.Options{}), newPool(t, d, pool.Options{})
	arena, err := q.NewArena()
	require.NoError(t, err)
	work, err := q.Prepare(s, pool.Workspace{Name: "w", Bytes: 100})
	require.NoError(t, err)
	for says, o := range map[string]pool.CaptureOptions{
		"the arena is another pool's":       {Arena: arena},
		"the workspaces are another pool's": {Workspaces: work},
	} {
		_, _, err := p.Capture(s, o, func() error { return nil })
		require.ErrorIs(t, err, cuda.ErrForeign)
		require.ErrorContains(t, err, says)
	}
	require.NoError(t, work.Close())
	require.NoError(t, arena.Close())
}

// The chunks of a device with little memory are small, and one that the device could not
// hold is refused.
func TestChunksFitTheDevice(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	s := stream(t, d)
	_, err := pool.New(d, pool.Options{Chunk: 128 * mib})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "use at most the device's memory, 64 MiB")

	p, err := pool.New(d, pool.Options{})
	require.NoError(t, err)
	var all []pool.Block
	for range 6 {
		all = append(all, alloc(t, p, s, 9*mib))
	}
	for _, b := range all {
		free(t, p, b)
	}
	require.NoError(t, p.Close())

	p, err = pool.New(d, pool.Options{Chunk: 32 * mib, Wait: -1})
	require.NoError(t, err)
	one, two := alloc(t, p, s, 100), alloc(t, p, s, 30*mib) // a slab and a chunk
	_, err = p.Alloc(pool.Request{Bytes: 9 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "such requests are served in chunks of 32 MiB: use a smaller Options.Chunk")
	require.ErrorContains(t, err, "the pool has 34 MiB, of which 31457380 bytes are requested by live blocks")
	free(t, p, one)
	free(t, p, two)
	require.NoError(t, p.Close())
}

// What fits is decided by the device that the memory lies on, which may be another than the
// pool's.
func TestChunksFitTheDeviceOfTheMemory(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}, {Memory: 1 << 30}}})
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Memory: vmm.Properties{Location: cuda.OnDevice(1)}, Chunk: 128 * mib})
	free(t, p, alloc(t, p, s, 100*mib))
	require.Equal(t, 128*mib, p.Stats().Reserved)
}

// So are address ranges and errors: the device of the memory is measured and named, and its
// free memory is named only if the program uses that device.
func TestErrorsNameTheDeviceOfTheMemory(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 1 << 30}, {Name: "Small GPU", Memory: 64 * mib}}})
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Memory: vmm.Properties{Location: cuda.OnDevice(1)}, Wait: -1})
	b := alloc(t, p, s, 60*mib)
	_, err := p.Alloc(pool.Request{Bytes: 32 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "on device 1 (Small GPU); the pool has 64 MiB")
	require.NotContains(t, err.Error(), "free of")
	_, err = p.Alloc(pool.Request{Bytes: 32 * mib, Stream: stream(t, d.System().Devices()[1])})
	require.ErrorContains(t, err, "a stream of device 1 for a pool of device 0")
	_, err = p.Alloc(pool.Request{Bytes: 32 * mib, Stream: s})
	require.ErrorContains(t, err, "KiB free of 64 MiB")
	free(t, p, b)

	host := newPool(t, d, pool.Options{Memory: vmm.Properties{Location: cuda.OnHostNUMA(0)}, Limit: 8 * mib, Wait: -1})
	_, err = host.Alloc(pool.Request{Bytes: 16 * mib, Stream: s})
	require.ErrorContains(t, err, "on host NUMA node 0; the pool has")
}

// Devices may differ in granularity: chunks and address ranges are multiples of both.
func TestDevicesOfTwoGranularities(t *testing.T) {
	for _, of := range [][2]int{{2 * mib, 8 * mib}, {8 * mib, 2 * mib}} {
		_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib, Granularity: of[0]}, {Memory: 62 * mib, Granularity: of[1]}}})
		s := stream(t, d)
		p := newPool(t, d, pool.Options{Memory: vmm.Properties{Location: cuda.OnDevice(1)}, Chunk: 8 * mib})
		small, large := alloc(t, p, s, 100), alloc(t, p, s, 20*mib)
		require.Equal(t, 32*mib, p.Stats().Reserved)
		require.NoError(t, p.Check())
		free(t, p, small)
		free(t, p, large)
	}
}

// OnExhausted knows the limit, so that it frees nothing in vain, and is not called for what
// the device cannot hold at all.
func TestTheCallbackKnowsTheLimit(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	s := stream(t, d)
	var limits []int
	p := newPool(t, d, pool.Options{Limit: 10 * mib, OnExhausted: func(e pool.Exhausted) bool {
		limits = append(limits, e.Limit)
		return false
	}})
	_, err := p.Alloc(pool.Request{Bytes: 12 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.Equal(t, []int{10 * mib}, limits)
	require.NoError(t, p.SetLimit(0))
	_, err = p.Alloc(pool.Request{Bytes: 100 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.Len(t, limits, 1)
}

// A history of more events than a process can hold is a shorter one.
func TestALongHistoryIsBounded(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	p.StartHistory(pool.HistoryOptions{Events: 1 << 40})
	free(t, p, alloc(t, p, s, 100))
	require.Len(t, p.History(), 2)
	p.StopHistory()
}

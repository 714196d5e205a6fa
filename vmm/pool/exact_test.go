package pool_test

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// A cold exact request asks the driver for the chunk and its mapping, and the
// address is at hand.
func TestAColdExactRequestIsThreeDriverCalls(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{ExactFrom: 4 * mib})
	first := alloc(t, p, s, 4*mib)
	m.ResetCounts()
	second := alloc(t, p, s, 6*mib)
	require.Equal(t, map[string]int{"cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 1}, calls(m))
	free(t, p, first)
	free(t, p, second)
}

// trimAll gives back all of a pool in which nothing lives, as the GPU passes.
func trimAll(t *testing.T, p *pool.Pool) {
	t.Helper()
	within(t, "what was freed never passed", func() {
		for p.Stats().Reserved > 0 {
			if _, err := p.Trim(0); err != nil {
				t.Error(err)
				return
			}
		}
	})
}

// However sizes vary and chunks come and go, they lie in few ranges.
func TestExactChunksReuseAddresses(t *testing.T) {
	const total = 256 * kib64
	for _, granule := range []int{kib64, 2 * kib64} {
		_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: uint64(granule), Memory: total}}})
		s := stream(t, d)
		p := newPool(t, d, pool.Options{Chunk: granule, ExactFrom: granule / 2, SmallMax: granule / 4})
		r := rand.New(rand.NewPCG(1, 1))
		var live []pool.Block
		bytes := 0
		for range 500 {
			size := granule * (1 + r.IntN(32))
			for len(live) > 0 && (bytes+size > total/2 || r.IntN(4) == 0) {
				i := r.IntN(len(live))
				bytes -= live[i].Bytes()
				require.NoError(t, s.Memset(live[i].Ptr(), 1, live[i].Bytes()))
				free(t, p, live[i])
				live = append(live[:i], live[i+1:]...)
			}
			if bytes+size > total/2 {
				continue
			}
			if r.IntN(2) == 0 {
				require.NoError(t, s.Synchronize())
				_, err := p.Trim(0)
				require.NoError(t, err)
			}
			live = append(live, alloc(t, p, s, size))
			bytes += size
		}
		require.NoError(t, p.Check())
		require.LessOrEqual(t, d.System().Stats().ReservedBytes, uint64(3*total))
		for _, b := range live {
			free(t, p, b)
		}
		trimAll(t, p)
		before := d.System().Stats().ReservedBytes
		for range 20 {
			b := alloc(t, p, s, total/2)
			free(t, p, b)
			trimAll(t, p)
		}
		require.Equal(t, before, d.System().Stats().ReservedBytes, "the places of what was trimmed are one again")
	}
}

// Chunks of granules that are larger than what Request.Align can ask for lie at
// multiples of them, beside a device of smaller ones.
func TestExactChunksOfLargeGranules(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: 8 * mib, Memory: 64 * mib}, {Granularity: kib64, Memory: 64 * kib64}}})
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Chunk: 8 * mib, ExactFrom: 8 * mib})
	var live []pool.Block
	for _, bytes := range []int{8 * mib, 9 * mib, 100, 4 * mib} {
		b := alloc(t, p, s, bytes)
		require.NoError(t, s.Memset(b.Ptr(), 1, bytes))
		live = append(live, b)
	}
	require.Zero(t, live[0].Ptr()%(8*mib))
	for _, b := range live {
		require.NoError(t, p.FreePtr(b.Ptr()))
	}
}

// A block is found by its first address alone, as long as it lives.
func TestExactBlocksByAddress(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{ExactFrom: 4 * mib})
	b := alloc(t, p, s, 6*mib)
	found, ok := p.Find(b.Ptr())
	require.True(t, ok)
	require.Equal(t, b, found)
	for _, off := range []cuda.Ptr{512, 2 * mib, 6*mib - 512, 6 * mib, 1 << 30} {
		_, ok := p.Find(b.Ptr() + off)
		require.False(t, ok, "%d bytes behind", off)
	}
	free(t, p, b)
	_, ok = p.Find(b.Ptr())
	require.False(t, ok)
}

// Addresses may be looked up while their memory changes its owner.
func TestFindWhileMemoryGoesToAnotherStream(t *testing.T) {
	patient(t)
	_, d := open(t)
	p := newPool(t, d, pool.Options{ExactFrom: 8 * mib})
	a, b := stream(t, d), stream(t, d)
	one, two := alloc(t, p, a, 8*mib), alloc(t, p, a, 4*mib)
	at := []cuda.Ptr{one.Ptr(), two.Ptr()}
	free(t, p, one)
	free(t, p, two)
	ctx, stop := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error {
		for ctx.Err() == nil {
			for _, ptr := range at {
				p.Find(ptr)
			}
		}
		return nil
	})
	for i := range 150 {
		s := []*cuda.Stream{a, b}[i%2]
		one, two := alloc(t, p, s, 8*mib), alloc(t, p, s, 4*mib)
		free(t, p, one)
		free(t, p, two)
		require.NoError(t, s.Synchronize())
	}
	stop()
	require.NoError(t, g.Wait())
}

// Where address space is short, ranges in which nothing is make room, and what
// cannot be given back goes when the pool is closed.
func TestEmptyRangesMakeRoomWhereAddressSpaceIsShort(t *testing.T) {
	for _, fails := range []bool{false, true} {
		m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 64 * kib64}}})
		s := stream(t, d)
		p, err := pool.New(d, pool.Options{Chunk: kib64, ExactFrom: 4 * kib64})
		require.NoError(t, err)
		short := sim.Fault{Call: "cuMemAddressReserve", Result: cuda.Code(driver.OutOfMemory)}
		short.Times = 2
		m.Inject(short)
		b := alloc(t, p, s, 4*kib64)
		require.EqualValues(t, 4*kib64, d.System().Stats().ReservedBytes, "a range as short as it must be")
		free(t, p, b)

		short.Times = -1
		enough := m.Inject(short)
		if fails {
			m.Inject(sim.Fault{Call: "cuMemAddressFree", Result: code})
		}
		m.OnCall(func(call string) {
			if call == "cuMemAddressFree" && !fails {
				enough()
			}
		})
		b, err = p.Alloc(pool.Request{Bytes: 8 * kib64, Stream: s})
		m.OnCall(nil)
		m.ClearFaults()
		if fails {
			require.ErrorIs(t, err, cuda.ErrOutOfAddressSpace)
			require.ErrorContains(t, err, "close reservations")
			require.Equal(t, 1, d.System().Stats().Reservations)
			b, err = p.Alloc(pool.Request{Bytes: 8 * kib64, Stream: s})
		}
		require.NoError(t, err)
		require.NoError(t, p.Check())
		free(t, p, b)
		require.NoError(t, p.Close())
		require.Zero(t, d.System().Stats().Reservations)
	}
}

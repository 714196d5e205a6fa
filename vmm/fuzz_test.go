package vmm_test

import (
	"errors"
	"math"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// edges are numbers that arithmetic on sizes gets wrong.
var edges = []int{0, 1, -1, 3, 4096, kib64 - 1, kib64, kib64 + 1, 2 * mib, 3 * mib, 1 << 30, 1 << 47, 1 << 60, 1<<60 + 1,
	1 << 62, math.MaxInt, math.MaxInt - 1, math.MaxInt - kib64 + 1, math.MinInt, math.MinInt + 1, -kib64, -2 * mib, math.MaxInt32, math.MaxUint32}

// typed checks that an error is one that a caller can tell by its kind.
func typed(t *testing.T, err error) bool {
	t.Helper()
	if err == nil {
		return true
	}
	var e *cuda.Error
	require.ErrorAs(t, err, &e)
	require.NotEmpty(t, e.Op)
	require.NotEmpty(t, e.Asked, "%v", err)
	known := false
	for _, kind := range []error{cuda.ErrInvalidArgument, cuda.ErrOutOfRange, cuda.ErrCapacity, cuda.ErrOutOfMemory, cuda.ErrOutOfAddressSpace,
		cuda.ErrNotSupported, cuda.ErrNotPermitted, cuda.ErrInUse} {
		known = known || errors.Is(err, kind)
	}
	require.True(t, known, "%v", err)
	return false
}

// intact checks that what was refused left nothing, and closes what was not.
func intact(t *testing.T, w *world) {
	t.Helper()
	sane(t, w, "")
	w.end()
}

func FuzzProperties(f *testing.F) {
	for i, size := range edges {
		f.Add(size, int32(i%7-1), i%5-2, uint32(i), i%2 == 0, uint8(i%5), uint16(i%4), uint8(i%3))
	}
	for _, size := range []int{kib64, 2 * mib} {
		for where := range int32(6) {
			for _, handles := range []uint32{0, 1, 2, 8, 9, 1 << 31, 1<<31 | 1, math.MaxUint32} {
				f.Add(size, where, 0, handles, handles == 0, uint8(handles%4), uint16(0), uint8(0))
				f.Add(size, where, math.MaxInt, handles, false, uint8(0), uint16(where), uint8(1))
			}
		}
	}
	f.Fuzz(func(t *testing.T, size int, where int32, id int, handles uint32, compressible bool, rdma uint8, usage uint16, granularity uint8) {
		w := newWorld(t, false)
		p := vmm.Properties{
			Location: cuda.Location{Type: cuda.LocationType(where), ID: id}, Handles: vmm.HandleTypes(handles),
			Compressible: compressible, RDMA: vmm.RDMA(rdma), Usage: vmm.Usage(usage), Granularity: vmm.Granularity(granularity),
		}
		before := w.look()
		gran, err := vmm.GranularityOf(w.d, p)
		usable := typed(t, err)
		a, err := vmm.Create(w.d, size, p)
		if typed(t, err) {
			w.own(a)
			require.True(t, usable)
			require.Positive(t, size)
			require.Zero(t, size%gran)
			require.Equal(t, size, a.Size())
			asked := a.Requested()
			again, err := vmm.Create(w.d, size, asked)
			if typed(t, err) { // else there is no memory for both
				require.Equal(t, asked, again.Requested(), "what was decided asks for the same")
				w.own(again)
			}
			_, err = a.Granted()
			require.NoError(t, err)
		} else {
			require.Equal(t, before, w.look(), "%v", err)
		}
		// The same properties for a buffer.
		b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 8 * mib, Memory: p})
		if typed(t, err) {
			w.own(b)
			if typed(t, gputest.Err(b.Append(nil, []byte{1, 2, 3}))) {
				require.Equal(t, 3, b.Len())
				require.Zero(t, b.Stats().Committed%gran)
			}
		}
		intact(t, w)
	})
}

func FuzzReserve(f *testing.F) {
	for i, size := range edges {
		f.Add(size, 0, uint64(0), 0, 1)
		f.Add(4*kib64, size, uint64(size), size, edges[len(edges)-1-i])
		f.Add(kib64, 1<<(i*3), uint64(1)<<(i*3), -size, i)
	}
	f.Fuzz(func(t *testing.T, size, align int, hint uint64, off, n int) {
		w := newWorld(t, false)
		before := w.look()
		r, err := vmm.Reserve(w.d, size, vmm.ReserveOptions{Align: align, Hint: cuda.Ptr(hint)})
		if !typed(t, err) {
			require.Equal(t, before, w.look())
			w.end()
			return
		}
		w.own(r)
		require.Positive(t, size)
		require.Equal(t, size, r.Size())
		require.Zero(t, uint64(r.Ptr())%uint64(max(align, kib64)))
		require.NoError(t, w.create(kib64, vmm.Properties{}))
		m, err := r.Map(off, w.a)
		if typed(t, err) {
			w.own(m)
			require.Equal(t, r.Ptr()+cuda.Ptr(off), m.Ptr())
			require.LessOrEqual(t, off+kib64, size)
		}
		all := both(w, vmm.ReadOnly)
		ok := typed(t, r.SetAccess(off, n, all...))
		require.Equal(t, m != nil && n == kib64, ok)
		fd, err := r.DMABuf(w.d, off, n, vmm.DMABufOptions{})
		if typed(t, err) {
			require.NoError(t, fd.Close())
		}
		intact(t, w)
	})
}

func FuzzBuffer(f *testing.F) {
	for i, n := range edges {
		f.Add(8*kib64, kib64, kib64, n, n, 3*kib64, edges[(i+7)%len(edges)], uint8(3), int32(1))
		f.Add(n, n, n, 100, 0, 100, 10, uint8(i), int32(i%6))
		f.Add(n, 0, n, kib64, n, n, n, uint8(1), int32(2))
		f.Add(0, kib64, n, 1000, 1000, n, 1, uint8(0), int32(1))
	}
	f.Fuzz(func(t *testing.T, reserve, floor, limit, grow, off, resize, move int, mode uint8, where int32) {
		w := newWorld(t, false)
		before := w.look()
		b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: reserve, Chunks: vmm.GeometricChunks(floor, limit),
			Access: []vmm.Access{{Location: cuda.Location{Type: cuda.LocationType(where), ID: 1}, Mode: vmm.AccessMode(mode)}}})
		if !typed(t, err) {
			require.Equal(t, before, w.look())
			b, err = vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 8 * kib64})
			require.NoError(t, err)
		}
		w.own(b)
		w.buffers = append(w.buffers, b)
		sized := func(ok bool, want int, was vmm.BufferStats) {
			t.Helper()
			now := b.Stats()
			if !ok {
				require.Equal(t, was, now)
				return
			}
			require.Equal(t, want, now.Used)
			require.LessOrEqual(t, now.Used, now.Committed)
			require.LessOrEqual(t, now.Committed, now.Reserved)
		}
		was := b.Stats()
		sized(typed(t, b.Grow(grow)), was.Used, was)
		was = b.Stats()
		sized(typed(t, gputest.Err(b.AppendUndefined(grow))), grow, was)
		was = b.Stats()
		part, err := b.Slice(off, off+grow)
		if typed(t, err) {
			require.Equal(t, grow, part.Len())
			require.LessOrEqual(t, off+grow, was.Used)
			_, err := part.Slice(off, resize)
			typed(t, err)
		}
		was = b.Stats()
		sized(typed(t, gputest.Err(b.AppendPtr(nil, b.Ptr(), -max(grow, 0)))), was.Used, was)
		if b.Len()%24 != 0 {
			_, err := vmm.ArrayOf[[3]uint64](b)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.NoError(t, b.Resize(nil, b.Len()/24*24))
		}
		words, err := vmm.ArrayOf[[3]uint64](b)
		require.NoError(t, err)
		was = b.Stats()
		sized(typed(t, gputest.Err(words.AppendUndefined(off))), was.Used+off*24, was)
		_, err = words.Slice(off, resize)
		typed(t, err)
		was = b.Stats()
		ok := typed(t, words.Resize(nil, resize))
		sized(ok, resize*24, was)
		was = b.Stats()
		sized(typed(t, b.Resize(nil, resize)), resize, was)
		moved, err := b.Move(vmm.MoveOptions{Reserve: move})
		if typed(t, err) {
			w.own(moved)
			require.GreaterOrEqual(t, moved.Stats().Reserved, move)
			require.Equal(t, b.Len(), moved.Len())
			require.ErrorIs(t, b.Resize(nil, b.Len()), cuda.ErrMoved)
			require.ErrorIs(t, b.Clip(), cuda.ErrMoved)
			require.NoError(t, b.Close())
			b = moved
		}
		fork, err := b.Fork(nil, off, vmm.ForkOptions{Reserve: move})
		if typed(t, err) {
			w.own(fork)
			require.GreaterOrEqual(t, fork.Stats().Reserved, max(move, off))
			require.Equal(t, off, fork.Len())
			if resize >= 0 && resize < fork.Stats().Shared {
				require.ErrorIs(t, fork.Resize(nil, resize), cuda.ErrInUse)
			}
			require.NoError(t, fork.Close())
		}
		if b.Len() > 0 {
			require.NoError(t, b.Resize(nil, b.Len()/2))
		}
		require.NoError(t, b.Clip())
		w.buffers = nil // its contents may be large
		intact(t, w)
	})
}

func FuzzGranularity(f *testing.F) {
	for shift := range uint8(15) {
		f.Add(shift, 5*mib, 3*mib)
		f.Add(shift, 100, 1)
	}
	f.Fuzz(func(t *testing.T, shift uint8, reserve, n int) {
		gran := kib64 << (shift % 15)
		m, s := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: gran, Memory: 4 << 30}}})
		d := s.Devices()[0]
		for _, place := range []cuda.Location{{}, cuda.OnHost()} {
			b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: reserve, Memory: vmm.Properties{Location: place}})
			if !typed(t, err) {
				require.True(t, reserve < 0 || reserve > 1<<40, "%v", err)
				continue
			}
			require.GreaterOrEqual(t, b.Stats().Reserved, reserve)
			if typed(t, gputest.Err(b.AppendUndefined(n))) {
				require.Equal(t, n, b.Len())
			} else {
				require.True(t, n < 0 || n > b.Stats().Reserved || uint64(n) > 2<<30)
			}
			require.NoError(t, b.Close())
		}
		require.Zero(t, m.Live()[sim.KindAllocation])
	})
}

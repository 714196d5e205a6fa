package vmm_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// bytesOf are the bytes in use.
func bytesOf(t require.TestingT, b *vmm.Buffer) []byte {
	part, err := b.Slice(0, b.Len())
	require.NoError(t, err)
	got := make([]byte, part.Len())
	require.NoError(t, part.CopyTo(nil, got))
	return got
}

func TestWhatWasMovedIsFrozen(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	old, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	data := pattern(3*mib, 1)
	require.NoError(t, gputest.Err(old.Append(nil, data)))
	require.NoError(t, old.Grow(3*mib))
	b, err := old.Move(vmm.MoveOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)

	before := old.Stats()
	words, err := vmm.ArrayOf[uint32](old)
	require.NoError(t, err)
	successor := fmt.Sprintf("successor at %#x", uint64(b.Ptr()))
	for what, err := range map[string]error{
		"Append":          gputest.Err(old.Append(nil, []byte{1})),
		"Append nothing":  gputest.Err(old.Append(nil, nil)),
		"AppendUndefined": gputest.Err(old.AppendUndefined(1)),
		"Grow":            old.Grow(1),
		"Resize longer":   old.Resize(nil, 4*mib),
		"Resize shorter":  old.Resize(s, 1),
		"Clip":            old.Clip(),
		"ClipAfter":       old.ClipAfter(s),
		"Move":            gputest.Err(old.Move(vmm.MoveOptions{Reserve: 64 * mib})),
		"Fork":            gputest.Err(old.Fork(nil, 1, vmm.ForkOptions{})),
		"Array.Append":    gputest.Err(words.Append(s, []uint32{1})),
		"Hold":            gputest.Err(share.Of(old).Hold(testOp, "a test", 1)),
	} {
		require.ErrorIs(t, err, cuda.ErrMoved, what)
		require.ErrorContains(t, err, successor, what)
	}
	require.Equal(t, before, old.Stats())

	// The successor goes on, and the old buffer keeps what it had.
	require.NoError(t, gputest.Err(b.Append(nil, pattern(9*mib, 2))))
	require.True(t, bytes.Equal(data, bytesOf(t, old)))
	require.ErrorIs(t, b.Resize(nil, 3*mib-1), cuda.ErrInUse, "the old buffer still sees it")
	require.NoError(t, b.Resize(nil, 3*mib))
	require.Equal(t, 6*mib, b.Stats().Shared)
	require.Equal(t, 6*mib, old.Stats().Shared)
	require.Equal(t, 12*mib, d.System().Stats().AllocatedBytes)
	require.NoError(t, old.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadOnly}))
	require.True(t, bytes.Equal(data, bytesOf(t, old)))
	require.NoError(t, old.CloseAfter(s))
	require.NoError(t, d.System().Drain(t.Context()))
	require.NoError(t, b.Resize(nil, 1))
	require.NoError(t, b.Clip())
	require.Equal(t, 2*mib, d.System().Stats().AllocatedBytes)
	require.Zero(t, b.Stats().Shared)
}

// What is closed with CloseAfter is protected until the work that it named has
// passed: its successor does not write where that work still reads.
func TestWhatWasMovedIsProtectedWhileItCloses(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	old, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	want := pattern(mib, 1)
	require.NoError(t, gputest.Err(old.Append(nil, want)))
	b, err := old.Move(vmm.MoveOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)
	h, err := d.NewHostBuffer(mib)
	require.NoError(t, err)
	closed(t, h)

	t.Cleanup(m.Hold(s.Handle()))
	part, err := old.Slice(0, mib)
	require.NoError(t, err)
	require.NoError(t, part.CopyToHost(s, h.All()))
	require.NoError(t, old.CloseAfter(s))
	err = b.Resize(nil, 0)
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "wait for its Released")
	m.Release(s.Handle())
	require.NoError(t, old.Released().Wait(t.Context()))
	require.True(t, bytes.Equal(want, h.Bytes()))
	require.NoError(t, b.Resize(nil, 0))
	require.NoError(t, gputest.Err(b.Append(nil, pattern(mib, 2))))
}

// A buffer moves as often as wanted: each of the old ones keeps what it had.
func TestALineOfMoves(t *testing.T) {
	_, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	var line []*vmm.Buffer
	var had [][]byte
	for i := range 4 {
		require.NoError(t, gputest.Err(b.Append(nil, pattern(mib, i))))
		line, had = append(line, b), append(had, bytesOf(t, b))
		b, err = b.Move(vmm.MoveOptions{Reserve: (i + 2) * 4 * mib})
		require.NoError(t, err)
	}
	require.NoError(t, gputest.Err(b.Append(nil, pattern(5*mib, 9))))
	for i, old := range line {
		require.True(t, bytes.Equal(had[i], bytesOf(t, old)), i)
	}
	require.ErrorIs(t, b.Resize(nil, 4*mib-1), cuda.ErrInUse)
	for _, i := range []int{1, 3, 0} {
		require.NoError(t, line[i].Close())
	}
	require.NoError(t, b.Resize(nil, 3*mib), "the longest that is open has as much")
	require.ErrorIs(t, b.Resize(nil, 3*mib-1), cuda.ErrInUse)
	require.True(t, bytes.Equal(had[2], bytesOf(t, line[2])))
	require.NoError(t, line[2].Close())
	require.NoError(t, b.Resize(nil, 0))
	require.NoError(t, b.Close())
}

func TestAHeldBufferDoesNotMove(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(100, 1))))
	h, err := share.Of(b).Hold(testOp, "a test", 100)
	require.NoError(t, err)
	_, err = b.Move(vmm.MoveOptions{Reserve: 64 * mib})
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "a test")
	h.Release()
	// One that comes while the memory is being mapped.
	reservations := d.System().Stats().Reservations
	m.OnCall(func(call string) {
		if call == "cuMemMap" {
			m.OnCall(nil)
			h, err = share.Of(b).Hold(testOp, "a late one", 100)
			check(t, err)
		}
	})
	_, err = b.Move(vmm.MoveOptions{Reserve: 64 * mib})
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "a late one")
	require.Equal(t, reservations, d.System().Stats().Reservations)
	h.Release()
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1})), "it did not move")
}

// Of those that move one buffer at once, or hold it, one has it.
func TestACrowdMovesABuffer(t *testing.T) {
	_, d := open(t)
	for range 20 {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
		require.NoError(t, err)
		require.NoError(t, gputest.Err(b.Append(nil, pattern(100, 1))))
		var had atomic.Int32
		crowd(t, 8, func(i int, _ *rand.Rand) {
			if i%2 == 0 {
				h, err := share.Of(b).Hold(testOp, "a test", 100)
				if err == nil {
					had.Add(1 << 16)
					h.Release()
				} else if !errors.Is(err, cuda.ErrMoved) {
					t.Error(err)
				}
				return
			}
			moved, err := b.Move(vmm.MoveOptions{Reserve: 64 * mib})
			if err == nil {
				had.Add(1)
				check(t, moved.Close())
			} else if !errors.Is(err, cuda.ErrMoved) && !errors.Is(err, cuda.ErrInUse) {
				t.Error(err)
			}
		})
		require.LessOrEqual(t, had.Load()&0xffff, int32(1))
		require.NoError(t, b.Close())
	}
}

func TestForksShareWholeChunksAndGrowApart(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		closed(t, a)
		prefix := make([]uint32, 5*mib/4)
		for i := range prefix {
			prefix[i] = uint32(i)
		}
		require.NoError(t, gputest.Err(a.Append(nil, prefix)))
		before := d.System().Stats().AllocatedBytes
		f, err := a.Fork(nil, len(prefix), vmm.ForkOptions{})
		require.NoError(t, err)
		closed(t, f)
		require.Equal(t, 2*mib, d.System().Stats().AllocatedBytes-before, "only for what is less than a chunk")
		require.Equal(t, 4*mib, f.Stats().Shared)
		require.Equal(t, 4*mib, a.Stats().Shared)
		require.Equal(t, len(prefix), f.Len())

		require.NoError(t, gputest.Err(a.Append(nil, []uint32{5})))
		require.NoError(t, gputest.Err(f.Append(nil, []uint32{9, 9})))
		got := make([]uint32, a.Len())
		require.NoError(t, a.All().CopyTo(nil, got))
		require.Equal(t, append(append([]uint32(nil), prefix...), 5), got)
		got = make([]uint32, f.Len())
		require.NoError(t, f.All().CopyTo(nil, got))
		require.Equal(t, append(append([]uint32(nil), prefix...), 9, 9), got)

		for _, b := range []*vmm.Array[uint32]{a, f} {
			require.ErrorIs(t, b.Resize(nil, mib-1), cuda.ErrInUse)
			require.NoError(t, b.Resize(nil, mib), "as much as is shared")
			require.NoError(t, b.Clip())
			require.Equal(t, 4*mib, b.Stats().Committed)
		}
		require.NoError(t, a.Close())
		require.NoError(t, f.Resize(nil, 1))
		got = make([]uint32, 1)
		require.NoError(t, f.All().CopyTo(nil, got))
		require.Zero(t, got[0])
	})
}

// The copy of what is not shared is work on the stream that is named.
func TestAForkCopiesInTheOrderOfItsStream(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	closed(t, b)
	release := m.Hold(s.Handle())
	require.NoError(t, gputest.Err(b.Append(s, pattern(1000, 3))))
	f, err := b.Fork(s, 500, vmm.ForkOptions{Reserve: 2 * mib})
	require.NoError(t, err)
	closed(t, f)
	require.Equal(t, 2*mib, f.Stats().Reserved)
	require.Zero(t, f.Stats().Shared)
	release()
	require.NoError(t, s.Synchronize())
	require.Equal(t, pattern(1000, 3)[:500], bytesOf(t, f))
}

func TestWhatCannotBeForked(t *testing.T) {
	_, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(1000, 3))))
	for _, row := range []struct {
		n       int
		reserve int
		is      error
	}{
		{-1, 0, cuda.ErrInvalidArgument}, {1001, 0, cuda.ErrOutOfRange}, {100, -1, cuda.ErrInvalidArgument},
		{100, 99, cuda.ErrInvalidArgument}, {100, 1<<60 + 1, cuda.ErrInvalidArgument},
	} {
		_, err := b.Fork(nil, row.n, vmm.ForkOptions{Reserve: row.reserve})
		require.ErrorIs(t, err, row.is, "%+v", row)
	}
	_, err = (*vmm.Buffer)(nil).Fork(nil, 0, vmm.ForkOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	empty, err := b.Fork(nil, 0, vmm.ForkOptions{})
	require.NoError(t, err)
	require.Zero(t, empty.Stats().Committed)
	require.NoError(t, empty.Close())
	require.NoError(t, b.Close())
	_, err = b.Fork(nil, 0, vmm.ForkOptions{})
	require.ErrorIs(t, err, cuda.ErrClosed)
}

// family is buffers that were forked and moved from each other, beside the bytes
// that each should have, whatever the others do.
type family struct {
	d       *cuda.Device
	buffers []*vmm.Buffer
	data    [][]byte
	frozen  []bool
	seed    int
}

func (f *family) add(b *vmm.Buffer, data []byte) {
	f.buffers, f.data, f.frozen = append(f.buffers, b), append(f.data, bytes.Clone(data)), append(f.frozen, false)
}

func (f *family) any(rt *rapid.T) int { return rapid.IntRange(0, len(f.buffers)-1).Draw(rt, "buffer") }

func TestNoGrowthShowsInAnotherBuffer(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		_, s := sim.Open(rt, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64}}})
		f := &family{d: s.Devices()[0]}
		first, err := vmm.NewBuffer(f.d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.GeometricChunks(0, 2*kib64)})
		require.NoError(rt, err)
		f.add(first, nil)
		rt.Repeat(map[string]func(*rapid.T){
			"append": func(rt *rapid.T) {
				i := f.any(rt)
				f.seed++
				p := pattern(rapid.IntRange(0, 3*kib64).Draw(rt, "bytes"), f.seed)
				at, err := f.buffers[i].Append(nil, p)
				switch {
				case f.frozen[i]:
					require.ErrorIs(rt, err, cuda.ErrMoved)
				case len(f.data[i])+len(p) > f.buffers[i].Stats().Reserved:
					require.ErrorIs(rt, err, cuda.ErrCapacity)
				default:
					require.NoError(rt, err)
					require.Equal(rt, len(f.data[i]), at)
					f.data[i] = append(f.data[i], p...)
				}
			},
			"resize": func(rt *rapid.T) {
				i := f.any(rt)
				n := rapid.IntRange(0, f.buffers[i].Stats().Reserved).Draw(rt, "length")
				err := f.buffers[i].Resize(nil, n)
				switch {
				case f.frozen[i]:
					require.ErrorIs(rt, err, cuda.ErrMoved)
				case err != nil: // others see it: the check after each step says whether enough was refused
					require.ErrorIs(rt, err, cuda.ErrInUse)
					require.Less(rt, n, len(f.data[i]))
					require.Greater(rt, len(f.buffers), 1)
				case n <= len(f.data[i]):
					f.data[i] = f.data[i][:n]
				default:
					f.data[i] = append(f.data[i], make([]byte, n-len(f.data[i]))...)
				}
			},
			"clip": func(rt *rapid.T) {
				i := f.any(rt)
				if err := f.buffers[i].Clip(); f.frozen[i] {
					require.ErrorIs(rt, err, cuda.ErrMoved)
				} else {
					require.NoError(rt, err)
				}
			},
			"fork": func(rt *rapid.T) {
				if len(f.buffers) == 6 {
					rt.Skip()
				}
				i := f.any(rt)
				n := rapid.IntRange(0, len(f.data[i])).Draw(rt, "prefix")
				b, err := f.buffers[i].Fork(nil, n, vmm.ForkOptions{Reserve: rapid.SampledFrom([]int{0, 24 * kib64}).Draw(rt, "range")})
				if f.frozen[i] {
					require.ErrorIs(rt, err, cuda.ErrMoved)
					return
				}
				require.NoError(rt, err)
				f.add(b, f.data[i][:n])
			},
			"move": func(rt *rapid.T) {
				if len(f.buffers) == 6 {
					rt.Skip()
				}
				i := f.any(rt)
				b, err := f.buffers[i].Move(vmm.MoveOptions{Reserve: 24 * kib64})
				if f.frozen[i] {
					require.ErrorIs(rt, err, cuda.ErrMoved)
					return
				}
				require.NoError(rt, err)
				f.frozen[i] = true
				f.add(b, f.data[i])
			},
			"close": func(rt *rapid.T) {
				if len(f.buffers) == 1 {
					rt.Skip()
				}
				i := f.any(rt)
				require.NoError(rt, f.buffers[i].Close())
				f.buffers = append(f.buffers[:i:i], f.buffers[i+1:]...)
				f.data = append(f.data[:i:i], f.data[i+1:]...)
				f.frozen = append(f.frozen[:i:i], f.frozen[i+1:]...)
			},
			"": func(rt *rapid.T) {
				committed, most := 0, 0
				for i, b := range f.buffers {
					require.True(rt, bytes.Equal(f.data[i], bytesOf(rt, b)), "buffer %d of %d", i, len(f.buffers))
					st := b.Stats()
					committed += st.Committed
					most += st.Committed - st.Shared
				}
				allocated := s.Stats().AllocatedBytes
				require.LessOrEqual(rt, most, allocated)
				require.LessOrEqual(rt, allocated, committed)
				if len(f.buffers) == 1 {
					require.Equal(rt, committed, allocated)
					require.Zero(rt, f.buffers[0].Stats().Shared)
				}
			},
		})
		for _, b := range f.buffers {
			require.NoError(rt, b.Close())
		}
	})
}

// The new range of Move and Fork is where and as it is asked for; the alignment of a
// moved buffer goes with it.
func TestOptionsOfANewRange(t *testing.T) {
	_, d := open(t)
	const align = 64 * mib
	free, err := vmm.Reserve(d, 32*mib, vmm.ReserveOptions{Align: align})
	require.NoError(t, err)
	hint := free.Ptr()
	require.NoError(t, free.Close())
	first, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 * mib, Align: align, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, first)
	require.NoError(t, gputest.Err(first.Append(nil, pattern(2*mib, 1))))
	fork, err := first.Fork(nil, 2*mib, vmm.ForkOptions{Hint: hint})
	require.NoError(t, err)
	closed(t, fork)
	second, err := first.Move(vmm.MoveOptions{})
	require.NoError(t, err)
	closed(t, second)
	third, err := second.Move(vmm.MoveOptions{Reserve: 32 * mib, Align: 2 * mib})
	require.NoError(t, err)
	closed(t, third)
	require.Equal(t, hint, fork.Ptr())
	require.Equal(t, []int{4 * mib, 4 * mib, 8 * mib, 32 * mib},
		[]int{first.Stats().Reserved, fork.Stats().Reserved, second.Stats().Reserved, third.Stats().Reserved})
	for _, b := range []*vmm.Buffer{first, fork, second} {
		require.Zero(t, b.Ptr()%align)
	}
	_, err = third.Move(vmm.MoveOptions{Align: 3})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

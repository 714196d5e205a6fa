package vmm_test

import (
	"bytes"
	"math"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestGrowMakesRoomAndLeavesTheLength(t *testing.T) {
	m, d := open(t)
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 16 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, a)
	require.NoError(t, gputest.Err(a.Append(nil, []uint32{1, 2, 3})))
	require.NoError(t, a.Grow(mib))
	require.Equal(t, 3, a.Len())
	require.Equal(t, 6*mib, a.Stats().Committed)
	creations := m.Count("cuMemCreate")
	at, err := a.Append(nil, make([]uint32, mib))
	require.NoError(t, err)
	require.Equal(t, 3, at)
	require.Equal(t, creations, m.Count("cuMemCreate"), "there was room")
	require.NoError(t, a.Grow(0))

	require.NoError(t, a.Grow(mib))
	require.NoError(t, a.Clip())
	require.Equal(t, 6*mib, a.Stats().Committed, "Clip gives back room that is not used")

	require.ErrorIs(t, a.Grow(4*mib), cuda.ErrCapacity)
	require.ErrorIs(t, a.Grow(math.MaxInt), cuda.ErrCapacity)
	require.ErrorIs(t, a.Grow(-1), cuda.ErrInvalidArgument)
	require.ErrorIs(t, a.Buffer().Grow(-1), cuda.ErrInvalidArgument)
	require.Equal(t, 6*mib, a.Stats().Committed)
	require.NoError(t, a.Close())
	require.ErrorIs(t, a.Grow(1), cuda.ErrClosed)
}

func TestEveryAppendReturnsWhereItBegins(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		a, err := vmm.NewArray[uint64](d, vmm.BufferOptions{Reserve: 64 * mib})
		require.NoError(t, err)
		closed(t, a)
		h, err := d.NewHostBuffer(80)
		require.NoError(t, err)
		closed(t, h)
		next := 0
		for _, row := range []struct {
			what   string
			n      int
			append func() (int, error)
		}{
			{"Append", 3, func() (int, error) { return a.Append(nil, make([]uint64, 3)) }},
			{"Append of nothing", 0, func() (int, error) { return a.Append(nil, nil) }},
			{"AppendHost", 10, func() (int, error) { return a.AppendHost(nil, h.All()) }},
			{"AppendSlice", 13, func() (int, error) { return a.AppendSlice(nil, a.All()) }},
			{"AppendUndefined", 7, func() (int, error) { return a.AppendUndefined(7) }},
			{"Append again", 1, func() (int, error) { return a.Append(nil, []uint64{1}) }},
		} {
			at, err := row.append()
			require.NoError(t, err, row.what)
			require.Equal(t, next, at, row.what)
			next += row.n
			require.Equal(t, next, a.Len(), row.what)
		}
		at, err := a.Buffer().AppendPtr(nil, a.Ptr(), 16)
		require.NoError(t, err)
		require.Equal(t, next*8, at, "a buffer counts bytes")
	})
}

// Goroutines that append concurrently find their own elements where they were
// told, also on streams, and while the memory is taken.
func TestConcurrentAppendersKnowWhereTheirsLie(t *testing.T) {
	_, d := open(t)
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, a)
	const writers, rounds, most = 6, 20, 70_000
	type part struct {
		at   int
		data []uint32
	}
	var mu sync.Mutex
	var parts []part
	var all sync.WaitGroup
	for w := range writers {
		var s *cuda.Stream // every other writer waits by itself
		if w%2 == 0 {
			s = stream(t, d)
		}
		all.Go(func() {
			for round := range rounds {
				data := make([]uint32, (w*rounds+round)*7919%most+1)
				for i := range data {
					data[i] = uint32(w<<24 | round<<16 | i&0xffff)
				}
				at, err := a.Append(s, data)
				check(t, err)
				mu.Lock()
				parts = append(parts, part{at, data})
				mu.Unlock()
			}
			if s != nil {
				check(t, s.Synchronize())
			}
		})
	}
	all.Wait()
	got := make([]uint32, a.Len())
	require.NoError(t, a.All().CopyTo(nil, got))
	total := 0
	for _, p := range parts {
		total += len(p.data)
		require.Equal(t, p.data, got[p.at:p.at+len(p.data)])
	}
	require.Equal(t, len(got), total)
}

// Bytes that were appended beside an array's elements make it refuse to append,
// whichever was first.
func TestAnArrayDoesNotAppendBetweenElements(t *testing.T) {
	_, d := open(t)
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, a)
	require.NoError(t, gputest.Err(a.Buffer().Append(nil, bytes.Repeat([]byte{1}, 5))))
	for _, err := range []error{
		gputest.Err(a.Append(nil, []uint32{1})), gputest.Err(a.AppendUndefined(1)), gputest.Err(a.AppendSlice(nil, a.All())),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "5 bytes in use for elements of 4")
	}
	require.Equal(t, 5, a.Buffer().Len())
}

func TestElementsSayWhatTheyMayNotContain(t *testing.T) {
	_, d := open(t)
	type inner struct {
		N    int
		Name string
	}
	refused := func(err error, says string) {
		t.Helper()
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, says)
	}
	refused(gputest.Err(vmm.NewArray[struct {
		A int
		B [4]inner
	}](d, vmm.BufferOptions{})), "of which field B[].Name (string) contains a Go pointer; use numbers")
	refused(gputest.Err(vmm.NewArray[inner](d, vmm.BufferOptions{})), "of which field Name (string) contains")
	refused(gputest.Err(vmm.NewArray[*int](d, vmm.BufferOptions{})), "elements of type *int, which contain a Go pointer (*int)")
	refused(gputest.Err(vmm.NewArray[[2][]byte](d, vmm.BufferOptions{})), "which contain a Go pointer ([]uint8)")
	refused(gputest.Err(vmm.NewArray[struct{}](d, vmm.BufferOptions{})), "which have no size")
	a, err := vmm.NewArray[struct {
		A [3]int8
		B complex128
		C struct{ D bool }
	}](d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, a)
}

// Buffers of two processes can have one address.
func TestABufferTakesAHintAndAnAlignment(t *testing.T) {
	_, d := open(t)
	first, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * mib, Align: 64 * mib})
	require.NoError(t, err)
	require.Zero(t, uint64(first.Ptr())%(64*mib))
	at := first.Ptr()
	require.NoError(t, first.Close())
	again, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 16 * mib, Hint: at})
	require.NoError(t, err)
	closed(t, again)
	require.Equal(t, at, again.Ptr())
	other, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * mib, Hint: at})
	require.NoError(t, err, "a hint")
	closed(t, other)
	require.NotEqual(t, at, other.Ptr())
	_, err = vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * mib, Align: 3})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * mib, Align: -4096})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

func TestAGrowthThatFailsSaysWhatWasAskedFor(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 9 * mib, ContextMemory: 0}}})
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, b)
	err = b.Grow(16 * mib)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "16 MiB more on device 0, in pieces of 2 MiB, with ")
	require.ErrorContains(t, err, " free of 9 MiB")
	require.NoError(t, b.Grow(2*mib), "what was created went back")
}

package vmm_test

import (
	"bytes"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// These tests call as programs do, one thing after the other on a stream, and wait
// for nothing in between: on a GPU its work is still under way.

// busy puts some milliseconds of work on a stream, in memory of its own.
func busy(t *testing.T, d *cuda.Device, s *cuda.Stream) {
	work, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 256 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(work.AppendUndefined(256*mib)))
	rounds := 50
	if d.System().Driver().Software {
		rounds = 1
	}
	for i := range rounds {
		require.NoError(t, s.Memset(work.Ptr(), byte(i), work.Len()))
	}
	require.NoError(t, work.CloseAfter(s))
}

func TestForkAndMoveInTheOrderOfAStream(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		closed(t, b)
		busy(t, d, s)
		data := pattern(5*mib+100, 1)
		require.NoError(t, gputest.Err(b.Append(s, data)))
		f, err := b.Fork(s, 5*mib, vmm.ForkOptions{})
		require.NoError(t, err)
		closed(t, f)
		moved, err := b.Move(vmm.MoveOptions{Reserve: 256 * mib})
		require.NoError(t, err)
		closed(t, moved)
		at, err := moved.Append(s, pattern(9*mib, 2))
		require.NoError(t, err)
		require.Equal(t, len(data), at)
		require.NoError(t, gputest.Err(f.Append(s, pattern(3*mib, 3))))
		require.NoError(t, s.Synchronize())
		require.True(t, bytes.Equal(data, bytesOf(t, b)))
		require.True(t, bytes.Equal(append(bytes.Clone(data), pattern(9*mib, 2)...), bytesOf(t, moved)))
		require.True(t, bytes.Equal(append(bytes.Clone(data[:5*mib]), pattern(3*mib, 3)...), bytesOf(t, f)))
	})
}

func TestRangesCloseInTheOrderOfAStream(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		for _, after := range []bool{true, false} {
			r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
			require.NoError(t, err)
			first, second := mappedAt(t, d, r, 0), mappedAt(t, d, r, 4*mib)
			busy(t, d, s)
			require.NoError(t, s.Memset(first.Ptr(), 1, 2*mib))
			require.NoError(t, s.Copy(second.Ptr(), first.Ptr(), 2*mib))
			require.NoError(t, first.CloseAfter(s))
			require.NoError(t, second.CloseAfter(s))
			if after {
				require.NoError(t, r.CloseAfter(s))
			} else {
				require.NoError(t, r.Close())
			}
			require.NoError(t, r.Released().Wait(t.Context()))
			require.NoError(t, first.Released().Wait(t.Context()))
			require.NoError(t, s.Synchronize(), "the GPU was never left without its memory")
		}
	})
}

// Growth takes clipped memory back in the body of a capture, after a change beside
// which it was clipped.
func TestGrowthInACaptureOnEveryDriver(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, capturing := stream(t, d), stream(t, d)
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1 << 30, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		closed(t, b)
		for range 5 {
			require.NoError(t, gputest.Err(b.AppendUndefined(64*mib)))
			require.NoError(t, b.Resize(nil, 2*mib))
			busy(t, d, s)
			require.NoError(t, s.Memset(b.Ptr(), 1, 100))
			changed := make(chan error, 1)
			go func() { changed <- b.Resize(nil, 40*mib) }()
			require.NoError(t, b.ClipAfter(s))
			var g *cuda.Graph
			within(t, func() {
				g, err = capturing.WithCapture(cuda.CaptureOptions{}, func() error {
					if err := b.Grow(200 * mib); err != nil {
						return err
					}
					return gputest.Err(b.Append(capturing, pattern(1000, 1)))
				})
			})
			require.NoError(t, err)
			require.NoError(t, <-changed)
			require.NoError(t, g.Launch(capturing))
			require.NoError(t, capturing.Synchronize())
			require.NoError(t, g.Close())
			require.NoError(t, b.Resize(nil, 0))
			require.NoError(t, b.Clip())
		}
	})
}

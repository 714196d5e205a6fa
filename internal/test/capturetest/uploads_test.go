package capturetest

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// made returns a buffer of 4 MiB and a stream, which are closed with the test.
func made(t *testing.T, d *cuda.Device) (*vmm.Buffer, *cuda.Stream) {
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	require.NoError(t, b.Resize(s, 4*mib))
	return b, s
}

// captured closes a graph with the test.
func captured(t *testing.T, g *cuda.Graph, err error) *cuda.Graph {
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

func TestAppendAndCopyFromIntoACapture(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, s := made(t, d)
		require.NoError(t, b.Resize(s, mib))
		require.NoError(t, s.Synchronize())
		src := make([]int32, mib)
		for i := range src {
			src[i] = int32(i)
		}
		a, err := vmm.ArrayOf[int32](b)
		require.NoError(t, err)
		first, err := a.Slice(0, 100)
		require.NoError(t, err)
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
			require.NoError(t, first.CopyFrom(s, src[1000:1100]))
			require.NoError(t, gputest.Err(a.Append(s, src[:1000]))) // in memory that is there
			require.NoError(t, gputest.Err(a.Append(s, nil)))
			_, err := a.Append(s, src)
			return err // beyond it
		})
		captured(t, g, err)
		require.Equal(t, mib/4+1000+mib, a.Len())
		clear(src)
		for range 2 {
			require.NoError(t, a.All().Zero(s))
			require.NoError(t, g.Launch(s))
			got := make([]int32, a.Len())
			require.NoError(t, a.All().CopyTo(s, got))
			for i := range 100 {
				require.Equal(t, int32(1000+i), got[i])
			}
			for i, v := range got[mib/4 : mib/4+1000] {
				require.Equal(t, int32(i), v)
			}
			for i, v := range got[mib/4+1000:] {
				if int32(i) != v {
					t.Fatalf("element %d is %d", i, v)
				}
			}
		}
	})
}

// What cannot be captured leaves the capture as it is.
func TestCopyToIsRefusedInACapture(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, s := made(t, d)
		part, err := b.Slice(0, 100)
		require.NoError(t, err)
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
			require.ErrorIs(t, part.CopyTo(s, make([]byte, 100)), cuda.ErrCapturing)
			require.ErrorIs(t, b.CloseAfter(s), cuda.ErrCapturing)
			require.ErrorIs(t, b.ClipAfter(s), cuda.ErrCapturing)
			require.NoError(t, b.Clip(), "and what waits for all work does so")
			return part.Zero(s)
		})
		captured(t, g, err)
		require.NoError(t, g.Launch(s))
		require.NoError(t, s.Synchronize())
	})
}

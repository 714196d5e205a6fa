package capturetest

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Appending Go memory to a buffer can be captured, whether or not it has the
// memory already: the graph keeps the bytes, and every launch writes them.
func TestAppendAndCopyFromIntoACapture(t *testing.T) {
	each(t, func(t *testing.T, p place) {
		w := &world{t, p}
		b, s := w.buffer(), w.stream()
		require.NoError(t, b.Resize(s, mib))
		require.NoError(t, s.Synchronize())
		src := make([]int32, mib)
		for i := range src {
			src[i] = int32(i)
		}
		a := must[*vmm.Array[int32]](w)(vmm.ArrayOf[int32](b))
		first := must[vmm.Slice[int32]](w)(a.Slice(0, 100))
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
			require.NoError(t, first.CopyFrom(s, src[1000:1100]))
			require.NoError(t, gputest.Err(a.Append(s, src[:1000]))) // in memory that is there
			require.NoError(t, gputest.Err(a.Append(s, nil)))
			_, err := a.Append(s, src)
			return err // beyond it
		})
		require.NoError(t, err)
		w.closed(g)
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
	each(t, func(t *testing.T, p place) {
		w := &world{t, p}
		b, s := w.buffer(), w.stream()
		part := must[vmm.Slice[byte]](w)(b.Slice(0, 100))
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
			require.ErrorIs(t, part.CopyTo(s, make([]byte, 100)), cuda.ErrCapturing)
			require.ErrorIs(t, b.CloseAfter(s), cuda.ErrCapturing)
			require.ErrorIs(t, b.ClipAfter(s), cuda.ErrCapturing)
			require.NoError(t, b.Clip(), "and what waits for all work does so")
			return part.Zero(s)
		})
		require.NoError(t, err)
		w.closed(g)
		require.NoError(t, g.Launch(s))
		require.NoError(t, s.Synchronize())
	})
}

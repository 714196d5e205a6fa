package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Go elements go to an address and come back, and what holds pointers does not.
func TestUploadsAndDownloadsOfElements(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 << 20})
		require.NoError(t, err)
		defer func() { require.NoError(t, b.Close()) }()
		require.NoError(t, b.Resize(s, 4096))
		type pair struct {
			A int32
			B [2]float32
		}
		want := []pair{{1, [2]float32{2, 3}}, {4, [2]float32{5, 6}}}
		require.NoError(t, cuda.UploadOf(s, b.Ptr()+24, want))
		got := make([]pair, 2)
		require.NoError(t, cuda.DownloadOf(s, got, b.Ptr()+24))
		require.Equal(t, want, got)
		require.NoError(t, cuda.UploadOf[float32](s, 0, nil), "nothing is copied nowhere")
		for _, err := range []error{cuda.UploadOf(s, b.Ptr(), []string{"a"}), cuda.DownloadOf(s, make([]*int, 1), b.Ptr())} {
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, "pointer")
		}
		require.ErrorIs(t, cuda.UploadOf(nil, b.Ptr(), []byte{1}), cuda.ErrInvalidArgument)
	})
}

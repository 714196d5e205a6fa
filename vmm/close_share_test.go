//go:build linux

package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

func init() {
	add := func(object, on string, test func(t *testing.T, w *world)) {
		dependants = append(dependants, struct {
			object, on string
			test       func(t *testing.T, w *world)
		}{object, on, test})
	}
	add("Buffer, Array", "it is published", func(t *testing.T, w *world) {
		b := w.buffer(2)
		hold, err := share.Of(b).Hold(testOp, "publication \"x\"", kib64)
		require.NoError(t, err)
		require.ErrorIs(t, b.Close(), cuda.ErrInUse)
		require.ErrorContains(t, b.CloseAfter(w.s), "publication \"x\"")
		require.NoError(t, gputest.Err(b.Append(nil, []byte{1})), "it stays open")
		require.NoError(t, b.Resize(nil, 0))
		require.ErrorIs(t, b.Clip(), cuda.ErrInUse)
		require.ErrorIs(t, b.ClipAfter(w.s), cuda.ErrInUse)
		hold.Release()
		require.NoError(t, b.Close())
	})
}

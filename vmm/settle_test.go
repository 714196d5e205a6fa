//go:build linux

package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

// Growth is refused while a function looks at memory that a publication gave up, which
// growth would have to free first.
func TestGrowthBehindAViewOfWhatIsGivenUp(t *testing.T) {
	for name, grow := range map[string]func(w *world) error{
		"Grow":            func(w *world) error { return w.b.Grow(6 * mib) },
		"AppendUndefined": func(w *world) error { _, err := w.b.AppendUndefined(6 * mib); return err },
		"Append":          func(w *world) error { _, err := w.b.Append(nil, make([]byte, 6*mib)); return err },
		"Resize":          func(w *world) error { return w.b.Resize(nil, 7*mib) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, false)
			all := hostBuffer(w, 6*mib)
			h, err := share.Of(w.b).Hold(testOp, "a test", 6*mib)
			require.NoError(t, err)
			require.NoError(t, all.Host(func(data []byte) error {
				gone, err := share.Shrink(testOp, h, 1*mib, []*cuda.Stream{w.s})
				require.NoError(t, err)
				require.NoError(t, gone.Release())
				require.ErrorIs(t, grow(w), cuda.ErrInUse)
				require.NoError(t, gputest.Err(w.b.Append(nil, make([]byte, 100))), "where there is room")
				data[6*mib-1] = 1
				return nil
			}))
			require.NoError(t, grow(w))
			h.Release()
			require.NoError(t, w.drain())
			w.end()
		})
	}
}

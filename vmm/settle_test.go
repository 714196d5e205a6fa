//go:build linux

package vmm_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/stretchr/testify/require"
)

// Growth that waits for a function which looks at memory that a publication
// gave up lets that function use the buffer.
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
			grown := make(chan error, 1)
			require.NoError(t, all.Host(func(data []byte) error {
				gone, err := share.Shrink(testOp, h, 1*mib, []*cuda.Stream{w.s})
				require.NoError(t, err)
				require.NoError(t, gone.Release())
				require.ErrorIs(t, grow(w), cuda.ErrInUse, "by the function itself")
				go func() { grown <- grow(w) }()
				time.Sleep(10 * time.Millisecond)
				used := make(chan error, 1)
				go func() { used <- gputest.Err(w.b.Append(nil, make([]byte, 100))) }()
				select {
				case err := <-used:
					require.NoError(t, err)
				case <-time.After(patience):
					t.Fatal("what waits for the function holds the buffer")
				}
				select {
				case err := <-grown:
					t.Fatalf("it did not wait: %v", err)
				default:
				}
				data[6*mib-1] = 1
				return nil
			}))
			require.NoError(t, <-grown)
			h.Release()
			require.NoError(t, w.drain())
			w.end()
		})
	}
}

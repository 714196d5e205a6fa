package vmm_test

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// clippedBeside makes a buffer of which three chunks are clipped beside a change
// of it, and wait for s, which is held. The change, and with it the clip, goes on
// when finish is called. A copy on another stream runs beside both.
func clippedBeside(t *testing.T, m *sim.Machine, d *cuda.Device, s, beside *cuda.Stream) (b *vmm.Buffer, finish func() error) {
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(8*mib)))
	require.NoError(t, b.Resize(nil, 2*mib))
	tr, err := d.Transfer()
	require.NoError(t, err)
	release := m.Hold(tr.Handle())
	fills := m.Count("cuMemsetD8Async")
	changed := make(chan error, 1)
	go func() { changed <- b.Resize(nil, 2*mib+100) }() // waits for its fill
	require.Eventually(t, func() bool { return m.Count("cuMemsetD8Async") > fills }, time.Minute, time.Millisecond)
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 100))
	require.NoError(t, b.ClipAfter(s)) // follows that change
	if beside != nil {
		part, err := b.Slice(100, 200)
		require.NoError(t, err)
		require.NoError(t, part.Zero(beside))
	}
	return b, func() error {
		release()
		return <-changed
	}
}

// What changes a buffer in the body of a capture never waits for that capture,
// whichever stream it is on: a capture keeps a clip from being known to have
// passed, and only the body's return ends the capture.
func TestAChangeInACaptureDoesNotWaitForTheCapture(t *testing.T) {
	for what, change := range map[string]func(b *vmm.Buffer) error{
		"Grow":            func(b *vmm.Buffer) error { return b.Grow(6 * mib) },
		"AppendUndefined": func(b *vmm.Buffer) error { _, err := b.AppendUndefined(6 * mib); return err },
		"Append":          func(b *vmm.Buffer) error { _, err := b.Append(nil, make([]byte, 5*mib)); return err },
		"Resize":          func(b *vmm.Buffer) error { return b.Resize(nil, 7*mib) },
		"Clip":            func(b *vmm.Buffer) error { return b.Clip() },
		"SetAccess": func(b *vmm.Buffer) error {
			return b.SetAccess(vmm.Access{Location: cuda.OnDevice(0), Mode: vmm.ReadOnly})
		},
		"Close": func(b *vmm.Buffer) error { return b.Close() },
		"Suspend": func(b *vmm.Buffer) error {
			s, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{}, b)
			if err != nil {
				return err
			}
			return s.Resume(context.Background())
		},
	} {
		for _, involved := range []bool{false, true} {
			name := what + " beside another stream's capture"
			if involved {
				name = what + " beside the capture of a stream that the clip fences"
			}
			t.Run(name, func(t *testing.T) {
				m, d := open(t)
				s, capturing := stream(t, d), stream(t, d)
				var on *cuda.Stream
				if involved {
					on = capturing
				}
				b, finish := clippedBeside(t, m, d, s, on)
				returned := make(chan error, 1)
				go func() {
					g, err := capturing.WithCapture(cuda.CaptureOptions{}, func() error {
						if err := finish(); err != nil {
							return err
						}
						m.Release(s.Handle()) // what the clip named passes
						return change(b)
					})
					if err == nil {
						err = g.Close()
					}
					returned <- err
				}()
				select {
				case err := <-returned:
					require.NoError(t, err)
				case <-time.After(testTimeout):
					t.Fatal("it waits for the capture that it is called in")
				}
				require.NoError(t, b.Close())
				require.NoError(t, d.System().Drain(t.Context()))
			})
		}
	}
}

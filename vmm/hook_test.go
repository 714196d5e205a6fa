package vmm_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A hook that a Grow comes to run may change the buffer that the Grow holds.
func TestAHookRunsUnderAnotherGrow(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.Append(nil, make([]byte, 100))))
	for range 300 {
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Memset(b.Ptr(), 1, 10) })
		require.NoError(t, err)
		require.NoError(t, g.OnClose(func() { _ = b.Clip() }))
		require.NoError(t, g.CloseAfter(s))
		done := make(chan error, 1)
		go func() { done <- gputest.Err(b.AppendUndefined(2 * mib)); _ = b.Resize(nil, 100) }()
		select {
		case <-done:
		case <-time.After(testTimeout):
			t.Fatal("deadlock: Grow runs the hook, which waits for Grow")
		}
	}
	require.NoError(t, b.Close())
}

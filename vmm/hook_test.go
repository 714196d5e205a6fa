package vmm_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// 21: a hook that runs inline in Grow, which holds the buffer that the hook closes
func TestAHookRunsUnderSomebodyElsesGrow(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	require.NoError(t, b.Append(nil, make([]byte, 100)))
	for range 300 {
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Memset(b.Ptr(), 1, 10) })
		require.NoError(t, err)
		require.NoError(t, g.OnClose(func() { _ = b.Clip() }))
		require.NoError(t, g.CloseAfter(s))
		done := make(chan error, 1)
		go func() { done <- b.Grow(2 * mib); _ = b.Resize(nil, 100) }()
		select {
		case <-done:
		case <-time.After(3 * time.Second):
			t.Fatal("deadlock: Grow runs the hook, which waits for Grow")
		}
	}
	_ = m
	require.NoError(t, b.Close())
}

package cuda_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/stretchr/testify/require"
)

// A capture that begins on the stream while an operation is submitted waits for the
// submission: the operation would end it, or be in it.
func TestNoSubmissionDisturbsACaptureThatBeginsMeanwhile(t *testing.T) {
	m, d := open(t)
	s, other, e, p := stream(t, d), stream(t, d), event(t, d), memory(t, d, 64)
	require.NoError(t, e.Record(other))
	work := func() error { return other.Memset(p, 1, 64) }
	for call, op := range map[string]func() error{
		"cuStreamWaitEvent": func() error { return s.Wait(e) },
		"cuGraphLaunch":     func() error { return captured(t, other, work).Launch(s) },
	} {
		t.Run(call, func(t *testing.T) {
			body, end, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			var met atomic.Bool
			m.OnCall(func(c string) {
				if c != call || !met.CompareAndSwap(false, true) {
					return
				}
				go func() {
					g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
						close(body)
						<-end
						return s.Memset(p, 1, 64)
					})
					if err == nil {
						err = g.Close()
					}
					done <- err
				}()
				select {
				case <-body:
				case <-time.After(50 * time.Millisecond): // it waits, as it should
				}
			})
			err := op()
			m.OnCall(nil)
			require.True(t, met.Load())
			close(end)
			require.NoError(t, <-done)
			require.NoError(t, err)
		})
	}
}

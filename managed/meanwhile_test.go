package managed_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// A capture that begins on the stream while an operation is submitted which no graph can
// contain waits for the submission: the operation would end it.
func TestNoSubmissionEndsACaptureThatBeginsMeanwhile(t *testing.T) {
	for call, op := range map[string]func(b *managed.Buffer, s *cuda.Stream) error{
		"cuMemPrefetchAsync": func(b *managed.Buffer, s *cuda.Stream) error { return b.Prefetch(s, cuda.OnHost()) },
		"cuMemPrefetchBatchAsync": func(b *managed.Buffer, s *cuda.Stream) error {
			return managed.PrefetchBatch(s, []managed.Range{b.Range}, cuda.OnHost())
		},
		"cuMemDiscardAndPrefetchBatchAsync": func(b *managed.Buffer, s *cuda.Stream) error { return b.Discard(s) },
		"cuStreamAttachMemAsync":            func(b *managed.Buffer, s *cuda.Stream) error { return b.Attach(s, managed.AttachHost) },
	} {
		t.Run(call, func(t *testing.T) {
			m, d := open(t)
			s := stream(t, d)
			b, err := managed.New(d, mib, managed.Options{})
			require.NoError(t, err)
			closed(t, b)
			body, end, captured := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			var met atomic.Bool
			m.OnCall(func(c string) {
				if c != call || !met.CompareAndSwap(false, true) {
					return
				}
				go func() {
					g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
						close(body)
						<-end
						return s.Memset(b.Ptr(), 1, 64)
					})
					if err == nil {
						err = g.Close()
					}
					captured <- err
				}()
				select {
				case <-body:
				case <-time.After(50 * time.Millisecond): // it waits, as it should
				}
			})
			err = op(b, s)
			m.OnCall(nil)
			require.True(t, met.Load())
			close(end)
			require.NoError(t, <-captured)
			require.NoError(t, err)
		})
	}
}

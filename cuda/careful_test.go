package cuda_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

func TestCloseAfterMindsALaunchWithoutAMark(t *testing.T) {
	m, d := open(t)
	s, on, p := stream(t, d), stream(t, d), memory(t, d, 64)
	g, err := s.WithCapture(thread, func() error { return s.Upload(p, pattern(64, 1)) })
	require.NoError(t, err)
	m.Hold(on.Handle())
	m.Inject(sim.Fault{Call: "cuEventRecord", Result: 2})
	require.NoError(t, g.Launch(on))
	require.NoError(t, g.CloseAfter(s))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if d.System().Drain(ctx) == nil {
		t.Error("the graph went while its launch runs")
	}
	m.Release(on.Handle())
}

func TestDoneDoesNotBreakACaptureThatBeganMeanwhile(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	closed(t, e)
	require.NoError(t, e.Record(s))
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		var once sync.Once
		recorded := make(chan error, 1)
		m.OnCall(func(call string) {
			if call == "cuEventQuery" {
				once.Do(func() {
					go func() { recorded <- e.Record(s) }() // another goroutine's
					select {
					case err := <-recorded:
						recorded <- err
					case <-time.After(100 * time.Millisecond): // it waits, as it should
					}
				})
			}
		})
		_, _ = e.Done()
		m.OnCall(nil)
		return <-recorded
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
}

package cuda_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// Graph.Close waits for the last launch by an event of the context of a borrowed
// stream. Closing that stream gives the context up, which its owner may destroy
// then: so the stream's Close waits for the call in which the driver is.
func TestAGraphsCloseHoldsTheContextOfItsLastLaunch(t *testing.T) {
	m, d := open(t, sim.Options{})
	own := stream(t, d)
	p := memory(t, d, 4096)
	g, err := own.WithCapture(cuda.CaptureOptions{}, func() error { return own.Memset(p, 1, 64) })
	require.NoError(t, err)

	s, destroy := theirs(t, d)
	require.NoError(t, g.Launch(s))

	// As if the goroutine is descheduled just before the driver's call.
	entered, goOn := make(chan struct{}, 8), make(chan struct{})
	first := true
	m.OnCall(func(call string) {
		if call == "cuEventSynchronize" && first {
			first = false
			entered <- struct{}{}
			<-goOn
		}
	})
	done := make(chan error, 1)
	go func() { done <- g.Close() }()
	<-entered
	m.OnCall(nil)
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case <-closed:
		t.Fatal("the context was given up while the driver was asked about an event of it")
	case <-time.After(20 * time.Millisecond):
	}
	close(goOn)
	require.NoError(t, <-done)
	require.NoError(t, <-closed)
	destroy()
}

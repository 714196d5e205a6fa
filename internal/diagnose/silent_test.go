package diagnose_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/nvml"
	"github.com/stretchr/testify/require"
)

// silent is a driver with an NVML whose calls block until let is closed.
type silent struct {
	driver.Driver
	let   chan struct{}
	asked *atomic.Int32
}

func (s silent) NVML() nvml.Library { return s }

func (s silent) Fabric(string) (nvml.Fabric, error) {
	s.asked.Add(1)
	<-s.let
	return nvml.Fabric{State: nvml.StateCompleted}, nil
}

func TestNVMLThatDoesNotAnswer(t *testing.T) {
	_, s := sim.Open(t)
	sys := core.SystemOf(s.Devices()[0])
	let := make(chan struct{})
	asked := new(atomic.Int32)
	sys.Drv = silent{sys.Drv, let, asked}
	nvmlOf := func(limit time.Duration) (all []diagnose.Finding) {
		defer diagnose.SetPatience(limit)()
		for _, f := range diagnose.Run(sys, []driver.Device{0}, diagnose.Options{}).Findings {
			if f.Check == diagnose.CheckNVML {
				all = append(all, f)
			}
		}
		return all
	}
	found := nvmlOf(10 * time.Millisecond)
	require.Len(t, found, 1)
	require.Equal(t, diagnose.Warning, found[0].Severity)
	require.Contains(t, found[0].Text, "NVML did not return within 10ms")
	require.Contains(t, found[0].Remedy, "nvidia-smi")

	// A call that hangs occupies a thread, so there is at most one per question, and
	// no other caller waits for it.
	for range 20 {
		require.Len(t, nvmlOf(10*time.Millisecond), 1)
	}
	require.EqualValues(t, 1, asked.Load())
	close(let)
	require.Empty(t, nvmlOf(time.Minute))
	require.Empty(t, nvmlOf(time.Minute))
	require.LessOrEqual(t, asked.Load(), int32(3), "a call that returned is made again")
}

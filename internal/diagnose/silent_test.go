package diagnose_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/nvml"
	"github.com/stretchr/testify/require"
)

// silent is a driver beside an NVML that answers when it is let.
type silent struct {
	driver.Driver
	let chan struct{}
}

func (s silent) NVML() nvml.Library { return s }

func (s silent) Fabric(string) (nvml.Fabric, error) {
	<-s.let
	return nvml.Fabric{State: nvml.StateCompleted}, nil
}

func TestNVMLThatDoesNotAnswer(t *testing.T) {
	_, s := sim.Open(t)
	sys := core.SystemOf(s.Devices()[0])
	let := make(chan struct{})
	sys.Drv = silent{sys.Drv, let}
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
	require.Contains(t, found[0].Text, "NVML does not answer within 10ms")
	require.Contains(t, found[0].Remedy, "nvidia-smi")
	close(let)
	require.Empty(t, nvmlOf(time.Minute))
}

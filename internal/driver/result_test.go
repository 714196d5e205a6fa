package driver_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// The numbers are the vendor's, and so are the results of which its documentation says
// that the process must be relaunched, or that the context is gone.
func TestResultsThatEndAContext(t *testing.T) {
	lost := map[driver.Result]string{
		4: "DEINITIALIZED", 214: "ECC_UNCORRECTABLE", 220: "NVLINK_UNCORRECTABLE", 226: "CONTAINED",
		700: "ILLEGAL_ADDRESS", 702: "LAUNCH_TIMEOUT", 709: "CONTEXT_IS_DESTROYED", 710: "ASSERT",
		714: "HARDWARE_STACK_ERROR", 715: "ILLEGAL_INSTRUCTION", 716: "MISALIGNED_ADDRESS",
		717: "INVALID_ADDRESS_SPACE", 718: "INVALID_PC", 719: "LAUNCH_FAILED", 721: "TENSOR_MEMORY_LEAK",
		810: "MPS_CLIENT_TERMINATED", 911: "EXTERNAL_DEVICE",
	}
	for r := range driver.Result(1000) {
		name, known := r.Name()
		want, ends := lost[r]
		require.Equal(t, ends, r.Lost(), "%v", r)
		if ends {
			require.True(t, known)
			require.Equal(t, "CUDA_ERROR_"+want, name)
		}
	}
}

func TestEveryResultHasAName(t *testing.T) {
	names := map[string]driver.Result{}
	for r := range driver.Result(1000) {
		if name, ok := r.Name(); ok {
			require.NotContains(t, names, name, "%v", r)
			names[name] = r
		}
	}
	require.Len(t, names, 103, "as in CUDA 13.3")
	require.Equal(t, driver.Success, names["CUDA_SUCCESS"])
	require.Equal(t, driver.CaptureWrongThread, names["CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"])
	_, known := driver.Result(919).Name()
	require.False(t, known)
	require.Equal(t, "CUDA error 919", driver.Result(919).String())
}

package sim

import (
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/internal/imex"
	"github.com/cuvmm/cuvmm/internal/nvml"
	"github.com/stretchr/testify/require"
)

// The facts follow the options, and the real machine's are not asked.
func TestFabricFacts(t *testing.T) {
	const first = "GPU-73696d00-0000-0000-0000-000000000001"
	facts := func(f Fabric, folder string) (imex.Facts, nvml.Fabric) {
		m, err := New(Options{Folder: folder, Fabric: f, Devices: []DeviceOptions{{UUID: [16]byte{0x73, 0x69, 0x6d, 15: 1}}}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, m.Close()) })
		state, err := m.library.NVML().Fabric(first)
		require.NoError(t, err)
		_, err = m.library.NVML().Fabric("GPU-another")
		require.Error(t, err)
		return m.library.IMEX(), state
	}
	channels, state := facts(Fabric{}, "")
	require.Empty(t, channels.Channels)
	require.Equal(t, nvml.StateNotSupported, state.State)

	channels, state = facts(Fabric{Cluster: [16]byte{1}, Clique: 7}, "")
	require.Empty(t, channels.Channels)
	require.Equal(t, nvml.StateCompleted, state.State)
	require.Equal(t, uint32(7), state.Clique)
	require.Equal(t, [16]byte{1}, state.Cluster)

	if runtime.GOOS != "linux" {
		return // processes share machines on Linux alone
	}
	channels, state = facts(Fabric{Channels: []int{3, 5}}, t.TempDir())
	require.Len(t, channels.Accessible(), 2)
	require.Equal(t, nvml.StateCompleted, state.State)
}

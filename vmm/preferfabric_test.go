package vmm_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

const fabricAttribute, fdAttribute = 128, 103

// onMachine opens a machine of these options, and returns what its System logs.
func onMachine(t *testing.T, o sim.Options) (*sim.Machine, *cuda.Device, *bytes.Buffer) {
	t.Helper()
	m, err := sim.New(o)
	require.NoError(t, err)
	log := new(bytes.Buffer)
	s, err := m.Open(cuda.Options{Logger: slog.New(slog.NewTextHandler(log, nil))})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, m.Close())
	})
	return m, s.Devices()[0], log
}

// A channel where processes share machines.
func withChannel(t *testing.T) sim.Options {
	if runtime.GOOS != "linux" {
		t.Skip("processes share machines on Linux alone")
	}
	return sim.Options{Folder: t.TempDir(), Fabric: sim.Fabric{Channels: []int{0}}}
}

func TestPreferFabric(t *testing.T) {
	device := func(attributes map[int]int) sim.Options {
		return sim.Options{Devices: []sim.DeviceOptions{{Attributes: attributes}}}
	}
	channelWithoutFD := withChannel(t)
	channelWithoutFD.Devices = device(map[int]int{fdAttribute: 0}).Devices
	for _, row := range []struct {
		what    string
		options sim.Options
		at      cuda.Location
		want    vmm.HandleTypes
		logs    string
	}{
		{"a channel", withChannel(t), cuda.Location{}, vmm.PosixFD | vmm.Fabric, ""},
		{"a channel, no descriptors", channelWithoutFD, cuda.Location{}, vmm.Fabric, ""},
		{"no channel", sim.Options{}, cuda.Location{}, vmm.PosixFD, "there is no channel in"},
		{"no fabric", device(map[int]int{fabricAttribute: 0}), cuda.Location{}, vmm.PosixFD, "no fabric handles for it"},
		{"memory of the host", withChannel(t), cuda.OnHostNUMA(0), vmm.PosixFD, "memory of a device has fabric handles"},
	} {
		t.Run(row.what, func(t *testing.T) {
			m, d, log := onMachine(t, row.options)
			p := vmm.Properties{Location: row.at, Handles: vmm.PreferFabric}
			calls := 0
			for range 3 {
				a, err := vmm.Create(d, 2<<20, p)
				require.NoError(t, err)
				require.Equal(t, row.want, a.Requested().Handles)
				require.NoError(t, a.Close())
				m.OnCall(func(call string) {
					if call != "cuMemCreate" && call != "cuMemRelease" {
						calls++
					}
				})
			}
			m.OnCall(nil)
			require.Zero(t, calls, "the trial is made once")
			b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 << 20, Memory: p})
			require.NoError(t, err)
			require.Equal(t, row.want, b.Requested().Handles)
			require.NoError(t, b.Close())
			if row.logs == "" {
				require.Empty(t, log.String())
			} else {
				require.Equal(t, 1, strings.Count(log.String(), "descriptors alone"), log.String())
				require.Contains(t, log.String(), row.logs)
			}
		})
	}
	_, d, _ := onMachine(t, device(map[int]int{fdAttribute: 0}))
	_, err := vmm.Create(d, 2<<20, vmm.Properties{Handles: vmm.PreferFabric})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, "no handle type to share it by")
	_, err = vmm.Create(d, 2<<20, vmm.Properties{Handles: vmm.PreferFabric | vmm.PosixFD})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.Equal(t, "fabric preferred", vmm.PreferFabric.String())
}

// Whatever the driver refuses in the trial, memory has a descriptor. The reason is
// logged once, and the trial is made again later.
func TestPreferFabricFallsBackOnEveryRefusal(t *testing.T) {
	defer retrying()()
	for _, code := range []cuda.Code{1, 2, 3, 101, 201, 304, 400, 401, 800, 801, 802, 999} { // of all kinds
		for _, call := range []string{"cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"} {
			m, d, log := onMachine(t, withChannel(t))
			p := vmm.Properties{Handles: vmm.PreferFabric}
			for range 2 {
				remove := m.Inject(sim.Fault{Call: call, Result: code, Times: -1})
				b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 << 20, Memory: p})
				remove()
				require.NoError(t, err, "%s %d", call, code)
				require.Equal(t, vmm.PosixFD, b.Requested().Handles, "%s %d", call, code)
				require.NoError(t, b.Close())
			}
			require.Equal(t, 1, strings.Count(log.String(), "descriptors alone"), log.String())
			require.Contains(t, log.String(), call)
			require.Zero(t, d.System().Stats().Allocations)
			a, err := vmm.Create(d, 2<<20, p)
			require.NoError(t, err, "%s %d", call, code)
			require.Equal(t, vmm.PosixFD|vmm.Fabric, a.Requested().Handles, "it has passed")
			require.NoError(t, a.Close())
		}
	}
}

// What worked can cease to.
func TestPreferFabricForgetsWhatWorked(t *testing.T) {
	defer retrying()()
	m, d, _ := onMachine(t, withChannel(t))
	for _, want := range []vmm.HandleTypes{vmm.PosixFD | vmm.Fabric, vmm.PosixFD} {
		a, err := vmm.Create(d, 2<<20, vmm.Properties{Handles: vmm.PreferFabric})
		require.NoError(t, err)
		require.Equal(t, want, a.Requested().Handles)
		require.NoError(t, a.Close())
		m.Inject(sim.Fault{Call: "cuMemExportToShareableHandle", Result: 800, Times: 1})
	}
}

// On every driver it gives memory that can be shared, and says of which kind.
func TestPreferFabricOnEveryDriver(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		p, err := d.Probe()
		require.NoError(t, err)
		want := vmm.PosixFD
		if p.Fabric {
			want |= vmm.Fabric
		} else {
			require.Error(t, p.FabricError)
		}
		a, err := vmm.Create(d, 2<<20, vmm.Properties{Handles: vmm.PreferFabric})
		require.NoError(t, err)
		require.Equal(t, want, a.Requested().Handles)
		require.NoError(t, a.Close())
		// The default makes no trial.
		a, err = vmm.Create(d, 2<<20, vmm.Properties{})
		require.NoError(t, err)
		require.Equal(t, vmm.PosixFD, a.Requested().Handles)
		require.NoError(t, a.Close())
	})
}

// retrying has the result of a trial forgotten at once.
func retrying() (restore func()) {
	before := memspec.FabricTrialAge
	memspec.FabricTrialAge = 0
	return func() { memspec.FabricTrialAge = before }
}

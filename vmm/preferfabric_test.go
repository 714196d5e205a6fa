package vmm_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

const fabricAttribute, fdAttribute = 128, 103

// onMachine opens a machine of these options, and answers what its System logs.
func onMachine(t *testing.T, o sim.Options) (*sim.Machine, *cuda.Device, *bytes.Buffer) {
	t.Helper()
	m, err := sim.New(o)
	require.NoError(t, err)
	log := new(bytes.Buffer)
	s, err := m.Open(cuda.WithLogger(slog.New(slog.NewTextHandler(log, nil))))
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

// Only two answers let the library do without the fabric; the rest is an error.
// What may pass is asked again.
func TestTheAnswersThatPreferFabricFallsBackOn(t *testing.T) {
	// The trial of the fabric is the last of several.
	before := map[string]int{}
	m, d, _ := onMachine(t, withChannel(t))
	m.OnCall(func(call string) { before[call]++ })
	_, err := d.Probe()
	require.NoError(t, err)
	m.OnCall(nil)
	for call := range before {
		before[call]--
	}
	for _, code := range []cuda.Code{1, 2, 3, 100, 101, 201, 304, 400, 401, 800, 801, 802, 999} { // of all kinds
		for _, call := range []string{"cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"} {
			m, d, _ := onMachine(t, withChannel(t))
			remove := m.Inject(sim.Fault{Call: call, After: before[call], Result: code})
			a, err := vmm.Create(d, 2<<20, vmm.Properties{Handles: vmm.PreferFabric})
			remove()
			if code == 800 || code == 801 {
				require.NoError(t, err)
				require.Equal(t, vmm.PosixFD, a.Requested().Handles, "%s %d", call, code)
				require.NoError(t, a.Close())
			} else {
				var e *cuda.Error
				require.ErrorAs(t, err, &e, "%s %d", call, code)
				require.Equal(t, code, e.Code)
				require.Equal(t, call, e.Call)
			}
			require.Zero(t, d.System().Stats().Allocations)
			a, err = vmm.Create(d, 2<<20, vmm.Properties{Handles: vmm.PreferFabric})
			if code != 1 && code != 800 && code != 801 { // it has passed
				require.NoError(t, err, "%s %d", call, code)
				require.Equal(t, vmm.PosixFD|vmm.Fabric, a.Requested().Handles)
			} else {
				require.Equal(t, code == 800 || code == 801, err == nil, "%s %d: %v", call, code, err)
			}
			if err == nil {
				require.NoError(t, a.Close())
			}
		}
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
		// The default asks nobody.
		a, err = vmm.Create(d, 2<<20, vmm.Properties{})
		require.NoError(t, err)
		require.Equal(t, vmm.PosixFD, a.Requested().Handles)
		require.NoError(t, a.Close())
	})
}

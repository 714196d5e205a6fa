package fabric_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// finding returns the finding of a check, the worst if there are several.
func finding(t *testing.T, d fabric.Diagnosis, check string) fabric.Finding {
	t.Helper()
	var found *fabric.Finding
	for i, f := range d.Findings {
		if f.Check == check && (found == nil || found.Severity == fabric.OK) {
			found = &d.Findings[i]
		}
	}
	require.NotNil(t, found, "no finding of %q in\n%v", check, d)
	return *found
}

// opened reports whether memory with a fabric handle can be made here.
func opened(t *testing.T, dev *cuda.Device) bool {
	t.Helper()
	p, err := dev.Probe()
	require.NoError(t, err)
	return p.Fabric
}

// What the diagnosis says agrees with what the driver does.
func TestDiagnosisAgreesWithTheDriver(t *testing.T) {
	gputest.Each(t, func(t *testing.T, dev *cuda.Device) {
		works := opened(t, dev)
		d, err := fabric.Diagnose(fabric.Options{Trial: true}, dev)
		require.NoError(t, err)
		t.Logf("\n%v", d)
		require.Equal(t, works, finding(t, d, "create").Severity == fabric.OK)
		require.Len(t, d.Devices, 1)
		caps, err := dev.Capabilities()
		require.NoError(t, err)
		require.Equal(t, caps.Fabric, d.Devices[0].Attribute)
		require.Equal(t, dev.UUID().String(), d.Devices[0].UUID)
		if works {
			return
		}
		require.False(t, d.Works())
		// Without a trial the same stands in the way: it was found, not only met.
		d, err = fabric.Diagnose(fabric.Options{}, dev)
		require.NoError(t, err)
		require.False(t, d.Works(), "%v", d)
		for _, f := range d.Findings {
			require.NotContains(t, []string{"create", "export", "import"}, f.Check)
		}
	})
}

// Creation that fails says why.
func TestACreationThatFailsCarriesTheFindings(t *testing.T) {
	gputest.Each(t, func(t *testing.T, dev *cuda.Device) {
		if opened(t, dev) {
			t.Skip("a channel is open: creation does not fail")
		}
		_, err := vmm.Create(dev, 2<<20, vmm.Properties{Handles: vmm.Fabric})
		require.Error(t, err)
		t.Log(err)
		require.True(t, errors.Is(err, cuda.ErrNotPermitted) || errors.Is(err, cuda.ErrNotSupported))
		found := fabric.Findings(err)
		require.NotEmpty(t, found)
		for _, f := range found {
			if f.Severity == fabric.Problem {
				require.ErrorContains(t, err, f.Text)
				require.ErrorContains(t, err, f.Remedy)
			}
		}
		p, err := dev.Probe()
		require.NoError(t, err)
		require.Equal(t, found, fabric.Findings(p.FabricError))
		// A buffer takes its first memory when it grows.
		b, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: 4 << 20, Memory: vmm.Properties{Handles: vmm.Fabric | vmm.PosixFD}})
		require.NoError(t, err)
		require.NotEmpty(t, fabric.Findings(gputest.Err(b.AppendUndefined(2<<20))))
		require.NoError(t, b.Close())
	})
}

func TestOtherErrorsHaveNoFindings(t *testing.T) {
	_, s := sim.Open(t)
	_, err := vmm.Create(s.Devices()[0], 3, vmm.Properties{Handles: vmm.Fabric})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.Nil(t, fabric.Findings(err))
	require.Nil(t, fabric.Findings(nil))
	require.Nil(t, fabric.Findings(errors.New("another")))
}

// place makes the three places by hand. The channels are links to device files
// that every system has: /dev/null is 1:3, /dev/zero 1:5, /dev/full 1:7.
func place(t *testing.T, devices, params string, channels map[string]string) fabric.Options {
	t.Helper()
	if runtime.GOOS != "linux" && len(channels) > 0 {
		t.Skip("device files of channels need Linux")
	}
	dir := t.TempDir()
	o := fabric.Options{ProcDevices: filepath.Join(dir, "devices"), DriverParams: filepath.Join(dir, "params"), ChannelFolder: filepath.Join(dir, "channels")}
	require.NoError(t, os.WriteFile(o.ProcDevices, []byte(devices), 0o644))
	require.NoError(t, os.WriteFile(o.DriverParams, []byte(params), 0o644))
	require.NoError(t, os.Mkdir(o.ChannelFolder, 0o755))
	for name, device := range channels {
		require.NoError(t, os.Symlink(device, filepath.Join(o.ChannelFolder, name)))
	}
	return o
}

const (
	majors = "Character devices:\n  1 nvidia-caps-imex-channels\n"
	params = "ImexChannelCount: 2048\nCreateImexChannel0: 0\n"
)

func TestPlaces(t *testing.T) {
	_, s := sim.Open(t)
	dev := s.Devices()[0]
	for _, c := range []struct {
		name     string
		options  fabric.Options
		check    string
		severity fabric.Severity
		works    bool
		remedy   string
	}{
		{"no major", place(t, "Character devices:\n  1 mem\n", params, nil), "major", fabric.Problem, false, "kernel module"},
		{"channels off", place(t, majors, "ImexChannelCount: 0\n", nil), "channel count", fabric.Problem, false, "NVreg_ImexChannelCount"},
		{"no channel", place(t, majors, params, nil), "nodes", fabric.Problem, false, "mknod"},
		{"one channel", place(t, majors, params, map[string]string{"channel3": "/dev/null"}), "accessible channels", fabric.OK, true, ""},
		{"two channels", place(t, majors, params, map[string]string{"channel3": "/dev/null", "channel5": "/dev/zero"}), "accessible channels", fabric.Warning, true, "one channel"},
		{"a stale channel", place(t, strings.ReplaceAll(majors, " 1 ", " 2 "), params, map[string]string{"channel3": "/dev/null"}), "nodes", fabric.Warning, false, "remove them"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, err := fabric.Diagnose(c.options, dev)
			require.NoError(t, err)
			f := finding(t, d, c.check)
			require.Equal(t, c.severity, f.Severity, "%v", d)
			require.Contains(t, f.Remedy, c.remedy)
			require.Equal(t, -1, f.Device)
			require.Equal(t, c.works, d.Works(), "%v", d)
		})
	}
}

func TestForms(t *testing.T) {
	_, s := sim.Open(t)
	o := place(t, majors, params, map[string]string{"channel3": "/dev/null"})
	d, err := fabric.Diagnose(o, s.Devices()...)
	require.NoError(t, err)
	require.Equal(t, 1, d.Major)
	require.Equal(t, 2048, d.ChannelCount)
	require.Equal(t, []fabric.Channel{{Number: 3, Path: filepath.Join(o.ChannelFolder, "channel3"), Mode: "0666", Accessible: true}}, d.Channels)
	require.Len(t, d.Devices, len(s.Devices()))

	text, err := json.Marshal(d)
	require.NoError(t, err)
	var back fabric.Diagnosis
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, d, back)
	require.Contains(t, string(text), `"severity":"ok"`)

	lines := strings.Split(d.String(), "\n")
	require.Len(t, lines, len(d.Findings))
	require.Equal(t, d.Findings[0].String(), lines[0])
	require.Equal(t, "problem: nodes: none; make one", fabric.Finding{Check: "nodes", Severity: fabric.Problem, Device: -1, Text: "none", Remedy: "make one"}.String())

	// Nothing there is an empty list, not null.
	none, err := fabric.Diagnose(place(t, majors, params, nil), s.Devices()[0])
	require.NoError(t, err)
	text, err = json.Marshal(none)
	require.NoError(t, err)
	require.Contains(t, string(text), `"channels":[]`)
	require.Regexp(t, `^mknod -m 0660 \S+/channel0 c 1 0$`, finding(t, none, "nodes").Commands[1])
}

func TestDiagnoseRefuses(t *testing.T) {
	_, s := sim.Open(t)
	_, other := sim.Open(t)
	_, err := fabric.Diagnose(fabric.Options{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	for _, devices := range [][]*cuda.Device{{nil}, {s.Devices()[0], nil}} {
		_, err = fabric.Diagnose(fabric.Options{}, devices...)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err = fabric.Diagnose(fabric.Options{}, s.Devices()[0], other.Devices()[0])
	require.ErrorIs(t, err, cuda.ErrForeign)
	require.NoError(t, other.Close())
	_, err = fabric.Diagnose(fabric.Options{}, other.Devices()[0])
	require.ErrorIs(t, err, cuda.ErrClosed)
}

// onFabric opens machines that are one, as processes with places of their own on
// its fabric see it.
func onFabric(t *testing.T, places ...sim.Fabric) []*cuda.Device {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("processes share machines on Linux only")
	}
	folder := t.TempDir()
	var devices []*cuda.Device
	for _, p := range places {
		_, s := sim.Open(t, sim.Options{Folder: folder, Fabric: p})
		devices = append(devices, s.Devices()[0])
	}
	return devices
}

// With a channel the trial succeeds and leaves nothing behind.
func TestATrialThatWorks(t *testing.T) {
	dev := onFabric(t, sim.Fabric{Channels: []int{3}, Cluster: [16]byte{0xab, 15: 1}, Clique: 7})[0]
	d, err := fabric.Diagnose(fabric.Options{Trial: true}, dev)
	require.NoError(t, err)
	require.True(t, d.Works(), "%v", d)
	for _, f := range d.Findings {
		require.Equal(t, fabric.OK, f.Severity, "%v", f)
	}
	require.Equal(t, fabric.OK, finding(t, d, "import").Severity)
	require.Equal(t, "completed", d.Devices[0].State)
	require.True(t, d.Devices[0].Registered)
	require.Equal(t, "ab000000-0000-0000-0000-000000000001.7", d.Devices[0].Clique)
	require.Zero(t, dev.System().Stats().Allocations)

	// Two channels still work, and may not be what the others have.
	dev = onFabric(t, sim.Fabric{Channels: []int{3, 4}})[0]
	d, err = fabric.Diagnose(fabric.Options{Trial: true}, dev)
	require.NoError(t, err)
	require.True(t, d.Works())
	require.Equal(t, fabric.Warning, finding(t, d, "accessible channels").Severity)
}

// Each step of the trial may fail; the others' findings stand and nothing is
// left.
func TestEachStepOfATrialThatFails(t *testing.T) {
	m, s := sim.Open(t, sim.Options{Folder: t.TempDir(), Fabric: sim.Fabric{Channels: []int{0}}})
	for _, c := range []struct{ call, check string }{
		{"cuMemCreate", "create"}, {"cuMemExportToShareableHandle", "export"}, {"cuMemImportFromShareableHandle", "import"},
	} {
		t.Run(c.check, func(t *testing.T) {
			defer m.Inject(sim.Fault{Call: c.call, Result: 400, Times: -1})()
			d, err := fabric.Diagnose(fabric.Options{Trial: true}, s.Devices()[0])
			require.NoError(t, err)
			f := finding(t, d, c.check)
			require.Equal(t, fabric.Problem, f.Severity)
			require.Contains(t, f.Remedy, "nvidia-imex")
			require.False(t, d.Works())
			require.Zero(t, s.Stats().Allocations)
		})
	}
	remove := m.Inject(sim.Fault{Call: "cuMemRelease", Result: 999})
	d, err := fabric.Diagnose(fabric.Options{Trial: true}, s.Devices()[0])
	remove()
	require.NoError(t, err)
	f := finding(t, d, "create")
	require.Equal(t, fabric.Warning, f.Severity)
	require.Contains(t, f.Remedy, "Drain")
	require.NoError(t, s.Drain(t.Context()))
	require.Zero(t, s.Stats().Allocations)
}

// Whatever call of the trial fails, the rest of the diagnosis stands and
// nothing is left.
func TestATrialThatFails(t *testing.T) {
	m, s := sim.Open(t)
	for _, code := range []cuda.Code{2, 101, 304, 400, 401, 800, 801, 802, 999} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			defer m.Inject(sim.Fault{Call: "cuMemCreate", Result: code, Times: -1})()
			d, err := fabric.Diagnose(fabric.Options{Trial: true}, s.Devices()[0])
			require.NoError(t, err)
			f := finding(t, d, "create")
			require.Contains(t, f.Text, code.String())
			require.Equal(t, code == 2, f.Severity == fabric.Note)
			require.NotEmpty(t, finding(t, d, "attribute").Text)
			require.Zero(t, s.Stats().Allocations)
		})
	}
}

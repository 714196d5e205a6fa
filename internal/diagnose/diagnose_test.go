package diagnose

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/imex"
	"github.com/cuvmm/cuvmm/internal/nvml"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// of returns the finding of a check that is not ok, or else the one that is.
func of(t *testing.T, all []Finding, c Check) Finding {
	t.Helper()
	var found *Finding
	for i, f := range all {
		if f.Check == c && (found == nil || found.Severity == OK) {
			found = &all[i]
		}
	}
	require.NotNil(t, found, "no finding of %q among %v", c, all)
	return *found
}

func channel(minor int, mode fs.FileMode, open bool) imex.Channel {
	return imex.Channel{Minor: minor, Path: fmt.Sprintf("/dev/channels/channel%d", minor), Mode: mode, Device: [2]int{510, minor}, Readable: open, Writable: open}
}

func TestMachine(t *testing.T) {
	paths := imex.Paths{Devices: "/proc/devices", Params: "/params", Nodes: "/dev/channels"}
	facts := func(change func(*imex.Facts)) imex.Facts {
		f := imex.Facts{Paths: paths, Major: 510, Count: 2048, Channels: []imex.Channel{channel(3, 0o660, true)}, UID: 1000, GID: 100}
		if change != nil {
			change(&f)
		}
		return f
	}
	for _, c := range []struct {
		name     string
		facts    imex.Facts
		check    Check
		severity Severity
		text     string // what the finding says
		remedy   string
	}{
		{"all is well: major", facts(nil), CheckMajor, OK, "510", ""},
		{"all is well: count", facts(nil), CheckCount, OK, "2048 channels", ""},
		{"all is well: nodes", facts(nil), CheckNodes, OK, "channel3 (mode 0660, owner 0:0, device 510:3)", ""},
		{"all is well: one channel", facts(nil), CheckAccessible, OK, "channel 3 is open", ""},
		{"no major", facts(func(f *imex.Facts) { f.Major = 0 }), CheckMajor, Problem, "/proc/devices lists no nvidia-caps-imex-channels", "NVreg_ImexChannelCount"},
		{"majors unreadable", facts(func(f *imex.Facts) { f.Major, f.MajorErr = 0, errors.New("no entry") }), CheckMajor, Note, "no entry", "readable"},
		{"channels turned off", facts(func(f *imex.Facts) { f.Count = 0 }), CheckCount, Problem, "ImexChannelCount 0", "NVreg_ImexChannelCount=2048"},
		{"count not told", facts(func(f *imex.Facts) { f.Count = -1 }), CheckCount, Note, "/params does not contain", ""},
		{"count unreadable", facts(func(f *imex.Facts) { f.Count, f.ParamsErr = -1, errors.New("no entry") }), CheckCount, Note, "no entry", ""},
		{"no nodes", facts(func(f *imex.Facts) { f.Channels = nil }), CheckNodes, Problem, "no channel in /dev/channels", "mknod -m 0660 /dev/channels/channel0 c 510 0"},
		{"no nodes and no major", facts(func(f *imex.Facts) { f.Channels, f.Major = nil, 0 }), CheckNodes, Problem, "no channel", "c MAJOR 0"},
		{"nodes unreadable", facts(func(f *imex.Facts) { f.Channels, f.ChannelsErr = nil, fs.ErrPermission }), CheckNodes, Warning, "permission denied", "readable"},
		{"none accessible", facts(func(f *imex.Facts) { f.Channels = []imex.Channel{channel(3, 0o600, false), channel(4, 0o600, false)} }),
			CheckAccessible, Problem, "none of the channels (2) is open to this process (user 1000, group 100)", "chgrp"},
		{"two accessible", facts(func(f *imex.Facts) { f.Channels = []imex.Channel{channel(3, 0o660, true), channel(4, 0o660, true)} }),
			CheckAccessible, Warning, "2 channels are open to this process", "the one channel"},
		{"a stale node", facts(func(f *imex.Facts) { f.Channels[0].Device = [2]int{509, 3} }), CheckNodes, Warning, "have major 510: channel3 (mode 0660, owner 0:0, device 509:3)", "remove them"},
		{"a stale node is not accessible", facts(func(f *imex.Facts) { f.Channels[0].Device = [2]int{509, 3} }), CheckAccessible, Problem, "none of the channels (1)", "mknod"},
		{"a plain file", facts(func(f *imex.Facts) { f.Channels[0].Device = [2]int{} }), CheckNodes, Warning, "no character device", "remove them"},
		{"channel 0 open to all", facts(func(f *imex.Facts) { f.Channels = []imex.Channel{channel(0, 0o666, true)} }), CheckChannel0, Warning, "mode 0666", "chmod 0660 /dev/channels/channel0"},
		{"channel 0 made by the module", facts(func(f *imex.Facts) { f.Channels, f.CreateChannel0 = []imex.Channel{channel(0, 0o666, true)}, true }),
			CheckChannel0, Warning, "every user", "NVreg_CreateImexChannel0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := of(t, machine(c.facts), c.check)
			require.Equal(t, c.severity, got.Severity)
			require.Equal(t, Machine, got.Device)
			require.Contains(t, got.Text, c.text)
			require.Contains(t, got.Remedy, c.remedy)
			require.Equal(t, got.Severity == Problem || got.Severity == Warning, got.Remedy != "" && got.Severity != Note, "what is wrong has a remedy")
		})
	}
	elsewhere := of(t, machine(facts(func(f *imex.Facts) { f.Channels, f.Remedy = nil, "another way" })), CheckNodes)
	require.Equal(t, "another way", elsewhere.Remedy)
	require.Empty(t, elsewhere.Commands)
	none := func(f *imex.Facts) { f.Channels = nil }
	require.Equal(t, []string{"mkdir -p /dev/channels", "mknod -m 0660 /dev/channels/channel0 c 510 0"}, of(t, machine(facts(none)), CheckNodes).Commands)
	require.Empty(t, of(t, machine(facts(func(f *imex.Facts) { f.Channels, f.Major = nil, 0 })), CheckNodes).Commands, "the number is not known")
	require.Equal(t, []string{"chmod 0660 /dev/channels/channel0"},
		of(t, machine(facts(func(f *imex.Facts) { f.Channels = []imex.Channel{channel(0, 0o666, true)} })), CheckChannel0).Commands)
	for _, f := range machine(facts(nil)) {
		require.Equal(t, OK, f.Severity, "%v", f)
	}
	closed := channel(0, 0o660, true)
	for _, f := range machine(facts(func(f *imex.Facts) { f.Channels = []imex.Channel{closed} })) {
		require.NotEqual(t, CheckChannel0, f.Check, "channel 0 is a channel like others where it is closed")
	}
	many := facts(func(f *imex.Facts) {
		f.Channels = nil
		for i := range 2048 {
			f.Channels = append(f.Channels, channel(i+1, 0o660, false))
		}
	})
	require.Contains(t, of(t, machine(many), CheckNodes).Text, "and 2044 more")
}

func TestDevice(t *testing.T) {
	device3 := func(change func(*Device)) Device {
		d := Device{Ordinal: 3, UUID: "GPU-3", Attribute: true, Fabric: nvml.Fabric{
			Version: 3, State: nvml.StateCompleted, Cluster: [16]byte{15: 7}, Clique: 5, Mask: 0x11aa, Summary: nvml.SummaryHealthy,
		}}
		if change != nil {
			change(&d)
		}
		return d
	}
	for _, c := range []struct {
		name     string
		device   Device
		check    Check
		severity Severity
		text     string
		remedy   string
	}{
		{"attribute", device3(nil), CheckAttribute, OK, "has fabric handles", ""},
		{"state", device3(nil), CheckState, OK, "completed", ""},
		{"status", device3(nil), CheckStatus, OK, "registered", ""},
		{"health", device3(nil), CheckHealth, OK, "healthy", ""},
		{"cluster", device3(nil), CheckCluster, OK, "00000000-0000-0000-0000-000000000007", ""},
		{"clique", device3(nil), CheckClique, OK, "00000000-0000-0000-0000-000000000007.5", ""},
		{"no attribute", device3(func(d *Device) { d.Attribute = false }), CheckAttribute, Problem, "no fabric handles", "descriptors"},
		{"no NVML", device3(func(d *Device) { d.FabricErr = nvml.ErrMissing }), CheckNVML, Note, "NVML is not available", "CUVMM_LIBNVML"},
		{"NVML refuses", device3(func(d *Device) { d.FabricErr = &nvml.Error{Call: "nvmlInit_v2", Return: nvml.LibraryMismatch} }), CheckNVML, Note, "nvmlInit_v2 returned 18", "same release"},
		{"NVML may not", device3(func(d *Device) { d.FabricErr = &nvml.Error{Call: "nvmlInit_v2", Return: nvml.NoPermission} }), CheckNVML, Note, "no permission", "/dev/nvidiactl"},
		{"NVML does not see it", device3(func(d *Device) { d.FabricErr = &nvml.Error{Call: "x", Return: nvml.NotFound} }), CheckNVML, Note, "not found", "whole GPU"},
		{"a GPU that is lost", device3(func(d *Device) { d.FabricErr = &nvml.Error{Call: "x", Return: nvml.GPULost} }), CheckNVML, Problem, "GPU is lost", "Xid"},
		{"NVML says something else", device3(func(d *Device) { d.FabricErr = &nvml.Error{Call: "x", Return: 77} }), CheckNVML, Note, "error 77", "nvidia-smi"},
		{"not supported", device3(func(d *Device) { d.FabricErr = &nvml.Error{Call: "x", Return: nvml.NotSupported} }), CheckState, Note, "on none", ""},
		{"on no fabric", device3(func(d *Device) { d.Fabric.State = nvml.StateNotSupported }), CheckState, Note, "on no fabric", ""},
		{"not started", device3(func(d *Device) { d.Fabric.State = nvml.StateNotStarted }), CheckState, Problem, "not started", "fabricmanager"},
		{"in progress", device3(func(d *Device) { d.Fabric.State = nvml.StateInProgress }), CheckState, Problem, "in progress", "wait"},
		{"a later state", device3(func(d *Device) { d.Fabric.State = 9 }), CheckState, Note, "code 9", ""},
		{"failed", device3(func(d *Device) { d.Fabric.Status = nvml.Unknown }), CheckStatus, Problem, "999 (unknown error)", "fabricmanager"},
		{"bandwidth", device3(func(d *Device) { d.Fabric.Mask = 0x11a9 }), CheckHealth, Warning, "bandwidth is degraded", "nvidia-smi nvlink"},
		{"recovery", device3(func(d *Device) { d.Fabric.Mask = 0x11a6 }), CheckHealth, Warning, "being repaired", "wait"},
		{"route", device3(func(d *Device) { d.Fabric.Mask = 0x119a }), CheckHealth, Problem, "a route of its fabric is broken", "out of service"},
		{"timeout", device3(func(d *Device) { d.Fabric.Mask = 0x116a }), CheckHealth, Problem, "waits for a reset", "reset the GPU"},
		{"partition", device3(func(d *Device) { d.Fabric.Mask = 0x21aa }), CheckHealth, Problem, "no partition", "assign it"},
		{"configuration", device3(func(d *Device) { d.Fabric.Mask = 0x15aa }), CheckHealth, Problem, "too few NVLinks", "mend"},
		{"unhealthy in sum", device3(func(d *Device) { d.Fabric.Summary = nvml.SummaryUnhealthy }), CheckHealth, Problem, "unhealthy", "fabricmanager"},
		{"limited", device3(func(d *Device) { d.Fabric.Summary = nvml.SummaryLimitedCapacity }), CheckHealth, Warning, "limited capacity", "fabricmanager"},
		{"health not told", device3(func(d *Device) { d.Fabric.Summary, d.Fabric.Mask = 0, 0 }), CheckHealth, Note, "not known", ""},
		{"no cluster", device3(func(d *Device) { d.Fabric.Cluster = [16]byte{} }), CheckCluster, Note, "ends at this host", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := of(t, device(c.device), c.check)
			require.Equal(t, c.severity, got.Severity)
			require.Equal(t, 3, got.Device)
			require.Contains(t, got.Text, c.text)
			require.Contains(t, got.Remedy, c.remedy)
			if got.Severity == Problem || got.Severity == Warning {
				require.NotEmpty(t, got.Remedy, "what is wrong has a remedy")
			}
		})
	}
	for _, f := range device(device3(nil)) {
		require.Equal(t, OK, f.Severity, "%v", f)
	}
}

func TestCliquesThatDiffer(t *testing.T) {
	in := func(ordinal int, clique uint32, change func(*Device)) Device {
		d := Device{Ordinal: ordinal, Fabric: nvml.Fabric{State: nvml.StateCompleted, Clique: clique}}
		if change != nil {
			change(&d)
		}
		return d
	}
	require.Empty(t, among([]Device{in(0, 1, nil), in(1, 1, nil)}))
	all := among([]Device{in(0, 1, nil), in(1, 2, nil), in(2, 1, func(d *Device) { d.Fabric.Cluster[0] = 1 })})
	require.Len(t, all, 2)
	require.Equal(t, 1, all[0].Device)
	require.Contains(t, all[0].Text, "device 0")
	require.Equal(t, 2, all[1].Device)
	// Those of which nothing is known, or that are on no fabric, say nothing.
	require.Empty(t, among([]Device{in(0, 1, nil), in(1, 2, func(d *Device) { d.FabricErr = nvml.ErrMissing }), in(2, 2, func(d *Device) { d.Fabric.State = 0 }),
		in(3, 2, func(d *Device) { d.Fabric.Status = nvml.Unknown })}))
}

func TestTrialFindings(t *testing.T) {
	d := Device{Ordinal: 2}
	for r := range remedies {
		f := d.failed(CheckImport, r)
		require.Equal(t, r == driver.OutOfMemory, f.Severity == Note, "%v", r)
		require.Contains(t, f.Text, r.String())
		require.NotEmpty(t, f.Remedy)
	}
	require.Contains(t, d.failed(CheckExport, driver.Unknown).Text, "cannot be exported: CUDA_ERROR_UNKNOWN")
}

func TestErrorSaysWhatMatters(t *testing.T) {
	e := &Error{Findings: []Finding{
		{Check: CheckMajor, Severity: OK, Text: "fine"},
		{Check: CheckNodes, Severity: Problem, Text: "none", Remedy: "make one"},
		{Check: CheckState, Severity: Note, Text: "noted"},
		{Check: CheckChannel0, Severity: Warning, Text: "open"},
	}}
	require.EqualError(t, e, "none (make one); open")
	require.ErrorContains(t, &Error{}, "nothing that this process can see")
	require.Equal(t, "problem: nodes: device 1: none; make one", Finding{CheckNodes, Problem, 1, "none", "make one", nil}.String())
	require.Equal(t, "ok: major: fine", Finding{CheckMajor, OK, Machine, "fine", "", nil}.String())
}

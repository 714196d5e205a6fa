package sim

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/internal/imex"
	"github.com/cuvmm/cuvmm/internal/nvml"
)

// On a real machine the operating system and NVML describe the fabric. Here
// [Options.Fabric] does.

var (
	_ imex.Source = (*api)(nil)
	_ nvml.Source = (*api)(nil)
)

// channelMajor is the major that the machine's channels have.
const channelMajor = 241

// IMEX are the process's channels, as if their device files were there.
func (a *api) IMEX() imex.Facts {
	f := imex.Facts{
		Paths: imex.Paths{}.Defaults(), Major: channelMajor, Count: 2048, UID: os.Geteuid(), GID: os.Getegid(),
		Remedy: "the software driver opens the channels that sim.Options.Fabric names",
	}
	for _, minor := range a.m.options.Fabric.Channels {
		f.Channels = append(f.Channels, imex.Channel{
			Minor: minor, Path: filepath.Join(f.Paths.Nodes, fmt.Sprintf("channel%d", minor)), Mode: 0o660,
			UID: f.UID, GID: f.GID, Device: [2]int{channelMajor, minor}, Readable: true, Writable: true,
		})
	}
	return f
}

// NVML reports the state of the machine's devices on their fabric.
func (a *api) NVML() nvml.Library { return fabricFacts{a.m} }

type fabricFacts struct{ m *Machine }

// Fabric describes a device by its UUID. It reports no fabric to a process that has no
// place on one.
func (f fabricFacts) Fabric(uuid string) (nvml.Fabric, error) {
	place, known := f.m.options.Fabric, false
	for _, d := range f.m.devices {
		u := d.uuid
		known = known || uuid == fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
	}
	switch {
	case !known:
		return nvml.Fabric{}, &nvml.Error{Call: "nvmlDeviceGetHandleByUUID", Return: nvml.NotFound}
	case !place.open() && place.Cluster == [16]byte{} && place.Clique == 0:
		return nvml.Fabric{Version: 3, State: nvml.StateNotSupported}, nil
	}
	return nvml.Fabric{
		Version: 3, State: nvml.StateCompleted, Cluster: place.Cluster, Clique: place.Clique,
		Mask: 0x11aa, Summary: nvml.SummaryHealthy, // every condition false, nothing misconfigured, a partition
	}, nil
}

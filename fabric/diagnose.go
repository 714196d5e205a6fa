package fabric

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/imex"
	"github.com/cuvmm/cuvmm/internal/nvml"
)

// Options configure Diagnose. The zero value looks in the usual places and creates
// nothing.
type Options struct {
	// Trial also creates one granule of memory, the smallest size, with a fabric handle on
	// each device, exports it and imports it again. It is the only proof.
	Trial bool
	// ProcDevices, DriverParams and ChannelFolder are other places for
	// /proc/devices, /proc/driver/nvidia/params and the folder of the channels'
	// device files, for a container that mounts the host's.
	ProcDevices, DriverParams, ChannelFolder string
}

// Severity is the weight of a finding.
type Severity string

// The severities.
const (
	// OK: as it should be.
	OK = Severity(diagnose.OK)
	// Note: worth knowing, without a remedy.
	Note = Severity(diagnose.Note)
	// Warning: fabric handles may work, but not as expected.
	Warning = Severity(diagnose.Warning)
	// Problem: fabric handles cannot work.
	Problem = Severity(diagnose.Problem)
)

// Finding is the result of one check.
type Finding struct {
	// Check names the check: "major", "channel count", "nodes", "accessible channels",
	// "channel 0", "attribute", "nvml", "fabric state", "fabric status",
	// "fabric health", "cluster", "clique", "create", "export", "import".
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	// Device is the device's ordinal, or -1 if the finding is the machine's.
	Device int `json:"device"`
	// Text says what was found.
	Text string `json:"text"`
	// Remedy says what an administrator does about it; empty if there is nothing to do.
	Remedy string `json:"remedy,omitempty"`
	// Commands carry out the remedy as root, as far as commands can.
	Commands []string `json:"commands,omitempty"`
}

// String writes the finding on one line: severity, check, device, text, remedy.
func (f Finding) String() string {
	return diagnose.Finding{Check: diagnose.Check(f.Check), Severity: diagnose.Severity(f.Severity), Device: f.Device, Text: f.Text, Remedy: f.Remedy}.String()
}

// Channel is an IMEX channel's device file.
type Channel struct {
	Number int    `json:"number"`
	Path   string `json:"path"`
	// Mode has the permission bits, such as "0660".
	Mode string `json:"mode"`
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
	// Accessible: this process may open it, and it is the device of that name.
	Accessible bool `json:"accessible"`
}

// DeviceState is the state of a device in its fabric.
type DeviceState struct {
	Ordinal int    `json:"ordinal"`
	UUID    string `json:"uuid"`
	// Attribute: the driver reports that the device has fabric handles, which does not mean
	// that they work.
	Attribute bool `json:"attribute"`
	// State is the registration with the fabric, in NVML's words: "not
	// supported", "not started", "in progress", "completed"; "unknown" if NVML did not
	// tell.
	State string `json:"state"`
	// Registered: the registration was completed successfully.
	Registered bool `json:"registered"`
	// Clique names the set of GPUs that this one reaches: the cluster's UUID, a point, a
	// number. It is empty if the device is not registered. Devices of different
	// cliques cannot import each other's memory.
	Clique string `json:"clique,omitempty"`
}

// Diagnosis is the result of Diagnose. It is a plain value, with a JSON form.
type Diagnosis struct {
	// Major is the character device major of the channels, or 0 if there is
	// none. ChannelCount is the number of channels that the kernel module has, or -1 if it
	// does not tell.
	Major        int `json:"major"`
	ChannelCount int `json:"channel_count"`
	// Channels are the channels that have a device file.
	Channels []Channel     `json:"channels"`
	Devices  []DeviceState `json:"devices"`
	// Findings are the machine's findings, then those of each device.
	Findings []Finding `json:"findings"`
}

// Works reports whether no finding is a problem. With Options.Trial the driver has shown
// that fabric handles work; without it nothing was found that prevents them.
func (d Diagnosis) Works() bool {
	for _, f := range d.Findings {
		if f.Severity == Problem {
			return false
		}
	}
	return true
}

// String writes the findings, one on each line.
func (d Diagnosis) String() string {
	var lines []string
	for _, f := range d.Findings {
		lines = append(lines, f.String())
	}
	return strings.Join(lines, "\n")
}

// Diagnose reports what prevents this process from using fabric handles on the
// devices, which are of one System. Obstacles are findings; an error is a mistake of the
// caller: no device, devices of several Systems, or a closed one. Diagnose opens no channel
// without Options.Trial. It may take a second, while NVML is opened, and ten seconds for
// each device for which NVML does not respond. It is safe for concurrent use.
func Diagnose(o Options, devices ...*cuda.Device) (Diagnosis, error) {
	const op = "fabric.Diagnose"
	if len(devices) == 0 || core.SystemOf(devices[0]) == nil {
		return Diagnosis{}, errs.Invalid(op, "no device", "pass System.Devices()")
	}
	sys := core.SystemOf(devices[0])
	if sys.Closed() {
		return Diagnosis{}, errs.ClosedError(op, "System")
	}
	var ids []driver.Device
	for _, d := range devices {
		if core.SystemOf(d) == nil {
			return Diagnosis{}, errs.Invalid(op, "a nil device", "pass System.Devices()")
		}
		if core.SystemOf(d) != sys {
			return Diagnosis{}, errs.ForeignError(op, "device")
		}
		id, r := sys.Drv.DeviceGet(int32(d.Ordinal()))
		if r != driver.Success {
			return Diagnosis{}, sys.CallError(op, driver.CallDeviceGet, r, d.String())
		}
		ids = append(ids, id)
	}
	return diagnosis(diagnose.Run(sys, ids, diagnose.Options{
		Trial: o.Trial,
		Paths: imex.Paths{Devices: o.ProcDevices, Params: o.DriverParams, Nodes: o.ChannelFolder},
	})), nil
}

// Findings returns the findings in an error of memory with a fabric handle that could not
// be created. Any other error has none.
func Findings(err error) []Finding {
	var e *diagnose.Error
	if !errors.As(err, &e) {
		return nil
	}
	return findings(e.Findings)
}

func findings(from []diagnose.Finding) []Finding {
	to := make([]Finding, 0, len(from))
	for _, f := range from {
		to = append(to, Finding{Check: string(f.Check), Severity: Severity(f.Severity), Device: f.Device, Text: f.Text, Remedy: f.Remedy, Commands: f.Commands})
	}
	return to
}

func diagnosis(r diagnose.Report) Diagnosis {
	d := Diagnosis{Major: r.Channels.Major, ChannelCount: r.Channels.Count, Channels: []Channel{}, Findings: findings(r.Findings)}
	for _, c := range r.Channels.Channels {
		d.Channels = append(d.Channels, Channel{
			Number: c.Minor, Path: c.Path, Mode: fmt.Sprintf("%04o", c.Mode), UID: c.UID, GID: c.GID,
			Accessible: c.Accessible() && r.Channels.Fits(c),
		})
	}
	for _, from := range r.Devices {
		s := DeviceState{Ordinal: from.Ordinal, UUID: from.UUID, Attribute: from.Attribute, State: "unknown"}
		var refused *nvml.Error
		switch f := from.Fabric; {
		case from.FabricErr == nil:
			s.State = f.State.String()
			s.Registered = f.State == nvml.StateCompleted && f.Status == nvml.Success
			if s.Registered {
				s.Clique = diagnose.Clique(f)
			}
		case errors.As(from.FabricErr, &refused) && refused.Return == nvml.NotSupported:
			s.State = nvml.StateNotSupported.String()
		}
		d.Devices = append(d.Devices, s)
	}
	return d
}

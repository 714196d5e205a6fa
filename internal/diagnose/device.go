package diagnose

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/nvml"
)

// Device is the known state of a device's fabric.
type Device struct {
	Ordinal int
	UUID    string
	// Attribute is the driver's claim that the device has fabric handles.
	Attribute bool
	Fabric    nvml.Fabric
	FabricErr error
}

func (d Device) found(c Check, s Severity, remedy, format string, args ...any) Finding {
	return Finding{Check: c, Severity: s, Device: d.Ordinal, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

const manager = "look whether nvidia-fabricmanager runs on this host, and at its log"

// nvmlRemedies are the remedies for calls of NVML that fail.
var nvmlRemedies = map[nvml.Return]string{
	nvml.NoPermission:    "let this process open /dev/nvidiactl and the GPU's device file",
	nvml.NotFound:        "let this process see the whole GPU; NVML may not find a part of one (MIG)",
	nvml.DriverNotLoaded: "load the nvidia kernel module",
	nvml.GPULost:         "look for the GPU in the kernel's log (dmesg, Xid), and reset it or restart the host",
	nvml.LibraryMismatch: "have the driver's libraries and its kernel module of the same release: restart the host after an update, and the container with the host's libraries",
}

// device returns the findings from the attribute and from NVML.
func device(d Device) []Finding {
	var all []Finding
	add := func(c Check, s Severity, remedy, format string, args ...any) {
		all = append(all, d.found(c, s, remedy, format, args...))
	}
	if d.Attribute {
		// The attribute promises little: it is 1 even if no channel is open.
		add(CheckAttribute, OK, "", "the driver has fabric handles for it")
	} else {
		add(CheckAttribute, Problem, "share its memory by descriptors; fabric handles need a GPU and a driver that have them", "the driver has no fabric handles for it")
	}
	var refused *nvml.Error
	switch {
	case errors.As(d.FabricErr, &refused) && refused.Return == nvml.NotSupported:
		add(CheckState, Note, "", "NVML knows no fabric of it: it is on none, and its handles serve this host alone")
		return all
	case errors.Is(d.FabricErr, errSilent):
		add(CheckNVML, Warning, "check whether nvidia-smi works, and look for the GPU in the kernel's log (dmesg, Xid)", "the state of its fabric is not known: %v", d.FabricErr)
		return all
	case refused != nil:
		severity, remedy := Note, cmp.Or(nvmlRemedies[refused.Return], "see what nvidia-smi says")
		if refused.Return == nvml.GPULost {
			severity = Problem
		}
		add(CheckNVML, severity, remedy, "the state of its fabric is not known: %v", d.FabricErr)
		return all
	case d.FabricErr != nil:
		add(CheckNVML, Note, "give the container libnvidia-ml.so.1 of the driver, or name it in CUVMM_LIBNVML", "the state of its fabric is not known: %v", d.FabricErr)
		return all
	}
	f := d.Fabric
	switch f.State {
	case nvml.StateNotSupported:
		add(CheckState, Note, "", "it is on no fabric: its handles serve this host alone")
		return all
	case nvml.StateNotStarted, nvml.StateInProgress:
		add(CheckState, Problem, "wait until the fabric manager has registered it; if it stays so "+manager, "its registration with the fabric is %v", f.State)
		return all
	case nvml.StateCompleted:
		add(CheckState, OK, "", "its registration with the fabric is completed")
	default:
		add(CheckState, Note, "", "its registration with the fabric is in a state that is not known here: %v", f.State)
	}
	if f.Status != nvml.Success {
		add(CheckStatus, Problem, manager, "its registration with the fabric failed: %d (%v)", int32(f.Status), f.Status)
	} else {
		add(CheckStatus, OK, "", "registered")
	}
	all = append(all, health(d)...)
	if f.Cluster == ([16]byte{}) {
		add(CheckCluster, Note, "", "its fabric ends at this host: no other host can import its memory")
	} else {
		add(CheckCluster, OK, "", "cluster %s", Cluster(f))
	}
	add(CheckClique, OK, "", "clique %s", Clique(f))
	return all
}

func health(d Device) (all []Finding) {
	add := func(s Severity, remedy, text string) { all = append(all, d.found(CheckHealth, s, remedy, "%s", text)) }
	m := d.Fabric.Mask
	if m.AccessTimeoutRecovery() {
		add(Problem, "reset the GPU, with nothing running on it", "an access over the fabric timed out, and the GPU waits for a reset")
	}
	if m.RouteUnhealthy() {
		add(Problem, "look at the links (nvidia-smi nvlink --status) and at the fabric manager's log, and take the GPU out of service", "a route of its fabric is broken")
	}
	if m.RouteRecovery() {
		add(Warning, "wait; memory on other GPUs may be out of reach until then", "a route of its fabric is being repaired")
	}
	if m.DegradedBandwidth() {
		add(Warning, "look for links that are down: nvidia-smi nvlink --status", "its fabric's bandwidth is degraded")
	}
	if m.NoPartition() {
		add(Problem, "assign it to a partition of the fabric", "it is assigned to no partition")
	}
	if what := m.Misconfigured(); what != "" {
		add(Problem, "mend the configuration of the fabric: "+manager, "its fabric is misconfigured: "+what)
	}
	if len(all) > 0 {
		return all
	}
	switch s := d.Fabric.Summary; s {
	case nvml.SummaryUnhealthy:
		add(Problem, manager, "its fabric is unhealthy")
	case nvml.SummaryLimitedCapacity:
		add(Warning, manager, "its fabric has limited capacity")
	case nvml.SummaryHealthy:
		add(OK, "", "healthy")
	default:
		if d.Fabric.Version < 3 {
			add(OK, "", "no condition is reported")
		} else {
			add(Note, "", "the fabric's health is "+s.String())
		}
	}
	return all
}

// among returns the findings that only several devices together give.
func among(devices []Device) (all []Finding) {
	var first *Device
	for i := range devices {
		d := &devices[i]
		switch {
		case d.FabricErr != nil || d.Fabric.State != nvml.StateCompleted || d.Fabric.Status != nvml.Success:
		case first == nil:
			first = d
		case Clique(d.Fabric) != Clique(first.Fabric):
			all = append(all, d.found(CheckClique, Warning, "share between devices of one clique only",
				"it is in clique %s and device %d in clique %s: neither can import the other's memory", Clique(d.Fabric), first.Ordinal, Clique(first.Fabric)))
		}
	}
	return all
}

// Cluster writes a cluster's UUID.
func Cluster(f nvml.Fabric) string {
	u := f.Cluster
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
}

// Clique names the set of GPUs that reach each other over a fabric, in the usual
// form: the cluster's UUID, a point, the number of the clique in the cluster.
func Clique(f nvml.Fabric) string { return fmt.Sprintf("%s.%d", Cluster(f), f.Clique) }

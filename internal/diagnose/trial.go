package diagnose

import (
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// trial creates a granule with a fabric handle, exports it, imports it into this
// process, and releases it.
func trial(sys *core.System, id driver.Device, d Device) (all []Finding) {
	prop := driver.AllocationProp{
		Type: driver.AllocationPinned, Location: driver.Location{Type: driver.LocationDevice, ID: int32(id)},
		RequestedHandleTypes: driver.HandleFabric,
	}
	size, r := sys.Granularity(prop, driver.GranularityMinimum)
	if r != driver.Success {
		return []Finding{d.failed(CheckCreate, r)}
	}
	at, r, left := phys.ProbeHandleType("a trial of fabric handles", sys, size, prop)
	for _, step := range steps {
		if step.call == at && r != driver.Success {
			all = append(all, d.failed(step.check, r))
			break
		}
		all = append(all, d.found(step.check, OK, "", "%s", step.done))
	}
	if left != nil {
		all = append(all, d.found(CheckCreate, Warning, "call System.Drain, which tries again", "%v", left))
	}
	return all
}

var steps = []struct {
	call  driver.Call
	check Check
	done  string
}{
	{driver.CallMemCreate, CheckCreate, "memory with a fabric handle was created"},
	{driver.CallMemExportToShareableHandle, CheckExport, "it was exported"},
	{driver.CallMemImportFromShareableHandle, CheckImport, "it was imported"},
}

// failed returns the finding for a step of the trial that the driver refused.
func (d Device) failed(c Check, r driver.Result) Finding {
	step := map[Check]string{
		CheckCreate: "memory with a fabric handle cannot be created",
		CheckExport: "a fabric handle cannot be exported",
		CheckImport: "a fabric handle of this process cannot be imported",
	}[c]
	severity, remedy := Problem, remedies[r]
	if r == driver.OutOfMemory {
		severity = Note // it says nothing about the fabric
	}
	return d.found(c, severity, remedy, "%s: %v", step, r)
}

var remedies = map[driver.Result]string{
	driver.OutOfMemory:    "free some of the device's memory and try again",
	driver.NotPermitted:   "open one channel to this process, the same one to all that share memory",
	driver.NotSupported:   "share by descriptors; fabric handles need a GPU and a driver that have them, and a kernel module with channels",
	driver.InvalidHandle:  "look at nvidia-imex (nvidia-imex-ctl -N) and restart it; after an unclean stop a reboot may be needed",
	driver.InvalidDevice:  "make all GPUs of this host that take part visible to the process (CUDA_VISIBLE_DEVICES, the container's devices)",
	driver.IllegalState:   "look whether nvidia-fabricmanager and nvidia-imex run, and at their logs",
	driver.SystemNotReady: "wait for the fabric manager and try again",
	driver.OperatingSystem: "a system call of the driver failed: compare the open files with the limit (ulimit -n), " +
		"and look at the logs of nvidia-imex and of the kernel",
}

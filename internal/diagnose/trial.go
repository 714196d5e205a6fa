package diagnose

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

var errTrialDone = errors.New("the trial's memory is to be given back")

// trial makes a granule with a fabric handle, exports it, and imports it into
// this process. What it made is given back.
func trial(sys *core.System, id driver.Device, d Device) (all []Finding) {
	prop := driver.AllocationProp{
		Type: driver.AllocationPinned, Location: driver.Location{Type: driver.LocationDevice, ID: int32(id)},
		RequestedHandleTypes: driver.HandleFabric,
	}
	size, r := sys.Granularity(prop, driver.GranularityMinimum)
	if r != driver.Success {
		return []Finding{d.failed(CheckCreate, r)}
	}
	h, r := phys.Create(sys, size, prop)
	if r != driver.Success {
		return []Finding{d.failed(CheckCreate, r)}
	}
	give := func(h *phys.Handle) {
		if err := phys.Abandon("a trial of fabric handles", errTrialDone, h); !errors.Is(errTrialDone, err) {
			all = append(all, d.found(CheckCreate, Warning, "call System.Drain, which tries again", "%v", err))
		}
	}
	defer give(h)
	all = append(all, d.found(CheckCreate, OK, "", "memory with a fabric handle was created"))
	handle, r := sys.Drv.MemExportToShareableHandle(h.Driver, driver.HandleFabric)
	if sys.Note(r, id) != driver.Success {
		return append(all, d.failed(CheckExport, r))
	}
	all = append(all, d.found(CheckExport, OK, "", "it was exported"))
	imported, r := sys.Drv.MemImportFromShareableHandle(handle, driver.HandleFabric)
	if sys.Note(r, id) != driver.Success {
		return append(all, d.failed(CheckImport, r))
	}
	defer give(phys.New(sys, imported, size, prop))
	return append(all, d.found(CheckImport, OK, "", "it was imported"))
}

// failed is a step of the trial that the driver refused.
func (d Device) failed(c Check, r driver.Result) Finding {
	step := map[Check]string{
		CheckCreate: "memory with a fabric handle cannot be created",
		CheckExport: "a fabric handle cannot be exported",
		CheckImport: "a fabric handle of this process cannot be imported",
	}[c]
	severity, remedy := Problem, remedies[r]
	if r == driver.OutOfMemory {
		severity = Note // it tells nothing of the fabric
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

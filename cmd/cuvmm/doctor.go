package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/vmm"
)

const doctorUsage = `usage: cuvmm doctor [flags]

Checks the machine, opens the driver, and tries on each device what the library
does: it creates, maps, writes and reads a little memory, exports and imports it,
and undoes all of that. Each finding says what was seen, what it means and what to
do. The exit code is 1 if there is a problem. On the software driver the findings
marked "simulated" describe its machine, not this one.

Flags:
`

func doctor(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	asJSON := f.Bool("json", false, "print the findings as JSON")
	fix := f.Bool("fix", false, "print commands that carry the remedies out; they are not run")
	bundle := f.String("report", "", "write all that is found to this file, for a bug report: read it before you send it")
	driver := driverFlag(f)
	return func(_ []string, out io.Writer, h host) (int, error) {
		if err := cmp.Or(checkChoice(*driver), exclusive(f, "json", "fix", "report")); err != nil {
			return exitUsage, err
		}
		h.progress.step("looking at the machine")
		before := machineFindings(h)
		tried := driverFindings(h, *driver)
		all := slices.Concat(afterDriver(h, before, tried), tried, suspended(h))
		h.progress.end()
		var err error
		switch {
		case *bundle != "":
			text := report(all, h, *driver) // takes seconds: an interrupt leaves no file
			err = toFile(*bundle, func(w io.Writer) error { _, err := io.WriteString(w, text); return err })
		case *asJSON:
			err = writeJSON(out, struct {
				Worst    severity  `json:"worst"`
				Findings []finding `json:"findings"`
			}{worst(all), all})
		case *fix:
			writeCommands(out, all)
		default:
			writeFindings(out, all)
		}
		if err != nil {
			return exitFailed, err
		}
		if worst(all) == problem {
			return exitProblem, nil
		}
		return exitOK, nil
	}
}

func writeJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// afterDriver corrects the findings about device files if the driver works: as root it
// makes those that are missing.
func afterDriver(h host, before, tried []finding) (all []finding) {
	works := func(f finding) bool { return f.Check == "driver" && f.Severity == fine }
	if !slices.ContainsFunc(tried, works) || worst(deviceFiles(h)) != fine {
		return before
	}
	for _, f := range before {
		if f.Check == "device files" && f.Severity != fine {
			f.Severity, f.Seen = note, f.Seen+", until the driver made it"
			f.Means = "processes that may not make device files see no GPU until another has made them"
		}
		all = append(all, f)
	}
	return all
}

// driverFindings opens the driver and tries each device.
func driverFindings(h host, choice string) []finding {
	h.progress.step("opening the driver")
	sys, err := h.open(choice)
	if err != nil {
		return append(library(h), cannotOpen(h, err))
	}
	all := library(h)
	d := sys.Driver()
	if d.Software {
		all = append(all, finding{Check: "driver", Severity: note, Device: machine, Seen: d.String(),
			Means:  "programs run and can be tested, but nothing is computed on a GPU; the simulated findings below describe the software driver's machine, not this one",
			Remedy: "the findings above say why the real driver is not in use"})
	} else {
		all = append(all, ok("driver", "%s", d))
	}
	settings, _ := h.env(sim.MachineEnv)
	shared := h.child != nil && (!d.Software || strings.Contains(settings, "Folder"))
	for _, f := range trials(sys.Devices(), h, choice, shared) {
		f.Simulated = d.Software
		all = append(all, f)
	}
	if err := sys.Close(); err != nil {
		all = append(all, finding{Check: "driver", Severity: warning, Device: machine, Seen: "closing it failed: " + err.Error(), Means: "what a trial created stays until this process ends"})
	}
	return all
}

// cannotOpen returns the finding for a driver that does not open. If the error names a
// setting, the finding is about that setting.
func cannotOpen(h host, err error) finding {
	for _, name := range []string{auto.DriverEnv, sim.MachineEnv, sim.FaultsEnv, cuda.LibraryEnv} {
		if value, _ := h.env(name); value != "" && strings.Contains(err.Error(), "environment variable "+name) {
			return finding{Check: "settings", Severity: problem, Device: machine, Seen: name + " keeps the driver from opening: " + err.Error(),
				Means:  "programs that open the driver with this setting fail, whether the machine has a GPU or not",
				Remedy: "correct " + name + " or unset it", Commands: []string{"unset " + name}}
		}
	}
	f := finding{Check: "driver", Severity: problem, Device: machine, Seen: "it cannot be opened: " + err.Error(),
		Means: "no program can use a GPU from here", Remedy: "follow the error; the findings above may name the cause"}
	var failed *cuda.Error
	if errors.As(err, &failed) {
		switch failed.Code {
		case 100:
			if list, set := h.env("CUDA_VISIBLE_DEVICES"); set {
				f.Remedy = fmt.Sprintf("CUDA_VISIBLE_DEVICES is %q: unset it, or name GPUs that nvidia-smi -L lists", list)
				f.Commands = []string{"unset CUDA_VISIBLE_DEVICES"}
			}
		case 802:
			f.Remedy = "start the fabric manager, which GPUs behind an NVSwitch need, of the driver's release"
			f.Commands = []string{"systemctl start nvidia-fabricmanager"}
		case 999:
			f.Means += "; most often nvidia-uvm is not loaded, its device file is missing or forbidden, or the kernel module is in a bad state"
			f.Remedy = "load nvidia-uvm and make its file; if that changes nothing, the kernel's log has the module's complaints (NVRM, Xid)"
			f.Commands = []string{"modprobe nvidia-uvm", "nvidia-modprobe -c 0 -u", "dmesg | grep -E 'NVRM|Xid'"}
		}
	}
	return f
}

// trials returns the findings about the devices. shared reports whether a child process
// sees the same devices.
func trials(devices []*cuda.Device, h host, driver string, shared bool) (all []finding) {
	if len(devices) == 0 {
		return []finding{{Check: "devices", Severity: problem, Device: machine, Seen: "the driver has no device",
			Means: "nothing can run", Remedy: "check CUDA_VISIBLE_DEVICES and what nvidia-smi lists"}}
	}
	for _, dev := range devices {
		h.progress.step("trying device %d of %d", dev.Ordinal()+1, len(devices))
		for _, f := range deviceFindings(dev) {
			all = append(all, f.on(dev.Ordinal()))
		}
		if p, err := dev.Probe(); shared && err == nil && p.PosixFD {
			h.progress.step("sharing memory of device %d with a child process", dev.Ordinal())
			for _, f := range shareWithChild(dev, h, driver) {
				all = append(all, f.on(dev.Ordinal()))
			}
		}
	}
	h.progress.step("trying what the devices share")
	all = append(all, peerFindings(devices, h)...)
	return append(all, fabricFindings(devices)...)
}

func deviceFindings(d *cuda.Device) []finding {
	c, err := d.Capabilities()
	if err != nil {
		return []finding{{Check: "capabilities", Severity: problem, Seen: err.Error(), Means: "the device cannot be used"}}
	}
	all := []finding{ok("device", "%s, compute capability %d.%d, %s", d.Name(), c.ComputeMajor, c.ComputeMinor, size(d.TotalMemory()))}
	if strings.Contains(d.Name(), "MIG") {
		all = append(all, finding{Check: "MIG", Severity: note, Seen: "it is a part of a GPU", Means: "access between devices and fabric handles are not available"})
	}
	if !c.VirtualMemory {
		return append(all, finding{Check: "virtual memory", Severity: problem, Seen: "the device has no virtual memory management",
			Means: "this library cannot use it (error 801)", Remedy: "use a GPU and a driver that have it"})
	}
	all = append(all, try(d), tryReserve(d))
	p, err := d.Probe()
	if err != nil {
		return append(all, finding{Check: "trial", Severity: problem, Seen: err.Error(), Means: "memory cannot be created", Remedy: "see nvidia-smi for what uses the device's memory"})
	}
	has := func(check string, works bool, seen, missing, means string) {
		if works {
			all = append(all, ok(check, "%s", seen))
			return
		}
		all = append(all, finding{Check: check, Severity: note, Seen: missing, Means: means})
	}
	has("sharing by descriptor", p.PosixFD, "memory was created, exported and imported", "memory could not be exported and imported", "processes cannot share memory by descriptor: they need fabric handles instead")
	has("compression", p.Compressible, "granted", "not granted", "requests for compressible memory get plain memory")
	has("RDMA", c.RDMA, "memory can be made reachable for network cards", "the device has no RDMA-capable virtual memory", "network cards cannot reach the library's memory; transports stage copies")
	has("DMA-BUF", c.DMABuf, "descriptors can be made", "there are none", "network cards need the nvidia-peermem module to reach memory")
	has("multicast", c.Multicast, "the device has multicast objects (not tried)", "the device has none", "package multicast does not work with it")
	has("managed memory", c.ConcurrentManagedAccess, "CPU and GPU may touch it at once", "the CPU must not touch it while the GPU works", "managed memory lies on the GPU, and is neither advised nor prefetched")
	has("host memory", c.HostVirtualMemory || c.HostNUMAVirtualMemory, "host memory can be mapped like the device's", "host memory cannot be created by virtual memory calls", "buffers in host memory are refused")
	if c.HostNUMANode < 0 {
		all = append(all, finding{Check: "NUMA", Severity: note, Seen: "the driver knows no NUMA node close to the device", Means: "host memory is placed without regard to the device"})
	}
	return all
}

// try creates, maps and uses one granule of memory, as every program does.
func try(d *cuda.Device) finding {
	failed := func(err error) finding {
		return finding{Check: "virtual memory", Severity: problem, Seen: "a trial failed: " + err.Error(), Means: "this library cannot use the device", Remedy: "the error says what to do; error 2 is a lack of memory or addresses, 801 a missing feature"}
	}
	granule, err := vmm.GranularityOf(d, vmm.Properties{})
	if err != nil {
		return failed(err)
	}
	if err := roundTrip(d, granule); err != nil {
		return failed(err)
	}
	return ok("virtual memory", "memory was created, mapped, written and read; granularity %s", size(int(granule)))
}

// tryReserve reserves as much address space as a growable array does.
func tryReserve(d *cuda.Device) finding {
	const check = "address space"
	granule, err := vmm.GranularityOf(d, vmm.Properties{})
	bytes := d.TotalMemory()
	if err == nil {
		bytes -= bytes % granule
		var r *vmm.Reservation
		if r, err = vmm.Reserve(d, bytes, vmm.ReserveOptions{}); err == nil {
			err = r.Close()
		}
	}
	if err != nil {
		return finding{Check: check, Severity: problem, Seen: fmt.Sprintf("%s, as much as the device has, cannot be reserved: %v", size(bytes), err),
			Means:  "arrays and pools with default options cannot be made",
			Remedy: "lift the limit on address space (ulimit -v), or reserve less (vmm.BufferOptions.Reserve)"}
	}
	return ok(check, "%s, as much as the device has, can be reserved", size(bytes))
}

// roundTrip writes to mapped memory and reads it back.
func roundTrip(d *cuda.Device, granule int) (err error) {
	memory, err := vmm.Create(d, granule, vmm.Properties{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	r, err := vmm.Reserve(d, granule, vmm.ReserveOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	m, err := r.Map(0, memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err := m.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}); err != nil {
		return err
	}
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	const want = "cuvmm doctor"
	if err := s.Upload(m.Ptr(), []byte(want)); err != nil {
		return err
	}
	got := make([]byte, len(want))
	if err := s.Download(got, m.Ptr()); err != nil {
		return err
	}
	if string(got) != want {
		return fmt.Errorf("wrote %q and read %q", want, got)
	}
	return nil
}

// peerFindings reports pairs of devices without access to each other, with the likely
// reasons, and pairs whose access over PCIe is diverted.
func peerFindings(devices []*cuda.Device, h host) (all []finding) {
	for _, a := range devices {
		for _, b := range devices {
			if a == b {
				continue
			}
			can, err := a.CanAccess(b)
			switch {
			case err != nil:
				all = append(all, finding{Check: "peers", Severity: warning, Device: a.Ordinal(), Seen: fmt.Sprintf("access to device %d: %v", b.Ordinal(), err), Means: "memory cannot be granted between them"})
			case !can:
				all = append(all, finding{Check: "peers", Severity: warning, Device: a.Ordinal(), Seen: fmt.Sprintf("it cannot access device %d", b.Ordinal()),
					Means: "memory cannot be granted between them, and copies go through the host", Remedy: whyNoPeers(h, a, b)})
			case a.Ordinal() < b.Ordinal():
				if diverted := betweenDevices(h, a, b); len(diverted) > 0 {
					all = append(all, finding{Check: "peers", Severity: note, Device: a.Ordinal(), Seen: fmt.Sprintf("over PCIe to device %d: %s", b.Ordinal(), strings.Join(diverted, ", ")),
						Means:  "unless NVLink connects the two, accesses are slow, or are lost without an error; drivers for CUDA 13.5 and later refuse such access",
						Remedy: straighten})
				}
			}
		}
	}
	if len(devices) > 1 && len(all) == 0 {
		all = append(all, ok("peers", "each of the %d devices can access the others", len(devices)))
	}
	return all
}

// straighten is the remedy for accesses over PCIe that IOMMU or ACS divert.
const straighten = "boot with iommu=pt, and turn access control services (ACS) off on the PCIe switches between the GPUs, unless this is a virtual machine"

// whyNoPeers returns the likely reason why one device cannot access another, and the
// remedy.
func whyNoPeers(h host, a, b *cuda.Device) string {
	reasons := "see nvidia-smi topo -p2p r; devices on different sockets without NVLink, and some consumer GPUs, have no access"
	switch {
	case strings.Contains(a.Name()+b.Name(), "MIG"):
		reasons = "parts of GPUs (MIG) have no access to others: use whole GPUs (nvidia-smi -mig 0)"
	case confidential(h):
		reasons = "with confidential computing GPUs have access only in a protected group of NVLink GPUs: see nvidia-smi conf-compute -mgm"
	default:
		if diverted := betweenDevices(h, a, b); len(diverted) > 0 {
			return strings.Join(diverted, ", ") + "; drivers for CUDA 13.5 and later give no access over PCIe then: " + straighten
		}
		if len(h.names("sys/class/iommu")) > 0 {
			reasons += "; the IOMMU is on: " + straighten
		}
	}
	return reasons
}

// confidential reports whether the GPUs work in the mode for confidential computing.
func confidential(h host) bool {
	text, err := h.probe("nvidia-smi", "conf-compute", "-f")
	return err == nil && strings.Contains(strings.ToUpper(text), "CC STATUS: ON")
}

// fabricFindings returns the findings of package fabric.
func fabricFindings(devices []*cuda.Device) (all []finding) {
	d, err := fabric.Diagnose(fabric.Options{Trial: true}, devices...)
	if err != nil {
		return []finding{{Check: "fabric", Severity: warning, Device: machine, Seen: err.Error(), Means: "whether fabric handles work is not known"}}
	}
	for _, f := range d.Findings {
		all = append(all, ofFabric(f))
	}
	return all
}

// ofFabric makes a problem of the fabric a note, because most machines have no fabric.
func ofFabric(f fabric.Finding) finding {
	to := finding{Check: "fabric, " + f.Check, Severity: fine, Device: f.Device, Seen: f.Text, Remedy: f.Remedy, Commands: f.Commands}
	switch f.Severity {
	case fabric.Problem:
		to.Severity, to.Means = note, "fabric handles do not work; sharing on one host by descriptor is not affected"
	case fabric.Warning:
		to.Severity = warning
	case fabric.Note:
		to.Severity = note
	}
	return to
}

package main

import (
	"fmt"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/internal/limits"
)

// machineFindings returns the findings that need no driver.
func machineFindings(h host) []finding {
	var all []finding
	for _, check := range []func(host) []finding{kernelModule, deviceFiles, confidentialMode, openFiles, addressSpace, memoryLimit, deviceMemoryLimit, sandbox, surroundings, settings} {
		all = append(all, check(h)...)
	}
	return all
}

var moduleVersion = regexp.MustCompile(`Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)`)

// loadedVersion returns the release of the kernel module, or "" if none is loaded.
func loadedVersion(h host) string {
	if m := moduleVersion.FindStringSubmatch(h.text("proc/driver/nvidia/version")); m != nil {
		return m[1]
	}
	return ""
}

func kernelModule(h host) []finding {
	if v := loadedVersion(h); v != "" {
		return []finding{ok("kernel module", "nvidia, release %s", v)}
	}
	if strings.Contains(strings.ToLower(h.text("proc/version")), "microsoft") {
		return []finding{ok("kernel module", "none, as under WSL: the driver of Windows is used")}
	}
	return []finding{{Check: "kernel module", Severity: warning, Device: machine,
		Seen:     "/proc/driver/nvidia/version is missing: the nvidia kernel module is not loaded, or /proc hides it",
		Means:    "without the module no GPU works, and programs run on the software driver if no driver is installed",
		Remedy:   "load it if this machine has an NVIDIA GPU; in a container, start it with the NVIDIA runtime",
		Commands: []string{"modprobe nvidia", "modprobe nvidia-uvm"}}}
}

var libraryFile = regexp.MustCompile(`/\S*libcuda\.so\.(\d+\.\d+(?:\.\d+)?)`)

// library compares the driver's library, once it is loaded, with the kernel module.
func library(h host) []finding {
	m := libraryFile.FindStringSubmatch(h.text("proc/self/maps"))
	if m == nil {
		return nil
	}
	loaded := loadedVersion(h)
	switch {
	case strings.Contains(m[0], "/compat/"):
		return []finding{{Check: "library", Severity: note, Device: machine,
			Seen:  fmt.Sprintf("%s, of a compatibility package; the kernel module has release %s", m[0], loaded),
			Means: "a newer CUDA runs on an older kernel module, which data-centre GPUs alone support",
		}}
	case loaded != "" && m[1] != loaded:
		return []finding{{Check: "library", Severity: problem, Device: machine,
			Seen:   fmt.Sprintf("%s has release %s, the kernel module %s", m[0], m[1], loaded),
			Means:  "the driver refuses to start (error 803), or fails in ways that are hard to explain",
			Remedy: "use library and kernel module of the same release: restart the host after an update of the driver, and give containers the host's library",
		}}
	}
	return []finding{ok("library", "%s", m[0])}
}

func deviceFiles(h host) []finding {
	var present []string
	var all []finding
	for _, name := range h.names("dev") {
		gpu, isGPU := strings.CutPrefix(name, "nvidia")
		if _, err := strconv.Atoi(gpu); name != "nvidiactl" && name != "nvidia-uvm" && (!isGPU || err != nil) {
			continue
		}
		present = append(present, name)
		if err := h.access(h.path("dev/" + name)); err != nil {
			severity, means := problem, "the driver cannot be opened (error 100, 101 or 999)"
			if isGPU && name != "nvidiactl" && name != "nvidia-uvm" {
				severity, means = warning, "this process does not see that GPU"
			}
			all = append(all, finding{Check: "device files", Severity: severity, Device: machine, Seen: fmt.Sprintf("/dev/%s cannot be read and written: %v", name, err),
				Means: means, Remedy: "let the user of this process read and write the file; in a container, pass the device and allow it in the control group"})
		}
	}
	missing := func(name string) bool { return !slices.Contains(present, name) }
	switch {
	case len(present) == 0 && h.exists("dev/dxg"):
		return []finding{ok("device files", "/dev/dxg, as under WSL")}
	case len(present) == 0:
		return []finding{{Check: "device files", Severity: warning, Device: machine, Seen: "/dev has no NVIDIA device", Means: "no GPU can be used from here",
			Remedy: "in a container, pass the GPUs; on a host, load the kernel module, or let nvidia-modprobe make the files", Commands: []string{"nvidia-modprobe -c 0 -u"}}}
	case missing("nvidia-uvm"):
		all = append(all, finding{Check: "device files", Severity: problem, Device: machine, Seen: "/dev/nvidia-uvm is missing",
			Means: "CUDA does not start (error 999)", Remedy: "load nvidia-uvm and make its file; in a container, pass it", Commands: []string{"nvidia-modprobe -c 0 -u"}})
	case missing("nvidiactl"):
		all = append(all, finding{Check: "device files", Severity: problem, Device: machine, Seen: "/dev/nvidiactl is missing",
			Means: "CUDA does not start (error 100)", Remedy: "make the file; in a container, pass it", Commands: []string{"nvidia-modprobe -c 0 -u"}})
	}
	if len(all) == 0 {
		all = append(all, ok("device files", "%s", strings.Join(present, ", ")))
	}
	return all
}

// confidentialMode reports GPUs and virtual machines with encrypted memory.
func confidentialMode(h host) []finding {
	if confidential(h) {
		return []finding{{Check: "confidential computing", Severity: note, Device: machine, Seen: "nvidia-smi conf-compute says that it is on",
			Means: "copies pass through encrypted buffers and are slower; access between GPUs, RDMA and sharing over a fabric are limited; what the trials below say holds"}}
	}
	for _, guest := range []string{"dev/tdx_guest", "dev/sev-guest"} {
		if h.exists(guest) {
			return []finding{{Check: "confidential computing", Severity: note, Device: machine, Seen: "/" + guest + ": this is a virtual machine with encrypted memory",
				Means: "GPUs work in it only in their confidential mode or with shared, unprotected memory for copies, which is slower"}}
		}
	}
	return nil
}

// openFiles checks the limit of open files after Go's runtime has raised the soft limit
// to the hard one.
func openFiles(h host) []finding {
	const enough = 4096
	n, err := h.limit(openedFiles)
	if err != nil || n >= enough {
		return []finding{ok("open files", "up to %s", count(n))}
	}
	return []finding{{Check: "open files", Severity: warning, Device: machine, Seen: fmt.Sprintf("at most %d", n),
		Means:  "memory that is shared by descriptor takes one for each chunk: a server of large buffers runs out",
		Remedy: "raise the hard limit (limits.conf; LimitNOFILE of a service; --ulimit of a container)"}}
}

func count(n uint64) string {
	if n >= math.MaxInt64 {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10)
}

func addressSpace(h host) []finding {
	n, err := h.limit(addresses)
	if err != nil || n >= math.MaxInt64 {
		return []finding{ok("address space", "not limited")}
	}
	return []finding{{Check: "address space", Severity: warning, Device: machine, Seen: fmt.Sprintf("limited to %s (ulimit -v)", size(int(n))),
		Means:  "the driver and every growable array reserve many more addresses than they have memory: either may fail (error 2), as the trials below show",
		Remedy: "lift the limit; limit memory by control groups instead", Commands: []string{"ulimit -v unlimited"}}}
}

// memoryLimit returns the lowest limit on host memory of the control groups that the
// process is in, as far as they are visible: a container sees its own as the root.
func memoryLimit(h host) (all []finding) {
	limited, err := limits.ReadHost(os.DirFS(h.root))
	if err != nil {
		all = append(all, finding{Check: "host memory", Severity: note, Device: machine, Seen: err.Error(),
			Means: "it is not known how much memory this process may pin"})
	}
	limited = slices.DeleteFunc(limited, func(l limits.Limit) bool { return l.Group == "" })
	l, found := limited.Lowest()
	if !found && err == nil {
		return []finding{ok("host memory", "no limit of a control group is seen")}
	}
	if found {
		all = append(all, finding{Check: "host memory", Severity: note, Device: machine, Seen: fmt.Sprintf("the control group %s allows %s", l.Group, size(int(l.Bytes))),
			Means:  "pinned memory and managed memory on the host count towards it; at it the kernel slows the process down (memory.high) or ends it",
			Remedy: "raise the limit if the program pins more (memory.max; --memory of a container; MemoryMax of a service)"})
	}
	return all
}

// deviceMemoryLimit returns the limits on device memory of the control groups that the process
// is in, by the kernel's names of the memory. Most machines have none.
func deviceMemoryLimit(h host) (all []finding) {
	limited, err := limits.ReadDevices(os.DirFS(h.root))
	if err != nil {
		all = append(all, finding{Check: "device memory", Severity: note, Device: machine, Seen: err.Error(),
			Means: "it is not known how much device memory this process may take"})
	}
	for _, region := range slices.Sorted(maps.Keys(limited)) {
		l := limited[region]
		all = append(all, finding{Check: "device memory", Severity: note, Device: machine,
			Seen:   fmt.Sprintf("the control group %s allows %s of %s", l.Group, size(int(l.Bytes)), region),
			Means:  "memory beyond the limit is refused, even if the device has it",
			Remedy: "raise the limit if the program needs more (dmem.max), or have a cuda.Budget keep below it"})
	}
	return all
}

func sandbox(h host) (all []finding) {
	if h.field("proc/self/status", "Seccomp") == "2" {
		all = append(all, finding{Check: "seccomp", Severity: note, Device: machine, Seen: "system calls are filtered",
			Means: "libraries that fetch descriptors from another process (pidfd_getfd, as PyTorch's expandable segments do) may be refused; this library sends them over sockets, which filters allow"})
	}
	if scope, err := strconv.Atoi(h.text("proc/sys/kernel/yama/ptrace_scope")); err == nil && scope > 0 {
		all = append(all, finding{Check: "ptrace", Severity: note, Device: machine, Seen: fmt.Sprintf("/proc/sys/kernel/yama/ptrace_scope is %d", scope),
			Means: "one process cannot fetch another's descriptors by pid unless it is its parent; this library sends them over sockets instead"})
	}
	return all
}

func surroundings(h host) (all []finding) {
	if strings.Contains(strings.ToLower(h.text("proc/version")), "microsoft") {
		all = append(all, finding{Check: "WSL", Severity: warning, Device: machine, Seen: "this is WSL",
			Means: "sharing by descriptor may be missing (the trial says), and managed memory does not migrate on demand"})
	}
	pipe, set := h.env("CUDA_MPS_PIPE_DIRECTORY")
	if !set {
		pipe = "/tmp/nvidia-mps"
	}
	if h.exists(pipe + "/control") {
		all = append(all, finding{Check: "MPS", Severity: note, Device: machine, Seen: "a control daemon of MPS has its pipes in " + pipe,
			Means: "processes share one context on the GPU: limits of the daemon apply, and a fault of one client can end the others"})
	}
	if len(h.names("sys/class/iommu")) > 0 {
		all = append(all, finding{Check: "IOMMU", Severity: note, Device: machine, Seen: "an IOMMU is on",
			Means: "copies and access between GPUs over PCIe may be slow or fail unless access control services (ACS) are off on the switches between them; NVLink is not affected"})
	}
	return all
}

// settings reports environment variables with surprising effects.
func settings(h host) (all []finding) {
	add := func(name string, s severity, means, remedy string, when func(value string) bool) {
		value, set := h.env(name)
		if set && when(value) {
			all = append(all, finding{Check: "settings", Severity: s, Device: machine, Seen: fmt.Sprintf("%s=%s", name, value), Means: means, Remedy: remedy, Commands: []string{"unset " + name}})
		}
	}
	is := func(want ...string) func(string) bool {
		return func(value string) bool { return slices.Contains(want, strings.ToLower(value)) }
	}
	add("CUDA_VISIBLE_DEVICES", problem, "programs see no GPU (error 100)", "unset it, or name the GPUs", is("", "-1", "none", "nodevfiles"))
	add("CUDA_LAUNCH_BLOCKING", warning, "every launch waits for the GPU: nothing overlaps, and measurements say nothing", "unset it outside of debugging", is("1"))
	add(auto.DriverEnv, warning, "programs that choose their driver by cuda/auto run on the software driver", "unset it to use the GPU", is("sim"))
	add(cuda.LibraryEnv, note, "this library is opened as the driver instead of libcuda.so.1", "", func(v string) bool { return v != "" })
	add(uncheckedPeers, warning, "drivers for CUDA 13.5 and later give devices access over PCIe even if IOMMU or ACS divert it: writes may be lost without an error", "unset it, unless such accesses were tested on this machine", is("1"))
	add("NCCL_CUMEM_ENABLE", note, "NCCL does not use virtual memory for its own buffers", "", is("0"))
	for _, name := range []string{"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} {
		add(name, note, "an allocator that is plugged into PyTorch replaces its own, so these settings have no effect", "", func(v string) bool { return v != "" })
	}
	return all
}

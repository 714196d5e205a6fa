package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

// asChild names the environment variable that makes the test binary the program. It is
// "1", [filtered], or the folder that the program takes for the root of the machine.
const asChild = "CUVMM_TEST_AS_CHILD"

// filtered: the program filters its own system calls before it runs.
const filtered = "filtered"

func TestMain(m *testing.M) {
	switch root := os.Getenv(asChild); root {
	case "":
	case filtered:
		filterSystemCalls()
		main()
	case "1":
		main()
	default:
		h := thisHost()
		h.root = root
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, h))
	}
	os.Exit(m.Run())
}

// files has the contents of a machine's files by path.
type files map[string]string

// healthy returns a machine without findings.
func healthy() files {
	return files{
		"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13",
		"proc/version":               "Linux version 6.8.0",
		"proc/self/status":           "Name:\tx\nSeccomp:\t0\n",
		"proc/self/maps":             "7f00 r-xp /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04\n",
		"dev/nvidiactl":              "", "dev/nvidia-uvm": "", "dev/nvidia0": "", "dev/nvidia-modeset": "",
	}
}

func (f files) with(path, text string) files {
	f[path] = text
	return f
}

func (f files) without(paths ...string) files {
	for _, p := range paths {
		delete(f, p)
	}
	return f
}

// show returns a host with these files and a software machine.
func show(t *testing.T, f files, o ...sim.Options) host {
	t.Helper()
	root := t.TempDir()
	for name, text := range f {
		name = filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o700))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	return host{
		root:    root,
		env:     none,
		limit:   func(resource) (uint64, error) { return math.MaxUint64, nil },
		access:  func(string) error { return nil },
		environ: func() []string { return nil },
		open: func(string) (*cuda.System, error) {
			m, err := sim.New(append(o, sim.Options{})[0])
			if err != nil {
				return nil, err
			}
			return m.OpenOwned(cuda.Options{})
		},
	}
}

func none(string) (string, bool) { return "", false }

func named(value string) func(string) (string, bool) {
	name, value, _ := strings.Cut(value, "=")
	return func(asked string) (string, bool) { return value, asked == name }
}

// A driver that runs as root makes the device files that are missing.
func TestDeviceFilesThatTheDriverMakes(t *testing.T) {
	works := []finding{ok("driver", "CUDA 13.0")}
	before := deviceFiles(show(t, healthy().without("dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia0")))
	after := afterDriver(show(t, healthy()), before, works)
	require.Len(t, after, 1)
	require.Equal(t, note, after[0].Severity)
	require.Contains(t, after[0].Seen, "/dev has no NVIDIA device, until the driver made it")
	require.Equal(t, before, afterDriver(show(t, healthy()), before, []finding{{Check: "driver", Severity: note}}), "the software driver makes none")
	broken := show(t, healthy().without("dev/nvidia-uvm"))
	require.Equal(t, deviceFiles(broken), afterDriver(broken, deviceFiles(broken), works))
}

// TestMachineFindings produces each finding from files of a machine.
func TestMachineFindings(t *testing.T) {
	limited := func(of resource, n uint64) func(*host) {
		return func(h *host) {
			h.limit = func(asked resource) (uint64, error) {
				if asked == of {
					return n, nil
				}
				return math.MaxUint64, nil
			}
		}
	}
	refused := func(name string) func(*host) {
		return func(h *host) {
			h.access = func(path string) error {
				if strings.HasSuffix(path, name) {
					return os.ErrPermission
				}
				return nil
			}
		}
	}
	set := func(value string) func(*host) { return func(h *host) { h.env = named(value) } }
	for _, c := range []struct {
		name     string
		files    files
		change   func(*host)
		severity severity
		want     string // in what was seen and what it means
	}{
		{"no module", healthy().without("proc/driver/nvidia/version"), nil, warning, "the nvidia kernel module is not loaded"},
		{"another release", healthy().with("proc/driver/nvidia/version", "Kernel Module  570.10"), nil, problem, "libcuda.so.580.159.04 has release 580.159.04, the kernel module 570.10"},
		{"compatibility package", healthy().with("proc/self/maps", "7f r /usr/local/cuda/compat/libcuda.so.590.1\n"), nil, note, "of a compatibility package; the kernel module has release 580.159.04"},
		{"no device files", healthy().without("dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia0"), nil, warning, "/dev has no NVIDIA device"},
		{"no nvidia-uvm", healthy().without("dev/nvidia-uvm"), nil, problem, "CUDA does not start (error 999)"},
		{"no nvidiactl", healthy().without("dev/nvidiactl"), nil, problem, "CUDA does not start (error 100)"},
		{"a control file without permission", healthy(), refused("nvidiactl"), problem, "/dev/nvidiactl cannot be read and written: permission denied"},
		{"a GPU without permission", healthy(), refused("nvidia0"), warning, "this process does not see that GPU"},
		{"few open files", healthy(), limited(openedFiles, 1024), warning, "at most 1024"},
		{"little address space", healthy(), limited(addresses, 8<<30), warning, "limited to 8 GiB (ulimit -v)"},
		{"control group", healthy().with("sys/fs/cgroup/memory.max", "2147483648\n"), nil, note, "the control group / allows 2 GiB"},
		{"control group, version 1", healthy().with("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824"), nil, note, "the control group / allows 1 GiB"},
		{"a group above", healthy().with("proc/self/cgroup", "0::/user.slice/app").with("sys/fs/cgroup/user.slice/memory.max", "1073741824").with("sys/fs/cgroup/user.slice/app/memory.max", "max"), nil, note, "the control group /user.slice allows 1 GiB"},
		{"a group of version 1", healthy().with("proc/self/cgroup", "7:cpu:/x\n4:memory:/a/b\n0::/").with("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712").with("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "1048576"), nil, note, "the control group /a/b allows 1 MiB"},
		{"device memory", healthy().with("sys/fs/cgroup/dmem.max", "drm/0000:03:00.0/vram0 1073741824\nother max\n"), nil, note, "the control group / allows 1 GiB of drm/0000:03:00.0/vram0"},
		{"device memory that is no number", healthy().with("sys/fs/cgroup/dmem.max", "drm/x many"), nil, note, `/sys/fs/cgroup/dmem.max`},
		{"a limit that is no number", healthy().with("sys/fs/cgroup/memory.max", "many"), nil, note, `/sys/fs/cgroup/memory.max: "many" is neither a number of bytes nor max`},
		{"seccomp", healthy().with("proc/self/status", "Seccomp:\t2\n"), nil, note, "system calls are filtered"},
		{"ptrace", healthy().with("proc/sys/kernel/yama/ptrace_scope", "1\n"), nil, note, "ptrace_scope is 1"},
		{"WSL", healthy().without("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia0").with("proc/version", "Linux 5.15-Microsoft-standard").with("dev/dxg", ""), nil, warning, "this is WSL"},
		{"MPS", healthy().with("tmp/nvidia-mps/control", ""), nil, note, "a control daemon of MPS has its pipes in /tmp/nvidia-mps"},
		{"MPS elsewhere", healthy().with("run/mps/control", ""), set("CUDA_MPS_PIPE_DIRECTORY=/run/mps"), note, "pipes in /run/mps"},
		{"confidential GPUs", healthy(), func(h *host) { h.command = smi("CC status: ON\n", nil) }, note, "says that it is on"},
		{"a confidential guest", healthy().with("dev/tdx_guest", ""), nil, note, "a virtual machine with encrypted memory"},
		{"IOMMU", healthy().with("sys/class/iommu/dmar0", ""), nil, note, "an IOMMU is on"},
		{"no visible device", healthy(), set("CUDA_VISIBLE_DEVICES=-1"), problem, "CUDA_VISIBLE_DEVICES=-1 programs see no GPU (error 100)"},
		{"an empty list of devices", healthy(), set("CUDA_VISIBLE_DEVICES="), problem, "programs see no GPU"},
		{"unchecked peers", healthy(), set(uncheckedPeers + "=1"), warning, "writes may be lost without an error"},
		{"blocking launches", healthy(), set("CUDA_LAUNCH_BLOCKING=1"), warning, "every launch waits for the GPU"},
		{"the software driver chosen", healthy(), set("CUVMM_DRIVER=sim"), warning, "run on the software driver"},
		{"another library", healthy(), set("CUVMM_LIBCUDA=/opt/x.so"), note, "CUVMM_LIBCUDA=/opt/x.so"},
		{"NCCL", healthy(), set("NCCL_CUMEM_ENABLE=0"), note, "NCCL does not use virtual memory"},
		{"PyTorch", healthy(), set("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"), note, "these settings have no effect"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := show(t, c.files)
			if c.change != nil {
				c.change(&h)
			}
			var seen []finding
			for _, f := range append(machineFindings(h), library(h)...) {
				if f.Severity != fine {
					seen = append(seen, f)
				}
			}
			require.Len(t, seen, 1, "%v", seen)
			require.Equal(t, c.severity, seen[0].Severity)
			require.Contains(t, seen[0].Seen+" "+seen[0].Means, c.want)
			require.NotEmpty(t, seen[0].Means)
		})
	}
}

func TestHealthyMachine(t *testing.T) {
	all := append(machineFindings(show(t, healthy())), library(show(t, healthy()))...)
	require.Equal(t, fine, worst(all), "%v", all)
	require.Len(t, all, 6)
	require.Contains(t, all[0].Seen, "580.159.04")
	require.Equal(t, "nvidia-uvm, nvidia0, nvidiactl", all[1].Seen)
}

func device(attribute int, value int) sim.Options {
	return sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{attribute: value}}}}
}

func TestDeviceFindings(t *testing.T) {
	const virtualMemory, rdma, dmaBuf = 102, 110, 124
	far := sim.Options{Devices: []sim.DeviceOptions{{Unreachable: []int{1}}, {}}}
	for _, c := range []struct {
		name     string
		options  sim.Options
		check    string
		severity severity
		want     string
	}{
		{"all is well", sim.Options{}, "virtual memory", fine, "memory was created, mapped, written and read; granularity 2 MiB"},
		{"addresses", sim.Options{}, "address space", fine, "16 GiB, as much as the device has, can be reserved"},
		{"descriptors", sim.Options{}, "sharing by descriptor", fine, "exported and imported"},
		{"no descriptors", sim.WithoutDescriptors(), "sharing by descriptor", note, "could not be exported"},
		{"no virtual memory", device(virtualMemory, 0), "virtual memory", problem, "no virtual memory management"},
		{"no memory", sim.Options{Devices: []sim.DeviceOptions{{Memory: 1 << 20}}}, "virtual memory", problem, "a trial failed: "},
		{"no RDMA", device(rdma, 0), "RDMA", note, "no RDMA-capable"},
		{"no DMA-BUF", device(dmaBuf, 0), "DMA-BUF", note, "there are none"},
		{"multicast", sim.WithMulticast(1), "multicast", fine, "not tried"},
		{"no multicast", sim.Options{}, "multicast", note, "the device has none"},
		{"no concurrent access", sim.WithoutConcurrentManagedAccess(), "managed memory", note, "must not touch it"},
		{"a part of a GPU", sim.Options{Devices: []sim.DeviceOptions{{Name: "GPU MIG 1g.5gb"}}}, "MIG", note, "a part of a GPU"},
		{"peers", sim.Options{Devices: make([]sim.DeviceOptions, 3)}, "peers", fine, "each of the 3 devices"},
		{"no peers", far, "peers", warning, "it cannot access device 1"},
		{"no fabric channel", sim.Options{}, "fabric, create", note, "cannot be created"},
		{"software", sim.Options{}, "driver", note, "software driver, CUDA"},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := driverFindings(show(t, healthy(), c.options), "")
			for _, f := range all {
				if f.Check == c.check && f.Severity == c.severity && strings.Contains(f.Seen, c.want) {
					return
				}
			}
			t.Fatalf("no such finding in %+v", all)
		})
	}
}

// The remedy names the likely reason.
func TestWhyNoPeers(t *testing.T) {
	apart := func(name string) sim.Options {
		return sim.Options{Devices: []sim.DeviceOptions{{Name: name, Unreachable: []int{1}}, {Name: name}}}
	}
	for _, c := range []struct {
		name    string
		files   files
		options sim.Options
		smi     string
		want    string
	}{
		{"nothing to see", healthy(), apart("GPU"), "", "nvidia-smi topo -p2p r"},
		{"an IOMMU", healthy().with("sys/class/iommu/dmar0", ""), apart("GPU"), "", "access control services (ACS)"},
		{"parts of GPUs", healthy(), apart("GPU MIG 1g.5gb"), "", "nvidia-smi -mig 0"},
		{"confidential", healthy(), apart("GPU"), "CC status: ON", "protected group"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := show(t, c.files, c.options)
			h.command = smi(c.smi, nil)
			for _, f := range driverFindings(h, "") {
				if f.Check == "peers" {
					require.Contains(t, f.Remedy, c.want)
					return
				}
			}
			t.Fatal("no finding about peers")
		})
	}
}

// The child is this test binary, on the same software machine.
func TestSharingWithAChild(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("CUVMM_SIM", `{"Folder": "`+folder+`", "Devices": [{"ContextMemory": 552599552}]}`)
	t.Setenv("CUVMM_DRIVER", "sim")
	find := func(h host) (found []finding) {
		for _, f := range driverFindings(h, "") {
			if f.Check == "sharing with a process" || f.Check == "idle process" {
				found = append(found, f)
			}
		}
		return found
	}
	h := show(t, healthy())
	h.env, h.open = os.LookupEnv, thisHost().open
	h.child = func(_ string, args ...string) (*exec.Cmd, error) {
		c, err := thisProgram("sim", args...)
		c.Env = append(c.Env, asChild+"=1")
		return c, err
	}
	all := find(h)
	require.Len(t, all, 2, "%+v", all)
	require.Equal(t, fine, all[0].Severity)
	require.Equal(t, fine, all[1].Severity)
	require.Contains(t, all[1].Seen, "keeps about 527 MiB of the device's")

	// A child that sees another machine does not get the memory.
	h.child = func(_ string, args ...string) (*exec.Cmd, error) {
		c, err := thisProgram("sim", args...)
		c.Env = append(c.Env, asChild+"=1", `CUVMM_SIM={"Folder": "`+t.TempDir()+`"}`)
		return c, err
	}
	all = find(h)
	require.Len(t, all, 1)
	require.Equal(t, warning, all[0].Severity)
	require.Contains(t, all[0].Seen, "a child process could not import memory: ")

	h.child = func(string, ...string) (*exec.Cmd, error) { return nil, errors.New("no program") }
	require.Contains(t, find(h)[0].Seen, "no program")
	t.Setenv("CUVMM_SIM", "")
	require.Empty(t, find(h), "a machine without a folder is this process's alone")
}

func TestDoctor(t *testing.T) {
	var out, complaints bytes.Buffer
	require.Equal(t, exitUsage, run([]string{"doctor", "-fix", "-json"}, &out, &complaints, show(t, healthy())))
	require.Equal(t, "cuvmm: -fix and -json exclude each other: use one at a time\n", complaints.String())
	require.Empty(t, out.String())
	complaints.Reset()
	require.Equal(t, exitOK, run([]string{"doctor"}, &out, &complaints, show(t, healthy())))
	require.Contains(t, out.String(), "ok       kernel module: nvidia, release 580.159.04\n")
	require.Contains(t, out.String(), "0 warnings, 0 problems\n")
	require.Empty(t, complaints.String())

	h := show(t, healthy())
	h.env = named("CUDA_VISIBLE_DEVICES=-1")
	out.Reset()
	require.Equal(t, exitProblem, run([]string{"doctor", "-json"}, &out, &complaints, h))
	var got struct {
		Worst    severity
		Findings []finding
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &got))
	require.Equal(t, problem, got.Worst)
	require.NotEmpty(t, got.Findings)
	out.Reset()
	require.Equal(t, exitProblem, run([]string{"doctor", "-fix"}, &out, &complaints, h))
	require.Equal(t, "# settings: CUDA_VISIBLE_DEVICES=-1; programs see no GPU (error 100)\nunset CUDA_VISIBLE_DEVICES\n", out.String())
	out.Reset()
	require.Equal(t, exitOK, run([]string{"doctor", "-fix"}, &out, &complaints, show(t, healthy())))
	require.Equal(t, "# nothing to fix by a command\n", out.String())

	out.Reset()
	writeCommands(&out, []finding{{Check: "driver", Seen: "one error\nand another", Device: machine, Commands: []string{"dmesg"}},
		ofFabric(fabric.Finding{Check: "nodes", Severity: fabric.Problem, Device: machine, Text: "none", Commands: []string{"mkdir x", "mknod x/0"}})})
	require.Equal(t, "# driver: one error\n# and another\ndmesg\n"+
		"# fabric, nodes: none; fabric handles do not work; sharing on one host by descriptor is not affected\nmkdir x\nmknod x/0\n", out.String(), "only commands run")

	h.env, h.open = none, func(string) (*cuda.System, error) { return nil, errors.New("no such library") }
	out.Reset()
	require.Equal(t, exitProblem, run([]string{"doctor"}, &out, &complaints, h))
	require.Contains(t, out.String(), "problem  driver: it cannot be opened: no such library\n         means: no program can use a GPU from here\n")
}

// The finding names the setting that the driver fails on.
func TestSettingsThatKeepTheDriverFromOpening(t *testing.T) {
	for _, setting := range []string{"CUVMM_DRIVER=bogus", "CUVMM_SIM={", "CUVMM_SIM_FAULTS=[", "CUVMM_LIBCUDA=/nowhere/libcuda.so"} {
		t.Run(setting, func(t *testing.T) {
			name, value, _ := strings.Cut(setting, "=")
			for _, other := range []string{"CUVMM_DRIVER", "CUVMM_SIM", "CUVMM_SIM_FAULTS", "CUVMM_LIBCUDA"} {
				t.Setenv(other, "")
			}
			driver := map[string]string{"CUVMM_DRIVER": "", "CUVMM_LIBCUDA": "real"}
			t.Setenv(name, value)
			h := show(t, healthy())
			h.env, h.open = os.LookupEnv, thisHost().open
			choice, named := driver[name]
			if !named {
				choice = "sim"
			}
			all := driverFindings(h, choice)[1:] // after the library
			require.Len(t, all, 1)
			require.Equal(t, "settings", all[0].Check)
			require.Equal(t, problem, all[0].Severity)
			require.Contains(t, all[0].Seen, name+" keeps the driver from opening: ")
			require.Equal(t, []string{"unset " + name}, all[0].Commands)
		})
	}
}

// Findings about the software driver's machine are not mistaken for this machine's.
func TestFindingsOfTheSoftwareDriverAreMarked(t *testing.T) {
	bare := healthy().without("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia0")
	var out, complaints bytes.Buffer
	require.Equal(t, exitOK, run([]string{"doctor"}, &out, &complaints, show(t, bare)))
	require.Contains(t, out.String(), "the nvidia kernel module is not loaded")
	channels := 0
	for _, line := range strings.Split(out.String(), "\n") {
		if strings.Contains(line, " fabric, ") || strings.Contains(line, "device 0:") {
			require.Contains(t, line, " simulated ")
			channels++
		}
	}
	require.Greater(t, channels, 10)
	for _, f := range machineFindings(show(t, bare)) {
		require.False(t, f.Simulated)
	}
}

func TestInfo(t *testing.T) {
	var out, complaints bytes.Buffer
	h := show(t, healthy(), sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	require.Equal(t, exitOK, run([]string{"info"}, &out, &complaints, h))
	for _, want := range []string{"software driver, CUDA 13.0\n", "device 1: Software GPU\n", "granularity                2 MiB, recommended 2 MiB\n", "RDMA                       yes\n", "256.00"} {
		require.Contains(t, out.String(), want)
	}
	out.Reset()
	require.Equal(t, exitOK, run([]string{"info", "-json"}, &out, &complaints, h))
	var got struct {
		Driver  string
		Devices []deviceInfo
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &got))
	require.Len(t, got.Devices, 2)
	require.Equal(t, 16<<30, got.Devices[0].Memory)
	require.Len(t, got.Devices[0].Costs, 3)
	require.Positive(t, got.Devices[0].Costs[0].Create)
	require.Empty(t, complaints.String())

	h.open = func(string) (*cuda.System, error) { return nil, errors.New("no such library") }
	require.Equal(t, exitFailed, run([]string{"info"}, &out, &complaints, h))
	require.Equal(t, "cuvmm: no such library (cuvmm doctor says more)\n", complaints.String())
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		out  string // what is printed, and what is complained
		says string
	}{
		{nil, exitUsage, "usage: cuvmm COMMAND", ""},
		{[]string{"help"}, exitOK, "Exit codes: 0 success", ""},
		{[]string{"doctor", "-h"}, exitOK, "-fix", ""},
		{[]string{"info", "-h"}, exitOK, "-json", ""},
		{[]string{"mop"}, exitUsage, "", `there is no command "mop": use one of doctor, info, map, top, serve, objects, sleep, wake, load, replay, generate, version`},
		{[]string{"replay", "-h"}, exitOK, "-limit", ""},
		{[]string{"replay"}, exitUsage, "", "replay needs the files of traces"},
		{[]string{"replay", "nosuchfile"}, exitFailed, "", "open nosuchfile: no such file or directory: name the file of a trace: record one with pool.History.Trace, or"},
		{[]string{"generate", "-only", "x"}, exitUsage, "", "the generators are training"},
		{[]string{"map", "-h"}, exitOK, "-html", ""},
		{[]string{"map", "1", "2", "3"}, exitUsage, "", `unexpected argument "3": see cuvmm map -h`},
		{[]string{"version"}, exitOK, runtime.GOOS + "/" + runtime.GOARCH + ", snapshots of version " + strconv.Itoa(inspect.Version) + "\n", ""},
		{[]string{"version", "-h"}, exitOK, "usage: cuvmm version", ""},
		{[]string{"version", "0"}, exitUsage, "", `unexpected argument "0": see cuvmm version -h`},
		{[]string{"info", "0"}, exitUsage, "", `unexpected argument "0": see cuvmm info -h`},
		{[]string{"doctor", "-quick"}, exitUsage, "", "-quick"},
		{[]string{"doctor", "-driver", "x"}, exitUsage, "", `-driver "x": use auto, real, sim`},
		{[]string{"info", "-driver", "x"}, exitUsage, "", `-driver "x": use auto, real, sim`},
	} {
		var out, complaints bytes.Buffer
		h := show(t, healthy())
		h.open = thisHost().open
		require.Equal(t, c.code, run(c.args, &out, &complaints, h), "%v", c.args)
		require.Contains(t, out.String(), c.out)
		require.Contains(t, complaints.String(), c.says)
	}
}

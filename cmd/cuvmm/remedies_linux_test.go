package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// filterSystemCalls has the kernel filter this process's system calls, and allow all.
func filterSystemCalls() {
	allow := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}}
	program := unix.SockFprog{Len: uint16(len(allow)), Filter: &allow[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	if _, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); e != 0 {
		panic(e)
	}
}

// computer makes a mount namespace into a computer with an NVIDIA driver, as far as
// files show it.
const computer = `set -e
for d in /dev /proc/driver /sys/class /sys/fs/cgroup /tmp; do mount -t tmpfs none $d; done
touch /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia0
mkdir -p /proc/driver/nvidia /sys/class/iommu
echo 'NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build' >/proc/driver/nvidia/version
ulimit -n 8192
`

// Programs that commands of doctor call, which do to these files what the vendor's do.
const modprobe = `#!/bin/sh
case $1 in
nvidia) mkdir -p /proc/driver/nvidia; echo 'Kernel Module  580.159.04' >/proc/driver/nvidia/version ;;
nvidia-uvm) touch /dev/nvidia-uvm ;;
esac
`

const nvidiaModprobe = `#!/bin/sh
touch /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia0
`

// findingsIn runs doctor in a computer of its own after a script. $SELF is doctor, which
// leaves the real driver alone if there is one: it would make the device files.
func findingsIn(t *testing.T, script string, env ...string) []finding {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	bin := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bin, "modprobe"), []byte(modprobe), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(bin, "nvidia-modprobe"), []byte(nvidiaModprobe), 0o700))
	// The test binary and these folders lie in what the namespace covers.
	script = "PATH=$PATH:/proc/self/fd/9\nexec 8<" + self + " 9<" + bin + "\n" + computer + script + "\n$SELF doctor -json -driver sim\n"
	c := exec.CommandContext(t.Context(), "unshare", "-m", "sh", "-c", script)
	c.Env = append([]string{"PATH=" + os.Getenv("PATH"), "SELF=/proc/self/fd/8", asChild + "=1"}, env...)
	out, err := c.Output()
	var got struct{ Findings []finding }
	require.NoError(t, json.Unmarshal(out, &got), "%v: %s", err, out)
	return got.Findings
}

// about returns the findings of a check that are not fine and contain a text.
func about(all []finding, check, text string) (some []finding) {
	for _, f := range all {
		if f.Check == check && f.Severity != fine && strings.Contains(f.Seen+" "+f.Means, text) {
			some = append(some, f)
		}
	}
	return some
}

// Each finding is produced by what causes it, in a namespace, and is gone after its
// remedy: the commands that -fix prints, or what its words say.
func TestRemediesRemoveTheirFindings(t *testing.T) {
	if err := exec.CommandContext(t.Context(), "unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev").Run(); err != nil {
		needs.Lacks(t, "permission to make mount namespaces, which root has: %v", err)
	}
	const follow = "fix" // by the commands
	for _, c := range []struct {
		name, cause  string
		env          []string
		check, seen  string
		says, remedy string
		instead      string // what the remedy makes of the cause, if only a new start has it
	}{
		{name: "no module", cause: "rm -r /proc/driver/nvidia", check: "kernel module", seen: "is not loaded", remedy: follow},
		{name: "no device files", cause: "rm /dev/nvidia*", check: "device files", seen: "/dev has no NVIDIA device", remedy: follow},
		{name: "no nvidia-uvm", cause: "rm /dev/nvidia-uvm", check: "device files", seen: "error 999", remedy: follow},
		{name: "no nvidiactl", cause: "rm /dev/nvidiactl", check: "device files", seen: "error 100", remedy: follow},
		{name: "addresses", cause: "ulimit -S -v 30000000", check: "address space", seen: "ulimit -v", remedy: follow},
		{name: "visible devices", cause: "export CUDA_VISIBLE_DEVICES=-1", check: "settings", seen: "see no GPU", remedy: follow},
		{name: "blocking launches", cause: "export CUDA_LAUNCH_BLOCKING=1", check: "settings", seen: "every launch waits", remedy: follow},
		{name: "the software driver", cause: "export CUVMM_DRIVER=sim", check: "settings", seen: "run on the software driver", remedy: follow},
		{name: "a broken setting", cause: "export CUVMM_SIM={", check: "settings", seen: "keeps the driver from opening", remedy: follow},
		{name: "open files", cause: "ulimit -n 256", check: "open files", seen: "at most 256", says: "raise the hard limit", instead: "ulimit -n 4096"},
		{name: "host memory", cause: "echo 1048576 >/sys/fs/cgroup/memory.max", check: "host memory", seen: "allows 1 MiB", says: "memory.max", remedy: "echo max >/sys/fs/cgroup/memory.max"},
		{name: "WSL", cause: "echo Linux 5.15 microsoft-standard >/tmp/v; mount --bind /tmp/v /proc/version", check: "WSL", seen: "this is WSL"},
		{name: "an IOMMU", cause: "mkdir /sys/class/iommu/dmar0", check: "IOMMU", seen: "an IOMMU is on"},
		{name: "MPS", cause: "mkdir /tmp/nvidia-mps; touch /tmp/nvidia-mps/control", check: "MPS", seen: "control daemon"},
		{name: "ptrace", cause: "mount -t tmpfs none /proc/sys/kernel; mkdir /proc/sys/kernel/yama; echo 1 >/proc/sys/kernel/yama/ptrace_scope", check: "ptrace", seen: "ptrace_scope is 1"},
		{name: "seccomp", env: []string{asChild + "=" + filtered}, check: "seccomp", seen: "system calls are filtered"},
		{name: "a confidential guest", cause: "touch /dev/sev-guest", check: "confidential computing", seen: "/dev/sev-guest"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := about(findingsIn(t, c.cause, c.env...), c.check, c.seen)
			require.Len(t, before, 1)
			switch {
			case c.instead != "":
				require.Contains(t, before[0].Remedy, c.says)
				c.cause = c.instead
			case c.remedy == "": // for what is as it is, nothing is to be done
				require.NotEqual(t, problem, before[0].Severity)
				require.Empty(t, before[0].Commands)
				require.Empty(t, about(findingsIn(t, ""), c.check, c.seen))
				return
			case c.remedy == follow:
				require.NotEmpty(t, before[0].Commands)
				c.remedy = "$SELF doctor -fix -driver sim >/tmp/fix || true; . /tmp/fix"
			default:
				require.Contains(t, before[0].Remedy, c.says)
			}
			require.Empty(t, about(findingsIn(t, c.cause+"\n"+c.remedy, c.env...), c.check, c.seen))
		})
	}
}

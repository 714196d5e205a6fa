//go:build linux && cgo

package main

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// standIn compiles a library that stands in for the driver's, under a name of its own.
// Its cuInit returns a result.
func standIn(t *testing.T, name string, result int32) (path string) {
	t.Helper()
	cc := needs.Program(t, "cc")
	const source = "../../csrc/testdata/fakecuda/fakecuda.c"
	if _, err := os.Stat(source); err != nil {
		needs.Lacks(t, "the repository's sources")
	}
	path = filepath.Join(t.TempDir(), name)
	out, err := exec.CommandContext(t.Context(), cc, "-shared", "-fPIC", "-o", path, source, "-ldl").CombinedOutput()
	require.NoError(t, err, "%s", out)
	state := make([]byte, 8, 64) // nothing recorded so far, then the results as fakecuda.h has them
	state = append(append(state, "cuInit"...), make([]byte, 48-len("cuInit"))...)
	state = binary.LittleEndian.AppendUint32(state, uint32(result))
	require.NoError(t, os.WriteFile(path+".state", append(state, 0, 0, 0, 0), 0o600))
	return path
}

// The results with which drivers refuse to start are known by their causes.
func TestDriversThatDoNotStart(t *testing.T) {
	for result, want := range map[int32][2]string{
		34: {"stub", "first in the search path"}, 100: {"cuInit returned CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"}, 101: {"cannot be opened", "follow the error"},
		802: {"fabric manager", "systemctl start nvidia-fabricmanager"}, 803: {"different versions", "reboot"}, 804: {"compatibility", "own libcuda.so.1"},
		999: {"nvidia-uvm", "dmesg"},
	} {
		h := show(t, healthy())
		h.open = thisHost().open
		t.Setenv("CUVMM_LIBCUDA", standIn(t, "libcuda.so.1", result))
		all := driverFindings(h, "real")
		f := all[len(all)-1]
		require.Equal(t, problem, f.Severity)
		text := f.Seen + f.Means + f.Remedy + strings.Join(f.Commands, ";")
		require.Contains(t, text, want[0])
		require.Contains(t, text, want[1])
	}
}

// A library of another release than the kernel module's is named, and one of the same
// release is fine.
func TestTheReleaseOfTheLibrary(t *testing.T) {
	for _, c := range []struct {
		folder, name string
		severity     severity
		want         string
	}{
		{"", "libcuda.so.580.159.04", fine, "libcuda.so.580.159.04"},
		{"", "libcuda.so.570.10", problem, "has release 570.10, the kernel module 580.159.04"},
		{"compat", "libcuda.so.590.1", note, "of a compatibility package"},
	} {
		self, err := os.Executable()
		require.NoError(t, err)
		built := standIn(t, c.name, 999)
		at := filepath.Join(filepath.Dir(built), c.folder, c.name)
		require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o700))
		for _, suffix := range []string{"", ".state"} {
			require.NoError(t, os.Rename(built+suffix, at+suffix))
		}
		root := show(t, healthy().without("proc/self/maps")).root
		require.NoError(t, os.Symlink("/proc/self/maps", filepath.Join(root, "proc/self/maps")))
		command := exec.CommandContext(t.Context(), self, "doctor", "-json", "-driver", "real")
		command.Env = append(os.Environ(), asChild+"="+root, "CUVMM_LIBCUDA="+at)
		out, _ := command.Output() // which ends with a problem
		var got struct{ Findings []finding }
		require.NoError(t, json.Unmarshal(out, &got), "%s", out)
		found := slices.IndexFunc(got.Findings, func(f finding) bool { return f.Check == "library" })
		require.GreaterOrEqual(t, found, 0, "%s", out)
		require.Equal(t, c.severity, got.Findings[found].Severity)
		require.Contains(t, got.Findings[found].Seen, c.want)
	}
}

//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s\n%s%s", cmd, out, stderr.String())
	return string(out)
}

// built is the library's folder, which outlives the test that builds it.
var built struct {
	sync.Once
	dir string
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "libcuda")
	if err != nil {
		panic(err)
	}
	built.dir = dir
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// shared builds the library, once.
func shared(t *testing.T) string {
	t.Helper()
	tool := needs.Program(t, "go")
	needs.Program(t, "cc")
	path := filepath.Join(built.dir, "libcuda.so.1")
	built.Do(func() {
		output(t, exec.CommandContext(t.Context(), tool, "build", "-buildmode=c-shared", "-ldflags=-extldflags=-Wl,-soname,libcuda.so.1", "-o", path, "."))
	})
	require.FileExists(t, path)
	return path
}

// environment describes a machine to another process.
func environment(t *testing.T, o sim.Options) []string {
	t.Helper()
	text, err := json.Marshal(o)
	require.NoError(t, err)
	return append(os.Environ(), sim.MachineEnv+"="+string(text))
}

func twoDevices(t *testing.T) sim.Options {
	o := sim.WithMulticast(2)
	o.Devices[0].Memory, o.Devices[1].Memory = 1<<30, 1<<30
	o.DriverVersion = 13010
	o.Folder = t.TempDir()
	return o
}

// exports are the entry points that the library exports.
func exports(t *testing.T, path string) (names []string) {
	t.Helper()
	file, err := elf.Open(path)
	require.NoError(t, err)
	defer file.Close()
	symbols, err := file.DynamicSymbols()
	require.NoError(t, err)
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && strings.HasPrefix(s.Name, "cu") && !strings.HasPrefix(s.Name, "cuvmm_") {
			names = append(names, s.Name)
		}
	}
	slices.Sort(names)
	return names
}

// every compiles the program that calls each export, and returns a run of it with a
// library and the library's own kernels.
func every(t *testing.T, library string) *exec.Cmd {
	t.Helper()
	dir := t.TempDir()
	program, ptx := filepath.Join(dir, "every"), filepath.Join(dir, "kernels.ptx")
	require.NoError(t, os.WriteFile(ptx, kernels.Basic, 0o600))
	output(t, exec.CommandContext(t.Context(), needs.Program(t, "cc"), "-Wall", "-Wextra", "-Werror", "-o", program, "testdata/every.c", "-ldl", "-lpthread"))
	return exec.CommandContext(t.Context(), program, library, ptx)
}

func TestACProgramCallsEveryExport(t *testing.T) {
	library := shared(t)
	cmd := every(t, library)
	cmd.Env = environment(t, twoDevices(t))
	called := strings.Fields(output(t, cmd))
	slices.Sort(called)
	called = slices.Compact(called)
	exported := exports(t, library)
	require.Greater(t, len(exported), driver.CallCount)
	require.Equal(t, exported, called)
}

// A preloaded library is what a program gets that opens the vendor's by its name.
func TestThePreloadedLibraryIsTheOneThatIsOpened(t *testing.T) {
	library, cmd := shared(t), every(t, "libcuda.so.1")
	cmd.Env = append(environment(t, twoDevices(t)), "LD_PRELOAD="+library)
	require.Contains(t, output(t, cmd), "cuLaunchKernel")
}

// The allocator for PyTorch runs on the library as on the vendor's.
func TestTheAllocatorForPyTorch(t *testing.T) {
	library, cxx, dir := shared(t), needs.Program(t, "c++"), t.TempDir()
	allocator, program := filepath.Join(dir, "allocator.so"), filepath.Join(dir, "test")
	const sources = "../../csrc/pytorch/"
	output(t, exec.CommandContext(t.Context(), cxx, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread", "-shared", "-o", allocator, sources+"managed_alloc.cc", "-ldl"))
	output(t, exec.CommandContext(t.Context(), cxx, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, sources+"software_test.cc", "-ldl"))
	cmd := exec.CommandContext(t.Context(), program, allocator, library)
	cmd.Env = environment(t, sim.Options{DriverVersion: 13010, Devices: []sim.DeviceOptions{{Memory: 1 << 30}}})
	require.Equal(t, "ok\n", output(t, cmd))
}

// A machine that cannot be made is named, and every call fails.
func TestAWrongEnvironmentIsSaid(t *testing.T) {
	cmd := every(t, shared(t))
	cmd.Env = append(os.Environ(), sim.MachineEnv+`={"Device": []}`)
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), `libcuda (software driver): sim.NewFromEnvironment: invalid argument: the environment variable CUVMM_SIM is "{\"Device\": []}"`)
	require.Contains(t, string(out), "cuDriverGetVersion returns 802, want 0")
}

// What a program sets before it loads the library describes the machine: Go's copy of the
// environment is that of the process's start.
func TestAProgramSetsTheMachineBeforeItLoadsTheLibrary(t *testing.T) {
	library, dir := shared(t), t.TempDir()
	program := filepath.Join(dir, "sets")
	require.NoError(t, os.WriteFile(program+".c", []byte(`
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    int n = 0;
    setenv("CUVMM_SIM", "{\"Devices\": [{}, {}, {}]}", 1);
    void *lib = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (lib == NULL) return 1;
    ((int (*)(unsigned))dlsym(lib, "cuInit"))(0);
    ((int (*)(int *))dlsym(lib, "cuDeviceGetCount"))(&n);
    printf("%d", n);
    return 0;
}`), 0o600))
	output(t, exec.CommandContext(t.Context(), needs.Program(t, "cc"), "-o", program, program+".c", "-ldl"))
	cmd := exec.CommandContext(t.Context(), program, library)
	cmd.Env = environment(t, sim.Options{})
	require.Equal(t, "3", output(t, cmd))
}

// A thread may get the number of one that ended with contexts on its stack.
func TestANewThreadHasNothingOfItsPredecessor(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close()) }()
	use(m)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	d := machine.d
	require.Equal(t, driver.Success, d.Init())
	c, r := d.DevicePrimaryCtxRetain(0)
	require.Equal(t, driver.Success, r)
	defer d.DevicePrimaryCtxRelease(0)
	for range 2 {
		require.Zero(t, push(c))
	}
	_, r = d.ThreadExchangeStreamCaptureMode(driver.CaptureRelaxed)
	require.Equal(t, driver.Success, r)

	cuvmm_new_thread()
	now, r := d.CtxGetCurrent()
	require.Equal(t, driver.Success, r)
	require.Zero(t, now)
	mode, r := d.ThreadExchangeStreamCaptureMode(driver.CaptureGlobal)
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.CaptureGlobal, mode)
	require.NotZero(t, cuvmm_pop_context(nil), "the stack is empty")
}

const joining = "a Go program that finds the software driver's library"

type joined struct {
	Reason   csrc.Reason
	Error    string
	Software bool
	Free     int
}

func init() {
	reexec.Register(joining, func(c *reexec.Child) error {
		var j joined
		_, err := csrc.Open(csrc.Options{Path: c.Args[0]})
		var e *csrc.OpenError
		if errors.As(err, &e) {
			j.Reason, j.Error = e.Reason, e.Error()
		}
		s, err := auto.Open(auto.Options{})
		if err != nil {
			return err
		}
		j.Software = s.Driver().Software
		if j.Free, _, err = s.Devices()[0].MemoryInfo(); err != nil {
			return err
		}
		return errors.Join(s.Close(), c.Send(j))
	})
}

// A Go program never loads the library, whatever its name, and still joins its machine.
func TestAGoProgramJoinsTheMachine(t *testing.T) {
	library := shared(t)
	o := twoDevices(t)
	m, err := sim.New(o)
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close()) }()
	d := driver.Of(m)
	require.Equal(t, driver.Success, d.Init())
	h, r := d.MemCreate(256<<20, driver.AllocationProp{Type: driver.AllocationPinned, Location: driver.Location{Type: driver.LocationDevice}})
	require.Equal(t, driver.Success, r)
	defer func() { require.Equal(t, driver.Success, d.MemRelease(h)) }()

	link := filepath.Join(t.TempDir(), "libcuda.so.1")
	require.NoError(t, os.Symlink(library, link))
	for _, path := range []string{"libcuda.so.1", library, link} {
		child := reexec.Command(t, joining, path)
		child.Env = append(environment(t, o), "LD_LIBRARY_PATH="+filepath.Dir(library), auto.DriverEnv+"=", cuda.LibraryEnv+"=")
		child.Start()
		var j joined
		child.Recv(&j)
		child.Wait()
		child.Wait()
		require.Equal(t, csrc.SoftwareDriver, j.Reason, "%s: %s", path, j.Error)
		require.Contains(t, j.Error, "cannot load another Go runtime")
		require.True(t, j.Software)
		require.LessOrEqual(t, j.Free, 1<<30-256<<20, "this process's memory is taken there")
		require.Greater(t, j.Free, 1<<30-257<<20, "the System has a page of its own")
	}
}

// Any other Go library is refused, and is not taken for the software driver.
func TestAnotherGoLibraryIsRefused(t *testing.T) {
	library, err := os.ReadFile(shared(t))
	require.NoError(t, err)
	other := filepath.Join(t.TempDir(), "libcuda.so.1")
	note := []byte("cuvmm\x00")
	require.Positive(t, bytes.Count(library, note))
	require.NoError(t, os.WriteFile(other, bytes.ReplaceAll(library, note, []byte("other\x00")), 0o600))
	_, err = csrc.Open(csrc.Options{Path: other})
	require.ErrorContains(t, err, "built with Go, and a process cannot have two Go runtimes")
	var e *csrc.OpenError
	require.ErrorAs(t, err, &e)
	require.Equal(t, csrc.NotLoaded, e.Reason)
}

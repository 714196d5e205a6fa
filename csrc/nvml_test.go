//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/nvml"
	"github.com/cuvmm/cuvmm/internal/test/drivertest"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

const fakeGPU = "GPU-00112233-4455-6677-8899-aabbccddeeff"

// buildNVML makes a variant of the stand-in in a folder of its own.
func buildNVML(t *testing.T, defines ...string) string {
	t.Helper()
	cc := needs.Program(t, "cc")
	path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	args := []string{"-shared", "-fPIC", "-o", path, "testdata/fakenvml/fakenvml.c", "-ldl"}
	for _, d := range defines {
		args = append(args, "-D"+d)
	}
	out, err := exec.CommandContext(t.Context(), cc, args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// initialised is how often the stand-in is initialised and not shut down.
func initialised(t *testing.T, path string) uint32 {
	t.Helper()
	b, err := os.ReadFile(path + ".count")
	require.NoError(t, err)
	return binary.NativeEndian.Uint32(b)
}

func TestNVMLForms(t *testing.T) {
	want := nvml.Fabric{State: nvml.StateCompleted, Status: nvml.Unknown, Clique: 0x01020304}
	for i := range want.Cluster {
		want.Cluster[i] = byte(0xa0 + i)
	}
	with := func(version int, mask nvml.Mask, summary nvml.Summary) nvml.Fabric {
		f := want
		f.Version, f.Mask, f.Summary = version, mask, summary
		return f
	}
	for _, c := range []struct {
		name    string
		defines []string
		want    nvml.Fabric
	}{
		{"newest", nil, with(3, 0x1145, nvml.SummaryUnhealthy)},
		{"second", []string{"FAKENVML_NEWEST=2"}, with(2, 0x1145, 0)},
		{"second, refused as an argument", []string{"FAKENVML_NEWEST=2", "FAKENVML_REFUSES=2"}, with(2, 0x1145, 0)},
		{"first", []string{"FAKENVML_NEWEST=1"}, with(1, 0, 0)},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := buildNVML(t, c.defines...)
			l := csrc.NVMLFrom(path)
			for range 2 {
				got, err := l.Fabric(fakeGPU)
				require.NoError(t, err)
				require.Equal(t, c.want, got)
			}
			require.Zero(t, initialised(t, path), "every initialisation is undone")
		})
	}
}

func TestNVMLRefuses(t *testing.T) {
	for _, c := range []struct {
		name, uuid string
		defines    []string
		want       nvml.Error
	}{
		{"no driver", fakeGPU, []string{"FAKENVML_INIT=9"}, nvml.Error{Call: "nvmlInit_v2", Return: nvml.DriverNotLoaded}},
		{"no such GPU", "GPU-0", nil, nvml.Error{Call: "nvmlDeviceGetHandleByUUID", Return: nvml.NotFound}},
		{"no fabric", fakeGPU, []string{"FAKENVML_INFO=3"}, nvml.Error{Call: "nvmlDeviceGetGpuFabricInfoV", Return: nvml.NotSupported}},
		{"no fabric, first form", fakeGPU, []string{"FAKENVML_INFO=3", "FAKENVML_NEWEST=1"}, nvml.Error{Call: "nvmlDeviceGetGpuFabricInfo", Return: nvml.NotSupported}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := buildNVML(t, c.defines...)
			l := csrc.NVMLFrom(path)
			_, err := l.Fabric(c.uuid)
			var got *nvml.Error
			require.ErrorAs(t, err, &got)
			require.Equal(t, c.want, *got)
			require.Zero(t, initialised(t, path))
		})
	}
}

func TestNVMLMissing(t *testing.T) {
	none := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	_, err := csrc.NVMLFrom(none).Fabric(fakeGPU)
	require.ErrorIs(t, err, nvml.ErrMissing)
	require.ErrorContains(t, err, "no libnvidia-ml.so.1 is installed")

	broken := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	require.NoError(t, os.WriteFile(broken, []byte("no library"), 0o600))
	_, err = csrc.NVMLFrom(none, broken).Fabric(fakeGPU)
	require.ErrorIs(t, err, nvml.ErrMissing)
	require.ErrorContains(t, err, broken)

	old := buildNVML(t, "FAKENVML_NEWEST=0")
	_, err = csrc.NVMLFrom(old).Fabric(fakeGPU)
	require.ErrorIs(t, err, nvml.ErrMissing)
	require.ErrorContains(t, err, "nvmlDeviceGetGpuFabricInfo")
	require.Zero(t, initialised(t, old))

	// It is looked for again at the next call.
	late := csrc.NVMLFrom(none)
	_, err = late.Fabric(fakeGPU)
	require.Error(t, err)
	require.NoError(t, os.Rename(buildNVML(t), none))
	_, err = late.Fabric(fakeGPU)
	require.NoError(t, err)
}

func TestNVMLFromManyGoroutines(t *testing.T) {
	path := buildNVML(t)
	l := csrc.NVMLFrom(path)
	var all sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		all.Go(func() {
			for range 100 {
				_, err := l.Fabric(fakeGPU)
				errs[i] = errors.Join(errs[i], err)
			}
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Zero(t, initialised(t, path))
}

// The driver's own: by the environment, else beside the driver's library.
func TestNVMLOfADriver(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	t.Setenv(csrc.NVMLEnv, buildNVML(t, "FAKENVML_NEWEST=1"))
	got, err := d.(nvml.Source).NVML().Fabric(fakeGPU)
	require.NoError(t, err)
	require.Equal(t, 1, got.Version)

	t.Setenv(csrc.NVMLEnv, "")
	if _, err := d.(nvml.Source).NVML().Fabric(fakeGPU); !errors.Is(err, nvml.ErrMissing) {
		t.Skipf("the machine has an NVML of its own, which comes first: %v", err)
	}
	require.NoError(t, os.Rename(buildNVML(t), filepath.Join(filepath.Dir(f.path), "libnvidia-ml.so.1")))
	got, err = d.(nvml.Source).NVML().Fabric(fakeGPU)
	require.NoError(t, err)
	require.Equal(t, 3, got.Version)
}

// The real library takes a form of the question, knows the driver's GPU by its
// UUID, and returns a state that is documented.
func TestNVMLOnRealDriver(t *testing.T) {
	d := openReal(t)
	device, r := d.DeviceGet(0)
	require.Equal(t, driver.Success, r)
	u, r := d.DeviceGetUUID(device)
	require.Equal(t, driver.Success, r)
	f, err := d.(nvml.Source).NVML().Fabric(fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16]))
	if errors.Is(err, nvml.ErrMissing) {
		require.Zero(t, drivertest.RequiredGPUs(t), "NVML comes with the driver: %v", err)
		t.Skipf("the machine has no NVML: %v", err)
	}
	var refused *nvml.Error
	if errors.As(err, &refused) {
		require.Equal(t, nvml.NotSupported, refused.Return, "%v", err)
		t.Logf("NVML: %v", err)
		return
	}
	require.NoError(t, err)
	t.Logf("NVML: %+v", f)
	require.Contains(t, []int{1, 2, 3}, f.Version)
	require.LessOrEqual(t, f.State, nvml.StateCompleted)
	require.LessOrEqual(t, f.Summary, nvml.SummaryLimitedCapacity)
}

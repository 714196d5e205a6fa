package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Env is a driver under test, and what the suite must know besides.
type Env struct {
	Driver driver.Driver
	// Child is a name given to RegisterChild, whose function opens the same
	// machine's driver in another process, and ChildArgs its arguments.
	Child     string
	ChildArgs []string
	Machine   Machine
}

// Machine holds facts about a machine that its driver does not report.
type Machine struct {
	// Granularity and HostGranularity are what the driver returns for every
	// kind of device memory and for host NUMA memory, in bytes. Zero means
	// unknown: then minimum and recommended must only agree.
	Granularity, HostGranularity uint64
	// IMEXChannel says that an IMEX channel is open to the process.
	IMEXChannel bool
	// Together says that the suite's processes are on one machine of the software
	// driver, as all processes are on a real one.
	Together bool
	// ContextBytes is what a context takes of its device's memory. Zero
	// means unknown: then it must only be something, on the real driver.
	ContextBytes uint64
}

// HasIMEXChannel reports whether this process can open an IMEX channel, as the
// real driver would.
func HasIMEXChannel() bool {
	channels, _ := filepath.Glob("/dev/nvidia-caps-imex-channels/channel*")
	for _, c := range channels {
		if f, err := os.OpenFile(c, os.O_RDWR, 0); err == nil {
			_ = f.Close()
			return true
		}
	}
	return false
}

// RequiredGPUs returns CUVMM_REQUIRE_GPU: how many GPUs a run of the suite on the
// real driver must find, 0 if it is not set.
func RequiredGPUs(t testing.TB) int {
	t.Helper()
	s := os.Getenv("CUVMM_REQUIRE_GPU")
	if s == "" {
		return 0
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		t.Fatalf("CUVMM_REQUIRE_GPU=%q: want a number of GPUs", s)
	}
	return n
}

// Run runs all cases, one after the other: they compare the devices' free
// memory, so nothing else may use the devices meanwhile. It returns the names of
// the cases that it skipped because the machine lacks something.
func Run(t *testing.T, env Env) (skipped []string) {
	s := newSuite(t, env)
	if !s.software {
		if want := RequiredGPUs(t); len(s.devices) < want {
			t.Fatalf("CUVMM_REQUIRE_GPU=%d, but the driver has %d devices", want, len(s.devices))
		}
	}
	results := map[string]string{}
	cases := Cases()
	for _, c := range cases {
		t.Run(c.Section+"/"+c.Name, func(t *testing.T) {
			t.Cleanup(func() {
				if results[c.Name] == "" {
					results[c.Name] = "passed"
				}
				if t.Failed() {
					results[c.Name] = "FAILED"
				}
			})
			for _, n := range c.Needs {
				if !n.Met(s) {
					results[c.Name] = "skipped: needs " + n.What
					skipped = append(skipped, c.Name)
					t.Skipf("needs %s", n.What)
				}
			}
			c.Run(newT(t, s, c.Section))
		})
	}
	if out := os.Getenv("CUVMM_CASES_OUT"); out != "" {
		if err := appendTable(out, s.title(t.Name()), cases, results); err != nil {
			t.Error(err)
		}
	}
	return skipped
}

// appendTable writes the cases that ran.
func appendTable(path, title string, cases []Case, results map[string]string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "### %s\n\n| section | case | the driver returns | result |\n| --- | --- | --- | --- |\n", title)
	for _, c := range cases {
		if r, ran := results[c.Name]; ran {
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", c.Section, c.Name, c.Says, r)
		}
	}
	b.WriteString("\n")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(b.String())
	if e := f.Close(); err == nil {
		err = e
	}
	return err
}

// suite is what the cases of a run share.
type suite struct {
	env      Env
	software bool
	// D is the driver as the library uses it, F as other libraries do.
	D driver.Driver
	F driver.Foreign
	// devices are all devices of the machine, each with its primary context
	// and a non-blocking stream for preparing and checking memory.
	devices []device
	// page is pinned memory, for copies, and scratch some memory of the first
	// device whose contents no one relies on.
	page    unsafe.Pointer
	scratch driver.Ptr
	// kernels are those of the first device's primary context.
	kernels kernels
	holds   holds
}

type device struct {
	driver.Device
	ctx    driver.Context
	stream driver.Stream
	total  uint64
	// chunk is the granularity, and so the smallest allocation.
	chunk uint64
}

const pageSize = 64 << 10

func newSuite(t testing.TB, env Env) *suite {
	t.Helper()
	d := env.Driver
	s := &suite{env: env, software: d.Describe().Software, D: d, F: d.Foreign()}
	must := func(r driver.Result, what string) {
		t.Helper()
		if r != driver.Success {
			t.Fatalf("%s: %v", what, r)
		}
	}
	must(d.Init(), "cuInit")
	n, r := d.DeviceGetCount()
	must(r, "cuDeviceGetCount")
	if n == 0 {
		t.Fatal("the driver has no device")
	}
	for i := range n {
		dev, r := d.DeviceGet(i)
		must(r, "cuDeviceGet")
		total, r := d.DeviceTotalMem(dev)
		must(r, "cuDeviceTotalMem")
		chunk, r := d.MemGetAllocationGranularity(onDevice(dev), driver.GranularityMinimum)
		must(r, "cuMemGetAllocationGranularity")
		ctx, r := d.DevicePrimaryCtxRetain(dev)
		must(r, "cuDevicePrimaryCtxRetain")
		t.Cleanup(func() { must(d.DevicePrimaryCtxRelease(dev), "cuDevicePrimaryCtxRelease") })
		stream, r := d.StreamCreate(ctx, driver.StreamNonBlocking)
		must(r, "cuStreamCreate")
		t.Cleanup(func() { must(d.StreamDestroy(ctx, stream), "cuStreamDestroy") })
		s.devices = append(s.devices, device{dev, ctx, stream, total, chunk})
	}
	page, r := d.MemHostAlloc(s.devices[0].ctx, pageSize, driver.HostAllocPortable)
	must(r, "cuMemHostAlloc")
	t.Cleanup(func() { must(d.MemFreeHost(s.devices[0].ctx, page), "cuMemFreeHost") })
	s.page = page
	s.scratch, r = d.MemAlloc(s.devices[0].ctx, 2*pageSize)
	must(r, "cuMemAlloc")
	t.Cleanup(func() { must(d.MemFree(s.devices[0].ctx, s.scratch), "cuMemFree") })
	s.holds = newHolds(t, d, s.devices[0].ctx)
	s.kernels, r = loadKernels(d, s.devices[0].ctx, s.devices[0].stream, s.holds.device)
	must(r, "loading the suite's kernels")
	t.Cleanup(func() { must(d.ModuleUnload(s.devices[0].ctx, s.kernels.module), "cuModuleUnload") })
	return s
}

// title says which driver and devices gave the results.
func (s *suite) title(test string) string {
	what := "real driver"
	if s.software {
		what = "software driver"
	}
	version, _ := s.D.DriverGetVersion()
	var names []string
	for _, d := range s.devices {
		name, _ := s.D.DeviceGetName(d.Device)
		names = append(names, name)
	}
	return fmt.Sprintf("%s: %s for CUDA %s, %s", test, what, driver.VersionString(version), strings.Join(names, ", "))
}

func (s *suite) attribute(a driver.DeviceAttribute) bool {
	v, r := s.D.DeviceGetAttribute(a, s.devices[0].Device)
	return r == driver.Success && v != 0
}

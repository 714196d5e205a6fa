package csrc_test

import (
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/drivertest"
)

const conformanceChild = "conformance on the real driver"

func init() {
	drivertest.RegisterChild(conformanceChild, func([]string) (driver.Driver, error) {
		return open(csrc.Options{})
	})
}

// The rules that were measured on an H200 hold for it to the number; of another
// GPU they are checked as far as its driver says what to expect.
func TestConformance(t *testing.T) {
	env := realDriver(t)
	drivertest.Run(t, env)
}

func BenchmarkConformance(b *testing.B) { drivertest.Bench(b, realDriver(b)) }

func realDriver(t testing.TB) drivertest.Env {
	t.Helper()
	need := drivertest.RequiredGPUs(t)
	d, err := open(csrc.Options{})
	if err != nil {
		if need > 0 {
			t.Fatalf("CUVMM_REQUIRE_GPU=%d: %v", need, err)
		}
		t.Skipf("no real driver to check: %v", err)
	}
	env := drivertest.Env{
		Driver:  d,
		Child:   conformanceChild,
		Machine: drivertest.Machine{IMEXChannel: drivertest.HasIMEXChannel()},
	}
	if r := d.Init(); r != driver.Success {
		if need == 0 && (r == driver.NoDevice || r == driver.StubLibrary) {
			t.Skipf("the driver at %s has no device: %v", d.Describe().Path, r)
		}
		t.Fatalf("cuInit of the driver at %s: %v", d.Describe().Path, r)
	}
	first, r := d.DeviceGet(0)
	if r != driver.Success {
		t.Fatalf("cuDeviceGet: %v", r)
	}
	if name, r := d.DeviceGetName(first); r == driver.Success && strings.Contains(name, "H200") {
		env.Machine.Granularity, env.Machine.HostGranularity = 2<<20, 2<<20
	}
	return env
}

// open is csrc.Open, and looks into what that returns.
func open(opt csrc.Options) (driver.Driver, error) { return inside(csrc.Open(opt)) }

func inside(d *csrc.Driver, err error) (driver.Driver, error) {
	if err != nil {
		return nil, err
	}
	return driver.Of(d), nil
}

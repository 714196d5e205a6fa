// Package gputest gives tests a device of each driver: the software one always,
// the real one where there is a GPU.
//
// In a test binary with this package, another library captures a stream of every device
// while a test runs: no call of this library may end that capture. So no test of an
// operation needs to begin one; a test for which that is wrong asks for [Alone]. And every
// software machine looks for races ([sim.Options]): a test fails if work on it races,
// unless it asks for [Unordered].
package gputest

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/bystander"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// RequireEnv names the environment variable that turns a missing GPU from a
// skip into a failure: the GPU bundle sets it.
const RequireEnv = "CUVMM_REQUIRE_GPU"

// Each runs a test on the first device of each driver.
func Each(t *testing.T, test func(t *testing.T, d *cuda.Device)) {
	t.Run("software", func(t *testing.T) { test(t, Software(t)) })
	t.Run("real", func(t *testing.T) { test(t, Real(t)) })
}

// EachPair runs a test on two devices of each driver that reach each other. Where there is one GPU
// the real ones are skipped.
func EachPair(t *testing.T, test func(t *testing.T, d, peer *cuda.Device)) {
	t.Run("software", func(t *testing.T) {
		_, s := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
		test(t, s.Devices()[0], s.Devices()[1])
	})
	t.Run("real", func(t *testing.T) {
		d, peer := RealPair(t)
		test(t, d, peer)
	})
}

// RealPair is Real with a second device, which reaches the first.
func RealPair(tb testing.TB) (d, peer *cuda.Device) {
	tb.Helper()
	d = Real(tb)
	all := d.System().Devices()
	if len(all) < 2 {
		tb.Skipf("one GPU here (%v): a pair is needed", d)
	}
	ok, err := all[1].CanAccess(d)
	if err != nil {
		tb.Fatal(err)
	}
	if !ok {
		tb.Skipf("%v cannot reach %v", all[1], d)
	}
	return d, all[1]
}

// Software is the first device of a machine of the test's own.
func Software(tb testing.TB) *cuda.Device {
	tb.Helper()
	_, s := sim.Open(tb)
	return s.Devices()[0]
}

// Real is the first real device, with leak tracing on. Without one the test is
// skipped, unless a GPU is required. When the test ends everything that it made
// must be closed, and the capture beside it alive.
func Real(tb testing.TB) *cuda.Device {
	tb.Helper()
	return RealWith(tb, cuda.Options{TraceLeaks: true})
}

// RealWith is Real with options of the caller's own: benchmarks trace nothing.
func RealWith(tb testing.TB, o cuda.Options) *cuda.Device {
	tb.Helper()
	s, err := cuda.Open(o)
	if err != nil && os.Getenv(RequireEnv) != "" {
		tb.Fatalf("a GPU is required (%s): %v", RequireEnv, err)
	}
	if err != nil {
		tb.Skipf("no real driver: %v", err)
	}
	devices := s.Devices()
	if len(devices) == 0 {
		tb.Fatal("the real driver has no device")
	}
	if _, measures := tb.(*testing.B); !measures && bystander.Captures.Load() {
		beside(tb, devices[0])
	}
	tb.Cleanup(func() {
		tb.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Drain(ctx); err != nil {
			tb.Errorf("%v", err)
		}
		if err := s.Close(); err != nil {
			tb.Errorf("%v", err)
			for _, o := range s.Live() {
				tb.Errorf("leaked: %s", o)
			}
		}
	})
	return devices[0]
}

// Wrap opens a System round a driver of the test's own. closed is called when the
// System closes; it may be nil.
func Wrap(d driver.Driver, closed func() error) (*cuda.System, error) {
	var o cuda.Options
	core.UseDriver(&o, d, closed)
	return cuda.Open(o)
}

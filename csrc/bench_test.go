//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/cbench"
	"github.com/stretchr/testify/require"
)

// mostAboveC is what a call may cost above the same steps in C, in empty
// crossings into C, of which it is one.
const mostAboveC = 1.2

// benchmarked is the driver that a benchmark runs on: the real one where it
// has a device, else the fake.
type benchmarked struct {
	name   string
	d      driver.Driver
	c      *cbench.Library
	device driver.Device
	ctx    driver.Context
	stream driver.Stream
}

func openForBenchmark(b *testing.B) benchmarked {
	b.Helper()
	m := benchmarked{name: "real"}
	d, err := open(csrc.Options{})
	if err != nil || d.Init() != driver.Success {
		if os.Getenv("CUVMM_REQUIRE_GPU") != "" {
			openReal(b) // fails, and says why
		}
		f := buildFake(b)
		f.quiet(true)
		m.name, d = "fake", f.open(b)
	}
	m.d = d
	must := func(r driver.Result) { b.Helper(); require.Equal(b, driver.Success, r) }
	var r driver.Result
	m.device, r = d.DeviceGet(0)
	must(r)
	m.ctx, r = d.DevicePrimaryCtxRetain(m.device)
	must(r)
	b.Cleanup(func() { must(d.DevicePrimaryCtxRelease(m.device)) })
	m.stream, r = d.StreamCreate(m.ctx, driver.StreamNonBlocking)
	must(r)
	b.Cleanup(func() { must(d.StreamDestroy(m.ctx, m.stream)) })
	m.c, err = cbench.Open(d.Describe().Path)
	require.NoError(b, err)
	return m
}

// BenchmarkTrivialCall sets calls that do next to nothing against the same
// steps in a C loop. above-C is the difference in empty crossings.
func BenchmarkTrivialCall(b *testing.B) {
	m := openForBenchmark(b)
	onDevice := driver.AllocationProp{Type: driver.AllocationPinned, Location: driver.Location{Type: driver.LocationDevice, ID: int32(m.device)}}
	capturing := func(n int) (r driver.Result) {
		for range n {
			_, r = m.d.StreamIsCapturing(m.ctx, m.stream)
		}
		return r
	}
	for _, c := range []struct {
		name    string
		current driver.Context
		calls   func(n int) driver.Result
		inC     func(n int) (time.Duration, driver.Result)
	}{
		{"no context needed", 0,
			func(n int) (r driver.Result) {
				for range n {
					_, r = m.d.MemGetAllocationGranularity(onDevice, driver.GranularityMinimum)
				}
				return r
			},
			func(n int) (time.Duration, driver.Result) { return m.c.GranularitySteps(m.device, n) }},
		{"context current", m.ctx,
			capturing,
			func(n int) (time.Duration, driver.Result) { return m.c.CaptureSteps(m.ctx, m.stream, n) }},
		{"context switched", 0,
			capturing,
			func(n int) (time.Duration, driver.Result) { return m.c.CaptureSteps(m.ctx, m.stream, n) }},
	} {
		b.Run(fmt.Sprintf("driver=%s/%s", m.name, c.name), func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			require.Equal(b, driver.Success, m.d.Foreign().CtxSetCurrent(c.current))
			defer m.d.Foreign().CtxSetCurrent(0)
			b.ReportAllocs()
			for b.Loop() {
				c.calls(1)
			}
			// The best of several rounds of each, taken in turn, so that what
			// else the machine does falls on none of them alone.
			const rounds, n = 15, 20_000
			best := [3]time.Duration{1 << 62, 1 << 62, 1 << 62}
			for range rounds {
				start := time.Now()
				r := c.calls(n)
				ours := time.Since(start)
				require.Equal(b, driver.Success, r)
				inC, r := c.inC(n)
				require.Equal(b, driver.Success, r)
				for i, t := range []time.Duration{ours, inC, cbench.EmptyLoop(n)} {
					best[i] = min(best[i], t)
				}
			}
			above := float64(best[0]-best[1]) / float64(best[2])
			b.ReportMetric(float64(best[1])/n, "C-ns/op")
			b.ReportMetric(float64(best[2])/n, "crossing-ns")
			b.ReportMetric(above, "above-C")
			if above > mostAboveC {
				b.Errorf("%.2f empty crossings above the same steps in C, at most %.1f are promised", above, mostAboveC)
			}
		})
	}
}

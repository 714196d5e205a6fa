//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"os"
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/cbench"
	"github.com/stretchr/testify/require"
)

// What belongs to the thread, on the real driver: what the fake one keeps by
// the vendor's documentation, checked where it counts.

// realGPU is a driver with a context and a stream on its first device.
type realGPU struct {
	t      *testing.T
	d      driver.Driver
	device driver.Device
	ctx    driver.Context
	stream driver.Stream
}

// openReal skips the test where there is no GPU, unless CUVMM_REQUIRE_GPU says
// that there must be one.
func openReal(tb testing.TB) driver.Driver {
	tb.Helper()
	d, err := open(csrc.Options{})
	if err == nil {
		if r := d.Init(); r != driver.Success {
			err = &driverError{"cuInit", r}
		}
	}
	if err != nil {
		if os.Getenv("CUVMM_REQUIRE_GPU") != "" {
			tb.Fatalf("a GPU is required (CUVMM_REQUIRE_GPU): %v", err)
		}
		tb.Skipf("no GPU: %v", err)
	}
	return d
}

type driverError struct {
	call string
	r    driver.Result
}

func (e *driverError) Error() string { return e.call + ": " + e.r.String() }

func onRealGPU(t *testing.T) *realGPU {
	t.Helper()
	g := &realGPU{t: t, d: openReal(t)}
	var r driver.Result
	g.device, r = g.d.DeviceGet(0)
	g.ok(r)
	g.ctx, r = g.d.DevicePrimaryCtxRetain(g.device)
	g.ok(r)
	t.Cleanup(func() { g.ok(g.d.DevicePrimaryCtxRelease(g.device)) })
	g.stream, r = g.d.StreamCreate(g.ctx, driver.StreamNonBlocking)
	g.ok(r)
	t.Cleanup(func() { g.ok(g.d.StreamDestroy(g.ctx, g.stream)) })
	return g
}

func (g *realGPU) ok(r driver.Result) {
	g.t.Helper()
	require.Equal(g.t, driver.Success, r)
}

// A driver has every entry point of its version, in the form asked for.
func TestRealEntryPoints(t *testing.T) {
	d := openReal(t)
	version, r := d.DriverGetVersion()
	require.Equal(t, driver.Success, r)
	t.Logf("%s is CUDA %s", d.Describe().Path, driver.VersionString(version))
	for c := range driver.Call(driver.CallCount) {
		require.Equal(t, c.Version() <= version, d.Has(c), "%v of CUDA %s", c, driver.VersionString(c.Version()))
	}
}

// The calls leave the thread as they find it, whatever that is and whether
// they succeed.
func TestRealThreadIsLeftAsFound(t *testing.T) {
	g := onRealGPU(t)
	f := g.d.Foreign()
	other, r := g.d.Foreign().CtxCreate(0, g.device)
	if r == driver.OutOfMemory {
		t.Skip("no memory for a second context on the device (527 MiB on an H200)")
	}
	g.ok(r)
	t.Cleanup(func() { g.ok(g.d.Foreign().CtxDestroy(other)) })
	// An event of one context on a stream of another is refused.
	e, r := g.d.EventCreate(g.ctx, driver.EventDisableTiming)
	g.ok(r)
	t.Cleanup(func() { g.ok(g.d.EventDestroy(g.ctx, e)) })
	foreign, r := g.d.StreamCreate(other, driver.StreamNonBlocking)
	g.ok(r)
	t.Cleanup(func() { g.ok(g.d.StreamDestroy(other, foreign)) })
	prop := driver.AllocationProp{Type: driver.AllocationPinned, Location: driver.Location{Type: driver.LocationDevice, ID: int32(g.device)}}

	calls := map[string]func(d driver.Driver) driver.Result{
		"a query in our context":    func(d driver.Driver) driver.Result { return d.StreamQuery(g.ctx, g.stream) },
		"a query in the other":      func(d driver.Driver) driver.Result { return d.StreamQuery(other, driver.StreamNull) },
		"a call without a context":  func(d driver.Driver) driver.Result { _, r := d.MemGetAllocationGranularity(prop, 0); return r },
		"a call that fails":         func(d driver.Driver) driver.Result { return d.EventRecord(other, e, foreign) },
		"another that fails":        func(d driver.Driver) driver.Result { _, r := d.MemAddressReserve(4096, 0, 0); return r },
		"making a context":          func(d driver.Driver) driver.Result { return makeContext(g, d) },
		"retaining the primary one": func(d driver.Driver) driver.Result { return retainContext(g, d) },
	}
	fails := map[string]bool{"a call that fails": true, "another that fails": true}
	for name, call := range calls {
		for what, current := range map[string]driver.Context{"none": 0, "ours": g.ctx, "another": other} {
			for mode := driver.CaptureGlobal; mode <= driver.CaptureRelaxed; mode++ {
				for _, d := range []driver.Driver{g.d, f} {
					onThread(func() {
						g.ok(f.CtxSetCurrent(current))
						_, r := f.ThreadExchangeStreamCaptureMode(mode)
						g.ok(r)

						r = call(d)
						require.Equal(t, !fails[name], r == driver.Success, "%s with %s current: %v", name, what, r)

						got, r := f.CtxGetCurrent()
						g.ok(r)
						require.Equal(t, current, got, "%s with %s current: the current context", name, what)
						left, r := f.ThreadExchangeStreamCaptureMode(driver.CaptureGlobal)
						g.ok(r)
						require.Equal(t, mode, left, "%s with %s current: the capture mode", name, what)
						// Nothing may lie under the current context either.
						g.ok(f.CtxSetCurrent(0))
						got, r = f.CtxGetCurrent()
						g.ok(r)
						require.Zero(t, got, "%s with %s current: the stack of contexts is deeper", name, what)
					})
				}
			}
		}
	}
}

func makeContext(g *realGPU, d driver.Driver) driver.Result {
	c, r := d.Foreign().CtxCreate(0, g.device)
	if r != driver.Success {
		return r
	}
	return d.Foreign().CtxDestroy(c)
}

func retainContext(g *realGPU, d driver.Driver) driver.Result {
	if _, r := d.DevicePrimaryCtxRetain(g.device); r != driver.Success {
		return r
	}
	return d.DevicePrimaryCtxRelease(g.device)
}

// onThread runs f on its goroutine's thread, which is left clean.
func onThread(f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f()
}

// Another library captures in the global mode on a thread of its own. Calls
// that break that capture when they are made plainly do not when we make them.
func TestRealCaptureOfOthersSurvives(t *testing.T) {
	g := onRealGPU(t)
	l, err := cbench.Open(g.d.Describe().Path)
	require.NoError(t, err)
	captured, r := g.d.StreamCreate(g.ctx, driver.StreamNonBlocking)
	g.ok(r)
	t.Cleanup(func() { g.ok(g.d.StreamDestroy(g.ctx, captured)) })
	e, r := g.d.EventCreate(g.ctx, driver.EventDisableTiming)
	g.ok(r)
	t.Cleanup(func() { g.ok(g.d.EventDestroy(g.ctx, e)) })

	for name, call := range map[string]func(d driver.Driver) driver.Result{
		"event query":       func(d driver.Driver) driver.Result { return d.EventQuery(g.ctx, e) },
		"event synchronize": func(d driver.Driver) driver.Result { return d.EventSynchronize(g.ctx, e) },
		"stream query":      func(d driver.Driver) driver.Result { return d.StreamQuery(g.ctx, g.stream) },
		"stream synchronize": func(d driver.Driver) driver.Result {
			return d.StreamSynchronize(g.ctx, g.stream)
		},
		"memory": func(d driver.Driver) driver.Result {
			p, r := d.MemAlloc(g.ctx, 256)
			if r != driver.Success {
				return r
			}
			return d.MemFree(g.ctx, p)
		},
		"host memory": func(d driver.Driver) driver.Result {
			p, r := d.MemHostAlloc(g.ctx, 4096, driver.HostAllocPortable)
			if r != driver.Success {
				return r
			}
			return d.MemFreeHost(g.ctx, p)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var h cbench.CaptureHolder
			hold := func() {
				begin, err := h.Start(l, g.ctx, captured, driver.CaptureGlobal)
				require.NoError(t, err)
				require.Equal(t, driver.Success, begin)
			}
			t.Cleanup(func() { h.End() })
			hold()
			require.Equal(t, driver.Success, call(g.d), "made by us")
			require.Equal(t, driver.Success, h.End(), "the capture, after our call")

			hold()
			require.Equal(t, driver.CaptureUnsupported, call(g.d.Foreign()), "made by others")
			require.Equal(t, driver.CaptureInvalid, h.End(), "the capture, after their call")
		})
	}
}

// No thread of a goroutine has a context of its own accord.
func TestRealCallsFromManyGoroutines(t *testing.T) {
	g := onRealGPU(t)
	results := make(chan driver.Result, 16)
	for range cap(results) {
		go func() {
			e, r := g.d.EventCreate(g.ctx, driver.EventDisableTiming)
			for range 50 {
				if r == driver.Success {
					r = g.d.EventRecord(g.ctx, e, g.stream)
				}
				runtime.Gosched()
				if r == driver.Success {
					r = g.d.EventSynchronize(g.ctx, e)
				}
			}
			if r == driver.Success {
				r = g.d.EventDestroy(g.ctx, e)
			}
			results <- r
		}()
	}
	for range cap(results) {
		g.ok(<-results)
	}
}

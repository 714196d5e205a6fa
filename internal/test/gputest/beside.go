package gputest

import (
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bystander"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// Processes that a test starts (internal/test/reexec) run in an init function of its
// package. So this is one, too.
func init() {
	bystander.Captures.Store(true)
	bystander.Races.Store(true)
}

// Alone has no other library capture beside the test: for one that uses the legacy
// stream, or that ends captures on purpose. It is called before a device is opened.
func Alone(tb testing.TB) {
	bystander.Captures.Store(false)
	tb.Cleanup(func() { bystander.Captures.Store(true) })
}

// Unordered has software machines look for no races: for a test whose work races on
// purpose. It is called before a device is opened.
func Unordered(tb testing.TB) {
	bystander.Races.Store(false)
	tb.Cleanup(func() { bystander.Races.Store(true) })
}

// beside captures a stream of a real device, as software machines do: in global mode, on
// a thread that makes no other call, of a stream that waits for the legacy stream. When
// the test ends, the capture must be alive, unless the device is lost.
func beside(tb testing.TB, d *cuda.Device) {
	tb.Helper()
	f, dev := core.SystemOf(d.System()).Drv.Foreign(), driver.Device(d.Ordinal())
	ok := func(r driver.Result) {
		tb.Helper()
		require.Equal(tb, driver.Success, r)
	}
	c, r := f.DevicePrimaryCtxRetain(dev)
	ok(r)
	s, r := f.StreamCreate(c, driver.StreamDefault)
	ok(r)
	begun, over, ended := make(chan driver.Result), make(chan bool), make(chan driver.Result)
	go func() {
		runtime.LockOSThread()
		begun <- f.StreamBeginCapture(c, s, driver.CaptureGlobal)
		<-over
		g, r := f.StreamEndCapture(c, s)
		if r == driver.Success {
			r = f.GraphDestroy(g)
		}
		ended <- r
	}()
	ok(<-begun)
	tb.Cleanup(func() {
		tb.Helper()
		over <- true
		if r := <-ended; !r.Lost() {
			require.Equal(tb, driver.Success, r, "a call ended another library's capture")
			ok(f.StreamDestroy(c, s))
			ok(f.DevicePrimaryCtxRelease(dev))
		}
	})
}

package core_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func begin(t *testing.T, s *core.Stream) (end func()) {
	t.Helper()
	d := s.Ctx.System().Drv
	require.Equal(t, driver.Success, d.StreamBeginCapture(s.Ctx.Handle, s.Handle, driver.CaptureRelaxed))
	return func() {
		t.Helper()
		g, r := d.StreamEndCapture(s.Ctx.Handle, s.Handle)
		require.Equal(t, driver.Success, r)
		require.Equal(t, driver.Success, d.GraphDestroy(g))
	}
}

func TestAFencePassesWhenTheStreamHas(t *testing.T) {
	m, s, st := system(t, core.Config{})
	m.Hold(uintptr(st.Handle))
	work(t, st)
	f, err := s.NewFence("x", []*core.Stream{st, st})
	require.NoError(t, err)
	other, _, err := st.Mark("x")
	require.NoError(t, err)
	f.Add(other)
	require.False(t, f.Passed())
	m.Release(uintptr(st.Handle))
	require.Eventually(t, f.Passed, 10*time.Second, time.Millisecond)
	require.True(t, f.Passed())
}

// The events of fences are used again.
func TestFencesReuseTheirEvents(t *testing.T) {
	m, s, st := system(t, core.Config{})
	for range 50 {
		f, err := s.NewFence("x", []*core.Stream{st})
		require.NoError(t, err)
		f.Drop()
	}
	require.Equal(t, 1, m.Count("cuEventCreate"))
}

// A stream that captures is refused, and what was marked before is dropped.
func TestAFenceOnAStreamThatCaptures(t *testing.T) {
	m, s, st := system(t, core.Config{})
	h, r := s.Drv.StreamCreate(st.Ctx.Handle, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	free := st.Ctx.AddStream(h, false, false)
	t.Cleanup(func() {
		free.Forget()
		require.Equal(t, driver.Success, s.Drv.StreamDestroy(st.Ctx.Handle, h))
	})
	status, id, r := st.Capture()
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.CaptureNone, status)
	require.Zero(t, id)
	end := begin(t, st)
	status, id, r = st.Capture()
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.CaptureActive, status)
	require.NotZero(t, id)
	_, err := s.NewFence("x", []*core.Stream{free, st})
	require.ErrorContains(t, err, "captures a graph")
	require.Zero(t, m.Count("cuEventQuery"))
	end()
}

// A capture that begins between the question and the record has the event: it
// is destroyed and never asked, which would end the capture.
func TestACaptureThatBeginsDuringAMark(t *testing.T) {
	m, s, st := system(t, core.Config{})
	var end func()
	m.OnCall(func(call string) {
		if call == "cuEventRecord" && end == nil {
			end = func() {} // the calls of begin are seen too
			end = begin(t, st)
		}
	})
	_, err := s.NewFence("x", []*core.Stream{st})
	m.OnCall(nil)
	require.ErrorContains(t, err, "captures a graph")
	require.Equal(t, 1, m.Count("cuEventDestroy"))
	require.NoError(t, s.WaitDevices("x", []driver.Device{0}))
	end()
}

func TestAMarkThatFailsLeavesNothing(t *testing.T) {
	m, s, st := system(t, core.Config{})
	for _, call := range []string{"cuStreamIsCapturing", "cuEventCreate", "cuEventRecord"} {
		m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.OutOfMemory)})
		_, err := s.NewFence("x", []*core.Stream{st})
		require.Error(t, err, call)
	}
}

// WaitDevices waits for streams that it knows and for those that it does not.
func TestWaitDevicesWaitsForAllWork(t *testing.T) {
	for name, known := range map[string]bool{"a known stream": true, "an unknown stream": false} {
		for _, named := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				m, s, st := system(t, core.Config{NamedStreamsOnly: named})
				h := st.Handle
				if !known {
					var r driver.Result
					h, r = s.Drv.StreamCreate(st.Ctx.Handle, driver.StreamNonBlocking)
					require.Equal(t, driver.Success, r)
					defer func() { require.Equal(t, driver.Success, s.Drv.StreamDestroy(st.Ctx.Handle, h)) }()
				}
				m.Hold(uintptr(h))
				work(t, &core.Stream{Ctx: st.Ctx, Handle: h})
				done := make(chan error, 1)
				go func() { done <- s.WaitDevices("x", []driver.Device{0}) }()
				mustWait := known || !named
				select {
				case err := <-done:
					require.NoError(t, err)
					require.False(t, mustWait, "it did not wait")
					m.Release(uintptr(h))
				case <-time.After(10 * time.Millisecond):
					require.True(t, mustWait, "it waits for a stream that nobody named")
					m.Release(uintptr(h))
					require.NoError(t, <-done)
				}
				require.NoError(t, s.WaitDevices("x", []driver.Device{7}), "a device without a context")
			})
		}
	}
}

// Where there is no device memory for the block to wait by, pinned host memory
// serves; without that too it is an error that says what to do.
func TestWaitDevicesWithoutMemory(t *testing.T) {
	m, s, _ := system(t, core.Config{})
	device := []driver.Device{0}
	m.Inject(sim.Fault{Call: "cuMemAlloc", Result: cuda.Code(driver.OutOfMemory), Times: 2})
	require.NoError(t, s.WaitDevices("x", device), "the block was there, and is gone now")
	require.NoError(t, s.WaitDevices("x", device), "by host memory")
	m.Inject(sim.Fault{Call: "cuMemAlloc", Result: cuda.Code(driver.OutOfMemory), Times: 3})
	m.Inject(sim.Fault{Call: "cuMemHostAlloc", Result: cuda.Code(driver.OutOfMemory), Times: 1})
	require.ErrorContains(t, s.WaitDevices("x", device), "CloseAfter")
	require.NoError(t, s.WaitDevices("x", device))
}

func TestNothingIsWaitedForOnceTheDeviceIsLost(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.Error(t, m.Close()) })
	_, s, st := systemOn(t, m, core.Config{})
	m.Hold(uintptr(st.Handle))
	work(t, st)
	f, err := s.NewFence("x", []*core.Stream{st})
	require.NoError(t, err)
	require.Equal(t, driver.LaunchFailed, s.Note(driver.LaunchFailed))
	require.Equal(t, driver.Unknown, s.Note(driver.Unknown))
	require.Equal(t, driver.LaunchFailed, s.DeviceLost())
	require.True(t, f.Passed())
	require.NoError(t, s.WaitDevices("x", []driver.Device{0}))
	m.Release(uintptr(st.Handle))
}

package core_test

import (
	"slices"
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
	require.True(t, s.Acquire())
	defer s.Release()
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
	require.Eventually(t, f.Passed, time.Minute, time.Millisecond)
	require.True(t, f.Passed())
}

// The events of fences are used again.
func TestFencesReuseTheirEvents(t *testing.T) {
	m, s, st := system(t, core.Config{})
	for range 50 {
		f, err := s.NewFence("x", []*core.Stream{st})
		require.NoError(t, err)
		f.Release()
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
				m, err := sim.New(sim.Options{Devices: make([]sim.DeviceOptions, 2)})
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, m.Close()) })
				m, s, st := systemOn(t, m, core.Config{NamedStreamsOnly: named})
				h := st.Handle
				if known {
					m.Hold(uintptr(h))
					work(t, st)
				} else {
					var r driver.Result
					h, r = s.Drv.StreamCreate(st.Ctx.Handle, driver.StreamNonBlocking)
					require.Equal(t, driver.Success, r)
					defer func() { require.Equal(t, driver.Success, s.Drv.StreamDestroy(st.Ctx.Handle, h)) }()
					m.Hold(uintptr(h))
					unseenWork(t, s.Drv, st.Ctx.Handle, h)
				}
				done := make(chan error, 1)
				go func() { done <- s.WaitDevices("x", []driver.Device{0}) }()
				mustWait := known || !named
				select {
				case err := <-done:
					require.NoError(t, err)
					require.False(t, mustWait, "it did not wait")
					m.Release(uintptr(h))
				case <-time.After(10 * time.Millisecond):
					require.True(t, mustWait, "it waits for a stream that was not named")
					m.Release(uintptr(h))
					require.NoError(t, <-done)
				}
				require.NoError(t, s.WaitDevices("x", []driver.Device{1}), "a device without a context")
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
	m.Inject(sim.Fault{Call: "cuMemAlloc", Result: cuda.Code(driver.OutOfMemory), Times: 3})
	require.NoError(t, s.WaitDevices("x", device), "the block is gone again")
	before := m.Live()
	m.Inject(sim.Fault{Call: "cuMemFreeHost", Result: cuda.Code(driver.Unknown), Times: 1})
	require.ErrorContains(t, s.WaitDevices("x", device), "999")
	require.NoError(t, s.WaitDevices("x", device), "by the block that was not freed")
	require.Equal(t, before, m.Live())
}

func TestNothingIsWaitedForOnceTheDeviceIsLost(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	_, s, st := systemOn(t, m, core.Config{})
	m.Hold(uintptr(st.Handle))
	work(t, st)
	f, err := s.NewFence("x", []*core.Stream{st})
	require.NoError(t, err)
	require.Equal(t, driver.LaunchFailed, s.Observe(driver.LaunchFailed))
	require.Equal(t, driver.Unknown, s.Observe(driver.Unknown))
	require.Equal(t, driver.LaunchFailed, s.DeviceLost())
	require.True(t, f.Passed())
	require.NoError(t, s.WaitDevices("x", []driver.Device{0}))
	m.Release(uintptr(st.Handle))
}

// A stream that only this library reaches costs a wait nothing while it is idle,
// and is waited for again after the next operation on it.
func TestIdleStreamsAreNotAsked(t *testing.T) {
	m, s, st := system(t, core.Config{NamedStreamsOnly: true})
	wait := func() map[string]int {
		m.ResetCounts()
		require.NoError(t, s.WaitDevices("x", []driver.Device{0}))
		return m.Counts()
	}
	require.Empty(t, wait(), "nothing was ever on it")
	work(t, st)
	require.Equal(t, 1, wait()["cuEventSynchronize"])
	require.Empty(t, wait(), "it was waited for")
	require.NoError(t, st.UseWithoutWork("x", s))
	st.Release()
	require.Empty(t, wait(), "a query puts nothing on it")
	m.Hold(uintptr(st.Handle))
	work(t, st)
	done := make(chan error, 1)
	go func() { done <- s.WaitDevices("x", []driver.Device{0}) }()
	select {
	case err := <-done:
		t.Fatal("it did not wait for later work", err)
	case <-time.After(10 * time.Millisecond):
	}
	m.Release(uintptr(st.Handle))
	require.NoError(t, <-done)
}

// An operation that is under way may put its work behind the wait: the next wait
// is for it.
func TestAWaitBesideAnOperationDoesNotSettleTheStream(t *testing.T) {
	m, s, st := system(t, core.Config{NamedStreamsOnly: true})
	work(t, st)
	at := st.Now()
	require.True(t, st.Acquire())
	require.NoError(t, s.WaitDevices("x", []driver.Device{0}))
	unseenWork(t, s.Drv, st.Ctx.Handle, st.Handle)
	st.Release()
	st.Settled(at)
	m.ResetCounts()
	require.NoError(t, s.WaitDevices("x", []driver.Device{0}))
	require.Equal(t, 1, m.Count("cuEventSynchronize"))
}

// Of a stream whose handle others have only the driver knows.
func TestAnExposedStreamIsAskedEachTime(t *testing.T) {
	m, s, st := system(t, core.Config{NamedStreamsOnly: true})
	st.Expose()
	for range 3 {
		m.ResetCounts()
		require.NoError(t, s.WaitDevices("x", []driver.Device{0}))
		require.Equal(t, 1, m.Count("cuEventSynchronize"))
	}
}

// A mark holds its context for as long as the driver is in a call with it: what
// gives the context up waits for the call, and later calls are not made.
func TestAMarkHoldsItsContext(t *testing.T) {
	for name, ask := range map[string]func(m core.Mark, st *core.Stream) error{
		"Passed":      func(m core.Mark, _ *core.Stream) error { m.Passed(); return nil },
		"Wait":        func(m core.Mark, _ *core.Stream) error { return m.Wait("x") },
		"Synchronize": func(m core.Mark, _ *core.Stream) error { m.Synchronize(); return nil },
		"After":       func(m core.Mark, st *core.Stream) error { return st.After("x", m) },
	} {
		t.Run(name, func(t *testing.T) {
			m, s, st := system(t, core.Config{})
			d := s.Drv.Foreign()
			h, r := d.CtxCreate(0, 0)
			require.Equal(t, driver.Success, r)
			ctx := s.AddContext(h, 0, false)
			in, r := d.StreamCreate(h, driver.StreamNonBlocking)
			require.Equal(t, driver.Success, r)
			theirs := ctx.AddStream(in, true, false)
			mark, _, err := theirs.Mark("x")
			require.NoError(t, err)
			entered, goOn := make(chan struct{}), make(chan struct{})
			m.OnCall(func(string) {
				m.OnCall(nil)
				close(entered)
				<-goOn
			})
			asked := make(chan error, 1)
			go func() { asked <- ask(mark, st) }()
			<-entered
			released := make(chan struct{})
			go func() {
				theirs.Forget()
				ctx.Release()
				close(released)
			}()
			select {
			case <-released:
				t.Fatal("the context was given up during a call with it")
			case <-time.After(20 * time.Millisecond):
			}
			close(goOn)
			require.NoError(t, <-asked)
			<-released
			require.Equal(t, driver.Success, d.StreamDestroy(h, in))
			require.Equal(t, driver.Success, d.CtxDestroy(h))
			m.ResetCounts()
			require.True(t, mark.Passed())
			require.NoError(t, mark.Wait("x"))
			require.NoError(t, st.After("x", mark))
			require.Empty(t, m.Counts(), "the driver is asked nothing about what is gone")
		})
	}
}

// An event that the driver did not destroy is destroyed with its context.
func TestAnEventThatIsNotDestroyedIsNotLost(t *testing.T) {
	m, s, st := system(t, core.Config{})
	f, err := s.NewFence("x", slices.Repeat([]*core.Stream{st}, 70)) // more than are kept idle
	require.NoError(t, err)
	m.Inject(sim.Fault{Call: "cuEventDestroy", Result: cuda.Code(driver.Unknown), Times: 1})
	f.Release()
	require.Equal(t, 6, m.Count("cuEventDestroy"))
}

// A primary context that another library made on a device which was granted access
// is waited for, although nothing of this library ever used it; one that is not
// there is not made.
func TestWaitsMeetThePrimaryContextsOfOthers(t *testing.T) {
	for name, wait := range map[string]func(s *core.System) error{
		"of the devices": func(s *core.System) error { return s.WaitDevices("x", []driver.Device{0, 1, 2}) },
		"of all":         func(s *core.System) error { return s.WaitAll("x") },
	} {
		t.Run(name, func(t *testing.T) {
			m, err := sim.New(sim.Options{Devices: make([]sim.DeviceOptions, 3)})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, m.Close()) })
			m, s, _ := systemOn(t, m, core.Config{})
			s.Devices = []driver.Device{0, 1, 2}
			theirs := driver.Of(m)
			h, r := theirs.DevicePrimaryCtxRetain(1)
			require.Equal(t, driver.Success, r)
			st, r := theirs.StreamCreate(h, driver.StreamNonBlocking)
			require.Equal(t, driver.Success, r)
			m.Hold(uintptr(st))
			unseenWork(t, theirs, h, st)
			done := make(chan error, 1)
			go func() { done <- wait(s) }()
			select {
			case err := <-done:
				t.Error("it did not wait", err)
				m.Release(uintptr(st))
			case <-time.After(20 * time.Millisecond):
				m.Release(uintptr(st))
				require.NoError(t, <-done)
			}
			require.Equal(t, driver.Success, theirs.StreamDestroy(h, st))
			require.Equal(t, driver.Success, theirs.DevicePrimaryCtxRelease(1))
			before := m.Count("cuDevicePrimaryCtxRetain")
			require.NoError(t, wait(s))
			require.Equal(t, before, m.Count("cuDevicePrimaryCtxRetain"), "it is known by now")
			_, active, r := theirs.DevicePrimaryCtxGetState(2)
			require.Equal(t, driver.Success, r)
			require.False(t, active, "none is made to wait for it")
		})
	}
}

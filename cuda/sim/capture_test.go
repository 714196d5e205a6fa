package sim

import (
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/stretchr/testify/require"
)

// begin starts a relaxed capture, whose end may be on any thread.
func (r *rig) begin(s driver.Stream) {
	r.t.Helper()
	r.ok(r.lib.StreamBeginCapture(r.ctx, s, driver.CaptureRelaxed))
}

func (r *rig) end(s driver.Stream) driver.GraphExec {
	r.t.Helper()
	g, res := r.lib.StreamEndCapture(r.ctx, s)
	r.ok(res)
	e, res := r.lib.GraphInstantiate(r.ctx, g)
	r.ok(res)
	r.ok(r.lib.GraphDestroy(g))
	r.t.Cleanup(func() { r.ok(r.lib.GraphExecDestroy(e)) })
	return e
}

func (r *rig) endsWith(want driver.Result, s driver.Stream) {
	r.t.Helper()
	g, res := r.lib.StreamEndCapture(r.ctx, s)
	r.is(want, res)
	require.Zero(r.t, g)
	status, id, res := r.lib.StreamGetCaptureInfo(r.ctx, s)
	r.ok(res)
	require.Equal(r.t, driver.CaptureNone, status)
	require.Zero(r.t, id)
}

func TestCapturedWorkIsDoneAtTheLaunch(t *testing.T) {
	r := start(t, Options{})
	p, s := r.mapped(1), r.stream(driver.StreamNonBlocking)
	r.begin(s)
	status, id, res := r.lib.StreamGetCaptureInfo(r.ctx, s)
	r.ok(res)
	require.Equal(t, driver.CaptureActive, status)
	require.NotZero(t, id)
	r.is(driver.IllegalState, r.lib.StreamBeginCapture(r.ctx, s, driver.CaptureRelaxed))
	r.ok(r.MemsetD8Async(r.ctx, p, 1, 4, s))
	r.ok(r.MemcpyDtoDAsync(r.ctx, p+4, p, 4, s))
	e := r.end(s)
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, make([]byte, 8), r.bytes(p, 8))
	for range 3 {
		require.NoError(t, r.m.Poke(cuda.Ptr(p), make([]byte, 8)))
		r.ok(r.GraphLaunch(r.ctx, e, s))
		r.ok(r.StreamSynchronize(r.ctx, s))
		require.Equal(t, repeated(1, 8), r.bytes(p, 8))
	}
	_, res = r.lib.StreamEndCapture(r.ctx, s)
	r.is(driver.IllegalState, res)
	r.is(driver.CaptureUnsupported, r.lib.StreamBeginCapture(r.ctx, driver.StreamLegacy, driver.CaptureRelaxed))
	r.is(driver.InvalidValue, r.lib.StreamBeginCapture(r.ctx, s, 3))
}

func TestStreamsJoinACaptureThroughEvents(t *testing.T) {
	for seed := range uint64(20) {
		r := start(t, Options{Seed: seed})
		p := r.mapped(1)
		a, b, fork, back := r.stream(1), r.stream(1), r.event(), r.event()
		r.begin(a)
		r.ok(r.MemsetD8Async(r.ctx, p, 1, 1, a))
		r.ok(r.EventRecord(r.ctx, fork, a))
		r.ok(r.StreamWaitEvent(r.ctx, b, fork))
		_, id, _ := r.lib.StreamGetCaptureInfo(r.ctx, a)
		status, other, res := r.lib.StreamGetCaptureInfo(r.ctx, b)
		r.ok(res)
		require.Equal(t, driver.CaptureActive, status)
		require.Equal(t, id, other)
		r.ok(r.MemcpyDtoDAsync(r.ctx, p+1, p, 1, b)) // behind the memset
		r.ok(r.MemsetD8Async(r.ctx, p+2, 3, 1, a))
		r.ok(r.EventRecord(r.ctx, back, b))
		r.ok(r.StreamWaitEvent(r.ctx, a, back))
		r.ok(r.MemcpyDtoDAsync(r.ctx, p+3, p+1, 2, a)) // behind both
		e := r.end(a)
		status, _ = r.lib.StreamIsCapturing(r.ctx, b)
		require.Equal(t, driver.CaptureNone, status)
		r.ok(r.GraphLaunch(r.ctx, e, a))
		r.ok(r.StreamSynchronize(r.ctx, a))
		require.Equal(t, []byte{1, 1, 3, 1, 3}, r.bytes(p, 5))
		// The events stood for places in a capture that is over.
		r.is(driver.CapturedEvent, r.EventQuery(r.ctx, fork))
		r.is(driver.CapturedEvent, r.StreamWaitEvent(r.ctx, a, fork))
		r.ok(r.EventRecord(r.ctx, fork, a))
		r.ok(r.EventSynchronize(r.ctx, fork))
	}
}

func TestWhatRuinsACapture(t *testing.T) {
	for _, row := range []struct {
		what  string
		flags driver.StreamFlags
		do    func(r *rig, s driver.Stream) driver.Result
		call  driver.Result
		end   driver.Result
	}{
		{"nothing", 1, func(r *rig, s driver.Stream) driver.Result { return 0 }, driver.Success, driver.Success},
		{"query of the stream", 1, func(r *rig, s driver.Stream) driver.Result {
			return r.lib.StreamQuery(r.ctx, s)
		}, driver.CaptureUnsupported, driver.CaptureInvalid},
		{"synchronizing the stream", 1, func(r *rig, s driver.Stream) driver.Result {
			return r.lib.StreamSynchronize(r.ctx, s)
		}, driver.CaptureUnsupported, driver.CaptureInvalid},
		{"a captured event is queried", 1, func(r *rig, s driver.Stream) driver.Result {
			e := r.event()
			r.ok(r.EventRecord(r.ctx, e, s))
			return r.lib.EventQuery(r.ctx, e)
		}, driver.CapturedEvent, driver.CaptureInvalid},
		{"a captured event is waited for", 1, func(r *rig, s driver.Stream) driver.Result {
			e := r.event()
			r.ok(r.EventRecord(r.ctx, e, s))
			return r.lib.EventSynchronize(r.ctx, e)
		}, driver.CapturedEvent, driver.CaptureInvalid},
		{"a wait for work outside", 1, func(r *rig, s driver.Stream) driver.Result {
			e := r.event()
			r.ok(r.EventRecord(r.ctx, e, r.stream(1)))
			return r.lib.StreamWaitEvent(r.ctx, s, e)
		}, driver.CaptureIsolation, driver.CaptureInvalid},
		{"a wait for an event that was never recorded", 1, func(r *rig, s driver.Stream) driver.Result {
			return r.lib.StreamWaitEvent(r.ctx, s, r.event())
		}, driver.Success, driver.Success},
		{"the whole context is synchronized", 1, func(r *rig, s driver.Stream) driver.Result {
			return r.CtxSynchronize(r.ctx)
		}, driver.CaptureUnsupported, driver.CaptureInvalid},
		{"another context is synchronized", 1, func(r *rig, s driver.Stream) driver.Result {
			c, res := r.CtxCreate(0, 0)
			r.ok(res)
			defer func() { r.ok(r.CtxDestroy(c)) }()
			return r.CtxSynchronize(c)
		}, driver.Success, driver.Success},
		{"use of the legacy stream, non-blocking capture", 1, func(r *rig, s driver.Stream) driver.Result {
			return r.lib.MemsetD8Async(r.ctx, r.mapped(1), 1, 1, driver.StreamLegacy)
		}, driver.Success, driver.Success},
		{"use of the legacy stream, blocking capture", 0, func(r *rig, s driver.Stream) driver.Result {
			return r.lib.MemsetD8Async(r.ctx, r.mapped(1), 1, 1, driver.StreamLegacy)
		}, driver.CaptureImplicit, driver.CaptureInvalid},
		{"query of the legacy stream, blocking capture", 0, func(r *rig, s driver.Stream) driver.Result {
			return r.lib.StreamQuery(r.ctx, driver.StreamLegacy)
		}, driver.CaptureImplicit, driver.CaptureInvalid},
		{"is the legacy stream capturing, blocking capture", 0, func(r *rig, s driver.Stream) driver.Result {
			_, res := r.lib.StreamIsCapturing(r.ctx, driver.StreamLegacy)
			return res
		}, driver.CaptureImplicit, driver.Success},
		{"another stream is left outside", 1, func(r *rig, s driver.Stream) driver.Result {
			e, other := r.event(), r.stream(1)
			r.ok(r.EventRecord(r.ctx, e, s))
			r.ok(r.StreamWaitEvent(r.ctx, other, e))
			return r.lib.MemsetD8Async(r.ctx, r.mapped(1), 1, 1, other)
		}, driver.Success, driver.CaptureUnjoined},
		{"another stream joins without work", 1, func(r *rig, s driver.Stream) driver.Result {
			e, other := r.event(), r.stream(1)
			r.ok(r.EventRecord(r.ctx, e, s))
			return r.lib.StreamWaitEvent(r.ctx, other, e)
		}, driver.Success, driver.Success},
	} {
		t.Run(row.what, func(t *testing.T) {
			r := start(t, Options{})
			s := r.stream(row.flags)
			r.begin(s)
			r.is(row.call, row.do(r, s))
			if row.end == driver.Success {
				r.end(s)
				return
			}
			r.endsWith(row.end, s)
			r.ok(r.StreamSynchronize(r.ctx, s))
		})
	}
}

func TestInvalidatedCaptureRefusesWork(t *testing.T) {
	r := start(t, Options{})
	p, s, e := r.mapped(1), r.stream(1), r.event()
	r.begin(s)
	r.is(driver.CaptureUnsupported, r.StreamQuery(r.ctx, s))
	status, res := r.lib.StreamIsCapturing(r.ctx, s)
	r.ok(res)
	require.Equal(t, driver.CaptureInvalidated, status)
	r.is(driver.CaptureInvalid, r.MemsetD8Async(r.ctx, p, 1, 1, s))
	r.is(driver.CaptureInvalid, r.EventRecord(r.ctx, e, s))
	r.is(driver.CaptureInvalid, r.StreamWaitEvent(r.ctx, s, e))
	r.endsWith(driver.CaptureInvalid, s)
}

func TestTwoCapturesDoNotMerge(t *testing.T) {
	r := start(t, Options{})
	a, b, e := r.stream(1), r.stream(1), r.event()
	r.begin(a)
	r.begin(b)
	r.ok(r.EventRecord(r.ctx, e, a))
	r.is(driver.CaptureMerge, r.StreamWaitEvent(r.ctx, b, e))
	r.endsWith(driver.CaptureInvalid, a)
	r.endsWith(driver.CaptureInvalid, b)
}

func needThreads(t *testing.T) {
	if !osmem.Linux {
		t.Skip("threads are told apart on Linux, amd64 and arm64")
	}
}

func TestCaptureEndsOnItsThreadUnlessRelaxed(t *testing.T) {
	needThreads(t)
	r := start(t, Options{})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, mode := range []driver.CaptureMode{driver.CaptureGlobal, driver.CaptureThreadLocal} {
		s := r.stream(1)
		r.ok(r.lib.StreamBeginCapture(r.ctx, s, mode))
		result := make(chan driver.Result)
		go func() {
			runtime.LockOSThread() // another thread
			_, res := r.lib.StreamEndCapture(r.ctx, s)
			result <- res
		}()
		r.is(driver.CaptureWrongThread, <-result)
		_, res := r.lib.StreamEndCapture(r.ctx, s)
		r.is(driver.IllegalState, res)
	}
}

func TestThreadLocalModeSparesForeignCaptures(t *testing.T) {
	needThreads(t)
	// A thread in thread-local mode harms only captures of its own, even
	// global ones.
	r := start(t, Options{})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, e := r.stream(1), r.event()
	r.ok(r.lib.StreamBeginCapture(r.ctx, s, driver.CaptureGlobal))
	result := make(chan driver.Result)
	ask := func(mode driver.CaptureMode) {
		runtime.LockOSThread()
		_, res := r.ThreadExchangeStreamCaptureMode(mode)
		r.ok(res)
		result <- r.EventQuery(r.ctx, e)
	}
	go ask(driver.CaptureThreadLocal)
	r.ok(<-result)
	go ask(driver.CaptureRelaxed)
	r.ok(<-result)
	go ask(driver.CaptureGlobal)
	r.is(driver.CaptureUnsupported, <-result)
	_, res := r.ThreadExchangeStreamCaptureMode(9)
	r.is(driver.InvalidValue, res)
	r.endsWith(driver.CaptureInvalid, s)
}

func TestDestroyingACapturingStreamEndsItsCapture(t *testing.T) {
	r := start(t, Options{})
	s, res := r.StreamCreate(r.ctx, 1)
	r.ok(res)
	other, e := r.stream(1), r.event()
	r.begin(s)
	r.ok(r.EventRecord(r.ctx, e, s))
	r.ok(r.StreamWaitEvent(r.ctx, other, e))
	r.ok(r.StreamDestroy(r.ctx, s))
	status, res := r.lib.StreamIsCapturing(r.ctx, other)
	r.ok(res)
	require.Equal(t, driver.CaptureNone, status)
	r.ok(r.StreamSynchronize(r.ctx, other))
}

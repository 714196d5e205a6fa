package sim

import (
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

func needThreads(t *testing.T) {
	if !osmem.Linux {
		t.Skip("threads are told apart on Linux, amd64 and arm64")
	}
}

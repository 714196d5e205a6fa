package sim

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestEventsOrderStreams(t *testing.T) {
	for seed := range uint64(10) {
		r := start(t, Options{Seed: seed})
		p, e := r.mapped(1), r.event()
		a, b := r.stream(driver.StreamNonBlocking), r.stream(driver.StreamNonBlocking)
		r.ok(r.StreamWaitEvent(r.ctx, b, e)) // never recorded: no wait
		r.ok(r.EventSynchronize(r.ctx, e))
		r.ok(r.EventQuery(r.ctx, e))
		r.m.Hold(uintptr(a))
		r.ok(r.MemsetD8Async(r.ctx, p, 5, 4, a))
		r.ok(r.EventRecord(r.ctx, e, a))
		r.ok(r.StreamWaitEvent(r.ctx, b, e))
		r.ok(r.MemcpyDtoDAsync(r.ctx, p+4, p, 4, b))
		r.is(driver.NotReady, r.EventQuery(r.ctx, e))
		r.is(driver.NotReady, r.StreamQuery(r.ctx, b))
		r.m.Release(uintptr(a))
		r.ok(r.StreamSynchronize(r.ctx, b))
		r.ok(r.EventSynchronize(r.ctx, e))
		require.Equal(t, repeated(5, 8), r.bytes(p, 8))
	}
}

func TestWaitMeansTheRecordOfTheTime(t *testing.T) {
	r := start(t, Options{})
	e, a, b := r.event(), r.stream(driver.StreamNonBlocking), r.stream(driver.StreamNonBlocking)
	r.ok(r.EventRecord(r.ctx, e, a))
	r.ok(r.StreamWaitEvent(r.ctx, b, e))
	r.ok(r.StreamSynchronize(r.ctx, a))
	r.m.Hold(uintptr(a))
	r.ok(r.EventRecord(r.ctx, e, a)) // later: b has nothing to do with it
	r.ok(r.StreamSynchronize(r.ctx, b))
	r.is(driver.NotReady, r.EventQuery(r.ctx, e))
	r.m.Release(uintptr(a))
	r.ok(r.EventSynchronize(r.ctx, e))
}

func TestElapsedTime(t *testing.T) {
	r := start(t, Options{})
	from, to, s := r.event(), r.event(), r.stream(0)
	_, res := r.EventElapsedTime(r.ctx, from, to)
	r.is(driver.InvalidHandle, res)
	r.ok(r.EventRecord(r.ctx, from, s))
	r.ok(r.EventSynchronize(r.ctx, from))
	r.m.Hold(uintptr(s))
	r.ok(r.EventRecord(r.ctx, to, s))
	_, res = r.EventElapsedTime(r.ctx, from, to)
	r.is(driver.NotReady, res)
	time.Sleep(10 * time.Millisecond)
	r.m.Release(uintptr(s))
	r.ok(r.EventSynchronize(r.ctx, to))
	ms, res := r.EventElapsedTime(r.ctx, from, to)
	r.ok(res)
	require.GreaterOrEqual(t, ms, float32(10))

	untimed, res := r.EventCreate(r.ctx, driver.EventDisableTiming)
	r.ok(res)
	r.ok(r.EventRecord(r.ctx, untimed, s))
	_, res = r.EventElapsedTime(r.ctx, from, untimed)
	r.is(driver.InvalidHandle, res)
	r.ok(r.EventDestroy(r.ctx, untimed))
	_, res = r.EventCreate(r.ctx, 64)
	r.is(driver.InvalidValue, res)
}

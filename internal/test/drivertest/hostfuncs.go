package drivertest

import (
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// hostFuncs are the rules of functions that streams call.
var hostFuncs = []Case{
	{
		Name: "cuLaunchHostFunc behind work that runs, three times on one stream; then on the legacy stream",
		Says: "not called while the work runs, then in order, before the stream is done; called",
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			var order atomic.Uint64
			digit := func(n uint64) driver.HostFunc {
				return t.D.NewHostFunc(func() { order.Store(10*order.Load() + n) })
			}
			one, two, three := digit(1), digit(2), digit(3)
			h := t.hold(t.ctx, s)
			for i, f := range []driver.HostFunc{one, two, three} {
				t.ok(t.D.LaunchHostFunc(t.ctx, s, f), "launch %d", i)
			}
			time.Sleep(10 * time.Millisecond)
			if got := order.Load(); got != 0 {
				t.Errorf("%d were called before the work was done", got)
			}
			t.didNotWait(h, "launch of host functions")
			h.release()
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			for _, f := range []driver.HostFunc{three, one, two} {
				t.releasedHostFunc(f)
			}
			if got := order.Load(); got != 123 {
				t.Errorf("called in the order %d, want 123", got)
			}

			called := new(atomic.Int64)
			f := t.D.NewHostFunc(func() { called.Add(1) })
			t.ok(t.D.LaunchHostFunc(t.ctx, driver.StreamLegacy, f), "the legacy stream")
			t.ok(t.D.StreamSynchronize(t.ctx, driver.StreamLegacy), "synchronize")
			t.releasedHostFunc(f)
			if got := called.Load(); got != 1 {
				t.Errorf("called %d times on the legacy stream, want once", got)
			}
		},
	},
	{
		Name:  "cuLaunchHostFunc on a stream that captures, and the graph launched five times, on two streams",
		Says:  "not called by the capture; called once for each launch, before the launch is done",
		Needs: needs(graphs),
		Run: func(t *T) {
			var called atomic.Int64
			f := t.D.NewHostFunc(func() { called.Add(1) })
			s, other := t.newStream(t.ctx, driver.StreamNonBlocking), t.newStream(t.ctx, driver.StreamNonBlocking)
			exec := t.captured(s, func() driver.Result { return t.D.LaunchHostFunc(t.ctx, s, f) })
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			for range 4 {
				t.ok(t.D.GraphLaunch(t.ctx, exec, s), "launch")
			}
			t.ok(t.D.GraphLaunch(t.ctx, exec, other), "launch on another stream")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.ok(t.D.StreamSynchronize(t.ctx, other), "synchronize")
			t.releasedHostFunc(f)
			if got := called.Load(); got != 5 {
				t.Errorf("called %d times, want once for each of 5 launches", got)
			}
		},
	},
	{
		Name: "cuLaunchHostFunc ten thousand times without a wait",
		Says: "called ten thousand times",
		Run: func(t *T) {
			const launches = 10_000
			var called atomic.Int64
			f := t.D.NewHostFunc(func() { called.Add(1) })
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			began := time.Now()
			for range launches {
				if r := t.D.LaunchHostFunc(t.ctx, s, f); r != driver.Success {
					t.ok(r, "launch")
				}
			}
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.releasedHostFunc(f)
			t.Logf("%v for each", time.Since(began)/launches)
			if got := called.Load(); got != launches {
				t.Errorf("called %d times, want %d", got, launches)
			}
		},
	},
}

// releasedHostFunc releases a function whose launches have passed, and waits until it
// was called for all of them.
func (t *T) releasedHostFunc(f driver.HostFunc) {
	t.Helper()
	released := make(chan struct{})
	t.D.ReleaseHostFunc(f, func() { close(released) })
	select {
	case <-released:
	case <-time.After(time.Minute):
		t.Fatal("the function was not released")
	}
}

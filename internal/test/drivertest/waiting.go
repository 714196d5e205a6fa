package drivertest

import (
	"fmt"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// A way is a means of waiting for running work, as the library may use it: the
// waiting thread is switched to relaxed.
type way struct {
	name string
	// prepare readies it before anything runs; wait then waits, with the given
	// stream as the one that is named where the way names one.
	prepare func(t *T, s driver.Stream) (wait func() driver.Result)
	covers  reach
	// stalls says that launches of other threads into the context wait too.
	stalls bool
	// kills says what it does to a capture of a non-blocking and of a blocking
	// stream.
	kills, killsBlocking bool
}

type reach int

const (
	wholeContext reach = iota
	namedStream
	blockingStreams
)

func (r reach) String() string {
	return [...]string{"the context's whole work", "that stream", "blocking streams only"}[r]
}

var ways = []way{
	{
		name: "cuMemFree of 256 bytes of cuMemAlloc", covers: wholeContext, stalls: true,
		prepare: func(t *T, _ driver.Stream) func() driver.Result {
			p, r := t.D.MemAlloc(t.ctx, 256)
			t.ok(r, "cuMemAlloc")
			return func() driver.Result { return t.D.MemFree(t.ctx, p) }
		},
	},
	{
		name: "cuMemFree of managed memory", covers: wholeContext, stalls: true,
		prepare: func(t *T, _ driver.Stream) func() driver.Result {
			p, r := t.D.MemAllocManaged(t.ctx, mib, driver.AttachGlobal)
			t.ok(r, "cuMemAllocManaged")
			return func() driver.Result { return t.D.MemFree(t.ctx, p) }
		},
	},
	{
		name: "cuMemFreeHost", covers: wholeContext, stalls: true,
		prepare: func(t *T, _ driver.Stream) func() driver.Result {
			p, r := t.D.MemHostAlloc(t.ctx, pageSize, driver.HostAllocPortable)
			t.ok(r, "cuMemHostAlloc")
			return func() driver.Result { return t.D.MemFreeHost(t.ctx, p) }
		},
	},
	{
		name: "cuMemHostUnregister of a page", covers: wholeContext, stalls: true,
		prepare: func(t *T, _ driver.Stream) func() driver.Result {
			p := t.pageable(pageSize)
			t.ok(t.D.MemHostRegister(t.ctx, p, pageSize, driver.HostRegisterPortable), "register")
			return func() driver.Result { return t.D.MemHostUnregister(t.ctx, p) }
		},
	},
	{
		name: "cuCtxSynchronize", covers: wholeContext, kills: true, killsBlocking: true,
		prepare: func(t *T, _ driver.Stream) func() driver.Result {
			th := t.thread()
			return func() (r driver.Result) {
				th.do(func() {
					before, _ := t.F.ThreadExchangeStreamCaptureMode(driver.CaptureRelaxed)
					r = t.F.CtxSynchronize(t.ctx)
					_, _ = t.F.ThreadExchangeStreamCaptureMode(before)
				})
				return r
			}
		},
	},
	{
		name: "cuStreamSynchronize", covers: namedStream,
		prepare: func(t *T, s driver.Stream) func() driver.Result {
			return func() driver.Result { return t.D.StreamSynchronize(t.ctx, s) }
		},
	},
	{
		name: "event record and cuEventSynchronize", covers: namedStream,
		prepare: func(t *T, s driver.Stream) func() driver.Result {
			e := t.newEvent(t.ctx)
			return func() driver.Result {
				if r := t.D.EventRecord(t.ctx, e, s); r != driver.Success {
					return r
				}
				return t.D.EventSynchronize(t.ctx, e)
			}
		},
	},
	{
		name: "event record and poll", covers: namedStream,
		prepare: func(t *T, s driver.Stream) func() driver.Result { return t.poll(s) },
	},
	{
		name: "event record on the legacy stream and poll", covers: blockingStreams, killsBlocking: true,
		prepare: func(t *T, _ driver.Stream) func() driver.Result { return t.poll(driver.StreamLegacy) },
	},
}

func (t *T) poll(s driver.Stream) func() driver.Result {
	t.Helper()
	e := t.newEvent(t.ctx)
	return func() driver.Result {
		r := t.D.EventRecord(t.ctx, e, s)
		for r == driver.Success {
			if r = t.D.EventQuery(t.ctx, e); r != driver.NotReady {
				return r
			}
			r = driver.Success
			time.Sleep(time.Millisecond)
		}
		return r
	}
}

// waiting are the rules of the ways to wait.
func waiting() (cases []Case) {
	for _, w := range ways {
		launches := "unharmed"
		if w.stalls {
			launches = "stall for the whole wait"
		}
		cases = append(cases,
			Case{
				Name: w.name + ": what it waits for",
				Says: w.covers.String(),
				Run:  func(t *T) { t.waitCovers(w) },
			},
			Case{
				Name: w.name + ": launches of other threads into the same context meanwhile",
				Says: launches,
				Run:  func(t *T) { t.waitStalls(w) },
			},
			Case{
				Name: w.name + ": a running capture of a non-blocking stream",
				Says: livesOrKilled(w.kills),
				Run:  func(t *T) { t.waitKills(w, driver.StreamNonBlocking, w.kills) },
			},
			Case{
				Name: w.name + ": a running capture of a blocking stream",
				Says: livesOrKilled(w.killsBlocking),
				Run:  func(t *T) { t.waitKills(w, driver.StreamDefault, w.killsBlocking) },
			},
		)
	}
	return cases
}

func livesOrKilled(kills bool) string {
	if kills {
		return "killed"
	}
	return "lives"
}

// waitCovers holds one stream after the other and sees whether the way waits.
func (t *T) waitCovers(w way) {
	named := t.newStream(t.ctx, driver.StreamNonBlocking)
	for _, other := range []struct {
		name   string
		ctx    driver.Context
		stream driver.Stream
		waits  []reach
	}{
		{"the named stream", t.ctx, named, []reach{wholeContext, namedStream}},
		{"another non-blocking stream", t.ctx, t.newStream(t.ctx, driver.StreamNonBlocking), []reach{wholeContext}},
		{"a blocking stream", t.ctx, t.newStream(t.ctx, driver.StreamDefault), []reach{wholeContext, blockingStreams}},
	} {
		what := fmt.Sprintf("%s, while %s is held,", w.name, other.name)
		wait := w.prepare(t, named)
		h := t.hold(other.ctx, other.stream)
		if slices.Contains(other.waits, w.covers) {
			t.waitsFor(h, what, wait)
			continue
		}
		t.ok(wait(), "%s", what)
		t.didNotWait(h, what)
		h.release()
		t.ok(t.D.StreamSynchronize(other.ctx, other.stream), "synchronize")
	}
}

// waitStalls submits work to another stream of the context while the way waits.
func (t *T) waitStalls(w way) {
	named := t.newStream(t.ctx, driver.StreamNonBlocking)
	// The stream that the way waits for must be one that it covers.
	target := named
	if w.covers == blockingStreams {
		target = t.newStream(t.ctx, driver.StreamDefault)
	}
	wait := w.prepare(t, named)
	h := t.hold(t.ctx, target)
	waited := make(chan driver.Result, 1)
	go func() { waited <- wait() }()
	time.Sleep(t.glance())
	if len(waited) > 0 {
		t.Fatalf("%s did not wait: %v", w.name, <-waited)
	}
	launch := func() driver.Result { return t.kernels.launchNothing(t.D, t.ctx, t.stream) }
	if w.stalls {
		t.waitsFor(h, "a launch on another stream", launch)
	} else {
		t.ok(launch(), "a launch on another stream")
		t.didNotWait(h, "a launch on another stream")
		h.release()
	}
	t.ok(<-waited, "%s", w.name)
	t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
}

// waitKills waits while a stream captures, from another thread.
func (t *T) waitKills(w way, flags driver.StreamFlags, kills bool) {
	s := t.newStream(t.ctx, flags)
	wait := w.prepare(t, t.stream)
	end := t.capture(t.thread(), s, driver.CaptureGlobal, func() { _ = wait() })
	want := driver.Success
	if kills {
		want = driver.CaptureInvalid
	}
	t.returns(want, end, "end capture")
}

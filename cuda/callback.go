package cuda

import (
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Callback calls f once the work that is on the stream now is done, with a nil error.
// It returns at once. If Callback returns an error, f is not called.
//
// f runs on a goroutine of its own, not on the driver's thread, so it may call
// everything in this library but System.Drain, which waits for f. An allocation in f that
// finds no memory counts f among what may free some, so it waits for all of
// Options.AllocationWait before it is refused. The functions of one
// stream are called one after the other, in order; those of different streams run
// concurrently. Later work of the stream does not wait for f: to have it wait, submit
// it in f. A panic of f is logged.
//
// If the context is lost before the stream comes to f, f is called with ErrDeviceLost:
// what it gives back is given back all the same.
//
// In a capture that WithCapture began, on whichever stream takes part, f belongs to the
// graph, and is called for each launch that comes to it, in the order of the launches;
// a launch in a lost context does not call it. In a capture that another library began
// Callback returns ErrCapturing.
//
// Close of the stream or the graph does not wait for f. System.Drain does, and until
// all functions have returned System.Close returns ErrInUse.
func (s *Stream) Callback(f func(err error)) error {
	const op = "cuda.Stream.Callback"
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	if f == nil {
		return errs.Invalid(op, "no function", "pass the function to call")
	}
	s.sys().PollReclaim()
	for {
		capturing, r := s.in.Capturing()
		if r != driver.Success {
			return s.result(op, driver.CallStreamIsCapturing, r)
		}
		if !capturing {
			return s.in.Uncaptured(op, func() error { return s.callOnce(op, f) })
		}
		c, err := s.capture(op, "capture with Stream.WithCapture, whose graph keeps the function")
		if err != nil {
			return err
		}
		if taken, err := c.callback(op, s, f); taken || err != nil {
			return err
		}
	}
}

// calls are functions that are called one after the other, on a goroutine that exists
// while there are any.
type calls struct {
	sys *core.System

	mu      lock.Mutex[lock.Leaf]
	waiting []func()
	running bool
}

// add has f called behind what was added before. Drain waits for it.
func (c *calls) add(f func()) {
	done := c.sys.Pending()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = append(c.waiting, func() {
		defer done()
		c.sys.Hook("Stream.Callback", f)
	})
	if !c.running {
		c.running = true
		go c.run()
	}
}

func (c *calls) run() {
	for {
		c.mu.Lock()
		if len(c.waiting) == 0 {
			c.waiting, c.running = nil, false
			c.mu.Unlock()
			return
		}
		next := c.waiting[0]
		c.waiting[0] = nil
		c.waiting = c.waiting[1:]
		c.mu.Unlock()
		next()
	}
}

// callOnce puts one call of f on the stream. The reclaimer ends it: when the mark
// behind the call has passed, either the driver has called, or the context is lost.
func (s *Stream) callOnce(op string, f func(error)) error {
	sys, ctx := s.sys(), s.in.Ctx
	var called atomic.Bool
	call := func(err error) {
		if called.CompareAndSwap(false, true) {
			s.calls.add(func() { f(err) })
		}
	}
	h := sys.Drv.NewHostFunc(func() { call(nil) })
	if r := sys.Drv.LaunchHostFunc(ctx.Handle, s.in.Handle, h); r != driver.Success {
		sys.Drv.ReleaseHostFunc(h, func() {})
		return s.result(op, driver.CallLaunchHostFunc, r)
	}
	m, capturing, err := s.in.Mark(op)
	if capturing && !called.CompareAndSwap(false, true) { // the call came before the capture
		sys.Drv.ReleaseHostFunc(h, sys.Pending())
		return nil
	}
	if capturing { // another library's: the call may be in that graph, for as long as that lives
		return errs.New(errs.Failure{Op: op, Kind: errs.Capturing,
			Asked: fmt.Sprintf("a capture began on stream %#x, which may have taken the function", s.handle()),
			Hint:  "throw the graph away, and let one goroutine at a time use a stream that is to capture"})
	}
	fence := new(core.Fence)
	if err != nil { // the call is on the stream all the same
		fence.AddAllStreams()
	} else {
		fence.Add(m)
	}
	sys.Reclaim(fence, nil, func() error {
		released := sys.Pending()
		sys.Drv.ReleaseHostFunc(h, func() {
			defer released()
			lost := ctx.Lost()
			if lost == driver.Success {
				lost = driver.InvalidContext // it was destroyed with the work in it
			}
			if !called.Load() {
				call(ctx.CallError(op, driver.CallLaunchHostFunc, lost, "the work before the function"))
			}
		})
		return nil
	})
	return nil
}

// callback puts a call of f into the graph that is captured, on a stream that takes
// part. If the capture has ended meanwhile nothing was taken.
func (c *capture) callback(op string, s *Stream, f func(error)) (taken bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false, nil
	}
	if c.staged.calls == nil {
		c.staged.calls = &calls{sys: c.sys.core}
	}
	on, drv, queue := s.in, c.sys.core.Drv, c.staged.calls
	var state atomic.Int32
	const undecided, accepted, refused = 0, 1, 2
	h := drv.NewHostFunc(func() {
		if state.CompareAndSwap(undecided, accepted) || state.Load() == accepted {
			queue.add(func() { f(nil) })
		}
	})
	if r := drv.LaunchHostFunc(on.Ctx.Handle, on.Handle, h); r != driver.Success {
		drv.ReleaseHostFunc(h, func() {})
		return false, s.result(op, driver.CallLaunchHostFunc, r)
	}
	c.staged.functions = append(c.staged.functions, h)
	err = c.checkStrayed(op, on, "a callback")
	if err != nil && state.CompareAndSwap(undecided, refused) {
		return true, err
	}
	state.CompareAndSwap(undecided, accepted)
	return true, nil // even if it strayed: then it was called
}

package core

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// sentinelBytes is the size of the block whose free waits for a context's work. The
// driver waits for any size.
const sentinelBytes = 256

// idleEvents is how many events a context keeps for reuse.
const idleEvents = 64

// Context is a driver context that the System knows: a device's primary
// context, or one that the caller brought. It is never destroyed here; the
// primary ones are released when the System closes.
type Context struct {
	sys    *System
	Handle driver.Context
	Device driver.Device
	// retained is how often it was retained as the device's primary context,
	// guarded by System.mu.
	retained int
	// users is how often the context was made known, guarded by System.mu. A context
	// without users is forgotten, unless it is a primary one.
	users int
	lost  atomic.Int32 // the result that lost it; see Observe
	// life is held over every driver call that names the context, or an event of
	// it, for a caller that holds none of its streams. Once it is closed the
	// streams were waited for, and the owner may have destroyed the context.
	life life.Life
	// AddressGranularity is what address ranges on the device are multiples of; 0 until the
	// first query.
	AddressGranularity atomic.Uint64

	// blockMu is held over the free of the sentinel, which waits.
	blockMu lock.Mutex[lock.Block]
	block   driver.Ptr
	// hostBlock is a block that replaced the sentinel and that the driver did not free.
	hostBlock unsafe.Pointer

	mu      lock.Mutex[lock.Leaf]
	streams map[*Stream]struct{}
	busy    map[*Stream]struct{}      // those that may have work; see Stream.touch
	events  []driver.Event            // that are idle
	made    map[driver.Event]struct{} // all that were not destroyed
}

// AddContext makes a context known. The same handle twice is one Context. A
// primary context, which the caller has retained, is released as often when the
// System closes.
func (s *System) AddContext(h driver.Context, d driver.Device, primary bool) *Context {
	c, isNew := s.knowContext(h, d, primary)
	if isNew && !s.Config.NamedStreamsOnly {
		c.blockMu.Lock()
		defer c.blockMu.Unlock()
		if c.block == 0 {
			// Taken now, since later there may be no memory left. Where there
			// is none already, waitWork tries again.
			c.block, _ = s.Drv.MemAlloc(h, sentinelBytes)
		}
	}
	return c
}

func (s *System) knowContext(h driver.Context, d driver.Device, primary bool) (c *Context, isNew bool) {
	retained := 0
	if primary {
		retained = 1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.knownContexts() {
		if c.Handle == h {
			c.users++
			c.retained += retained
			return c, false
		}
	}
	c = &Context{sys: s, Handle: h, Device: d, retained: retained, users: 1,
		streams: map[*Stream]struct{}{}, busy: map[*Stream]struct{}{}, made: map[driver.Event]struct{}{}}
	s.setContexts(append(slices.Clone(s.knownContexts()), c))
	return c, true
}

// CallError makes the error of a driver call that failed and named the context.
func (c *Context) CallError(op string, call driver.Call, r driver.Result, asked string) error {
	c.Observe(r)
	f := errs.Failure{Op: op, Call: call, Result: r, Logged: c.sys.logOf(call, r), Asked: asked}
	if r.Lost() {
		f.Err = c.culprit()
	}
	return errs.New(f)
}

// System returns the context's system.
func (c *Context) System() *System { return c.sys }

// WaitDevices waits for all work that could touch memory which the devices
// were granted, as far as contexts are known. It harms no capture.
func (s *System) WaitDevices(op string, devices []driver.Device) error {
	if err := s.meet(op, devices); err != nil {
		return err
	}
	for _, c := range s.knownContexts() {
		if !slices.Contains(devices, c.Device) {
			continue
		}
		if err := c.waitWork(op); err != nil {
			return err
		}
	}
	return nil
}

// AwaitDevices is WaitDevices until a context ends. The wait goes on then, and Drain waits for
// it: it must use nothing of the caller.
func (s *System) AwaitDevices(ctx context.Context, op string, devices []driver.Device) error {
	if ctx.Done() == nil {
		return s.WaitDevices(op, devices)
	}
	passed := make(chan error, 1)
	s.Go(func() { passed <- s.WaitDevices(op, devices) })
	select {
	case err := <-passed:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: waiting for work of the GPU: %w", op, context.Cause(ctx))
	}
}

// WaitAll is WaitDevices for all devices.
func (s *System) WaitAll(op string) error {
	if err := s.meet(op, s.Devices); err != nil {
		return err
	}
	for _, c := range s.knownContexts() {
		if err := c.waitWork(op); err != nil {
			return err
		}
	}
	return nil
}

// meet finds primary contexts of devices that other libraries have made, and that may
// have work on memory which the devices were granted. It makes none: in a context that
// does not exist nothing runs.
func (s *System) meet(op string, devices []driver.Device) error {
	if s.Config.NamedStreamsOnly {
		return nil // all work is on streams of known contexts
	}
	for _, d := range devices {
		if s.hasPrimary(d) || s.losses.of(d) != driver.Success {
			continue
		}
		_, active, r := s.Drv.DevicePrimaryCtxGetState(d)
		if r != driver.Success {
			return s.CallError(op, driver.CallDevicePrimaryCtxGetState, r, fmt.Sprintf("device %d", d), d)
		}
		if !active {
			continue
		}
		h, r := s.Drv.DevicePrimaryCtxRetain(d)
		if r != driver.Success {
			return s.CallError(op, driver.CallDevicePrimaryCtxRetain, r, fmt.Sprintf("retain the primary context of device %d", d), d)
		}
		s.AddContext(h, d, true)
	}
	return nil
}

func (s *System) hasPrimary(d driver.Device) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.knownContexts(), func(c *Context) bool { return c.Device == d && c.retained > 0 })
}

// knownContexts are never changed in place.
func (s *System) knownContexts() []*Context {
	if all := s.contexts.Load(); all != nil {
		return *all
	}
	return nil
}

func (s *System) setContexts(all []*Context) { s.contexts.Store(&all) }

// Release takes back what AddContext made known. The last one forgets the
// context, which its owner may destroy from then on; a primary one stays until
// the System closes.
func (c *Context) Release() {
	s := c.sys
	s.mu.Lock()
	c.users--
	forget := c.users == 0 && c.retained == 0
	if forget {
		s.setContexts(slices.DeleteFunc(slices.Clone(s.knownContexts()), func(o *Context) bool { return o == c }))
	}
	s.mu.Unlock()
	if !forget {
		return
	}
	if call, r := c.close(); r != driver.Success {
		// No later call may name the context, since its owner destroys it next.
		s.Config.Log.Warn("cuvmm: an event or a block stays in a context until its owner destroys it",
			"error", c.CallError("cuda: leave a context", call, r, ""))
	}
}

// waitWork waits for the known streams by their events, and then, for work on
// streams that were not named, by freeing the sentinel block: measured, that
// free waits for the context's whole work and harms no capture, but it stalls
// other threads' launches meanwhile, so it comes last, when usually nothing is
// left to wait for.
func (c *Context) waitWork(op string) error {
	s := c.sys
	if c.Lost() != driver.Success {
		return nil
	}
	waited := true
	for _, st := range c.busyStreams() {
		one, err := st.wait(op)
		if c.Lost() != driver.Success {
			return nil // nothing runs any more
		}
		if err != nil {
			return err
		}
		waited = waited && one
	}
	if s.Config.NamedStreamsOnly && waited || c.Lost() != driver.Success {
		return nil
	}
	if !c.life.Acquire() {
		return nil // its streams were waited for
	}
	defer c.life.Release()
	c.blockMu.Lock()
	defer c.blockMu.Unlock()
	if c.block == 0 {
		b, r := s.Drv.MemAlloc(c.Handle, sentinelBytes)
		if r == driver.OutOfMemory {
			// Giving memory back must not need any. Pinned host memory waits
			// for the same work.
			if r = driver.Success; c.hostBlock == nil {
				c.hostBlock, r = s.Drv.MemHostAlloc(c.Handle, sentinelBytes, driver.HostAllocPortable)
			}
			if r == driver.Success {
				r = s.Drv.MemFreeHost(c.Handle, c.hostBlock)
			}
			if r == driver.Success {
				c.hostBlock = nil
				return nil
			}
		}
		if c.Observe(r).Lost() {
			return nil
		}
		if r != driver.Success {
			return errs.New(errs.Failure{Op: op, Call: driver.CallMemAlloc, Result: r,
				Asked: "a 256-byte block to wait for the context's work by",
				Hint:  "name the streams with CloseAfter, or free device memory"})
		}
		c.block = b
	}
	if r := c.Observe(s.Drv.MemFree(c.Handle, c.block)); r != driver.Success && !r.Lost() {
		return c.CallError(op, driver.CallMemFree, r, "wait for the context's work")
	}
	c.block, _ = s.Drv.MemAlloc(c.Handle, sentinelBytes)
	return nil
}

func (c *Context) knownStreams() []*Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.streams))
}

// busyStreams returns the streams that may have work of this library and, if the caller
// promised to name all others, the streams on which other libraries may work, too.
func (c *Context) busyStreams() []*Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.busy))
}

// Event returns an event without timing, an idle one if there is one. The caller returns it
// with Recycle or Destroy.
func (c *Context) Event() (driver.Event, driver.Result) {
	c.mu.Lock()
	if n := len(c.events); n > 0 {
		e := c.events[n-1]
		c.events = c.events[:n-1]
		c.mu.Unlock()
		return e, driver.Success
	}
	c.mu.Unlock()
	e, r := c.sys.Drv.EventCreate(c.Handle, driver.EventDisableTiming)
	if r == driver.Success {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.made[e] = struct{}{}
	}
	return e, r
}

// Recycle takes back an event that has passed. One that was recorded into a
// capture must be destroyed instead.
func (c *Context) Recycle(e driver.Event) {
	c.mu.Lock()
	if len(c.events) < idleEvents {
		c.events = append(c.events, e)
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	c.Destroy(e)
}

// Destroy ends an event. One that the driver does not destroy is a leftover.
func (c *Context) Destroy(e driver.Event) {
	destroy := func() error {
		if r := c.TeardownUnlessGone(func() driver.Result { return c.sys.Drv.EventDestroy(c.Handle, e) }); r != driver.Success {
			return c.CallError("cuda: destroy an event", driver.CallEventDestroy, r, "")
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.made, e)
		return nil
	}
	if err := destroy(); err != nil {
		c.sys.Left("event", 0, c.Device, err, destroy)
	}
}

// close waits for the calls that use the context, which are short once its
// streams were waited for, and releases what it holds. After an error it can be called
// again.
func (c *Context) close() (driver.Call, driver.Result) {
	c.life.Close()
	c.life.Wait()
	d := c.sys.Drv
	c.mu.Lock()
	events := slices.Collect(maps.Keys(c.made)) // marks that are still held have passed
	c.mu.Unlock()
	for _, e := range events {
		if r := c.Teardown(func() driver.Result { return d.EventDestroy(c.Handle, e) }); r != driver.Success {
			return driver.CallEventDestroy, r
		}
		c.mu.Lock()
		delete(c.made, e)
		c.mu.Unlock()
	}
	if c.block != 0 {
		if r := c.Teardown(func() driver.Result { return d.MemFree(c.Handle, c.block) }); r != driver.Success {
			return driver.CallMemFree, r
		}
		c.block = 0
	}
	if c.hostBlock != nil {
		if r := c.Teardown(func() driver.Result { return d.MemFreeHost(c.Handle, c.hostBlock) }); r != driver.Success {
			return driver.CallMemFreeHost, r
		}
		c.hostBlock = nil
	}
	for ; c.retained > 0; c.retained-- {
		release := func() driver.Result { return d.DevicePrimaryCtxRelease(c.Device) }
		if r := c.Teardown(release); r != driver.Success {
			return driver.CallDevicePrimaryCtxRelease, r
		}
	}
	return driver.CallDevicePrimaryCtxRelease, driver.Success
}

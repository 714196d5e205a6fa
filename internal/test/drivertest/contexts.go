package drivertest

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// contexts are the rules of contexts and threads.
var contexts = []Case{
	{
		Name: "every VMM call on a thread without a current context, even before the process has any context",
		Says: "success",
		Run: func(t *T) {
			var before, after driver.Context
			var steps []step
			t.thread().do(func() {
				before, _ = t.F.CtxGetCurrent()
				steps = cycle(library{t.D, t.F}, t.Device)
				after, _ = t.F.CtxGetCurrent()
			})
			if before != 0 || after != 0 {
				t.Errorf("the thread's context is %#x before and %#x after, want none", before, after)
			}
			t.steps("thread without a context", steps)

			c := t.child("cycle without a context")
			c.Start()
			var found []step
			c.Recv(&found)
			c.Wait()
			t.steps("process without a context", found)
		},
	},
	{
		Name: "cuMemAlloc without a current context",
		Says: "INVALID_CONTEXT",
		Run: func(t *T) {
			var r driver.Result
			t.thread().do(func() { _, r = t.D.MemAlloc(0, 256) })
			t.returns(driver.InvalidContext, r, "cuMemAlloc")
		},
	},
	{
		Name: "VMM memory used from two contexts of one device",
		Says: "works in both",
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			other := t.device
			other.ctx = t.newContext()
			other.stream = t.newStream(other.ctx, driver.StreamNonBlocking)
			t.works(t.device, p, t.chunk)
			t.works(other, p, t.chunk)
			t.fill(t.device, p, t.chunk, 0x61)
			t.reads(other, p, t.chunk, 0x61)
		},
	},
	{
		Name: "a second context on a device",
		Says: "takes memory of the device, 527 MiB on an H200",
		Run: func(t *T) {
			before := t.free(t.device)
			t.newContext()
			taken := before - t.free(t.device)
			t.Logf("a context takes %d bytes", taken)
			if want := t.env.Machine.ContextBytes; (want != 0 || t.software) && taken != want {
				t.Errorf("a context takes %d bytes, want %d", taken, want)
			} else if !t.software && (taken == 0 || taken > before) {
				t.Errorf("a context takes %d of %d bytes", int64(taken), before)
			}
		},
	},
	{
		Name: "cuCtxSynchronize while another context of the device has work",
		Says: "covers its own context only: it does not wait",
		Run: func(t *T) {
			other := t.newContext()
			s := t.newStream(other, driver.StreamNonBlocking)
			h := t.hold(other, s)
			t.ok(t.F.CtxSynchronize(t.ctx), "cuCtxSynchronize")
			t.didNotWait(h, "cuCtxSynchronize of the other context")
			t.waitsFor(h, "cuCtxSynchronize of the context itself", func() driver.Result { return t.F.CtxSynchronize(other) })
		},
	},
	{
		Name: "recording an event of one context on a stream of another",
		Says: "INVALID_HANDLE; an event of the stream's own context works, and is queried from anywhere",
		Run: func(t *T) {
			other := t.newContext()
			s := t.newStream(other, driver.StreamNonBlocking)
			t.returns(driver.InvalidHandle, t.D.EventRecord(t.ctx, t.newEvent(t.ctx), s), "record an event of the first context")
			t.returns(driver.InvalidHandle, t.D.EventRecord(other, t.newEvent(t.ctx), s), "the same with the stream's context current")

			owner, r := t.D.StreamGetCtx(t.ctx, s)
			t.ok(r, "the stream's context")
			if owner != other {
				t.Fatalf("the stream's context reads %#x, want %#x", owner, other)
			}
			e := t.newEvent(owner)
			t.ok(t.D.EventRecord(owner, e, s), "record an event of the stream's context")
			t.ok(t.D.StreamSynchronize(owner, s), "synchronize")
			var here, there, elsewhere, nowhere driver.Result
			here, there = t.D.EventQuery(owner, e), t.D.EventQuery(t.ctx, e)
			t.thread().do(func() { elsewhere, nowhere = t.D.EventQuery(t.ctx, e), t.D.EventQuery(0, e) })
			t.ok(here, "query in its own context")
			t.ok(there, "query in the other context")
			t.ok(elsewhere, "query on another thread")
			// The library always names a context, so this is only logged.
			t.Logf("query on a thread without a context: %v", nowhere)
		},
	},
	{
		Name:  "CU_STREAM_PER_THREAD",
		Says:  "names another stream on every thread",
		Needs: needs(entryPoints(driver.CallStreamGetID)),
		Run: func(t *T) {
			var ids [2]uint64
			var results [2]driver.Result
			for i := range ids {
				t.thread().do(func() { ids[i], results[i] = t.F.StreamGetID(t.ctx, driver.StreamPerThread) })
			}
			t.ok(results[0], "stream id on the first thread")
			t.ok(results[1], "stream id on the second thread")
			if ids[0] == ids[1] {
				t.Errorf("both threads read stream id %d", ids[0])
			}
		},
	},
}

// step is one driver call of a cycle and what came of it.
type step struct {
	Call string
	Text string
	OK   bool
}

func (t *T) steps(where string, steps []step) {
	t.Helper()
	for _, s := range steps {
		if !s.OK {
			t.Errorf("%s: %s: %s", where, s.Call, s.Text)
		}
	}
}

// cycle makes every VMM call once and leaves nothing behind.
func cycle(d driver.Foreign, dev driver.Device) (steps []step) {
	note := func(c driver.Call, r driver.Result) bool {
		steps = append(steps, step{c.String(), r.String(), r == driver.Success})
		return r == driver.Success
	}
	prop := onDevice(dev)
	fd, r := d.DeviceGetAttribute(driver.AttrHandlePosixFD, dev)
	if !note(driver.CallDeviceGetAttribute, r) {
		return steps
	}
	if fd != 0 {
		prop = shared(prop, driver.HandlePosixFD)
	}
	size, r := d.MemGetAllocationGranularity(prop, driver.GranularityMinimum)
	if !note(driver.CallMemGetAllocationGranularity, r) {
		return steps
	}
	h, r := d.MemCreate(size, prop)
	if !note(driver.CallMemCreate, r) {
		return steps
	}
	p, r := d.MemAddressReserve(size, 0, 0)
	if !note(driver.CallMemAddressReserve, r) {
		return steps
	}
	note(driver.CallMemMap, d.MemMap(p, size, 0, h))
	note(driver.CallMemSetAccess, d.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(dev))))
	_, r = d.MemGetAccess(deviceLocation(dev), p)
	note(driver.CallMemGetAccess, r)
	_, r = d.MemGetAllocationPropertiesFromHandle(h)
	note(driver.CallMemGetAllocationPropertiesFromHandle, r)
	if again, r := d.MemRetainAllocationHandle(p); note(driver.CallMemRetainAllocationHandle, r) {
		note(driver.CallMemRelease, d.MemRelease(again))
	}
	if fd != 0 {
		if s, r := d.MemExportToShareableHandle(h, driver.HandlePosixFD); note(driver.CallMemExportToShareableHandle, r) {
			if i, r := d.MemImportFromShareableHandle(s, driver.HandlePosixFD); note(driver.CallMemImportFromShareableHandle, r) {
				note(driver.CallMemRelease, d.MemRelease(i))
			}
			if err := closeDescriptor(toFD(s)); err != nil {
				steps = append(steps, step{Call: "close", Text: err.Error()})
			}
		}
	}
	note(driver.CallMemUnmap, d.MemUnmap(p, size))
	note(driver.CallMemRelease, d.MemRelease(h))
	note(driver.CallMemAddressFree, d.MemAddressFree(p, size))
	return steps
}

func init() {
	roles["cycle without a context"] = func(c *child) {
		dev, r := c.d.DeviceGet(0)
		c.ok(r, "cuDeviceGet")
		none := func(when string) {
			_, active, r := c.d.Foreign().DevicePrimaryCtxGetState(dev)
			c.ok(r, "cuDevicePrimaryCtxGetState")
			if active {
				c.check(fmt.Errorf("child: the device has a primary context %s", when))
			}
			current, r := c.d.Foreign().CtxGetCurrent()
			c.ok(r, "cuCtxGetCurrent")
			if current != 0 {
				c.check(fmt.Errorf("child: the thread has a context %s", when))
			}
		}
		none("before the cycle")
		steps := cycle(library{c.d, c.d.Foreign()}, dev)
		none("after the cycle")
		c.send(steps)
	}
}

package drivertest

import (
	"bytes"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// captureEnds are the rules of how a capture ends and what may join it.
var captureEnds = []Case{
	{
		Name: "end-capture from another thread than the one that began it, in global and thread-local mode",
		Says: "STREAM_CAPTURE_WRONG_THREAD (908), and the capture is over: to end it from its own thread returns ILLEGAL_STATE",
		Run: func(t *T) {
			for _, mode := range []driver.CaptureMode{driver.CaptureGlobal, driver.CaptureThreadLocal} {
				s := t.newStream(t.ctx, driver.StreamNonBlocking)
				var other driver.Result
				end := t.capture(t.thread(), s, mode, func() {
					t.thread().do(func() { _, other = t.F.StreamEndCapture(t.ctx, s) })
				})
				t.returns(driver.CaptureWrongThread, other, "end from another thread, mode %v", mode)
				t.returns(driver.IllegalState, end, "end from its own thread, mode %v", mode)
				status, r := t.D.StreamIsCapturing(t.ctx, s)
				t.ok(r, "is-capturing")
				if status != driver.CaptureNone {
					t.Errorf("the stream reads capture status %v, want none", status)
				}
			}
		},
	},
	{
		Name: "end-capture from another thread, in relaxed mode",
		Says: "success",
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.ok(t.D.StreamBeginCapture(t.ctx, s, driver.CaptureRelaxed), "begin capture")
			var g driver.Graph
			var r driver.Result
			t.thread().do(func() { g, r = t.F.StreamEndCapture(t.ctx, s) })
			t.ok(r, "end from another thread")
			t.ok(t.D.GraphDestroy(g), "destroy the graph")
		},
	},
	{
		Name: "end-capture of a stream that captures nothing",
		Says: "ILLEGAL_STATE (401)",
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			_, r := t.D.StreamEndCapture(t.ctx, s)
			t.returns(driver.IllegalState, r, "end")
		},
	},
	{
		Name: "begin-capture of a stream that captures already",
		Says: "ILLEGAL_STATE (401), and the capture goes on",
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			var again driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				again = t.D.StreamBeginCapture(t.ctx, s, driver.CaptureRelaxed)
			})
			t.returns(driver.IllegalState, again, "begin again")
			t.ok(end, "end")
		},
	},
	{
		Name: "a stream that joined a capture by an event: end-capture called on it",
		Says: "STREAM_CAPTURE_UNMATCHED (903), and the capture is invalidated",
		Run: func(t *T) {
			s, joined := t.newStream(t.ctx, driver.StreamNonBlocking), t.newStream(t.ctx, driver.StreamNonBlocking)
			e := t.newEvent(t.ctx)
			var join, r driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				if join = t.D.EventRecord(t.ctx, e, s); join == driver.Success {
					join = t.D.StreamWaitEvent(t.ctx, joined, e)
				}
				_, r = t.D.StreamEndCapture(t.ctx, joined)
			})
			t.ok(join, "join")
			t.returns(driver.CaptureUnmatched, r, "end on the joined stream")
			t.returns(driver.CaptureInvalid, end, "end on its own stream")
		},
	},
	{
		Name: "a stream that joined a capture by an event and did not come back",
		Says: "end-capture returns STREAM_CAPTURE_UNJOINED (904)",
		Run: func(t *T) {
			s, joined := t.newStream(t.ctx, driver.StreamNonBlocking), t.newStream(t.ctx, driver.StreamNonBlocking)
			e := t.newEvent(t.ctx)
			var join driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				if join = t.D.EventRecord(t.ctx, e, s); join != driver.Success {
					return
				}
				if join = t.D.StreamWaitEvent(t.ctx, joined, e); join == driver.Success {
					join = t.D.MemsetD8Async(t.ctx, t.scratch, 0, 64, joined)
				}
			})
			t.ok(join, "join")
			t.returns(driver.CaptureUnjoined, end, "end")
			status, r := t.D.StreamIsCapturing(t.ctx, joined)
			t.ok(r, "is-capturing of the joined stream")
			if status != driver.CaptureNone {
				t.Errorf("the joined stream reads capture status %v after the end", status)
			}
		},
	},
	{
		Name: "a capturing stream waits for an event that was recorded outside of the capture",
		Says: "STREAM_CAPTURE_ISOLATION (905), and the capture is invalidated",
		Run: func(t *T) {
			s, outside := t.newStream(t.ctx, driver.StreamNonBlocking), t.newStream(t.ctx, driver.StreamNonBlocking)
			e := t.newEvent(t.ctx)
			t.ok(t.D.EventRecord(t.ctx, e, outside), "record")
			var wait driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				wait = t.D.StreamWaitEvent(t.ctx, s, e)
			})
			t.returns(driver.CaptureIsolation, wait, "wait")
			t.returns(driver.CaptureInvalid, end, "end")
		},
	},
	{
		Name: "a capturing stream waits for an event that was never recorded; another stream joins its capture and does nothing",
		Says: "success, and the capture goes on",
		Run: func(t *T) {
			s, joined := t.newStream(t.ctx, driver.StreamNonBlocking), t.newStream(t.ctx, driver.StreamNonBlocking)
			never, e := t.newEvent(t.ctx), t.newEvent(t.ctx)
			var wait, join driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				wait = t.D.StreamWaitEvent(t.ctx, s, never)
				if join = t.D.EventRecord(t.ctx, e, s); join == driver.Success {
					join = t.D.StreamWaitEvent(t.ctx, joined, e)
				}
			})
			t.ok(wait, "wait")
			t.ok(join, "join")
			t.ok(end, "end")
		},
	},
	{
		Name: "a capturing stream waits for an event that another capture recorded",
		Says: "STREAM_CAPTURE_MERGE (902), and both captures are invalidated",
		Run: func(t *T) {
			s, other := t.newStream(t.ctx, driver.StreamNonBlocking), t.newStream(t.ctx, driver.StreamNonBlocking)
			e := t.newEvent(t.ctx)
			var record, wait, theirs driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				theirs = t.capture(t.thread(), other, driver.CaptureRelaxed, func() {
					record = t.D.EventRecord(t.ctx, e, other)
					wait = t.D.StreamWaitEvent(t.ctx, s, e)
				})
			})
			t.ok(record, "record")
			t.returns(driver.CaptureMerge, wait, "wait")
			t.returns(driver.CaptureInvalid, theirs, "end of the capture that recorded")
			t.returns(driver.CaptureInvalid, end, "end of the capture that waited")
		},
	},
	{
		Name: "work, an event's record and a wait on a stream whose capture is invalidated",
		Says: "STREAM_CAPTURE_INVALIDATED (901)",
		Run: func(t *T) {
			s, e := t.newStream(t.ctx, driver.StreamNonBlocking), t.newEvent(t.ctx)
			var work, record, wait driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				_ = t.D.StreamQuery(t.ctx, s) // invalidates it
				work = t.D.MemsetD8Async(t.ctx, t.scratch, 0, 64, s)
				record = t.D.EventRecord(t.ctx, e, s)
				wait = t.D.StreamWaitEvent(t.ctx, s, e)
			})
			for what, r := range map[string]driver.Result{"memset": work, "record": record, "wait": wait, "end": end} {
				t.returns(driver.CaptureInvalid, r, "%s", what)
			}
		},
	},
	{
		Name: "cuStreamDestroy of a capturing stream that another stream has joined",
		Says: "success, and the other stream captures no more",
		Run: func(t *T) {
			joined, e := t.newStream(t.ctx, driver.StreamNonBlocking), t.newEvent(t.ctx)
			s, r := t.D.StreamCreate(t.ctx, driver.StreamNonBlocking)
			t.ok(r, "create a stream")
			t.ok(t.D.StreamBeginCapture(t.ctx, s, driver.CaptureRelaxed), "begin capture")
			t.ok(t.D.EventRecord(t.ctx, e, s), "record")
			t.ok(t.D.StreamWaitEvent(t.ctx, joined, e), "join")
			t.ok(t.D.StreamDestroy(t.ctx, s), "destroy")
			status, r := t.D.StreamIsCapturing(t.ctx, joined)
			t.ok(r, "is-capturing of the joined stream")
			if status != driver.CaptureNone {
				t.Errorf("the joined stream reads capture status %v", status)
			}
			t.ok(t.D.StreamSynchronize(t.ctx, joined), "synchronize the joined stream")
		},
	},
	{
		Name: "a capture in one context while cuCtxSynchronize is called for another context of the device",
		Says: "goes on: only the captures of that context are killed",
		Run: func(t *T) {
			other := t.newContext()
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			var sync driver.Result
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				th := t.thread()
				th.do(func() {
					_, _ = t.F.ThreadExchangeStreamCaptureMode(driver.CaptureRelaxed)
					sync = t.F.CtxSynchronize(other)
				})
			})
			t.ok(sync, "cuCtxSynchronize of the other context")
			t.ok(end, "end")
		},
	},
	{
		Name:  "stream write-value and wait-value on a capturing stream",
		Says:  "become graph nodes",
		Needs: needs(streamMemoryOps),
		Run: func(t *T) {
			word := (*atomic.Uint64)(t.page)
			word.Store(0)
			p, r := t.D.MemHostGetDevicePointer(t.ctx, t.page)
			t.ok(r, "device pointer")
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.ok(t.D.StreamBeginCapture(t.ctx, s, driver.CaptureRelaxed), "begin capture")
			write := t.D.StreamWriteValue64(t.ctx, s, p, 3)
			wait := t.D.StreamWaitValue64(t.ctx, s, p, 3)
			g, r := t.D.StreamEndCapture(t.ctx, s)
			t.Logf("write %v, wait %v, end %v", write, wait, r)
			t.ok(r, "end capture")
			t.own("graph", uint64(g), func() driver.Result { return t.D.GraphDestroy(g) })
			t.ok(write, "write")
			t.ok(wait, "wait")
			n, r := t.F.GraphGetNodeCount(g)
			t.ok(r, "node count")
			if n != 2 {
				t.Errorf("the graph has %d nodes, want 2", n)
			}
			exec, r := t.D.GraphInstantiate(t.ctx, g)
			t.ok(r, "instantiate")
			t.own("executable graph", uint64(exec), func() driver.Result { return t.D.GraphExecDestroy(exec) })
			t.ok(t.D.GraphLaunch(t.ctx, exec, s), "launch")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			if got := word.Load(); got != 3 {
				t.Errorf("the word reads %d, the graph wrote 3", got)
			}
		},
	},
}

// edges are the rules of calls that meet the edge of what is there.
var edges = []Case{
	{
		Name: "a copy or memset that begins in mapped memory and goes past its end, into addresses that are reserved and not mapped",
		Says: "INVALID_VALUE; the context stays usable",
		Run: func(t *T) {
			p := t.reserve(2 * t.chunk)
			t.bind(p, t.chunk, t.create(t.chunk))
			t.allow(p, t.chunk)
			end := p + driver.Ptr(t.chunk) - 64
			t.returns(driver.InvalidValue, t.D.MemsetD8Async(t.ctx, end, 0, 128, t.stream), "memset")
			t.returns(driver.InvalidValue, t.D.MemcpyDtoHAsync(t.ctx, t.page, end, 128, t.stream), "copy to the host")
			t.returns(driver.InvalidValue, t.D.MemcpyDtoDAsync(t.ctx, p, end, 128, t.stream), "copy on the device")
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
			t.works(t.device, p, t.chunk)
		},
	},
	{
		Name: "a copy or memset over three places of a reservation of which the middle one is not mapped, or was unmapped",
		Says: "INVALID_VALUE; the context stays usable",
		Run: func(t *T) {
			// In a process of its own, whose context may be lost.
			c := t.child("work across a hole")
			c.Start()
			var found []holeResult
			c.Recv(&found)
			c.Wait()
			for _, f := range found {
				t.returns(f.Want, f.Got, "%s", f.Call)
			}
		},
	},
	{
		Name: "a copy or memset across two mappings that follow each other",
		Says: "success",
		Run: func(t *T) {
			p := t.reserve(2 * t.chunk)
			for at := range 2 {
				t.bind(p+driver.Ptr(uint64(at)*t.chunk), t.chunk, t.create(t.chunk))
			}
			t.allow(p, 2*t.chunk)
			middle := p + driver.Ptr(t.chunk) - 64
			t.fill(t.device, middle, 128, 0x37)
			t.reads(t.device, middle, 128, 0x37)
		},
	},
	{
		Name: "pointer attributes of an address that is reserved and not mapped, and of one that is nothing at all",
		Says: "the memory type returns INVALID_VALUE",
		Run: func(t *T) {
			p := t.reserve(t.chunk)
			for _, a := range []driver.Ptr{p, 4096} {
				v, r := t.D.PointerGetAttribute(t.ctx, driver.PointerMemoryType, a)
				start, rs := t.D.PointerGetAttribute(t.ctx, driver.PointerRangeStart, a)
				size, rz := t.D.PointerGetAttribute(t.ctx, driver.PointerRangeSize, a)
				mapped, rm := t.D.PointerGetAttribute(t.ctx, driver.PointerMapped, a)
				t.Logf("%#x: type %d %v, start %#x %v, size %d %v, mapped %d %v", a, v, r, start, rs, size, rz, mapped, rm)
				t.returns(driver.InvalidValue, r, "memory type of %#x", a)
			}
		},
	},
	{
		Name: "a launch with more dynamic shared memory than 48 KiB, the kernel not told of it",
		Says: "INVALID_VALUE; the context stays usable",
		Run: func(t *T) {
			l := oneThread
			l.SharedBytes = 49 << 10
			t.returns(driver.InvalidValue, t.D.LaunchKernel(t.ctx, t.kernels.nothing, l, nil, t.stream), "launch")
			t.ok(t.kernels.launchNothing(t.D, t.ctx, t.stream), "a launch that fits")
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
		},
	},
	{
		Name:  "cuFuncGetParamInfo of each of a kernel's parameters, and of one more",
		Says:  "their offsets and sizes in the block of parameters; then INVALID_VALUE",
		Needs: needs(entryPoints(driver.CallFuncGetParamInfo)),
		Run: func(t *T) {
			offset, size, r := t.D.FuncGetParamInfo(t.ctx, t.kernels.hold, 0)
			t.ok(r, "the one parameter")
			if offset != 0 || size != 8 {
				t.Errorf("the parameter has %d bytes at offset %d, want 8 at 0", size, offset)
			}
			_, _, r = t.D.FuncGetParamInfo(t.ctx, t.kernels.hold, 1)
			t.returns(driver.InvalidValue, r, "behind it")
			_, _, r = t.D.FuncGetParamInfo(t.ctx, t.kernels.nothing, 0)
			t.returns(driver.InvalidValue, r, "of a kernel without parameters")
		},
	},
	{
		Name:  "cuMemcpyBatchAsync between device memory and registered memory, both ways, behind work that is held up",
		Says:  "success; behind the earlier work of the stream, and the later work behind it",
		Needs: needs(entryPoints(driver.CallMemcpyBatchAsync)),
		Run: func(t *T) {
			host := t.pageable(4 * pageSize)
			t.register(host, 4*pageSize)
			at := func(page int) driver.Ptr { return driver.Ptr(uintptr(host)) + driver.Ptr(page*pageSize) }
			p, _ := t.memory((6*pageSize + t.chunk - 1) / t.chunk * t.chunk)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, s)
			t.ok(t.D.MemsetD8Async(t.ctx, p, 7, 2*pageSize, s), "memset")
			t.ok(copyBatch(t, []driver.Ptr{at(3), at(1)}, []driver.Ptr{p, p + pageSize}, s), "to the host")
			t.ok(t.D.MemsetD8Async(t.ctx, p, 9, 2*pageSize, s), "memset")
			t.ok(copyBatch(t, []driver.Ptr{p + 5*pageSize, p + 4*pageSize}, []driver.Ptr{at(1), at(3)}, s), "to the device")
			t.didNotWait(h, "the copies")
			h.release()
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			for i, b := range unsafe.Slice((*byte)(host), 4*pageSize) {
				if want := byte(i / pageSize % 2 * 7); b != want {
					t.Fatalf("byte %d of the host's memory is %d, want %d", i, b, want)
				}
			}
			t.reads(t.device, p, 2*pageSize, 9)
			t.reads(t.device, p+4*pageSize, 2*pageSize, 7)
		},
	},
	{
		Name:  "cuMemcpyBatchAsync on the legacy stream; of no copies; without attributes",
		Says:  "INVALID_VALUE each",
		Needs: needs(entryPoints(driver.CallMemcpyBatchAsync)),
		Run: func(t *T) {
			p, q := []driver.Ptr{t.scratch}, []driver.Ptr{t.scratch + 4096}
			t.returns(driver.InvalidValue, copyBatch(t, p, q, 0), "the legacy stream")
			t.returns(driver.InvalidValue, copyBatch(t, nil, nil, t.stream), "no copies")
			t.returns(driver.InvalidValue, t.D.MemcpyBatchAsync(t.ctx, p, q, []uint64{64}, nil, nil, t.stream), "no attributes")
		},
	},
	{
		Name: "cuModuleLoadDataEx with a log of errors, of PTX that does not assemble and of good one",
		Says: "INVALID_PTX and words in the log; success",
		Run: func(t *T) {
			log := make([]byte, 4096)
			_, r := t.D.ModuleLoadDataEx(t.ctx, []byte(".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry x(.param .nonsense y) { ret; }\n"), log)
			t.returns(driver.InvalidPTX, r, "bad text")
			text, _, ended := bytes.Cut(log, []byte{0})
			t.Logf("the log: %q", text)
			if len(text) == 0 || !ended {
				t.Errorf("the log has %d bytes, ended by a NUL: %v", len(text), ended)
			}
			m, r := t.D.ModuleLoadDataEx(t.ctx, []byte(kernelText), log)
			t.ok(r, "good text")
			t.ok(t.D.ModuleUnload(t.ctx, m), "unload")
		},
	},
	{
		Name: "cuMemHostRegister while work runs in the context",
		Says: "does not wait for it",
		Run: func(t *T) {
			host := t.pageable(pageSize)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, s)
			flags := driver.HostRegisterPortable | driver.HostRegisterDeviceMap
			t.ok(t.D.MemHostRegister(t.ctx, host, pageSize, flags), "register")
			t.didNotWait(h, "register")
			h.release()
			t.ok(t.D.MemHostUnregister(t.ctx, host), "unregister")
		},
	},
	{
		Name: "a device address without a context: a copy on a thread without a current context",
		Says: "INVALID_CONTEXT",
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			var r driver.Result
			t.thread().do(func() { r = t.D.MemsetD8Async(0, p, 0, 64, driver.StreamLegacy) })
			t.returns(driver.InvalidContext, r, "memset")
		},
	},
	{
		Name: "is-capturing and capture info on a thread without a current context, of a stream that captures in any mode; of the legacy stream",
		Says: "success, and the capture goes on; INVALID_CONTEXT",
		Run: func(t *T) {
			for _, mode := range allModes {
				s := t.newStream(t.ctx, driver.StreamNonBlocking)
				end := t.capture(t.thread(), s, mode, func() {
					t.thread().do(func() {
						status, r := t.F.StreamIsCapturing(0, s)
						info, id, infoResult := t.F.StreamGetCaptureInfo(0, s)
						t.returns(driver.Success, r, "is-capturing, mode %v", mode)
						t.returns(driver.Success, infoResult, "capture info, mode %v", mode)
						if status != driver.CaptureActive || info != driver.CaptureActive || id == 0 {
							t.Errorf("capture statuses %v and %v, capture %d, want both active", status, info, id)
						}
						_, r = t.F.StreamIsCapturing(0, driver.StreamLegacy)
						t.returns(driver.InvalidContext, r, "is-capturing of the legacy stream, mode %v", mode)
						_, _, r = t.F.StreamGetCaptureInfo(0, driver.StreamLegacy)
						t.returns(driver.InvalidContext, r, "capture info of the legacy stream, mode %v", mode)
					})
				})
				t.returns(driver.Success, end, "end, mode %v", mode)
			}
		},
	},
	{
		Name: "is-capturing and capture info on a thread whose current context is another, of a stream that captures in any mode",
		Says: "success, and the capture goes on",
		Run: func(t *T) {
			other := t.newContext()
			for _, mode := range allModes {
				s := t.newStream(t.ctx, driver.StreamNonBlocking)
				end := t.capture(t.thread(), s, mode, func() {
					t.thread().do(func() {
						t.ok(t.F.CtxSetCurrent(other), "make the other context current")
						status, r := t.F.StreamIsCapturing(0, s)
						t.returns(driver.Success, r, "is-capturing, mode %v", mode)
						info, id, r := t.F.StreamGetCaptureInfo(0, s)
						t.returns(driver.Success, r, "capture info, mode %v", mode)
						if status != driver.CaptureActive || info != driver.CaptureActive || id == 0 {
							t.Errorf("capture statuses %v and %v, capture %d, want both active", status, info, id)
						}
						t.ok(t.F.CtxSetCurrent(0), "leave the thread without a context")
					})
				})
				t.returns(driver.Success, end, "end, mode %v", mode)
			}
		},
	},
	{
		Name:  "†‡ a copy on the device between ranges that overlap, also by two addresses of one memory",
		Says:  "undefined; on the software driver it fails, and its context is lost",
		Needs: needs(softwareDriver),
		Run:   loseEach("copy to an overlapping range", "copy to an alias"),
	},
}

func init() {
	roles["work across a hole"] = workAcrossAHole
	roles["copy to an overlapping range"] = func(c *child) {
		dev, ctx := c.device(0)
		p, size := c.mappedChunk(dev)
		s := c.stream(ctx)
		c.undo = nil // it is lost
		c.send(c.watchLoss(ctx, s, c.d.MemcpyDtoDAsync(ctx, p+64, p, size-64, s)))
	}
	roles["copy to an alias"] = func(c *child) {
		dev, ctx := c.device(0)
		p, size := c.mappedChunk(dev)
		h, r := c.d.Foreign().MemRetainAllocationHandle(p)
		c.ok(r, "retain")
		alias := c.mapped(h, size, dev)
		s := c.stream(ctx)
		c.undo = nil
		c.send(c.watchLoss(ctx, s, c.d.MemcpyDtoDAsync(ctx, alias+64, p, size-64, s)))
	}
}

// holeResult is what a call of workAcrossAHole returned.
type holeResult struct {
	Call      string
	Want, Got driver.Result
}

// workAcrossAHole submits work over three places of which the middle one is not mapped. What
// the driver takes loses the context, so nothing is given back.
func workAcrossAHole(c *child) {
	dev, ctx, s := c.doomed()
	size, r := c.d.MemGetAllocationGranularity(onDevice(dev), driver.GranularityMinimum)
	c.ok(r, "granularity")
	p, r := c.d.MemAddressReserve(3*size, 0, 0)
	c.ok(r, "reserve")
	middle := p + driver.Ptr(size)
	for _, at := range []driver.Ptr{p, p + driver.Ptr(2*size)} {
		c.mapNew(at, size, dev)
		c.allow(at, size, dev)
	}
	host, r := c.d.MemHostAlloc(ctx, 3*size, 0)
	c.ok(r, "host alloc")
	var found []holeResult
	for _, hole := range []string{"never mapped", "unmapped"} {
		if hole == "unmapped" {
			c.mapNew(middle, size, dev)
			c.allow(middle, size, dev)
			c.ok(c.d.MemUnmap(middle, size), "unmap")
		}
		found = append(found,
			holeResult{"memset, " + hole, driver.InvalidValue, c.d.MemsetD8Async(ctx, p, 1, 3*size, s)},
			holeResult{"copy from the host, " + hole, driver.InvalidValue, c.d.MemcpyHtoDAsync(ctx, p, host, 3*size, s)},
			holeResult{"copy to the host, " + hole, driver.InvalidValue, c.d.MemcpyDtoHAsync(ctx, host, p, 3*size, s)})
	}
	found = append(found, holeResult{"synchronize", driver.Success, c.d.StreamSynchronize(ctx, s)})
	c.send(found)
}

// copyBatch copies a page each, by one call.
func copyBatch(t *T, dst, src []driver.Ptr, s driver.Stream) driver.Result {
	sizes := slices.Repeat([]uint64{pageSize}, len(dst))
	return t.D.MemcpyBatchAsync(t.ctx, dst, src, sizes, []driver.CopyAttributes{{Order: driver.CopyInStreamOrder}}, []uint64{0}, s)
}

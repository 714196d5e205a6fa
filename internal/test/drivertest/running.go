package drivertest

import (
	"errors"
	"io"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
)

var graphs = entryPoints(driver.CallGraphInstantiate)

// running are the rules of calls while work runs, and of memory that a graph
// refers to.
var running = []Case{
	{
		Name: "create, map, set access, unmap and release while work runs on the device, even on the same reservation",
		Says: "do not wait for it",
		Run: func(t *T) {
			p := t.reserve(2 * t.chunk)
			t.bind(p, t.chunk, t.create(t.chunk))
			t.allow(p, t.chunk)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, s)
			t.ok(t.D.MemsetD8Async(t.ctx, p, 0x81, t.chunk, s), "submit a memset")

			next := p + driver.Ptr(t.chunk)
			more := t.create(t.chunk)
			t.didNotWait(h, "create")
			t.bind(next, t.chunk, more)
			t.didNotWait(h, "map")
			t.allow(next, t.chunk)
			t.didNotWait(h, "set access")
			t.works(t.device, next, t.chunk)
			t.didNotWait(h, "work on the new memory")
			t.unmap(next)
			t.didNotWait(h, "unmap")
			t.release(more)
			t.didNotWait(h, "release")

			h.release()
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.reads(t.device, p, t.chunk, 0x81)
		},
	},
	{
		Name:  "†‡ unmap of memory that work submitted before has yet to touch",
		Says:  "does not wait: the work fails, and its context is lost",
		Needs: needs(softwareDriver, streamMemoryOps),
		Run: func(t *T) {
			var found lostContext
			c := t.child("unmap under running work")
			c.Start()
			c.Recv(&found)
			c.Wait()
			found.check(t)
		},
	},
	{
		Name:  "a captured graph writes to a mapped address; its memory is unmapped and released, other memory is mapped at the same address, and the graph is replayed",
		Says:  "works: the new memory is written",
		Needs: needs(graphs),
		Run: func(t *T) {
			p := t.reserve(t.chunk)
			old := t.create(t.chunk)
			t.bind(p, t.chunk, old)
			t.allow(p, t.chunk)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			exec := t.captured(s, func() driver.Result { return t.D.MemsetD8Async(t.ctx, p, 0x91, t.chunk, s) })
			t.ok(t.D.GraphLaunch(t.ctx, exec, s), "launch")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.reads(t.device, p, t.chunk, 0x91)

			t.unmap(p)
			t.release(old)
			t.bind(p, t.chunk, t.create(t.chunk))
			t.allow(p, t.chunk)
			t.fill(t.device, p, t.chunk, 0)
			t.ok(t.D.GraphLaunch(t.ctx, exec, s), "launch over the new memory")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.reads(t.device, p, t.chunk, 0x91)
		},
	},
	{
		Name:  "† the same graph replayed while nothing is mapped there",
		Says:  "the launch succeeds, the next synchronize returns LAUNCH_FAILED, and the context is lost: every later call fails",
		Needs: needs(softwareDriver, graphs),
		Run: func(t *T) {
			var found lostContext
			c := t.child("replay over nothing")
			c.Start()
			c.Recv(&found)
			c.Wait()
			t.returns(driver.LaunchFailed, found.Synchronize, "synchronize")
			found.check(t)
		},
	},
	{
		Name:  "cuMemAllocAsync, cuMemsetD8Async and cuMemFreeAsync on a capturing stream",
		Says:  "become graph nodes",
		Needs: needs(memoryPools, graphs),
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.ok(t.D.StreamBeginCapture(t.ctx, s, driver.CaptureRelaxed), "begin capture")
			p, r := t.D.MemAllocAsync(t.ctx, t.chunk, s)
			t.ok(r, "allocate")
			t.ok(t.D.MemsetD8Async(t.ctx, p, 1, t.chunk, s), "memset")
			t.ok(t.D.MemFreeAsync(t.ctx, p, s), "free")
			g, r := t.D.StreamEndCapture(t.ctx, s)
			t.ok(r, "end capture")
			t.own("graph", uint64(g), func() driver.Result { return t.D.GraphDestroy(g) })
			n, r := t.F.GraphGetNodeCount(g)
			t.ok(r, "node count")
			if n != 3 {
				t.Errorf("the graph has %d nodes, want 3", n)
			}
		},
	},
	{
		Name:  "stream wait-value on pinned memory, and stream write-value to it",
		Says:  "the stream goes on when the CPU has written the value, and the CPU sees what the stream writes",
		Needs: needs(streamMemoryOps),
		Run: func(t *T) {
			words := (*[2]atomic.Uint64)(t.page)
			words[0].Store(0)
			words[1].Store(0)
			p, r := t.D.MemHostGetDevicePointer(t.ctx, t.page)
			t.ok(r, "device pointer")
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.waitValue(s, &words[0], p, 5, func(v uint64) { words[0].Store(v) }, func() {
				t.ok(t.D.StreamWriteValue64(t.ctx, s, p+8, 9), "write a value")
			})
			if got := words[1].Load(); got != 9 {
				t.Errorf("the CPU reads %d, the stream wrote 9", got)
			}
		},
	},
	{
		Name:  "stream wait-value on a page of a memory file that is registered as host memory, written by another process",
		Says:  "the stream goes on",
		Needs: needs(streamMemoryOps),
		Run: func(t *T) {
			word, p, c := t.wordOfTwo("write words")
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.waitValue(s, word, p, 5, func(v uint64) { c.Send(v) }, func() {})
			c.Wait()
		},
	},
	{
		Name:  "the same, written by a stream of the other process, which registered the page too",
		Says:  "the stream goes on",
		Needs: needs(streamMemoryOps),
		Run: func(t *T) {
			word, p, c := t.wordOfTwo("write words from a stream")
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.waitValue(s, word, p, 5, func(v uint64) { c.Send(v) }, func() {})
			c.Wait()
		},
	},
	{
		Name:  "the same, and the other process is killed before it writes",
		Says:  "the stream waits on, until this process's CPU writes the value",
		Needs: needs(streamMemoryOps),
		Run: func(t *T) {
			word, p, c := t.wordOfTwo("write words from a stream")
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.waitValue(s, word, p, 5, func(v uint64) {
				if v < 5 {
					c.Send(v)
					return
				}
				c.Kill()
				time.Sleep(t.glance())
				t.returns(driver.NotReady, t.D.StreamQuery(t.ctx, s), "query after the other process's end")
				word.Store(v)
			}, func() {})
		},
	},
	{
		Name: "an event recorded on a capturing stream, then queried",
		Says: "CAPTURED_EVENT (907), and the capture is invalidated",
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			e := t.newEvent(t.ctx)
			var query driver.Result
			end := t.capture(t.thread(), s, driver.CaptureThreadLocal, func() {
				if r := t.D.EventRecord(t.ctx, e, s); r != driver.Success {
					query = r
					return
				}
				query = t.D.EventQuery(t.ctx, e)
			})
			t.returns(driver.CapturedEvent, query, "query")
			t.returns(driver.CaptureInvalid, end, "end capture")
		},
	},
	{
		Name: "capture info of a stream whose capture is invalidated",
		Says: "success: the status says so, and the capture's id is 0",
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			var query, info driver.Result
			var status driver.CaptureStatus
			var id uint64
			end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() {
				query = t.D.StreamQuery(t.ctx, s)
				status, id, info = t.D.StreamGetCaptureInfo(t.ctx, s)
			})
			t.returns(driver.CaptureUnsupported, query, "query of the stream")
			t.returns(driver.Success, info, "capture info")
			if status != driver.CaptureInvalidated || id != 0 {
				t.Errorf("capture status %v and id %d, want an invalidated one and 0", status, id)
			}
			t.returns(driver.CaptureInvalid, end, "end capture")
		},
	},
}

// wordOfTwo is the first word of a page that this process and a child map: to
// the CPU, and to the device, since the page is registered here. The child plays
// a role that was given the page's file.
func (t *T) wordOfTwo(role string) (*atomic.Uint64, driver.Ptr, *reexec.Cmd) {
	t.Helper()
	file, err := memoryFile(pageSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	page, err := mapFile(file, pageSize)
	if err != nil {
		t.Fatal(err)
	}
	host := unsafe.Pointer(&page[0])
	t.own("mapped file", uint64(uintptr(host)), func() driver.Result {
		if err := freePageable(page); err != nil {
			t.Error(err)
		}
		return driver.Success
	})
	t.ok(t.D.MemHostRegister(t.ctx, host, pageSize, driver.HostRegisterPortable|driver.HostRegisterDeviceMap), "register")
	t.own("registered memory", uint64(uintptr(host)), func() driver.Result { return t.D.MemHostUnregister(t.ctx, host) })
	p, r := t.D.MemHostGetDevicePointer(t.ctx, host)
	t.ok(r, "device pointer")
	c := t.child(role)
	c.ExtraFiles = []*os.File{file}
	c.Start()
	return (*atomic.Uint64)(host), p, c
}

// waitValue has a stream wait for a value of a word, which p is to the device:
// one less is written first, then the value itself. more is submitted behind
// the wait.
func (t *T) waitValue(s driver.Stream, word *atomic.Uint64, p driver.Ptr, v uint64, write func(v uint64), more func()) {
	t.Helper()
	// Whatever fails, the stream is not left waiting.
	t.Cleanup(func() { word.Store(v) })
	t.ok(t.D.StreamWaitValue64(t.ctx, s, p, v), "wait for a value")
	more()
	write(v - 1)
	time.Sleep(t.glance())
	t.returns(driver.NotReady, t.D.StreamQuery(t.ctx, s), "query while the value is not there")
	write(v)
	for end := time.Now().Add(patience); t.D.StreamQuery(t.ctx, s) == driver.NotReady; {
		if time.Now().After(end) {
			t.Fatalf("the stream still waits %v after the write", patience)
		}
		time.Sleep(time.Millisecond)
	}
	t.ok(t.D.StreamQuery(t.ctx, s), "query after the write")
}

// lostContext is what a child saw of its context's end.
type lostContext struct {
	Submit, Synchronize driver.Result
	// Later are calls of all kinds afterwards.
	Later map[string]driver.Result
}

func (l lostContext) check(t *T) {
	t.Helper()
	t.ok(l.Submit, "submit")
	if !l.Synchronize.Lost() {
		t.Errorf("synchronize: the driver returns %v, want that the context is lost", l.Synchronize)
	}
	for call, r := range l.Later {
		if r != l.Synchronize {
			t.Errorf("%s on the lost context: the driver returns %v, want %v again", call, r, l.Synchronize)
		}
	}
}

// watchLoss fills in what comes after the submission.
func (c *child) watchLoss(ctx driver.Context, s driver.Stream, submit driver.Result) (l lostContext) {
	l.Submit = submit
	l.Synchronize = c.d.StreamSynchronize(ctx, s)
	l.Later = map[string]driver.Result{}
	l.Later["cuStreamSynchronize"] = c.d.StreamSynchronize(ctx, s)
	l.Later["cuStreamQuery"] = c.d.StreamQuery(ctx, s)
	_, _, l.Later["cuMemGetInfo"] = c.d.MemGetInfo(ctx)
	_, l.Later["cuMemAlloc"] = c.d.MemAlloc(ctx, 256)
	_, l.Later["cuStreamCreate"] = c.d.StreamCreate(ctx, driver.StreamNonBlocking)
	_, l.Later["cuEventCreate"] = c.d.EventCreate(ctx, driver.EventDisableTiming)
	return l
}

// mappedChunk is one chunk of memory, open to the device.
func (c *child) mappedChunk(dev driver.Device) (p driver.Ptr, size uint64) {
	size, r := c.d.MemGetAllocationGranularity(onDevice(dev), driver.GranularityMinimum)
	c.ok(r, "granularity")
	h, r := c.d.MemCreate(size, onDevice(dev))
	c.ok(r, "create")
	p, r = c.d.MemAddressReserve(size, 0, 0)
	c.ok(r, "reserve")
	c.ok(c.d.MemMap(p, size, 0, h), "map")
	c.ok(c.d.MemRelease(h), "release")
	c.ok(c.d.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(dev))), "set access")
	return p, size
}

func init() {
	roles["write words"] = writeWords
	roles["write words from a stream"] = writeWordsFromAStream
	roles["unmap under running work"] = unmapUnderRunningWork
	roles["replay over nothing"] = replayOverNothing
}

// eachWord calls write with every value that the parent sends.
func (c *child) eachWord(write func(v uint64)) {
	for {
		var v uint64
		err := c.Recv(&v)
		if errors.Is(err, io.EOF) {
			return
		}
		c.check(err)
		write(v)
	}
}

func writeWords(c *child) {
	page, err := mapFile(c.Files[0], pageSize)
	c.check(err)
	c.eachWord((*atomic.Uint64)(unsafe.Pointer(&page[0])).Store)
}

func writeWordsFromAStream(c *child) {
	page, err := mapFile(c.Files[0], pageSize)
	c.check(err)
	_, ctx := c.device(0)
	host := unsafe.Pointer(&page[0])
	c.ok(c.d.MemHostRegister(ctx, host, pageSize, driver.HostRegisterPortable|driver.HostRegisterDeviceMap), "register")
	c.later("unregister", func() driver.Result { return c.d.MemHostUnregister(ctx, host) })
	p, r := c.d.MemHostGetDevicePointer(ctx, host)
	c.ok(r, "device pointer")
	s := c.stream(ctx)
	c.eachWord(func(v uint64) {
		c.ok(c.d.StreamWriteValue64(ctx, s, p, v), "write a value")
		c.ok(c.d.StreamSynchronize(ctx, s), "write a value")
	})
}

// doomed returns a device, its primary context and a stream. The role loses the context,
// so nothing of it is given back.
func (c *child) doomed() (driver.Device, driver.Context, driver.Stream) {
	dev, r := c.d.DeviceGet(0)
	c.ok(r, "cuDeviceGet")
	ctx, r := c.d.DevicePrimaryCtxRetain(dev)
	c.ok(r, "cuDevicePrimaryCtxRetain")
	s, r := c.d.StreamCreate(ctx, driver.StreamNonBlocking)
	c.ok(r, "create a stream")
	return dev, ctx, s
}

func unmapUnderRunningWork(c *child) {
	dev, ctx, s := c.doomed()
	words, r := c.d.MemHostAlloc(ctx, pageSize, driver.HostAllocDeviceMap)
	c.ok(r, "host alloc")
	word, r := c.d.MemHostGetDevicePointer(ctx, words)
	c.ok(r, "device pointer")
	p, size := c.mappedChunk(dev)
	c.ok(c.d.StreamWaitValue64(ctx, s, word, 1), "wait for a value")
	submit := c.d.MemsetD8Async(ctx, p, 1, size, s)
	c.ok(c.d.MemUnmap(p, size), "unmap")
	(*atomic.Uint64)(words).Store(1)
	c.send(c.watchLoss(ctx, s, submit))
}

func replayOverNothing(c *child) {
	dev, ctx, s := c.doomed()
	p, size := c.mappedChunk(dev)
	c.ok(c.d.StreamBeginCapture(ctx, s, driver.CaptureRelaxed), "begin capture")
	c.ok(c.d.MemsetD8Async(ctx, p, 1, size, s), "memset")
	g, r := c.d.StreamEndCapture(ctx, s)
	c.ok(r, "end capture")
	exec, r := c.d.GraphInstantiate(ctx, g)
	c.ok(r, "instantiate")
	c.ok(c.d.MemUnmap(p, size), "unmap")
	c.send(c.watchLoss(ctx, s, c.d.GraphLaunch(ctx, exec, s)))
}

// captured is a graph of what submit submits to a stream.
func (t *T) captured(s driver.Stream, submit func() driver.Result) driver.GraphExec {
	t.Helper()
	t.ok(t.D.StreamBeginCapture(t.ctx, s, driver.CaptureRelaxed), "begin capture")
	t.ok(submit(), "submit to the capture")
	g, r := t.D.StreamEndCapture(t.ctx, s)
	t.ok(r, "end capture")
	t.own("graph", uint64(g), func() driver.Result { return t.D.GraphDestroy(g) })
	exec, r := t.D.GraphInstantiate(t.ctx, g)
	t.ok(r, "instantiate")
	t.own("executable graph", uint64(exec), func() driver.Result { return t.D.GraphExecDestroy(exec) })
	return exec
}

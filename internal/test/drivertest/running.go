package drivertest

import (
	"errors"
	"io"
	"os"
	"sync"
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
		Run:   loseEach("unmap under running work"),
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
			found := t.loses("replay over nothing")
			t.returns(driver.LaunchFailed, found.Synchronize, "synchronize")
		},
	},
	{
		Name:  "a captured graph copies from one mapped address to another; other memory is mapped at both, the old is mapped elsewhere, and the graph is launched",
		Says:  "the new memory is read and written; the old keeps its bytes",
		Needs: needs(graphs),
		Run: func(t *T) {
			p, old := t.run(2)
			from, to := p, p+driver.Ptr(t.chunk)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			exec := t.captured(s, func() driver.Result { return t.D.MemcpyDtoDAsync(t.ctx, to, from, t.chunk, s) })
			t.fill(t.device, from, t.chunk, 0x92)
			t.fill(t.device, to, t.chunk, 0x93)
			elsewhere := t.reserve(2 * t.chunk)
			for i, h := range old {
				at := driver.Ptr(uint64(i) * t.chunk)
				t.unmap(p + at)
				t.bind(p+at, t.chunk, t.create(t.chunk))
				t.bind(elsewhere+at, t.chunk, h)
			}
			t.allow(p, 2*t.chunk)
			t.allow(elsewhere, 2*t.chunk)
			t.fill(t.device, from, t.chunk, 0x94)
			t.fill(t.device, to, t.chunk, 0x95)
			t.ok(t.D.GraphLaunch(t.ctx, exec, s), "launch")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.reads(t.device, p, 2*t.chunk, 0x94)
			t.reads(t.device, elsewhere, t.chunk, 0x92)
			t.reads(t.device, elsewhere+driver.Ptr(t.chunk), t.chunk, 0x93)
		},
	},
	{
		Name:  "a captured kernel reads a word at a mapped address; other memory is mapped there, and the graph is launched",
		Says:  "the kernel reads the new memory, and what is written there while it runs",
		Needs: needs(graphs),
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			t.fill(t.device, p, 8, 1) // with the old memory the kernel ends at once
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			exec := t.captured(s, func() driver.Result { return t.kernels.launchHold(t.D, t.ctx, s, p) })
			t.ok(t.D.GraphLaunch(t.ctx, exec, s), "launch")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.unmap(p)
			t.bind(p, t.chunk, t.create(t.chunk))
			t.allow(p, t.chunk)
			t.fill(t.device, p, 8, 0)
			t.ok(t.D.GraphLaunch(t.ctx, exec, s), "launch over the new memory")
			// Whatever fails, the kernel does not run for ever.
			release := sync.OnceFunc(func() { t.fill(t.device, p, 8, 1) })
			defer release()
			time.Sleep(t.glance())
			t.returns(driver.NotReady, t.D.StreamQuery(t.ctx, s), "query while the new word is 0")
			release()
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
		},
	},
	{
		Name:  "†‡ a kernel at an address that is reserved and not mapped, or where memory was unmapped",
		Says:  "the launch succeeds, the work fails, and its context is lost",
		Needs: needs(softwareDriver),
		Run:   loseEach("kernel over nothing", "kernel over unmapped memory"),
	},
	{
		Name:  "†‡ a memset and a kernel where memory is mapped and no access is granted",
		Says:  "the work fails, and its context is lost",
		Needs: needs(softwareDriver),
		Run:   loseEach("memset without access", "kernel without access"),
	},
	{
		Name:  "†‡ a memset or copy that has yet to be done when its memory is unmapped and other memory is mapped at the address",
		Says:  "undefined; on the software driver it fails, and its context is lost",
		Needs: needs(softwareDriver, streamMemoryOps),
		Run:   loseEach("remap under a memset", "remap under a copy"),
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
		Name:  "the default memory pool of a device",
		Says:  "counts what cuMemAllocAsync took as used and as reserved, and trimming leaves that",
		Needs: needs(memoryPools),
		Run: func(t *T) {
			pool, r := t.D.DeviceGetDefaultMemPool(t.Device)
			t.ok(r, "default pool")
			of := func(a driver.MemPoolAttribute) uint64 {
				n, r := t.D.MemPoolGetAttribute(pool, a)
				t.ok(r, "attribute of a pool")
				return n
			}
			before := of(driver.MemPoolUsed)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			p, r := t.D.MemAllocAsync(t.ctx, t.chunk, s)
			t.ok(r, "allocate")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			t.ok(t.D.MemPoolTrimTo(pool, 0), "trim")
			if used, reserved := of(driver.MemPoolUsed), of(driver.MemPoolReserved); used < before+t.chunk || reserved < used {
				t.Errorf("%d bytes are used and %d reserved, after %d used and %d allocated", used, reserved, before, t.chunk)
			}
			t.ok(t.D.MemFreeAsync(t.ctx, p, s), "free")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			if used := of(driver.MemPoolUsed); used != before {
				t.Errorf("%d bytes are used after the free, and were %d before", used, before)
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
	file, host := t.memoryFile(pageSize)
	t.register(host, pageSize)
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
	for end := time.Now().Add(callTimeout); t.D.StreamQuery(t.ctx, s) == driver.NotReady; {
		if time.Now().After(end) {
			t.Fatalf("the stream still waits %v after the write", callTimeout)
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

// loses has a child play a role in which it loses its context.
func (t *T) loses(role string) (found lostContext) {
	t.Helper()
	c := t.child(role)
	c.Start()
	c.Recv(&found)
	c.Wait()
	found.check(t)
	return found
}

// loseEach returns a case's function that has children play roles.
func loseEach(roles ...string) func(*T) {
	return func(t *T) {
		for _, role := range roles {
			t.loses(role)
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
	p, r = c.d.MemAddressReserve(size, 0, 0)
	c.ok(r, "reserve")
	c.mapNew(p, size, dev)
	c.allow(p, size, dev)
	return p, size
}

// mapNew maps new memory, which its mapping alone keeps.
func (c *child) mapNew(p driver.Ptr, size uint64, dev driver.Device) {
	h, r := c.d.MemCreate(size, onDevice(dev))
	c.ok(r, "create")
	c.ok(c.d.MemMap(p, size, 0, h), "map")
	c.ok(c.d.MemRelease(h), "release")
}

func (c *child) allow(p driver.Ptr, size uint64, dev driver.Device) {
	c.ok(c.d.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(dev))), "set access")
}

func init() {
	roles["write words"] = writeWords
	roles["write words from a stream"] = writeWordsFromAStream
	roles["unmap under running work"] = unmapUnderRunningWork
	roles["remap under a memset"] = remapUnder(func(c *child, ctx driver.Context, p driver.Ptr, n uint64, s driver.Stream) driver.Result {
		return c.d.MemsetD8Async(ctx, p, 1, n, s)
	})
	roles["remap under a copy"] = remapUnder(func(c *child, ctx driver.Context, p driver.Ptr, n uint64, s driver.Stream) driver.Result {
		return c.d.MemcpyDtoDAsync(ctx, p, p+driver.Ptr(n/2), n/2, s)
	})
	roles["replay over nothing"] = replayOverNothing
	roles["kernel over nothing"] = func(c *child) { c.loseAt(nothingMapped, c.readWord) }
	roles["kernel over unmapped memory"] = func(c *child) { c.loseAt(unmappedAgain, c.readWord) }
	roles["kernel without access"] = func(c *child) { c.loseAt(notGranted, c.readWord) }
	roles["memset without access"] = func(c *child) {
		c.loseAt(notGranted, func(ctx driver.Context, p driver.Ptr, s driver.Stream) driver.Result {
			return c.d.MemsetD8Async(ctx, p, 1, 64, s)
		})
	}
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
	release := c.delay(ctx, s)
	p, size := c.mappedChunk(dev)
	submit := c.d.MemsetD8Async(ctx, p, 1, size, s)
	c.ok(c.d.MemUnmap(p, size), "unmap")
	release()
	c.send(c.watchLoss(ctx, s, submit))
}

// remapUnder submits work on n bytes at p that comes to them when other memory is there.
func remapUnder(submit func(c *child, ctx driver.Context, p driver.Ptr, n uint64, s driver.Stream) driver.Result) func(*child) {
	return func(c *child) {
		dev, ctx, s := c.doomed()
		release := c.delay(ctx, s)
		p, size := c.mappedChunk(dev)
		submitted := submit(c, ctx, p, size, s)
		c.ok(c.d.MemUnmap(p, size), "unmap")
		c.mapNew(p, size, dev)
		c.allow(p, size, dev)
		release()
		c.send(c.watchLoss(ctx, s, submitted))
	}
}

// delay keeps what is submitted to a stream from being done until release.
func (c *child) delay(ctx driver.Context, s driver.Stream) (release func()) {
	words, r := c.d.MemHostAlloc(ctx, pageSize, driver.HostAllocDeviceMap)
	c.ok(r, "host alloc")
	word, r := c.d.MemHostGetDevicePointer(ctx, words)
	c.ok(r, "device pointer")
	c.ok(c.d.StreamWaitValue64(ctx, s, word, 1), "wait for a value")
	return func() { (*atomic.Uint64)(words).Store(1) }
}

// readWord launches a kernel that reads the word at p.
func (c *child) readWord(ctx driver.Context, p driver.Ptr, s driver.Stream) driver.Result {
	m, r := c.d.ModuleLoadData(ctx, []byte(kernelText))
	c.ok(r, "load the kernels")
	hold, r := c.d.ModuleGetFunction(ctx, m, HoldKernel)
	c.ok(r, "get the kernel")
	return kernels{hold: hold}.launchHold(c.d, ctx, s, p)
}

// What may be wrong with an address in the middle of a run of three mappings.
type wrong int

const (
	nothingMapped wrong = iota
	unmappedAgain
	notGranted
)

// loseAt submits work to a wrong address between two that are right.
func (c *child) loseAt(w wrong, submit func(ctx driver.Context, p driver.Ptr, s driver.Stream) driver.Result) {
	dev, ctx, s := c.doomed()
	size, r := c.d.MemGetAllocationGranularity(onDevice(dev), driver.GranularityMinimum)
	c.ok(r, "granularity")
	p, r := c.d.MemAddressReserve(3*size, 0, 0)
	c.ok(r, "reserve")
	middle := p + driver.Ptr(size)
	for i := range driver.Ptr(3) {
		at := p + i*driver.Ptr(size)
		if at == middle && w == nothingMapped {
			continue
		}
		c.mapNew(at, size, dev)
		c.allow(at, size, dev)
		// A kernel that finds the memory all the same is not to poll for ever.
		c.ok(c.d.MemsetD8Async(ctx, at, 1, size, s), "memset")
	}
	c.ok(c.d.StreamSynchronize(ctx, s), "memset")
	if w != nothingMapped {
		h, r := c.d.Foreign().MemRetainAllocationHandle(middle)
		c.ok(r, "retain")
		c.ok(c.d.MemUnmap(middle, size), "unmap")
		if w == notGranted {
			c.ok(c.d.MemMap(middle, size, 0, h), "map again")
		}
	}
	c.send(c.watchLoss(ctx, s, submit(ctx, middle, s)))
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

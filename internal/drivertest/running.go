package drivertest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
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
			var answer lostContext
			c := t.child("unmap under running work")
			c.Start()
			c.Recv(&answer)
			c.Wait()
			answer.check(t)
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
		Says:  "the launch succeeds, the next synchronize answers LAUNCH_FAILED, and the context is lost: every later call fails",
		Needs: needs(softwareDriver, graphs),
		Run: func(t *T) {
			var answer lostContext
			c := t.child("replay over nothing")
			c.Start()
			c.Recv(&answer)
			c.Wait()
			t.answers(driver.LaunchFailed, answer.Synchronize, "synchronize")
			answer.check(t)
		},
	},
	{
		Name:  "cuMemAllocAsync, cuMemsetD8Async and cuMemFreeAsync on a capturing stream",
		Says:  "become graph nodes",
		Needs: needs(memoryPools, graphs),
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.ok(t.D.StreamBeginCapture(t.ctx, s, driver.CaptureThreadLocal), "begin capture")
			p, r := t.D.MemAllocAsync(t.ctx, t.chunk, s)
			t.ok(r, "allocate")
			t.ok(t.D.MemsetD8Async(t.ctx, p, 1, t.chunk, s), "memset")
			t.ok(t.D.MemFreeAsync(t.ctx, p, s), "free")
			g, r := t.D.StreamEndCapture(t.ctx, s)
			t.ok(r, "end capture")
			t.own("graph", uint64(g), func() driver.Result { return t.D.GraphDestroy(g) })
			n, r := t.D.GraphGetNodeCount(g)
			t.ok(r, "node count")
			if n != 3 {
				t.Errorf("the graph has %d nodes, want 3", n)
			}
		},
	},
	{
		Name:  "‡ stream wait-value on pinned memory, and stream write-value to it",
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
			file, err := memoryFile(pageSize)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
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
			c := t.child("write words")
			c.ExtraFiles = []*os.File{file}
			c.Start()
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			t.waitValue(s, (*atomic.Uint64)(host), p, 5, func(v uint64) { c.Send(v) }, func() {})
			c.Wait()
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
			t.answers(driver.CapturedEvent, query, "query")
			t.answers(driver.CaptureInvalid, end, "end capture")
		},
	},
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
	t.answers(driver.NotReady, t.D.StreamQuery(t.ctx, s), "query while the value is not there")
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
		t.Errorf("synchronize: the driver answers %v, want that the context is lost", l.Synchronize)
	}
	for call, r := range l.Later {
		if r != l.Synchronize {
			t.Errorf("%s on the lost context: the driver answers %v, want %v again", call, r, l.Synchronize)
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
	roles["write words"] = func(c *child) {
		page, err := mapFile(c.Files[0], pageSize)
		c.check(err)
		for {
			var v uint64
			if err := c.Recv(&v); errors.Is(err, io.EOF) {
				return
			} else {
				c.check(err)
			}
			(*atomic.Uint64)(unsafe.Pointer(&page[0])).Store(v)
		}
	}
	roles["unmap under running work"] = func(c *child) {
		dev, r := c.d.DeviceGet(0)
		c.ok(r, "cuDeviceGet")
		ctx, r := c.d.DevicePrimaryCtxRetain(dev)
		c.ok(r, "cuDevicePrimaryCtxRetain")
		s, r := c.d.StreamCreate(ctx, driver.StreamNonBlocking)
		c.ok(r, "create a stream")
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
	roles["replay over nothing"] = func(c *child) {
		dev, r := c.d.DeviceGet(0)
		c.ok(r, "cuDeviceGet")
		ctx, r := c.d.DevicePrimaryCtxRetain(dev)
		c.ok(r, "cuDevicePrimaryCtxRetain")
		s, r := c.d.StreamCreate(ctx, driver.StreamNonBlocking)
		c.ok(r, "create a stream")
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
		name: "cuMemFreeHost", covers: wholeContext, stalls: true,
		prepare: func(t *T, _ driver.Stream) func() driver.Result {
			p, r := t.D.MemHostAlloc(t.ctx, pageSize, driver.HostAllocPortable)
			t.ok(r, "cuMemHostAlloc")
			return func() driver.Result { return t.D.MemFreeHost(t.ctx, p) }
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
	t.answers(want, end, "end capture")
}

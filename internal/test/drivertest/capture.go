package drivertest

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// A matrixCall is a call on another stream while a stream captures. make
// readies what it needs before the capture begins; the function it returns
// makes the call once, through the given form of the driver, on whatever thread
// it is called.
type matrixCall struct {
	name  string
	kills verdict
	needs []Need
	make  func(t *T, other driver.Stream) action
}

// action makes a call of the matrix through a form of the driver.
type action = func(f driver.Foreign) driver.Result

// verdict says which captures a call kills.
type verdict int

const (
	harmless verdict = iota
	// unsafeCall kills the captures that the calling thread's mode protects: those in
	// global mode, and in thread-local mode its own.
	unsafeCall
	// alwaysKills kills every capture, whatever the modes.
	alwaysKills
)

// A matrixColumn is under which capture, and from which thread, a call is made.
type matrixColumn struct {
	name     string
	modes    []driver.CaptureMode
	from     []place
	switched bool
	// kills says which verdicts mean death here.
	kills map[verdict]bool
}

type place int

const (
	sameThread place = iota
	otherThread
)

func (p place) String() string { return [...]string{"capturing thread", "other thread"}[p] }

func modeName(m driver.CaptureMode) string {
	return [...]string{"global", "thread-local", "relaxed"}[m]
}

var (
	allModes = []driver.CaptureMode{driver.CaptureGlobal, driver.CaptureThreadLocal, driver.CaptureRelaxed}
	anywhere = []place{sameThread, otherThread}

	matrixColumns = []matrixColumn{
		{"global mode, same or other thread", allModes[:1], anywhere, false, map[verdict]bool{unsafeCall: true, alwaysKills: true}},
		{"thread-local mode, from the capturing thread", allModes[1:2], anywhere[:1], false, map[verdict]bool{unsafeCall: true, alwaysKills: true}},
		{"thread-local mode, from another thread", allModes[1:2], anywhere[1:], false, map[verdict]bool{alwaysKills: true}},
		{"relaxed mode", allModes[2:], anywhere, false, map[verdict]bool{alwaysKills: true}},
		{"any mode, calling thread switched to relaxed", allModes, anywhere, true, map[verdict]bool{alwaysKills: true}},
	}
)

// matrix are the calls of the capture matrix.
var matrix = slices.Concat(generalMatrix, managedMatrix)

var generalMatrix = []matrixCall{
	{"every VMM call", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			for _, s := range cycle(f, t.Device) {
				if !s.OK {
					t.Errorf("%s: %s", s.Call, s.Text)
				}
			}
			return driver.Success
		}
	}},
	{"event create", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			e, r := f.EventCreate(t.ctx, driver.EventDisableTiming)
			if r == driver.Success {
				t.own("event", uint64(e), func() driver.Result { return t.D.EventDestroy(t.ctx, e) })
			}
			return r
		}
	}},
	{"event record", harmless, nil, func(t *T, s driver.Stream) action {
		e := t.newEvent(t.ctx)
		return func(f driver.Foreign) driver.Result { return f.EventRecord(t.ctx, e, s) }
	}},
	{"stream create", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			s, r := f.StreamCreate(t.ctx, driver.StreamNonBlocking)
			if r == driver.Success {
				t.own("stream", uint64(s), func() driver.Result { return t.D.StreamDestroy(t.ctx, s) })
			}
			return r
		}
	}},
	{"asynchronous memset", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return f.MemsetD8Async(t.ctx, t.scratch, 1, 64, s) }
	}},
	{"asynchronous copy between host and device, pinned", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			if r := f.MemcpyHtoDAsync(t.ctx, t.scratch, t.page, 64, s); r != driver.Success {
				return r
			}
			return f.MemcpyDtoHAsync(t.ctx, t.page, t.scratch, 64, s)
		}
	}},
	{"asynchronous copy between host and device, pageable", harmless, nil, func(t *T, s driver.Stream) action {
		host := t.pageable(4096)
		return func(f driver.Foreign) driver.Result {
			if r := f.MemcpyHtoDAsync(t.ctx, t.scratch, host, 4096, s); r != driver.Success {
				return r
			}
			return f.MemcpyDtoHAsync(t.ctx, host, t.scratch, 4096, s)
		}
	}},
	{"asynchronous copy on the device", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			return f.MemcpyDtoDAsync(t.ctx, t.scratch, t.scratch+4096, 64, s)
		}
	}},
	{"synchronous memset", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return f.MemsetD8(t.ctx, t.scratch, 1, 64) }
	}},
	{"synchronous copy between host and device", harmless, nil, synchronousCopy},
	{"synchronous copy on the device", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return f.MemcpyDtoD(t.ctx, t.scratch, t.scratch+4096, 64) }
	}},
	{"copies in a batch", harmless, needs(entryPoints(driver.CallMemcpyBatchAsync)), func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			return copyBatch(t, []driver.Ptr{t.scratch}, []driver.Ptr{t.scratch + pageSize}, s)
		}
	}},
	{"launch of a kernel", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return t.kernels.launchNothing(f, t.ctx, s) }
	}},
	{"cooperative launch of a kernel", harmless, needs(cooperation, entryPoints(driver.CallLaunchKernelEx)), func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			return f.LaunchKernelEx(t.ctx, t.kernels.nothing, oneThread, nil, s)
		}
	}},
	{"function attribute", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			n, r := f.FuncGetAttribute(t.ctx, driver.FuncMaxDynamicSharedBytes, t.kernels.meet)
			if r != driver.Success {
				return r
			}
			return f.FuncSetAttribute(t.ctx, t.kernels.meet, driver.FuncMaxDynamicSharedBytes, n)
		}
	}},
	{"blocks that run at once", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, r := f.OccupancyMaxActiveBlocksPerMultiprocessor(t.ctx, t.kernels.nothing, 32, 0)
			return r
		}
	}},
	{"variable of a module", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, _, r := f.ModuleGetGlobal(t.ctx, t.kernels.module, CounterVariable)
			return r
		}
	}},
	{"priority of streams", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			if _, _, r := f.CtxGetStreamPriorityRange(t.ctx); r != driver.Success {
				return r
			}
			_, r := f.StreamGetPriority(t.ctx, s)
			return r
		}
	}},
	{"module load", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			m, r := f.ModuleLoadData(t.ctx, []byte(kernelText))
			if r == driver.Success {
				t.own("module", uint64(m), func() driver.Result { return t.D.ModuleUnload(t.ctx, m) })
			}
			return r
		}
	}},
	{"mem-get-info", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, _, r := f.MemGetInfo(t.ctx)
			return r
		}
	}},
	{"pointer attribute", harmless, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, r := f.PointerGetAttribute(t.ctx, driver.PointerRangeSize, t.scratch)
			return r
		}
	}},
	{"stream write-value", harmless, needs(streamMemoryOps), func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return f.StreamWriteValue64(t.ctx, s, t.scratch, 1) }
	}},
	{"is-capturing", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, r := f.StreamIsCapturing(t.ctx, s)
			return r
		}
	}},
	{"capture info", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, _, r := f.StreamGetCaptureInfo(t.ctx, s)
			return r
		}
	}},
	{"stream id", harmless, needs(entryPoints(driver.CallStreamGetID)), func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, r := f.StreamGetID(t.ctx, s)
			return r
		}
	}},
	{"stream context", harmless, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			_, r := f.StreamGetCtx(t.ctx, s)
			return r
		}
	}},
	{"event query", unsafeCall, nil, func(t *T, s driver.Stream) action {
		e := t.passedEvent(s)
		return func(f driver.Foreign) driver.Result { return f.EventQuery(t.ctx, e) }
	}},
	{"event synchronize", unsafeCall, nil, func(t *T, s driver.Stream) action {
		e := t.passedEvent(s)
		return func(f driver.Foreign) driver.Result { return f.EventSynchronize(t.ctx, e) }
	}},
	{"stream query", unsafeCall, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return f.StreamQuery(t.ctx, s) }
	}},
	{"stream synchronize", unsafeCall, nil, func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return f.StreamSynchronize(t.ctx, s) }
	}},
	{"host alloc", unsafeCall, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			p, r := f.MemHostAlloc(t.ctx, pageSize, driver.HostAllocPortable)
			if r == driver.Success {
				t.own("host memory", uint64(uintptr(p)), func() driver.Result { return t.D.MemFreeHost(t.ctx, p) })
			}
			return r
		}
	}},
	{"host free", unsafeCall, nil, func(t *T, _ driver.Stream) action {
		p, r := t.D.MemHostAlloc(t.ctx, pageSize, driver.HostAllocPortable)
		t.ok(r, "host alloc")
		free := t.once("host memory", func(d driver.Driver) driver.Result { return d.MemFreeHost(t.ctx, p) })
		return func(f driver.Foreign) driver.Result { return free(f) }
	}},
	{"host register", unsafeCall, nil, func(t *T, _ driver.Stream) action {
		p := t.pageable(pageSize)
		return func(f driver.Foreign) driver.Result {
			r := f.MemHostRegister(t.ctx, p, pageSize, driver.HostRegisterPortable)
			if r == driver.Success {
				t.own("registered memory", uint64(uintptr(p)), func() driver.Result { return t.D.MemHostUnregister(t.ctx, p) })
			}
			return r
		}
	}},
	{"cuMemAlloc", unsafeCall, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			p, r := f.MemAlloc(t.ctx, 256)
			if r == driver.Success {
				t.own("device memory", uint64(p), func() driver.Result { return t.D.MemFree(t.ctx, p) })
			}
			return r
		}
	}},
	{"cuMemFree", unsafeCall, nil, func(t *T, _ driver.Stream) action {
		p, r := t.D.MemAlloc(t.ctx, 256)
		t.ok(r, "cuMemAlloc")
		free := t.once("device memory", func(d driver.Driver) driver.Result { return d.MemFree(t.ctx, p) })
		return func(f driver.Foreign) driver.Result { return free(f) }
	}},
	{"cuMemAllocAsync", unsafeCall, needs(memoryPools), func(t *T, s driver.Stream) action {
		return func(f driver.Foreign) driver.Result {
			p, r := f.MemAllocAsync(t.ctx, 256, s)
			if r == driver.Success {
				t.own("device memory", uint64(p), func() driver.Result {
					if r := t.D.MemFreeAsync(t.ctx, p, s); r != driver.Success {
						return r
					}
					return t.D.StreamSynchronize(t.ctx, s)
				})
			}
			return r
		}
	}},
	{"cuCtxSynchronize", alwaysKills, nil, func(t *T, _ driver.Stream) action {
		return func(f driver.Foreign) driver.Result { return f.CtxSynchronize(t.ctx) }
	}},
}

// blockingMatrix are the calls that reach a capturing stream through the
// legacy stream, if it is a blocking one.
var blockingMatrix = []matrixCall{
	{"synchronous copy", alwaysKills, nil, synchronousCopy},
	{"event record on the legacy stream", alwaysKills, nil, func(t *T, _ driver.Stream) action {
		e := t.newEvent(t.ctx)
		return func(f driver.Foreign) driver.Result { return f.EventRecord(t.ctx, e, driver.StreamLegacy) }
	}},
}

func synchronousCopy(t *T, _ driver.Stream) func(driver.Foreign) driver.Result {
	host := t.pageable(4096)
	return func(f driver.Foreign) driver.Result {
		if r := f.MemcpyHtoD(t.ctx, t.scratch, host, 4096); r != driver.Success {
			return r
		}
		return f.MemcpyDtoH(t.ctx, host, t.scratch, 4096)
	}
}

// captureMatrix is a case for every call and column.
func captureMatrix() (cases []Case) {
	for _, part := range []struct {
		calls  []matrixCall
		flags  driver.StreamFlags
		prefix string
		killed driver.Result
	}{
		{matrix, driver.StreamNonBlocking, "capture", driver.CaptureUnsupported},
		{blockingMatrix, driver.StreamDefault, "capture of a blocking stream", driver.CaptureImplicit},
	} {
		for _, call := range part.calls {
			for _, column := range matrixColumns {
				says, callResult, endResult := "harmless", driver.Success, driver.Success
				if column.kills[call.kills] {
					says, callResult, endResult = "kills", part.killed, driver.CaptureInvalid
				}
				cases = append(cases, Case{
					Name:  fmt.Sprintf("%s: %s, %s", part.prefix, call.name, column.name),
					Says:  says,
					Needs: call.needs,
					Run: func(t *T) {
						for _, mode := range column.modes {
							for _, from := range column.from {
								t.matrixCell(call, mode, from, part.flags, column.switched, callResult, endResult)
							}
						}
					},
				})
			}
		}
	}
	return cases
}

// matrixCell makes one call under one capture. In the switched column it does
// so twice: as another library that exchanges its thread's mode itself, and in
// this library's form, where that has the call.
func (t *T) matrixCell(call matrixCall, mode driver.CaptureMode, from place, flags driver.StreamFlags, switched bool, wantCall, wantEnd driver.Result) {
	t.Helper()
	forms := map[string]func(use action) driver.Result{
		"in the thread's mode": func(use action) driver.Result { return use(t.F) },
	}
	if switched {
		forms = map[string]func(use action) driver.Result{
			"switched by the caller": func(use action) driver.Result {
				before, r := t.F.ThreadExchangeStreamCaptureMode(driver.CaptureRelaxed)
				if r != driver.Success {
					return r
				}
				defer func() { _, _ = t.F.ThreadExchangeStreamCaptureMode(before) }()
				return use(t.F)
			},
			"switched by the library": func(use action) driver.Result {
				return use(library{t.D, t.F})
			},
		}
	}
	for form, through := range forms {
		what := fmt.Sprintf("%s mode, %v, %s: %s", modeName(mode), from, form, call.name)
		s := t.newStream(t.ctx, flags)
		use := call.make(t, t.newStream(t.ctx, driver.StreamNonBlocking))
		capturer := t.thread()
		caller := capturer
		if from == otherThread {
			caller = t.thread()
		}
		var got driver.Result
		end := t.capture(capturer, s, mode, func() {
			caller.do(func() { got = through(use) })
		})
		if got != wantCall {
			t.Errorf("%s: the call returns %v, want %v", what, got, wantCall)
		}
		if end != wantEnd {
			t.Errorf("%s: end-capture returns %v, want %v", what, end, wantEnd)
		}
		// Dead or alive, the capture is over and the stream works.
		status, r := t.D.StreamIsCapturing(t.ctx, s)
		t.ok(r, "%s: is-capturing afterwards", what)
		if status != driver.CaptureNone {
			t.Errorf("%s: the capture's status afterwards is %d", what, status)
		}
		t.ok(t.D.MemsetD8Async(t.ctx, t.scratch, 0, 64, s), "%s: memset afterwards", what)
		t.ok(t.D.StreamSynchronize(t.ctx, s), "%s: synchronize afterwards", what)
	}
}

// capture captures a memset on a stream, begun and ended on a thread, with body
// meanwhile, and returns what end-capture said. body runs on the calling
// goroutine and must not end the test.
func (t *T) capture(th *thread, s driver.Stream, mode driver.CaptureMode, body func()) (end driver.Result) {
	t.Helper()
	var begin, node driver.Result
	th.do(func() {
		if begin = t.F.StreamBeginCapture(t.ctx, s, mode); begin == driver.Success {
			node = t.F.MemsetD8Async(t.ctx, t.scratch, 0, 64, s)
		}
	})
	t.ok(begin, "begin capture")
	body()
	var g driver.Graph
	th.do(func() { g, end = t.F.StreamEndCapture(t.ctx, s) })
	if end == driver.Success {
		t.ok(t.D.GraphDestroy(g), "destroy the graph")
	} else if g != 0 {
		t.Errorf("end-capture returns %v and graph %#x, want none", end, g)
	}
	t.ok(node, "memset on the capturing stream")
	return end
}

// passedEvent is an event that has passed on a stream.
func (t *T) passedEvent(s driver.Stream) driver.Event {
	t.Helper()
	e := t.newEvent(t.ctx)
	t.ok(t.D.EventRecord(t.ctx, e, s), "record")
	t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
	return e
}

// once is something to be freed by the case or, where that fails, at its end.
func (t *T) once(kind string, free func(d driver.Driver) driver.Result) func(d driver.Driver) driver.Result {
	freed := false
	t.own(kind, 0, func() driver.Result {
		if freed {
			return driver.Success
		}
		return free(t.D)
	})
	return func(d driver.Driver) driver.Result {
		r := free(d)
		freed = freed || r == driver.Success
		return r
	}
}

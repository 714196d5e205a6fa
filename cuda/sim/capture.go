package sim

import (
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// capture is a stream capture: from begin to end, the work of the streams that
// take part is written down instead of done.
type capture struct {
	m           *Machine
	id          uint64
	origin      *stream
	mode        driver.CaptureMode
	thread      int // that began it
	invalidated bool
	nodes       []*node
	leases      []*lease // memory that its nodes allocate
	by          stack    // what invalidated it, of the capture beside a test
}

// node is a piece of work of a capture or graph.
type node struct {
	task
	context *gpuContext
	deps    []*node
}

// joined is a place in a capture: that of a stream which takes part in it, or
// of an event that was recorded there.
type joined struct {
	*capture
	tips []*node // what the next node depends on
}

var lastCapture atomic.Uint64

// invalidate makes a capture useless; ending it reports that.
func (c *capture) invalidate() {
	if c == c.m.beside && !c.invalidated {
		runtime.Callers(2, c.by[:])
	}
	c.invalidated = true
}

// join adds the stream to a capture, or takes it out of its capture if j is nil.
func (s *stream) join(j *joined) {
	s.joined = j
	if j == nil {
		delete(s.m.joined, s)
		return
	}
	s.m.joined[s] = struct{}{}
}

// end takes all streams out of the capture.
func (c *capture) end() {
	for s := range c.m.joined {
		if s.joined.capture == c {
			s.join(nil)
		}
	}
	delete(c.m.captures, c.id)
}

// capture writes work down that was submitted to a capturing stream.
func (s *stream) capture(t task) driver.Result {
	if s.joined.invalidated {
		return driver.CaptureInvalid
	}
	n := &node{task: t, context: s.context, deps: s.joined.tips}
	s.joined.nodes = append(s.joined.nodes, n)
	s.joined.tips = []*node{n}
	return driver.Success
}

// captureRecord records an event on a capturing stream: it stands for a place
// in the capture.
func (s *stream) captureRecord(e *event) driver.Result {
	if s.joined.invalidated {
		return driver.CaptureInvalid
	}
	e.latest, e.joined = nil, &joined{s.joined.capture, s.joined.tips}
	return driver.Success
}

// captureWait waits for an event where the stream or the event is part of a
// capture. A stream that waits for an event of a capture joins it.
func (s *stream) captureWait(e *event) driver.Result {
	switch {
	case s.joined != nil && s.joined.invalidated:
		return driver.CaptureInvalid
	case e.joined == nil && e.latest == nil:
		return driver.Success // it was never recorded
	case e.joined == nil:
		s.joined.invalidate()
		return driver.CaptureIsolation
	case s.m.captures[e.joined.id] == nil:
		return driver.CapturedEvent // that capture is over
	case e.joined.invalidated:
		return driver.CaptureInvalid
	case s.isLegacy():
		e.joined.invalidate()
		return driver.CaptureImplicit
	case s.joined == nil:
		s.join(&joined{e.joined.capture, e.joined.tips})
	case s.joined.capture != e.joined.capture:
		s.joined.invalidate()
		e.joined.invalidate()
		return driver.CaptureMerge
	default:
		s.joined.tips = union(s.joined.tips, e.joined.tips)
	}
	return driver.Success
}

func union(a, b []*node) []*node {
	all := slices.Clone(a)
	for _, n := range b {
		if !slices.Contains(all, n) {
			all = append(all, n)
		}
	}
	return all
}

// leaveCapture takes a stream that is destroyed out of its capture, which that
// ruins.
func (s *stream) leaveCapture() {
	if s.joined == nil {
		return
	}
	c := s.joined.capture
	s.join(nil)
	if c == s.m.beside {
		return // it goes on in other contexts
	}
	c.invalidate()
	if c.origin == s {
		c.drop()
	}
}

// drop ends a capture without a graph.
func (c *capture) drop() {
	c.end()
	dropAll(c.leases)
}

// unsafeCalls are not permitted during a capture that the calling thread's mode protects.
var unsafeCalls = [driver.CallCount]bool{
	driver.CallEventQuery: true, driver.CallEventSynchronize: true,
	driver.CallStreamQuery: true, driver.CallStreamSynchronize: true,
	driver.CallMemHostAlloc: true, driver.CallMemFreeHost: true,
	driver.CallMemHostRegister: true, driver.CallMemHostUnregister: true,
	driver.CallMemAlloc: true, driver.CallMemFree: true, driver.CallMemAllocManaged: true,
	driver.CallMemAdvise: true, driver.CallMemAdviseV1: true, driver.CallStreamAttachMemAsync: true,
}

// guardCaptures invalidates the captures that a call of the calling thread
// breaks, and refuses the call.
func (a *api) guardCaptures(call driver.Call) driver.Result {
	if !unsafeCalls[call] {
		return driver.Success
	}
	return a.guardUnsafe()
}

// guardUnsafe is guardCaptures for a call that is known to be unsafe.
//
// Any thread in global mode breaks a capture in global mode. Only the thread that began it
// breaks one in thread-local mode, and a thread in thread-local mode breaks only its own
// captures.
func (a *api) guardUnsafe() driver.Result {
	if !a.foreign || len(a.m.captures) == 0 {
		return driver.Success // the library's calls are made in relaxed mode
	}
	mode, thread := a.m.thread().mode, host.ThreadID()
	if mode == driver.CaptureRelaxed {
		return driver.Success
	}
	r := driver.Success
	for _, c := range a.m.captures {
		others := mode == driver.CaptureGlobal && c.mode == driver.CaptureGlobal
		if c.mode != driver.CaptureRelaxed && (others || c.thread == thread) {
			c.invalidate()
			r = driver.CaptureUnsupported
		}
	}
	return r
}

// guardLegacy refuses use of the legacy stream while a stream captures that it
// would wait for, and invalidates the capture.
func (c *gpuContext) guardLegacy() driver.Result {
	return c.invalidateCaptures((*stream).blocks, driver.CaptureImplicit)
}

// invalidateCaptures invalidates the captures that the given streams of the context take
// part in, and returns the result if there is one.
func (c *gpuContext) invalidateCaptures(of func(*stream) bool, result driver.Result) driver.Result {
	r := driver.Success
	for s := range c.m.joined {
		if s.context == c && of(s) {
			s.joined.invalidate()
			r = result
		}
	}
	return r
}

// guardSynchronize refuses to wait for the whole context while any of its
// streams captures, and invalidates the capture.
func (c *gpuContext) guardSynchronize() driver.Result {
	return c.invalidateCaptures(func(*stream) bool { return true }, driver.CaptureUnsupported)
}

// guardWait refuses to wait for a stream that captures, or that could not be
// waited for without one that does.
func (s *stream) guardWait() driver.Result {
	if s.joined != nil {
		s.joined.invalidate()
		return driver.CaptureUnsupported
	}
	if s.isLegacy() {
		return s.context.guardLegacy()
	}
	return driver.Success
}

// guardCaptured refuses to look at an event that stands for a place in a
// capture, and invalidates the capture.
func (e *event) guardCaptured() driver.Result {
	if e.joined == nil {
		return driver.Success
	}
	e.joined.invalidate()
	return driver.CapturedEvent
}

func (a *api) ThreadExchangeStreamCaptureMode(mode driver.CaptureMode) (driver.CaptureMode, driver.Result) {
	if r := a.enter(driver.CallThreadExchangeStreamCaptureMode); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if mode > driver.CaptureRelaxed {
		return 0, driver.InvalidValue
	}
	t := a.m.thread()
	before := t.mode
	t.mode = mode
	a.m.setThread(t)
	return before, driver.Success
}

func (a *api) StreamBeginCapture(c driver.Context, h driver.Stream, mode driver.CaptureMode) driver.Result {
	s, r := a.enterStream(driver.CallStreamBeginCapture, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	m := a.m
	switch {
	case mode > driver.CaptureRelaxed:
		return driver.InvalidValue
	case s.isLegacy():
		return driver.CaptureUnsupported
	case s.joined != nil:
		return driver.IllegalState
	}
	capt := &capture{m: m, id: lastCapture.Add(1), origin: s, mode: mode, thread: host.ThreadID()}
	m.captures[capt.id] = capt
	s.join(&joined{capture: capt})
	return driver.Success
}

func (a *api) StreamEndCapture(c driver.Context, h driver.Stream) (driver.Graph, driver.Result) {
	s, r := a.enterStream(driver.CallStreamEndCapture, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if s.joined == nil {
		return 0, driver.IllegalState
	}
	capt := s.joined.capture
	switch {
	case capt.origin != s:
		capt.invalidate()
		return 0, driver.CaptureUnmatched
	case capt.mode != driver.CaptureRelaxed && capt.thread != host.ThreadID():
		capt.drop()
		return 0, driver.CaptureWrongThread
	case capt.invalidated:
		capt.drop()
		return 0, driver.CaptureInvalid
	case len(ancestors(s.joined.tips)) < len(capt.nodes):
		capt.drop()
		return 0, driver.CaptureUnjoined
	}
	capt.end()
	return a.m.newGraph(capt.nodes, capt.leases), driver.Success
}

// ancestors are all nodes that those depend on, themselves included.
func ancestors(tips []*node) map[*node]bool {
	seen := map[*node]bool{}
	tips = slices.Clone(tips)
	for len(tips) > 0 {
		n := tips[len(tips)-1]
		tips = tips[:len(tips)-1]
		if !seen[n] {
			seen[n] = true
			tips = append(tips, n.deps...)
		}
	}
	return seen
}

func (a *api) StreamIsCapturing(c driver.Context, h driver.Stream) (driver.CaptureStatus, driver.Result) {
	s, r := a.enterAsked(driver.CallStreamIsCapturing, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	status, _, r := s.captureInfo()
	return status, r
}

func (a *api) StreamGetCaptureInfo(c driver.Context, h driver.Stream) (driver.CaptureStatus, uint64, driver.Result) {
	s, r := a.enterAsked(driver.CallStreamGetCaptureInfo, c, h)
	if r != driver.Success {
		return 0, 0, r
	}
	defer a.leave()
	return s.captureInfo()
}

// enterAsked is enterStream for a query that needs no current context, except of the
// streams that every context has.
func (a *api) enterAsked(call driver.Call, c driver.Context, h driver.Stream) (*stream, driver.Result) {
	if c != 0 {
		return a.enterStream(call, c, h)
	}
	if r := a.enter(call); r != driver.Success {
		return nil, r
	}
	s := a.m.streams[h]
	var r driver.Result
	if s != nil {
		r = s.context.lost
	} else if ctx := a.m.resolve(c); ctx == nil {
		r = driver.InvalidContext
	} else if r = ctx.lost; r == driver.Success {
		s, r = a.m.stream(ctx, h)
	}
	if r != driver.Success {
		a.leave()
		return nil, r
	}
	return s, driver.Success
}

// captureInfo breaks no capture, but fails for the legacy stream while
// a stream captures that it would wait for.
func (s *stream) captureInfo() (driver.CaptureStatus, uint64, driver.Result) {
	if s.isLegacy() {
		for other := range s.m.joined {
			if other.context == s.context && other.blocks() {
				return 0, 0, driver.CaptureImplicit
			}
		}
	}
	switch {
	case s.joined == nil:
		return driver.CaptureNone, 0, driver.Success
	case s.joined.invalidated:
		return driver.CaptureInvalidated, 0, driver.Success
	}
	return driver.CaptureActive, s.joined.id, driver.Success
}

package cuda

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// CaptureMode says whose calls can break a capture: the driver refuses calls
// that might wait for captured work (queries and synchronizations of streams
// and events, cuMemAlloc and pinned allocations), and such a call ends the
// capture. This library's own calls never do, in any mode.
type CaptureMode uint8

const (
	// CaptureThreadLocal, the default: such calls by other libraries on the
	// capturing goroutine.
	CaptureThreadLocal CaptureMode = iota
	// CaptureGlobal: such calls on any thread of the process.
	CaptureGlobal
	// CaptureRelaxed: none of them.
	CaptureRelaxed
)

// String names the mode.
func (m CaptureMode) String() string {
	return errs.Name("CaptureMode", m, []string{CaptureThreadLocal: "thread-local", CaptureGlobal: "global", CaptureRelaxed: "relaxed"})
}

var captureModes = map[CaptureMode]driver.CaptureMode{
	CaptureThreadLocal: driver.CaptureThreadLocal,
	CaptureGlobal:      driver.CaptureGlobal,
	CaptureRelaxed:     driver.CaptureRelaxed,
}

// CaptureOptions change how WithCapture captures.
type CaptureOptions struct {
	// Mode is thread-local by default.
	Mode CaptureMode
	// Uses is memory that the graph's kernels use, as far as the caller declares it: while any
	// of it is suspended, Launch of the graph returns ErrSuspended. Graph.AddUses adds to it.
	Uses []Span
}

// WithCapture makes a Graph of the work that body puts on the stream, which is
// written down instead of run, and on the streams that wait for its events:
// those must be joined back, by letting the stream wait for an event of theirs,
// before body returns. The caller closes the graph.
//
// body runs on the calling goroutine, which is locked to its thread meanwhile.
// The capture ends with it, even if it fails, panics or ends the goroutine: then there
// is no graph, and nothing is left of it. If the driver fails to end the capture, Close
// and WithCapture of the stream try again first. An error of body is wrapped. If a call
// broke the capture the error is ErrCapturing and says which calls do.
//
// Addresses are baked into the graph: memory that it uses must stay mapped
// while it is launched. What Upload stages belongs to the graph. It needs a driver for
// CUDA 11.4; with an older one the error is ErrNotSupported.
func (s *Stream) WithCapture(o CaptureOptions, body func() error) (*Graph, error) {
	const op = "cuda.Stream.WithCapture"
	if err := s.use(op); err != nil {
		return nil, err
	}
	defer s.in.Release()
	if body == nil {
		return nil, errs.Invalid(op, "no function", "pass the function whose work is to be captured")
	}
	if _, ok := captureModes[o.Mode]; !ok {
		return nil, errs.Invalid(op, o.Mode.String(), "use CaptureThreadLocal, CaptureGlobal or CaptureRelaxed")
	}
	if err := checkUses(op, o.Uses); err != nil {
		return nil, err
	}
	if s.in.IsLegacy() {
		return nil, errs.Invalid(op, "the legacy default stream", "the driver captures no work of it: capture on a stream of your own")
	}
	if s.own {
		return nil, errOwnCaptured(op)
	}
	s.endStuck(op)
	if err := s.notCapturing(op); err != nil {
		return nil, err
	}
	if sys := s.sys(); !sys.Drv.Has(driver.CallGraphInstantiate) { // before the body is run in vain
		return nil, s.result(op, driver.CallGraphInstantiate, driver.MissingEntryPoint)
	}
	s.sys().PollReclaim()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := s.beginCapture(op, o.Mode)
	if err != nil {
		return nil, err
	}
	returned := false
	defer func() {
		if !returned { // a panic, or the end of the goroutine, which continues
			_ = c.discard(op, nil)
		}
	}()
	err = body()
	returned = true
	if err != nil {
		return nil, c.discard(op, fmt.Errorf("%s: %w", op, err))
	}
	g, err := c.graph(op)
	if err == nil {
		g.g.uses = slices.Clone(o.Uses)
	}
	return g, err
}

func checkUses(op string, uses []Span) error {
	for _, u := range uses {
		if u.Bytes <= 0 || u.At+Ptr(u.Bytes-1) < u.At {
			return errs.Invalid(op, fmt.Sprintf("a use of %d bytes at %v", u.Bytes, u.At),
				"name the addresses that the graph uses: at least one byte, and none behind the last address")
		}
	}
	return nil
}

// errOwnCaptured refuses to capture on the device's own stream: an operation that
// names no stream waits for its work there, and captured work cannot be waited for.
func errOwnCaptured(op string) error {
	return errs.Invalid(op, "the device's own stream", "operations without a stream wait for it: capture on a stream of your own")
}

// captures are the captures that WithCapture began and did not end yet, by the
// driver's id.
type captures struct {
	mu   lock.Mutex[lock.Leaf]
	byID map[uint64]*capture
}

func (c *captures) find(id uint64) *capture {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byID[id]
}

func (c *captures) add(n *capture) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byID == nil {
		c.byID = map[uint64]*capture{}
	}
	c.byID[n.id] = n
}

func (c *captures) remove(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byID, id)
}

// capture is one that WithCapture began.
type capture struct {
	sys    *System
	on     *Stream
	stream *core.Stream // of on
	mode   CaptureMode
	id     uint64

	// mu is held over every upload, so that none is under way when the capture
	// ends.
	mu     lock.Mutex[lock.Staging]
	ended  bool
	staged staged
}

func (s *Stream) beginCapture(op string, mode CaptureMode) (*capture, error) {
	d, ctx, h := s.sys().Drv, s.in.Ctx.Handle, s.in.Handle
	if r := s.in.Joining(func() driver.Result { return d.StreamBeginCapture(ctx, h, captureModes[mode]) }); r != driver.Success {
		return nil, s.result(op, driver.CallStreamBeginCapture, r)
	}
	c := &capture{sys: s.dev.sys, on: s, stream: s.in, mode: mode, staged: staged{losses: s.sys().Losses()}}
	_, id, r := s.in.Capture()
	if r != driver.Success {
		return nil, c.discard(op, s.result(op, driver.CallStreamGetCaptureInfo, r))
	}
	c.id = id
	c.sys.captures.add(c)
	return c, nil
}

// end ends the capture, on the thread that began it.
func (c *capture) end(op string) (driver.Graph, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	c.sys.captures.remove(c.id)
	// Another capture, which another library began in place of this one, is not
	// ours to end. Without an id there was no time for that.
	if status, id, r := c.stream.Capture(); c.id != 0 && r == driver.Success &&
		(status == driver.CaptureNone || status == driver.CaptureActive && id != c.id) {
		return 0, errs.New(errs.Failure{Op: op, Kind: errs.Capturing,
			Asked: fmt.Sprintf("the capture of stream %#x was ended by another library", uintptr(c.stream.Handle)),
			Hint:  "leave the end of the capture to WithCapture"})
	}
	ctx := c.stream.Ctx
	template, r := ctx.System().Drv.StreamEndCapture(ctx.Handle, c.stream.Handle)
	if r == driver.Success {
		return template, nil
	}
	err := c.broken(op, r)
	// Mostly the capture is over now. A stream must not stay in one.
	id := c.id
	if id == 0 { // it began just now
		if _, id, _ = c.stream.Capture(); id == 0 {
			id = brokenCapture
		}
	}
	c.on.stuck.Store(id)
	c.on.endStuck(op)
	return 0, err
}

// brokenCapture stands for a capture whose id is not known: the driver gives none for one that
// is broken.
const brokenCapture = math.MaxUint64

// endStuck ends the capture that WithCapture could not end, unless it is over. If that
// fails again the next Close or WithCapture tries it.
func (s *Stream) endStuck(op string) {
	stuck := s.stuck.Swap(0)
	if stuck == 0 {
		return
	}
	status, id, r := s.in.Capture()
	if r == driver.Success && (status == driver.CaptureNone || status == driver.CaptureActive && id != stuck) {
		return // it is over; another library may have begun one since
	}
	if r == driver.Success {
		var template driver.Graph
		if template, r = s.sys().Drv.StreamEndCapture(s.in.Ctx.Handle, s.in.Handle); r == driver.Success {
			_ = destroyTemplate(op, s.in.Ctx, template, nil)
			return
		}
	}
	s.stuck.Store(stuck)
}

// broken explains why a capture came to nothing.
func (c *capture) broken(op string, r driver.Result) error {
	f := errs.Failure{Op: op, Call: driver.CallStreamEndCapture, Result: r,
		Asked: fmt.Sprintf("a capture of stream %#x in %v mode", uintptr(c.stream.Handle), c.mode)}
	switch r {
	case driver.CaptureInvalid:
		const such = "queries and synchronizations of streams and events, cuMemAlloc, pinned allocations, and those of whole contexts or the legacy stream"
		switch c.mode {
		case CaptureGlobal:
			f.Hint = "a call of another library, on any thread, broke it (" + such + "): capture in thread-local mode, or keep them apart"
		case CaptureThreadLocal:
			f.Hint = "a call of another library in the body broke it (" + such + "): move it out, or capture in relaxed mode"
		default:
			f.Hint = "a call of another library broke it: it waited for the captured stream, for the whole context, or used the legacy stream; keep them apart"
		}
	case driver.CaptureUnjoined:
		f.Hint = "record an event on each stream that took part and let the captured stream wait for it, before the function returns"
	}
	return errs.New(f)
}

// discard ends the capture without a graph, after an operation that failed with cause.
func (c *capture) discard(op string, cause error) error {
	template, err := c.end(op)
	c.staged.release(c.sys)
	if err != nil {
		return fmt.Errorf("%w (and ending the capture failed: %w)", cause, err)
	}
	return destroyTemplate(op, c.stream.Ctx, template, cause)
}

// destroyTemplate destroys what was captured, after an operation that failed with cause.
func destroyTemplate(op string, ctx *core.Context, template driver.Graph, cause error) error {
	sys := ctx.System()
	undo := sys.NewUndo(ctx.Device)
	undo.Own("graph", 0, func() error {
		if r := ctx.TeardownUnlessGone(func() driver.Result { return sys.Drv.GraphDestroy(template) }); r != driver.Success {
			return ctx.CallError(op, driver.CallGraphDestroy, r, "the captured graph")
		}
		return nil
	})
	return undo.After(cause)
}

// graph ends the capture and makes what was captured executable.
func (c *capture) graph(op string) (*Graph, error) {
	template, err := c.end(op)
	if err != nil {
		c.staged.release(c.sys)
		return nil, err
	}
	d, ctx := c.sys.core.Drv, c.stream.Ctx
	exec, r := d.GraphInstantiate(ctx.Handle, template)
	if r != driver.Success {
		err := ctx.CallError(op, driver.CallGraphInstantiate, r, fmt.Sprintf("what was captured on stream %#x", uintptr(c.stream.Handle)))
		c.staged.release(c.sys)
		return nil, destroyTemplate(op, ctx, template, err)
	}
	return newGraph(c.sys, ctx, template, exec, c.staged), nil
}

// upload stages src in the graph's memory and copies it as work on a stream that
// takes part. If the capture has ended meanwhile nothing was taken.
func (c *capture) upload(op string, s *Stream, dst driver.Ptr, src []byte, g core.Guard) (taken bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false, nil
	}
	on := s.in
	at, err := c.staged.reserve(op, &c.sys.pinned, s.ring.home, len(src))
	if err != nil {
		return false, err
	}
	copy(unsafe.Slice((*byte)(at), len(src)), src)
	if g != nil {
		if err := g.Enter(); err != nil {
			return false, err
		}
		defer g.Leave()
	}
	sys := c.sys.core
	if r := sys.Drv.MemcpyHtoDAsync(on.Ctx.Handle, dst, at, uint64(len(src)), on.Handle); r != driver.Success {
		return false, on.Ctx.CallError(op, driver.CallMemcpyHtoDAsync, r,
			fmt.Sprintf("%s to %#x on stream %#x", errs.Bytes(len(src)), uint64(dst), uintptr(on.Handle)))
	}
	c.staged.used += len(src)
	return true, c.checkStrayed(op, on, "a copy")
}

// checkStrayed refuses what was put on the stream while the capture ended, and may be
// outside of the graph.
func (c *capture) checkStrayed(op string, on *core.Stream, what string) error {
	_, id, r := on.Capture()
	if r == driver.Success && id == c.id {
		return nil
	}
	c.staged.strayed = true
	on.Unsettle()
	if r != driver.Success { // it may be in the graph, or outside of it
		return on.Ctx.CallError(op, driver.CallStreamGetCaptureInfo, r, fmt.Sprintf("%s on stream %#x", what, uintptr(on.Handle)))
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.Capturing,
		Asked: fmt.Sprintf("the capture of stream %#x ended during %s", uintptr(on.Handle), what),
		Hint:  "leave the end of the capture to WithCapture, and a stream that captures to one goroutine at a time"})
}

// stagedBytes is how much pinned memory a graph takes at a time: small uploads
// share it.
const stagedBytes = 64 << 10

// staged is what a graph keeps for its work: the pinned memory of its uploads, and the
// functions that it calls.
type staged struct {
	functions []driver.HostFunc
	calls     *calls // of the functions

	blocks []pinnedBlock
	used   int   // of the last one
	losses int64 // the System's, when the capture began
	// strayed: a copy may have run outside of the graph, and no event marks its end.
	strayed bool
}

// reserve returns memory for n more bytes, which are not in use yet.
func (s *staged) reserve(op string, pool *pinnedPool, ctx *core.Context, n int) (unsafe.Pointer, error) {
	if last := len(s.blocks) - 1; last >= 0 && s.blocks[last].size-s.used >= n {
		return unsafe.Add(s.blocks[last].mem, s.used), nil
	}
	b, err := pool.get(op, ctx, max(n, stagedBytes))
	if err != nil {
		return nil, err
	}
	s.blocks, s.used = append(s.blocks, b), 0
	return b.mem, nil
}

// bytes returns the size of all blocks.
func (s *staged) bytes() (n uint64) {
	for _, b := range s.blocks {
		n += uint64(b.size)
	}
	return n
}

// release gives the memory back and releases the functions; Drain waits for the calls
// that are still to be made. The graph does not run any more, or never did.
func (s *staged) release(sys *System) {
	for _, h := range s.functions {
		if s.strayed {
			break // the driver may call them at any time
		}
		sys.core.Drv.ReleaseHostFunc(h, sys.core.Pending())
	}
	s.functions = nil
	for _, b := range s.blocks {
		if s.strayed {
			sys.pinned.keep(b)
			continue
		}
		sys.pinned.giveBack(b, s.losses)
	}
	s.blocks = nil
}

// capture returns the capture that the stream takes part in. The graph of one that
// WithCapture did not begin keeps nothing; the hint says what to do instead.
func (s *Stream) capture(op, hint string) (*capture, error) {
	status, id, r := s.in.Capture()
	if r != driver.Success {
		return nil, s.result(op, driver.CallStreamGetCaptureInfo, r)
	}
	if c := s.dev.sys.captures.find(id); c != nil {
		return c, nil
	}
	f := errs.Failure{Op: op, Kind: errs.Capturing}
	switch status {
	case driver.CaptureInvalidated:
		f.Asked = fmt.Sprintf("stream %#x takes part in a capture that is broken", s.handle())
		f.Hint = "end the capture and capture again"
	default:
		f.Asked = fmt.Sprintf("stream %#x takes part in a capture that this System did not begin", s.handle())
		f.Hint = hint
	}
	return nil, errs.New(f)
}

// mayWait refuses a wait for an event that would end a capture: the driver
// joins a stream to the capture of the event, and nothing else.
func (s *Stream) mayWait(op string, last record) error {
	status, id, r := s.in.Capture()
	if r != driver.Success {
		return s.result(op, driver.CallStreamGetCaptureInfo, r)
	}
	capturing := status != driver.CaptureNone
	f := errs.Failure{Op: op, Kind: errs.Capturing}
	switch {
	case !last.captured && !capturing:
		return nil
	case last.captured && s.own:
		return errOwnCaptured(op)
	case status == driver.CaptureInvalidated:
		f.Asked = fmt.Sprintf("stream %#x, which takes part in a capture that is broken, for an event", s.handle())
		f.Hint = "end the capture and capture again"
	case last.captured && s.in.IsLegacy():
		f.Asked = "the legacy default stream for an event of a capture"
		f.Hint = "it cannot take part in a capture: use a stream of your own"
	case last.captured && (!capturing || last.capture == id):
		return nil
	case last.captured:
		f.Asked = fmt.Sprintf("stream %#x, which takes part in one capture, for an event of another", s.handle())
		f.Hint = "two captures cannot be joined: record the event anew"
	default:
		f.Asked = fmt.Sprintf("stream %#x, which captures a graph, for an event that was recorded outside of it", s.handle())
		f.Hint = "wait for it before the capture begins, or let the stream wait for it that the graph is launched on"
	}
	return errs.New(f)
}

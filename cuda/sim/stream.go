package sim

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// stream is a queue of work that is done in order.
type stream struct {
	m        *Machine
	handle   driver.Stream // 0 for a legacy stream
	id       uint64
	context  *gpuContext
	flags    driver.StreamFlags
	priority int32 // kept, but work of all priorities is done alike
	object   *object
	queue    []*op
	tail     *op // the last of queue; nil when it is empty
	held     bool
	joined   *joined // while it captures
	threads  bool    // it is a thread's own stream

	// Of a machine that looks for races, as in trail:
	behind map[*stream]uint64
	floor  uint64
}

// op is a piece of work on a stream.
type op struct {
	stream *stream
	task
	order   uint64 // of its submission, among those of objects
	deps    []*op  // on other streams
	running bool
	done    bool
	at      time.Time // when it was done
	trail   *trail    // of a machine that looks for races
}

// site is where work is done: the context that it belongs to, and the stream in
// whose order it is done, which a graph's work has from the launch.
type site struct {
	*gpuContext
	stream    *stream
	submitted uint64 // the order of the op
	op        *op
	nodes     []*node // of a graph's work on a machine that looks for races: the node, behind those of the graphs around its own
	kernel    string  // its name, of a kernel's work
}

// task is what an op does. It can be done several times, as part of a graph.
type task struct {
	// run does the work, without the machine's lock. nil does nothing.
	run func(site) *fault
	// ready reports, with the lock held, whether the work can begin. nil means that
	// it always can.
	ready func(site) bool
	// after is called when the work was done or dropped, with the lock held.
	after func()
	// long work may block, so it gets a goroutine of its own.
	long bool
	// kernels are what a launch calls: one, or those of a graph and of the graphs in it.
	kernels []*function
}

// fault is why work could not be done.
type fault struct {
	result driver.Result
	text   string
}

var lastStreamID atomic.Uint64

// blocks reports whether the stream and the legacy stream wait for each other.
func (s *stream) blocks() bool { return s.flags&driver.StreamNonBlocking == 0 }

func (s *stream) isLegacy() bool { return s == s.context.legacy }

// stream finds a stream by its handle, in the context of the call.
func (m *Machine) stream(c *gpuContext, h driver.Stream) (*stream, driver.Result) {
	switch h {
	case driver.StreamNull, driver.StreamLegacy:
		return c.legacy, driver.Success
	case driver.StreamPerThread:
		return m.perThread(c), driver.Success
	}
	s := m.streams[h]
	if s == nil {
		return nil, driver.InvalidHandle
	}
	return s, s.context.lost
}

// perThread is the calling thread's own stream of a context.
func (m *Machine) perThread(c *gpuContext) *stream {
	t := host.ThreadID()
	s := c.threads[t]
	if s == nil {
		s = &stream{m: m, id: lastStreamID.Add(1), context: c, threads: true}
		c.threads[t] = s
	}
	return s
}

// enterStream is enter for a call on a stream. The context is the stream's.
func (a *api) enterStream(call driver.Call, c driver.Context, h driver.Stream) (*stream, driver.Result) {
	ctx, r := a.enterContext(call, c)
	if r != driver.Success {
		return nil, r
	}
	s, r := a.m.stream(ctx, h)
	if r != driver.Success {
		a.leave()
		return nil, r
	}
	return s, driver.Success
}

// submit puts work on a stream, or into the capture that the stream is part
// of. It returns at once, unless a call waits for all of the context's work.
//
// It begins behind the work before it on the stream, behind deps, and, between
// the legacy stream and the streams that block with it, behind the work that was
// submitted there before. It returns nil if there is no op, as in a capture.
func (s *stream) submit(t task, deps ...*op) (*op, driver.Result) {
	m, c := s.m, s.context
	for c.stalls > 0 && s.joined == nil && !m.closed && c.lost == driver.Success {
		m.changed.Wait()
	}
	switch {
	case m.outcome(c) != driver.Success:
		return nil, m.outcome(c)
	case c.gone:
		return nil, driver.InvalidContext
	case s.handle != 0 && m.streams[s.handle] != s:
		return nil, driver.InvalidHandle // destroyed meanwhile
	case s.joined != nil:
		return nil, s.capture(t)
	case s.isLegacy():
		if r := c.guardLegacy(); r != driver.Success {
			return nil, r
		}
	}
	o := &op{stream: s, task: t}
	for _, d := range deps {
		o.waitFor(d)
	}
	if s.isLegacy() {
		for other := range c.working {
			if other.blocks() && other != s {
				o.waitFor(other.tail)
			}
		}
	} else if s.blocks() {
		o.waitFor(c.legacy.tail)
	}
	m.enqueue(o)
	return o, driver.Success
}

// enqueue puts work at the end of its stream's.
func (m *Machine) enqueue(o *op) {
	s := o.stream
	o.order = created.Add(1)
	o.follow()
	s.queue = append(s.queue, o)
	s.tail = o
	if s != s.context.late {
		s.context.working[s] = struct{}{}
	}
	m.engine.activate(s)
	m.engine.stir()
	m.startEngine()
}

func (o *op) site() site {
	return site{gpuContext: o.stream.context, stream: o.stream, submitted: o.order, op: o}
}

func (o *op) waitFor(d *op) {
	if d != nil && !d.done {
		o.deps = append(o.deps, d)
	}
}

// finish marks the head of the queue as done.
func (s *stream) finish(o *op) {
	o.complete()
	o.retire()
	if len(s.queue) == 0 || s.queue[0] != o {
		return // it was discarded while it ran
	}
	s.queue = s.queue[1:]
	s.settle()
}

// discard drops the stream's work: what waits for it goes on.
func (s *stream) discard() {
	for _, o := range s.queue {
		o.complete()
		if !o.running {
			o.retire()
		}
	}
	s.queue = nil
	s.settle()
}

// complete marks the work as done, so that whatever waits for it goes on.
func (o *op) complete() {
	if !o.done {
		o.done, o.at = true, time.Now()
		o.end()
	}
}

// retire drops what is no longer needed once the work neither runs nor will run.
func (o *op) retire() {
	if o.after != nil {
		o.after()
	}
	o.deps, o.task = nil, task{}
}

// settle forgets a stream that was destroyed, once it has no more work.
func (s *stream) settle() {
	if len(s.queue) > 0 {
		return
	}
	s.queue, s.tail = nil, nil
	delete(s.context.working, s)
	if s.handle != 0 && s.m.streams[s.handle] == nil {
		s.detach()
	}
}

// targets are the last pieces of work that a wait for the stream waits for: on
// the legacy stream, those of all streams that it orders.
func (s *stream) targets() []*op {
	var all []*op
	if s.isLegacy() {
		for other := range s.context.working {
			if other.blocks() {
				all = append(all, other.tail)
			}
		}
	} else if s.tail != nil {
		all = append(all, s.tail)
	}
	return all
}

func (a *api) StreamCreate(c driver.Context, flags driver.StreamFlags) (driver.Stream, driver.Result) {
	return a.newStream(driver.CallStreamCreate, c, flags, 0)
}

// greatestPriority is that of the device on which the driver was measured; the
// least is 0.
const greatestPriority = -5

func (a *api) StreamCreateWithPriority(c driver.Context, flags driver.StreamFlags, priority int32) (driver.Stream, driver.Result) {
	return a.newStream(driver.CallStreamCreateWithPriority, c, flags, min(max(priority, greatestPriority), 0))
}

func (a *api) CtxGetStreamPriorityRange(c driver.Context) (least, greatest int32, r driver.Result) {
	if _, r := a.enterContext(driver.CallCtxGetStreamPriorityRange, c); r != driver.Success {
		return 0, 0, r
	}
	defer a.leave()
	return 0, greatestPriority, driver.Success
}

func (a *api) StreamGetPriority(c driver.Context, h driver.Stream) (int32, driver.Result) {
	s, r := a.enterStream(driver.CallStreamGetPriority, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return s.priority, driver.Success
}

func (a *api) newStream(call driver.Call, c driver.Context, flags driver.StreamFlags, priority int32) (driver.Stream, driver.Result) {
	ctx, r := a.enterContext(call, c)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	if flags&^driver.StreamNonBlocking != 0 {
		return 0, driver.InvalidValue
	}
	s := &stream{m: m, handle: driver.Stream(newHandle()), id: lastStreamID.Add(1), context: ctx, flags: flags, priority: priority}
	s.object = m.track(KindStream, uint64(s.handle), 0)
	m.streams[s.handle] = s
	return s.handle, driver.Success
}

// StreamDestroy does not wait: the stream's work is still done.
func (a *api) StreamDestroy(c driver.Context, h driver.Stream) driver.Result {
	owner := func() *gpuContext {
		if s := a.m.streams[h]; s != nil {
			return s.context
		}
		return nil
	}
	if _, r := a.enterToDestroy(driver.CallStreamDestroy, c, owner); r != driver.Success {
		return r
	}
	defer a.leave()
	s := a.m.streams[h]
	if s == nil {
		return driver.InvalidHandle
	}
	s.leaveCapture()
	a.m.untrack(s.object)
	delete(a.m.streams, h)
	s.settle()
	return s.context.lost
}

func (a *api) StreamQuery(c driver.Context, h driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallStreamQuery, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if r := s.guardWait(); r != driver.Success {
		return r
	}
	targets := s.targets()
	if len(targets) == 0 {
		return driver.Success
	}
	for _, o := range targets {
		a.m.nudge(o)
	}
	return driver.NotReady
}

func (a *api) StreamSynchronize(c driver.Context, h driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallStreamSynchronize, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if r := s.guardWait(); r != driver.Success {
		return r
	}
	a.m.await(s.targets()...)
	return a.m.outcome(s.context)
}

func (a *api) StreamWaitEvent(c driver.Context, h driver.Stream, e driver.Event) driver.Result {
	s, r := a.enterStream(driver.CallStreamWaitEvent, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	ev := a.m.events[e]
	if ev == nil {
		return driver.InvalidHandle
	}
	if s.joined != nil || ev.joined != nil {
		return s.captureWait(ev)
	}
	if ev.latest == nil || ev.latest.done {
		return driver.Success
	}
	_, r = s.submit(task{}, ev.latest)
	return r
}

func (a *api) StreamGetCtx(c driver.Context, h driver.Stream) (driver.Context, driver.Result) {
	s, r := a.enterStream(driver.CallStreamGetCtx, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return s.context.handle, driver.Success
}

func (a *api) StreamGetFlags(c driver.Context, h driver.Stream) (driver.StreamFlags, driver.Result) {
	s, r := a.enterStream(driver.CallStreamGetFlags, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return s.flags, driver.Success
}

func (a *api) StreamGetID(c driver.Context, h driver.Stream) (uint64, driver.Result) {
	s, r := a.enterStream(driver.CallStreamGetID, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return s.id, driver.Success
}

// Hold keeps a stream's work from being done until Release, or until the
// function that it returns is called: work that is submitted stays undone, and
// a call that waits for it waits, Close of the stream and of memory included. So a
// test defers the release at once, for the case that it fails in between:
//
//	defer machine.Hold(stream.Handle())()
//
// 0 and 1 mean the legacy streams of all contexts. A handle that names no stream
// panics.
func (m *Machine) Hold(handle uintptr) (release func()) {
	if !m.hold(driver.Stream(handle), true) {
		panic(fmt.Sprintf("sim: Hold(%#x): there is no such stream on %s", handle, m.name))
	}
	return func() { m.Release(handle) }
}

// Release ends Hold. It is idempotent.
func (m *Machine) Release(handle uintptr) { m.hold(driver.Stream(handle), false) }

func (m *Machine) hold(h driver.Stream, held bool) (found bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	hold := func(s *stream) { s.held, found = held, true }
	if s := m.streams[h]; s != nil {
		hold(s)
	}
	for _, c := range m.contexts {
		if h <= driver.StreamLegacy {
			hold(c.legacy)
		}
		for s := range c.working { // and what was destroyed before its work was done
			if s.handle == h && h != 0 {
				hold(s)
			}
		}
	}
	m.engine.stir()
	m.startEngine()
	return found
}

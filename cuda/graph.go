package cuda

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Graph is GPU work that was captured once, by [Stream.WithCapture], and can be
// launched as one piece any number of times. It owns the pinned memory of the uploads
// in it; the caller keeps all other memory mapped.
type Graph struct {
	g       *graph
	watched life.Watched
}

// graph is the inner state.
type graph struct {
	core.Object
	closer life.Closer
	ending life.Ending // after the functions of OnClose
	sys    *System
	ctx    *core.Context // of the stream that it was captured on
	staged staged

	// mu guards the rest.
	mu       lock.Mutex[lock.Stem]
	uses     []Span
	template driver.Graph // until it is destroyed
	exec     driver.GraphExec
	// last is behind the latest launch, and so behind all: the driver runs the
	// launches of one graph one after the other.
	last launch
	// hooks run once the graph is gone.
	hooks []func()
}

// launch is what is known of the latest launch.
type launch struct {
	mark   core.Mark
	marked bool
	// unmarked: no event marks the end of a launch, so Close waits for everything.
	unmarked bool
}

// newGraph takes over what was captured.
func newGraph(sys *System, ctx *core.Context, template driver.Graph, exec driver.GraphExec, s staged) *Graph {
	in := &graph{sys: sys, ctx: ctx, staged: s, template: template, exec: exec}
	// It was only needed to make the other. If this fails, Close tries again.
	if ctx.Observe(sys.core.Drv.GraphDestroy(template)) == driver.Success {
		in.template = 0
	}
	sys.core.Track(in, life.KindGraph, s.bytes())
	g := &Graph{g: in}
	in.Watch(&g.watched)
	return g
}

// Launch puts the graph's work on the stream, behind earlier launches of the
// same graph on any stream. It returns at once. On a stream that captures it returns
// ErrCapturing, since that capture's graph would outlive this one. While memory is suspended
// that CaptureOptions.Uses or AddUses names it returns ErrSuspended.
func (g *Graph) Launch(s *Stream) error {
	const op = "cuda.Graph.Launch"
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	if err := g.use(op, s.dev.sys); err != nil {
		return err
	}
	defer g.g.closer.Release()
	if err := s.notCapturing(op); err != nil {
		return err
	}
	for _, u := range g.g.usesNow() {
		if err := s.checkNotSuspended(op, u.At, u.Bytes); err != nil {
			return err
		}
	}
	return s.in.Uncaptured(op, func() error { return g.g.launch(op, s) })
}

// AddUses declares more memory that the graph's kernels use, as CaptureOptions.Uses does: for a
// caller that knows it only after the capture. It is safe for concurrent use.
func (g *Graph) AddUses(uses ...Span) error {
	const op = "cuda.Graph.AddUses"
	if err := checkUses(op, uses); err != nil {
		return err
	}
	in, err := g.inner(op)
	if err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.uses = slices.Concat(in.uses, uses)
	return nil
}

// usesNow returns what is declared, which does not change any more.
func (g *graph) usesNow() []Span {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.uses
}

// launch launches the graph on a stream that does not capture.
func (g *graph) launch(op string, s *Stream) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r := s.sys().Drv.GraphLaunch(s.in.Ctx.Handle, g.exec, s.in.Handle); r != driver.Success {
		return s.result(op, driver.CallGraphLaunch, r)
	}
	g.await(s)
	m, capturing, err := s.in.Mark(op)
	switch {
	case capturing: // another library's: the launch may be in that capture, or before it
		g.last.unmarked = true
		s.in.Unsettle()
		return core.CapturingError(op, s.in)
	case err != nil: // the launch was made all the same
		g.last.unmarked = true
		return nil
	}
	if g.last.marked {
		g.last.mark.Release()
	}
	g.last.mark, g.last.marked = m, true
	return nil
}

// await makes Drain wait for the calls of a launch that was made on the stream.
func (g *graph) await(s *Stream) {
	if len(g.staged.functions) == 0 {
		return
	}
	sys, fence := g.sys.core, new(core.Fence)
	if m, capturing, err := s.in.Mark("cuda.Graph.Launch"); err == nil && !capturing {
		fence.Add(m)
	} else {
		fence.AddAllStreams()
	}
	sys.Reclaim(fence, nil, func() error {
		// A release comes behind the calls that the driver has made.
		sys.Drv.ReleaseHostFunc(sys.Drv.NewHostFunc(func() {}), sys.Pending())
		return nil
	})
}

// OnClose calls f once the graph was closed, its last launch has passed and the driver
// has destroyed it, to release what the graph uses. f runs on the goroutine that calls
// Close, or after CloseAfter on one of its own, which Drain waits for, so f must not
// call Drain or wait for Released. A panic of f is logged. On a closed graph OnClose
// returns ErrClosed and f is not called.
func (g *Graph) OnClose(f func()) error {
	const op = "cuda.Graph.OnClose"
	if _, err := g.inner(op); err != nil {
		return err
	}
	if f == nil {
		return errs.Invalid(op, "no function", "pass the function to call")
	}
	if !g.g.closer.Acquire() {
		return errs.ClosedError(op, "graph")
	}
	defer g.g.closer.Release()
	g.g.mu.Lock()
	defer g.g.mu.Unlock()
	g.g.hooks = append(g.g.hooks, f)
	return nil
}

// Close waits for the last launch, destroys the graph, gives its pinned memory
// back and calls the functions of OnClose. After an error it may be called
// again. It harms no capture that runs.
func (g *Graph) Close() error {
	const op = "cuda.Graph.Close"
	if _, err := g.inner(op); err != nil {
		return err
	}
	var hooks []func()
	closed := false
	err := g.g.closer.Close(func() (err error) {
		if err = g.g.wait(op); err == nil {
			hooks, err = g.teardown(op)
		}
		if closed = err == nil; !closed {
			g.g.ending.End(err) // before another Close may end it for good
		}
		return err
	})
	if closed {
		defer g.g.ending.End(nil)
		g.g.run(hooks)
	}
	return err
}

// CloseAfter takes the graph out of use at once and does what Close does when
// its last launch, and the work that is on the streams now, is done. It never
// blocks. Without a stream it is ErrInvalidArgument; with one that captures a
// graph it is ErrCapturing and nothing has changed.
func (g *Graph) CloseAfter(streams ...*Stream) error {
	const op = "cuda.Graph.CloseAfter"
	in, err := g.inner(op)
	if err != nil {
		return err
	}
	return life.CloseAfter(&in.closer, in.sys.core, func() (*core.Fence, error) {
		f, err := core.FenceOf(in.sys.core, op, streams)
		if err != nil {
			return nil, err
		}
		in.mu.Lock()
		defer in.mu.Unlock()
		if in.last.marked {
			f.Add(in.last.mark)
			in.last.marked = false
		}
		if in.last.unmarked { // a launch that could not be marked
			f.AddAllStreams()
		}
		return f, nil
	}, func() error {
		hooks, err := g.teardown(op)
		if len(hooks) == 0 {
			in.ending.End(err)
			return err
		}
		in.sys.core.Go(func() {
			defer in.ending.End(nil)
			in.run(hooks)
		})
		return nil
	})
}

// Released returns the end of the graph's closing: of the one in progress, of the next
// one, or of the one that has ended. From then on its pinned memory is back, the
// functions of OnClose have returned, and with them what a pool's capture uses is free.
// A function of OnClose must not wait for it.
func (g *Graph) Released() Completion {
	return g.g.ending.Completion()
}

// run calls the functions of OnClose.
func (g *graph) run(hooks []func()) {
	for _, hook := range hooks {
		g.sys.core.Hook("Graph.OnClose", hook)
	}
}

// wait waits for the last launch, while no other operation runs on the graph.
func (g *graph) wait(op string) error {
	g.mu.Lock()
	last := g.last
	g.last = launch{unmarked: last.marked || last.unmarked} // until it was waited for
	g.mu.Unlock()
	if last.marked {
		if err := last.mark.Wait(op); err != nil {
			return err
		}
	}
	if last.unmarked {
		if err := g.sys.waitAll(op); err != nil {
			return err
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last = launch{}
	return nil
}

// teardown destroys the graph, which does not run any more, and returns what is to be
// called then. It remembers where it is.
func (g *Graph) teardown(op string) ([]func(), error) {
	hooks, err := g.g.destroy(op)
	if err == nil {
		g.watched.Stop()
	}
	return hooks, err
}

func (g *graph) destroy(op string) (hooks []func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	sys := g.sys.core
	gone := func(c driver.Call, destroy func() driver.Result) error {
		if r := g.ctx.Teardown(destroy); r != driver.Success {
			return g.ctx.CallError(op, c, r, "")
		}
		return nil
	}
	if g.exec != 0 {
		if err := gone(driver.CallGraphExecDestroy, func() driver.Result { return sys.Drv.GraphExecDestroy(g.exec) }); err != nil {
			return nil, err
		}
		g.exec = 0
	}
	if g.template != 0 {
		if err := gone(driver.CallGraphDestroy, func() driver.Result { return sys.Drv.GraphDestroy(g.template) }); err != nil {
			return nil, err
		}
		g.template = 0
	}
	if g.last.marked { // of a launch that was under way at CloseAfter
		g.last.marked = false
		g.last.mark.Release()
	}
	g.staged.release(g.sys)
	g.Untrack()
	hooks, g.hooks = g.hooks, nil
	return hooks, nil
}

// inner returns the inner state, or an error for a Graph that no function made.
func (g *Graph) inner(op string) (*graph, error) {
	if g == nil || g.g == nil {
		return nil, errs.Invalid(op, "a nil graph", "make one with Stream.WithCapture")
	}
	return g.g, nil
}

// use holds the graph for an operation of sys; the caller calls closer.Release.
func (g *Graph) use(op string, sys *System) error {
	in, err := g.inner(op)
	switch {
	case err != nil:
		return err
	case in.sys != sys:
		return errs.ForeignError(op, "graph")
	case !in.closer.Acquire():
		return errs.ClosedError(op, "graph")
	}
	return nil
}

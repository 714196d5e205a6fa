// Package bulk moves much memory between a device and the host at the rate of the link.
//
// A [Backing] is host memory that keeps the bytes of device memory: a copy out, and a copy in
// later. [Engine.Fill] and [Engine.Drain] are for bytes that come from elsewhere, or go there:
// functions of the caller read and write pieces of pinned memory in parallel, beside the
// copies. Both take device memory as a list of segments.
//
// notes.go says how it works and why.
package bulk

import (
	"runtime"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

const (
	// pieceBytes is the size of a copy. Two streams of such copies reach the link.
	pieceBytes = 4 << 20
	// mostCopies is how many copies of less share an event.
	mostCopies = 64
	// mostThreads is how many threads pin, or read and write, unless the caller says.
	mostThreads = 16
	// grace is how long an operation whose context has ended waits for the copies that it
	// submitted. They end within two milliseconds unless the GPU is held up.
	grace = 50 * time.Millisecond
	// batchedBytes is the size from which on a copy is a driver call of its own: in a batch it would hardly be faster.
	batchedBytes = 2 << 20
	// pollPause is the pause between two queries of an event. It is a fraction of the time
	// that the copies in flight take, so the link does not idle.
	pollPause = 50 * time.Microsecond
	// shortPollPause is the same where few bytes are in flight.
	shortPollPause = 5 * time.Microsecond
)

// Segment is device memory.
type Segment struct {
	Ptr   driver.Ptr
	Bytes uint64
}

// Options are how an operation runs.
type Options struct {
	// Op is the operation in errors: "vmm.Suspend".
	Op string
	// After are streams whose work comes before the copies. None of them captures.
	After []*core.Stream
	// Meter counts the bytes, if it is not nil.
	Meter *Meter
	// Threads is how many threads pin, read and write; 0 chooses.
	Threads int
	// Await, if it is not nil, returns when so many of the first bytes that a Backing copies may
	// be used. Several goroutines call it if the backing is not pinned. An error ends the operation.
	Await func(bytes uint64) error
	// Passed, if it is not nil, is told how many of the first bytes that a Backing copies have
	// been copied. It is not called if the backing is not pinned: its pieces pass in no order.
	Passed func(bytes uint64)
}

func (o Options) threads() int {
	if o.Threads > 0 {
		return o.Threads
	}
	return min(mostThreads, runtime.GOMAXPROCS(0))
}

// Engine moves the memory of one device, in one context. It lives as long as the System and
// needs no close. Its methods are safe for concurrent use: operations run beside each other,
// on streams of their own.
type Engine struct {
	ctx   *core.Context
	store *store

	mu   lock.Mutex[lock.Leaf]
	idle []*lane

	distributor distributor
}

// Of returns the engine of a context.
func Of(ctx *core.Context) *Engine { return storeOf(ctx.System()).engine(ctx) }

func (e *Engine) sys() *core.System { return e.ctx.System() }

// close destroys the idle streams, which all are, and unloads the kernel. After an error it can be called again.
func (e *Engine) close() error {
	for _, l := range e.idle {
		if err := l.destroy("cuda.System.Close"); err != nil {
			return err
		}
	}
	return e.distributor.unload(e.ctx)
}

// lane is the two streams of an operation. No other operation uses them meanwhile, so one
// that stands still holds up no other.
type lane struct{ streams [2]*core.Stream }

// lease returns an idle lane, or makes one, and holds its streams.
func (e *Engine) lease(op string) (*lane, error) {
	e.mu.Lock()
	var l *lane
	if n := len(e.idle); n > 0 {
		l, e.idle = e.idle[n-1], e.idle[:n-1]
	}
	e.mu.Unlock()
	if l == nil {
		l = &lane{}
	}
	for i := range l.streams {
		if l.streams[i] != nil {
			continue
		}
		h, r := e.sys().Drv.StreamCreate(e.ctx.Handle, driver.StreamNonBlocking)
		if r != driver.Success {
			e.yield(l) // the next lease completes it
			return nil, e.ctx.CallError(op, driver.CallStreamCreate, r, "a stream to copy on")
		}
		l.streams[i] = e.ctx.AddStream(h, false, false)
	}
	for _, s := range l.streams {
		s.Acquire()
	}
	return l, nil
}

// yield makes a lane idle.
func (e *Engine) yield(l *lane) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.idle = append(e.idle, l)
}

func (l *lane) destroy(op string) error {
	for _, s := range l.streams {
		if s == nil || s.Gone() {
			continue
		}
		c := s.Ctx
		if r := c.Teardown(func() driver.Result { return c.System().Drv.StreamDestroy(c.Handle, s.Handle) }); r != driver.Success {
			return c.CallError(op, driver.CallStreamDestroy, r, "a stream of copies")
		}
		s.Forget()
	}
	return nil
}

// release ends the operation's hold of a lane. If its work has not passed, then gives runs
// once it has, else at once.
func (e *Engine) release(l *lane, passed bool, then func()) {
	for _, s := range l.streams {
		if !passed {
			s.Unsettle()
		}
		s.Release()
		if passed {
			s.Settled(s.Now())
		}
	}
	if passed {
		e.yield(l)
		then()
		return
	}
	e.sys().Reclaim(behind(l), nil, func() error {
		e.yield(l)
		then()
		return nil
	})
}

// behind returns the fence of what is on the lanes' streams.
func behind(lanes ...*lane) *core.Fence {
	f := new(core.Fence)
	for _, l := range lanes {
		f.AddStreams(l.streams[:])
	}
	return f
}

// order puts the lane's later work behind the streams' work, and behind what operations that
// failed may still copy.
func (l *lane) order(op string, after []*core.Stream) error {
	for _, own := range l.streams {
		if err := own.AfterUnsettled(op); err != nil {
			return err
		}
	}
	for _, s := range after {
		if err := s.UseWithoutWork(op, l.streams[0].Ctx.System()); err != nil {
			return err
		}
		m, capturing, err := s.Mark(op)
		s.Release()
		if err == nil && capturing {
			err = core.CapturingError(op, s)
		}
		if err != nil {
			return err
		}
		for _, own := range l.streams {
			if err == nil {
				err = own.After(op, m)
			}
		}
		m.Release()
		if err != nil {
			return err
		}
	}
	return nil
}

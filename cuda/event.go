package cuda

import (
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Event marks a point in a stream's work, to wait for it from the host or from
// another stream, or to measure the time between two.
type Event struct {
	obj     *core.Object
	closer  life.Closer
	ctx     *core.Context
	handle  driver.Event
	watched life.Watched

	// mu orders Record with what is known of the last one.
	mu   lock.Mutex[lock.Event]
	last record
}

// record describes a Record: capture names the capture that it went into, 0 if it went
// into none or the driver did not say.
type record struct {
	done, captured bool
	capture        uint64
}

// EventOptions change how NewEvent makes an event.
type EventOptions struct {
	// Timing makes the event measure time, which makes it slower.
	Timing bool
}

// NewEvent makes an event on the device: it can be recorded on streams of the
// device's context. The caller closes it.
func (d *Device) NewEvent(o EventOptions) (*Event, error) {
	const op = "cuda.Device.NewEvent"
	c, err := d.context(op)
	if err != nil {
		return nil, err
	}
	flags := driver.EventDisableTiming
	if o.Timing {
		flags = driver.EventDefault
	}
	h, r := d.sys.core.Drv.EventCreate(c.Handle, flags)
	if r != driver.Success {
		return nil, c.CallError(op, driver.CallEventCreate, r, d.String())
	}
	e := &Event{obj: new(core.Object), ctx: c, handle: h}
	d.sys.core.Track(e.obj, life.KindEvent, 0)
	e.obj.Watch(&e.watched)
	return e, nil
}

// Record puts the event behind the work that is on the stream now. The stream
// must be of the context that the event was made in. On a stream that captures
// a graph the event marks a place in that graph. A stream that waits for it joins the
// capture. Until the event is recorded elsewhere the host can neither query it nor wait
// for it; nor after an error, if the driver did not say whether the stream captures.
func (e *Event) Record(s *Stream) error {
	const op = "cuda.Event.Record"
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	if err := e.use(op, s.sys()); err != nil {
		return err
	}
	defer e.closer.Release()
	e.mu.Lock()
	defer e.mu.Unlock()
	if r := s.sys().Drv.EventRecord(e.ctx.Handle, e.handle, s.in.Handle); r != driver.Success {
		return s.result(op, driver.CallEventRecord, r)
	}
	// Asked afterwards, so that a capture which began in between is noticed. Looking
	// at an event of a capture that has ended in between is harmless. If the driver
	// does not say, the event counts as captured.
	status, id, r := s.in.Capture()
	e.last = record{done: true, captured: status != driver.CaptureNone || r != driver.Success, capture: id}
	return s.result(op, driver.CallStreamGetCaptureInfo, r)
}

// notCaptured refuses to look at an event that stands for a place in a graph:
// the driver would end the capture. The caller holds mu until it has looked.
func (e *Event) notCaptured(op string) error {
	if !e.last.captured {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.Capturing, Asked: "the event was last recorded into a capture",
		Hint: "it marks a place in the graph, where nothing has run: record an event on the stream that the graph was launched on"})
}

// Done reports whether the work before the last Record is done. It does not
// wait. Of an event that was last recorded into a capture it is ErrCapturing.
func (e *Event) Done() (bool, error) {
	const op = "cuda.Event.Done"
	if err := e.acquire(op); err != nil {
		return false, err
	}
	defer e.closer.Release()
	return e.query(op)
}

// query queries the event while no Record can put it into a capture.
func (e *Event) query(op string) (bool, error) {
	sys := e.ctx.System()
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.notCaptured(op); err != nil {
		return false, err
	}
	switch r := sys.Drv.EventQuery(e.ctx.Handle, e.handle); r {
	case driver.Success:
		return true, nil
	case driver.NotReady:
		return false, nil
	default:
		return false, e.ctx.CallError(op, driver.CallEventQuery, r, "")
	}
}

// Synchronize waits until the work before the last Record is done. Of an event
// that was last recorded into a capture it is ErrCapturing. It polls, since a
// wait inside the driver could not take a concurrent Record into account.
func (e *Event) Synchronize() error {
	const op = "cuda.Event.Synchronize"
	if err := e.acquire(op); err != nil {
		return err
	}
	defer e.closer.Release()
	pause := time.Microsecond
	for {
		done, err := e.query(op)
		if done || err != nil {
			return err
		}
		time.Sleep(pause)
		pause = min(2*pause, longestPoll)
	}
}

// longestPoll bounds how late a wait by polling notices the end.
const longestPoll = 100 * time.Microsecond

// Since returns the GPU's time between two events with Timing that have both
// passed. Its resolution is about half a microsecond.
func (e *Event) Since(start *Event) (time.Duration, error) {
	const op = "cuda.Event.Since"
	if err := e.acquire(op); err != nil {
		return 0, err
	}
	defer e.closer.Release()
	sys := e.ctx.System()
	if err := start.use(op, sys); err != nil {
		return 0, err
	}
	defer start.closer.Release()
	first, second := start, e
	if first.handle > second.handle {
		first, second = second, first
	}
	for i, ev := range []*Event{first, second} {
		if i == 1 && first == second {
			break
		}
		ev.mu.Lock()
		defer ev.mu.Unlock()
		if err := ev.notCaptured(op); err != nil {
			return 0, err
		}
	}
	ms, r := sys.Drv.EventElapsedTime(e.ctx.Handle, start.handle, e.handle)
	if r != driver.Success {
		return 0, e.ctx.CallError(op, driver.CallEventElapsedTime, r, "both events need Timing and must have passed")
	}
	return time.Duration(float64(ms) * float64(time.Millisecond)), nil
}

// Close destroys the event. Work that waits for it still does.
func (e *Event) Close() error {
	const op = "cuda.Event.Close"
	if _, err := e.inner(op); err != nil {
		return err
	}
	return e.closer.Close(func() error {
		destroy := func() driver.Result { return e.ctx.System().Drv.EventDestroy(e.ctx.Handle, e.handle) }
		if r := e.ctx.Teardown(destroy); r != driver.Success {
			return e.ctx.CallError(op, driver.CallEventDestroy, r, "")
		}
		e.obj.Untrack()
		e.watched.Stop()
		return nil
	})
}

// Released returns the end of the event's closing: of the one in progress, of the next
// one, or of the one that has ended.
func (e *Event) Released() Completion {
	return e.closer.Completion()
}

// inner returns the event, or an error for one that no function made.
func (e *Event) inner(op string) (*Event, error) {
	if e == nil || e.ctx == nil {
		return nil, errs.Invalid(op, "a nil event", "make one with Device.NewEvent")
	}
	return e, nil
}

// acquire starts an operation on the event; the caller calls closer.Release.
func (e *Event) acquire(op string) error {
	if _, err := e.inner(op); err != nil {
		return err
	}
	if !e.closer.Acquire() {
		return errs.ClosedError(op, "event")
	}
	return nil
}

// use is acquire for an operation of sys.
func (e *Event) use(op string, sys *core.System) error {
	if _, err := e.inner(op); err != nil {
		return err
	}
	if e.ctx.System() != sys {
		return errs.ForeignError(op, "event")
	}
	return e.acquire(op)
}

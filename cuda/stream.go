package cuda

import (
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

type streamHolder = core.StreamHolder

// Stream is an ordered queue of GPU work: its own, or borrowed from another
// library. Work on it runs in the order of submission, later than the call.
type Stream struct {
	streamHolder
	in      *core.Stream
	dev     *Device
	ring    *ring
	release func()        // takes back that a borrowed stream's context is known
	own     bool          // the device's, for copies that name none
	stuck   atomic.Uint64 // the capture that WithCapture could not end, or 0
	watched life.Watched
	calls   calls // of callbacks
}

// StreamOptions change how NewStream makes a stream.
type StreamOptions struct {
	// Blocking streams order themselves with the legacy default stream. The
	// zero value is a non-blocking stream, which does not.
	Blocking bool
	// Priority of the stream's kernels when several could begin: 0 is the least,
	// negative numbers are greater, down to the greatest of
	// Device.StreamPriorities.
	Priority int
}

// StreamPriorities returns the range of priorities of streams on the device. The
// greatest priority is the smaller number; a device without priorities has 0 and 0.
func (d *Device) StreamPriorities() (least, greatest int, err error) {
	return d.priorities("cuda.Device.StreamPriorities")
}

func (d *Device) priorities(op string) (least, greatest int, err error) {
	c, err := d.context(op)
	if err != nil {
		return 0, 0, err
	}
	low, high, r := d.sys.core.Drv.CtxGetStreamPriorityRange(c.Handle)
	if r != driver.Success {
		return 0, 0, c.CallError(op, driver.CallCtxGetStreamPriorityRange, r, d.String())
	}
	return int(low), int(high), nil
}

// NewStream makes a stream on the device. The caller closes it.
func (d *Device) NewStream(o StreamOptions) (*Stream, error) {
	return d.newStream("cuda.Device.NewStream", o, true)
}

func (d *Device) newStream(op string, o StreamOptions, track bool) (*Stream, error) {
	c, err := d.context(op)
	if err != nil {
		return nil, err
	}
	flags := driver.StreamNonBlocking
	if o.Blocking {
		flags = driver.StreamDefault
	}
	if o.Priority != 0 {
		return d.urgent(op, c, flags, o.Priority, track)
	}
	h, r := d.sys.core.Drv.StreamCreate(c.Handle, flags)
	if r != driver.Success {
		return nil, c.CallError(op, driver.CallStreamCreate, r, d.String())
	}
	return d.stream(c.AddStream(h, false, track), track), nil
}

// urgent makes a stream with a priority, which the driver would clamp to its range.
func (d *Device) urgent(op string, c *core.Context, flags driver.StreamFlags, priority int, track bool) (*Stream, error) {
	least, greatest, err := d.priorities(op)
	if err != nil {
		return nil, err
	}
	if priority > least || priority < greatest {
		return nil, errs.Invalid(op, fmt.Sprintf("a priority of %d on %v", priority, d),
			fmt.Sprintf("its priorities are %d, the greatest, to %d", greatest, least))
	}
	h, r := d.sys.core.Drv.StreamCreateWithPriority(c.Handle, flags, int32(priority))
	if r != driver.Success {
		return nil, c.CallError(op, driver.CallStreamCreateWithPriority, r, d.String())
	}
	return d.stream(c.AddStream(h, false, track), track), nil
}

// BorrowStream takes a stream of another library by its handle (a CUstream or
// cudaStream_t as a number), in the context that it was made in. The handle
// must be live, as the driver crashes on others, and must stay so until Close,
// which gives it back without destroying it; its context until the graphs that
// were captured on it are closed too.
//
// Handle 0 or 1 is the legacy default stream, which frameworks use unless told
// otherwise. It works, with a caveat of the driver's: an event recorded on it
// ends the capture of any blocking stream in the context, so operations on it
// are refused with ErrCapturing while the driver reports such a capture.
// Handle 2, the per-thread default stream, is refused: goroutines move between
// threads, so it names no particular stream.
func (d *Device) BorrowStream(handle uintptr) (*Stream, error) {
	const op = "cuda.Device.BorrowStream"
	s := driver.Stream(handle)
	if s == driver.StreamPerThread {
		return nil, errs.Invalid(op, "the per-thread default stream",
			"goroutines move between threads: make a stream, or borrow one that was created")
	}
	c, err := d.context(op)
	if err != nil {
		return nil, err
	}
	if s != driver.StreamNull && s != driver.StreamLegacy {
		h, r := d.sys.core.Drv.StreamGetCtx(c.Handle, s)
		if r != driver.Success {
			return nil, c.CallError(op, driver.CallStreamGetCtx, r, fmt.Sprintf("stream %#x", handle))
		}
		on, r := d.sys.core.Drv.CtxGetDevice(h)
		if r != driver.Success {
			return nil, d.sys.core.CallError(op, driver.CallCtxGetDevice, r, fmt.Sprintf("the context of stream %#x", handle))
		}
		if on != d.dev {
			return nil, errs.Invalid(op, fmt.Sprintf("stream %#x of device %d on device %d", handle, on, d.dev),
				"borrow the stream from the device that it belongs to")
		}
		c = d.sys.core.AddContext(h, d.dev, false)
		st := d.stream(c.AddStream(s, true, true), true)
		st.release = c.Release
		return st, nil
	}
	return d.stream(c.AddStream(s, true, true), true), nil
}

func (d *Device) stream(in *core.Stream, watch bool) *Stream {
	s := &Stream{in: in, dev: d, ring: &ring{stream: in, home: d.ctx.Load(), pool: &d.sys.pinned}, calls: calls{sys: d.sys.core}}
	s.streamHolder = core.NewStreamHolder(in, staging{s})
	if watch {
		in.Watch(&s.watched)
	}
	return s
}

// Handle returns the stream's handle (a CUstream) for other libraries. It is valid
// until Close. From now on other libraries may capture the stream, so operations that
// have to know ask the driver each time.
func (s *Stream) Handle() uintptr {
	s.in.Expose()
	return s.handle()
}

func (s *Stream) handle() uintptr { return uintptr(s.in.Handle) }

// Priority returns the stream's priority: 0, or a negative number, which is a
// greater one.
func (s *Stream) Priority() (int, error) {
	const op = "cuda.Stream.Priority"
	if err := s.use(op); err != nil {
		return 0, err
	}
	defer s.in.Release()
	p, r := s.sys().Drv.StreamGetPriority(s.in.Ctx.Handle, s.in.Handle)
	return int(p), s.result(op, driver.CallStreamGetPriority, r)
}

// Device returns the stream's device.
func (s *Stream) Device() *Device { return s.dev }

// Synchronize waits until all work that was submitted before the call is done.
// It waits by an event, so that a capture which another goroutine begins on the
// stream meanwhile survives.
func (s *Stream) Synchronize() error {
	const op = "cuda.Stream.Synchronize"
	at, err := s.useWithoutWork(op)
	if err != nil {
		return err
	}
	m, capturing, err := s.in.Mark(op)
	if err == nil && !capturing {
		err = s.result(op, driver.CallEventSynchronize, m.Synchronize())
	}
	if err != nil {
		s.in.Unsettle()
	}
	s.in.Release()
	switch {
	case capturing:
		return core.CapturingError(op, s.in)
	case err == nil:
		s.in.Settled(at)
	}
	return err
}

// Done reports whether all work submitted so far is done. It does not wait.
func (s *Stream) Done() (bool, error) {
	const op = "cuda.Stream.Done"
	at, err := s.useWithoutWork(op)
	if err != nil {
		return false, err
	}
	capturing, call, r := s.in.Query()
	s.in.Release()
	if r == driver.Success && !capturing {
		s.in.Settled(at)
	}
	switch {
	case capturing:
		return false, core.CapturingError(op, s.in)
	case r == driver.NotReady:
		return false, nil
	}
	return r == driver.Success, s.result(op, call, r)
}

// Capturing reports whether the stream captures a graph now, by asking the
// driver.
func (s *Stream) Capturing() (bool, error) {
	const op = "cuda.Stream.Capturing"
	if _, err := s.useWithoutWork(op); err != nil {
		return false, err
	}
	defer s.in.Release()
	capturing, r := s.in.Capturing()
	return capturing, s.result(op, driver.CallStreamIsCapturing, r)
}

// Wait makes later work of the stream wait for the event. The call itself does
// not wait. A stream that waits for an event of a capture takes part in the
// capture from then on. If the wait would end a capture (the event was recorded
// outside of it, or in another one) it returns ErrCapturing.
func (s *Stream) Wait(e *Event) error {
	const op = "cuda.Stream.Wait"
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	if err := e.use(op, s.sys()); err != nil {
		return err
	}
	defer e.closer.Release()
	// Held until the wait is made: a Record in between could make it join a
	// capture, or end one.
	e.mu.Lock()
	defer e.mu.Unlock()
	last := e.last
	if !last.done {
		return nil // no work, so nothing to wait for
	}
	if err := s.mayWait(op, last); err != nil {
		return err
	}
	wait := func() driver.Result { return s.sys().Drv.StreamWaitEvent(s.in.Ctx.Handle, s.in.Handle, e.handle) }
	if last.captured {
		return s.result(op, driver.CallStreamWaitEvent, s.in.Joining(wait))
	}
	return s.in.Uncaptured(op, func() error { return s.result(op, driver.CallStreamWaitEvent, wait()) })
}

// Close waits for the stream's work and destroys it; a borrowed stream is not
// destroyed. While the stream captures a graph Close returns ErrCapturing and it stays
// open. It does not wait for functions of Callback.
func (s *Stream) Close() error {
	const op = "cuda.Stream.Close"
	if _, err := s.inner(op); err != nil {
		return err
	}
	if s.own {
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Asked: "the device's own transfer stream",
			Hint: "it goes when the System closes"})
	}
	return s.close(op)
}

// Released returns the end of the stream's closing: of the one in progress, of the next
// one, or of the one that has ended.
func (s *Stream) Released() Completion {
	return s.in.Completion()
}

func (s *Stream) close(op string) error {
	c, drv := s.in.Ctx, s.sys().Drv
	if c.Lost() == driver.Success && s.in.Peek() {
		s.endStuck(op)
		err := s.notCapturing(op)
		s.in.Release()
		// In a lost context nothing captures, so closing proceeds.
		if err != nil && c.Lost() == driver.Success {
			return err
		}
	}
	return s.in.Closer.Close(func() error {
		// Staged copies must end before their memory is used again. Another
		// library's work on a borrowed stream cannot be distinguished from them.
		if err := s.drain(op); err != nil && c.Lost() == driver.Success {
			return err
		}
		s.ring.close()
		if !s.in.Borrowed {
			r := c.Teardown(func() driver.Result { return drv.StreamDestroy(c.Handle, s.in.Handle) })
			if r != driver.Success {
				return s.result(op, driver.CallStreamDestroy, r)
			}
		}
		s.in.Forget()
		if s.release != nil {
			s.release()
		}
		s.watched.Stop()
		return nil
	})
}

// drain waits for the stream's work while it closes.
func (s *Stream) drain(op string) error {
	if s.in.Ctx.Lost() != driver.Success {
		return nil
	}
	m, capturing, err := s.in.Mark(op)
	if capturing { // a capture began meanwhile: out of use until the next Close
		err = core.CapturingError(op, s.in)
	}
	if err != nil {
		return err
	}
	return m.Wait(op)
}

func (s *Stream) sys() *core.System { return s.dev.sys.core }

// inner returns the stream, or an error for one that no function made.
func (s *Stream) inner(op string) (*Stream, error) {
	if s == nil || s.in == nil {
		return nil, errs.NilStream(op)
	}
	return s, nil
}

// useWithoutWork holds the stream for an operation that puts no work on it, and returns the
// moment before; the caller calls in.Release.
func (s *Stream) useWithoutWork(op string) (at life.Moment, err error) {
	if _, err := s.inner(op); err != nil {
		return at, err
	}
	at = s.in.Now()
	return at, s.in.UseWithoutWork(op, s.sys())
}

// use holds the stream for an operation that may put work on it; the caller calls
// in.Release. Work on the legacy stream is refused while it would end the capture of
// another one.
func (s *Stream) use(op string) error {
	if _, err := s.inner(op); err != nil {
		return err
	}
	if s.in.IsLegacy() {
		if _, err := s.useWithoutWork(op); err != nil {
			return err
		}
		err := s.notCapturing(op)
		s.in.Release()
		if err != nil {
			return err
		}
	}
	return s.in.Use(op, s.sys())
}

// notCapturing refuses what would end a capture, before the driver is called.
func (s *Stream) notCapturing(op string) error {
	capturing, r := s.in.Capturing()
	if r != driver.Success {
		return s.result(op, driver.CallStreamIsCapturing, r)
	}
	if capturing {
		return core.CapturingError(op, s.in)
	}
	return nil
}

func (s *Stream) result(op string, c driver.Call, r driver.Result) error {
	if r == driver.Success {
		return nil
	}
	return s.in.Ctx.CallError(op, c, r, fmt.Sprintf("stream %#x of %v", s.handle(), s.dev))
}

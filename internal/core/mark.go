package core

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// A Mark is an event behind the work that was on a stream. Its owner ends it with Wait
// or Release, or gives it to a Fence. The stream may be closed and its context be gone
// meanwhile: the mark has passed then, and makes no driver call any more. All methods
// are safe for that, since they hold the context.
type Mark struct {
	stream *Stream
	event  driver.Event
	number uint64 // in the order of the stream's marks; taken before the record
}

// Mark records an event on the stream, which the caller holds, unless it
// captures: queried before, and again after the record, since another goroutine may
// have begun a capture in between; then the event is part of that capture, and is
// destroyed without being queried, which would end the capture. If the driver does not tell
// whether the stream captures, it counts as capturing, and the error is the driver's.
func (s *Stream) Mark(op string) (m Mark, capturing bool, err error) {
	c := s.Ctx
	asked := func() string { return fmt.Sprintf("stream %#x", uintptr(s.Handle)) }
	if capturing, r := s.Capturing(); capturing || r != driver.Success {
		if r != driver.Success {
			err = c.CallError(op, driver.CallStreamIsCapturing, r, asked())
		}
		return Mark{}, capturing, err
	}
	e, r := c.Event()
	if r != driver.Success {
		return Mark{}, false, c.CallError(op, driver.CallEventCreate, r, asked())
	}
	number := s.marks.Add(1)
	if r := c.sys.Drv.EventRecord(c.Handle, e, s.Handle); r != driver.Success {
		c.Destroy(e)
		return Mark{}, false, c.CallError(op, driver.CallEventRecord, r, asked())
	}
	if capturing, r := s.Capturing(); capturing || r != driver.Success {
		c.Destroy(e)
		if r != driver.Success {
			err = c.CallError(op, driver.CallStreamIsCapturing, r, asked())
		}
		return Mark{}, capturing && err == nil, err
	}
	return Mark{s, e, number}, false, nil
}

// hold holds the mark's context for a driver call. It returns false if the mark has
// passed as far as that is known without the driver: in a lost context nothing runs
// any more, and a context that is gone was waited for.
func (m Mark) hold() bool {
	c := m.stream.Ctx
	return c.Lost() == driver.Success && c.life.Acquire()
}

// drop ends a hold.
func (m Mark) drop() { m.stream.Ctx.life.Release() }

// After makes later work of the stream wait for the mark, which its owner keeps and may
// release at once. The call itself does not wait. The stream must not capture a graph,
// and is held by the caller; no capture of this library begins on it meanwhile. A mark of
// a lost context is an error, because its work may never be done.
func (s *Stream) After(op string, m Mark) error {
	if !m.hold() {
		if c := m.stream.Ctx; c.Lost() != driver.Success {
			return c.CallError(op, driver.CallStreamWaitEvent, c.Lost(), fmt.Sprintf("the work of stream %#x", uintptr(m.stream.Handle)))
		}
		return nil
	}
	defer m.drop()
	return s.Uncaptured(op, func() error {
		if r := s.Ctx.sys.Drv.StreamWaitEvent(s.Ctx.Handle, s.Handle, m.event); r != driver.Success {
			return s.Ctx.CallError(op, driver.CallStreamWaitEvent, r, fmt.Sprintf("stream %#x", uintptr(s.Handle)))
		}
		return nil
	})
}

// Passed reports whether the work before the mark is done. It never waits. If the event
// cannot tell (it was recorded into a capture that began and ended between two calls of this
// library) the mark is set anew.
func (m *Mark) Passed() bool {
	if !m.hold() {
		return true
	}
	defer m.drop()
	c := m.stream.Ctx
	switch r := c.Observe(c.sys.Drv.EventQuery(c.Handle, m.event)); {
	case r == driver.Success:
		c.sys.unsettled.settle(m.stream, m.number)
		return true
	case r.Lost():
		return true
	case r == driver.NotReady:
		return false
	}
	if !m.stream.Peek() {
		return m.stream.Gone() // its Close waits
	}
	defer m.stream.Release()
	if next, capturing, err := m.stream.Mark("reclaim"); err == nil && !capturing {
		c.Destroy(m.event)
		*m = next
	}
	return false
}

// Wait blocks until the mark has passed, and releases it. It does not break a capture. A
// lost context is no error: nothing of it runs.
func (m Mark) Wait(op string) error {
	if m.stream.Ctx.Lost() != driver.Success {
		return nil
	}
	if r := m.Synchronize(); r != driver.Success && !r.Lost() {
		return m.stream.Ctx.CallError(op, driver.CallEventSynchronize, r, "wait for a stream")
	}
	return nil
}

// Synchronize is Wait with the driver's result, even a loss.
func (m Mark) Synchronize() driver.Result {
	defer m.Release()
	c := m.stream.Ctx
	if !c.life.Acquire() {
		return driver.Success
	}
	defer c.life.Release()
	r := c.Observe(c.sys.Drv.EventSynchronize(c.Handle, m.event))
	if r == driver.Success {
		c.sys.unsettled.settle(m.stream, m.number)
	}
	return r
}

// Release releases the mark without waiting: its event may be recorded anew while an
// earlier record is pending.
func (m Mark) Release() { m.stream.Ctx.Recycle(m.event) }

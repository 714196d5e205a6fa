package sim

import "github.com/cuvmm/cuvmm/internal/driver"

// event remembers a place in a stream.
type event struct {
	handle  driver.Event
	context *gpuContext
	flags   driver.EventFlags
	object  *object
	latest  *op     // the last record; nil if there was none
	joined  *joined // if that was on a capturing stream
}

// enterEvent is enter for a call on an event.
func (a *api) enterEvent(call driver.Call, c driver.Context, h driver.Event) (*event, driver.Result) {
	if _, r := a.enterContext(call, c); r != driver.Success {
		return nil, r
	}
	e := a.m.events[h]
	r := driver.InvalidHandle
	if e != nil {
		r = e.context.lost
	}
	if r != driver.Success {
		a.leave()
		return nil, r
	}
	return e, driver.Success
}

func (a *api) EventCreate(c driver.Context, flags driver.EventFlags) (driver.Event, driver.Result) {
	ctx, r := a.enterContext(driver.CallEventCreate, c)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if flags&^(driver.EventBlockingSync|driver.EventDisableTiming) != 0 {
		return 0, driver.InvalidValue
	}
	e := &event{handle: driver.Event(newHandle()), context: ctx, flags: flags}
	e.object = a.m.track(KindEvent, uint64(e.handle), 0)
	a.m.events[e.handle] = e
	return e.handle, driver.Success
}

func (a *api) EventRecord(c driver.Context, h driver.Event, sh driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallEventRecord, c, sh)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	e := a.m.events[h]
	switch {
	case e == nil || e.context != s.context:
		return driver.InvalidHandle
	case s.joined != nil:
		return s.captureRecord(e)
	}
	o, r := s.submit(task{})
	if r == driver.Success {
		e.latest, e.joined = o, nil
	}
	return r
}

func (a *api) EventQuery(c driver.Context, h driver.Event) driver.Result {
	e, r := a.enterEvent(driver.CallEventQuery, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if r := e.guardCaptured(); r != driver.Success {
		return r
	}
	if e.latest == nil || e.latest.done {
		return driver.Success
	}
	a.m.nudge(e.latest)
	return driver.NotReady
}

func (a *api) EventSynchronize(c driver.Context, h driver.Event) driver.Result {
	e, r := a.enterEvent(driver.CallEventSynchronize, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if r := e.guardCaptured(); r != driver.Success {
		return r
	}
	if e.latest != nil {
		a.m.await(e.latest)
	}
	return a.m.outcome(e.context)
}

func (a *api) EventElapsedTime(c driver.Context, start, end driver.Event) (float32, driver.Result) {
	from, r := a.enterEvent(driver.CallEventElapsedTime, c, start)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	to := a.m.events[end]
	switch {
	case from.joined != nil || to != nil && to.joined != nil:
		return 0, driver.CapturedEvent
	case to == nil || to.context != from.context,
		(from.flags|to.flags)&driver.EventDisableTiming != 0,
		from.latest == nil || to.latest == nil:
		return 0, driver.InvalidHandle
	case !from.latest.done || !to.latest.done:
		return 0, driver.NotReady
	}
	return float32(to.latest.at.Sub(from.latest.at).Seconds() * 1000), driver.Success
}

// EventDestroy does not wait: a record that is still to be done is done.
func (a *api) EventDestroy(c driver.Context, h driver.Event) driver.Result {
	owner := func() *gpuContext {
		if e := a.m.events[h]; e != nil {
			return e.context
		}
		return nil
	}
	if _, r := a.enterToDestroy(driver.CallEventDestroy, c, owner); r != driver.Success {
		return r
	}
	defer a.leave()
	e := a.m.events[h]
	if e == nil {
		return driver.InvalidHandle
	}
	a.m.untrack(e.object)
	delete(a.m.events, h)
	return e.context.lost
}

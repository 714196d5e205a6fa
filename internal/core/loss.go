package core

import (
	"errors"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// A context is lost when an error has destroyed it: nothing of it runs any
// more, and every call that names it fails. Loss is a state of a Context, and
// with it of its device, since memory belongs to devices. The other devices go
// on.
//
// losses are the devices that lost a context. A context may be forgotten, but not the
// loss of its device.
type losses struct {
	count   atomic.Int64 // of what was noticed so far
	mu      lock.Mutex[lock.Leaf]
	devices map[driver.Device]driver.Result
}

// Observe looks at the result of a call that named the context: a result which means
// that the context is lost is remembered, so that nothing waits for it.
func (c *Context) Observe(r driver.Result) driver.Result {
	switch {
	case r == driver.Deinitialized:
		c.sys.Observe(r)
	case r.Lost():
		c.lose(r)
	}
	return r
}

// Teardown makes a call that releases what belongs to the context. For a lost context it
// releases what the driver still takes: a refusal is no error then, since no later call
// could do better. A driver that is gone is not called.
func (c *Context) Teardown(call func() driver.Result) driver.Result {
	if c.Lost() == driver.Deinitialized {
		return driver.Success
	}
	if r := c.Observe(call()); c.Lost() == driver.Success {
		return r
	}
	return driver.Success
}

// TeardownUnlessGone is Teardown for a resource without an object of the user. Once the System
// has left the context it makes no call: the context's owner may have destroyed it with
// everything in it.
func (c *Context) TeardownUnlessGone(call func() driver.Result) driver.Result {
	if !c.life.Acquire() {
		return driver.Success
	}
	defer c.life.Release()
	return c.Teardown(call)
}

// Teardown is Context.Teardown for a call that names no context, and releases memory or
// addresses of these devices; none if that is unknown.
func (s *System) Teardown(call func() driver.Result, devices ...driver.Device) driver.Result {
	if s.DeviceLost(devices...) == driver.Deinitialized {
		return driver.Success
	}
	if r := s.Observe(call(), devices...); !r.Lost() && s.DeviceLost(devices...) == driver.Success {
		return r
	}
	return driver.Success
}

// Lost returns the result that lost the context, or Success.
func (c *Context) Lost() driver.Result { return driver.Result(c.lost.Load()) }

func (c *Context) lose(r driver.Result) {
	if !c.lost.CompareAndSwap(0, int32(r)) {
		return
	}
	s := c.sys
	s.losses.mark(c.Device, r)
	attrs := []any{"device", int32(c.Device), "result", r.String()}
	if err := c.culprit(); err != nil {
		attrs = append(attrs, "culprit", err, "hint", "restart the process")
	} else {
		attrs = append(attrs, "hint", "restart the process; an access to memory that was unmapped is the usual cause")
	}
	s.Config.Log.Error("cuvmm: a context is lost; this process cannot use its device any more", attrs...)
}

// culprit returns what lost the context, if the driver knows it.
func (c *Context) culprit() error {
	if d, ok := c.sys.Drv.(driver.Culprit); ok && c.Lost() != driver.Success {
		if text := d.Culprit(c.Handle); text != "" {
			return errors.New(text)
		}
	}
	return nil
}

func (l *losses) mark(d driver.Device, r driver.Result) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count.Add(1)
	if l.devices == nil {
		l.devices = map[driver.Device]driver.Result{}
	}
	if l.devices[d] == driver.Success {
		l.devices[d] = r
	}
}

func (l *losses) of(d driver.Device) driver.Result {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.devices[d]
}

// Observe looks at the result of a call that named no context, and concerned memory or
// access of these devices; none if that is unknown. If the result means that a context
// is lost, the contexts that could be meant are queried. If none of them reports the
// loss, all of them count as lost: waiting for nothing and keeping everything is safe,
// and going on with a lost context is not.
func (s *System) Observe(r driver.Result, devices ...driver.Device) driver.Result {
	if !r.Lost() {
		return r
	}
	meant := s.knownContexts()
	if len(devices) > 0 {
		meant = slices.DeleteFunc(slices.Clone(meant), func(c *Context) bool { return !slices.Contains(devices, c.Device) })
	}
	known := false
	if r != driver.Deinitialized {
		for _, c := range meant {
			if c.Lost() == driver.Success {
				// It harms no capture, and returns the loss of the context.
				_, _, result := s.Drv.MemGetInfo(c.Handle)
				c.Observe(result)
			}
			known = known || c.Lost() != driver.Success
		}
	}
	if !known {
		for _, c := range meant {
			c.lose(r)
		}
		for _, d := range devices { // those without a context too
			s.losses.mark(d, r)
		}
	}
	return r
}

// DeviceLost returns the result that lost one of the devices, or Success. Without
// devices it is about all devices with contexts: memory that lies on none of them can
// be released as long as one device lives.
func (s *System) DeviceLost(devices ...driver.Device) driver.Result {
	if s.losses.count.Load() == 0 {
		return driver.Success
	}
	if len(devices) == 0 {
		for _, c := range s.knownContexts() {
			if s.losses.of(c.Device) == driver.Success {
				return driver.Success
			}
			devices = append(devices, c.Device)
		}
	}
	for _, d := range devices {
		if r := s.losses.of(d); r != driver.Success {
			return r
		}
	}
	return driver.Success
}

// Losses counts the losses: while it stays the same none was noticed.
func (s *System) Losses() int64 { return s.losses.count.Load() }

// DeviceOf returns the device that a location is, or NoDevice.
func DeviceOf(l driver.Location) driver.Device {
	if l.Type == driver.LocationDevice {
		return driver.Device(l.ID)
	}
	return NoDevice
}

// DevicesOf returns the device that a location is, if it is one.
func DevicesOf(l driver.Location) []driver.Device {
	if l.Type == driver.LocationDevice {
		return []driver.Device{driver.Device(l.ID)}
	}
	return nil
}

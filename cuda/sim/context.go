package sim

import (
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// gpuContext is a CUDA context. Streams, events, allocated memory and modules
// belong to one; virtual memory belongs to none.
type gpuContext struct {
	m      *Machine
	handle driver.Context
	device *device
	flags  uint32 // that it was made with
	object *object
	legacy *stream
	// peers are the contexts whose memory kernels of this one reach.
	peers map[*gpuContext]bool
	// threads are the streams that belong to a thread each, by the thread.
	threads map[int]*stream
	// working are the streams that have work. Calls that wait look at no others.
	working map[*stream]struct{}
	// late is the work that the driver does on a thread of its own, which nothing waits for.
	late *stream
	// lost is what destroyed the context, and what every later call returns;
	// culprit says it in words.
	lost    driver.Result
	culprit string
	// stalls counts the calls that wait for all of the context's work and let
	// no call submit more meanwhile.
	stalls int
	gone   bool // it is being destroyed
	reset  bool // on purpose, with all that it owns
}

// thread is what belongs to an operating system thread.
type thread struct {
	current driver.Context
	mode    driver.CaptureMode
}

// Handles are numbers that no machine of the process uses twice, so that a
// stale one is always noticed.
var lastHandle atomic.Uint64

func newHandle() uint64 { return 0x7ec0_0000_0000 + 16*lastHandle.Add(1) }

// thread is the state of the calling thread.
func (m *Machine) thread() thread {
	if t := m.threads[host.ThreadID()]; t != nil {
		return *t
	}
	return thread{}
}

// setThread keeps no state for threads that are as they began: numbers of
// threads are used again.
func (m *Machine) setThread(t thread) {
	if t == (thread{}) {
		delete(m.threads, host.ThreadID())
		return
	}
	m.threads[host.ThreadID()] = &t
}

// resolve finds the context of a call, lost or not: the one that is named, or the
// calling thread's. It returns nil if there is none.
func (m *Machine) resolve(c driver.Context) *gpuContext {
	if c == 0 {
		c = m.thread().current
	}
	if ctx := m.contexts[c]; ctx != nil && !ctx.gone {
		return ctx
	}
	return nil
}

// enterContext is enter for a call that needs a context in good order.
func (a *api) enterContext(call driver.Call, c driver.Context) (*gpuContext, driver.Result) {
	ctx, r := a.enterNamed(call, c)
	if r == driver.Success && ctx.lost != driver.Success {
		r = ctx.lost
		a.leave()
	}
	return ctx, r
}

// contextFlags are those that exist: how the CPU waits, and what of the host is mapped or
// dumped.
const contextFlags = 0xff

func (m *Machine) newContext(d *device, h driver.Context) (*gpuContext, driver.Result) {
	if !m.charge(d.pool, uint64(d.options.ContextMemory)) {
		return nil, driver.OutOfMemory
	}
	c := &gpuContext{m: m, handle: h, device: d}
	c.object = m.track(KindContext, uint64(c.handle), 0)
	c.legacy = &stream{m: m, context: c, id: lastStreamID.Add(1)}
	c.threads, c.working = map[int]*stream{}, map[*stream]struct{}{}
	c.late = &stream{m: m, context: c}
	m.contexts[c.handle] = c
	m.joinBeside(c)
	return c, driver.Success
}

// destroy waits for the context's work, and destroys what belongs to it.
func (c *gpuContext) destroy() {
	m := c.m
	c.gone = true
	c.drain()
	if m.closed {
		return // which destroyed everything
	}
	c.late.discard()
	c.leaveCaptures()
	for _, s := range m.streams {
		if s.context == c {
			c.orphan(s.object)
			delete(m.streams, s.handle)
			s.detach()
		}
	}
	for _, e := range m.events {
		if e.context == c {
			c.orphan(e.object)
			delete(m.events, e.handle)
		}
	}
	for _, e := range m.execs {
		if e.context == c {
			c.orphan(e.object)
			m.dropExec(e)
		}
	}
	for _, mod := range m.modules {
		if mod.context == c {
			c.orphan(mod.object)
			m.dropModule(mod)
		}
	}
	var owned []*backing
	for r := range m.backing.all() {
		if r.v.context == c {
			owned = append(owned, r.v)
		}
	}
	for _, r := range owned {
		if now, ok := m.backing.find(r.lo); ok && now.v == r {
			c.orphan(r.object)
			m.evict(r) // which may let others in
		}
	}
	if m.closed {
		return
	}
	delete(m.contexts, c.handle)
	m.untrack(c.object)
	c.device.pool.give(uint64(c.device.options.ContextMemory))
}

// orphan ends what the context owned, which counts as leaked unless the program has reset
// the context.
func (c *gpuContext) orphan(o *object) {
	if c.reset {
		c.m.untrack(o)
		return
	}
	c.m.orphan(o)
}

// leaveCaptures takes the context's streams out of the captures that they are part of.
func (c *gpuContext) leaveCaptures() {
	for s := range c.m.joined {
		if s.context == c {
			s.leaveCapture()
		}
	}
}

// drain waits until no stream of the context has work. A lost context has none.
func (c *gpuContext) drain() {
	for !c.m.closed && len(c.working) > 0 {
		var tails []*op
		for s := range c.working {
			tails = append(tails, s.tail)
		}
		c.m.await(tails...)
	}
}

// drainAlone is drain for the calls that, on the real driver, keep every other
// call from submitting to the context while they wait.
func (c *gpuContext) drainAlone() {
	c.stalls++
	c.drain()
	c.stalls--
	c.m.changed.Broadcast()
}

// lose marks the context as destroyed by an error: its work is dropped, and
// every later call fails.
func (c *gpuContext) lose(f fault) {
	if c.lost != driver.Success {
		return
	}
	c.lost, c.culprit = f.result, f.text
	c.m.note("%s", f.text)
	if c.m.culprit == "" {
		c.m.culprit = f.text
	}
	c.leaveCaptures() // no call can end them
	for s := range c.working {
		s.discard()
	}
	c.late.discard()
	c.m.changed.Broadcast()
}

var _ driver.Culprit = (*api)(nil)

// Culprit says what destroyed a context.
func (a *api) Culprit(h driver.Context) string {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	if c := a.m.contexts[h]; c != nil {
		return c.culprit
	}
	return ""
}

func (a *api) DevicePrimaryCtxRetain(d driver.Device) (driver.Context, driver.Result) {
	dev, r := a.enterDevice(driver.CallDevicePrimaryCtxRetain, d)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if dev.primary == nil {
		c, r := a.m.newContext(dev, driver.Context(newHandle()))
		if r != driver.Success {
			return 0, r
		}
		c.object.note = "primary context"
		c.flags = dev.primaryFlags
		dev.primary = c
	}
	if dev.primary.lost == driver.ContextDestroyed { // by a reset
		dev.primary.lost = driver.Success
	}
	dev.retained++
	return dev.primary.handle, driver.Success
}

func (a *api) DevicePrimaryCtxRelease(d driver.Device) driver.Result {
	dev, r := a.enterDevice(driver.CallDevicePrimaryCtxRelease, d)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if dev.retained == 0 {
		return driver.InvalidContext
	}
	if dev.retained--; dev.retained == 0 {
		c := dev.primary
		dev.primary = nil
		c.destroy()
	}
	return driver.Success
}

func (a *api) DevicePrimaryCtxGetState(d driver.Device) (uint32, bool, driver.Result) {
	dev, r := a.enterDevice(driver.CallDevicePrimaryCtxGetState, d)
	if r != driver.Success {
		return 0, false, r
	}
	defer a.leave()
	return dev.primaryFlags, dev.primary != nil, driver.Success
}

func (a *api) CtxCreate(flags uint32, d driver.Device) (driver.Context, driver.Result) {
	dev, r := a.enterDevice(driver.CallCtxCreate, d)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if flags&^contextFlags != 0 {
		return 0, driver.InvalidValue
	}
	c, r := a.m.newContext(dev, driver.Context(newHandle()))
	if r != driver.Success {
		return 0, r
	}
	c.flags = flags
	return c.handle, driver.Success
}

func (a *api) CtxDestroy(h driver.Context) driver.Result {
	if r := a.enter(driver.CallCtxDestroy); r != driver.Success {
		return r
	}
	defer a.leave()
	c := a.m.contexts[h]
	if c == nil || c.gone || c == c.device.primary {
		return driver.InvalidContext
	}
	c.destroy()
	return driver.Success
}

func (a *api) CtxGetCurrent() (driver.Context, driver.Result) {
	if r := a.enter(driver.CallCtxGetCurrent); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return a.m.thread().current, driver.Success
}

func (a *api) CtxSetCurrent(h driver.Context) driver.Result {
	if r := a.enter(driver.CallCtxSetCurrent); r != driver.Success {
		return r
	}
	defer a.leave()
	if h != 0 && a.m.contexts[h] == nil {
		return driver.InvalidContext
	}
	t := a.m.thread()
	t.current = h
	a.m.setThread(t)
	return driver.Success
}

func (a *api) CtxGetDevice(h driver.Context) (driver.Device, driver.Result) {
	c, r := a.enterContext(driver.CallCtxGetDevice, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return driver.Device(c.device.ordinal), driver.Success
}

func (a *api) CtxSynchronize(h driver.Context) driver.Result {
	c, r := a.enterContext(driver.CallCtxSynchronize, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if r := c.guardSynchronize(); r != driver.Success {
		return r
	}
	c.drain()
	return a.m.outcome(c)
}

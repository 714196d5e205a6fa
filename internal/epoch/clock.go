// Package epoch tells when the GPU has passed what was freed on a stream: one event serves
// any number of frees.
//
// A [Clock] counts the epochs of one stream. Its owner stamps what it frees with the
// current epoch. When another stream wants the memory, or it is to be unmapped,
// [Clock.Advance] ends the epoch and then records an event. Once the event has passed, all
// that was stamped with that epoch or an earlier one has passed. At most one event is in
// flight, and none is recorded before it is needed.
package epoch

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Clock counts the epochs of a stream. Make it with [New].
//
// The owner's lock guards the current epoch, since a free holds that lock anyway: methods
// that say so are called with it. The clock's own lock is held over the driver calls that
// record and query the event, and comes before the owner's.
type Clock struct {
	stream *core.Stream
	sys    *core.System
	owner  Owner

	// Guarded by the owner's lock.
	now     uint64
	touched uint64 // the epoch of the latest stamp
	manual  bool

	passed atomic.Uint64 // every epoch up to this one has passed

	mu       lock.Mutex[lock.Clock]
	inFlight bool
	mark     core.Mark // behind the epoch that ended last
	marked   uint64    // that epoch
	vain     uint64    // the marked epoch that a caller has waited for in vain
}

// Owner is what a Clock needs of its owner.
type Owner struct {
	sync.Locker
	// Op names the owner's package in errors.
	Op string
	// Lost reports that nothing uses the memory any more, since its context is lost. The
	// clock knows of the stream's.
	Lost func() bool
	// Passed is called whenever an epoch has passed. It may be called with the owner's lock
	// held, and takes no lock.
	Passed func()
}

// Init makes a clock that begins with epoch 1. If manual is set, see [Clock.SetManual].
func (c *Clock) Init(stream *core.Stream, sys *core.System, owner Owner, manual bool) {
	c.stream, c.sys, c.owner, c.now, c.manual = stream, sys, owner, 1, manual
}

// Stream is the clock's stream.
func (c *Clock) Stream() *core.Stream { return c.stream }

// Now is the current epoch. The caller holds the owner's lock.
func (c *Clock) Now() uint64 { return c.now }

// Touch returns the current epoch as a stamp: for what was freed, or was used by work of
// the stream, up to now. The caller holds the owner's lock.
func (c *Clock) Touch() uint64 {
	c.touched = c.now
	return c.now
}

// End begins the next epoch, and returns the one that ended. The caller holds the owner's
// lock.
func (c *Clock) End() (ended uint64) {
	c.now++
	return c.now - 1
}

// SetManual says whether epochs pass by [Clock.Pass] alone, because the owner knows more of
// the work than events tell. The caller holds the owner's lock.
func (c *Clock) SetManual(on bool) { c.manual = on }

// Behind reports whether anything is stamped that has not passed as far as is known. The
// caller holds the owner's lock.
func (c *Clock) Behind() bool { return c.touched > c.passed.Load() }

// Last is the latest epoch that has passed as far as is known.
func (c *Clock) Last() uint64 { return c.passed.Load() }

// Passed reports whether an epoch has passed, as far as is known.
func (c *Clock) Passed(epoch uint64) bool { return epoch <= c.passed.Load() }

// Pass makes every epoch up to this one passed.
func (c *Clock) Pass(epoch uint64) {
	for {
		last := c.passed.Load()
		if last >= epoch || c.passed.CompareAndSwap(last, epoch) {
			break
		}
	}
	c.owner.Passed()
}

// Advance queries whether what was stamped so far has passed, and records an event if none
// is in flight. It reports whether one is. It never waits, and never touches a stream that
// captures: then nothing is known yet. The caller does not hold the owner's lock.
func (c *Clock) Advance() (inFlight bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inFlight {
		if !c.mark.Passed() && !c.lost() {
			return true
		}
		c.forget()
		c.Pass(c.marked)
	}
	c.owner.Lock()
	if c.manual || !c.Behind() {
		c.owner.Unlock()
		return false
	}
	ended := c.End()
	c.owner.Unlock()
	if c.stream.Gone() || c.lost() {
		c.Pass(ended)
		return false
	}
	if c.stream.Use(c.owner.Op, c.sys) != nil {
		return false // it is being closed, and waits for its work
	}
	defer c.stream.Release()
	m, capturing, err := c.stream.Mark(c.owner.Op)
	if capturing || err != nil {
		return false
	}
	if m.Passed() {
		m.Release()
		c.Pass(ended)
		return false
	}
	c.inFlight, c.mark, c.marked = true, m, ended
	return true
}

// forget releases the event in flight. The caller holds mu.
func (c *Clock) forget() {
	c.mark.Release()
	c.inFlight, c.mark = false, core.Mark{}
}

// Await waits until everything that was stamped so far has passed. Querying how far the
// stream is does not wait for that. The caller does not hold the owner's lock.
func (c *Clock) Await(op string) error {
	c.owner.Lock()
	behind, ended := c.Behind(), c.End()
	c.owner.Unlock()
	if behind && !c.stream.Gone() && !c.lost() {
		if err := c.wait(op); err != nil && !c.lost() {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inFlight && c.marked <= ended {
		c.forget()
	}
	c.Pass(ended)
	return nil
}

// wait waits for the work that is on the stream.
func (c *Clock) wait(op string) error {
	if c.stream.Use(op, c.sys) != nil { // its Close runs, and has perhaps not waited yet
		return c.sys.WaitDevices(op, []driver.Device{c.stream.Ctx.Device})
	}
	defer c.stream.Release()
	m, capturing, err := c.stream.Mark(op)
	if capturing {
		return core.CapturingError(op, c.stream)
	}
	if err != nil {
		return err
	}
	return m.Wait(op)
}

// lost reports that nothing of the stream uses the memory any more.
func (c *Clock) lost() bool { return c.stream.Ctx.Lost() != driver.Success || c.owner.Lost() }

// Promises reports whether an event is in flight, and records one if there is none. It does
// not query the one in flight: the caller that waits for it does.
func (c *Clock) Promises() bool {
	c.mu.Lock()
	inFlight := c.inFlight
	c.mu.Unlock()
	return inFlight || c.Advance()
}

// Stall notes that a caller has waited for the event in flight in vain.
func (c *Clock) Stall() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inFlight {
		c.vain = c.marked
	}
}

// Stalled reports whether a caller has waited for the event in flight in vain.
func (c *Clock) Stalled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inFlight && c.vain == c.marked
}

// Check returns an error if the epochs contradict each other. The caller holds the owner's
// lock.
func (c *Clock) Check() error {
	if last := c.passed.Load(); last >= c.now || c.touched > c.now {
		return fmt.Errorf("epochs: passed %d, touched %d, now %d", last, c.touched, c.now)
	}
	return nil
}

// Point is an epoch of a clock.
type Point struct {
	Clock *Clock
	Epoch uint64
}

// Passed reports whether the point has passed, as far as is known.
func (p Point) Passed() bool { return p.Clock.Passed(p.Epoch) }

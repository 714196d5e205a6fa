package sim

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// The engine does the work of all streams, as late and in as odd an order as
// the rules allow, so that a program which relies on luck fails:
//
//   - work that a call waits for, and what it depends on, is done at once;
//   - a query lets one piece of the work that it is about be done;
//   - all other work is delayed for a while, and then done;
//   - if several streams can proceed, the machine's seed decides.
//
// It has a goroutine only while there is work that could be done.
type engine struct {
	running bool          // the goroutine exists
	long    int           // work that has a goroutine of its own
	wake    chan struct{} // capacity 1: there is news
	active  []*stream     // with work, in the order in which they got it
	wanted  map[*op]int   // calls that wait for it
	nudged  map[*op]bool  // a call has queried it
	last    time.Time     // when there was something new to do
	polls   int           // how often in a row words of memory were looked at
}

// laziness is how long work lies that no call waits for or queries.
const laziness = time.Millisecond

// pollAfter is how long to wait before looking at a word of memory once more,
// after looking so often in vain.
func pollAfter(polls int) time.Duration { return 20 * time.Microsecond << min(polls, 5) }

func (e *engine) init() {
	e.wake = make(chan struct{}, 1)
	e.wanted = map[*op]int{}
	e.nudged = map[*op]bool{}
}

func (e *engine) activate(s *stream) {
	if !slices.Contains(e.active, s) {
		e.active = append(e.active, s)
	}
}

// stir lets work lie for a while again.
func (e *engine) stir() { e.last = time.Now() }

// outcome is what a call returns after it waited for work of a context.
func (m *Machine) outcome(c *gpuContext) driver.Result {
	if m.closed {
		return driver.Deinitialized
	}
	return c.lost
}

// await waits until all of that work is done. The lock is released meanwhile.
func (m *Machine) await(work ...*op) {
	m.want(work)
	for _, o := range work {
		for !o.done && !m.closed {
			m.changed.Wait()
		}
	}
	m.unwant(work)
}

// want has the engine do that work, and what it depends on, at once, until unwant.
func (m *Machine) want(work []*op) {
	for _, o := range work {
		m.engine.wanted[o]++
	}
	m.startEngine()
}

func (m *Machine) unwant(work []*op) {
	for _, o := range work {
		if m.engine.wanted[o]--; m.engine.wanted[o] == 0 {
			delete(m.engine.wanted, o)
		}
	}
}

// nudge lets one piece of work be done that brings o nearer.
func (m *Machine) nudge(o *op) {
	m.engine.nudged[o] = true
	m.startEngine()
}

// startEngine wakes the engine, or starts it, because there may be work to do.
func (m *Machine) startEngine() {
	if m.closed {
		return
	}
	if !m.engine.running {
		m.engine.running = true
		go m.runEngine()
		return
	}
	select {
	case m.engine.wake <- struct{}{}:
	default:
	}
}

// stopEngine waits until nothing runs any more.
func (m *Machine) stopEngine() {
	select {
	case m.engine.wake <- struct{}{}:
	default:
	}
	for m.engine.running || m.engine.long > 0 {
		m.changed.Wait()
	}
}

func (m *Machine) runEngine() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for !m.closed {
		o, wait := m.pick()
		if o != nil {
			m.do(o)
			continue
		}
		if wait == 0 {
			break
		}
		m.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-m.engine.wake:
		case <-timer.C:
		}
		timer.Stop()
		m.mu.Lock()
	}
	m.engine.running = false
	m.changed.Broadcast()
}

// pick chooses the next piece of work. Without one it says how long to wait
// before looking again: 0 if only news can change anything.
func (m *Machine) pick() (*op, time.Duration) {
	e := &m.engine
	e.active = slices.DeleteFunc(e.active, func(s *stream) bool { return len(s.queue) == 0 })
	var heads []*op
	polling := false
	for _, s := range e.active {
		o := s.queue[0]
		if o.running || s.held || !o.unblocked() {
			continue
		}
		if o.ready != nil && !o.ready(o.site()) {
			polling = true
			continue
		}
		heads = append(heads, o)
	}
	if len(heads) > 0 {
		if near := leadingTo(heads, e.wanted); len(near) > 0 {
			if m.rng.IntN(8) == 0 {
				near = heads
			}
			return choose(m.rng, near), 0
		}
		near := leadingTo(heads, e.nudged)
		clear(e.nudged)
		if len(near) > 0 {
			return choose(m.rng, near), 0
		}
		rest := laziness - time.Since(e.last)
		if rest <= 0 {
			return choose(m.rng, heads), 0
		}
		if !polling {
			return nil, rest
		}
	}
	if polling {
		e.polls++
		return nil, pollAfter(e.polls)
	}
	return nil, 0
}

func choose(rng *rand.Rand, heads []*op) *op { return heads[rng.IntN(len(heads))] }

func (o *op) unblocked() bool {
	for _, d := range o.deps {
		if !d.done {
			return false
		}
	}
	return true
}

// leadingTo selects the heads without which no op of the targets gets done.
func leadingTo[T any](heads []*op, targets map[*op]T) []*op {
	if len(targets) == 0 {
		return nil
	}
	needed := map[*stream]bool{}
	var need func(*op)
	need = func(o *op) {
		if o.done || needed[o.stream] {
			return
		}
		// Whatever it is that is needed of a stream, its head comes first.
		needed[o.stream] = true
		for _, d := range o.stream.queue[0].deps {
			need(d)
		}
	}
	for o := range targets {
		need(o)
	}
	var near []*op
	for _, o := range heads {
		if needed[o.stream] {
			near = append(near, o)
		}
	}
	return near
}

// do does a piece of work. The lock is released while bytes move.
func (m *Machine) do(o *op) {
	m.engine.polls = 0
	o.running = true
	o.begin()
	run, at := o.run, o.site()
	switch {
	case run == nil:
		m.conclude(o, nil)
	case o.long:
		m.engine.long++
		go func() {
			f := run(at)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.engine.long--
			m.conclude(o, f)
			m.startEngine()
		}()
	default:
		m.conclude(o, m.unlocked(func() *fault { return run(at) }))
	}
}

// unlocked calls f without the lock, and locks again even if f panics, as work on host
// memory that does not exist does: the caller's deferred unlock must not fail then.
func (m *Machine) unlocked(f func() *fault) *fault {
	m.mu.Unlock()
	defer m.mu.Lock()
	return f()
}

func (m *Machine) conclude(o *op, f *fault) {
	o.stream.finish(o)
	if f != nil {
		o.stream.context.lose(*f)
	}
	m.changed.Broadcast()
}

package life

import "sync/atomic"

// The state of a Life: how many operations run, how many began (modulo 2^31),
// and whether it is closed.
const (
	lifeRunning = 1<<32 - 1
	lifeBegun   = 1 << 32
	lifeClosed  = 1 << 63
)

// Life counts the operations that run on an object, and closes it once: from
// then on no operation starts, and a teardown can wait for those that still run.
// The zero value is open. All methods are safe for concurrent use.
type Life struct {
	state atomic.Uint64
	idle  atomic.Pointer[chan struct{}]
}

// Acquire starts an operation; false means that the object is closed.
func (l *Life) Acquire() bool {
	for {
		s := l.state.Load()
		if s&lifeClosed != 0 {
			return false
		}
		if l.state.CompareAndSwap(s, (s+lifeBegun+1)&^lifeClosed) {
			return true
		}
	}
}

// Peek is Acquire for an operation that only looks at the object: once it has
// ended, RanSince does not report it.
func (l *Life) Peek() bool {
	for {
		s := l.state.Load()
		if s&lifeClosed != 0 {
			return false
		}
		if l.state.CompareAndSwap(s, s+1) {
			return true
		}
	}
}

// Release ends an operation that Acquire or Peek started.
func (l *Life) Release() {
	if idle(l.state.Add(^uint64(0))) {
		close(*l.idle.Load())
	}
}

// idle reports whether a state is closed, with nothing that runs.
func idle(state uint64) bool { return state&(lifeClosed|lifeRunning) == lifeClosed }

// A Moment is a point in a Life.
type Moment uint64

// Now returns the present moment, for RanSince.
func (l *Life) Now() Moment { return Moment(l.state.Load() &^ lifeClosed) }

// RanSince reports whether any operation ran at the moment or since, whether or
// not it has ended.
func (l *Life) RanSince(m Moment) bool { return !m.Quiet() || l.Now() != m }

// Quiet reports whether no operation ran at the moment.
func (m Moment) Quiet() bool { return m&lifeRunning == 0 }

// Close lets no further operation start. It reports whether this call was the
// one that closed the object.
func (l *Life) Close() bool {
	// Usually nothing runs, and then there is nothing to wait for.
	if s := l.state.Load(); s&(lifeClosed|lifeRunning) == 0 && l.state.CompareAndSwap(s, s|lifeClosed) {
		return true
	}
	if l.Closed() {
		return false
	}
	ended := make(chan struct{})
	for {
		s := l.state.Load()
		if s&lifeClosed != 0 {
			return false
		}
		// The channel must exist before the last operation can see that it has to
		// close it.
		l.idle.CompareAndSwap(nil, &ended)
		if l.state.CompareAndSwap(s, s|lifeClosed) {
			if idle(s | lifeClosed) {
				close(*l.idle.Load())
			}
			return true
		}
	}
}

// Closed reports whether Close was called.
func (l *Life) Closed() bool { return l.state.Load()&lifeClosed != 0 }

// Idle reports whether the object is closed and nothing runs on it any more.
func (l *Life) Idle() bool { return idle(l.state.Load()) }

// Wait returns once the object is closed and idle. It must follow Close.
func (l *Life) Wait() {
	if !l.Idle() {
		<-*l.idle.Load()
	}
}

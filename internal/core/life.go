package core

import "sync/atomic"

const lifeClosed = 1 << 63

// Life counts the operations that run on an object, and closes it once: from
// then on no operation starts, and whoever tears the object down waits for
// those that run. The zero value is open. All methods are safe for concurrent
// use.
type Life struct {
	state atomic.Uint64
	idle  atomic.Pointer[chan struct{}]
}

// Hold starts an operation; false means that the object is closed.
func (l *Life) Hold() bool {
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

// Drop ends an operation that Hold started.
func (l *Life) Drop() {
	if l.state.Add(^uint64(0)) == lifeClosed {
		close(*l.idle.Load())
	}
}

// Close lets no further operation start. It reports whether this call was the
// one that closed the object.
func (l *Life) Close() bool {
	// Mostly nothing runs, and then nobody will wait.
	if l.state.CompareAndSwap(0, lifeClosed) {
		return true
	}
	if l.Closed() {
		return false
	}
	idle := make(chan struct{})
	for {
		s := l.state.Load()
		if s&lifeClosed != 0 {
			return false
		}
		// The channel must be there before the operation that closes it can see
		// that it is the last.
		l.idle.CompareAndSwap(nil, &idle)
		if l.state.CompareAndSwap(s, s|lifeClosed) {
			if s == 0 {
				close(*l.idle.Load())
			}
			return true
		}
	}
}

// Closed reports whether Close was called.
func (l *Life) Closed() bool { return l.state.Load()&lifeClosed != 0 }

// Idle reports whether the object is closed and nothing runs on it any more.
func (l *Life) Idle() bool { return l.state.Load() == lifeClosed }

// Wait returns once the object is closed and idle. It must follow Close.
func (l *Life) Wait() {
	if !l.Idle() {
		<-*l.idle.Load()
	}
}

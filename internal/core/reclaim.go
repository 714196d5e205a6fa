package core

import (
	"context"
	"errors"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Pauses between two looks of the reclaimer's goroutine: short at first, since
// most work ends soon, longer while nothing happens.
const (
	shortestPause = 20 * time.Microsecond
	longestPause  = 2 * time.Millisecond
)

// The reclaimer tears down what was closed while the GPU might still use it:
// when its fence has passed and no operation runs on it any more. It is worked
// off by operations that acquire, by Drain, and by one goroutine that exists
// only while something is pending.
type reclaimer struct {
	sys     *System
	pending atomic.Int64

	polling sync.Mutex // one looks at a time

	mu      sync.Mutex
	items   []reclaim
	running bool
	failed  []error
}

// ErrAgain is a teardown's answer that it wants to be called again: it would
// have had to wait.
var ErrAgain = errors.New("again")

type reclaim struct {
	fence *Fence
	life  *Life
	// late: there may be work behind the fence, as of operations that ran when
	// the object was taken out of use (Fence.MindAll). Once they have ended
	// everything that is known is fenced again.
	late bool
	rest []*Stream // that are to be marked for it yet
	do   func() error
}

// ready reports whether the teardown may begin.
func (it *reclaim) ready(s *System) bool {
	if !it.passed() || !it.life.Idle() {
		return false
	}
	if !it.late {
		return true
	}
	it.late, it.rest = false, s.everyStream()
	return it.passed()
}

// passed marks what is to be marked yet, and reports whether the GPU has passed
// everything.
func (it *reclaim) passed() bool {
	it.rest = it.fence.addEach(it.rest)
	passed := it.fence.Passed()
	it.fence.held.Store(passed && len(it.rest) > 0)
	return passed && len(it.rest) == 0
}

// Reclaim tears an object down once the fence has passed and its life is idle.
// It never blocks and makes no driver call.
func (s *System) Reclaim(f *Fence, l *Life, do func() error) {
	r := &s.reclaim
	r.pending.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.items = append(r.items, reclaim{fence: f, life: l, late: f.all, rest: f.later, do: do})
	if !r.running {
		r.running = true
		go r.run()
	}
}

// PollReclaim tears down what is ready. With nothing pending it costs one
// atomic load and no driver call.
func (s *System) PollReclaim() {
	if s.reclaim.pending.Load() > 0 {
		s.reclaim.poll()
	}
}

// settle is PollReclaim for somebody who needs the memory: where another
// goroutine is tearing down, it waits for that. It reports whether a teardown
// that may begin goes on elsewhere, and wants to be called again.
func (s *System) settle() (again bool) {
	if s.reclaim.pending.Load() == 0 {
		return false
	}
	s.reclaim.polling.Lock() // what has passed is finite work
	defer s.reclaim.polling.Unlock()
	_, again = s.reclaim.look()
	return again
}

// Go runs what users want to have run after a teardown, on a goroutine of its
// own, since it may do anything, and nobody's locks must be held. Drain waits
// for it.
func (s *System) Go(f func()) {
	done := s.Pending()
	go func() {
		defer done()
		f()
	}()
}

// Hook runs a function of a user. A panic of it is logged and harms nobody else.
func (s *System) Hook(what string, f func()) {
	defer func() {
		if p := recover(); p != nil {
			s.Config.Log.Error("cuvmm: a function of the user panicked", "function", what, "panic", p,
				"stack", string(debug.Stack()))
		}
	}()
	f()
}

// Pending has Drain wait until done is called, once, for something that is to
// come to the reclaimer yet.
func (s *System) Pending() (done func()) {
	s.reclaim.pending.Add(1)
	return func() { s.reclaim.pending.Add(-1) }
}

// PendingReclaims is how many objects wait to be torn down.
func (s *System) PendingReclaims() int { return int(s.reclaim.pending.Load()) }

// Drain waits until nothing is pending, or until the context ends; the error
// then says that it did. Teardowns that failed since the last Drain are
// reported once.
func (s *System) Drain(ctx context.Context) error {
	r := &s.reclaim
	pause := shortestPause
	for r.pending.Load() > 0 {
		if r.poll() {
			pause = shortestPause
			continue
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
		pause = min(2*pause, longestPause)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	err := errors.Join(r.failed...)
	r.failed = nil
	return err
}

func (r *reclaimer) run() {
	pause := shortestPause
	for {
		if r.poll() {
			pause = shortestPause
		}
		r.mu.Lock()
		if r.pending.Load() == 0 {
			r.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		time.Sleep(pause)
		pause = min(2*pause, longestPause)
	}
}

// poll looks at every pending item once, and reports whether it did any.
func (r *reclaimer) poll() (progress bool) {
	if !r.polling.TryLock() {
		return false
	}
	defer r.polling.Unlock()
	progress, _ = r.look()
	return progress
}

// look is poll for the one that may.
func (r *reclaimer) look() (progress, again bool) {
	r.mu.Lock()
	items := r.items
	r.items = nil
	r.mu.Unlock()
	left := items[:0]
	for _, it := range items {
		if !it.ready(r.sys) {
			left = append(left, it)
			continue
		}
		err := it.do()
		if errors.Is(err, ErrAgain) {
			left = append(left, it)
			again = true
			continue
		}
		progress = true
		if err != nil {
			r.sys.Config.Log.Error("cuvmm: giving back what was closed, clipped or revoked failed", "error", err)
			r.mu.Lock()
			r.failed = append(r.failed, err)
			r.mu.Unlock()
		}
		r.pending.Add(-1)
	}
	clear(items[len(left):]) // keeps nothing alive of what is gone
	r.mu.Lock()
	r.items = append(left, r.items...)
	r.mu.Unlock()
	return progress, again
}

package core

import (
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// trimmers are those who keep memory that they could do without.
type trimmers struct {
	mu   sync.Mutex
	next int
	all  map[int]func(need uint64) (freed uint64)
}

// OnPressure registers somebody who keeps device memory for later use, such as
// a pool: trim is asked to give back at least need bytes, and answers how many
// it gave. It is called without any lock of this package, but with the locks of
// the object that needs memory. The answer takes the registration back.
func (s *System) OnPressure(trim func(need uint64) (freed uint64)) (remove func()) {
	t := &s.trimmers
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.all == nil {
		t.all = map[int]func(uint64) uint64{}
	}
	id := t.next
	t.next++
	t.all[id] = trim
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.all, id)
	}
}

// Allocate asks the driver for size bytes of device memory by try. Before it
// gives up for want of memory it tears down what was closed and has passed,
// asks those who keep memory, and, where the System was opened with a bound for
// it, waits for what was closed and is pending. The caller notes the answer.
func (s *System) Allocate(size uint64, try func() driver.Result) driver.Result {
	pending := s.PendingReclaims() > 0
	s.PollReclaim()
	r := try()
	if r != driver.OutOfMemory {
		return r
	}
	// Another goroutine may have been giving memory back meanwhile.
	if pending || s.PendingReclaims() > 0 {
		again := s.settle()
		if r = try(); r != driver.OutOfMemory {
			return r
		}
		// A teardown that goes on elsewhere is given a moment, some milliseconds:
		// the work that was named for it has passed.
		pause := shortestPause
		for tries := 10; again && tries > 0; tries-- {
			time.Sleep(pause)
			pause = min(2*pause, longestPause)
			again = s.settle()
			if r = try(); r != driver.OutOfMemory {
				return r
			}
		}
	}
	if s.trim(size) > 0 {
		if r = try(); r != driver.OutOfMemory {
			return r
		}
	}
	deadline := time.Now().Add(s.Config.AllocationWait)
	for s.PendingReclaims() > 0 && time.Now().Before(deadline) {
		time.Sleep(min(longestPause, max(0, time.Until(deadline))))
		s.settle()
		if r = try(); r != driver.OutOfMemory {
			return r
		}
	}
	return r
}

// trim asks for memory until there is enough.
func (s *System) trim(need uint64) (freed uint64) {
	s.trimmers.mu.Lock()
	all := make([]func(uint64) uint64, 0, len(s.trimmers.all))
	for _, t := range s.trimmers.all {
		all = append(all, t)
	}
	s.trimmers.mu.Unlock()
	for _, t := range all {
		if freed >= need {
			break
		}
		s.Hook("what gives memory back under pressure", func() { freed += t(need - freed) })
	}
	return freed
}

// Relieve is for somebody who has memory of his own to fall back on and so goes
// without Allocate: it tears down what was closed and has passed, waiting for
// whoever is at it, and asks those who keep memory for need bytes.
func (s *System) Relieve(need uint64) (freed uint64) {
	s.settle()
	return s.trim(need)
}

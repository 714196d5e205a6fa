package pages

import (
	"time"

	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// upkeep works in the background: it makes pages before they are needed, and gives back those
// that were not.
type upkeep struct {
	core.Upkeep
	keeper *core.Keeper
	remove func() // from the owners of the budget

	// The source's mu guards what follows.
	pressed time.Time // when memory was last given back for others
	since   time.Time // the window began
	least   int       // free pages at once since then
}

const (
	// calm is how long no page is made ahead after memory was given back for others.
	calm = time.Second
	// busy is how long upkeep waits for a capture to end.
	busy = 20 * time.Millisecond
	// returnPause is how long upkeep waits between two batches that it gives back, so that the
	// driver keeps up with what it does to released memory.
	returnPause = 5 * time.Millisecond
	// returnBatch is how many pages those have.
	returnBatch = 16
)

const upkeepOp = "vmm.Pages upkeep"

// keep has the source give memory back when the System or a budget lacks some.
func (s *Source) keep(within *budget.Budget) {
	u := &s.upkeep
	u.keeper = s.System().OnPressure(func(need uint64) (freed uint64, more bool) {
		if !s.turn.TryLock() {
			return 0, true // a change runs, perhaps the caller's
		}
		defer s.turn.Unlock()
		freed = s.pressedFor(need)
		_, waiting := s.free()
		return freed, waiting > 0
	})
	u.remove = func() {}
	if within != nil {
		u.remove = within.OnPressure(beforeUsers, func(need uint64) uint64 {
			if s.wanting.Load() > 0 {
				return 0 // a Map of this source, which takes what is free here
			}
			s.turn.Lock()
			defer s.turn.Unlock()
			return s.pressedFor(need)
		})
	}
}

// beforeUsers is the priority of what costs no user anything.
const beforeUsers = -1 << 63

// pressedFor gives memory back for others. Free pages that wait for the GPU have a moment to pass:
// see grace. The caller holds turn.
func (s *Source) pressedFor(need uint64) uint64 {
	freed, err := s.trim(upkeepOp, need)
	for began := time.Now(); err == nil && freed < need && s.advance() && time.Since(began) < grace; {
		time.Sleep(shortestPause)
		var n uint64
		n, err = s.trim(upkeepOp, need-freed)
		freed += n
	}
	if err != nil {
		s.System().Config.Log.Error("cuvmm: a source of pages could not give memory back", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.upkeep.pressed = time.Now()
	return freed
}

// free returns how many free pages the GPU has passed, and how many wait for it.
func (s *Source) free() (idle, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stock.n + s.ready.n, s.waitingLocked()
}

func (s *Source) hasIdle(n int) bool {
	idle, _ := s.free()
	return idle >= n
}

// noticeLocked has upkeep run if there is something to do. The caller holds mu, and has changed
// how many pages are used or free.
func (s *Source) noticeLocked() {
	u := &s.upkeep
	free := s.stats.Pages - s.used
	u.least = min(u.least, free)
	switch {
	case s.stock.n+s.ready.n < s.Low:
		u.Wake(0, s.tend)
	case free > s.High && s.stats.Pages > s.floor && s.Idle > 0 && u.since.IsZero():
		u.since, u.least = time.Now(), free
		u.Wake(s.Idle, s.tend)
	}
}

// tend does some of what there is to do, and returns when to look again. It does nothing while
// a stream captures: making memory beside a capture can end it in libraries that do the same.
func (s *Source) tend() (after time.Duration) {
	if !s.Closer.Acquire() {
		return core.Never
	}
	defer s.Closer.Release()
	if st, r := s.System().CapturingStream(); st != nil || r != driver.Success {
		return busy
	}
	return min(s.fillAhead(), s.returned())
}

// fillAhead makes pages up to the high mark if the low one is not reached.
func (s *Source) fillAhead() (after time.Duration) {
	s.mu.Lock()
	rest := calm - time.Since(s.upkeep.pressed)
	s.mu.Unlock()
	for first := true; ; first = false {
		switch free, _ := s.free(); {
		case free >= s.Low && first, free >= s.High, s.Closer.Closed():
			return core.Never
		case rest > 0 && s.Low > 0:
			return rest
		}
		if !s.makeAhead() {
			return core.Never // the next Map that takes pages tries again
		}
	}
}

// makeAhead makes one page, so that a Map waits for no more.
func (s *Source) makeAhead() bool {
	s.turn.Lock()
	defer s.turn.Unlock()
	made, err := s.create(upkeepOp, 1, false)
	if err != nil {
		return false
	}
	s.end(upkeepOp, made)
	return true
}

// trimTo gives back so many pages at most, none of those that a Fill has made.
func (s *Source) trimTo(most int) (freed uint64, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.mu.Lock()
	most = min(most, s.stats.Pages-s.floor)
	s.mu.Unlock()
	return s.trim(upkeepOp, uint64(max(most, 0))*s.Page)
}

// returned gives back what was free for the whole of the last window, beyond the high mark.
func (s *Source) returned() (after time.Duration) {
	u := &s.upkeep
	s.mu.Lock()
	free, since := s.stats.Pages-s.used, u.since
	excess := min(min(u.least, free)-s.High, s.stats.Pages-s.floor)
	if rest := s.Idle - time.Since(since); since.IsZero() || rest > 0 {
		s.mu.Unlock()
		if since.IsZero() {
			return core.Never
		}
		return rest
	}
	if excess <= 0 { // the next window
		u.since, u.least = time.Time{}, free
		s.noticeLocked()
		s.mu.Unlock()
		return core.Never
	}
	s.mu.Unlock()
	freed, err := s.trimTo(min(excess, returnBatch))
	if err != nil {
		s.System().Config.Log.Error("cuvmm: a source of pages could not give back what it did not need", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if freed == 0 { // the GPU has not passed the rest, or the driver refuses: the next window tells
		u.since, u.least = time.Now(), s.stats.Pages-s.used
		return s.Idle
	}
	u.least = min(u.least, s.stats.Pages-s.used)
	return returnPause
}

package core

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Pauses between two tries of the leftovers. A driver that refuses once mostly succeeds at the
// next try, and one that refuses for minutes is tried no more often than that.
const (
	shortestRetry = 10 * time.Millisecond
	longestRetry  = time.Minute
)

// Leftover is something that an operation could not give back: no user has it, so the
// System tries it again, until it succeeds.
type Leftover struct {
	What   string // its kind: "memory", "event"
	Bytes  int    // of memory that stays allocated
	Device driver.Device
	Err    error // of the latest try
}

// leftover is an Undo that stopped. It is tried by one goroutine at a time: by the one that
// made it, and then under the lock of the reclaimer's poll.
type leftover struct {
	on      driver.Device
	round   uint64 // of the latest try
	pending bool   // the reclaimer tries it, because it would have to wait

	// Guarded by leftovers.mu once it is on the list.
	parts []part // the last is tried next
	err   error
}

// leftovers are tried again by a timer, by every Drain, by an allocation that lacks memory,
// and by System.Close.
type leftovers struct {
	count  atomic.Int64
	rounds atomic.Uint64 // a round tries each leftover once

	mu    lock.Mutex[lock.Leaf]
	all   []*leftover
	timer *time.Timer // nil while there is none
	pause time.Duration
}

// Left adds a teardown that failed with err to the leftovers. It is Undo for a single part
// that was tried; see there for what back may do.
func (s *System) Left(what string, bytes int, on driver.Device, err error, back func() error) {
	s.note(&leftover{on: on, parts: []part{{what, bytes, back}}}, err)
}

// Leftovers returns what operations could not give back, the oldest first.
func (s *System) Leftovers() (all []Leftover) {
	l := &s.leftovers
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, o := range l.all {
		for _, p := range slices.Backward(o.parts) {
			all = append(all, Leftover{p.what, p.bytes, o.on, o.err})
		}
	}
	return all
}

// LeftoverBytes returns how much of a device's memory the leftovers hold.
func (s *System) LeftoverBytes(on driver.Device) (n int) {
	for _, l := range s.Leftovers() {
		if l.Device == on {
			n += l.Bytes
		}
	}
	return n
}

// String describes the leftover, without its error.
func (l Leftover) String() string {
	if l.Bytes == 0 {
		return l.What
	}
	return errs.Bytes(l.Bytes) + " of " + l.What
}

// giveBack runs the teardowns that remain. After an error the leftover is on the list, unless
// that is life.ErrAgain.
func (s *System) giveBack(o *leftover) error {
	for n := len(o.parts); n > 0; n-- {
		if err := o.parts[n-1].back(); errors.Is(err, life.ErrAgain) {
			return err
		} else if err != nil {
			s.note(o, err)
			return err
		}
		s.leftovers.mu.Lock()
		o.parts = o.parts[:n-1]
		s.leftovers.mu.Unlock()
	}
	if s.leftovers.remove(o) {
		s.reclaim.ended.Add(1)
	}
	return nil
}

// giveBackBehind has the reclaimer give it back when the fence has passed.
func (s *System) giveBackBehind(f *Fence, o *leftover) {
	o.pending = true
	s.Reclaim(f, nil, func() error {
		if err := s.giveBack(o); errors.Is(err, life.ErrAgain) {
			return err
		}
		o.pending = false
		return nil // a failure is on the list, whose errors Drain returns
	})
}

// note puts what failed on the list, or notes that it failed again.
func (s *System) note(o *leftover, err error) {
	l := &s.leftovers
	l.mu.Lock()
	o.err = err
	known := slices.Contains(l.all, o)
	if !known {
		l.all = append(l.all, o)
		l.count.Add(1)
		if l.pause = shortestRetry; l.timer == nil {
			l.timer = time.AfterFunc(l.pause, s.retryLater)
		} else {
			l.timer.Reset(l.pause)
		}
	}
	what := o.last().String()
	l.mu.Unlock()
	if !known {
		s.Config.Log.Error("cuvmm: the driver did not take back what an operation had made; the library tries it again",
			"what", what, "error", err)
	}
}

// last is the part that the next try begins with.
func (o *leftover) last() Leftover {
	p := o.parts[len(o.parts)-1]
	return Leftover{p.what, p.bytes, o.on, o.err}
}

// remove takes a leftover from the list, and reports whether it was there.
func (l *leftovers) remove(o *leftover) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.all, o)
	if i < 0 {
		return false
	}
	l.all = slices.Delete(l.all, i, i+1)
	l.count.Add(-1)
	if len(l.all) == 0 {
		l.timer.Stop()
		l.timer = nil
	}
	return true
}

// newRound returns a round for retry.
func (l *leftovers) newRound() uint64 { return l.rounds.Add(1) }

// retry tries each leftover that was not tried in the round or since. The caller holds the
// lock of the reclaimer's poll.
func (s *System) retry(round uint64) {
	l := &s.leftovers
	if l.count.Load() == 0 {
		return
	}
	l.mu.Lock()
	all := slices.Clone(l.all)
	l.mu.Unlock()
	for _, o := range all {
		if o.pending || o.round >= round {
			continue
		}
		o.round = round
		if errors.Is(s.giveBack(o), life.ErrAgain) {
			s.giveBackBehind(new(Fence), o) // Drain waits for it
		}
	}
}

// retryLater is the function of the timer.
func (s *System) retryLater() {
	s.reclaim.polling.Lock()
	s.retry(s.leftovers.newRound())
	s.reclaim.polling.Unlock()
	l := &s.leftovers
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer != nil {
		l.pause = min(2*l.pause, longestRetry)
		l.timer.Reset(l.pause)
	}
}

// leftoverErrors returns the latest error of each leftover.
func (s *System) leftoverErrors() (all []error) {
	s.leftovers.mu.Lock()
	defer s.leftovers.mu.Unlock()
	for _, o := range s.leftovers.all {
		all = append(all, fmt.Errorf("%v is left of an operation that failed, and tried again: %w", o.last(), o.err))
	}
	return all
}

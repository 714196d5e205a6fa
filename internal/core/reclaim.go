package core

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Pauses between two polls of the reclaimer's goroutine: short at first, since
// most work ends soon, longer while nothing happens.
const (
	shortestPause = 20 * time.Microsecond
	longestPause  = 2 * time.Millisecond
	// longestPollPause is the pause after a poll that took long because of many streams.
	longestPollPause = 200 * time.Millisecond
)

// acquirerSteps bounds what an operation that acquires memory does for the reclaimer, in
// driver calls and teardowns, so that pending items do not make the operation slow.
const acquirerSteps = 16

// unlimited is the number of steps of a poll without a bound.
const unlimited = int(^uint(0) >> 1)

// The reclaimer tears down what was closed while the GPU might still use it:
// when its fence has passed and no operation runs on it any more. Operations that acquire
// memory poll it, Drain does, and one goroutine that exists only while something is pending.
type reclaimer struct {
	sys     *System
	pending atomic.Int64
	ended   atomic.Uint64 // how many items were torn down

	polling lock.Mutex[lock.Long] // held over a poll
	backlog backlog

	mu      lock.Mutex[lock.Leaf]
	arrived []*reclaim
	running bool
	failed  []error
}

type reclaim struct {
	fence *Fence
	life  *life.Life
	// late: there may be work behind the fence, as of operations that ran when
	// the object was taken out of use (Fence.AddAllStreams). Once they have ended
	// everything that is known is fenced again.
	late     bool
	unmarked []*Stream // whose marks its fence does not have yet
	do       func() error
}

// Reclaim tears an object down once the fence has passed and its life is idle; nil
// stands for an object on which no operation runs. It never blocks and makes no driver
// call.
func (s *System) Reclaim(f *Fence, l *life.Life, do func() error) {
	r := &s.reclaim
	r.pending.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.arrived = append(r.arrived, &reclaim{fence: f, life: l, late: f.all, unmarked: f.later, do: do})
	if !r.running {
		r.running = true
		go r.run()
	}
}

// PollReclaim tears down some of what is ready. With nothing pending it costs one
// atomic load and no driver call, and with any number of objects that wait it
// costs the same few.
func (s *System) PollReclaim() {
	if s.reclaim.pending.Load() > 0 {
		s.reclaim.tryPoll(acquirerSteps)
	}
}

// settle is PollReclaim for a caller that needs the memory: if another goroutine is
// tearing down, it waits for that, and it tries each leftover that was not tried in the round
// or since. It reports whether a teardown that could begin waits for a lock, and should be
// tried again.
func (s *System) settle(round uint64) (again bool) {
	if s.reclaim.pending.Load() == 0 && s.leftovers.count.Load() == 0 {
		return false
	}
	s.reclaim.polling.Lock() // what has passed is finite work
	defer s.reclaim.polling.Unlock()
	_, again = s.reclaim.pollLocked(unlimited)
	s.retry(round)
	return again
}

// Go runs a function of a user after a teardown, on a goroutine of its own without any
// lock, since it may do anything. Drain waits for it.
func (s *System) Go(f func()) {
	done := s.Pending()
	go func() {
		defer done()
		f()
	}()
}

// Hook runs a function of a user. A panic of it is logged.
func (s *System) Hook(what string, f func()) { Hook(s.Config.Log, what, f) }

// Pending makes Drain wait until done is called, once, for something that has yet to
// come to the reclaimer.
func (s *System) Pending() (done func()) {
	s.reclaim.pending.Add(1)
	return s.reclaim.end
}

// end says that one item is not pending any more.
func (r *reclaimer) end() {
	r.ended.Add(1)
	r.pending.Add(-1)
}

// PendingReclaims returns how many closed objects and callbacks are pending.
func (s *System) PendingReclaims() int { return int(s.reclaim.pending.Load()) }

// Drain waits until nothing is pending, or until the context ends; the error
// then says that it did. It tries the leftovers once, and returns the errors of those that
// remain and, once, of teardowns that failed since the last Drain.
func (s *System) Drain(ctx context.Context) error {
	r, round := &s.reclaim, s.leftovers.newRound()
	for tried := false; r.pending.Load() > 0 || !tried; {
		if err := r.drain(ctx); err != nil {
			return err
		}
		r.polling.Lock() // what has passed is finite work
		s.retry(round)
		r.polling.Unlock()
		tried = true
	}
	r.mu.Lock()
	failed := r.failed
	r.failed = nil
	r.mu.Unlock()
	return errors.Join(append(failed, s.leftoverErrors()...)...)
}

// drain waits until nothing is pending.
func (r *reclaimer) drain(ctx context.Context) error {
	pause := shortestPause
	for r.pending.Load() > 0 {
		if r.tryPoll(unlimited) {
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
	return nil
}

func (r *reclaimer) run() {
	pause := shortestPause
	for {
		began := time.Now()
		if r.tryPoll(unlimited) {
			pause = shortestPause
		}
		r.mu.Lock()
		if r.pending.Load() == 0 {
			r.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		// However many streams there are to ask, that takes a small part of a core.
		time.Sleep(max(pause, min(20*time.Since(began), longestPollPause)))
		pause = min(2*pause, longestPause)
	}
}

// tryPoll polls, unless another goroutine does, and reports whether it tore anything
// down.
func (r *reclaimer) tryPoll(most int) (progress bool) {
	if !r.polling.TryLock() {
		return false
	}
	defer r.polling.Unlock()
	progress, _ = r.pollLocked(most)
	return progress
}

// pollLocked receives new items, queries the streams that items wait for, each only about
// its earliest mark, and tears down what is ready, in at most so many steps. The caller holds
// polling.
func (r *reclaimer) pollLocked(most int) (progress, again bool) {
	r.mu.Lock()
	arrived := r.arrived
	r.arrived = nil
	r.mu.Unlock()
	p := poll{r: r, most: most}
	for i, it := range arrived {
		if p.most <= 0 {
			r.backlog.others = append(r.backlog.others, arrived[i:]...)
			break
		}
		r.backlog.advance(it, &p)
	}
	r.backlog.visit(&p)
	return p.progress, p.again
}

// poll is one pass of the reclaimer.
type poll struct {
	r               *reclaimer
	most            int // how many steps it may still do
	progress, again bool
}

// passed reports whether a mark has passed.
func (p *poll) passed(m *Mark) bool {
	p.most--
	return m.Passed()
}

// tearDown does what an item is for. It returns false if the item is to be tried
// again.
func (p *poll) tearDown(it *reclaim) bool {
	p.most--
	err := it.do()
	if errors.Is(err, life.ErrAgain) {
		p.again = true
		return false
	}
	p.progress = true
	r := p.r
	if err != nil {
		r.sys.Config.Log.Error("cuvmm: giving back what was closed or clipped failed", "error", err)
		r.mu.Lock()
		r.failed = append(r.failed, err)
		r.mu.Unlock()
	}
	r.end()
	return true
}

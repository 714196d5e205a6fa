package core

import (
	"math"
	"time"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// Upkeep is what an owner does in the background. It runs on a timer, which is set only while
// there is something to do, and never twice at a time. The zero value is ready.
type Upkeep struct {
	mu      lock.Mutex[lock.Leaf] // a leaf
	timer   *time.Timer
	due     time.Time // when it is to run next; zero: not at all
	running bool
	stopped bool
}

// Never is when to look again if there is nothing to do.
const Never = time.Duration(math.MaxInt64)

// Wake has tend run after a while at the latest. It does some of what there is to do, and returns
// when to look again. It is the same for all calls.
func (u *Upkeep) Wake(after time.Duration, tend func() (after time.Duration)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.wakeLocked(after, tend)
}

func (u *Upkeep) wakeLocked(after time.Duration, tend func() time.Duration) {
	when := time.Now().Add(after)
	if u.stopped || after == Never || !u.due.IsZero() && !when.Before(u.due) {
		return
	}
	u.due = when
	switch {
	case u.running: // run sets the timer when it ends
	case u.timer == nil:
		u.timer = time.AfterFunc(after, func() { u.run(tend) })
	default:
		u.timer.Reset(after)
	}
}

func (u *Upkeep) run(tend func() time.Duration) {
	u.mu.Lock()
	if u.running { // the timer was set again when it had run out
		u.mu.Unlock()
		return
	}
	u.running, u.due = true, time.Time{}
	u.mu.Unlock()
	after := tend()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.running = false
	if due := u.due; !due.IsZero() { // it was woken meanwhile
		u.due = time.Time{}
		after = min(after, max(0, time.Until(due)))
	}
	u.wakeLocked(after, tend)
}

// Stop ends upkeep. tend may still run once, or run: Stop does not wait for it.
func (u *Upkeep) Stop() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.stopped = true; u.timer != nil {
		u.timer.Stop()
	}
}

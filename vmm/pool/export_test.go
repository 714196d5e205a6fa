package pool

import (
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/phys"
)

// SetMostLag changes how long a miss waits for other streams, and returns a function
// that changes it back.
func SetMostLag(d time.Duration) (undo func()) {
	before := mostLag
	mostLag = d
	return func() { mostLag = before }
}

// SetUpkeep changes how soon the pool's upkeep begins, and returns a function that
// changes it back.
func SetUpkeep(d time.Duration) (undo func()) {
	before := firstUpkeep
	firstUpkeep = d
	return func() { firstUpkeep = before }
}

// Tend runs upkeep as if no chunk had moved for long and excess bytes were not needed.
func (p *Pool) Tend(excess uint64) {
	p.mu.Lock()
	p.missed = time.Time{}
	p.mu.Unlock()
	p.upkeep.since, p.upkeep.excess = time.Now(), excess
	p.tend()
}

// EndWindow ends the window in which decay counts what is needed, and gives back all that
// was not.
func (p *Pool) EndWindow() {
	p.upkeep.since = time.Time{}
	for p.decayed(); p.upkeep.excess > 0; p.decayed() {
	}
}

// Ask asks all streams how far they are, and reports whether any is behind.
func (p *Pool) Ask() (inFlight bool) { return p.advanceAll() }

// SetMostDeferred changes how many unmaps may be deferred before upkeep does them, and
// returns a function that changes it back.
func SetMostDeferred(n int) (undo func()) {
	before := mostDeferred
	mostDeferred = n
	return func() { mostDeferred = before }
}

// Deferred returns how many old places of chunks that moved are mapped yet.
func (p *Pool) Deferred() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.deferred)
}

// Handles returns the pool's memory that is mapped, or that was.
func (p *Pool) Handles() (all []*phys.Handle) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range slices.Concat(p.regions[:]...) {
		r.filled(func(_ int, c *chunk) { all = append(all, c.handle) })
	}
	return all
}

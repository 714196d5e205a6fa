package pool

import (
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
)

// upkeep works in the background: it unmaps the old places of chunks that moved, and gives
// back memory that was not needed for long. It runs until Close.
type upkeep struct {
	core.Upkeep
	// Of what follows only tend knows.
	since  time.Time // the window began, in which the most was requested at once
	excess uint64    // bytes to give back, since they were not needed in the last window
}

// firstUpkeep is how long no chunk may have moved before upkeep unmaps old places. Such a
// place costs no memory, and unmapping it holds up the program's own driver calls: on an
// H200 a graph network whose chunks were unmapped after 20 ms took three times as long in its
// second pass. It is a variable for tests.
var firstUpkeep = 10 * time.Second

// mostDeferred is how many unmaps may be deferred before upkeep does them whether chunks
// move or not. It is a variable for tests.
var mostDeferred = 512

const (
	// mostDeferredMemory is how many times the device's memory old places may cover before
	// that.
	mostDeferredMemory = 2
	// busyUpkeep is how long upkeep sleeps before it begins with that.
	busyUpkeep = 20 * time.Millisecond
	// nextUpkeep is how long upkeep sleeps between two pieces.
	nextUpkeep = 100 * time.Microsecond
	// pieces are how many pieces upkeep unmaps at a time.
	pieces = 16
	// decayPause is how long upkeep sleeps between two pieces that it gives back, so
	// that the driver keeps up with what it does to released memory.
	decayPause = 5 * time.Millisecond
	// decaySpare is the part of what was requested that decay leaves free.
	decaySpare = 16
)

// tend does some of what there is to do, and returns when to look again. It makes no driver call any
// more once the pool is closed.
func (p *Pool) tend() (after time.Duration) {
	if !p.pressing.TryRLock() {
		return busyUpkeep // Close or Check runs
	}
	defer p.pressing.RUnlock()
	if p.status.Sleep() != nil {
		return core.Never // whoever wakes the pool wakes its upkeep
	}
	if p.untilQuiet() == 0 {
		p.askDeferred()
		found := true
		for i := 0; found && i < pieces; i++ {
			var err error
			if found, err = p.unmapPassed("pool upkeep"); err != nil {
				p.sys.Config.Log.Error("cuvmm: a pool could not unmap memory that moved", "error", err)
			}
		}
		after = busyUpkeep // the GPU has not passed the rest
		if found {
			after = nextUpkeep
		}
	}
	return min(p.decayed(), max(after, p.untilQuiet()))
}

// untilQuiet returns when places are to be unmapped: 0 is now.
func (p *Pool) untilQuiet() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case len(p.deferred) == 0:
		return core.Never
	case p.crowdedLocked():
		return 0
	}
	return max(0, firstUpkeep-time.Since(p.missed))
}

// crowdedLocked reports whether too many unmaps are deferred. The caller holds mu.
func (p *Pool) crowdedLocked() bool {
	return len(p.deferred) > mostDeferred || p.deferredBytes > mostDeferredMemory*p.addressed()
}

// decayed gives back a piece of what was not needed during the last window, and
// returns when to look again. What a window needs is the most that each stream
// requested at once in it, and a bit more.
func (p *Pool) decayed() (after time.Duration) {
	u := &p.upkeep
	if p.decay <= 0 {
		return core.Never
	}
	if left := p.decay - time.Since(u.since); left > 0 && !u.since.IsZero() {
		after = left
	} else {
		u.since, after = time.Now(), p.decay
		p.aside(false)() // or blocks that it keeps hold chunks
		need := 2 * p.chunk
		for _, sh := range p.all() {
			sh.mu.Lock()
			need += sh.peak + sh.peak/decaySpare
			sh.peak = sh.requested
			sh.mu.Unlock()
		}
		have := p.reserved.Load()
		u.excess = have - min(have, need)
	}
	if u.excess == 0 {
		return after
	}
	p.advanceAll()
	step := min(u.excess, piece*p.chunk)
	freed, err := p.trim("pool upkeep", step)
	if err != nil {
		p.sys.Config.Log.Error("cuvmm: a pool could not give back what it did not need", "error", err)
	}
	if freed == 0 {
		if err == nil && p.setApart(step) {
			return min(after, busyUpkeep)
		}
		u.excess = 0 // what is free is in use by now, or cannot be given back: the next window tells
		return after
	}
	u.excess -= min(u.excess, freed)
	return min(after, decayPause)
}

package pool

import (
	"sync"
	"time"
)

// upkeep is what the pool does on its own time: it unmaps what leaves, and gives back
// what was not needed for long. It runs on a timer, which is stopped by Close.
type upkeep struct {
	mu      sync.Mutex // a leaf
	timer   *time.Timer
	soon    bool // it runs because something leaves
	stopped bool

	// Of what follows only upkeep itself knows.
	pause  time.Duration
	since  time.Time // the window began, in which the most was requested at once
	excess uint64    // bytes to give back, since they were not needed in the last window
}

// How long upkeep sleeps between two looks at what leaves: it grows while nothing
// happens. The first is a variable for tests.
var firstUpkeep = 100 * time.Microsecond

const (
	lastUpkeep = 2 * time.Millisecond
	// pieces are how many pieces upkeep unmaps at a time.
	pieces = 16
	// decayPause is how long upkeep sleeps between two pieces that it gives back, so
	// that the driver keeps up with what it does to released memory.
	decayPause = 5 * time.Millisecond
	// decaySpare is the part of what was requested that decay leaves free.
	decaySpare = 16
)

// start makes sure that upkeep runs: soon, or when the window of the decay ends.
func (u *upkeep) start(p *Pool, soon bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.stopped || u.soon || !soon && u.timer != nil:
		return
	case soon:
		u.soon = true
		u.arm(p, firstUpkeep)
	case p.decay > 0:
		u.arm(p, p.decay)
	}
}

// arm has upkeep run after a while. The caller holds mu.
func (u *upkeep) arm(p *Pool, after time.Duration) {
	if u.timer == nil {
		u.timer = time.AfterFunc(after, func() { u.run(p) })
		return
	}
	u.timer.Reset(after)
}

// stop ends upkeep. One that runs makes no driver call any more once the pool is
// closed.
func (u *upkeep) stop() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.stopped = true; u.timer != nil {
		u.timer.Stop()
	}
}

func (u *upkeep) run(p *Pool) {
	leaves, after := p.tend()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.stopped {
		return
	}
	if u.soon = leaves; leaves || p.decay > 0 {
		u.arm(p, after)
	}
}

// tend does some of what there is to do, and returns whether anything leaves yet, and
// when to look again.
func (p *Pool) tend() (leaves bool, after time.Duration) {
	u := &p.upkeep
	if !p.pressing.TryRLock() {
		return true, lastUpkeep // Close or Check runs
	}
	defer p.pressing.RUnlock()
	u.pause = min(max(firstUpkeep, 2*u.pause), lastUpkeep)
	for _, sh := range p.leavers() {
		sh.advance()
	}
	for range pieces {
		found, err := p.unmapPassed("pool upkeep")
		if err != nil {
			p.sys.Config.Log.Error("cuvmm: a pool could not unmap memory that moved", "error", err)
		}
		if !found {
			break
		}
		u.pause = firstUpkeep
	}
	next := p.decayed()
	if !p.settled() {
		return true, min(u.pause, next)
	}
	return false, next
}

// decayed gives back a piece of what was not needed during the last window, and
// returns when to look again. What a window needs is the most that each stream
// requested at once in it, and a bit more.
func (p *Pool) decayed() (after time.Duration) {
	u := &p.upkeep
	if p.decay <= 0 {
		return lastUpkeep
	}
	if left := p.decay - time.Since(u.since); left > 0 && !u.since.IsZero() {
		after = left
	} else {
		u.since, after = time.Now(), p.decay
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
	freed, err := p.trim("pool upkeep", min(u.excess, piece*p.chunk))
	if err != nil {
		p.sys.Config.Log.Error("cuvmm: a pool could not give back what it did not need", "error", err)
	}
	if freed == 0 {
		u.excess = 0 // what is free has not passed, or is in use by now: the next window tells
		return after
	}
	u.excess -= min(u.excess, freed)
	return min(after, decayPause)
}

// settled reports whether nothing leaves.
func (p *Pool) settled() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.leaving) == 0
}

// leavers are the shards that something leaves.
func (p *Pool) leavers() []*shard {
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := map[*shard]bool{}
	var all []*shard
	for _, r := range p.leaving {
		if r.epoch > r.shard.passed.Load() && !seen[r.shard] {
			seen[r.shard] = true
			all = append(all, r.shard)
		}
	}
	return all
}

package pool

import (
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// upkeep is what the pool does on its own time: it unmaps what leaves, and gives back
// what was not needed for long. It runs on a timer, which is stopped by Close.
type upkeep struct {
	mu      sync.Mutex // a leaf
	timer   *time.Timer
	soon    bool // something leaves
	running bool
	stopped bool

	// Of what follows only upkeep itself knows.
	since  time.Time // the window began, in which the most was requested at once
	excess uint64    // bytes to give back, since they were not needed in the last window
}

// firstUpkeep is how long it has to be quiet before upkeep unmaps: a miss maps, and the
// driver does one at a time. A program grows, or changes what it does, in bursts.
// It is a variable for tests.
var firstUpkeep = 20 * time.Millisecond

const (
	// mostLeaving is how many runs may leave before upkeep unmaps whether it is quiet or
	// not.
	mostLeaving = 512
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

// start makes sure that upkeep runs: soon, or when the window of the decay ends.
func (u *upkeep) start(p *Pool, soon bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.stopped || u.soon || !soon && u.timer != nil:
		return
	case soon:
		if u.soon = true; !u.running { // or it sees to that when it ends
			u.arm(p, firstUpkeep)
		}
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
	u.mu.Lock()
	if u.running { // the timer was set again when it had run out
		u.mu.Unlock()
		return
	}
	u.running, u.soon = true, false
	u.mu.Unlock()
	leaves, after := p.tend()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.running = false
	if u.stopped {
		return
	}
	if u.soon { // something began to leave meanwhile, which tend may have missed
		after = min(after, firstUpkeep)
	}
	if u.soon = u.soon || leaves; u.soon || p.decay > 0 {
		u.arm(p, after)
	}
}

// tend does some of what there is to do, and returns whether anything leaves yet, and
// when to look again.
func (p *Pool) tend() (leaves bool, after time.Duration) {
	if !p.pressing.TryRLock() {
		return true, firstUpkeep // Close or Check runs
	}
	defer p.pressing.RUnlock()
	pause := firstUpkeep
	if p.quiet() {
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
			pause = nextUpkeep
		}
	}
	next := p.decayed()
	if !p.settled() {
		return true, min(pause, next)
	}
	return false, next
}

// decayed gives back a piece of what was not needed during the last window, and
// returns when to look again. What a window needs is the most that each stream
// requested at once in it, and a bit more.
func (p *Pool) decayed() (after time.Duration) {
	u := &p.upkeep
	if p.decay <= 0 {
		return firstUpkeep
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

// quiet reports whether no request has missed for a while, or too much leaves to wait
// for that.
func (p *Pool) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.leaving) > mostLeaving || time.Since(p.missed) >= firstUpkeep
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

// run are free chunks that were cut out of a shard. Their place, and the shard,
// are kept until the chunks are put back or unmapped there.
//
//	a shard's ──cut──► run ──put back──► the shard's
//	                    ├──mapped elsewhere──► leaving ──GPU has passed──► unmapped
//	                    └──trimmed──► unmapped
type run struct {
	shard *shard
	reg   *region
	span  *span
	epoch uint64
}

// moves reports whether chunks move at all: granting a peer access to one that
// moved would take longer than making another.
func (p *Pool) moves() bool { return len(p.access) == 1 }

// cut takes free chunks that are of an epoch up to a last one out of a shard, for a
// gap: from the smallest holes first, which serve least as they are. The caller
// holds mu and the shard's lock.
func (p *Pool) cut(sh *shard, g *growth, upTo uint64) {
	runs, n := p.cutHoles(sh, g.n-g.have, upTo, true)
	g.runs = append(g.runs, runs...)
	g.have += n
}

// cutHoles cuts up to n free chunks out of one shard, to move them, or to give them
// back. The caller holds mu and the shard's lock.
func (p *Pool) cutHoles(sh *shard, n int, upTo uint64, move bool) (runs []run, got int) {
	sh.rest()
	var holes []*extent
	for e, found := sh.free.atLeast(p.chunk), 0; e != nil && found < n; e = sh.free.after(e) {
		if k := e.whole(); e.epoch <= upTo && k > 0 {
			holes = append(holes, e)
			found += k
		}
	}
	for _, e := range holes {
		if got >= n {
			break
		}
		from, k := e.loose(n-got, move)
		if k == 0 {
			continue
		}
		reg, epoch := e.reg, e.epoch
		s := reg.cut(sh, e, from, from+driver.Ptr(uint64(k)*reg.chunk))
		runs = append(runs, run{sh, reg, s, epoch})
		sh.kept++ // until the run is unmapped or put back, since prune forgets a shard that has nothing
		got += k
	}
	return runs, got
}

// whole is how many whole chunks lie in the extent.
func (e *extent) whole() int {
	from, to := e.reg.up(e.ptr), e.reg.down(e.end())
	if from >= to {
		return 0
	}
	return int(uint64(to-from) / e.reg.chunk)
}

// loose is the run of at most n chunks that goes from the extent: at the end
// that has nothing behind it, so that the hole does not become two.
func (e *extent) loose(n int, move bool) (from driver.Ptr, k int) {
	r := e.reg
	lo, hi := r.index(r.up(e.ptr)), r.index(r.up(e.ptr))+e.whole()
	may := func(i int) bool {
		return !move || !r.chunks[i].Load().handle.Exported()
	}
	if e.prev.state == wall && e.next.state != wall {
		for k = 0; k < n && lo+k < hi && may(lo+k); k++ {
		}
		return r.at(lo), k
	}
	for k = 0; k < n && hi-k > lo && may(hi-k-1); k++ {
	}
	return r.at(hi - k), k
}

func (r run) handles() (all []*phys.Handle) {
	for i := r.reg.index(r.span.from); i < r.reg.index(r.span.to); i++ {
		all = append(all, r.reg.chunks[i].Load().handle)
	}
	return all
}

// putBack gives a run back to the shard that it was cut out of. The caller holds mu.
func (p *Pool) putBack(r run) {
	r.shard.mu.Lock()
	defer r.shard.mu.Unlock()
	r.reg.own(r.shard, r.span, r.epoch)
	r.shard.kept--
}

// leave has the place of chunks that moved unmapped later. The caller holds mu.
func (p *Pool) leave(r run) {
	p.leaving = append(p.leaving, r)
	p.missed = time.Now()
	p.upkeep.start(p, true)
}

// piece is how many chunks are unmapped in one call at most, since a miss that
// maps meanwhile waits for it: a chunk takes some 14 µs.
const piece = 8

// unmapPassed unmaps a piece of what is leaving and has passed, and reports whether
// there was any. Where it fails it is unknown what is mapped there: the place is
// lost, and what is left of its memory goes with the region.
func (p *Pool) unmapPassed(op string) (found bool, err error) {
	p.mu.Lock()
	for i := range p.leaving {
		r := &p.leaving[i]
		if r.epoch > r.shard.passed.Load() {
			continue
		}
		part := *r
		if r.reg.index(r.span.to)-r.reg.index(r.span.from) > piece {
			part.span = r.reg.front(r.span, piece)
			part.shard.mu.Lock()
			part.shard.kept++
			part.shard.mu.Unlock()
		} else {
			last := len(p.leaving) - 1
			p.leaving[i] = p.leaving[last]
			p.leaving[last] = run{}
			p.leaving = p.leaving[:last]
		}
		p.mu.Unlock()
		_, err := p.unmap(op, part)
		return true, err
	}
	p.mu.Unlock()
	return false, nil
}

// unmapAll unmaps all that is leaving and has passed.
func (p *Pool) unmapAll(op string) error {
	for {
		if found, err := p.unmapPassed(op); !found || err != nil {
			return err
		}
	}
}

// unmap makes the place of a run a gap, and returns the bytes of memory that went
// with it.
func (p *Pool) unmap(op string, r run) (gone uint64, err error) {
	gone, err = r.reg.vacate(op, r.reg.index(r.span.from), r.reg.index(r.span.to))
	p.gave(gone)
	r.shard.keep(-1)
	if err == nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		r.reg.remove(r.span)
	}
	return gone, err
}

// vacate unmaps chunks that nothing uses, and returns the bytes of memory that
// went: that of chunks which are mapped nowhere else. What is left after a failure
// is lost.
func (r *region) vacate(op string, from, to int) (gone uint64, err error) {
	err = r.rng.UnmapRun(op, r.off(r.at(from)), uint64(to-from)*r.chunk)
	for i := from; i < to; i++ {
		h := r.chunks[i].Load().handle
		if err == nil || r.left(i) == 0 {
			r.chunks[i].Store(nil)
			if h.TakeGone() {
				gone += h.Size
			}
		} else {
			r.chunks[i].Store(&chunk{handle: h})
		}
	}
	return gone, err
}

package pool

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// trimFor makes room for what a request lacks. If chunks move, those of regions have
// been tried already.
func (p *Pool) trimFor(w *want, s *shortage) (freed uint64, err error) {
	switch {
	case s.kind == errs.OutOfAddressSpace:
		// Only ranges in which nothing is are given back.
		if err := p.unmapAll(allocOp); err != nil {
			return 0, err
		}
		return p.trim(allocOp, maxBytes)
	case w.kind == mid && p.moves():
		return trimBy(allocOp, p.lacks(w), p.trimIdle, p.trimSlabs)
	}
	return p.trim(allocOp, p.lacks(w))
}

// trim gives free chunks that the GPU has passed back to the driver until need
// bytes went: unmapped chunks, slabs, and whole chunks of regions.
func (p *Pool) trim(op string, need uint64) (freed uint64, err error) {
	return trimBy(op, need, p.trimIdle, p.trimSlabs, p.trimRegions)
}

// trimBy tries one way after another. Each reports whether it found anything to give back,
// which may be chunks whose memory a failure holds elsewhere.
func trimBy(op string, need uint64, ways ...func(op string, need uint64) (uint64, bool, error)) (freed uint64, err error) {
	for _, way := range ways {
		for found := true; found && freed < need; {
			var n uint64
			n, found, err = way(op, need-freed)
			if freed += n; err != nil {
				return freed, err
			}
		}
	}
	return freed, nil
}

// trimIdle gives back a chunk that is mapped nowhere.
func (p *Pool) trimIdle(op string, _ uint64) (freed uint64, found bool, err error) {
	p.mu.Lock()
	n := len(p.idle)
	if n == 0 {
		p.mu.Unlock()
		return 0, false, nil
	}
	h := p.idle[n-1]
	p.idle = p.idle[:n-1]
	p.mu.Unlock()
	if err := p.drop(op, h); err != nil {
		return 0, true, err
	}
	return h.Size, true, nil
}

// slabPiece is how many empty slab chunks are taken from their shards at a time.
const slabPiece = 64

// trimSlabs gives some empty slab chunks back.
func (p *Pool) trimSlabs(op string, need uint64) (freed uint64, found bool, err error) {
	most := int(min((need+p.gran-1)/p.gran, slabPiece))
	type spare struct {
		slabChunk
		sh *shard
	}
	var all []spare
	p.mu.Lock()
	p.eachOfferLocked(func(sh *shard) bool {
		for len(all) < most {
			c, ok := sh.spareSlab(sh.passed())
			if !ok {
				break
			}
			all = append(all, spare{c, sh})
			sh.kept++
		}
		return len(all) < most
	})
	p.mu.Unlock()
	for _, c := range all {
		if err != nil {
			c.sh.mu.Lock()
			c.sh.empty = append(c.sh.empty, c.slabChunk)
			c.sh.offerLocked()
			c.sh.mu.Unlock()
		} else {
			var gone uint64
			gone, err = p.discard(op, c.reg, c.index)
			freed += gone
		}
		c.sh.letGo()
	}
	return freed, len(all) > 0, err
}

// trimRegions gives some whole free chunks of regions back, and unmaps their old places:
// only then their memory is gone.
func (p *Pool) trimRegions(op string, need uint64) (freed uint64, found bool, err error) {
	n := int(min((need+p.chunk-1)/p.chunk, piece))
	p.mu.Lock()
	runs := p.takeLeavingLocked(n)
	for _, r := range runs {
		n -= r.chunks()
	}
	if n > 0 {
		p.eachOfferLocked(func(sh *shard) bool {
			more, k := p.cutHolesLocked(sh, n, sh.passed())
			runs, n = append(runs, more...), n-k
			return n > 0
		})
	}
	old := p.otherPlaces(runs)
	p.mu.Unlock()
	for _, r := range old {
		_, failed := p.unmap(op, r)
		err = join(failed, err)
	}
	for _, r := range runs {
		if err != nil {
			p.mu.Lock()
			p.putBackLocked(r)
			p.mu.Unlock()
			continue
		}
		var gone uint64
		gone, err = p.unmap(op, r)
		freed += gone
	}
	return freed, len(runs) > 0, err
}

// setApart cuts up to need bytes out of free extents whatever their epoch, to be trimmed when
// the GPU has passed them, and reports whether any is set apart. A free block is coalesced
// with what is free beside it, which then has the block's epoch: beside steady work on a
// stream its largest extent would never be of an epoch that has passed.
func (p *Pool) setApart(need uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := int((need + p.chunk - 1) / p.chunk); len(p.leaving) == 0 {
		p.eachOfferLocked(func(sh *shard) bool {
			more, k := p.cutHolesLocked(sh, n, math.MaxUint64)
			p.leaving, n = append(p.leaving, more...), n-k
			return n > 0
		})
	}
	return len(p.leaving) > 0
}

// takeLeavingLocked takes runs that were set apart and that the GPU has passed, until they are n
// chunks. The caller holds mu.
func (p *Pool) takeLeavingLocked(n int) (passed []run) {
	p.leaving = slices.DeleteFunc(p.leaving, func(r run) bool {
		take := n > 0 && r.shard.clock.Passed(r.epoch)
		if take {
			passed = append(passed, r)
			n -= r.chunks()
		}
		return take
	})
	return passed
}

// stay puts back what was set apart, for a request that lacks memory, and reports whether
// there was any.
func (p *Pool) stay() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.leaving {
		p.putBackLocked(r)
	}
	n := len(p.leaving)
	p.leaving = nil
	return n > 0
}

// underPressure gives memory back for an allocation outside of the pool that found none.
// While the pool closes, or is checked, more is to come. A pool that sleeps has none: its
// Suspension, which may be what lacks the memory, alone moves it.
func (p *Pool) underPressure(need uint64) (freed uint64, more bool) {
	if !p.pressing.TryRLock() {
		return 0, true
	}
	defer p.pressing.RUnlock()
	if p.status.Sleep() != nil {
		return 0, false
	}
	defer p.aside(false)()
	freed, err := p.trimPatiently(need, time.Sleep)
	if err != nil {
		p.sys.Config.Log.Error("cuvmm: a pool could not give memory back", "error", err)
	}
	return freed, p.waits()
}

const trimOp = "pool.Trim"

// Trim gives free memory that the GPU has passed back to the driver: at least
// need bytes if there is that much, or all where need is 0. It returns the number of
// bytes that it gave back. It gives idle streams some milliseconds to pass, and does
// not wait for work. A pool that is suspended gives up what is kept of its free chunks, which
// do not come back, and returns 0.
func (p *Pool) Trim(need int) (freed int, err error) {
	if err := p.made(trimOp); err != nil {
		return 0, err
	}
	switch {
	case need < 0:
		return 0, errs.Invalid(trimOp, fmt.Sprintf("%d bytes", need), "use a size in bytes, or 0 for all")
	case need == 0:
		need = maxBytes
	}
	defer p.aside(false)()
	p.misses.Lock()
	if p.status.Sleep() != nil {
		defer p.misses.Unlock()
		return 0, p.trimAsleep(trimOp)
	}
	n, err := p.trimPatiently(uint64(need), func(d time.Duration) {
		p.misses.Unlock()
		defer p.misses.Lock()
		time.Sleep(d)
	})
	p.misses.Unlock()
	p.verify()
	return int(n), err
}

// trimPatiently is trim in pieces, between which it sleeps if others may go on, and
// lets idle streams pass.
func (p *Pool) trimPatiently(need uint64, sleep func(time.Duration)) (freed uint64, err error) {
	defer p.stay()
	for w := (backoff{}); ; {
		inFlight := p.advanceAll()
		for {
			if p.status.Sleep() != nil { // its suspension has begun while others went on
				return freed, nil
			}
			step := min(need-freed, piece*p.chunk)
			n, err := p.trim(trimOp, step)
			if freed += n; err != nil || freed >= need {
				return freed, err
			}
			if n < step {
				inFlight = p.setApart(need-freed) || inFlight
				break
			}
			sleep(0)
		}
		if !inFlight || !w.pause(0, sleep) {
			return freed, nil
		}
	}
}

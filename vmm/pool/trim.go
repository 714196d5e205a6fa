package pool

import (
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
)

// trimFor makes room for what a request lacks. Where chunks move, those of
// regions have done so.
func (p *Pool) trimFor(w *want, s *shortage) (freed uint64, err error) {
	switch {
	case s.kind == core.OutOfAddressSpace:
		return p.trim(allocOp, maxBytes) // only ranges in which nothing is are given back
	case w.kind == mid && p.moves():
		return trimBy(allocOp, p.lacking(w), p.trimIdle, p.trimSlabs)
	}
	return p.trim(allocOp, p.lacking(w))
}

// trim gives free chunks that the GPU has passed back to the driver until need
// bytes went: those that are mapped nowhere, slabs, and whole chunks of regions.
func (p *Pool) trim(op string, need uint64) (freed uint64, err error) {
	if err := p.unmapAll(op); err != nil {
		return 0, err
	}
	return trimBy(op, need, p.trimIdle, p.trimSlabs, p.trimRegions)
}

func trimBy(op string, need uint64, ways ...func(op string, need uint64) (uint64, error)) (freed uint64, err error) {
	for _, way := range ways {
		if freed >= need {
			break
		}
		n, err := way(op, need-freed)
		if freed += n; err != nil {
			return freed, err
		}
	}
	return freed, nil
}

// trimIdle gives back chunks that are mapped nowhere.
func (p *Pool) trimIdle(op string, need uint64) (freed uint64, err error) {
	for freed < need {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 {
			p.mu.Unlock()
			break
		}
		h := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		if err := p.release(op, h); err != nil {
			return freed, err
		}
		freed += h.Size
	}
	return freed, nil
}

// trimSlabs gives empty slab chunks back.
func (p *Pool) trimSlabs(op string, need uint64) (freed uint64, err error) {
	for _, sh := range p.all() {
		for freed < need && err == nil {
			sh.mu.Lock()
			c, ok := slabChunk{}, false
			if sh.arena == nil {
				c, ok = sh.spareSlab(sh.passed.Load())
			}
			sh.mu.Unlock()
			if !ok {
				break
			}
			var gone uint64
			gone, err = p.discard(op, c.reg, c.index)
			freed += gone
		}
	}
	return freed, err
}

// trimRegions gives whole free chunks of regions back.
func (p *Pool) trimRegions(op string, need uint64) (freed uint64, err error) {
	n := int((need + p.chunk - 1) / p.chunk)
	p.mu.Lock()
	var runs []run
	for _, sh := range p.shards {
		if n <= 0 {
			break
		}
		sh.mu.Lock()
		if sh.arena == nil {
			more, k := p.cutHoles(sh, n, sh.passed.Load(), false)
			runs, n = append(runs, more...), n-k
		}
		sh.mu.Unlock()
	}
	p.mu.Unlock()
	for _, r := range runs {
		if err != nil {
			p.mu.Lock()
			p.putBack(r)
			p.mu.Unlock()
			continue
		}
		var gone uint64
		gone, err = p.unmap(op, r)
		freed += gone
	}
	return freed, err
}

// underPressure is asked by others who need memory. While this pool asks the
// others itself it has nothing left, nor while it closes.
func (p *Pool) underPressure(need uint64) uint64 {
	if p.relieve.Load() || !p.pressing.TryRLock() {
		return 0
	}
	defer p.pressing.RUnlock()
	freed, err := p.trimPatiently(need, time.Sleep)
	if err != nil {
		p.sys.Config.Log.Error("cuvmm: a pool could not give memory back", "error", err)
	}
	return freed
}

const trimOp = "pool.Trim"

// Trim gives free memory that the GPU has passed back to the driver, at least
// need bytes if there is that much; 0 is all. It returns how many it gave back. It
// gives idle streams some milliseconds to pass, and does not wait for work.
func (p *Pool) Trim(need int) (freed int, err error) {
	if need <= 0 {
		need = maxBytes
	}
	p.slow.Lock()
	n, err := p.trimPatiently(uint64(need), p.sleep)
	p.slow.Unlock()
	p.verify()
	return int(n), err
}

// trimPatiently is trim that lets idle streams pass first.
func (p *Pool) trimPatiently(need uint64, sleep func(time.Duration)) (freed uint64, err error) {
	for w := (patience{}); ; {
		inFlight := p.advanceAll()
		n, err := p.trim(trimOp, need-freed)
		if freed += n; err != nil || freed >= need || !inFlight || !w.pause(0, sleep) {
			return freed, err
		}
	}
}

package pool

import "github.com/cuvmm/cuvmm/internal/phys"

// The chunks of slabs stay where they are, in regions of granules, as long as they
// are mapped. Those that move are in miss.go.

// provideSlab makes an empty slab chunk.
func (p *Pool) provideSlab(sh *shard) error {
	reg, at, err := p.takeRoom()
	if err != nil {
		return err
	}
	h, err := p.newChunk(p.gran)
	if err != nil {
		p.giveRoom(reg, at)
		return err
	}
	if err = reg.rng.MapRun(allocOp, reg.off(reg.at(at)), []*phys.Handle{h}, p.access); err != nil {
		var undo error
		if reg.left(at) == 0 {
			p.giveRoom(reg, at)
			undo = p.release(allocOp, h)
		} else { // its memory is used no more, so this is tried twice
			reg.chunks[at].Store(&chunk{handle: h})
			h.Release() // what was left has a count of its own
			_, undo = p.discard(allocOp, reg, at)
		}
		return join(err, undo)
	}
	reg.chunks[at].Store(&chunk{handle: h})
	reg.chunks[at].Load().shard.Store(sh)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.made.Add(p.gran)
	sh.empty = append(sh.empty, slabChunk{reg: reg, index: at})
	sh.offer()
	return nil
}

// takeRoom takes the place for a chunk, in another region where there is none.
func (p *Pool) takeRoom() (reg *region, at int, err error) {
	for {
		p.mu.Lock()
		for _, r := range p.regions[small] {
			if at, ok := r.vacant.take(1); ok {
				p.mu.Unlock()
				return r, at, nil
			}
		}
		p.mu.Unlock()
		total := (p.dev.TotalMemory() + p.gran - 1) / p.gran * p.gran
		if _, err := p.reserve(small, total, p.gran, p.gran, p.gran); err != nil {
			return nil, 0, err
		}
	}
}

// discard gives back a slab chunk that nobody uses, and its place.
func (p *Pool) discard(op string, reg *region, at int) (gone uint64, err error) {
	gone, err = reg.vacate(op, at, at+1)
	p.reserved.Add(-gone)
	if err == nil {
		p.giveRoom(reg, at)
	}
	return gone, err
}

// giveRoom gives the place of a chunk back, where nothing is mapped.
func (p *Pool) giveRoom(reg *region, at int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	reg.vacant.give(at, 1)
}

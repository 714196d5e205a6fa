package pool

import "github.com/cuvmm/cuvmm/internal/phys"

// Slab chunks and exact ones are fixed: each stays at its place in a region of
// granules, as long as it is mapped. What moves is in stitch.go.

// makeChunk makes a chunk that stays where it is, in a region of granules. The
// caller holds slow.
func (p *Pool) makeChunk(k kind, size uint64) (reg *region, at int, err error) {
	if reg, at, err = p.room(k, size); err != nil {
		return nil, 0, err
	}
	h, err := p.create(size)
	if err != nil {
		p.leave(reg, at, size)
		return nil, 0, err
	}
	lost, err := p.mapAt(reg, at, []*phys.Handle{h})
	if err == nil {
		reg.chunks[at].Store(&chunk{handle: h})
		return reg, at, nil
	}
	var undo error
	if lost {
		_, undo = p.discard(allocOp, reg, at) // it may be much memory, so this is tried twice
	} else {
		p.leave(reg, at, size)
		_, undo = p.trimIdle(allocOp, size)
	}
	return nil, 0, join(err, undo)
}

// room takes the place for a chunk, in another region where there is none.
func (p *Pool) room(k kind, size uint64) (reg *region, at int, err error) {
	for {
		p.mu.Lock()
		for _, r := range p.regions[k] {
			if at, ok := r.vacant.take(r.count(size)); ok {
				p.mu.Unlock()
				return r, at, nil
			}
		}
		p.mu.Unlock()
		total := (p.dev.TotalMemory() + p.gran - 1) / p.gran * p.gran
		if _, err := p.reserve(k, total, size, p.gran, p.gran); err != nil {
			return nil, 0, err
		}
	}
}

// discard gives back a chunk of makeChunk that nobody uses, and its place.
func (p *Pool) discard(op string, reg *region, at int) (gone uint64, err error) {
	size := reg.chunks[at].Load().handle.Size
	gone, err = reg.vacate(op, at, at+reg.count(size))
	p.reserved.Add(-gone)
	if err == nil {
		p.leave(reg, at, size)
	}
	return gone, err
}

// leave gives the place of a chunk back, where nothing is mapped.
func (p *Pool) leave(reg *region, at int, size uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	reg.vacant.give(at, reg.count(size))
}

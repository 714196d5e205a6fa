package pool

// An exact chunk is one large request's at a time. It is never split and never
// moves, and is kept for the next request of about its size. It lies in a region
// of granules, over as many of them as it is long.
//
//	none ──create──► taken ⇄ free ──trim──► none

// provideExact makes an exact chunk. Where the pool has much more than was ever
// requested, free ones make room for it first.
func (p *Pool) provideExact(sh *shard, w *want) error {
	if allowed := p.allowance(w); w.size > allowed {
		p.catchUp(sh, w.size-allowed)
		if _, err := trimBy(allocOp, w.size-allowed, p.trimIdle, p.trimExact, p.trimRegions); err != nil {
			return err
		}
	}
	reg, at, err := p.makeChunk(large, w.size)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.made.Add(w.size)
	reg.ownExact(sh, at, 0)
	return nil
}

// ownExact makes an exact chunk a shard's. The caller holds mu and the shard's
// lock.
func (r *region) ownExact(sh *shard, at int, epoch uint64) {
	c := r.chunks[at].Load()
	e := sh.newExtent(r, r.at(at), c.handle.Size)
	e.exact, e.epoch, e.state = true, epoch, free
	sh.exacts.insert(e)
	sh.spanned += e.size
	if c.starts == nil {
		c.starts = make([]*extent, 1)
	}
	c.starts[0] = e
	c.shard.Store(sh)
}

// disownExact takes a free exact chunk from its shard, and answers its place.
// The caller holds mu and the shard's lock.
func disownExact(e *extent) (r *region, at int) {
	sh := e.home.shard
	r, at = e.reg, e.reg.index(e.ptr)
	r.chunks[at].Load().shard.Store(nil)
	sh.exacts.remove(e)
	sh.spanned -= e.size
	sh.drop(e)
	return r, at
}

// trimExact gives back free exact chunks that have passed, the smallest that
// is enough or the largest there is, until need bytes went.
func (p *Pool) trimExact(op string, need uint64) (freed uint64, err error) {
	for freed < need {
		r, at := p.pickExact(need - freed)
		if r == nil {
			return freed, nil
		}
		n, err := p.discard(op, r, at)
		if freed += n; err != nil {
			return freed, err
		}
	}
	return freed, nil
}

func (p *Pool) pickExact(need uint64) (r *region, at int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best *extent
	for _, sh := range p.shards {
		sh.mu.Lock()
		if sh.arena == nil {
			for e := sh.exacts.atLeast(0); e != nil; e = sh.exacts.after(e) {
				if e.epoch > sh.passed.Load() {
					continue
				}
				if best == nil || best.size < need && e.size > best.size || e.size >= need && e.size < best.size {
					best = e
				}
			}
		}
		sh.mu.Unlock()
	}
	if best == nil {
		return nil, 0
	}
	// Another goroutine may have taken it since.
	best.home.shard.mu.Lock()
	defer best.home.shard.mu.Unlock()
	if best.state != free || !best.exact || best.epoch > best.home.shard.passed.Load() {
		return nil, 0
	}
	return disownExact(best)
}

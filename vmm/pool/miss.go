package pool

import (
	"errors"
	"math"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// A miss is a request that nothing free of its shard serves. Misses make driver
// calls, outside of the pool's lock, and go on side by side. If other shards have
// nothing either that serves it as it lies, a miss fills a gap of a region, in four
// phases:
//
//	plan     a gap is chosen that takes the fewest chunks, counting free extents of
//	         the shard that touch it, and its place is kept (gap.go)
//
//	         ├─live─┼──free──┤░░░░ gap ░░░░├─live─┼──free────┼live┤
//
//	gather   chunks for it, the cheapest first: those mapped nowhere; free
//	         ones of the shard, whatever the GPU does with them; free ones of other
//	         shards that the GPU has passed. If others have enough that it has not
//	         passed, the request waits for that, and begins anew. The rest is made
//	map      old places in the gap, of chunks that moved earlier, are unmapped. Then all of
//	         them are mapped in the gap and granted, in pieces. Chunks that move are
//	         mapped at two addresses from now on
//	commit   the gap is the shard's. The old places belong to no one, and are
//	         unmapped later, when the GPU has passed them (see move.go)
//
//	         ├─live─┼──free──┼── chunks ───┼─live─┤▒▒▒ old ▒▒▒┼live┤
//
// Work that was submitted for the old address runs before work that is submitted
// for the new one, since both are in the order of the shard's stream. So the GPU
// need not be awaited, and one that is behind costs no memory. Up to the commit
// nothing has changed, so a failure leaves everything as it was.

// provide makes memory for a request that nothing free serves. Afterwards take
// finds it, unless another goroutine was quicker.
func (p *Pool) provide(sh *shard, w *want, patient bool) error {
	if w.kind == small {
		return p.provideSlab(sh)
	}
	if p.stay() {
		return nil // which may be enough
	}
	if p.isLarge(w) {
		p.askDeferred() // so that old places serve it
	}
	g, err := p.plan(sh, w)
	if err != nil {
		return err
	}
	patient = patient && p.moves()
	if enough := p.gather(sh, g, !patient); !enough && patient {
		before := p.passes.Load()
		if len(p.lag(sh)) > 0 || p.passes.Load() != before {
			p.commit(sh, g, errLag)
			return errLag
		}
		p.gather(sh, g, true)
	}
	if err = p.create(g); err == nil {
		err = p.clear(g)
	}
	if err == nil {
		err = p.mapGap(g)
	}
	p.commit(sh, g, err)
	return err
}

var (
	// errAgain: what was missing is there now.
	errAgain = errors.New("again")
	// errLag: what is missing will be there when the GPU has passed it.
	errLag = errors.New("the GPU has not passed it")
)

// growth is a gap that is being filled.
type growth struct {
	growthPlan
	span *span
	// chunks are mapped nowhere: idle ones, and new ones. runs move.
	chunks []*phys.Handle
	runs   []run
	old    []run  // old places in the gap, which are to be unmapped
	have   int    // chunks so far
	made   uint64 // bytes of new ones
}

// plan chooses the gap, and keeps its place and the free extents beside it.
func (p *Pool) plan(sh *shard, w *want) (*growth, error) {
	p.mu.Lock()
	sh.mu.Lock()
	sh.rest()
	g := &growth{growthPlan: p.bestPlanLocked(sh, w)}
	if g.reg == nil {
		sh.mu.Unlock()
		p.mu.Unlock()
		return nil, p.addRegion(sh, w)
	}
	defer p.mu.Unlock()
	for _, e := range []*extent{g.left, g.right} {
		if e != nil {
			sh.unfree(e)
			e.state = held
		}
	}
	sh.mu.Unlock()
	g.span = &span{from: g.from, to: g.from + driver.Ptr(uint64(g.n)*g.reg.chunk)}
	if g.cleared {
		g.old = p.takeDeferredLocked(g.reg, g.span.from, g.span.to)
	}
	g.reg.add(g.span)
	return g, nil
}

// gather takes chunks for the gap, and reports whether there are enough. If not, it keeps
// them only if part is set, because other misses lack what this one holds.
func (p *Pool) gather(sh *shard, g *growth, part bool) (enough bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g.chunks = p.takeIdleLocked(g.n, g.reg.chunk)
	g.have = len(g.chunks)
	if p.moves() {
		sh.mu.Lock()
		if sh.arena == nil {
			p.cutLocked(sh, g, math.MaxUint64)
		}
		sh.mu.Unlock()
		if g.have < g.n {
			p.gatherPassedLocked(sh, g)
		}
	}
	if g.have < g.n && !part {
		p.releaseLocked(g)
		return false
	}
	return g.have == g.n
}

// releaseLocked gives back what was gathered. The caller holds mu.
func (p *Pool) releaseLocked(g *growth) {
	p.idle = append(p.idle, g.chunks...)
	for _, r := range g.runs {
		p.putBackLocked(r)
	}
	g.chunks, g.runs, g.have = nil, nil, 0
}

// gatherPassedLocked takes chunks of other shards that the GPU has passed. The caller holds
// mu.
func (p *Pool) gatherPassedLocked(sh *shard, g *growth) {
	p.eachOfferLocked(func(o *shard) bool {
		if o != sh {
			p.cutLocked(o, g, o.clock.Last())
		}
		return g.have < g.n
	})
}

// create makes the chunks that are lacking.
func (p *Pool) create(g *growth) error {
	for g.have < g.n {
		h, err := p.newChunk(g.reg.chunk)
		if err != nil {
			return err
		}
		g.chunks = append(g.chunks, h)
		g.have++
		g.made += g.reg.chunk
	}
	return nil
}

// clear unmaps the old places in the gap.
func (p *Pool) clear(g *growth) (err error) {
	for _, r := range g.old {
		gone, failed := g.reg.vacate(allocOp, g.reg.index(r.span.from), g.reg.index(r.span.to))
		p.gave(gone)
		err = join(failed, err)
		r.shard.letGo()
	}
	g.old = nil
	return err
}

// mapPiece is how many chunks are mapped in one go at most: other misses wait
// meanwhile for the region, and for the driver.
const mapPiece = 16

// mapGap maps all chunks in the gap, in pieces.
func (p *Pool) mapGap(g *growth) error {
	all := slices.Clone(g.chunks)
	for _, r := range g.runs {
		all = append(all, r.handles()...)
	}
	first := g.reg.index(g.span.from)
	for i := 0; i < len(all); i += mapPiece {
		if err := g.reg.mapAt(first+i, all[i:min(len(all), i+mapPiece)], *p.access.Load()); err != nil {
			if i > 0 { // what is idle or new has a count of its own, and what moves is mapped elsewhere
				_, undo := g.reg.vacate(allocOp, first, first+i)
				err = join(err, undo)
			}
			return err
		}
	}
	for _, h := range g.chunks {
		h.Release() // it is mapped
	}
	g.chunks = nil
	return nil
}

// mapAt maps chunks side by side, each with a count of its own.
func (r *region) mapAt(at int, chunks []*phys.Handle, access []driver.AccessDesc) error {
	for _, h := range chunks {
		h.Retain()
	}
	err := r.inTurn(func() error { return r.rng.MapRun(allocOp, r.off(r.at(at)), chunks, access) })
	for i, h := range chunks {
		if err == nil || r.left(at+i) != 0 {
			r.chunks[at+i].Store(&chunk{handle: h})
		}
		if err != nil {
			h.Release() // what was left has another count
		}
	}
	return err
}

// commit makes the gap the shard's, or, after an error, leaves everything as it was.
func (p *Pool) commit(sh *shard, g *growth, err error) {
	lost := false
	defer func() {
		if lost {
			_ = p.loseSpan(allocOp, g.reg, g.span, err) // which the request's error says
		}
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	var epoch uint64
	if err != nil {
		lost = p.giveUpLocked(g)
	} else {
		for _, r := range g.runs {
			if r.shard == sh { // another shard's has passed
				epoch = max(epoch, r.epoch)
			}
			p.deferUnmapLocked(r)
		}
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if err == nil {
		sh.made.Add(g.made)
		g.reg.own(sh, g.span, epoch)
	}
	for _, e := range []*extent{g.left, g.right} {
		if e != nil {
			sh.insert(e)
		}
	}
}

// giveUpLocked puts back what was gathered, and the gap's place, unless a failure left memory
// there: it reports whether the place is lost. The caller holds mu.
func (p *Pool) giveUpLocked(g *growth) (isLost bool) {
	if len(g.old) > 0 { // nothing was unmapped or mapped yet
		p.releaseLocked(g)
		g.reg.remove(g.span)
		for _, r := range g.old {
			g.reg.add(r.span)
			p.addDeferredLocked(r)
		}
		return false
	}
	lost := map[*phys.Handle]bool{}
	for i := range g.n {
		if c := g.reg.chunks[g.reg.index(g.span.from)+i].Load(); c != nil {
			lost[c.handle] = true
		}
	}
	g.chunks = slices.DeleteFunc(g.chunks, func(h *phys.Handle) bool {
		if lost[h] {
			h.Release()
		}
		return lost[h]
	})
	p.releaseLocked(g)
	if len(lost) == 0 {
		g.reg.remove(g.span)
	}
	return len(lost) > 0
}

// miss serves a request that the shard has no memory for, by the cheapest means first:
// waiting blocks that have passed; free memory of other streams that has passed; chunks,
// moved or new. Misses go on side by side. One that finds no memory goes on alone,
// so that it does not lack chunks that another miss has gathered; see escalation.
func (p *Pool) miss(sh *shard, request want) (Block, error) {
	w := &request                            // only here does it outlive the call
	if err := p.awake(allocOp); err != nil { // at once, whoever moves the bytes
		return Block{}, err
	}
	back, emptied := p.beforeMiss(w)
	defer back()
	r := escalation{p: p, sh: sh, w: w, impatient: p.wait < 0}
	r.lock()
	defer r.unlock()
	if err := sh.keep(); err != nil {
		return Block{}, err
	}
	defer sh.letGo()
	for s := p.impossible(w); s != nil; s = p.impossible(w) {
		if s.kind != errs.Budget || p.o.OnExhausted == nil || !r.ask(s) { // which may raise the limit
			return Block{}, p.refusal(sh, w, s)
		}
	}
	for {
		sh.settle()
		if b, ok, err := p.again(sh, w, r.alone); ok || err != nil {
			if emptied {
				p.emptied.Add(1)
			}
			return b, err
		}
		if p.steal(sh, w) || r.alone && p.stealSlab(sh, w) {
			continue
		}
		r.seen, r.pending = p.passes.Load(), p.sys.PendingReclaims() > 0
		emptied = false // for nothing
		err := p.provide(sh, w, !r.impatient)
		if errors.Is(err, errLag) {
			r.impatient = !r.waiting(r.catchUp)
			continue
		}
		if err == nil || errors.Is(err, errAgain) {
			continue
		}
		var s *shortage
		if !errors.As(err, &s) {
			return Block{}, err
		}
		if !r.alone {
			r.unlock()
			defer p.aside(false)()
			r.alone = true
			r.lock()
			continue
		}
		if err := r.find(s); err != nil {
			return Block{}, err
		}
	}
}

// again tries once more what Alloc tried. A request that is not small gets a slot of a slab
// only if there was no memory for it.
func (p *Pool) again(sh *shard, w *want, short bool) (b Block, ok bool, err error) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.closed {
		return Block{}, false, sh.refusalLocked("")
	}
	h := sh.takeLocked(w)
	if h == nil && w.kind == mid && short {
		h = sh.takeAboveLocked(w)
	}
	if h == nil {
		return Block{}, false, nil
	}
	return h.block(), true, nil
}

// lacks is what a request takes in chunks.
func (p *Pool) lacks(w *want) uint64 {
	if w.kind == small {
		return p.gran
	}
	return (w.size + p.chunk - 1) / p.chunk * p.chunk
}

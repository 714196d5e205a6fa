package pool

import (
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/epoch"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// shard is one stream's part of the pool: its blocks, and the memory that was
// freed on it, which it reuses at once, since the stream's order is the order
// of use. What it cannot serve is a miss, which the pool serves.
//
// # Which shard may have freed memory
//
// Every free extent and slab carries the epoch of its last free on the stream's clock
// (internal/epoch). When another stream wants the memory, or it is to be unmapped, that
// epoch must have passed.
//
// # Locks
//
// mu guards the blocks. Warm requests take no other lock and make no driver
// call. The pool's locks come before it; of two shards only one is locked at a
// time. The clock's lock comes before mu, and is held over the driver calls that record
// and query its event.
type shard struct {
	pool   *Pool
	stream *core.Stream
	arena  *arena // whose graph alone uses the memory, or nil; guarded by mu

	mu     lock.Mutex[lock.Shard]
	closed bool        // it serves no request, because the pool is closed, forgot it, or sleeps
	clock  epoch.Clock // stamps what is freed, and other shards' blocks that the stream used

	partial []*slab // with room, by class
	empty   []slabChunk
	slabs   int // in use as such

	free    tree // extents of regions
	hot     *extent
	spare   *extent
	spanned uint64 // bytes of spans

	waiting waitlist
	kept    int  // requests in progress that make memory for it, and runs cut out of it
	offers  bool // it is among Pool.offers
	// Of an arena: the epoch that ended when its capture began, and the serial of
	// that capture.
	sealed uint64
	serial uint32
	made   atomic.Uint64 // bytes of new memory
	waited atomic.Int64  // nanoseconds that its requests waited for the GPU

	live      uint64 // blocks
	requested uint64 // their bytes
	peak      uint64 // the most of requested
	watch     *watch // statistics, history and stacks; nil without them

	former []*slab     // that lost their chunks, for later ones of their classes
	sleep  *core.Sleep // while the pool sleeps
}

// newShard makes a shard. The caller holds mu.
func (p *Pool) newShard(st *core.Stream, a *arena) *shard {
	sh := &shard{pool: p, stream: st, arena: a, partial: make([]*slab, len(p.classes.sizes))}
	sh.clock.Init(st, p.sys, epoch.Owner{Locker: &sh.mu, Op: "vmm/pool",
		Lost:   func() bool { return p.lost() != driver.Success },
		Passed: func() { p.passes.Add(1) },
	}, a != nil)
	sh.free.rand = 1
	sh.watch = p.newWatch()
	sh.sleep = p.status.Sleep()
	sh.closed = sh.sleep != nil
	return sh
}

// want is a request as the pool sees it.
type want struct {
	bytes, size, align uint64
	class              int
	kind               kind
	tag                Tag
}

type kind uint8

const (
	small kind = iota // a slot of a slab
	mid               // a part of a region
	kinds
)

// takeLocked serves a request from what the shard has, or returns nil. The caller
// holds mu.
func (sh *shard) takeLocked(w *want) *header {
	var h *header
	switch w.kind {
	case small:
		s := sh.partial[w.class]
		if s == nil {
			if s = sh.another(w.class); s == nil {
				return nil
			}
		}
		h = s.pop()
	case mid:
		e := sh.hot
		if e != nil && e.size == w.size && uint64(e.ptr)&(w.align-1) == 0 {
			sh.hot = nil
			e.state = taken
		} else {
			sh.rest()
			if e = sh.fit(w.size, w.align); e == nil {
				return nil
			}
			e = sh.carve(e, w.size, w.align)
		}
		h = &e.header
	}
	sh.giveLocked(h, w)
	return h
}

// giveLocked makes a block live. The caller holds mu.
func (sh *shard) giveLocked(h *header, w *want) {
	h.gen++
	h.ask(w.bytes)
	h.tag, h.capture = w.tag, sh.serial
	sh.live++
	sh.requested += w.bytes
	sh.peak = max(sh.peak, sh.requested)
	if sh.watch != nil {
		sh.watch.allocated(h)
	}
}

// keep pins the shard while a request makes memory for it, even if its stream is
// closed meanwhile. It returns an error if the shard serves no requests.
func (sh *shard) keep() error {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.closed {
		return sh.refusalLocked(" or the stream")
	}
	sh.kept++
	return nil
}

// letGo ends what keep began.
func (sh *shard) letGo() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.kept--
}

// refusalLocked is the error of a shard that serves no requests. The caller holds mu.
func (sh *shard) refusalLocked(or string) error {
	if sh.sleep != nil {
		return sh.sleep.Error(allocOp)
	}
	return errs.ClosedError(allocOp, sh.pool.object.Title()+or)
}

// another makes a slab of an empty chunk, or of that of a slab without blocks, or returns
// nil.
func (sh *shard) another(class int) *slab {
	if len(sh.empty) == 0 {
		idle := sh.idleSlab()
		if idle == nil {
			return nil
		}
		sh.giveUp(idle)
	}
	last := len(sh.empty) - 1
	s := sh.slab(sh.empty[last], class)
	sh.empty = sh.empty[:last]
	sh.list(s)
	return s
}

// retireLocked makes a block stale, which other streams used up to those points. The
// caller holds mu.
func (sh *shard) retireLocked(h *header, used []epoch.Point) {
	sh.clock.Touch()
	h.gen++
	sh.live--
	sh.requested -= h.asked()
	if sh.watch != nil {
		sh.watch.freed(h, used)
	}
}

// putLocked makes a block free that was retired in an epoch. The caller holds mu.
func (sh *shard) putLocked(h *header, epoch uint64) {
	if h.home.slab != nil {
		h.home.slab.put(h, epoch)
		return
	}
	e := h.home.ext
	e.epoch = epoch
	sh.rest()
	e.state = resting
	sh.hot = e
	sh.offerLocked() // once it rests no more it may be a chunk with what is beside it
}

// pruneLocked forgets shards that have nothing left and whose stream is gone or whose arena is
// retired, unless it did so when there were half as many. The caller
// holds mu.
func (p *Pool) pruneLocked() {
	const few = 16
	if len(p.shards) > few && len(p.shards) < p.pruneAt {
		return
	}
	kept := p.shards[:0:0]
	for _, sh := range p.shards {
		sh.mu.Lock()
		sh.rest()
		sh.giveUpAll()
		own := !sh.stream.Gone() && sh.stream.Locals.Get(p.local) == sh
		if own || sh.arena != nil || sh.live > 0 || sh.spanned > 0 || sh.slabs > 0 || len(sh.empty) > 0 || sh.waiting.n > 0 || sh.kept > 0 {
			kept = append(kept, sh)
		} else {
			sh.closed = true
			p.withdrawLocked(sh)
			if w := sh.watch; w != nil {
				p.retired.add(w.totals)
				p.retiredTags = addTags(p.retiredTags, w.tags)
			}
		}
		sh.mu.Unlock()
	}
	p.shards = kept
	p.pruneAt = 2 * len(kept)
}

package pool

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Arena is memory that several captures share. By naming it in CaptureOptions the caller
// asserts that their graphs never run at the same time: memory that one capture freed or
// left free serves the next. The memory returns to the pool when the arena is closed and
// the last of the graphs is gone.
type Arena struct {
	pool   *Pool
	a      *arena // nil once it is closed; guarded by the pool's lock
	ending *life.Ending
}

// arena is the memory of captures. All fields are guarded by the pool's lock.
//
// The memory in it belongs to shards of the arena's own, one for each stream that
// took part. While one of its captures runs, a stream reuses what it freed in
// that capture at once, since the graph keeps the stream's order; what another
// stream freed in it is out of use until the capture has ended, since the graph
// orders nothing else. What is freed outside of the capture that it was
// allocated in, is free when its stream has passed.
//
//	none ──capture──► running ⇄ idle ──last graph gone, and the Arena closed──► retired
//
// Once it is retired, its shards belong to the pool like those of closed streams: other
// shards can take what is free in them, and live blocks are freed as usual.
type arena struct {
	pool    *Pool
	shards  []*shard
	holds   int // captures and graphs, and the user's Arena
	running *Capture
	serial  uint32
	ending  life.Ending
}

// NewArena returns an arena for captures whose graphs never run at the same time. It keeps
// its memory until the caller closes it.
func (p *Pool) NewArena() (*Arena, error) {
	if err := p.lockOpen("pool.NewArena"); err != nil {
		return nil, err
	}
	defer p.mu.Unlock()
	a := p.newArena()
	return &Arena{p, a, &a.ending}, nil
}

func (p *Pool) newArena() *arena {
	p.arenas++
	return &arena{pool: p, holds: 1}
}

// Close returns the arena's memory to the pool once the last graph that was captured in
// it is gone. No further capture can use the arena. Close is idempotent.
func (a *Arena) Close() error {
	if err := a.made("pool.Arena.Close"); err != nil {
		return err
	}
	p := a.pool
	p.mu.Lock()
	in := a.a
	a.a = nil
	p.mu.Unlock()
	if in != nil {
		in.release()
		p.verify()
	}
	return nil
}

// Released returns the end of the arena's closing: it is closed, the last graph that was
// captured in it is gone, and its memory is the pool's again. It can be obtained at any
// time.
func (a *Arena) Released() cuda.Completion {
	return errs.Must(a, a.made("pool.Arena.Released")).ending.Completion()
}

// made refuses an arena that NewArena did not make.
func (a *Arena) made(op string) error {
	if a == nil || a.pool == nil {
		return errs.Invalid(op, "a nil or zero arena", "make it with Pool.NewArena")
	}
	return nil
}

// release lets go of the arena; the last one retires it.
func (a *arena) release() {
	p := a.pool
	p.mu.Lock()
	if a.holds--; a.holds != 0 {
		p.mu.Unlock()
		return
	}
	p.arenas--
	shards := a.shards
	a.shards = nil
	for _, sh := range shards {
		// Every graph has passed, and what was freed outside of them waits in
		// the shard's list.
		sh.mu.Lock()
		sh.arena, sh.serial = nil, 0
		sh.pass(sh.epoch)
		sh.epoch++
		sh.offer()
		sh.mu.Unlock()
	}
	p.prune()
	p.mu.Unlock()
	a.ending.End(nil)
}

// shard is the arena's shard of a stream. The caller holds the pool's lock.
func (a *arena) shard(st *core.Stream) *shard {
	for _, sh := range a.shards {
		if sh.stream == st {
			return sh
		}
	}
	sh := a.pool.newShard(st, a)
	sh.serial = a.serial
	a.shards = append(a.shards, sh)
	a.pool.shards = append(a.pool.shards, sh)
	return sh
}

// begin makes a capture the running one, and seals what is free: all of the
// arena's streams may have it. The caller holds the pool's lock.
func (a *arena) begin(op string, c *Capture) error {
	if a.running != nil {
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
			Asked: fmt.Sprintf("an arena whose capture %d still runs", a.running.id),
			Hint:  "captures that run at the same time need an arena each"})
	}
	a.serial++
	a.running = c
	a.holds++
	for _, sh := range a.shards {
		sh.mu.Lock()
		sh.sealed = sh.epoch
		sh.epoch++
		sh.serial = a.serial
		sh.mu.Unlock()
	}
	return nil
}

// prune forgets shards that have nothing left and whose stream is gone or whose arena is
// retired, unless it did so when there were half as many. The caller
// holds mu.
func (p *Pool) prune() {
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
			p.withdraw(sh)
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

func (t *totals) add(o totals) {
	t.allocs += o.allocs
	t.frees += o.frees
	t.bytes += o.bytes
}

// freeCaptured frees a block of an arena. In the capture that it was allocated in, its
// stream has it back at once; what other streams of the capture use waits for the end.
// Outside of the capture it waits for its own stream, too, since the next capture is not
// ordered behind that.
func (p *Pool) freeCaptured(b Block, used ...point) error {
	err := p.freeOfArena(b, used)
	p.verify()
	return err
}

func (p *Pool) freeOfArena(b Block, used []point) error {
	h, sh := b.h, b.h.home.shard
	if e := h.home.ext; e != nil && e.node != nil {
		if err := sh.retireOnce(b, used); err != nil {
			return err
		}
		return e.node.free(h, len(used) > 0)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var c *Capture
	sh.mu.Lock()
	if a := sh.arena; a != nil && a.running != nil && a.serial == h.capture {
		c = a.running
	}
	sh.mu.Unlock()
	until := used
	if c == nil && !sh.stream.Gone() {
		own := p.attach(sh.stream)
		own.mu.Lock()
		until = append(until, point{own, own.epoch})
		own.touched = own.epoch
		own.mu.Unlock()
	}
	// Stale and waiting, or free, in one step: a Check meets nothing in between.
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if h.gen != b.gen {
		return p.stale(b)
	}
	sh.retire(h, used)
	if len(until) == 0 {
		sh.put(h, sh.epoch)
	} else {
		sh.keepWaiting(waiting{h: h, epoch: sh.epoch, until: until, capture: c})
	}
	return nil
}

// retireOnce is retire, unless the block is stale.
func (sh *shard) retireOnce(b Block, used []point) error {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if b.h.gen != b.gen {
		return sh.pool.stale(b)
	}
	sh.retire(b.h, used)
	return nil
}

// node is an allocation that is part of a graph: the driver gives it memory of
// its own each time the graph runs, at the same address.
type node struct {
	capture *Capture
	stream  *core.Stream
	at      int // in Capture.nodes; -1 once it is to be freed
}

// allocNode makes an allocation node behind the stream's captured work.
func (c *Capture) allocNode(st *core.Stream, sh *shard, w *want) (Block, error) {
	size := max(w.bytes, 1)
	if w.align > nodeAlign {
		return Block{}, errs.Invalid(allocOp, "an alignment above 512 for a node of a graph", "the driver aligns nodes by itself: leave Request.Align at 0")
	}
	c.calls.RLock()
	defer c.calls.RUnlock()
	if c.over.Load() {
		return Block{}, c.overError(w)
	}
	ptr, r := st.AllocNode(size)
	if r != driver.Success {
		return Block{}, st.Ctx.CallError(allocOp, driver.CallMemAllocAsync, r, errs.Bytes(size)+" as a node of a graph")
	}
	if status, id, r := st.Capture(); r != driver.Success || id != c.id {
		// If the capture ended before the call, without End, this is memory of the
		// driver's pool. If it ended after the call there is nothing to free.
		if r != driver.Success || status == driver.CaptureNone {
			_ = st.FreeNode(ptr)
		}
		return Block{}, c.overError(w)
	}
	e := makeExtent(sh)
	e.ptr, e.size, e.state, e.node = ptr, size, taken, &node{capture: c, stream: st}
	p := c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	p.nodes[ptr] = e
	sh.mu.Lock()
	defer sh.mu.Unlock()
	c.mu.Lock()
	e.node.at = len(c.nodes)
	c.nodes = append(c.nodes, e)
	c.mu.Unlock()
	sh.give(&e.header, w)
	return e.block(), nil
}

// nodeAlign is what the driver aligns nodes to, at least.
const nodeAlign = 512

// free makes a free node behind the captured work of the block's stream. If other
// streams use it too, in captured work that is not ordered with that, the end of
// the capture frees it.
func (n *node) free(h *header, others bool) error {
	c := n.capture
	c.calls.RLock()
	defer c.calls.RUnlock()
	c.mu.Lock()
	at := n.at
	if at >= 0 && !others {
		last := len(c.nodes) - 1
		c.nodes[at] = c.nodes[last]
		c.nodes[at].node.at = at
		c.nodes[last] = nil
		c.nodes = c.nodes[:last]
		n.at = -1
	}
	c.mu.Unlock()
	if at < 0 || others {
		return nil // what takes it from the list drops it
	}
	return n.drop(h, n.stream)
}

func (n *node) drop(h *header, st *core.Stream) error {
	p := n.capture.pool
	p.mu.Lock()
	delete(p.nodes, h.at())
	p.mu.Unlock()
	if err := st.Use(freeOp, p.sys); err != nil {
		return err
	}
	defer st.Release()
	if r := st.FreeNode(h.at()); r != driver.Success {
		return st.Ctx.CallError(freeOp, driver.CallMemFreeAsync, r, "a node of a graph")
	}
	return nil
}

// freeNodes frees the nodes that the capture left, behind the captured work of
// its first stream, which all others have joined by now.
func (c *Capture) freeNodes() error {
	c.mu.Lock()
	left := c.nodes
	c.nodes = nil
	for _, e := range left {
		e.node.at = -1
	}
	c.mu.Unlock()
	var errs []error
	for _, e := range left {
		sh := e.home.shard
		sh.mu.Lock()
		if e.live() {
			sh.retire(&e.header, nil)
		}
		sh.mu.Unlock()
		errs = append(errs, e.node.drop(&e.header, c.origin))
	}
	return errors.Join(errs...)
}

// findNode is the live block of a node that begins at an address.
func (p *Pool) findNode(at driver.Ptr) (Block, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.nodes[at]
	if e == nil {
		return Block{}, false
	}
	e.home.shard.mu.Lock()
	defer e.home.shard.mu.Unlock()
	return e.block(), e.live()
}

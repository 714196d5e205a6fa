package pool

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

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
	sh.giveLocked(&e.header, w)
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
			sh.retireLocked(&e.header, nil)
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

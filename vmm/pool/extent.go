package pool

import (
	"github.com/cuvmm/cuvmm/internal/driver"
)

// extent is a piece of mapped address space of one shard: a block, or free. It
// is guarded by the shard's lock. Neighbors by address are linked if nothing lies
// between them: what is unmapped, or another shard's, is behind a wall.
//
//	free ──Alloc──► taken ──► free          coalesced with its free neighbors
//	                  └─────► resting ──► taken   the last one that was freed, unmerged,
//	                             └──────► free    for the next request of its size
//	free ──growth──► held ──► free          while its gap is being filled
//	free ──stitch, steal, trim──► spare     the part that covers whole chunks goes
type extent struct {
	header
	own        home
	ptr        driver.Ptr
	size       uint64
	asked      uint64
	reg        *region
	prev, next *extent // by address
	left       *extent // in the tree of free ones, or the next spare
	right      *extent
	prio       uint32
	state      extentState
	// epoch of the latest free in it; see shard.
	epoch uint64
	node  *node // of a graph
}

type extentState uint8

const (
	spare extentState = iota
	free
	resting
	held
	taken
	wall
)

func (s extentState) String() string {
	return [...]string{"spare", "free", "resting", "held", "taken", "wall"}[s]
}

func (e *extent) end() driver.Ptr { return e.ptr + driver.Ptr(e.size) }

// newExtent takes a spare one, whose generation goes on.
func (sh *shard) newExtent(reg *region, ptr driver.Ptr, size uint64) *extent {
	e := sh.spare
	if e != nil {
		sh.spare = e.left
		e.left = nil
	} else {
		e = makeExtent(sh)
	}
	e.reg, e.ptr, e.size = reg, ptr, size
	return e
}

func makeExtent(sh *shard) *extent {
	e := new(extent)
	e.own = home{shard: sh, ext: e}
	e.home = &e.own
	return e
}

func (sh *shard) drop(e *extent) {
	e.state, e.prev, e.next, e.right, e.reg = spare, nil, nil, nil, nil
	e.left = sh.spare
	sh.spare = e
}

func link(a, b *extent) { a.next, b.prev = b, a }

// insert makes an extent free, and coalesces it with its free neighbors.
func (sh *shard) insert(e *extent) {
	if p := e.prev; p.state == free {
		sh.unfree(p)
		e.ptr, e.size, e.epoch = p.ptr, e.size+p.size, max(e.epoch, p.epoch)
		link(p.prev, e)
		sh.drop(p)
	}
	if n := e.next; n.state == free {
		sh.unfree(n)
		e.size, e.epoch = e.size+n.size, max(e.epoch, n.epoch)
		link(e, n.next)
		sh.drop(n)
	}
	e.state = free
	if e.size >= sh.pool.smallMax {
		sh.free.insert(e)
		if e.size >= sh.pool.chunk {
			sh.offerLocked()
		}
	}
}

// unfree removes an extent from the tree. An extent that is too small for any request
// is not in it until it is coalesced.
func (sh *shard) unfree(e *extent) {
	if e.size >= sh.pool.smallMax {
		sh.free.remove(e)
	}
}

// rest ends the rest of the extent that was freed last.
func (sh *shard) rest() {
	if e := sh.hot; e != nil {
		sh.hot = nil
		sh.insert(e)
	}
}

// fitTries are how many free extents a request looks at.
const fitTries = 4

// fit is the free extent that serves a request: of the first few that hold it,
// and that are at most half as large again as the smallest, the one with the
// lowest address. What lies behind comes free in one piece more often than by
// the best fit alone.
func (sh *shard) fit(size, align uint64) (best *extent) {
	e, most := sh.free.atLeast(size), uint64(0)
	for tries := 0; e != nil && tries < fitTries && (best == nil || e.size <= most); tries++ {
		if e.padded(size, align) <= e.size && (best == nil || e.ptr < best.ptr) {
			if best == nil {
				most = e.size + e.size/2
			}
			best = e
		}
		e = sh.free.after(e)
	}
	if best == nil && e != nil {
		best = sh.free.atLeast(size + align)
	}
	for ; best == nil && e != nil; e = sh.free.after(e) { // rather than growing
		if e.padded(size, align) <= e.size {
			best = e
		}
	}
	return best
}

// padded is what a request takes of the front of the extent.
func (e *extent) padded(size, align uint64) uint64 {
	return (uint64(e.ptr)+align-1)&^(align-1) - uint64(e.ptr) + size
}

// farApart is how many times a free extent is as long as a request that lies at its back.
const farApart = 4

// position is the address of a request in a free extent: its front. A request of about a
// chunk or more lies at the back of a much longer extent, which can then still grow
// downward: what is cut out of large extents, and what needs a whole one, come from
// different ends.
func (sh *shard) position(e *extent, size, align uint64) driver.Ptr {
	if size >= sh.pool.chunk/4*3 && size*farApart <= e.size {
		return (e.end() - driver.Ptr(size)) &^ driver.Ptr(align-1)
	}
	return (e.ptr + driver.Ptr(align-1)) &^ driver.Ptr(align-1)
}

// carve takes a request out of a free extent.
func (sh *shard) carve(e *extent, size, align uint64) *extent {
	sh.unfree(e)
	if before := uint64(sh.position(e, size, align) - e.ptr); before > 0 {
		front := sh.split(e, before)
		sh.remain(front)
	}
	if e.size > size {
		block := sh.split(e, size)
		sh.remain(e)
		e = block
	}
	e.state = taken
	c := e.reg.chunks[e.reg.index(e.ptr)].Load()
	c.starts[e.reg.page(e.ptr)] = e
	return e
}

// split cuts the front off an extent that is in no tree, and returns it.
func (sh *shard) split(e *extent, size uint64) *extent {
	front := sh.newExtent(e.reg, e.ptr, size)
	front.epoch = e.epoch
	link(e.prev, front)
	link(front, e)
	e.ptr += driver.Ptr(size)
	e.size -= size
	return front
}

// tree holds free extents by size, and among equals by address: a treap whose
// links lie in the extents, so that nothing is allocated.
type tree struct {
	root *extent
	n    int
	rand uint32
}

func less(a, b *extent) bool {
	if a.size != b.size {
		return a.size < b.size
	}
	return a.ptr < b.ptr
}

func (t *tree) insert(e *extent) {
	t.rand = t.rand*1664525 + 1013904223
	e.prio = t.rand
	at := &t.root
	for x := *at; x != nil && x.prio >= e.prio; x = *at {
		if less(e, x) {
			at = &x.left
		} else {
			at = &x.right
		}
	}
	// What was below is split into what is less and what is greater.
	rest, l, r := *at, &e.left, &e.right
	*at = e
	for rest != nil {
		if less(rest, e) {
			*l, l, rest = rest, &rest.right, rest.right
		} else {
			*r, r, rest = rest, &rest.left, rest.left
		}
	}
	*l, *r = nil, nil
	t.n++
}

func (t *tree) remove(e *extent) {
	at := &t.root
	for *at != e {
		if less(e, *at) {
			at = &(*at).left
		} else {
			at = &(*at).right
		}
	}
	l, r := e.left, e.right
	for l != nil && r != nil {
		if l.prio > r.prio {
			*at, at, l = l, &l.right, l.right
		} else {
			*at, at, r = r, &r.left, r.left
		}
	}
	if l == nil {
		l = r
	}
	*at = l
	e.left, e.right = nil, nil
	t.n--
}

// atLeast is the smallest extent of so many bytes, the lowest of those.
func (t *tree) atLeast(size uint64) (best *extent) {
	for x := t.root; x != nil; {
		if x.size >= size {
			best, x = x, x.left
		} else {
			x = x.right
		}
	}
	return best
}

// after is the extent that follows e.
func (t *tree) after(e *extent) (next *extent) {
	for x := t.root; x != nil; {
		if less(e, x) {
			next, x = x, x.left
		} else {
			x = x.right
		}
	}
	return next
}

package pool

import (
	"runtime"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// partsAtOnce is how many parts a snapshot reads under one hold of a shard's lock,
// which takes tens of microseconds, and a few hundred with stacks.
const partsAtOnce = 1024

// segmentReader reads the segments of a pool in steps that hold locks briefly.
type segmentReader struct {
	pool     *Pool
	segments []Segment
	stacks   stackNames
	// parts has what the running step has read, and sites the stacks of some of it. Their memory is there before a lock is taken.
	parts []Part
	sites []sited
}

// sited is a part of the running step whose stack has yet to be named.
type sited struct {
	part int
	site site
}

func newSegmentReader(p *Pool) *segmentReader {
	return &segmentReader{pool: p, stacks: stackNames{}, parts: make([]Part, 0, partsAtOnce)}
}

// step ends a step, with no lock held. It first lets a request that waits for the lock
// have the processor, and then names the stacks of the parts and moves the parts to the
// last segment: that takes longer than reading them, so most of the time the lock is free.
func (r *segmentReader) step() {
	runtime.Gosched()
	for _, s := range r.sites {
		r.parts[s.part].Stack = r.stacks.of(s.site)
	}
	if len(r.parts) > 0 {
		to, parts := &r.segments[len(r.segments)-1], r.parts
		if parts[0].State == Hole { // which may go on from the last step
			to.hole(driver.Ptr(parts[0].Ptr), uint64(parts[0].Bytes))
			parts = parts[1:]
		}
		to.Parts = append(to.Parts, parts...)
	}
	r.parts, r.sites = r.parts[:0], r.sites[:0]
}

// stackNames has the text of each stack once.
type stackNames map[site][]string

func (n stackNames) of(s site) []string {
	text, known := n[s]
	if !known {
		text = s.lines()
		n[s] = text
	}
	return text
}

// slabs reads the chunks of a region that hold slabs.
func (r *segmentReader) slabs(reg *region) {
	for i := range reg.chunks {
		if c := reg.chunks[i].Load(); c != nil {
			r.slab(reg, i, c)
		}
	}
}

// slab reads a chunk, which belongs to a shard for as long as the shard's lock is
// held. If it goes to another shard or to another size of blocks between two steps,
// the rest of it is shown as free.
func (r *segmentReader) slab(reg *region, i int, c *chunk) {
	var of *slab
	var owner *shard
	at, end := reg.at(i), reg.at(i)+driver.Ptr(reg.chunk)
	for next, more := 0, true; more; {
		sh := c.shard.Load()
		if sh == nil {
			break // being moved, or lost
		}
		sh.mu.Lock()
		sl := c.slab.Load()
		if reg.chunks[i].Load() != c || c.shard.Load() != sh || owner != nil && (owner != sh || of != sl) {
			sh.mu.Unlock()
			break
		}
		if owner == nil {
			owner, of = sh, sl
			s := sh.segment(SlabSegment, at, reg.chunk, reg.chunk)
			if sl != nil {
				s.Slot = int(sl.slot)
			}
			r.segments = append(r.segments, s)
		}
		more = false
		if sl != nil {
			to := min(next+partsAtOnce, sl.fresh)
			for ; next < to; next++ {
				r.add(&sl.slots[next], at, sl.slot)
				at += driver.Ptr(sl.slot)
			}
			more = next < sl.fresh
		}
		sh.mu.Unlock()
		r.step()
	}
	if owner != nil {
		r.segments[len(r.segments)-1].hole(at, uint64(end-at))
	}
}

// spans reads the spans of a region that have an owner.
func (r *segmentReader) spans(reg *region) {
	at := reg.base // where the next step begins
	var of *span   // the span of the last step,
	var e *extent  // and its next extent, if it goes on
	for {
		r.pool.mu.Lock()
		i := reg.find(at)
		if i == len(reg.spans) {
			r.pool.mu.Unlock()
			return
		}
		sp := reg.spans[i]
		sh := sp.shard
		if sh == nil { // being moved
			at = sp.to
			r.pool.mu.Unlock()
			continue
		}
		sh.mu.Lock() // which keeps the span as it is
		r.pool.mu.Unlock()
		at = max(at, sp.from)
		if of != sp || at == sp.from || len(r.segments) == 0 {
			r.segments = append(r.segments, sh.segment(RegionSegment, at, 0, reg.chunk))
		}
		if e == nil || of != sp || e.own.shard != sh || !e.begins(reg, at) {
			e = reg.extentAt(sp, at)
		}
		from := at
		s := &r.segments[len(r.segments)-1]
		for n := 0; e != sp.tail && n < partsAtOnce; n++ {
			r.add(&e.header, at, uint64(e.end()-at)) // an extent that grew meanwhile counts from here
			at = e.end()
			e = e.next
		}
		s.Bytes += int(at - from)
		if of = sp; e == sp.tail {
			of, e = nil, nil
		}
		sh.mu.Unlock()
		r.step()
	}
}

// begins reports whether the extent is in the region and begins at an address. The
// caller holds its shard's lock.
func (e *extent) begins(reg *region, at driver.Ptr) bool {
	return e.reg == reg && e.ptr == at && e.prev != nil
}

// extentAt is the extent of a span that ends behind an address. The chunks' tables
// name blocks that begin before it, so the search does not begin at the span's head.
// The caller holds the shard's lock.
func (reg *region) extentAt(sp *span, at driver.Ptr) *extent {
	e := sp.head.next
	if at > sp.from {
		e = reg.namedBefore(sp, at)
	}
	for e != sp.tail && e.end() <= at {
		e = e.next
	}
	return e
}

// namedBefore is an extent of a span that begins at an address or before it, close
// to it if the chunks' tables name one there.
func (reg *region) namedBefore(sp *span, at driver.Ptr) *extent {
	for i := reg.index(at); i >= reg.index(sp.from); i-- {
		starts := reg.chunks[i].Load().starts
		for page := len(starts) - 1; page >= 0; page-- {
			// The table may still name an extent that is not live any more.
			e := starts[page]
			if e != nil && e.reg == reg && e.prev != nil && e.ptr <= at && e.ptr >= sp.from && e.ptr >= reg.at(i) {
				return e
			}
		}
	}
	return sp.head.next
}

// add adds what lies at an address to the running step: a block, or a hole. The caller
// holds the lock of the block's shard.
func (r *segmentReader) add(h *header, at driver.Ptr, size uint64) {
	state := LiveBlock
	switch {
	case h.waiting:
		state = WaitingBlock
	case !h.live():
		r.parts = addHole(r.parts, at, size)
		return
	}
	if w := h.home.shard.watch; w != nil {
		if site, known := w.sites[h]; known {
			r.sites = append(r.sites, sited{len(r.parts), site})
		}
	}
	r.parts = append(r.parts, Part{Ptr: cuda.Ptr(at), Bytes: int(size), State: state, Requested: int(h.asked()), Tag: h.tag})
}

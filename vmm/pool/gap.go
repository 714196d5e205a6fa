package pool

import (
	"math/bits"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// A gap is address space between two spans of a region, or at its end. A request is
// served by what fills it together with the free extents of its shard that touch it:
//
//	behind the span before it         ├─live─┼──free──┼── chunks ──┤░░░░░░├─live─┤
//	in front of the span behind it    ├─live─┤░░░░░░├── chunks ──┼──free──┼─live─┤
//	between the two                   ├─live─┼──free──┼── chunks ──┼─free─┼─live─┤
//	in the middle, so that both
//	sides have room to grow           ├─live─┤░░░░░░├── chunks ──┤░░░░░░░░├─live─┤
//
// The cheapest place is taken, which is the one that maps the fewest chunks, and of equals
// the one in the widest gap. Two rules save chunks later:
//
//   - A large request goes to the middle of a gap unless a free extent saves a good part
//     of it. When its block is freed, the next one of about that size grows in place.
//     Blocks that are packed close in each other, and all chunks of a slightly larger one
//     have to move.
//   - A free extent also grows over old places beside it, at which chunks are still mapped
//     that have moved, once the GPU has passed them. They are unmapped first, which costs
//     half as much as mapping.

const (
	// largeChunks is how many chunks a large request takes at least.
	largeChunks = 4
	// joinPart is the part of a large request that a free extent must save for the
	// request to be placed beside it.
	joinPart = 8
	// spread is how many times the device's memory a region is long: streams, and
	// large blocks, grow at their own places in it, far from each other.
	spread = 8
)

// growthPlan is where a request is to be served: a gap of a region that is filled
// with n chunks, between free extents of the shard that belong to it.
type growthPlan struct {
	reg         *region
	from        driver.Ptr
	n           int
	left, right *extent
	gap         uint64 // bytes
	cost        int    // in chunks that are mapped
	cleared     bool   // old places are unmapped for it
}

// better prefers what costs less, and among equals the wider gap, in which the
// next growth finds room too.
func (t growthPlan) better(than growthPlan) bool {
	if than.reg == nil || t.cost != than.cost {
		return than.reg == nil || t.cost < than.cost
	}
	return t.gap > than.gap
}

// isLarge reports whether a request is large.
func (p *Pool) isLarge(w *want) bool { return w.size >= largeChunks*p.chunk }

// bestPlanLocked finds the place that costs the least. The caller holds mu and the shard's
// lock, and the shard rests.
func (p *Pool) bestPlanLocked(sh *shard, w *want) (best growthPlan) {
	f := filler{sh: sh, w: w, large: p.isLarge(w)}
	for _, r := range p.regions[mid] {
		f.gap = gap{reg: r, from: r.base}
		for i := 0; i <= len(r.spans); i++ {
			f.to, f.after = r.end(), nil
			if i < len(r.spans) {
				f.to, f.after = r.spans[i].from, r.spans[i]
			}
			f.back, f.reach = f.from, f.to
			switch {
			case f.mine(f.before):
				f.reach = r.reach(i)
			case f.mine(f.after):
				f.back = r.back(i)
			}
			// A gap that touches nothing of the shard's only serves in its middle.
			if f.mine(f.before) || f.mine(f.after) || best.reg == nil || f.large || uint64(f.to-f.from) > best.gap {
				if t := f.fill(); t.reg != nil && t.better(best) {
					best = t
				}
			}
			if f.after != nil {
				f.from, f.before = f.after.to, f.after
			}
		}
	}
	return best
}

// reach is the end of the address space behind the i-th gap's beginning that is empty, or
// that can be emptied.
func (r *region) reach(i int) driver.Ptr {
	for ; i < len(r.spans); i++ {
		if !r.spans[i].clearable() {
			return r.spans[i].from
		}
	}
	return r.end()
}

// back is the same in front of the gap's end.
func (r *region) back(i int) driver.Ptr {
	for ; i > 0; i-- {
		if !r.spans[i-1].clearable() {
			return r.spans[i-1].to
		}
	}
	return r.base
}

// clearable reports whether the span is an old place that the GPU has passed.
func (s *span) clearable() bool { return s.freedBy != nil && s.freedBy.clock.Passed(s.epoch) }

// gap is address space between two spans.
type gap struct {
	reg           *region
	from, to      driver.Ptr
	back, reach   driver.Ptr // how far old places can be unmapped
	before, after *span
}

// filler looks for the best way to serve a request from one gap.
type filler struct {
	gap
	sh    *shard
	w     *want
	large bool
	best  growthPlan
}

func (f *filler) mine(s *span) bool { return s != nil && s.shard == f.sh }

// chunks is how many chunks hold so many bytes.
func (f *filler) chunks(bytes uint64) uint64 { return (bytes + f.reg.chunk - 1) / f.reg.chunk }

// try considers n chunks at an address.
func (f *filler) try(at driver.Ptr, n uint64, left, right *extent) {
	end := at + driver.Ptr(n*f.reg.chunk)
	if n == 0 || n > uint64(f.reach-f.back)/f.reg.chunk || at < f.back || end > f.reach {
		return
	}
	t := growthPlan{reg: f.reg, from: at, n: int(n), left: left, right: right, gap: uint64(f.to - f.from), cost: int(n)}
	if all := f.chunks(f.w.size); f.large && (left != nil || right != nil || at == f.from && f.mine(f.before)) && (all-min(all, n))*joinPart < all {
		t.cost = int(all) + 1 // rather in the middle
	}
	if outside := uint64(max(f.from, at)-at) + uint64(end-min(f.to, end)); outside > 0 {
		t.cleared = true
		t.cost += int(f.reg.cleared(at, end)+1) / 2
	}
	if t.better(f.best) {
		f.best = t
	}
}

// cleared is how many chunks are still mapped at old places in a range.
func (r *region) cleared(from, to driver.Ptr) (n uint64) {
	for i := r.find(from); i < len(r.spans) && r.spans[i].from < to; i++ {
		n += uint64(min(to, r.spans[i].to)-max(from, r.spans[i].from)) / r.chunk
	}
	return n
}

// fill is how the gap serves the request best; without a region: not at all.
func (f *filler) fill() growthPlan {
	f.best = growthPlan{}
	var left, right *extent
	if f.mine(f.before) && f.before.tail.prev.state == free {
		left = f.before.tail.prev
	}
	if f.mine(f.after) && f.after.head.next.state == free {
		right = f.after.head.next
	}
	if f.mine(f.before) {
		f.behind(left, right)
	}
	if right != nil && f.w.align <= lowBit(uint64(right.ptr)|f.reg.chunk) {
		if n := f.chunks(f.w.size - min(f.w.size, right.size)); left == nil || n*f.reg.chunk < uint64(f.to-f.from) {
			f.try(f.to-driver.Ptr(min(n*f.reg.chunk, f.reg.off(f.to))), n, nil, right)
		}
	}
	if f.large || f.best.reg == nil && left == nil && !f.mine(f.before) {
		f.middle()
	}
	return f.best
}

// behind tries what begins in the free extent before the gap, or at the gap.
func (f *filler) behind(left, right *extent) {
	begin := f.from
	if left != nil {
		begin = left.ptr
	}
	end := driver.Ptr((uint64(begin)+f.w.align-1)&^(f.w.align-1)) + driver.Ptr(f.w.size)
	switch {
	case end <= f.from: // it is aligned badly, or the free extent would have served
	case end <= f.reach:
		n := f.chunks(uint64(end - f.from))
		if f.from+driver.Ptr(n*f.reg.chunk) != f.to {
			right = nil
		}
		f.try(f.from, n, left, right)
	case right != nil && end <= right.end():
		f.try(f.from, uint64(f.to-f.from)/f.reg.chunk, left, right)
	}
}

// middle tries the middle of the gap, so that both sides have room to grow.
func (f *filler) middle() {
	n, wide := f.chunks(f.w.size+alignRoom(f.reg, f.w)), uint64(f.to-f.from)
	if n*f.reg.chunk > wide {
		return
	}
	at := f.from
	if f.before != nil || f.after != nil {
		at = f.reg.down(f.from + driver.Ptr((wide-n*f.reg.chunk)/2))
	}
	f.try(at, n, nil, nil)
}

func lowBit(n uint64) uint64 { return n & -n }

// alignRoom is what must be added to a request so that it fits anywhere at the
// beginning of a chunk.
func alignRoom(r *region, w *want) uint64 {
	if w.align <= lowBit(r.chunk) {
		return 0
	}
	return w.align
}

// addRegion reserves another region, wide enough for the request.
func (p *Pool) addRegion(sh *shard, w *want) error {
	total := spread * ((p.addressed() + p.chunk - 1) / p.chunk * p.chunk)
	least := (w.size + w.align + 2*p.chunk - 1) / p.chunk * p.chunk
	p.addresses.Lock()
	defer p.addresses.Unlock()
	if p.hasGap(sh, w) {
		return errAgain // of a region that another miss reserved
	}
	if _, err := p.reserve(mid, total, least, p.chunk, uint64(1)<<(bits.Len64(p.smallMax)-1)); err != nil {
		return err
	}
	return errAgain
}

// hasGap reports whether there is a gap for the request.
func (p *Pool) hasGap(sh *shard, w *want) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.rest()
	return p.bestPlanLocked(sh, w).reg != nil
}

package pool

import "github.com/cuvmm/cuvmm/internal/driver"

// target is where a request is to be served: a gap of a region that is filled
// with n chunks, between free extents of the shard that belong to it.
type target struct {
	reg         *region
	from        driver.Ptr
	n           int
	left, right *extent
	gap         uint64
}

// target finds the gap that takes the fewest chunks. The caller holds mu and
// the shard's lock, and the shard rests.
func (p *Pool) target(sh *shard, w *want) (best target) {
	for _, r := range p.regions[mid] {
		for i := 0; i <= len(r.spans); i++ {
			from, to := r.base, r.end()
			var before, after *span
			if i > 0 {
				before = r.spans[i-1]
				from = before.to
			}
			if i < len(r.spans) {
				after = r.spans[i]
				to = after.from
			}
			if from < to {
				if t, ok := r.fill(sh, w, from, to, before, after); ok && t.better(best) {
					best = t
				}
			}
		}
	}
	return best
}

// better prefers fewer chunks, and among equals the wider gap, in which the
// next growth finds room too.
func (t target) better(than target) bool {
	if than.reg == nil || t.n != than.n {
		return than.reg == nil || t.n < than.n
	}
	return t.gap > than.gap
}

// fill is how a gap would serve a request.
func (r *region) fill(sh *shard, w *want, from, to driver.Ptr, before, after *span) (target, bool) {
	t := target{reg: r, from: from, gap: uint64(to - from)}
	if before != nil && before.shard == sh && before.tail.prev.state == free {
		t.left = before.tail.prev
	}
	if after != nil && after.shard == sh && after.head.next.state == free {
		t.right = after.head.next
	}
	begin := from
	if t.left != nil {
		begin = t.left.ptr
	}
	if t.left == nil && (before == nil || before.shard != sh) {
		// Nothing of the shard ends here.
		if t.right != nil {
			if n := (w.size - min(w.size, t.right.size) + r.chunk - 1) / r.chunk; n > 0 && n*r.chunk <= t.gap && w.align <= lowBit(uint64(t.right.ptr)|r.chunk) {
				t.n = int(n)
				t.from = to - driver.Ptr(n*r.chunk)
				return t, true
			}
		}
		// In the middle of the gap, so that both sides have room to grow.
		n := (w.size + alignRoom(r, w) + r.chunk - 1) / r.chunk
		if n*r.chunk > t.gap {
			return t, false
		}
		t.n, t.right = int(n), nil
		if before != nil || after != nil {
			t.from = r.down(from + driver.Ptr((t.gap-n*r.chunk)/2))
		}
		return t, true
	}
	end := driver.Ptr((uint64(begin)+w.align-1)&^(w.align-1)) + driver.Ptr(w.size)
	if end <= to {
		if end <= from {
			return t, false
		}
		t.n = int((uint64(end-from) + r.chunk - 1) / r.chunk)
		if driver.Ptr(uint64(t.n)*r.chunk)+from < to {
			t.right = nil
		}
		return t, true
	}
	if t.right == nil || t.right.end() < end {
		return t, false
	}
	t.n = int(t.gap / r.chunk)
	return t, true
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

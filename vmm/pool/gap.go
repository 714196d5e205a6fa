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

// fill is how a gap would serve a request: behind the free extent before it, in front
// of the one behind it, or between the two.
func (r *region) fill(sh *shard, w *want, from, to driver.Ptr, before, after *span) (best target, ok bool) {
	gap := uint64(to - from)
	try := func(at driver.Ptr, n uint64, left, right *extent) {
		t := target{reg: r, from: at, n: int(n), left: left, right: right, gap: gap}
		if n > 0 && n*r.chunk <= gap && t.better(best) {
			best, ok = t, true
		}
	}
	chunks := func(bytes uint64) uint64 { return (bytes + r.chunk - 1) / r.chunk }
	var left, right *extent
	if before != nil && before.shard == sh && before.tail.prev.state == free {
		left = before.tail.prev
	}
	if after != nil && after.shard == sh && after.head.next.state == free {
		right = after.head.next
	}
	if left != nil || before != nil && before.shard == sh {
		begin := from
		if left != nil {
			begin = left.ptr
		}
		end := driver.Ptr((uint64(begin)+w.align-1)&^(w.align-1)) + driver.Ptr(w.size)
		switch {
		case end <= from: // it is aligned badly, or the free extent would have served
		case end <= to:
			n := chunks(uint64(end - from))
			if from+driver.Ptr(n*r.chunk) == to {
				try(from, n, left, right)
			} else {
				try(from, n, left, nil)
			}
		case right != nil && end <= right.end():
			try(from, gap/r.chunk, left, right)
		}
	}
	if right != nil && w.align <= lowBit(uint64(right.ptr)|r.chunk) {
		n := chunks(w.size - min(w.size, right.size))
		if n*r.chunk < gap {
			try(to-driver.Ptr(n*r.chunk), n, nil, right)
		} else if left == nil {
			try(from, n, nil, right)
		}
	}
	if !ok && left == nil && (before == nil || before.shard != sh) {
		// In the middle of the gap, so that both sides have room to grow.
		n := chunks(w.size + alignRoom(r, w))
		at := from
		if n*r.chunk <= gap && (before != nil || after != nil) {
			at = r.down(from + driver.Ptr((gap-n*r.chunk)/2))
		}
		try(at, n, nil, nil)
	}
	return best, ok
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

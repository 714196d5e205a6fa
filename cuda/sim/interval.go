package sim

import "iter"

// interval is a half-open range of numbers with a value.
type interval[V any] struct {
	lo, hi uint64
	v      V
}

// intervals holds intervals that do not overlap. Every operation but a walk
// takes logarithmic time: it is a treap, whose priorities come from a
// generator of its own, so that runs repeat. The zero value is empty and
// ready.
type intervals[V any] struct {
	root  *treap[V]
	state uint64
}

type treap[V any] struct {
	interval[V]
	prio        uint64
	left, right *treap[V]
}

// insert adds [lo, hi), unless it is empty or overlaps what is there.
func (s *intervals[V]) insert(lo, hi uint64, v V) bool {
	if lo >= hi {
		return false
	}
	for range s.overlapping(lo, hi) {
		return false
	}
	// A full-period generator: every state comes once.
	s.state = s.state*6364136223846793005 + 1442695040888963407
	prio := s.state ^ s.state>>29
	left, right := split(s.root, lo)
	node := &treap[V]{interval: interval[V]{lo, hi, v}, prio: prio}
	s.root = join(join(left, node), right)
	return true
}

// remove takes out the interval that starts at lo.
func (s *intervals[V]) remove(lo uint64) (V, bool) {
	at := &s.root
	for *at != nil && (*at).lo != lo {
		if lo < (*at).lo {
			at = &(*at).left
		} else {
			at = &(*at).right
		}
	}
	if *at == nil {
		var none V
		return none, false
	}
	v := (*at).v
	*at = join((*at).left, (*at).right)
	return v, true
}

// find returns the interval that holds x.
func (s *intervals[V]) find(x uint64) (interval[V], bool) {
	for t := s.root; t != nil; {
		switch {
		case x < t.lo:
			t = t.left
		case x >= t.hi:
			t = t.right
		default:
			return t.interval, true
		}
	}
	return interval[V]{}, false
}

// overlapping walks the intervals that share a number with [lo, hi), in order. The
// set must not change during the walk.
func (s *intervals[V]) overlapping(lo, hi uint64) iter.Seq[interval[V]] {
	return func(yield func(interval[V]) bool) {
		if lo < hi {
			walk(s.root, lo, hi, yield)
		}
	}
}

// all walks every interval, in order.
func (s *intervals[V]) all() iter.Seq[interval[V]] { return s.overlapping(0, ^uint64(0)) }

func walk[V any](t *treap[V], lo, hi uint64, yield func(interval[V]) bool) bool {
	if t == nil {
		return true
	}
	if lo < t.lo && !walk(t.left, lo, hi, yield) {
		return false
	}
	if t.lo < hi && lo < t.hi && !yield(t.interval) {
		return false
	}
	return hi <= t.hi || walk(t.right, lo, hi, yield)
}

// split parts the intervals that start before x from the others.
func split[V any](t *treap[V], x uint64) (left, right *treap[V]) {
	if t == nil {
		return nil, nil
	}
	if t.lo < x {
		t.right, right = split(t.right, x)
		return t, right
	}
	left, t.left = split(t.left, x)
	return left, t
}

// join merges two treaps of which every interval of a lies before those of b.
func join[V any](a, b *treap[V]) *treap[V] {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.prio > b.prio:
		a.right = join(a.right, b)
		return a
	}
	b.left = join(a, b.left)
	return b
}

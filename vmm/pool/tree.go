package pool

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

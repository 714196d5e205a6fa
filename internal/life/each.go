package life

// eachAtOnce is how many objects Each reads under one hold of the list's lock, which
// creating and closing an owner takes.
const eachAtOnce = 256

// Each calls f for every live object, in the order in which they were added, with no
// lock held. Objects that come or go meanwhile may be missing, and an owner may be
// torn down while f looks at it: f takes the owner's own lock.
func (l *List) Each(f func(o *Object, owner Owner)) {
	cursor := new(Object) // keeps the place in the list
	l.mu.Lock()
	cursor.linkBefore(l.head.next)
	l.mu.Unlock()
	batch := make([]*Object, 0, eachAtOnce)
	for done := false; !done; {
		batch = batch[:0]
		l.mu.Lock()
		at := cursor.next
		cursor.unlink()
		for ; at != &l.head && len(batch) < eachAtOnce; at = at.next {
			if !at.isCursor() {
				batch = append(batch, at)
			}
		}
		if done = at == &l.head; !done {
			cursor.linkBefore(at)
		}
		l.mu.Unlock()
		for _, o := range batch {
			f(o, o.owner)
		}
	}
}

// isCursor reports whether the object is no live one, but a place that Each keeps.
func (o *Object) isCursor() bool { return o.owner == nil }

func (o *Object) linkBefore(next *Object) {
	o.prev, o.next = next.prev, next
	o.prev.next, o.next.prev = o, o
}

func (o *Object) unlink() {
	o.prev.next, o.next.prev = o.next, o.prev
	o.prev, o.next = nil, nil
}

// Kind returns what the object is.
func (o *Object) Kind() Kind { return o.kind }

// Bytes returns the object's size now.
func (o *Object) Bytes() uint64 {
	o.list.mu.Lock()
	defer o.list.mu.Unlock()
	return o.size
}

// Creation returns the program counters of the object's creation, innermost first,
// and nil if it was not traced. The caller does not change them.
func (o *Object) Creation() []uintptr {
	if o.stack == nil {
		return nil
	}
	return *o.stack
}

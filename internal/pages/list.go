package pages

// list is a list of free pages, the longest free first. A page is on at most one.
type list struct {
	head, tail *page
	n          int
}

func (l *list) push(p *page) {
	p.on, p.prev = l, l.tail
	if l.tail != nil {
		l.tail.next = p
	} else {
		l.head = p
	}
	l.tail = p
	l.n++
}

// remove takes the page from its list, if it is on one.
func (p *page) remove() {
	l := p.on
	if l == nil {
		return
	}
	if p.prev != nil {
		p.prev.next = p.next
	} else {
		l.head = p.next
	}
	if p.next != nil {
		p.next.prev = p.prev
	} else {
		l.tail = p.prev
	}
	l.n--
	p.on, p.prev, p.next = nil, nil, nil
}

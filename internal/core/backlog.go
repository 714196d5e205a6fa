package core

import "container/heap"

// backlog holds the reclaimer's items by what they wait for. An item with marks
// waits for one of them at a time, in the line of the mark's stream, and of a line
// only the earliest mark is queried: so a look costs as much as there are streams,
// however many items wait for each.
type backlog struct {
	lines  []*line
	of     map[*Stream]*line
	turn   int        // the line that is queried next
	others []*reclaim // which wait for an operation to end, a capture, or a lock
}

// line are the items that wait for marks of one stream: a heap by the order of the
// marks.
type line struct {
	stream *Stream
	items  []*reclaim
	at     int // in backlog.lines
}

// visit looks at what waits: at some of it, in turn, if the look may not do more.
func (b *backlog) visit(l *look) {
	for n := len(b.lines); n > 0 && l.most > 0; n-- {
		b.turn %= len(b.lines)
		b.ask(b.lines[b.turn], l)
	}
	for n := len(b.others); n > 0 && l.most > 0; n-- {
		it := b.others[0]
		b.others[0] = nil
		b.others = b.others[1:]
		l.most--
		b.advance(it, l)
	}
}

// ask takes the items whose marks have passed from a line.
func (b *backlog) ask(line *line, l *look) {
	for len(line.items) > 0 {
		it := line.items[0]
		if !l.passed(it.mark()) {
			heap.Fix(line, 0) // it may have been set anew
			b.turn++
			return
		}
		heap.Pop(line)
		it.dropMark()
		b.advance(it, l)
		if l.most <= 0 && len(line.items) > 0 {
			return
		}
	}
	last := len(b.lines) - 1
	b.lines[line.at] = b.lines[last]
	b.lines[line.at].at = line.at
	b.lines[last] = nil
	b.lines = b.lines[:last]
	delete(b.of, line.stream)
}

// advance tears an item down, or puts it where it waits: among the others until all
// streams are marked, then in line for each mark, then among the others until no
// operation runs on the object.
func (b *backlog) advance(it *reclaim, l *look) {
	for {
		if it.rest = it.fence.addEach(it.rest); len(it.rest) > 0 {
			it.fence.held.Store(it.fence.Passed())
			break
		}
		it.fence.held.Store(false)
		if len(it.fence.marks) > 0 {
			m := it.mark()
			line := b.of[m.stream]
			if line != nil && len(line.items) > 0 && line.items[0].mark().number < m.number || !l.passed(m) {
				b.stand(it)
				return
			}
			it.dropMark()
			continue
		}
		if it.life != nil && !it.life.Idle() {
			break
		}
		if it.late {
			it.late, it.rest = false, l.r.sys.everyStream()
			continue
		}
		if l.tearDown(it) {
			return
		}
		break
	}
	b.others = append(b.others, it)
}

// stand puts an item in line for its mark.
func (b *backlog) stand(it *reclaim) {
	st := it.mark().stream
	l := b.of[st]
	if l == nil {
		if b.of == nil {
			b.of = map[*Stream]*line{}
		}
		l = &line{stream: st, at: len(b.lines)}
		b.of[st] = l
		b.lines = append(b.lines, l)
	}
	heap.Push(l, it)
}

// mark returns what an item in a line waits for: the fence's last mark.
func (it *reclaim) mark() *Mark { return &it.fence.marks[len(it.fence.marks)-1] }

// dropMark releases the last mark, which has passed.
func (it *reclaim) dropMark() {
	it.mark().Release()
	it.fence.marks = it.fence.marks[:len(it.fence.marks)-1]
}

func (l *line) Len() int           { return len(l.items) }
func (l *line) Less(i, j int) bool { return l.items[i].mark().number < l.items[j].mark().number }
func (l *line) Swap(i, j int)      { l.items[i], l.items[j] = l.items[j], l.items[i] }
func (l *line) Push(it any)        { l.items = append(l.items, it.(*reclaim)) }

func (l *line) Pop() any {
	last := len(l.items) - 1
	it := l.items[last]
	l.items[last] = nil
	l.items = l.items[:last]
	return it
}

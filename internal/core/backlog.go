package core

import "container/heap"

// backlog holds the reclaimer's items by what they wait for. An item with marks
// waits for one of them at a time, in the queue of the mark's stream, and of a queue
// only the earliest mark is queried: so a poll costs as much as there are streams,
// however many items wait for each.
type backlog struct {
	queues []*queue
	of     map[*Stream]*queue
	turn   int        // the queue that is queried next
	others []*reclaim // which wait for an operation to end, a capture, or a lock
}

// queue holds the items that wait for marks of one stream: a heap by the order of the
// marks.
type queue struct {
	stream *Stream
	items  []*reclaim
	at     int // in backlog.queues
}

// visit queries what waits: some of it, in turn, if the poll may not do more.
func (b *backlog) visit(p *poll) {
	for n := len(b.queues); n > 0 && p.most > 0; n-- {
		b.turn %= len(b.queues)
		b.query(b.queues[b.turn], p)
	}
	for n := len(b.others); n > 0 && p.most > 0; n-- {
		it := b.others[0]
		b.others[0] = nil
		b.others = b.others[1:]
		p.most--
		b.advance(it, p)
	}
}

// query removes the items whose marks have passed from a queue.
func (b *backlog) query(q *queue, p *poll) {
	for len(q.items) > 0 {
		it := q.items[0]
		if !p.passed(it.mark()) {
			heap.Fix(q, 0) // it may have been set anew
			b.turn++
			return
		}
		heap.Pop(q)
		it.dropMark()
		b.advance(it, p)
		if p.most <= 0 && len(q.items) > 0 {
			return
		}
	}
	last := len(b.queues) - 1
	b.queues[q.at] = b.queues[last]
	b.queues[q.at].at = q.at
	b.queues[last] = nil
	b.queues = b.queues[:last]
	delete(b.of, q.stream)
}

// advance tears an item down, or puts it where it waits: among the others until all
// streams are marked, then in the queue of each mark, then among the others until no
// operation runs on the object.
func (b *backlog) advance(it *reclaim, p *poll) {
	for {
		if it.unmarked = it.fence.addEach(it.unmarked); len(it.unmarked) > 0 {
			it.fence.held.Store(it.fence.Passed())
			break
		}
		it.fence.held.Store(false)
		if len(it.fence.marks) > 0 {
			m := it.mark()
			q := b.of[m.stream]
			if q != nil && len(q.items) > 0 && q.items[0].mark().number < m.number || !p.passed(m) {
				b.enqueue(it)
				return
			}
			it.dropMark()
			continue
		}
		if it.life != nil && !it.life.Idle() {
			break
		}
		if it.late {
			it.late, it.unmarked = false, p.r.sys.everyStream()
			continue
		}
		if p.tearDown(it) {
			return
		}
		break
	}
	b.others = append(b.others, it)
}

// enqueue puts an item in the queue of its mark.
func (b *backlog) enqueue(it *reclaim) {
	st := it.mark().stream
	q := b.of[st]
	if q == nil {
		if b.of == nil {
			b.of = map[*Stream]*queue{}
		}
		q = &queue{stream: st, at: len(b.queues)}
		b.of[st] = q
		b.queues = append(b.queues, q)
	}
	heap.Push(q, it)
}

// mark returns what an item in a queue waits for: the fence's last mark.
func (it *reclaim) mark() *Mark { return &it.fence.marks[len(it.fence.marks)-1] }

// dropMark releases the last mark, which has passed.
func (it *reclaim) dropMark() {
	it.mark().Release()
	it.fence.marks = it.fence.marks[:len(it.fence.marks)-1]
}

func (q *queue) Len() int           { return len(q.items) }
func (q *queue) Less(i, j int) bool { return q.items[i].mark().number < q.items[j].mark().number }
func (q *queue) Swap(i, j int)      { q.items[i], q.items[j] = q.items[j], q.items[i] }
func (q *queue) Push(it any)        { q.items = append(q.items, it.(*reclaim)) }

func (q *queue) Pop() any {
	last := len(q.items) - 1
	it := q.items[last]
	q.items[last] = nil
	q.items = q.items[:last]
	return it
}

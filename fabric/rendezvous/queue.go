package rendezvous

import (
	"context"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
)

// queue holds events until they are taken. It has no limit of its own: a group
// has at most two steps under way.
type queue struct {
	mu     sync.Mutex
	events []Event
	closed bool          // takes no more
	more   chan struct{} // has one element where there is something to see
}

func newQueue() *queue { return &queue{more: make(chan struct{}, 1)} }

// put takes the event over.
func (q *queue) put(e Event) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		e.Parcel.Close()
		return
	}
	q.events = append(q.events, e)
	q.mu.Unlock()
	q.wake()
}

// putCopy leaves the event to the caller.
func (q *queue) putCopy(e Event) { q.put(e.copied()) }

// copied is the event with files of its own or, where those are not to be had,
// the end of the group.
func (e Event) copied() Event {
	p, err := e.Parcel.dup()
	if err != nil {
		return Event{Kind: Failed, Rank: e.Rank, Step: e.Step, Reason: "its files could not be handed on: " + err.Error()}
	}
	e.Parcel = p
	return e
}

func (q *queue) wake() {
	select {
	case q.more <- struct{}{}:
	default:
	}
}

// take waits for the next event.
func (q *queue) take(ctx context.Context) (Event, error) {
	for {
		q.mu.Lock()
		switch {
		case len(q.events) > 0:
			e := q.events[0]
			q.events[0] = Event{}
			q.events = q.events[1:]
			q.mu.Unlock()
			return e, nil
		case q.closed:
			q.mu.Unlock()
			q.wake() // whoever else waits
			return Event{}, cuda.ErrClosed
		}
		q.mu.Unlock()
		select {
		case <-q.more:
		case <-ctx.Done():
			return Event{}, ctx.Err()
		}
	}
}

// finish takes no more; what there is can still be taken.
func (q *queue) finish() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wake()
}

// close takes no more and drops what there is.
func (q *queue) close() {
	q.mu.Lock()
	events := q.events
	q.events, q.closed = nil, true
	q.mu.Unlock()
	for _, e := range events {
		e.Parcel.Close()
	}
	q.wake()
}

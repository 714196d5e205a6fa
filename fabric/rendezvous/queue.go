package rendezvous

import (
	"context"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
)

// queue holds events until they are taken. Its writers bound it: an honest
// group has at most two steps in flight.
type queue struct {
	mu     sync.Mutex
	events []Event
	closed bool          // takes no more
	more   chan struct{} // has one element if there is an event
}

func newQueue() *queue { return &queue{more: make(chan struct{}, 1)} }

// mostPending is how many events can wait for an honest rank of a group: the
// arrivals at two steps, and the end of each rank.
func mostPending(size int) int { return 3*size + 8 }

// put takes ownership of the event and returns how many are waiting.
func (q *queue) put(e Event) int {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		e.release()
		return 0
	}
	q.events = append(q.events, e)
	n := len(q.events)
	q.mu.Unlock()
	q.wake()
	return n
}

func (q *queue) wake() {
	select {
	case q.more <- struct{}{}:
	default:
	}
}

// pop waits for the next event, and returns it.
func (q *queue) pop(ctx context.Context) (Event, error) {
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
			q.wake() // any other waiter
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

// finish takes no more; what is waiting can still be taken.
func (q *queue) finish() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wake()
}

// close takes no more and releases what is waiting.
func (q *queue) close() {
	q.mu.Lock()
	events := q.events
	q.events, q.closed = nil, true
	q.mu.Unlock()
	for i := range events {
		events[i].release()
	}
	q.wake()
}

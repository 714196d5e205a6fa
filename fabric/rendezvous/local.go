package rendezvous

import (
	"context"
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
)

// InProcess makes a group of goroutines and returns one Group for each rank. The
// caller closes all of them.
func InProcess(size int, o Options) ([]*Group, error) {
	if size < 1 || size > MaxSize {
		return nil, fmt.Errorf("rendezvous.InProcess: %w: a group of %d ranks: 1 to %d", cuda.ErrInvalidArgument, size, MaxSize)
	}
	if err := o.Check(); err != nil {
		return nil, fmt.Errorf("rendezvous.InProcess: %w", err)
	}
	all := &localGroup{ranks: make([]*localTransport, size), state: newState(size)}
	groups := make([]*Group, size)
	for r := range all.ranks {
		all.ranks[r] = &localTransport{group: all, rank: r, queue: newQueue()}
		groups[r] = New(all.ranks[r], o)
	}
	return groups, nil
}

// localGroup is the sequencer of a group of goroutines.
type localGroup struct {
	mu    sync.Mutex
	state *state
	ranks []*localTransport
}

type localTransport struct {
	group *localGroup
	rank  int
	queue *queue
	once  sync.Once
}

func (t *localTransport) Rank() int          { return t.rank }
func (t *localTransport) Size() int          { return len(t.group.ranks) }
func (t *localTransport) CarriesFiles() bool { return true }

// tell sequences an event. Each rank gets files of its own, made before the event
// is in the order, so that either all ranks have them or none does.
func (t *localTransport) tell(e Event) error {
	each := make([]Event, t.Size())
	for r := range each {
		each[r] = e.echo()
		if r == t.rank {
			continue
		}
		c, err := e.Contribution.dup()
		if err != nil {
			for i := range each {
				each[i].release()
			}
			return err
		}
		each[r].Contribution = c
	}
	t.group.mu.Lock()
	defer t.group.mu.Unlock()
	e.Contribution = Contribution{} // the caller's
	counts := t.group.state.apply(&e)
	for r, other := range t.group.ranks {
		if !counts || e.Kind != each[r].Kind {
			each[r].release()
			each[r] = e
		}
		if counts {
			other.queue.put(each[r])
		}
	}
	return nil
}

func (t *localTransport) Post(_ context.Context, s Step, c Contribution) error {
	return t.tell(Event{Kind: Posted, Rank: t.rank, Step: s, Contribution: c})
}

func (t *localTransport) Fail(_ context.Context, e Event) error { return t.tell(e) }

func (t *localTransport) Next(ctx context.Context) (Event, error) { return t.queue.pop(ctx) }

func (t *localTransport) Close(*Event) (err error) {
	t.once.Do(func() {
		t.queue.close()
		err = t.tell(Event{Kind: Left, Rank: t.rank})
	})
	return err
}

package rendezvous

import (
	"context"
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
)

// InProcess makes a group of goroutines: one Group for each rank. The caller
// closes all of them.
func InProcess(size int, o Options) ([]*Group, error) {
	if size < 1 || size > MaxSize {
		return nil, fmt.Errorf("rendezvous.InProcess: %w: a group of %d ranks: 1 to %d", cuda.ErrInvalidArgument, size, MaxSize)
	}
	all := &hall{boards: make([]*localBoard, size)}
	groups := make([]*Group, size)
	for r := range all.boards {
		all.boards[r] = &localBoard{hall: all, rank: r, queue: newQueue()}
		groups[r] = New(all.boards[r], o)
	}
	return groups, nil
}

type hall struct {
	// mu gives all ranks the same order of events: who comes to an end because of
	// another's is heard of behind that one.
	mu     sync.Mutex
	boards []*localBoard
}

type localBoard struct {
	hall  *hall
	rank  int
	queue *queue
	once  sync.Once
}

func (b *localBoard) Rank() int          { return b.rank }
func (b *localBoard) Size() int          { return len(b.hall.boards) }
func (b *localBoard) CarriesFiles() bool { return true }

func (b *localBoard) others(e Event) {
	b.hall.mu.Lock()
	defer b.hall.mu.Unlock()
	for _, o := range b.hall.boards {
		if o != b {
			o.queue.putCopy(e)
		}
	}
}

func (b *localBoard) Post(_ context.Context, s Step, p Parcel) error {
	b.others(Event{Kind: Posted, Rank: b.rank, Step: s, Parcel: p})
	return nil
}

func (b *localBoard) Fail(_ context.Context, s Step, reason string) error {
	b.others(Event{Kind: Failed, Rank: b.rank, Step: s, Reason: reason})
	return nil
}

func (b *localBoard) Next(ctx context.Context) (Event, error) { return b.queue.take(ctx) }

func (b *localBoard) Close() error {
	b.once.Do(func() {
		b.queue.close()
		b.others(Event{Kind: Left, Rank: b.rank})
	})
	return nil
}

package trace

import (
	"errors"
	"fmt"
	"time"
)

// Allocator is what Replay drives. B is what it gives for a block. Its methods
// are called by one goroutine.
type Allocator[B any] interface {
	// Alloc takes a block for a stream of the trace. It may be of no bytes.
	Alloc(bytes uint64, stream uint32, tag string) (B, error)
	// Free gives it back, after what its own stream and those that used it have
	// been given so far.
	Free(block B, used []uint32) error
	// Sync waits for all streams.
	Sync() error
}

// Result is what a replay took.
type Result struct {
	// Operations are the blocks taken and given back.
	Operations int
	// Took is their time, with that of the loop itself: two or three
	// nanoseconds each. Waited is the time in Sync, which is not part of it.
	Took, Waited time.Duration
}

// PerOperation is the mean time of taking or giving back a block.
func (r Result) PerOperation() time.Duration {
	if r.Operations == 0 {
		return 0
	}
	return r.Took / time.Duration(r.Operations)
}

// Replay does what the trace says, and gives back what the trace does not, so
// that it can be replayed again; that part counts for nothing. An error names
// the operation at which the replay ended; the blocks of the replay are given
// back then, too.
func Replay[B any](t *Trace, a Allocator[B]) (Result, error) {
	var r Result
	s, err := t.Summary()
	if err != nil {
		return r, err
	}
	p := player[B]{
		a: a, t: t, blocks: make([]B, s.Allocs), live: make([]bool, s.Allocs), used: map[uint32][]uint32{},
	}
	r.Operations = s.Allocs + s.Frees
	at := 0
	for at < len(t.Ops) && err == nil {
		start := time.Now()
		at, err = p.untilSync(at)
		r.Took += time.Since(start)
		if err == nil && at < len(t.Ops) {
			start = time.Now()
			err = a.Sync()
			r.Waited += time.Since(start)
			if err == nil {
				at++
			}
		}
	}
	if err != nil {
		err = fmt.Errorf("replaying %s, operation %d of %d: %w", t.Name, at, len(t.Ops), err)
	}
	return r, errors.Join(err, p.giveBack())
}

type player[B any] struct {
	a      Allocator[B]
	t      *Trace
	blocks []B
	live   []bool
	used   map[uint32][]uint32 // streams that use a block beside its own
}

// untilSync goes on from an operation to the next Sync, or the end, and answers
// where it is.
func (p *player[B]) untilSync(at int) (int, error) {
	for ; at < len(p.t.Ops); at++ {
		op := &p.t.Ops[at]
		switch op.Kind {
		case Alloc:
			b, err := p.a.Alloc(op.Bytes, op.Stream, p.t.Tags[op.Tag])
			if err != nil {
				return at, err
			}
			p.blocks[op.ID], p.live[op.ID] = b, true
		case Free:
			p.live[op.ID] = false
			if err := p.a.Free(p.blocks[op.ID], p.take(op.ID)); err != nil {
				return at, err
			}
		case Use:
			p.used[op.ID] = append(p.used[op.ID], op.Stream)
		case Sync:
			return at, nil
		}
	}
	return at, nil
}

func (p *player[B]) take(id uint32) []uint32 {
	if len(p.used) == 0 {
		return nil
	}
	used := p.used[id]
	delete(p.used, id)
	return used
}

func (p *player[B]) giveBack() error {
	var errs []error
	for id, live := range p.live {
		if live {
			errs = append(errs, p.a.Free(p.blocks[id], p.take(uint32(id))))
		}
	}
	return errors.Join(errs...)
}

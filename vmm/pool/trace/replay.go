package trace

import (
	"errors"
	"fmt"
	"time"
)

// Allocator is what Replay drives. B is its handle of a block. One replay calls
// its methods from one goroutine.
type Allocator[B any] interface {
	// Alloc allocates a block for a stream of the trace. It may have 0 bytes.
	Alloc(bytes int, stream uint32, tag string) (B, error)
	// Free frees it, in the order of its own stream and of the streams that used it.
	Free(block B, used []uint32) error
	// Sync waits for all streams.
	Sync() error
}

// Follower is an Allocator that follows what it did: Replay calls After when an
// Alloc or a Free has succeeded, and does not count its time. Asynchronous work on
// the blocks lets the program run ahead of the GPU, as real programs do.
type Follower[B any] interface {
	Allocator[B]
	// After gets the operation with the size and the stream of its block, for a
	// Free too. The block of a Free is gone.
	After(op Op, block B) error
}

// Waiter is an Allocator that knows how long its calls wait for memory that is in use.
// Replay reads it after each operation, outside of the time that it measures.
type Waiter interface {
	// Waited returns how long all calls so far have waited.
	Waited() time.Duration
}

// Result is what a replay took.
type Result struct {
	// Operations is the number of blocks allocated plus those freed.
	Operations int
	// Took is the time in Alloc and Free, without that of reading the clock, and Worked
	// the same without what a Waiter waited. Waited is the time in Sync.
	Took, Worked, Waited time.Duration
	// Slowest are the operations that worked longest, without what a Waiter waited,
	// the slowest first; at most 8.
	Slowest []Slow
	// Longest is the operation that took longest, waiting included.
	Longest Slow
}

// Slow is an operation of a replay and its time.
type Slow struct {
	Op     int // index into Trace.Ops
	Bytes  int // of its block
	Took   time.Duration
	Waited time.Duration // the part of Took that a Waiter waited
}

// Worked returns the time that the operation took without its waiting.
func (s Slow) Worked() time.Duration { return s.Took - s.Waited }

// PerOperation is the mean time of an Alloc or a Free.
func (r Result) PerOperation() time.Duration {
	if r.Operations == 0 {
		return 0
	}
	return r.Took / time.Duration(r.Operations)
}

// Replay performs the trace's operations, and frees what the trace does not, so
// that it can be replayed again; that part is not measured. An error names the
// operation that failed; the replay's blocks are freed then, too.
func Replay[B any](t *Trace, a Allocator[B]) (Result, error) {
	s, err := t.Summary()
	if err != nil {
		return Result{}, err
	}
	p := player[B]{
		a: a, t: t, clock: newStopwatch(), blocks: make([]B, s.Allocs), live: make([]bool, s.Allocs),
		allocs: make([]*Op, s.Allocs), used: map[uint32][]uint32{},
	}
	p.follower, _ = a.(Follower[B])
	if p.waiter, _ = a.(Waiter); p.waiter != nil {
		p.waited = p.waiter.Waited()
	}
	p.r.Operations = s.Allocs + s.Frees
	for at := range t.Ops {
		if err := p.do(at); err != nil {
			err = fmt.Errorf("replaying %s, operation %d of %d: %w", t.Name, at, len(t.Ops), err)
			return p.r, errors.Join(err, p.giveBack())
		}
	}
	return p.r, p.giveBack()
}

type player[B any] struct {
	a        Allocator[B]
	follower Follower[B] // a, if it is one
	waiter   Waiter      // likewise
	waited   time.Duration
	t        *Trace
	r        Result
	clock    stopwatch
	blocks   []B
	allocs   []*Op // of the blocks
	live     []bool
	used     map[uint32][]uint32 // streams that use a block besides its own
}

func (p *player[B]) do(at int) error {
	op := &p.t.Ops[at]
	switch op.Kind {
	case Alloc:
		tag := p.t.Tags[op.Tag]
		start := p.clock.now()
		b, err := p.a.Alloc(op.Bytes, op.Stream, tag)
		took := p.clock.since(start)
		if err != nil {
			return err
		}
		p.blocks[op.ID], p.live[op.ID], p.allocs[op.ID] = b, true, op
		return p.done(at, *op, b, took)
	case Free:
		b, used := p.blocks[op.ID], p.take(op.ID)
		p.live[op.ID] = false
		start := p.clock.now()
		err := p.a.Free(b, used)
		took := p.clock.since(start)
		if err != nil {
			return err
		}
		of := p.allocs[op.ID]
		return p.done(at, Op{Kind: Free, ID: op.ID, Bytes: of.Bytes, Stream: of.Stream}, b, took)
	case Use:
		p.used[op.ID] = append(p.used[op.ID], op.Stream)
	case Sync:
		start := p.clock.now()
		err := p.a.Sync()
		p.r.Waited += p.clock.since(start)
		return err
	}
	return nil
}

// done counts an operation, and tells the follower.
func (p *player[B]) done(at int, op Op, b B, took time.Duration) error {
	slow := Slow{Op: at, Bytes: op.Bytes, Took: took}
	if p.waiter != nil {
		now := p.waiter.Waited()
		slow.Waited, p.waited = min(now-p.waited, took), now
	}
	p.count(slow)
	if p.follower == nil {
		return nil
	}
	return p.follower.After(op, b)
}

// count adds an operation's time.
func (p *player[B]) count(one Slow) {
	const most = 8
	p.r.Took += one.Took
	p.r.Worked += one.Worked()
	if one.Took > p.r.Longest.Took {
		p.r.Longest = one
	}
	slow := p.r.Slowest
	if len(slow) == most {
		if one.Worked() <= slow[most-1].Worked() {
			return
		}
		slow = slow[:most-1]
	}
	i := len(slow)
	slow = append(slow, Slow{})
	for ; i > 0 && slow[i-1].Worked() < one.Worked(); i-- {
		slow[i] = slow[i-1]
	}
	slow[i] = one
	p.r.Slowest = slow
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

// stopwatch measures short times: reading the clock takes as long as a warm
// request, so what two readings in a row show is subtracted.
type stopwatch struct {
	epoch time.Time
	cost  time.Duration
}

func newStopwatch() stopwatch {
	const batches, n = 16, 256
	s := stopwatch{epoch: time.Now()}
	cost := time.Duration(1 << 62)
	for range batches {
		var total time.Duration
		for range n {
			start := s.now()
			total += s.since(start)
		}
		cost = min(cost, total/n) // a batch that was interrupted shows more
	}
	s.cost = cost
	return s
}

func (s *stopwatch) now() time.Duration { return time.Since(s.epoch) }

func (s *stopwatch) since(start time.Duration) time.Duration {
	return time.Since(s.epoch) - start - s.cost
}

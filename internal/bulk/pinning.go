package bulk

import (
	"context"
	"sync"
	"sync/atomic"
)

// pinning pins a part of a backing's slabs, in their order, on several goroutines.
type pinning struct {
	first  int // the slab that it begins at
	slabs  []*slab
	pinned []chan struct{} // each closed when the slab is
	failed chan struct{}   // closed when err is set
	err    error
	fail   sync.Once
	next   atomic.Int64
	ended  sync.WaitGroup
}

// pin begins to pin what the bytes from offset on lie in. The caller calls end.
func (b *Backing) pin(ctx context.Context, o Options, offset, bytes uint64) *pinning {
	first, last := int(offset/slabBytes), int((offset+bytes-1)/slabBytes)
	p := &pinning{first: first, slabs: b.slabs[first : last+1], failed: make(chan struct{})}
	todo := 0
	for _, s := range p.slabs {
		p.pinned = append(p.pinned, make(chan struct{}))
		if s.ctx == nil {
			todo++
		}
	}
	work := func() {
		for i := p.pop(); i < len(p.slabs); i = p.pop() {
			err := p.slabs[i].pin(o.Op, b.engine.ctx)
			if err == nil {
				err = ended(ctx, o.Op)
			}
			if err != nil {
				p.stop(err)
				return
			}
			close(p.pinned[i])
		}
	}
	for range min(o.threads(), todo) {
		p.ended.Go(work)
	}
	if todo == 0 {
		work()
	}
	return p
}

// pop returns the next slab to pin.
func (p *pinning) pop() int { return int(p.next.Add(1)) - 1 }

// stop has the workers end after the slab that they are at.
func (p *pinning) stop(err error) {
	p.next.Store(int64(len(p.slabs)))
	p.fail.Do(func() {
		p.err = err
		close(p.failed)
	})
}

// wait waits until slab i of the backing is pinned.
func (p *pinning) wait(i int) error {
	select {
	case <-p.pinned[i-p.first]:
		return nil
	case <-p.failed:
		return p.err
	}
}

// end waits for the workers, which pin no further slab.
func (p *pinning) end() {
	p.next.Store(int64(len(p.slabs)))
	p.ended.Wait()
}

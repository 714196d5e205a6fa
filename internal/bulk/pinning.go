package bulk

import (
	"context"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
)

// pinned reports whether slabs first to last are.
func (b *Backing) pinned(first, last int) bool {
	for _, s := range b.slabs[first : last+1] {
		if s.ctx == nil {
			return false
		}
	}
	return true
}

// pin pins slabs first to last in about their order, on as many goroutines as the options say,
// and has then follow each on its goroutine, which has a number. It returns when all have
// ended.
//
// A goroutine of its own that follows would fall behind: the driver has a lock for pinning that
// each submission waits for and that is not handed on in turn, so with 16 threads that pin
// nothing overlapped (docs/measurements/bulk.md).
func (b *Backing) pin(ctx context.Context, o Options, first, last int, then func(worker, slab int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	next.Store(int64(first))
	for w := range min(o.threads(), last-first+1) {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i > last {
					return nil
				}
				err := ended(ctx, o.Op)
				if err == nil {
					err = b.slabs[i].pin(o.Op, b.engine.ctx)
				}
				if err == nil {
					err = then(w, i)
				}
				if err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

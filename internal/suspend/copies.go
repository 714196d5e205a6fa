package suspend

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
)

// save keeps the bytes of chunks, if they are to be kept. It has the host memory before it waits
// for the GPU. If that is pinned already, which leaves little that can fail, the memory that was
// copied goes beside the copies of the rest. An error after that undoes nothing: what has not
// gone then is not copied.
func (s *Suspension) save(ctx context.Context, op string, chunks []*chunk, wait func() error) error {
	if !s.o.Keep {
		return wait()
	}
	if err := s.reserve(ctx, op, chunks); err != nil {
		return err
	}
	if err := wait(); err != nil {
		return err
	}
	for _, c := range chunks {
		if c.kept != nil && c.kept.backing.Pinned() < c.kept.bytes {
			// Pinning takes longer than the copies, and the next time there is none.
			return s.copyOut(ctx, op, chunks, new(core.Rate), nil)
		}
	}
	return s.copyOut(ctx, op, chunks, &s.sys.Rates.Out, func(copied []*chunk) { s.give(op, copied) })
}

// copyOut copies chunks out, each device those of its lane. then, if it is not nil, is called for
// those that have been copied, beside the copies of the rest. From its first call on the end of
// the context is ignored.
func (s *Suspension) copyOut(ctx context.Context, op string, chunks []*chunk, rate *core.Rate, then func(copied []*chunk)) error {
	if err := ended(ctx, op); err != nil {
		return err
	}
	began, bytes := time.Now(), uint64(0)
	way := newOneWay(ctx)
	defer way.close()
	copies, copying := errgroup.WithContext(way.ctx)
	var behind sync.WaitGroup
	for _, l := range lanes(chunks) {
		bytes += l.bytes
		copies.Go(func() (err error) {
			defer func() { l.reached.shut(err) }()
			if err := bulk.Out(copying, l.runs, bulk.Options{Op: op, Passed: l.reached.open}); err != nil {
				return err
			}
			l.reached.open(l.bytes)
			return nil
		})
		if then == nil {
			continue
		}
		behind.Go(func() {
			for _, g := range l.groups {
				if l.reached.wait(g.end) != nil || !way.enter(copying) {
					return
				}
				then(g.chunks)
			}
		})
	}
	err := copies.Wait()
	behind.Wait()
	if err == nil {
		rate.Note(bytes, time.Since(began))
	}
	return err
}

// oneWay is a context that ends with another, unless it was entered before.
type oneWay struct {
	ctx    context.Context
	parent context.Context
	state  atomic.Int32
	close  func()
}

const (
	wayOpen = iota
	wayClosed
	wayEntered
)

func newOneWay(parent context.Context) *oneWay {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(parent))
	w := &oneWay{ctx: ctx, parent: parent}
	stop := context.AfterFunc(parent, func() {
		if w.state.CompareAndSwap(wayOpen, wayClosed) {
			cancel(context.Cause(parent))
		}
	})
	w.close = func() { stop(); cancel(nil) }
	return w
}

// enter reports whether it was entered, now or before: not if the parent, or ctx, ended first.
func (w *oneWay) enter(ctx context.Context) bool {
	if w.parent.Err() == nil && ctx.Err() == nil {
		w.state.CompareAndSwap(wayOpen, wayEntered)
	}
	return w.state.Load() == wayEntered
}

// bring maps chunks where they were, and copies in what is kept of them, each device that of its
// lane, behind the mapping. It returns what it has mapped, after an error as well.
//
// One lane copies beside the mapping of the rest. Several are mapped first, with as few grants as they take: a grant
// waits for a gap in the copies to its device, and holds up all other devices' grants meanwhile, so
// lanes that copy and map side by side take turns (docs/measurements/bulk.md).
func (s *Suspension) bring(ctx context.Context, op string, chunks []*chunk) (mapped []stretch, err error) {
	began, bytes := time.Now(), uint64(0)
	moves, moving := errgroup.WithContext(ctx)
	all := lanes(chunks)
	back := make([][]stretch, len(all))
	var mapping sync.WaitGroup
	mapping.Add(len(all))
	for i, l := range all {
		bytes += l.bytes
		if len(all) > 1 {
			l.groups = []group{l.whole()}
		}
		moves.Go(func() (err error) {
			defer mapping.Done()
			back[i], err = s.mapLane(moving, op, l)
			l.reached.shut(err)
			return err
		})
		if len(l.runs) == 0 {
			continue
		}
		moves.Go(func() error {
			if len(all) > 1 {
				mapping.Wait()
			}
			if err := l.reached.wait(1); err != nil {
				return err // nothing to copy to: no stream is made
			}
			return bulk.In(moving, l.runs, bulk.Options{Op: op, Await: l.reached.wait})
		})
	}
	if err = moves.Wait(); err == nil && bytes > 0 {
		s.sys.Rates.In.Note(bytes, time.Since(began))
	}
	return slices.Concat(back...), err
}

func (s *Suspension) mapLane(ctx context.Context, op string, l *lane) (mapped []stretch, err error) {
	for _, g := range l.groups {
		if err := ended(ctx, op); err != nil {
			return mapped, err
		}
		for _, r := range ranges(g.chunks, s.reach) {
			if err := r.maps[0].Range.PutBack(op, r.maps, r.reach); err != nil {
				return mapped, err
			}
			mapped = append(mapped, r)
		}
		l.reached.open(g.end)
	}
	return mapped, nil
}

// ended returns the error of an operation whose context has ended.
func ended(ctx context.Context, op string) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", op, context.Cause(ctx))
}

package pages

import (
	"context"

	"github.com/cuvmm/cuvmm/internal/core"
)

// UnmapAfter makes holes of the places of spans at once. Their pages are free when the work
// that is on the streams now is done, and so is what this library has copied from or to the
// range. It waits for nothing and makes no driver call, unless other libraries can have a
// stream capture.
func (r *Range) UnmapAfter(op string, streams []*core.Stream, spans []Span) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.Closer.Release()
	at, err := r.check(op, spans)
	if err != nil {
		return err
	}
	for _, st := range streams {
		if err := r.mayChange(op, st); err != nil {
			return err
		}
	}
	return r.free(op, at, r.source.lanes(append(r.System().Unsettled(), streams...)...))
}

// free makes holes of live places.
func (r *Range) free(op string, at []int, lanes []*lane) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.awake(op); err != nil {
		return err
	}
	s := r.source
	s.mu.Lock()
	defer s.mu.Unlock()
	now := touchLocked(lanes)
	r.copied.settle()
	for _, i := range at {
		p := r.places.at(i)
		if p == nil || !p.live || !r.live.has(i) {
			continue // a hole, or a Map of it has not ended
		}
		r.live.set(i, false)
		r.watched(i, 1, false)
		for _, points := range [][]point{r.copied.after, now} {
			for _, after := range points {
				p.add(after)
			}
		}
		p.use(false)
		switch page := p.page; {
		case page.uses == 0:
			s.fileLocked(page)
		case !p.moved:
			p.moved = true
			s.moved = append(s.moved, p)
		}
	}
	return nil
}

// Unmap makes holes of the places of spans, once all work that could use them is done. If ctx
// ends first nothing has changed.
func (r *Range) Unmap(ctx context.Context, op string, spans []Span) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.Closer.Release()
	at, err := r.check(op, spans)
	if err != nil {
		return err
	}
	r.changes.Lock()
	defer r.changes.Unlock()
	if err := r.awake(op); err != nil {
		return err
	}
	if err := r.System().AwaitDevices(ctx, op, r.res.Devices()); err != nil {
		return err
	}
	if err := r.free(op, at, nil); err != nil || r.null == nil {
		return err
	}
	return r.turn(op, func() error {
		r.source.advance()
		return r.sweep(op)
	})
}

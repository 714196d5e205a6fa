package pages

import (
	"context"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Share maps pages of a range of the same source, or of this one, once more: those of the
// spans, in their order, from a place on. All of them are mapped, or none. It waits, until ctx
// ends, for the GPU to pass what lies under the holes.
func (r *Range) Share(ctx context.Context, op string, from *Range, spans []Span, first int) error {
	return r.try(ctx, op, func() error {
		if from.source != r.source {
			return r.fail(errs.Failure{Op: op, Kind: errs.InvalidArgument, Asked: "pages of another source",
				Hint: "give both ranges one vmm.Pages"})
		}
		if err := from.acquire(op); err != nil {
			return err
		}
		defer from.Closer.Release()
		at, err := from.inOrder(op, spans)
		if err != nil {
			return err
		}
		if _, err := r.check(op, []Span{{first, len(at)}}); err != nil {
			return err
		}
		if err := r.awaitHoles(ctx, op); err != nil {
			return err
		}
		unlock := lockBoth(r, from)
		defer unlock()
		if err := r.turn(op, func() error { return r.shareOnce(op, from, at, first) }); err != nil {
			return err
		}
		r.watched(first, len(at), true)
		r.mu.Lock()
		defer r.mu.Unlock()
		for i := range at {
			r.live.set(first+i, true)
		}
		return nil
	})
}

// lockBoth begins a change of two ranges, which may be one, in the order of their addresses.
func lockBoth(a, b *Range) (unlock func()) {
	if a == b {
		a.changes.Lock()
		return a.changes.Unlock
	}
	if a.Base() > b.Base() {
		a, b = b, a
	}
	a.changes.Lock()
	b.changes.Lock()
	return func() { b.changes.Unlock(); a.changes.Unlock() }
}

// shareOnce is Share that waits for nothing.
func (r *Range) shareOnce(op string, from *Range, at []int, first int) error {
	if err := from.awake(op); err != nil {
		return err
	}
	s := r.source
	q, err := r.planShare(op, from, at, first)
	if errors.Is(err, errWaits) {
		s.advance()
		q, err = r.planShare(op, from, at, first)
	}
	if err != nil {
		return err
	}
	cleared := pagesOf(q.clear)
	defer func() {
		s.end(op, q.held)
		s.refile(op, cleared)
	}()
	if err := s.unmap(op, q.clear); err != nil {
		return err
	}
	mapped, err := r.mapRuns(op, q.holes, q.pages)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range append(q.back, mapped...) {
		p.use(true)
	}
	return nil
}

// shareRequest is what a Share does: as a request, and the pages that the holes get. Those are
// in use until their other places free them, for which no change is needed.
type shareRequest struct {
	request
	pages []*page
}

func (r *Range) planShare(op string, from *Range, at []int, first int) (q shareRequest, err error) {
	s := r.source
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, n := range at {
		src, dst := from.places.at(n), r.places.at(first+i)
		if src == nil || !src.live {
			return q, from.errHole(op, n)
		}
		switch {
		case dst == nil:
		case dst.live && dst.page == src.page:
			continue
		case dst.live:
			return q, r.fail(errs.Failure{Op: op, Kind: errs.InUse, Asked: fmt.Sprintf("page %d of %s, which is mapped", first+i, r.What()),
				Hint: "unmap it first, or share at holes"})
		case dst.page == src.page:
			q.back = append(q.back, dst)
			continue
		case !dst.passed():
			return q, errWaits
		default:
			q.clear = append(q.clear, dst)
		}
		q.holes, q.pages = append(q.holes, first+i), append(q.pages, src.page)
	}
	for _, p := range q.pages {
		q.held.addLocked(s, p)
	}
	for _, p := range q.back {
		q.held.addLocked(s, p.page)
	}
	return q, nil
}

// inOrder returns the places of spans, in their order.
func (r *Range) inOrder(op string, spans []Span) (at []int, err error) {
	if _, err := r.check(op, spans); err != nil {
		return nil, err
	}
	for _, sp := range spans {
		for i := range sp.N {
			at = append(at, sp.First+i)
		}
	}
	return at, nil
}

// errHole returns the error for a page that has no memory.
func (r *Range) errHole(op string, page int) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("page %d of %s, which is a hole", page, r.What()),
		Hint: "map the page first, with Map or Share"})
}

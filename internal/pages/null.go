package pages

import (
	"context"
	"errors"

	"github.com/cuvmm/cuvmm/internal/phys"
)

// Cover maps the null page under all holes of a range that is not in use yet.
func (r *Range) Cover(op string) error {
	made, err := r.source.Make(op, r.source, 1, true)
	if err != nil {
		return err
	}
	made[0].Recycle()
	r.watched(0, r.places.n, true)
	r.null, r.bare = made[0], newBits(r.places.n)
	r.setBare(0, r.places.n, true)
	return r.cover(op, 0, r.places.n)
}

// errCovered is why a change of a range with a null page cannot be made yet: work that could
// use its holes has not been waited for.
var errCovered = errors.New("the null page lies under the holes")

// cover maps the null page under holes that nothing lies under.
func (r *Range) cover(op string, first, n int) error {
	handles := make([]*phys.Handle, n)
	for i := range handles {
		handles[i] = r.null
		r.null.Retain()
	}
	if err := r.res.MapRun(op, uint64(first)*r.Page(), handles, r.access); err != nil {
		for i := range handles {
			r.null.Release() // the range has a count of its own
			if r.res.Left(uint64(first+i)*r.Page(), r.Page()) > 0 {
				r.setBare(first+i, 1, false) // it lies there yet, and is unmapped before a page is mapped
			}
		}
		return err
	}
	r.setBare(first, n, false)
	return nil
}

// uncover unmaps the null page under holes. The GPU has passed the work there. A hole where that
// failed before is tried alone: in a run, what failed is all that is tried again.
func (r *Range) uncover(op string, first, n int) error {
	var whole []int
	for _, at := range r.covered(first, n) {
		if r.res.Left(uint64(at)*r.Page(), r.Page()) == 0 {
			whole = append(whole, at)
		} else if err := r.uncoverRun(op, at, 1); err != nil {
			return err
		}
	}
	for at, n := range runs(whole) {
		if err := r.uncoverRun(op, at, n); err != nil {
			return err
		}
	}
	return nil
}

func (r *Range) uncoverRun(op string, first, n int) error {
	if err := r.res.UnmapRun(op, uint64(first)*r.Page(), uint64(n)*r.Page()); err != nil {
		return err
	}
	r.setBare(first, n, true)
	return nil
}

func (r *Range) setBare(first, n int, bare bool) {
	for i := range n {
		r.bare.set(first+i, bare)
	}
}

// covered returns those of the places that the null page lies under.
func (r *Range) covered(first, n int) (at []int) {
	for i := first; i < first+n; i++ {
		if r.places.at(i) == nil && !r.bare.has(i) {
			at = append(at, i)
		}
	}
	return at
}

// coverPlaces maps the null page where places of a range were unmapped, unless it is closed.
func (r *Range) coverPlaces(op string, first, n int) error {
	if r.null == nil {
		return nil
	}
	r.setBare(first, n, true)
	if r.Closer.Closed() {
		return nil
	}
	return r.cover(op, first, n)
}

// sweep unmaps old places of a range with a null page, which other ranges do not take. The
// caller has waited for the work that could use the holes, and holds turn.
func (r *Range) sweep(op string) error {
	s := r.source
	s.mu.Lock()
	var old []*place
	for _, at := range r.places.all() {
		if !at.live && at.passed() && !at.page.held && !at.page.stuck() {
			old = append(old, at)
		}
	}
	var freed holding
	for _, at := range old {
		freed.addLocked(s, at.page)
	}
	s.mu.Unlock()
	err := s.unmap(op, old)
	s.end(op, freed)
	return err
}

// uncovered ends the null page's part in a range that is torn down.
func (r *Range) uncovered(op string) error {
	if r.null == nil {
		return nil
	}
	if err := r.uncover(op, 0, r.places.n); err != nil {
		return err
	}
	null := r.null
	r.null = nil
	return null.Let(op)
}

// awaitHoles waits for the work that could use the holes of a range with a null page.
func (r *Range) awaitHoles(ctx context.Context, op string) error {
	if r.null == nil {
		return nil
	}
	return r.System().AwaitDevices(ctx, op, r.res.Devices())
}

package pages

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Map maps pages at the places of spans that have none, for use by later work of a stream, or
// of any stream if it is nil: all of them, or none. It waits, until ctx ends, for the GPU to
// pass what lies under holes that it is to fill. If there is no memory it has the budget make
// room once, and if ctx has a deadline it tries again until then.
func (r *Range) Map(ctx context.Context, op string, on *cuda.Stream, spans []Span) error {
	waited := false
	return r.try(ctx, op, func() error {
		at, err := r.check(op, spans)
		if err != nil {
			return err
		}
		if done, err := r.mapped(op, at); done || err != nil {
			return err
		}
		st := core.StreamOf(on)
		if err := r.mayChange(op, st); err != nil {
			return err
		}
		change := func() error {
			return r.change(op, func() error { return r.mapOnce(op, r.source.lane(st), at, waited) }, func() error { return r.begin(op, on, at) })
		}
		if err = change(); errors.Is(err, errCovered) {
			if err := r.awaitHoles(ctx, op); err != nil {
				return err
			}
			waited = true
			err = change()
		}
		return err
	})
}

// mapped reports whether all places are live, for which no lock is taken that a change holds.
func (r *Range) mapped(op string, at []int) (bool, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.awake(op); err != nil {
		return false, err
	}
	for _, i := range at {
		if !r.live.has(i) {
			return false, nil
		}
	}
	return true, nil
}

// mayChange refuses a stream that captures: a graph holds no change of what is mapped.
func (r *Range) mayChange(op string, st *core.Stream) error {
	if st == nil {
		return nil
	}
	if err := st.UseWithoutWork(op, r.System()); err != nil {
		return err
	}
	defer st.Release()
	if !st.MayCapture() {
		return nil
	}
	capturing, res := st.Capturing()
	switch {
	case res != driver.Success:
		return st.Ctx.CallError(op, driver.CallStreamIsCapturing, res, fmt.Sprintf("stream %#x", uintptr(st.Handle)))
	case capturing:
		return core.CapturingError(op, st)
	}
	return nil
}

// errWaits is why a change cannot be made yet: the GPU has not passed what it replaces.
var errWaits = errors.New("the GPU has not passed the earlier work on the pages")

// Pauses between two tries of a change that waits.
const (
	shortestPause = 20 * time.Microsecond
	longestPause  = 2 * time.Millisecond
)

// try makes a change, and again for as long as it may come to succeed: while it waits for the
// GPU, when owners of the budget have freed something, and, if ctx has a deadline, while there is
// no memory. Owners are asked for no more while free pages that wait for the GPU are enough. Between
// two tries nothing of the range is held, since what is freed may be its own.
func (r *Range) try(ctx context.Context, op string, once func() error) error {
	_, patient := ctx.Deadline()
	first, again := !patient, false
	for pause := shortestPause; ; pause = min(2*pause, longestPause) {
		err := r.attempt(op, once)
		var short *budget.Shortage
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errWaits):
		case errors.As(err, &short) && (first || !r.source.serves(short)) && r.makeRoom(ctx, short):
			first = false
			continue
		case errors.Is(err, cuda.ErrOutOfMemory) && !again && r.source.hasIdle(1): // that came back meanwhile
			again = true
			continue
		case patient && (short != nil || errors.Is(err, cuda.ErrOutOfMemory)):
		default:
			return err
		}
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return fmt.Errorf("%s: %w: %w", op, context.Cause(ctx), err)
		}
	}
}

// serves reports whether free pages that wait for the GPU are as many as a budget lacks.
func (s *Source) serves(short *budget.Shortage) bool {
	_, waiting := s.free()
	return short.Lacking() <= uint64(waiting)*s.Page
}

// makeRoom has owners of the budget free memory, and reports whether to try again at once: what
// they unmap in ranges of this source is free, but still counts in the budget.
func (r *Range) makeRoom(ctx context.Context, short *budget.Shortage) bool {
	s := r.source
	idle, waiting := s.free()
	s.wanting.Add(1)
	defer s.wanting.Add(-1)
	made := r.System().MakeRoom(ctx, short)
	nowIdle, nowWaiting := s.free()
	return made || nowIdle+nowWaiting > idle+waiting
}

func (r *Range) attempt(op string, once func() error) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.Closer.Release()
	return once()
}

// change makes a change while no other one of the source runs, and if it succeeds does the rest
// while none of the range runs.
func (r *Range) change(op string, once, rest func() error) error {
	r.System().PollReclaim() // ranges that were closed give pages back, for which turn must be free
	r.changes.Lock()
	defer r.changes.Unlock()
	if err := r.turn(op, once); err != nil {
		return err
	}
	return rest()
}

func (r *Range) turn(op string, once func() error) error {
	r.source.turn.Lock()
	defer r.source.turn.Unlock()
	if err := r.awake(op); err != nil {
		return err
	}
	return once()
}

// request is what a Map does to its places.
type request struct {
	back  []*place // old places whose pages are in use again
	clear []*place // old places whose pages are in use elsewhere
	holes []int    // that get pages, with those of clear
	held  holding  // the pages of back, and those for the holes
}

// mapOnce is Map that waits for nothing. waited says that work in the holes was waited for.
func (r *Range) mapOnce(op string, on *lane, at []int, waited bool) error {
	s := r.source
	q, ok := r.plan(on, at)
	if !ok {
		s.advance()
		if q, ok = r.plan(on, at); !ok {
			return errWaits
		}
	}
	err := errCovered
	if r.null == nil || waited || len(q.holes) == 0 {
		err = r.fill(op, on, &q)
	}
	s.mu.Lock()
	if err == nil {
		for _, p := range q.back {
			p.use(true)
			s.stats.Reused++
		}
	}
	gone := s.endLocked(q.held)
	s.mu.Unlock()
	_, _ = s.release(op, gone) // what is refused is a leftover
	return err
}

// plan says what becomes of places, and holds the pages that go into use again where they are.
// It reports false if the GPU has not passed one of the places, and then holds none.
func (r *Range) plan(on *lane, at []int) (q request, ok bool) {
	s := r.source
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() {
		if !ok {
			s.endLocked(q.held)
		}
	}()
	for _, i := range at {
		p := r.places.at(i)
		switch {
		case p == nil:
			q.holes = append(q.holes, i)
		case p.live:
		case p.page.uses == 0 && !p.page.stuck() && !p.page.held: // also by this change, for another of the places
			if p.page.waitsFor(on) != nil {
				return q, false
			}
			q.held.addLocked(s, p.page)
			q.back = append(q.back, p)
		case !p.passed():
			return q, false
		default:
			q.clear, q.holes = append(q.clear, p), append(q.holes, i)
		}
	}
	return q, true
}

// fill gives pages to the holes of a request, or changes nothing but what is free.
func (r *Range) fill(op string, on *lane, q *request) (err error) {
	if len(q.holes) == 0 {
		return nil
	}
	s := r.source
	if r.null != nil && !s.hasMovable(len(q.holes)) {
		for began := time.Now(); s.advance() && time.Since(began) < grace; {
			time.Sleep(shortestPause)
		}
		if err := r.sweep(op); err != nil {
			return err
		}
	}
	pages, made, err := s.acquire(op, len(q.holes), on)
	if err != nil {
		return err
	}
	old := len(pages) - made
	cleared := pagesOf(q.clear)
	defer func() {
		if err != nil {
			rest, _ := s.release(op, pages[old:]) // what is refused is a leftover
			pages = append(pages[:old], rest...)
		}
		q.held = append(q.held, pages...)
		s.refile(op, cleared) // a page that was stuck alone is free
	}()
	if s.crowded() {
		s.advance()
	}
	s.clean(op, 2*len(q.holes))
	if err := s.unmap(op, append(s.passedPlaces(pages), q.clear...)); err != nil {
		return err
	}
	mapped, err := r.mapRuns(op, q.holes, pages)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Recycled += old
	for _, p := range mapped {
		p.use(true)
	}
	return nil
}

// grace is how long a change waits for the GPU to pass free pages before it makes new ones, which
// stay: an event that was only just recorded has not passed, even if its stream is idle.
const grace = 200 * time.Microsecond

// mapRuns maps pages at places, in runs: all of them, or none.
func (r *Range) mapRuns(op string, at []int, pages []*page) (mapped []*place, err error) {
	for first, n := range runs(at) {
		run, err := r.mapRun(op, first, pages[:n])
		pages, mapped = pages[n:], append(mapped, run...)
		if err != nil {
			if left := r.source.unmap(op, mapped); left != nil {
				err = fmt.Errorf("%w (and undoing it failed, so that these pages of the range are out of use until Map or Close can unmap them: %w)", err, left)
			}
			return nil, err
		}
	}
	return mapped, nil
}

// acquire returns n pages for use behind the work of a lane, the new ones, of which there are
// made, last. The caller holds turn.
func (s *Source) acquire(op string, n int, on *lane) (pages holding, made int, err error) {
	pages, lacking := s.take(n, on)
	for began, waiting := time.Now(), true; lacking > 0 && waiting && time.Since(began) < grace; {
		if waiting = s.advance(); waiting {
			time.Sleep(shortestPause)
			s.advance()
		}
		pages, lacking = s.take(n, on)
	}
	if lacking > 0 {
		s.retry(op)
		pages, lacking = s.take(n, on)
	}
	if lacking == 0 {
		return pages, 0, nil
	}
	more, err := s.create(op, lacking, true)
	if err != nil {
		return nil, 0, err
	}
	if pages, lacking = s.take(n-lacking, on); lacking > 0 {
		panic("pages: a free page went while no other change ran")
	}
	return append(pages, more...), len(more), nil
}

// passedPlaces returns the places of free pages that the GPU has passed.
func (s *Source) passedPlaces(pages []*page) (all []*place) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range pages {
		for _, at := range p.places {
			if at.passed() {
				all = append(all, at)
			}
		}
	}
	return all
}

// mapRun maps pages side by side. After an error it returns those places that could not be
// undone, which are stuck.
func (r *Range) mapRun(op string, first int, pages []*page) (made []*place, err error) {
	s := r.source
	if r.null != nil {
		if err := r.uncover(op, first, len(pages)); err != nil {
			return nil, err
		}
	}
	handles := make([]*phys.Handle, len(pages))
	for i, p := range pages {
		handles[i] = p.h
		if len(p.places) > 0 {
			p.h.Retain() // else the page's own count goes to the mapping
		}
	}
	err = r.res.MapRun(op, uint64(first)*s.Page, handles, r.access)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, p := range pages {
		// An earlier failure may have left another page there.
		stuck := err != nil && r.places.at(first+i) == nil && r.res.Left(uint64(first+i)*s.Page, s.Page) > 0
		if err == nil || stuck {
			at := &place{in: r, at: first + i, page: p, stuck: stuck}
			if made = append(made, at); stuck {
				s.stuck = append(s.stuck, at)
			}
			r.places.set(at.at, at)
			p.places = append(p.places, at)
		}
		if err != nil && len(p.places) > 0 {
			p.h.Release() // the mappings have counts of their own
		}
	}
	if err != nil && len(made) == 0 && r.null != nil {
		if left := r.cover(op, first, len(pages)); left != nil {
			err = fmt.Errorf("%w (and undoing it failed, so that the null page does not lie under these pages: %w)", err, left)
		}
	}
	return made, err
}

// begin makes places usable once their pages are there, and zeroed if the source says so.
func (r *Range) begin(op string, on *cuda.Stream, at []int) error {
	begun := r.started(at)
	for first, n := range runs(begun) {
		r.watched(first, n, true)
	}
	var err error
	if r.source.Zero {
		on, err = r.zero(op, on, begun)
	}
	r.mu.Lock()
	for _, i := range begun {
		r.live.set(i, true)
	}
	r.mu.Unlock()
	if err != nil {
		// The stream may write there yet.
		return errors.Join(err, r.free(op, begun, r.source.lanes(core.StreamOf(on))))
	}
	return nil
}

// started returns those of the places that are not usable yet.
func (r *Range) started(at []int) (begun []int) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, i := range at {
		if !r.live.has(i) {
			begun = append(begun, i)
		}
	}
	return begun
}

// zero zeroes places on a stream, or on the device's own and waits, and returns the stream.
func (r *Range) zero(op string, on *cuda.Stream, at []int) (used *cuda.Stream, err error) {
	if used = on; on == nil {
		if used, err = r.dev.Transfer(); err != nil {
			return nil, err
		}
	}
	for first, n := range runs(at) {
		if err := used.Memset(cuda.Ptr(r.Base())+cuda.Ptr(first)*cuda.Ptr(r.Page()), 0, n*int(r.Page())); err != nil {
			return used, fmt.Errorf("%s: zeroing pages: %w", op, err)
		}
	}
	if on == nil {
		return used, used.Synchronize()
	}
	return used, nil
}

// runs iterates over the longest runs of following places: the first of each, and how many.
func runs(at []int) iter.Seq2[int, int] {
	return func(yield func(first, n int) bool) {
		for len(at) > 0 {
			n := 1
			for n < len(at) && at[n] == at[n-1]+1 {
				n++
			}
			if !yield(at[0], n) {
				return
			}
			at = at[n:]
		}
	}
}

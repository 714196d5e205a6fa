// Package pages implements ranges of addresses with holes, and the sources of the pages that
// are mapped into them: physical memory of one size, which is recycled when the GPU has passed
// its last use. vmm.Sparse and vmm.Pages stand on it; users never import it.
package pages

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Source makes pages of one size for the ranges of a device, and recycles them.
type Source struct {
	core.Object
	Options
	Closer life.Closer
	// ending is how many pages of a Replace that failed are to come back.
	ending atomic.Int64
	// wanting is how many changes have the budget make room.
	wanting atomic.Int64
	// Account pays for the pages; nil for none.
	Account *budget.Account
	key     int // of the lanes, in the locals of their streams

	// turn is held over a change of any range of the source, with its driver calls, and over
	// no wait for the GPU.
	turn lock.Mutex[lock.Long]

	// mu guards what follows, and all pages and places.
	mu           lock.Mutex[lock.Pages]
	ranges       map[*Range]struct{}
	known        []*lane // streams
	stock, ready list
	// moved are old places whose page is in use elsewhere, and stuck those that the driver did
	// not unmap.
	moved, stuck []*place
	used         int // pages
	held         int // pages, see holding
	floor        int // pages that upkeep keeps
	stats        Stats

	upkeep upkeep
}

// Options are what a Source is made with.
type Options struct {
	// Memory and Page are the properties and the size of a page.
	Memory driver.AllocationProp
	Page   uint64
	// Chosen is the granularity that was asked for.
	Chosen memspec.Granularity
	// Zero: pages are zeroed when they are mapped.
	Zero bool
	// Low, High and Idle are how many free pages there are to be: see vmm.PagesOptions.
	Low, High int
	Idle      time.Duration
	// Remaining returns how many bytes of memory are left for pages, whatever the budget says.
	Remaining func(op string) (uint64, error)
	// Make creates n pages, or none. If it is not to be patient it calls the driver once for
	// each, and asks no one for memory.
	Make func(op string, s *Source, n int, patient bool) ([]*phys.Handle, error)
}

// Stats count the pages of a source.
type Stats struct {
	// Pages are all that it has, Used those that ranges use, and Waiting those of the others
	// whose last work the GPU has not passed, as far as is known.
	Pages, Used, Waiting int
	// Made counts pages that were created, Returned those that were given back to the driver,
	// Recycled those that went from one place to another, and Reused those that went into use
	// again where they were.
	Made, Returned, Recycled, Reused int
}

// NewSource makes a source without pages. It gives memory back when the System lacks some, or
// the budget, which may be nil.
func NewSource(sys *core.System, o Options, within *budget.Budget, l life.Label) *Source {
	s := &Source{Options: o, key: sys.NewStreamKey(), ranges: map[*Range]struct{}{}}
	s.Account = within.Account(life.KindPages, l, s.InUse)
	s.SetLabel(l)
	sys.Track(s, life.KindPages, 0)
	s.keep(within)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noticeLocked()
	return s
}

// Stats returns the source's numbers.
func (s *Source) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.Used, st.Waiting = s.used, s.waitingLocked()
	return st
}

// waitingLocked returns how many free pages wait for the GPU, as far as is known.
func (s *Source) waitingLocked() (n int) {
	for _, l := range s.known {
		n += l.queue.n
	}
	return n
}

// InUse returns how many bytes ranges use.
func (s *Source) InUse() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return uint64(s.used) * s.Page
}

// take takes n free pages from the lists, for use behind the work of a lane, or of any if it
// is nil. If there are not so many it takes none, and returns how many it lacks. The caller
// holds turn.
func (s *Source) take(n int, on *lane) (taken holding, lacking int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	taken = make(holding, 0, n)
	from := func(l *list, may func(p *page) bool) {
		for p := l.head; p != nil && len(taken) < n; {
			next := p.next
			if may(p) {
				taken = append(taken, p)
			}
			p = next
		}
	}
	from(&s.stock, (*page).movable)
	from(&s.ready, (*page).movable)
	if on != nil {
		from(&on.queue, func(p *page) bool { return p.movable() && p.waitsFor(on) == nil })
	}
	if len(taken) < n {
		return nil, n - len(taken)
	}
	for _, p := range taken {
		s.holdLocked(p)
	}
	return taken, 0
}

// movable reports whether the page may leave its places: not those of a range with a null page.
func (p *page) movable() bool {
	return !slices.ContainsFunc(p.places, func(at *place) bool { return at.in.null != nil })
}

// hasMovable reports whether n pages are free for all, and may leave their places.
func (s *Source) hasMovable(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range []*list{&s.stock, &s.ready} {
		for p := l.head; p != nil && n > 0; p = p.next {
			if p.movable() {
				n--
			}
		}
	}
	return n <= 0
}

// create makes n pages. The caller holds turn.
func (s *Source) create(op string, n int, patient bool) (holding, error) {
	if n == 0 {
		return nil, nil
	}
	handles, err := s.Make(op, s, n, patient)
	if err != nil {
		return nil, err
	}
	made := make(holding, 0, n)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range handles {
		h.Recycle() // so that it is never exported: other owners' bytes are in it
		made.addLocked(s, &page{h: h})
	}
	s.stats.Made += n
	s.countLocked(n)
	return made, nil
}

// countLocked counts pages that were made, or, if n is negative, given back.
func (s *Source) countLocked(n int) {
	s.stats.Pages += n
	if n < 0 {
		s.floor = min(s.floor, s.stats.Pages) // what a Trim gave back is not kept
	}
	s.SetBytes(uint64(s.stats.Pages) * s.Page)
}

// unmap unmaps places that the GPU has passed, in runs. It goes forward: a run that the driver
// refuses is tried again place by place, and those that it refuses again are stuck. Pages that
// are mapped nowhere then have a count of their own. Places that are gone already are no
// error. The caller holds turn.
func (s *Source) unmap(op string, places []*place) (err error) {
	places = slices.DeleteFunc(places, func(at *place) bool { return at.in.places.at(at.at) != at })
	slices.SortFunc(places, func(a, b *place) int {
		return cmp.Or(cmp.Compare(a.in.Base(), b.in.Base()), cmp.Compare(a.at, b.at))
	})
	places = slices.Compact(places)
	for len(places) > 0 {
		n := 1
		for n < len(places) && places[n].in == places[0].in && places[n].at == places[n-1].at+1 && !places[n].stuck && !places[0].stuck {
			n++
		}
		run := places[:n]
		places = places[n:]
		r := run[0].in
		if s.unmapRun(op, run) == nil {
			err = errors.Join(err, r.coverPlaces(op, run[0].at, n))
			continue
		}
		for i, at := range run {
			if failed := s.unmapRun(op, run[i:i+1]); failed != nil {
				err = errors.Join(err, failed)
			} else {
				err = errors.Join(err, r.coverPlaces(op, at.at, 1))
			}
		}
	}
	return err
}

// unmapRun unmaps adjacent places of one range.
func (s *Source) unmapRun(op string, run []*place) error {
	r := run[0].in
	for _, at := range run {
		at.page.h.Retain()
	}
	err := r.res.UnmapRun(op, uint64(run[0].at)*s.Page, uint64(len(run))*s.Page)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, at := range run {
		p := at.page
		switch {
		case err == nil:
			at.gone()
		case !at.stuck && len(run) == 1: // else it is tried again alone
			at.stuck = true
			s.stuck = append(s.stuck, at)
			p.remove() // freed meanwhile, without turn
		}
		if err != nil || len(p.places) > 0 {
			p.h.Release() // a mapping has another count
		}
	}
	return err
}

// gone takes a place that was unmapped out of its range and its page. The caller holds mu.
func (p *place) gone() {
	p.page.places = slices.DeleteFunc(p.page.places, func(o *place) bool { return o == p })
	p.in.places.set(p.at, nil)
	p.after = nil
}

// retry tries to unmap again what is stuck, and files what is free then. The caller holds turn.
func (s *Source) retry(op string) {
	s.mu.Lock()
	stuck := s.stuck
	s.stuck = nil
	s.mu.Unlock()
	for _, at := range stuck {
		if at.in.places.at(at.at) == at && !at.live && (at.in.null != nil || s.unmapRun(op, []*place{at}) != nil) {
			s.mu.Lock()
			s.stuck = append(s.stuck, at)
			s.mu.Unlock()
		}
	}
	s.refile(op, pagesOf(stuck))
}

// crowded reports whether there are so many old places that a change is to ask whether the GPU has
// passed them. Pages that move on within a stream leave one each time, and nothing else asks. Some
// are worth their address: a page that comes back to one needs no driver call.
func (s *Source) crowded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.moved) > 64+4*s.stats.Pages
}

// clean unmaps old places whose page is in use elsewhere and that the GPU has passed, at most
// so many, the oldest first. The caller holds turn, and wants something else: what fails is
// stuck, and logged.
func (s *Source) clean(op string, most int) {
	s.mu.Lock()
	var passed []*place
	for len(s.moved) > 0 && len(passed) < most {
		at := s.moved[0]
		switch {
		case at.in.places.at(at.at) != at || at.live || at.page.uses == 0 || at.stuck || at.in.null != nil:
			// It was unmapped, or is in use again, or the page is on a list, or its range does it.
		case at.passed():
			passed = append(passed, at)
		default:
			most = 0 // what moved later waits for later work
			continue
		}
		at.moved = false
		s.moved = s.moved[1:]
	}
	s.mu.Unlock()
	if err := s.unmap(op, passed); err != nil {
		s.System().Config.Log.Error("cuvmm: an old place of a page could not be unmapped", "error", err)
	}
}

// Trim gives free pages that the GPU has passed back to the driver: at least need bytes, if
// there are so many. It waits for nothing but a change of a range that runs.
func (s *Source) Trim(op string, need uint64) (freed uint64, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.trim(op, need)
}

// trimBatch is how many pages a trim unmaps and releases at a time.
const trimBatch = 64

func (s *Source) trim(op string, need uint64) (freed uint64, err error) {
	s.advance()
	s.retry(op)
	s.clean(op, math.MaxInt)
	for freed < need && err == nil {
		h := s.takePassed(int(min((need-freed-1)/s.Page+1, trimBatch)))
		if len(h) == 0 {
			break
		}
		var n int
		n, err = s.giveBack(op, h)
		freed += uint64(n) * s.Page
	}
	return freed, err
}

// takePassed takes up to n free pages that the GPU has passed from the lists.
func (s *Source) takePassed(n int) (h holding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range []*list{&s.stock, &s.ready} {
		for p := l.head; p != nil && len(h) < n; {
			next := p.next
			if p.movable() {
				h.addLocked(s, p)
			}
			p = next
		}
	}
	return h
}

// giveBack unmaps free pages that the GPU has passed, and releases them. It returns how many
// it has released.
func (s *Source) giveBack(op string, h holding) (n int, err error) {
	err = s.unmap(op, placesOf(h))
	rest, failed := s.release(op, h)
	s.end(op, rest)
	return len(h) - len(rest), errors.Join(err, failed)
}

func pagesOf(places []*place) (all []*page) {
	for _, p := range places {
		all = append(all, p.page)
	}
	return all
}

func placesOf(pages []*page) (all []*place) {
	for _, p := range pages {
		all = append(all, p.places...)
	}
	return all
}

// Close gives all pages back. While a range uses the source it returns ErrInUse. wait says
// whether it may wait for the reclaimer; else it returns life.ErrAgain.
func (s *Source) Close(op string, wait bool) error {
	s.mu.Lock()
	if n := len(s.ranges); n > 0 && !s.Closer.Closed() {
		s.mu.Unlock()
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Object: s.Called(),
			Asked: errs.Count(n, "sparse range") + " with its pages", Hint: "close the ranges first"})
	}
	s.Closer.Life.Close() // no range is added from now on: NewRange asks under the lock
	s.mu.Unlock()
	for pause := shortestPause; s.ending.Load() > 0; pause = min(2*pause, longestPause) {
		if !wait {
			return life.ErrAgain
		}
		s.System().PollReclaim()
		time.Sleep(pause)
	}
	return s.Closer.Close(func() error { return s.teardown(op) })
}

func (s *Source) teardown(op string) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	if _, err := s.trim(op, ^uint64(0)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.stats.Pages; n > 0 {
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Object: s.Called(),
			Asked: errs.Count(n, "page") + " that could not be unmapped", Hint: "call System.Drain, and close the source again"})
	}
	for _, l := range s.known {
		l.stream.Locals.Set(s.key, nil)
	}
	s.upkeep.Stop()
	s.upkeep.keeper.Remove()
	s.upkeep.remove()
	s.System().FreeStreamKey(s.key)
	s.Untrack()
	return nil
}

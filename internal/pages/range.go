package pages

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Range is a range of addresses with holes. It is cut into places for one page each.
type Range struct {
	core.Object
	Closer life.Closer
	source *Source
	dev    *cuda.Device
	res    *vrange.Range
	access memspec.Access
	// Own says that the source is the range's, and is closed with it.
	Own    bool
	null   *phys.Handle // lies under holes but the bare ones; nil for none
	bare   bits
	status suspend.Status

	// changes is held over a change of the range, with its waits for the GPU, but not over
	// UnmapAfter, which waits for nothing.
	changes lock.Mutex[lock.Long]
	// mu guards live, which copies read. A copy holds it for reading until it is submitted.
	mu   lock.RWMutex[lock.Buffer]
	live bits
	// The source's mu guards places and copied: work of this library on the
	// range, one point a stream.
	places table
	copied place
}

// Span is N pages from First on.
type Span struct{ First, N int }

// NewRange makes a range of what is reserved, which it owns from then on.
func NewRange(op string, s *Source, d *cuda.Device, res *vrange.Range, access memspec.Access, l life.Label) (*Range, error) {
	n := int(res.Size / s.Page)
	r := &Range{source: s, dev: d, res: res, access: access, live: newBits(n), places: newTable(n)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Closer.Closed() {
		return nil, errs.ClosedError(op, s.Title())
	}
	s.ranges[r] = struct{}{}
	r.SetLabel(l)
	s.System().Track(r, life.KindSparse, 0)
	r.watched(0, n, false)
	return r, nil
}

// Page returns the size of a page.
func (r *Range) Page() uint64 { return r.source.Page }

// Elements returns how many elements of a size the range can hold.
func (r *Range) Elements(size int) int { return int(r.res.Size) / size }

// Source returns what the range has its pages from.
func (r *Range) Source() *Source { return r.source }

// fail returns the error of an operation on the range, which it names.
func (r *Range) fail(f errs.Failure) error {
	f.Object = r.Called()
	return errs.New(f)
}

// acquire starts an operation on the range; the caller calls Closer.Release.
func (r *Range) acquire(op string) error {
	if !r.Closer.Acquire() {
		return errs.ClosedError(op, r.Title())
	}
	return nil
}

// Wait waits for all work that could use the range.
func (r *Range) Wait(op string) error { return r.System().WaitDevices(op, r.res.Devices()) }

func (r *Range) errStuck(op string, bytes uint64) error {
	return r.fail(errs.Failure{Op: op, Kind: errs.InUse,
		Asked: fmt.Sprintf("%s, of which %s could not be unmapped", r.What(), errs.Bytes(bytes)), Hint: "call Map or Close, which try again"})
}

// awake refuses an operation while the memory is away, or on its way.
func (r *Range) awake(op string) error {
	if s := r.status.Sleep(); s != nil {
		return s.Error(op)
	}
	return nil
}

// check refuses spans that are not in the range, and returns the pages that they name, in
// order.
func (r *Range) check(op string, spans []Span) (at []int, err error) {
	for _, sp := range spans {
		if sp.First < 0 || sp.N < 0 || sp.N > r.places.n-sp.First {
			return nil, r.fail(errs.Failure{Op: op, Kind: errs.OutOfRange,
				Asked: fmt.Sprintf("%s from page %d on, of %d", errs.Count(sp.N, "page"), sp.First, r.places.n),
				Hint:  "name pages of the range, or reserve a larger one"})
		}
		for i := range sp.N {
			at = append(at, sp.First+i)
		}
	}
	slices.Sort(at)
	return slices.Compact(at), nil
}

// State is what a page of a range is to its user.
type State int

// The states of a page. A shared one is mapped, and elsewhere, too; one that is away is mapped,
// and has no memory until it is resumed.
const (
	Hole State = iota
	Freed
	Mapped
	Shared
	Stuck
	Away
)

// state returns the state of what lies at a place, nil for nothing. The caller holds the source's
// mu.
func (p *place) state() State {
	switch {
	case p == nil:
		return Hole
	case p.stuck:
		return Stuck
	case !p.live:
		return Freed
	case p.page.h.Away():
		return Away
	case p.page.uses > 1:
		return Shared
	}
	return Mapped
}

// States returns the state of each page.
func (r *Range) States() []State {
	r.source.mu.Lock()
	defer r.source.mu.Unlock()
	all := make([]State, r.places.n)
	for i, p := range r.places.all() {
		all[i] = p.state()
	}
	return all
}

// Numbers are those of a range: its pages, how many are mapped and in use, of which other
// places use some too, how many freed pages lie under holes, and how many could not be
// unmapped.
type Numbers struct{ Pages, Mapped, Shared, Freed, Stuck, Suspended int }

// Numbers returns the range's.
func (r *Range) Numbers() (n Numbers) {
	s := r.source
	s.mu.Lock()
	defer s.mu.Unlock()
	n.Pages = r.places.n
	for _, at := range r.places.all() {
		switch at.state() {
		case Stuck:
			n.Stuck++
		case Freed:
			n.Freed++
		default:
			n.Mapped++
			if at.page.uses > 1 {
				n.Shared++
			}
			if at.page.h.Away() {
				n.Suspended++
			}
		}
	}
	return n
}

// Live returns the spans that are mapped.
func (r *Range) Live() (all []Span) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for i := range r.places.n {
		switch n := len(all); {
		case !r.live.has(i):
		case n > 0 && all[n-1].First+all[n-1].N == i:
			all[n-1].N++
		default:
			all = append(all, Span{i, 1})
		}
	}
	return all
}

// Teardown unmaps everything, which the GPU has passed, and gives the addresses back. wait
// says whether it may wait for a change of another range; else it returns life.ErrAgain.
func (r *Range) Teardown(op string, wait bool) error {
	if err := r.dismantle(op, wait); err != nil || !r.Own {
		return err
	}
	return r.source.Close(op, wait)
}

func (r *Range) dismantle(op string, wait bool) error {
	s := r.source
	if wait {
		s.turn.Lock()
	} else if !s.turn.TryLock() {
		return life.ErrAgain
	}
	defer s.turn.Unlock()
	r.mu.Lock()
	clear(r.live)
	r.mu.Unlock()
	s.mu.Lock()
	var all []*place
	for _, at := range r.places.all() {
		all = append(all, at)
	}
	var pages holding
	for _, at := range all {
		pages.addLocked(s, at.page)
		if at.live {
			at.use(false)
		}
		at.after = nil
	}
	s.mu.Unlock()
	err := s.unmap(op, all)
	s.end(op, pages)
	if err != nil {
		return err
	}
	r.watched(0, r.places.n, true)
	if err := r.uncovered(op); err != nil {
		return err
	}
	if err := r.res.Close(op); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.ranges, r)
	s.mu.Unlock()
	r.status.Closed()
	r.Untrack()
	return nil
}

package pages

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/phys"
)

// page is physical memory of the source's size. The source's mu guards it.
type page struct {
	h *phys.Handle
	// places are where it is mapped, of which uses are live. Each mapping has a count of h;
	// the page has one of its own while it is mapped nowhere.
	places     []*place
	uses       int
	held       bool  // by a change, or for good because it was given back: see holding
	on         *list // nil while it is in use, held or stuck
	prev, next *page
}

// place is where a page is mapped in a range.
type place struct {
	in    *Range
	at    int
	page  *page
	live  bool
	stuck bool
	moved bool    // it is in the source's list
	after []point // of frees here, and of work before them, that have perhaps not passed
}

// point is a moment of a stream.
type point struct {
	lane  *lane
	epoch uint64
}

func (p point) passed() bool { return p.lane.clock.Passed(p.epoch) }

// settle drops the points that have passed, as far as is known.
func (p *place) settle() {
	p.after = slices.DeleteFunc(p.after, point.passed)
}

// add adds a point, in place of an earlier one of its stream.
func (p *place) add(later point) {
	for i, o := range p.after {
		if o.lane == later.lane {
			p.after[i] = later
			return
		}
	}
	p.after = append(p.after, later)
}

// passed reports whether the GPU has passed the frees at the place, as far as is known.
func (p *place) passed() bool {
	p.settle()
	return len(p.after) == 0
}

// waitsFor returns a stream that the page waits for, other than one; nil for none.
func (p *page) waitsFor(but *lane) *lane {
	for _, at := range p.places {
		at.settle()
		for _, o := range at.after {
			if o.lane != but {
				return o.lane
			}
		}
	}
	return nil
}

// stuck reports whether a place of the page could not be unmapped.
func (p *page) stuck() bool {
	return slices.ContainsFunc(p.places, func(at *place) bool { return at.stuck })
}

// use begins or ends the use of a place. The caller files the page if no place uses it.
func (p *place) use(live bool) {
	s := p.in.source
	p.live = live
	before := p.page.uses
	if p.page.uses--; live {
		p.page.uses += 2
	}
	if before == 0 || p.page.uses == 0 {
		s.used += p.page.uses - before
		s.noticeLocked()
	}
	if p.page.uses == 0 {
		return
	}
	for _, at := range p.page.places {
		if !at.live && !at.moved {
			at.moved = true
			s.moved = append(s.moved, at)
		}
	}
}

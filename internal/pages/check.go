package pages

import (
	"fmt"
)

// Check returns an error if pages, places and lists contradict each other, or the driver's
// mappings. It is for tests.
func (s *Source) Check() error {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	listed, err := s.checkLists()
	if err != nil {
		return err
	}
	all := map[*page]bool{}
	for p := range listed {
		all[p] = true
	}
	for r := range s.ranges {
		mappings := 0
		for i, at := range r.places.all() {
			mappings++
			if !at.page.held {
				all[at.page] = true
			}
			if at.in != r || at.at != i {
				return fmt.Errorf("place %d of a range says that it is place %d", i, at.at)
			}
			if r.live.has(i) && !at.live {
				return fmt.Errorf("page %d may be copied, and is not in use", i)
			}
		}
		if have := len(r.res.All()); r.null == nil && have != mappings && r.res.Stuck() == 0 {
			return fmt.Errorf("a range has %d places and %d mappings", mappings, have)
		}
	}
	used := 0
	for p := range all {
		if err := checkPage(p, listed[p]); err != nil {
			return err
		}
		if p.uses > 0 {
			used++
		}
	}
	if used != s.used || len(all)+s.held != s.stats.Pages {
		return fmt.Errorf("%d pages of which %d are used, and %d that a Replace has; the source counts %d and %d", len(all), used, s.held, s.stats.Pages, s.used)
	}
	return nil
}

// checkLists returns the pages on lists.
func (s *Source) checkLists() (map[*page]bool, error) {
	listed := map[*page]bool{}
	lists := []*list{&s.stock, &s.ready}
	for _, l := range s.known {
		lists = append(lists, &l.queue)
		if err := l.clock.Check(); err != nil {
			return nil, err
		}
	}
	for _, l := range lists {
		n := 0
		for p := l.head; p != nil; p = p.next {
			if n++; listed[p] || p.on != l {
				return nil, fmt.Errorf("a page is on two lists")
			}
			listed[p] = true
		}
		if n != l.n {
			return nil, fmt.Errorf("a list has %d pages, and counts %d", n, l.n)
		}
	}
	return listed, nil
}

func checkPage(p *page, listed bool) error {
	uses, counts := 0, int64(len(p.places))
	for _, at := range p.places {
		if at.in.places.at(at.at) != at || at.page != p {
			return fmt.Errorf("a page has place %d, whose range does not", at.at)
		}
		if at.live {
			uses++
		}
	}
	if counts == 0 {
		counts = 1
	}
	switch {
	case uses != p.uses:
		return fmt.Errorf("a page has %d live places, and counts %d", uses, p.uses)
	case listed != (uses == 0 && !p.stuck()):
		return fmt.Errorf("a page with %d live places is on a list: %v", uses, listed)
	case !p.h.Away() && p.h.Owners() != counts:
		return fmt.Errorf("a page with %d places has %d counts", len(p.places), p.h.Owners())
	}
	return nil
}

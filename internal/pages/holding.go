package pages

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// holding are pages that one change has. While it has them they are on no list: what is freed
// meanwhile, without turn, is filed when the change ends, and no other change uses or releases
// them. A page is in a holding once, however many places it has.
type holding []*page

// addLocked adds a page, unless a change holds it already. The caller holds mu.
func (h *holding) addLocked(s *Source, p *page) {
	if !p.held {
		s.holdLocked(p)
		*h = append(*h, p)
	}
}

func (s *Source) holdLocked(p *page) {
	p.remove()
	p.held = true
	s.held++
}

// end ends a change: the pages that no place uses go to their lists, but those whose memory is
// away, or on a lost device, back to the driver.
func (s *Source) end(op string, h holding) {
	s.mu.Lock()
	gone := s.endLocked(h)
	s.mu.Unlock()
	_, _ = s.release(op, gone) // what is refused is a leftover
}

// endLocked is end, and returns what the caller is to release without mu.
func (s *Source) endLocked(h holding) (gone holding) {
	for _, p := range h {
		if p.uses == 0 && len(p.places) == 0 && (p.h.Away() || p.h.Lost() != driver.Success) {
			gone = append(gone, p)
			continue
		}
		p.held = false
		s.held--
		s.fileLocked(p)
	}
	return gone
}

// refile files pages again whose places have changed, but those that a change holds.
func (s *Source) refile(op string, pages []*page) {
	var h holding
	s.mu.Lock()
	for _, p := range pages {
		h.addLocked(s, p)
	}
	s.mu.Unlock()
	s.end(op, h)
}

// fileLocked puts a free page on the list that it belongs to.
func (s *Source) fileLocked(p *page) {
	switch l := p.waitsFor(nil); {
	case p.held, p.uses > 0, p.on != nil, p.stuck():
	case l != nil:
		l.queue.push(p)
	case len(p.places) > 0:
		s.ready.push(p)
	default:
		s.stock.push(p)
	}
}

// release gives those pages back to the driver that are mapped nowhere, and returns the others.
// What the driver refuses is one of the System's leftovers. The caller holds turn.
func (s *Source) release(op string, h holding) (rest holding, err error) {
	for _, p := range h {
		if len(p.places) > 0 {
			rest = append(rest, p)
			continue
		}
		err = errors.Join(err, p.h.Let(op))
	}
	n := len(h) - len(rest)
	if n == 0 {
		return rest, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held -= n
	s.stats.Returned += n
	s.countLocked(-n)
	return rest, err
}

package pages

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/epoch"
)

// lane is a stream as a source knows it: its epochs, and the free pages that wait for it.
type lane struct {
	source *Source
	stream *core.Stream
	clock  epoch.Clock
	queue  list
}

// lane returns that of a stream, nil for no stream, and makes it on first use.
func (s *Source) lane(st *core.Stream) *lane {
	if st == nil {
		return nil
	}
	if l, ok := st.Locals.Get(s.key).(*lane); ok && l.source == s {
		return l
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l, ok := st.Locals.Get(s.key).(*lane); ok && l.source == s {
		return l
	}
	l := &lane{source: s, stream: st}
	l.clock.Init(st, s.System(), epoch.Owner{Locker: &s.mu, Op: "vmm.Pages",
		Lost:   func() bool { return s.System().DeviceLost(core.DevicesOf(s.Memory.Location)...) != driver.Success },
		Passed: func() {},
	}, false)
	st.Locals.Set(s.key, l)
	s.known = append(s.known, l)
	return l
}

func (s *Source) lanes(streams ...*core.Stream) (all []*lane) {
	for _, st := range streams {
		if st != nil {
			all = append(all, s.lane(st))
		}
	}
	return all
}

// touchLocked returns the moment of each stream.
func touchLocked(lanes []*lane) (now []point) {
	for _, l := range lanes {
		now = append(now, point{l, l.clock.Touch()})
	}
	return now
}

// advance queries how far the GPU is on all streams, and files the pages that it has passed.
// It never waits, and reports whether pages wait for any. The caller holds turn.
func (s *Source) advance() (waiting bool) {
	s.mu.Lock()
	lanes := s.known[:len(s.known):len(s.known)]
	s.mu.Unlock()
	for _, l := range lanes {
		l.clock.Advance()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := make([]*lane, 0, len(s.known))
	for _, l := range s.known {
		for p := l.queue.head; p != nil && !p.waits(l); p = l.queue.head {
			p.remove()
			s.fileLocked(p)
		}
		if l.queue.n == 0 && l.stream.Gone() && !l.clock.Behind() {
			l.stream.Locals.Set(s.key, nil)
			continue
		}
		kept = append(kept, l)
		waiting = waiting || l.queue.n > 0
	}
	s.known = kept
	return waiting
}

// waits reports whether the page waits for the stream.
func (p *page) waits(l *lane) bool {
	for _, at := range p.places {
		at.settle()
		for _, o := range at.after {
			if o.lane == l {
				return true
			}
		}
	}
	return false
}

// Advance queries how far the GPU is, and reports whether anything of the source waits for it.
func (s *Source) Advance() (waiting bool) {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.advance()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.known, func(l *lane) bool { return l.clock.Behind() })
}

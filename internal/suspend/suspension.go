package suspend

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Options say what becomes of the bytes.
type Options struct {
	// Keep keeps them in host memory.
	Keep bool
	// Fill, if it is not nil, writes n bytes at an address of the member when its memory is
	// back, and returns when they are there.
	Fill func(ctx context.Context, m Member, at driver.Ptr, n uint64) error
	// After, if it is not nil, is called when the memory has gone.
	After func()
	// Followers is how long followers of the memory may take to unmap it; 0 is as long as they like.
	Followers time.Duration
	// Guard lays scratch memory under what has gone.
	Guard bool
	// Lack makes the error of a creation that the driver refused, or a budget (short): of
	// the handle's bytes, one of the chunks of all bytes.
	Lack func(op string, m Member, h *phys.Handle, all uint64, r driver.Result, short error) error
}

// Suspension is the memory of some members that sleep, and what is kept of it. It is an owner
// until all are awake again or closed.
type Suspension struct {
	core.Object
	sys *core.System
	o   Options
	// Released ends when the memory is back with the driver, and end is called once.
	Released *life.Completion
	end      func(error)
	// asked has all members, as they were named.
	asked []*place
	// turn is received by whoever moves bytes, or gives back what is owed, and sent when that
	// is done. That one alone uses all, which is for the report.
	turn  chan struct{}
	all   []*chunk
	guard Guard
	// flying: work of a Resume that failed may be in flight on memory that is pinned.
	flying atomic.Bool

	mu     lock.Mutex[lock.Leaf]   // guards the rest
	places []*place                // of members that sleep, from the suspension's end on
	chunks map[*phys.Handle]*chunk // that are away, or owed
	blank  map[*phys.Handle]bool   // that came back, or will, without their bytes
	report Report
	ended  bool // nothing is owed any more
	slept  bool // out has ended
	over   bool
}

// newSuspension takes members out of use: from now on no work on their memory is submitted, and all
// that is on it was submitted before. The caller has checked that they are of one System, and
// that each is named once. After an error nothing has changed.
func newSuspension(op string, o Options, members []Member) (*Suspension, error) {
	s := &Suspension{sys: members[0].System(), o: o, turn: make(chan struct{}, 1), chunks: map[*phys.Handle]*chunk{}, blank: map[*phys.Handle]bool{}}
	s.Released, s.end = life.NewCompletion()
	now := time.Now()
	for _, m := range members {
		s.asked = append(s.asked, &place{of: s, m: m, sleep: &core.Sleep{What: m.What(), Since: now}})
	}
	for i, p := range s.asked {
		if err := p.m.Acquire(op); err != nil {
			s.giveUp(s.asked[:i])
			return nil, err
		}
		begun := false
		err := p.m.Begin(op, func() { p.step(begin); begun = true })
		if err == nil {
			err = mayRecall(op, p.m)
		}
		if err != nil {
			if begun {
				p.m.Step(func() { p.step(undone) })
			}
			p.m.Release()
			s.giveUp(s.asked[:i])
			return nil, err
		}
		p.addAddresses()
	}
	s.sys.Track(s, life.KindSuspension, 0)
	return s, nil
}

// addAddresses has work on the member's addresses refused.
func (p *place) addAddresses() {
	for _, a := range p.m.Addresses() {
		p.of.sys.AddSuspended(a.Ptr, a.Bytes, p.sleep)
	}
}

// giveUp lets members go on that began to be suspended.
func (s *Suspension) giveUp(places []*place) {
	for _, p := range places {
		s.sys.RemoveSuspended(p.sleep)
		p.m.Step(func() { p.step(undone) })
		p.m.Release()
	}
	s.Untrack()
}

// locked locks places in the order of their addresses, and calls f.
func locked(places []*place, f func() error) error {
	sorted := slices.SortedFunc(slices.Values(places), func(a, b *place) int { return cmp.Compare(a.m.Base(), b.m.Base()) })
	for _, p := range sorted {
		p.m.Lock()
	}
	defer func() {
		for _, p := range slices.Backward(sorted) {
			p.m.Unlock()
		}
	}()
	return f()
}

// Report returns what became of the memory.
func (s *Suspension) Report() Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.report
}

// prune gives up what is kept for chunks that no member has any more, and ends the Suspension
// when no member sleeps.
func (s *Suspension) prune() {
	s.mu.Lock()
	if !s.slept { // a change that began before runs to its end
		s.mu.Unlock()
		return
	}
	var unused []*chunk
	for h, c := range s.chunks {
		if h.Owners() == 1 && c.owed == nil {
			delete(s.chunks, h)
			unused = append(unused, c)
		}
	}
	s.places = slices.DeleteFunc(s.places, func(p *place) bool { return p.m.Status().in.Load() != p || p.m.Status().gone.Load() })
	over := len(s.places) == 0 && len(s.chunks) == 0 && !s.over
	s.over = s.over || over
	s.mu.Unlock()
	for _, c := range unused {
		c.forget()
		c.h.Release() // its memory is away: no driver call
	}
	if over {
		s.Untrack()
	} else if len(unused) > 0 {
		s.resize()
	}
}

// resize counts the host memory that is kept.
func (s *Suspension) resize() {
	var host uint64
	s.mu.Lock()
	for _, c := range s.chunks {
		if c.kept != nil {
			host += c.bytes()
		}
	}
	s.mu.Unlock()
	s.SetBytes(host)
}

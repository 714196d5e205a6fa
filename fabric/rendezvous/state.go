package rendezvous

import (
	"context"
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/handles/peer"
)

// state is the group's replicated state machine. It depends on the events and on
// their order alone, and every transport delivers one order, so all ranks reach
// the same verdict for a step: complete, or the same error. A sequencer, such as
// the host, runs it as well, to relay only events that count.
type state struct {
	size int
	// step is the open step, and name what its first arrival calls it.
	step  uint64
	name  string
	first int
	// next is, by rank, the step that it arrives at next.
	next    []uint64
	missing int // ranks that have yet to arrive at the open step
	gone    map[int]Event
	// end is the verdict that ended the group, and cause the event that decided it.
	end   *Error
	cause Event
}

func newState(size int) *state {
	return &state{size: size, next: make([]uint64, size), missing: size, gone: map[int]Event{}}
}

// apply enters an event and reports whether it counts. An event that no honest
// rank sends turns into the loss of its rank.
func (s *state) apply(e *Event) bool {
	if s.end != nil {
		return false
	}
	if e.Rank < 0 || e.Rank >= s.size {
		e.Contribution.Close()
		*e = Event{Kind: Lost, Rank: e.Rank, Reason: fmt.Sprintf("an event of rank %d in a group of %d", e.Rank, s.size)}
		s.decide(*e, &Error{kind: peer.ErrProtocol, Reason: e.Reason})
		return true
	}
	if _, gone := s.gone[e.Rank]; gone && e.Kind != Ended {
		return false
	}
	switch e.Kind {
	case Posted:
		if e.Step.Number != s.step || s.next[e.Rank] != s.step {
			s.expel(e, fmt.Sprintf("it arrived at step %d while step %d was open", e.Step.Number, s.step))
			return true
		}
		s.arrive(*e)
	case Failed, Late:
		if e.Step.Number < s.step {
			return false // the step was complete before its rank gave up
		}
		if e.Step.Number > s.step {
			s.expel(e, fmt.Sprintf("it gave up step %d while step %d was open", e.Step.Number, s.step))
			return true
		}
		lost := s.lost()
		switch {
		case e.Kind == Late:
			s.decide(*e, &Error{kind: peer.ErrTimeout, Ranks: s.absent(e.Rank), Reason: e.Reason, Hint: "check whether they run, and what they wait for"})
		case len(lost) > 0:
			// They had arrived, and this rank gave up because of their end.
			s.decide(*e, &Error{kind: peer.ErrGone, Ranks: lost,
				Reason: fmt.Sprintf("%s; so rank %d gave up: %s", s.gone[lost[0]].Reason, e.Rank, e.Reason)})
		default:
			s.decide(*e, &Error{kind: ErrFailed, Ranks: []int{e.Rank}, Reason: e.Reason})
		}
	case Left, Lost:
		s.gone[e.Rank] = *e
		s.settle()
	case Ended:
		s.decide(*e, &Error{kind: peer.ErrGone, Ranks: []int{e.Rank}, Reason: e.Reason})
	}
	return true
}

// arrive counts a rank in at the open step, and opens the next one after the last.
func (s *state) arrive(e Event) {
	if s.missing == s.size {
		s.name, s.first = e.Step.Name, e.Rank
	}
	s.next[e.Rank]++
	s.missing--
	switch {
	case e.Step.Name != s.name:
		both := []int{s.first, e.Rank}
		slices.Sort(both)
		s.decide(e, &Error{kind: ErrDisagree, Ranks: both,
			Reason: fmt.Sprintf("rank %d is at %q, rank %d at %q", s.first, s.name, e.Rank, e.Step.Name),
			Hint:   "all ranks call the same steps in the same order"})
	case s.missing == 0:
		s.step, s.name, s.missing = s.step+1, "", s.size
		s.settle()
	}
}

// expel turns an event into the loss of its rank.
func (s *state) expel(e *Event, reason string) {
	e.Contribution.Close()
	*e = Event{Kind: Lost, Rank: e.Rank, Reason: "it sent what no rank sends: " + reason}
	s.gone[e.Rank] = *e
	s.settle()
}

// settle ends the group if a rank that is gone has not arrived at the open step.
func (s *state) settle() {
	var never []int
	for r := range s.gone {
		if s.next[r] == s.step {
			never = append(never, r)
		}
	}
	if len(never) == 0 {
		return
	}
	slices.Sort(never)
	why := s.gone[never[0]]
	e := &Error{kind: peer.ErrGone, Ranks: never, Reason: why.Reason}
	if why.Kind == Left {
		e.Reason = "left the group before this step"
	}
	s.decide(why, e)
}

func (s *state) decide(cause Event, e *Error) {
	e.Step = Step{Number: s.step, Name: s.name}
	if s.missing == s.size { // then only a rank that gives up can have named it
		e.Step.Name = cause.Step.Name
	}
	s.end, s.cause = e, cause
}

// lost returns the ranks that ended without leaving.
func (s *state) lost() (all []int) {
	for r, e := range s.gone {
		if e.Kind == Lost {
			all = append(all, r)
		}
	}
	slices.Sort(all)
	return all
}

// absent returns the ranks other than one that have yet to arrive at the open step.
func (s *state) absent(but int) (all []int) {
	for r, next := range s.next {
		if next == s.step && r != but {
			all = append(all, r)
		}
	}
	return all
}

// ended is a context that has ended.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

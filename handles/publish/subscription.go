package publish

import (
	"errors"
	"slices"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// subscription is the life of a follower: which versions arrived, which of them is shown,
// and whether more may come. It has no lock, no memory, no connection and no driver: the
// follower tells it what happened, passes it what the fence word reads, and does what it
// returns. It is always in one of seven phases:
//
//	phase       means                                                  word    State     Next, Err  TakeOver
//	following   a publisher's views arrive                             counts  declared  wait, nil  ends the connection
//	inheriting  the same, and TakeOver waits for the connection's end  counts  declared  wait, nil  goes on
//	withdrawn   the publisher announces no more, and finishes the rest counts  Ended     why        ends the connection
//	away        the publisher is gone, and another one may continue    final   Stale     wait, nil  lets none continue
//	ended       nothing more is announced                              final   Ended     why        publishes what is last
//	adopted     the memory is a publication of this process            final   Ended     why        cuda.ErrClosed
//	closed      the follower has left a publisher that goes on         final   Ended     why        cuda.ErrClosed
//
// What leads from one phase to another, and what happens beside it. Where there is no phase
// the event changes nothing: the follower leaves a publisher whose accept comes too late.
//
//	event     comes when                           following   inheriting  withdrawn  away       ended
//	withdraw  the last view came, on a connection  withdrawn   withdrawn
//	          that lives; nothing more is mapped
//	lose      the connection ended, and another    away        ended       ended
//	          publisher may continue: cut off
//	end       none will, or a wait reached its     ended       ended       ended      ended
//	          limit: cut off
//	close     the follower closes, which ends its  closed      closed      ended
//	          waits: cut off
//	accept    another publisher accepts: renumber                                     following
//	inherit   TakeOver begins                      inheriting                         ended
//	adopt     TakeOver has published the memory                                                  adopted
//
//	cut off   from now on only what the publisher completed counts, and is shown: the word's
//	          last value says what that is. The follower ends the waits for the word.
//	renumber  what is complete stays so, whatever the new publisher's word reads
//
// The events of versions (declare, arrive, refuse, takeBack, show) lead to no other phase.
// Where the word is final, a version that is not complete never will be, and arrive forgets it.
// A new state is a row of the phases and a column of the events: one of rules, and one of
// transitions.
//
// A version that the publisher wants to rewrite (the intent word has reached it) is not shown
// any more; one that was shown before stays shown while the publisher lives, which waits for
// its readers. A publisher that ends, or withdraws, leaves no version complete that the flux
// word has reached, and one that ends before the work of what was shown is done leaves that
// unfinished:
//
//	unfinished  means                                          leaves it by
//	intact      what Next showed is shown                      cut off or withdraw, if less is complete: untold
//	untold      less is shown, and Err matches ErrUnfinished   next, unless nothing more is shown: told
//	told        the same, and a Next has returned it           show: intact
//
// What Next does, in this order:
//
//	untold, and more may be shown    returns ErrUnfinished
//	a version was refused            returns the reason, once; what is shown and was rewritten
//	                                 since is shown no longer
//	a version is pending, and not    orders the streams behind it, and shows it if it still stands
//	to be rewritten
//	nothing more is announced, and   returns why
//	nothing more is mapped
//	otherwise                        waits for the next event
type subscription struct {
	phase      phase
	unfinished unfinished
	said       State // what the publisher declared last; Stale until another one declares
	why        error // the reason of the last withdraw, lose, end or close
	// completed is the last generation that the publisher completed, once its word no
	// longer counts.
	completed uint64
	// flux and cut are the last values of the publisher's words of that name, and torn is the last version that
	// arrived and that flux has reached, or that will never be complete: unless a later one is, its elements may be a mixture.
	flux, cut uint64
	torn      version
	// spoiled is the last generation of which nothing can be proven, because its memory
	// belonged to another publication.
	spoiled uint64
	drained bool // nothing further is mapped
	// away: the publisher has suspended the memory, and nothing is mapped until it shows it again.
	away bool

	// pending is the last version that arrived, unless it was shown; its generation is 0 if
	// there is none. refusal is why it cannot be shown.
	pending version
	refusal error
	// shown are the versions that Next showed: the last, and those before it back to one
	// that is complete.
	shown []version
	// received are the versions that arrived, back to the last that is complete. Of those up
	// to generation taken something was taken back since, or the publisher changed: they are
	// not shown by themselves any more. cuts counts how often that happened.
	received []version
	taken    uint64
	cuts     int
}

// version is a generation as a follower shows it. Its work is done when the word has reached
// ordered, which is 0 for a version that an earlier publisher completed.
type version struct {
	generation, ordered uint64
	length              int
}

// candidate is a version that Next is about to show, and how often something had been taken
// back before.
type candidate struct {
	version
	cuts int
}

// phase is a row of the table at subscription. 0 is none.
type phase uint8

const (
	phaseFollowing phase = iota + 1
	phaseInheriting
	phaseWithdrawn
	phaseAway
	phaseEnded
	phaseAdopted
	phaseClosed
	phases
)

// rules are the columns of the phases.
var rules = [phases]struct {
	state     State // 0: what the publisher declared
	counts    bool  // the publisher's word tells what is complete
	ends      bool  // Next and Err return why
	published bool  // a process publishes the memory
}{
	phaseFollowing:  {counts: true, published: true},
	phaseInheriting: {counts: true, published: true},
	phaseWithdrawn:  {counts: true, state: Ended, ends: true},
	phaseAway:       {state: Stale},
	phaseEnded:      {state: Ended, ends: true},
	phaseAdopted:    {state: Ended, ends: true, published: true},
	phaseClosed:     {state: Ended, ends: true, published: true},
}

// lifeEvent is a row of the events at subscription.
type lifeEvent uint8

const (
	eventWithdraw lifeEvent = iota
	eventLose
	eventEnd
	eventClose
	eventAccept
	eventInherit
	eventAdopt
	events
)

var transitions = [phases][events]phase{
	phaseFollowing:  {eventWithdraw: phaseWithdrawn, eventLose: phaseAway, eventEnd: phaseEnded, eventClose: phaseClosed, eventInherit: phaseInheriting},
	phaseInheriting: {eventWithdraw: phaseWithdrawn, eventLose: phaseEnded, eventEnd: phaseEnded, eventClose: phaseClosed},
	phaseWithdrawn:  {eventLose: phaseEnded, eventEnd: phaseEnded, eventClose: phaseEnded},
	phaseAway:       {eventEnd: phaseEnded, eventAccept: phaseFollowing, eventInherit: phaseEnded},
	phaseEnded:      {eventAdopt: phaseAdopted},
}

// unfinished is a row of the second table at subscription.
type unfinished uint8

const (
	intact unfinished = iota
	untold
	told
)

func newSubscription() subscription {
	return subscription{phase: phaseFollowing, said: Live, shown: []version{{}}}
}

// move carries an event out, and reports whether the table has a phase for it.
func (s *subscription) move(e lifeEvent) bool {
	to := transitions[s.phase][e]
	if to == 0 {
		return false
	}
	s.phase = to
	return true
}

// seen is what the publisher's words in the follower's slot read.
type seen struct{ complete, intent, flux, cut uint64 }

// withdraw notes that the publisher announces no more. What it was rewriting is complete in
// no version.
func (s *subscription) withdraw(why error, w seen) {
	if !s.move(eventWithdraw) {
		return
	}
	s.why, s.drained = why, true
	s.keepBeyond(w)
}

// lose notes that the publisher is gone, and another one may continue. w are the last values
// of its words, if they count.
func (s *subscription) lose(why error, w seen) { s.cutOff(eventLose, why, w) }

// end notes that nothing more is announced. w are the last values of the publisher's words,
// if they count.
func (s *subscription) end(why error, w seen) { s.cutOff(eventEnd, why, w) }

// close notes that the follower closes. w are the last values of the publisher's words, if
// they count: work that its streams begin from now on may run before the publisher's.
func (s *subscription) close(why error, w seen) { s.cutOff(eventClose, why, w) }

func (s *subscription) cutOff(e lifeEvent, why error, w seen) {
	counted := s.counts()
	if !s.move(e) {
		return
	}
	s.why = why
	if !counted {
		return
	}
	s.completed = w.complete
	s.keepBeyond(w)
	word := w.complete
	last := len(s.shown) - 1
	for last > 0 && !s.complete(s.shown[last], word) {
		last--
		s.unfinished = untold
	}
	s.shown = s.shown[:last+1]
	if v := s.last(); !s.complete(v, word) {
		s.torn = v
	}
	s.received = slices.DeleteFunc(s.received, func(v version) bool { return !s.complete(v, word) })
	nothing := s.pending.generation == 0 || !s.complete(s.pending, word)
	if s.refusal == nil && nothing && !s.away {
		s.pending = version{}
		if v := s.last(); v.generation > s.current().generation { // even if Next skipped it for one that is not complete
			s.pending = v
		}
	}
}

// keepBeyond forgets the versions that the publisher began to rewrite.
func (s *subscription) keepBeyond(w seen) {
	s.flux, s.cut = w.flux, w.cut
	torn := func(v version) bool { return v.generation > 0 && v.generation <= w.flux }
	for _, v := range s.received {
		if torn(v) {
			s.torn = v
		}
	}
	if torn(s.current()) {
		s.unfinished = untold
	}
	if torn(s.shown[0]) { // the complete one, to which a follower returns if the others are not
		s.shown[0] = version{}
	}
	s.shown = slices.DeleteFunc(s.shown, torn)
	s.received = slices.DeleteFunc(s.received, torn)
	if s.refusal == nil && torn(s.pending) {
		s.pending = version{}
	}
}

// accept notes that another publisher accepts the follower, of the same publication or of
// another one of its name. It returns false if the follower does not follow it any more.
func (s *subscription) accept(same bool) bool {
	if !s.move(eventAccept) {
		return false
	}
	if !same {
		s.spoiled = max(s.spoiled, s.last().generation, s.torn.generation)
	}
	s.flux, s.cut, s.torn = 0, 0, version{}
	if !reached(s.completed, s.pending.ordered) { // it was refused: of the others none is left
		s.pending, s.refusal = version{}, nil
	}
	s.said, s.why, s.completed = Stale, nil, 0
	s.shown = append(s.shown[:0], s.current())
	for _, all := range [][]version{s.shown, s.received} {
		for i := range all {
			all[i].ordered = 0
		}
	}
	s.pending.ordered = 0
	s.cutReceived()
	return true
}

// spoil notes that the next publisher may be rewriting what is shown, and did not wait for
// who reads it.
func (s *subscription) spoil() {
	s.shown, s.unfinished = append(s.shown[:0], version{}), untold
}

// inherit notes that TakeOver has begun: no other publisher is accepted any more.
func (s *subscription) inherit() { s.move(eventInherit) }

// heritage returns what TakeOver goes on with, and whether it may. w are the last values of
// the words of a publisher whose process has ended: it may have begun to rewrite, or gone on without
// the follower, after the connection's end.
func (s *subscription) heritage(w seen) (from legacy, may bool) {
	from = legacy{last: s.last(), flux: max(s.flux, w.flux), cut: max(s.cut, w.cut)}
	from.torn = w.cut == cutLeft || from.last.generation > 0 && from.last.generation <= w.flux
	from.away = s.away
	if from.last.generation == 0 && s.torn.generation > 0 {
		from.last, from.torn = s.torn, true
	}
	if from.cut > lastGeneration {
		from.cut = from.last.generation
	}
	return from, transitions[s.phase][eventAdopt] != 0
}

// adopt notes that this process publishes the memory.
func (s *subscription) adopt() {
	if s.move(eventAdopt) {
		s.why = errs.PeerClosed(opFollower, "follower")
	}
}

// drain notes that nothing further is mapped.
func (s *subscription) drain() { s.drained = true }

// declare notes the state that the publisher declares with a view.
func (s *subscription) declare(state State) {
	if s.counts() {
		s.said = state
	}
}

// suspend notes that the publisher has suspended the memory. There is nothing to show: what had
// arrived was taken back.
func (s *subscription) suspend() {
	s.declare(Suspended)
	s.away, s.pending, s.refusal = true, version{}, nil
}

// mostReceived bounds the versions that are kept of a publisher whose work is stalled.
const mostReceived = 1024

// arrive notes that a version is mapped. One that never will be complete is not shown.
func (s *subscription) arrive(v version, word uint64) {
	if !s.counts() && !s.complete(v, word) {
		s.torn = v
		return
	}
	s.received = s.sinceComplete(append(s.received, v), word)
	if len(s.received) > mostReceived {
		s.received = slices.Delete(s.received, 1, 2)
	}
	s.pending, s.refusal, s.away = v, nil, false
}

// refuse notes why a version cannot be shown.
func (s *subscription) refuse(v version, why error) { s.pending, s.refusal = v, why }

// takeBack notes that the publisher takes back what is behind the first length elements.
func (s *subscription) takeBack(length int) {
	for _, all := range [][]version{s.shown, s.received} {
		for i := range all {
			all[i].length = min(all[i].length, length)
		}
	}
	s.pending.length = min(s.pending.length, length)
	s.cutReceived()
}

// cutReceived notes that no version so far is shown by itself any more.
func (s *subscription) cutReceived() {
	s.cuts++
	if n := len(s.received); n > 0 {
		s.taken = s.received[n-1].generation
	}
}

// next is what a Next does now: it shows a version, unless its generation is 0, or returns
// an error, or waits. host says that it waits for the version's work itself.
func (s *subscription) next(w seen, host bool) (candidate, error) {
	ends := rules[s.phase].ends
	intent := w.intent
	if !s.counts() {
		intent = 0 // what it began to rewrite is forgotten
	}
	none := s.pending.generation <= intent
	switch {
	case s.unfinished == untold && !(none && ends):
		s.unfinished = told
		return candidate{}, s.err()
	case s.refusal != nil:
		why := s.refusal
		s.pending, s.refusal = version{}, nil
		s.dropRewritten(w)
		return candidate{}, why
	case none && ends && s.drained:
		return candidate{}, s.err()
	case none:
		return candidate{}, nil
	case host:
		return candidate{s.nextReady(w.complete, intent), s.cuts}, nil
	}
	return candidate{s.pending, s.cuts}, nil
}

// dropRewritten shows nothing, if what is shown was rewritten: a follower that cannot show what it
// became must not go on with the mixture.
func (s *subscription) dropRewritten(w seen) {
	if s.counts() && s.current().generation <= w.flux {
		s.shown = append(s.shown[:0], version{})
	}
}

// nextReady returns what a Next that waits on the host shows: what is pending, unless its work
// is not done. Then it is, of what nobody wants to rewrite, the newest version that arrived and is complete, otherwise the
// oldest that is not shown, which is complete first. Waiting for what is pending, a follower
// would show nothing while the publisher's work is always one announcement behind, or for
// ever if the publisher waits for what the follower does with a generation before.
func (s *subscription) nextReady(word, intent uint64) version {
	next := s.pending
	if s.complete(next, word) {
		return next
	}
	behind := max(s.current().generation, s.taken, intent)
	for _, v := range s.received {
		if v.generation > behind && v.generation < s.pending.generation && (next == s.pending || s.complete(v, word)) {
			next = v
		}
	}
	return next
}

// stands reports whether a candidate may be shown, although a newer version has arrived.
func (s *subscription) stands(c candidate) bool {
	if !s.counts() && !s.complete(c.version, 0) {
		return false
	}
	return c.version == s.pending || c.cuts == s.cuts
}

// show shows a candidate, and reports whether it still stands.
func (s *subscription) show(c candidate, word uint64) bool {
	if !s.stands(c) {
		return false
	}
	if s.pending == c.version {
		s.pending = version{}
	}
	s.shown = append(s.sinceComplete(s.shown, word), c.version)
	s.unfinished = intact
	return true
}

// sinceComplete removes the versions before the last that is complete, to which a follower
// returns if its publisher ends now.
func (s *subscription) sinceComplete(all []version, word uint64) []version {
	n := 0
	for n+1 < len(all) && s.complete(all[n+1], word) {
		n++
	}
	return slices.Delete(all, 0, n)
}

// current returns the version that is shown, which is the zero version before the first Next.
func (s *subscription) current() version { return s.shown[len(s.shown)-1] }

// last returns the last version that arrived and is complete, once the word no longer
// counts; the zero version if there is none.
func (s *subscription) last() version {
	if n := len(s.received); n > 0 {
		return s.received[n-1]
	}
	return version{}
}

// state is Follower.State.
func (s *subscription) state() State {
	if is := rules[s.phase].state; is != 0 {
		return is
	}
	return s.said
}

// err is Follower.Err.
func (s *subscription) err() error {
	var why error
	if rules[s.phase].ends {
		why = s.why
	}
	if s.unfinished != intact && !errors.Is(why, ErrExcluded) { // which says it, and for good
		return errs.PeerCause(why, opFollower, ErrUnfinished, "elements that were shown and no longer are", "discard what was computed from them")
	}
	return why
}

// stale reports whether no process publishes the memory at present.
func (s *subscription) stale() bool { return !rules[s.phase].published }

// mayBeIntact reports whether the publisher's words can prove that a generation is intact: it
// was shown, and they count.
func (s *subscription) mayBeIntact(generation uint64) bool {
	return s.counts() && generation > s.spoiled && generation <= s.current().generation
}

// counts reports whether the publisher's word tells what is complete.
func (s *subscription) counts() bool { return rules[s.phase].counts }

// complete reports whether a version's work is done, by the word or by its last value.
func (s *subscription) complete(v version, word uint64) bool {
	if !s.counts() {
		return reached(s.completed, v.ordered) && (v.generation == 0 || v.generation > s.flux)
	}
	return reached(word, v.ordered)
}

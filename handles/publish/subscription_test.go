package publish

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// flags are a follower's life as one would say it without phases.
type flags struct{ counts, ends, heir, adopted, closed, asStale bool }

// apply says what an event changes. It returns whether the reason is the event's.
func (f *flags) apply(e lifeEvent) (reason bool) {
	before := *f
	switch {
	case f.closed: // and nothing changes it any more
		return false
	case e == eventClose && !f.counts:
		return false
	}
	switch e {
	case eventWithdraw:
		f.ends = f.ends || f.counts
		return f.ends != before.ends
	case eventLose:
		f.ends = f.ends || f.counts && f.heir
		f.counts = false
		return before.counts
	case eventEnd:
		f.counts, f.ends = false, true
		return before.counts || !before.ends
	case eventClose:
		f.closed = !f.ends // it has left a publisher that goes on
		f.counts, f.ends = false, true
		return true
	case eventAccept:
		if f.counts = f.counts || !f.ends; f.counts != before.counts {
			f.asStale = true
		}
	case eventInherit:
		f.heir = true
		f.ends = f.ends || !f.counts
	case eventAdopt:
		f.adopted = f.adopted || f.ends && !f.counts
		return f.adopted != before.adopted
	}
	return false
}

// Every sequence of five events leads where the flags say.
func TestEveryPhaseOfAFollower(t *testing.T) {
	reasons := [events]error{}
	for e := range reasons {
		reasons[e] = fmt.Errorf("event %d", e)
	}
	reasons[eventAdopt] = cuda.ErrClosed
	met := map[phase]bool{}
	var walk func(s subscription, f flags, why error, so []lifeEvent)
	walk = func(s subscription, f flags, why error, so []lifeEvent) {
		met[s.phase] = true
		require.Equal(t, f.counts, s.counts(), so)
		_, may := s.heritage(seen{})
		require.Equal(t, f.ends && !f.counts && !f.adopted && !f.closed, may, so)
		switch {
		case f.ends:
			require.ErrorIs(t, s.err(), why, so)
			require.Equal(t, Ended, s.state(), so)
		case !f.counts || f.asStale:
			require.NoError(t, s.err(), so)
			require.Equal(t, Stale, s.state(), so)
		default:
			require.NoError(t, s.err(), so)
			require.Equal(t, Live, s.state(), so)
		}
		s.declare(Suspended)
		require.Equal(t, f.counts && !f.ends, s.state() == Suspended, so)
		c, err := s.next(seen{}, true)
		require.Zero(t, c.generation, so)
		require.Equal(t, f.ends && s.drained, err != nil, so)
		s.drain()
		_, err = s.next(seen{}, true)
		require.Equal(t, f.ends, err != nil, so)
		if len(so) == 5 {
			return
		}
		for e := range events {
			s, f, why := newSubscription(), flags{counts: true}, error(nil)
			for _, e := range append(so[:len(so):len(so)], e) {
				before := f
				reason := f.apply(e)
				switch e {
				case eventWithdraw:
					s.withdraw(reasons[e], seen{})
					require.Equal(t, reason || s.drained, s.drained, "nothing more is mapped")
				case eventLose:
					s.lose(reasons[e], seen{})
				case eventEnd:
					s.end(reasons[e], seen{})
				case eventClose:
					s.close(reasons[e], seen{})
				case eventAccept:
					require.Equal(t, f.counts && !before.counts, s.accept(true))
				case eventInherit:
					s.inherit()
				case eventAdopt:
					s.adopt()
				}
				if reason {
					why = reasons[e]
				}
			}
			walk(s, f, why, append(so[:len(so):len(so)], e))
		}
	}
	walk(newSubscription(), flags{counts: true}, nil, nil)
	require.Len(t, met, int(phases)-1)
}

// modelPublisher is what a follower's publisher announced and finished, and all that the follower
// should remember of it.
type modelPublisher struct {
	s            subscription
	generation   uint64
	word         uint64
	intent, flux uint64 // what it wants to rewrite, and began to
	gone         bool
	arrived      []version // all of them, with what was taken back
	shown        []version
	refused      uint64 // the last generation that was, or that was suspended
	away         bool   // the memory is suspended
	cut          uint64 // the last generation that something was taken back of
	unfinished   bool
	lastLength   int
	drained      bool
	owes         bool // something is being taken back, and its version comes next
	held         candidate
	host         bool
}

// completes reports whether a version is complete: of a publisher that is gone, also not opened
// for rewriting.
func (m *modelPublisher) completes(v version) bool {
	return v.ordered <= m.word && (!m.gone || v.generation == 0 || v.generation > m.flux)
}

// newest returns the last version that is complete.
func (m *modelPublisher) newest(of []version) (v version) {
	for _, o := range of {
		if m.completes(o) {
			v = o
		}
	}
	return v
}

func (m *modelPublisher) current() version { return m.shown[len(m.shown)-1] }

// arrives has a version arrive, which is ordered behind its own generation or an earlier one.
func (m *modelPublisher) arrives(t *rapid.T) {
	m.generation++
	m.owes = false
	v := version{m.generation, m.generation, m.lastLength}
	if n := len(m.arrived); n > 0 && rapid.IntRange(0, 3).Draw(t, "no work") == 0 {
		v.ordered = m.arrived[n-1].ordered
	}
	m.s.declare(Live)
	m.s.arrive(v, m.reads())
	m.arrived = append(m.arrived, v)
	m.away = m.away && !m.s.counts() && !m.completes(v)
}

// reads is what the word reads: its final value, once that does not count.
func (m *modelPublisher) reads() uint64 {
	if !m.s.counts() {
		return release
	}
	return m.word
}

func (m *modelPublisher) announce(t *rapid.T) {
	if m.s.phase == phaseWithdrawn || m.drained {
		return
	}
	if !m.owes {
		m.lastLength += rapid.IntRange(0, 3).Draw(t, "more")
	}
	m.arrives(t)
	if !m.s.counts() {
		m.drained = true // at most one arrives that was on its way when the word ended
	}
}

func (m *modelPublisher) refuse(*rapid.T) {
	if m.s.phase != phaseWithdrawn && !m.drained {
		m.generation++
		m.refused, m.owes = m.generation, false
		m.s.refuse(version{m.generation, m.generation, m.lastLength}, errors.New("refused"))
		m.drained = !m.s.counts()
	}
}

func (m *modelPublisher) shrink(t *rapid.T) {
	if !m.s.counts() || m.s.phase == phaseWithdrawn || m.owes {
		return
	}
	m.takesBack(rapid.IntRange(0, m.lastLength).Draw(t, "length"))
	m.owes = true
}

// suspend takes everything back, and shows no version of that.
func (m *modelPublisher) suspend(t *rapid.T) {
	if !m.s.counts() || m.s.phase == phaseWithdrawn || m.owes {
		return
	}
	m.takesBack(0)
	m.generation++
	m.refused, m.away = m.generation, true
	m.s.suspend()
	require.Equal(t, Suspended, m.s.state())
	require.Zero(t, m.s.pending.generation)
}

func (m *modelPublisher) takesBack(length int) {
	m.lastLength = length
	for _, all := range [][]version{m.arrived, m.shown} {
		for i := range all {
			all[i].length = min(all[i].length, m.lastLength)
		}
	}
	m.cutArrived()
	m.s.takeBack(m.lastLength)
}

func (m *modelPublisher) cutArrived() {
	if n := len(m.arrived); n > 0 {
		m.cut = m.arrived[n-1].generation
	}
}

func (m *modelPublisher) work(t *rapid.T) {
	if m.s.counts() {
		m.word = rapid.Uint64Range(m.word, m.generation).Draw(t, "word")
	}
}

// rewrite begins to rewrite what was announced, or only wants to.
func (m *modelPublisher) rewrite(t *rapid.T) {
	if m.s.counts() && m.s.phase != phaseWithdrawn && !m.owes {
		m.intent = m.generation
		if rapid.Bool().Draw(t, "begins") {
			m.flux = m.intent
		}
	}
}

func (m *modelPublisher) words() seen {
	return seen{complete: m.reads(), intent: m.intent, flux: m.flux}
}

func (m *modelPublisher) cutOff(event func(s *subscription, why error, w seen)) {
	counted := m.s.counts()
	event(&m.s, errors.New("gone"), seen{complete: m.word, intent: m.intent, flux: m.flux})
	if !counted {
		return
	}
	m.gone = true
	if last := m.newest(m.shown); last != m.current() {
		m.unfinished = true
		m.shown = append(m.shown, last)
	}
}

func (m *modelPublisher) withdraw(*rapid.T) {
	before := m.s.phase
	m.s.withdraw(errors.New("withdrawn"), m.words())
	if g := m.current().generation; m.s.phase != before && g > 0 && g <= m.flux {
		m.unfinished, m.shown = true, append(m.shown, version{})
	}
}
func (m *modelPublisher) lose(*rapid.T)    { m.cutOff((*subscription).lose) }
func (m *modelPublisher) end(*rapid.T)     { m.cutOff((*subscription).end) }
func (m *modelPublisher) close(*rapid.T)   { m.cutOff((*subscription).close) }
func (m *modelPublisher) inherit(*rapid.T) { m.s.inherit() }

// accept is another publisher, whose generations are later and whose word reads anything.
func (m *modelPublisher) accept(t *rapid.T) {
	before, was, refusal := m.s.current(), m.s.pending, m.s.refusal
	same := rapid.Bool().Draw(t, "same")
	if !m.s.accept(same) {
		return
	}
	require.Equal(t, refusal != nil && was.ordered <= m.word, m.s.refusal != nil, "the refusal of what never was")
	require.Equal(t, before.length, m.s.current().length)
	require.Equal(t, before.generation, m.s.current().generation)
	old := m.newest(m.arrived)
	m.arrived, m.shown = nil, []version{m.s.current()}
	if old.ordered = 0; old.generation > 0 {
		m.arrived = []version{old}
	}
	m.cutArrived()
	if n := len(m.arrived); !same && n > 0 {
		require.False(t, m.s.mayBeIntact(m.arrived[n-1].generation), "of another publication")
	}
	m.gone = false
	m.generation += rapid.Uint64Range(1, 5).Draw(t, "ahead")
	m.word = rapid.Uint64Range(0, m.generation).Draw(t, "word")
	m.intent = rapid.Uint64Range(0, m.generation).Draw(t, "intent")
	m.flux = rapid.Uint64Range(0, m.intent).Draw(t, "flux")
	m.drained, m.owes = false, false
}

// soonest returns what a Next shows that waits on the host.
func (m *modelPublisher) soonest() version {
	if !m.s.counts() || m.completes(m.s.pending) {
		return m.s.pending
	}
	var unseen []version
	for _, v := range m.arrived {
		if v.generation > max(m.current().generation, m.cut, m.intent) && v.generation < m.s.pending.generation {
			unseen = append(unseen, v)
		}
	}
	if v := m.newest(unseen); v.generation > 0 {
		return v
	}
	return append(unseen, m.s.pending)[0]
}

func (m *modelPublisher) next(t *rapid.T) {
	host := rapid.Bool().Draw(t, "host")
	mayGoOn := !rules[m.s.phase].ends
	unfinished := m.s.unfinished
	c, err := m.s.next(m.words(), host)
	switch {
	case errors.Is(err, ErrUnfinished) && (mayGoOn || m.s.unfinished != unfinished):
		require.True(t, m.unfinished)
		require.Equal(t, untold, unfinished, "once")
		require.Equal(t, told, m.s.unfinished)
	case err != nil && err.Error() == "refused":
		if g := m.current().generation; m.s.counts() && g > 0 && g <= m.flux {
			m.shown = append(m.shown, version{}) // the mixture is shown no longer
		}
	case err != nil:
		require.False(t, mayGoOn)
	case c.generation > 0:
		require.NotEqual(t, untold, unfinished, "a caller takes what was unfinished for a result")
		require.False(t, m.away, "what is suspended is shown")
		require.Greater(t, c.generation, m.current().generation)
		if m.s.counts() {
			require.Greater(t, c.generation, m.intent, "to be rewritten")
		}
		if host {
			require.Equal(t, m.soonest(), c.version)
		} else {
			require.Equal(t, m.s.pending, c.version)
		}
		m.held, m.host = c, host
	}
}

// show is what follows a next, after whatever happened meanwhile. On the host the version is
// complete by then, or the word has ended.
func (m *modelPublisher) show(t *rapid.T) {
	if m.held.generation == 0 || m.host && m.s.counts() && !m.completes(m.held.version) {
		return
	}
	if m.s.counts() && m.held.generation <= m.intent {
		m.held = candidate{} // no hold can begin
		return
	}
	if m.s.show(m.held, m.reads()) {
		require.Greater(t, m.held.generation, m.current().generation)
		m.shown, m.unfinished = append(m.shown, m.held.version), false
		if !m.s.counts() {
			require.True(t, m.completes(m.held.version) || m.held.ordered == 0)
		}
		require.Contains(t, m.arrived, m.held.version, "neither what was taken back is shown, nor what another publisher announced")
	}
	m.held = candidate{}
}

func (m *modelPublisher) read(t *rapid.T) {
	m.next(t)
	m.show(t)
}

func (m *modelPublisher) check(t *rapid.T) {
	require.Equal(t, m.current(), m.s.current())
	require.Equal(t, m.unfinished, errors.Is(m.s.err(), ErrUnfinished))
	if !m.s.counts() {
		require.Equal(t, m.newest(m.arrived), m.s.last(), "what a take-over goes on with")
		from, _ := m.s.heritage(m.words())
		require.Equal(t, m.away, from.away, "a take-over of what is not there")
		require.Equal(t, len(m.arrived) > 0 && m.s.last().generation == 0, from.torn, "a take-over goes on with what may be a mixture")
		require.False(t, m.s.mayBeIntact(m.current().generation))
		for _, all := range [][]version{m.s.shown, m.s.received} {
			for _, v := range all {
				require.True(t, m.completes(v))
			}
		}
	}
}

// Whatever arrives, is taken back, refused and finished, and whoever publishes: a follower
// shows what was announced and not taken back, in its order; what was complete, once the
// publisher is gone; and a take-over goes on with the last that is.
func TestWhatAFollowerShows(t *testing.T) {
	life := func(t *rapid.T) {
		m := &modelPublisher{s: newSubscription(), shown: []version{{}}}
		t.Repeat(map[string]func(*rapid.T){
			"announce": m.announce, "announce more": m.announce, "refuse": m.refuse, "shrink": m.shrink, "shrink again": m.shrink, "suspend": m.suspend, "work": m.work, "rewrite": m.rewrite,
			"withdraw": m.withdraw, "lose": m.lose, "end": m.end, "close": m.close, "inherit": m.inherit, "accept": m.accept,
			"next": m.next, "next again": m.next, "show": m.show, "show again": m.show, "read": m.read, "read again": m.read, "": m.check,
		})
		m.end(t)
		m.s.drain()
		for {
			unfinished := m.s.unfinished
			c, err := m.s.next(m.words(), true)
			if err != nil && err.Error() != "refused" && m.s.unfinished == unfinished {
				break
			}
			if err == nil {
				require.NotZero(t, c.generation, "Next waits for ever")
				m.held = c
				m.show(t)
			}
			m.check(t)
		}
		passed := max(m.refused, m.current().generation) // a Next that fails passes those before
		require.LessOrEqual(t, m.s.last().generation, passed, "what was complete is shown")
	}
	for range 20 { // a life takes microseconds
		rapid.Check(t, life)
	}
}

// A version that ends a rewriting, and is shown while its work is not done, has none before it
// to return to if the publisher ends.
func TestAnUnfinishedVersionBehindARewriting(t *testing.T) {
	for _, grown := range []int{4, 8} {
		s := newSubscription()
		s.arrive(version{generation: 1, ordered: 1, length: 4}, 1)
		require.True(t, s.show(candidate{version: s.pending}, 1))
		s.arrive(version{generation: 2, ordered: 2, length: grown}, 1)
		require.True(t, s.show(candidate{version: s.pending}, 1))
		s.lose(errors.New("gone"), seen{complete: 1, intent: 1, flux: 1})
		require.Zero(t, s.current())
		require.ErrorIs(t, s.err(), ErrUnfinished)
		from, _ := s.heritage(seen{})
		require.True(t, from.torn)
	}
}

// A publisher may see the end of a connection later than its follower, and rewrite meanwhile: what it began then
// is not whole for the next one.
func TestARewritingThatBeganAfterTheConnectionsEnd(t *testing.T) {
	s := newSubscription()
	s.arrive(version{generation: 1, ordered: 1, length: 4}, 1)
	s.lose(errors.New("gone"), seen{complete: 1})
	require.EqualValues(t, 1, s.last().generation)
	from, _ := s.heritage(seen{intent: 1, flux: 1})
	require.True(t, from.torn)
	require.EqualValues(t, 1, from.flux)
	from, _ = s.heritage(seen{cut: 1})
	require.False(t, from.torn)
	require.EqualValues(t, 1, from.cut)
}

// Of a publisher whose work is stalled a bounded number of versions is kept: among them the
// last that is complete, and the last.
func TestWhatIsKeptOfAStalledPublisher(t *testing.T) {
	s := newSubscription()
	for g := uint64(1); g <= 2*mostReceived; g++ {
		s.arrive(version{generation: g, ordered: g}, 1)
		require.LessOrEqual(t, len(s.received), mostReceived)
		require.EqualValues(t, 1, s.received[0].generation)
		require.Equal(t, g, s.received[len(s.received)-1].generation)
	}
	s.end(cuda.ErrClosed, seen{complete: 2*mostReceived - 1})
	require.EqualValues(t, 2*mostReceived-1, s.last().generation)

	s = newSubscription()
	for g := uint64(1); g <= 10; g++ {
		s.arrive(version{generation: g, ordered: g}, g)
		c, err := s.next(seen{complete: g}, true)
		require.NoError(t, err)
		require.True(t, s.show(c, g))
		require.Len(t, s.received, 1, "of one that is not, the last")
		require.LessOrEqual(t, len(s.shown), 2)
	}
}

// What is shown and was rewritten is shown no longer once the follower is told that it cannot
// show what it became.
func TestWhatARefusalLeaves(t *testing.T) {
	for _, flux := range []uint64{0, 1} {
		s := newSubscription()
		s.arrive(version{generation: 1, ordered: 1, length: 4}, 1)
		require.True(t, s.show(candidate{version: s.pending}, 1))
		refused := errors.New("refused")
		s.refuse(version{generation: 2, ordered: 2, length: 8}, refused)
		_, err := s.next(seen{complete: 2, intent: flux, flux: flux}, false)
		require.Equal(t, refused, err)
		require.Equal(t, flux == 0, s.current().generation == 1)
		require.NoError(t, s.err())
		require.Equal(t, flux == 0, s.mayBeIntact(1))
	}
}

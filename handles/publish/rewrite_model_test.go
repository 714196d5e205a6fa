//go:build linux

package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// shared is memory that a publisher rewrites under followers: its words, publication, holds and
// subscriptions are those of the library, step by step, without sockets, goroutines or memory.
type shared struct {
	dev     *cuda.Device
	streams []*cuda.Stream
	page    *sharedpage.Page
	slots   int // that were given out
	p       *Publication
	alive   bool
	// memory is two halves of two parts, each of which reads when it was written; truth is what
	// the generations show.
	memory  [4]int
	written int
	truth   map[uint64][4]int
	// halves are rewritten in turn, and read one by one. inherited: the publisher took over, and
	// must rewrite before it announces.
	halves, inherited bool
	all               []*sharer
	proofs            int
}

// sharer is a follower, and what its program does.
type sharer struct {
	f       *follower
	of      *Publication // whose words its slot has
	at      *replicator  // in that publication, once it has joined
	slot    *pageSlot    // of the publisher that it has joined, and was not told of yet
	sent    *view
	known   map[uint64][4]int // what the generations that arrived show; carried is of the one sent
	carried [4]int
	// next is a Next in progress, and reads what each stream reads; the last is the caller.
	next  *nextCall
	reads [3]*readOf
}

type nextCall struct {
	streams  []int // none: the caller
	released bool
	held     candidate // what a hold has begun of
}

type readOf struct {
	generation uint64
	of         *Publication
	want       [4]int
	at, got    []int // parts of the memory, and what was there
}

func (s *sharer) begins(generation uint64) *readOf {
	return &readOf{generation: generation, of: s.of, want: s.known[generation]}
}

const caller = 2

func newShared(t require.TestingT, dev *cuda.Device, streams []*cuda.Stream, page *sharedpage.Page, halves bool) *shared {
	w := &shared{dev: dev, streams: streams, page: page, alive: true, truth: map[uint64][4]int{}, halves: halves}
	for i := range page.Words() {
		page.Word(i).Store(0)
	}
	w.p = w.publication()
	w.p.identity = newIdentity()
	for range 3 {
		w.all = append(w.all, w.join(t, nil))
	}
	return w
}

func (w *shared) publication() *Publication {
	p := &Publication{server: &Server{log: slog.Default()}, unit: 1, followers: map[*replicator]struct{}{},
		timeline: &timeline{dev: w.dev}, changes: wait.NewSlot(), changed: make(chan struct{})}
	p.ctx, p.end = context.WithCancel(context.Background())
	return p
}

// join has a new follower join, or one that comes back.
func (w *shared) join(t require.TestingT, s *sharer) *sharer {
	slot := &pageSlot{page: w.page, index: w.slots}
	w.slots++
	if s != nil {
		require.NoError(t, w.p.overtake("test", s.f.replica.generation))
		w.showed()
	}
	require.NoError(t, w.p.greet("test", slot))
	at := &replicator{p: w.p, slot: slot, wake: make(chan struct{}, 1), progress: newProgress(1, 1<<20)}
	w.p.followers[at] = struct{}{}
	if s == nil {
		f := &follower{dev: w.dev, sub: newSubscription(), releases: &timeline{dev: w.dev}, nexts: wait.NewSlot(), changed: make(chan struct{})}
		f.slot = slot
		f.ctx, f.end = context.WithCancel(context.Background())
		return &sharer{f: f, of: w.p, at: at, known: map[uint64][4]int{}}
	}
	s.at, s.slot = at, slot
	return s
}

// showed notes what a generation shows that is new.
func (w *shared) showed() {
	if _, known := w.truth[w.p.view.generation]; !known {
		w.truth[w.p.view.generation] = w.memory
	}
}

func (w *shared) room() bool { return (w.slots+4)*slotWords < w.page.Words() }

func (w *shared) one(t *rapid.T) *sharer { return rapid.SampledFrom(w.all).Draw(t, "follower") }

// What a publisher does.

func (w *shared) announce(t *rapid.T) {
	if !w.alive || w.p.rewriting == opening || w.halves && w.inherited && w.p.rewriting == settled {
		return
	}
	w.inherited = false
	require.NoError(t, w.p.write("test", w.p.replicators()))
	w.p.setRewriting(settled)
	w.p.show(view{generation: w.p.used, ordered: w.p.used, length: 4}, share.View{})
	w.showed()
}

func (w *shared) rewrite(t *rapid.T) {
	if !w.alive || w.p.view.generation == 0 {
		return
	}
	before := w.p.rewriting
	err := w.p.beginRewrite(context.Background(), "test", w.halves && rapid.IntRange(0, 3).Draw(t, "whole") > 0)
	require.Equal(t, before == settled, err == nil)
	w.showed() // or the same elements, as another generation
}

// look is what Rewrite does while it waits.
func (w *shared) look(t *rapid.T) {
	if !w.alive || w.p.rewriting != opening {
		return
	}
	readers := w.p.readers()
	switch what := rapid.SampledFrom([]string{"wait", "wait", "exclude", "give up"}).Draw(t, "late"); {
	case len(readers) == 0:
		w.p.endOpening(true)
	case what == "exclude":
		for _, f := range readers {
			f.end(&ended{status: statusExcluded})
		}
	case what == "give up":
		w.p.endOpening(false)
		w.showed()
	}
}

func (w *shared) write(t *rapid.T) {
	if !w.alive || w.p.rewriting != open {
		return
	}
	from, to := 0, 4
	if w.p.turning {
		from, to = HalfOf(w.p.view.generation+1, 4)
	}
	w.written++
	w.memory[rapid.IntRange(from, to-1).Draw(t, "part")] = w.written
}

func (w *shared) die(*rapid.T) { w.alive = false }

// takeOver has a follower go on with the publication of a publisher that has died.
func (w *shared) takeOver(t *rapid.T) {
	s := w.one(t)
	if w.alive || s.of != w.p || s.slot != nil || !w.room() {
		return
	}
	w.lose(s)
	s.f.sub.inherit()
	w.end(s)
	from, may := s.f.sub.heritage(s.f.slot.seen())
	require.True(t, may)
	from.identity, from.generation = w.p.identity, s.f.replica.generation
	if last := from.last.generation; !from.torn && last > 0 {
		from, to := w.parts(last)
		was := s.known[last]
		require.Equal(t, was[from:to], w.memory[from:to], "what is taken over")
	}
	if from.torn && len(w.all) > 1 && !rapid.Bool().Draw(t, "incomplete") {
		w.replace(t, s)
		return
	}
	sharing.end(w.p)
	w.p, w.alive, w.inherited = w.publication(), true, true
	w.p.goesOn(&from, nil)
	clear(w.truth) // it knows nothing of the generations that its follower had not received
	w.showed()
	s.f.sub.adopt()
	w.replace(t, s)
}

// parts are what a generation shows, from up to, not including, to.
func (w *shared) parts(generation uint64) (from, to int) {
	if w.halves {
		return HalfOf(generation, len(w.memory))
	}
	return 0, len(w.memory)
}

// replace has a new follower come for one that has ended.
func (w *shared) replace(t *rapid.T, s *sharer) {
	i := slices.Index(w.all, s)
	if w.alive {
		w.all[i] = w.join(t, nil)
	} else {
		w.all = slices.Delete(w.all, i, i+1)
	}
}

// What a follower does.

// arrive has the publisher send what it shows, or the follower map that.
func (w *shared) arrive(t *rapid.T) {
	s := w.one(t)
	if s.sent == nil {
		if w.alive && s.of == w.p && s.slot == nil && s.at.ending == nil && s.f.replica.generation < w.p.view.generation {
			v := w.p.view
			s.sent, s.carried = &v, w.truth[v.generation]
		}
		return
	}
	v := version{s.sent.generation, s.sent.ordered, int(s.sent.length)}
	s.sent, s.f.replica.generation = nil, v.generation
	s.known[v.generation] = s.carried
	s.f.holdEarly(v.generation)
	s.f.tell(func(sub *subscription) { sub.arrive(v, s.f.slot.word(completeWord).Load()) })
}

// streamsOf returns the streams of some readers.
func (w *shared) streamsOf(all []int) (streams []*cuda.Stream) {
	for _, i := range all {
		streams = append(streams, w.streams[i])
	}
	return streams
}

// some draws streams, or none for the caller.
func some(t *rapid.T) []int {
	return rapid.SampledFrom([][]int{nil, {0}, {1}, {0, 1}}).Draw(t, "streams")
}

// ends forgets what streams read, and what the caller does.
func (s *sharer) ends(streams []int, andCaller bool) {
	for _, i := range streams {
		s.reads[i] = nil
	}
	if andCaller {
		s.reads[caller] = nil
	}
}

// nextStep begins a Next, or is a step of nextInTurn.
func (w *shared) nextStep(t *rapid.T) {
	s := w.one(t)
	n := s.next
	if n == nil {
		s.next = &nextCall{streams: some(t)}
		return
	}
	streams := w.streamsOf(n.streams)
	if n.held.generation > 0 {
		s.f.mu.Lock()
		shown := s.f.sub.show(n.held, s.f.slot.word(completeWord).Load())
		s.f.mu.Unlock()
		c := n.held
		if n.held = (candidate{}); !shown {
			return
		}
		s.nextEnds(t, true)
		for _, i := range append(n.streams[:len(n.streams):len(n.streams)], caller)[:max(1, len(n.streams))] {
			s.reads[i] = s.begins(c.generation)
		}
		return
	}
	c, _, err := s.f.candidate(streams)
	switch {
	case err != nil:
		s.nextEnds(t, false)
	case !n.released && (c.generation == 0 || s.f.isLate()):
		s.f.noteWaiting()
		require.NoError(t, s.f.endHolds("test", streams, true))
		s.ends(n.streams, true)
		n.released = true
	case c.generation > 0 && s.f.beginHold(streams, c.generation):
		n.held = c
	}
}

// nextTimesOut ends a Next that waits.
func (w *shared) nextTimesOut(t *rapid.T) {
	if s := w.one(t); s.next != nil && s.next.held.generation == 0 {
		s.nextEnds(t, false)
	}
}

func (s *sharer) nextEnds(t *rapid.T, shown bool) {
	toStreams := shown && len(s.next.streams) > 0
	require.NoError(t, s.f.endNext("test", toStreams))
	s.ends(nil, toStreams)
	s.next = nil
}

func (w *shared) release(t *rapid.T) {
	s, streams := w.one(t), some(t)
	if s.next != nil {
		return
	}
	require.NoError(t, s.f.endHolds("test", w.streamsOf(streams), len(streams) == 0))
	s.ends(streams, len(streams) == 0)
}

// order has a stream read what is shown.
func (w *shared) order(t *rapid.T) {
	s, i := w.one(t), rapid.IntRange(0, 1).Draw(t, "stream")
	if s.next != nil {
		return
	}
	shown := s.f.shownNow()
	if shown.length > 0 && s.f.beginHold(w.streamsOf([]int{i}), shown.generation) {
		s.reads[i] = s.begins(shown.generation)
	}
}

func (w *shared) read(t *rapid.T) {
	if r := w.one(t).reads[rapid.IntRange(0, caller).Draw(t, "stream")]; r != nil {
		from, to := w.parts(r.generation)
		i := rapid.IntRange(from, to-1).Draw(t, "part")
		r.at, r.got = append(r.at, i), append(r.got, w.memory[i])
	}
}

// check proves what was read, as a program does before it releases.
func (w *shared) check(t *rapid.T) {
	for _, s := range w.all {
		for _, r := range s.reads {
			if r == nil {
				continue
			}
			with := w.alive && s.of == w.p && s.slot == nil // or its socket has hung up
			if with && r.of == w.p && s.at.ending == nil {
				require.True(t, s.f.untouched(r.generation), "of a reader that the publisher waits for")
			}
			if !with || !s.f.untouched(r.generation) {
				continue
			}
			for k, i := range r.at {
				require.Equal(t, r.want[i], r.got[k], "generation %d is proven, and was not what was read", r.generation)
				w.proofs++
			}
		}
	}
}

// hear has a follower hear that it is excluded, and leave.
func (w *shared) hear(t *rapid.T) {
	s := w.one(t)
	if s.at.ending == nil || !w.alive || !w.room() {
		return
	}
	s.f.tell(func(sub *subscription) { sub.withdraw(ErrExcluded, s.f.slot.seen()) })
	delete(s.at.p.followers, s.at)
	w.replace(t, s)
}

// lose has a follower notice that its publisher has ended.
func (w *shared) loses(t *rapid.T) {
	if s := w.one(t); !w.alive || s.of != w.p {
		w.lose(s)
	}
}

func (w *shared) lose(s *sharer) { s.cutOff((*subscription).lose) }
func (w *shared) end(s *sharer)  { s.cutOff((*subscription).end) }

func (s *sharer) cutOff(event func(s *subscription, why error, w seen)) {
	seen := s.f.slot.seen()
	s.f.tell(func(sub *subscription) { event(sub, cuda.ErrClosed, seen) })
	s.f.slot.word(completeWord).Store(release)
}

// comesBack is a follower that joins the next publisher, and goesOn is told so.
func (w *shared) comesBack(t *rapid.T) {
	if s := w.one(t); w.alive && s.of != w.p && s.slot == nil && s.f.sub.phase == phaseAway && w.room() {
		w.join(t, s)
	}
}

func (w *shared) goesOn(t *rapid.T) {
	s := w.one(t)
	if s.slot == nil {
		return
	}
	s.f.words.Lock()
	s.f.mu.Lock()
	require.True(t, s.f.goOnWith(s.slot, true))
	s.f.slot = s.slot
	s.f.mu.Unlock()
	s.f.words.Unlock()
	s.of, s.slot, s.sent = s.at.p, nil, nil
}

// Whatever publishers and followers do, step by step: no follower proves a mixture, each that is
// waited for proves what it reads, and a publisher that takes over goes on with what is whole.
func TestRewritingsStepByStep(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	streams := []*cuda.Stream{newStream(t, d), newStream(t, d)}
	page, n, err := sharedpage.New()
	require.NoError(t, err)
	defer func() { require.NoError(t, errors.Join(fd.Close(n), page.Close())) }()
	proofs := 0
	for _, halves := range []bool{false, true} {
		life := func(t *rapid.T) {
			w := newShared(t, d, streams, page, halves)
			defer func() { sharing.end(w.p) }()
			actions := map[string]func(*rapid.T){
				"announce": w.announce, "rewrite": w.rewrite, "look": w.look, "write": w.write, "die": w.die, "take over": w.takeOver,
				"next times out": w.nextTimesOut, "release": w.release, "order": w.order, "hear": w.hear, "lose": w.loses, "come back": w.comesBack, "go on": w.goesOn,
				"": w.check,
			}
			for i := range 4 { // what is done most
				maps.Copy(actions, map[string]func(*rapid.T){
					fmt.Sprint("arrive ", i): w.arrive, fmt.Sprint("next ", i): w.nextStep, fmt.Sprint("read ", i): w.read,
				})
			}
			for range 20 { // what is worth a look takes many steps
				t.Repeat(actions)
			}
			proofs += w.proofs
		}
		rapid.Check(t, life)
	}
	require.NotZero(t, proofs)
	t.Logf("%d reads were proven", proofs)
}

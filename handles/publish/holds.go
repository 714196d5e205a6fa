package publish

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// holds are what may still read the elements that a follower shows: the streams that Next or
// Order ordered, and the caller of a Next without streams. The publisher rewrites nothing
// before they have ended.
//
// A Next that waits holds nothing, and the publisher may rewrite again before its goroutine runs.
// So the goroutine that maps what arrives begins a hold for it, before it acknowledges, which is
// what Rewrite waits for. That early hold permits Next to show what the publisher wants to
// rewrite, and ends with the call.
//
// The two processes agree by words of the follower's slot. The follower writes that it holds,
// and then looks whether the publisher wants to rewrite; the publisher writes that it does,
// and then looks who holds. So at least one of them sees the other. While one hold lasts,
// others begin and end without writing a word: the publisher asks only whether there is one.
type holds struct {
	mu      lock.Mutex[lock.Waiting] // held over the driver calls that end holds
	streams map[*core.Stream]struct{}
	caller  bool
	// awaiting says that a Next waits, and early that a hold was begun for it, when the publisher
	// wanted to rewrite generations up to before.
	awaiting, early bool
	before          uint64
	// number is that of the last hold that began while there was none, told the one that
	// the released word reads, or will read when the work of the streams is done.
	number, told uint64
}

// any reports whether anything holds. The caller has locked the holds, as for all of these.
func (h *holds) any() bool {
	for s := range h.streams {
		if s.Gone() { // and with it its work
			delete(h.streams, s)
		}
	}
	return h.caller || h.early || len(h.streams) > 0
}

// wanted returns the last generation that is not to be shown: one that the publisher wants to
// rewrite, or, since it waits for an early hold, wanted to before that.
func (h *holds) wanted(w *pageSlot) uint64 {
	if h.early {
		return max(h.before, w.word(fluxWord).Load())
	}
	return w.word(intentWord).Load()
}

// begin lets the streams hold a generation, or without streams the caller. It returns false,
// without effect, if the publisher lives and wants to rewrite that.
func (h *holds) begin(w *pageSlot, lives bool, streams []*cuda.Stream, generation uint64) bool {
	if _, ok := h.enter(w, lives, generation); !ok {
		return false
	}
	h.caller = h.caller || len(streams) == 0
	for _, s := range streams {
		if h.streams == nil {
			h.streams = map[*core.Stream]struct{}{}
		}
		h.streams[core.StreamOf(s)] = struct{}{}
	}
	return true
}

// enter tells the publisher that there is a hold of a generation. It returns what the publisher
// wants to rewrite, and false, without effect, if that is the generation, and the publisher lives.
func (h *holds) enter(w *pageSlot, lives bool, generation uint64) (wanted uint64, ok bool) {
	fresh := !h.any()
	if fresh {
		h.number++
		w.word(heldWord).Store(h.number)
	}
	if wanted = h.wanted(w); lives && wanted >= generation {
		if fresh {
			h.number--
			w.word(heldWord).Store(h.number)
		}
		return wanted, false
	}
	return wanted, true
}

// restart tells another publisher, whose slot it is, whether anything holds, or has released what it
// reads while its work is not done: tellEnded tells the end of that anew. It returns false if so, and
// the publisher may have begun before to rewrite that generation.
func (h *holds) restart(old, w *pageSlot, generation uint64) bool {
	done := reached(old.word(releasedWord).Load(), h.told)
	h.number, h.told, h.early = 0, 0, false
	if done && !h.any() {
		return true
	}
	h.number = 1
	w.word(heldWord).Store(h.number)
	return w.word(intentWord).Load() < generation
}

// beginHold is holds.begin for what the follower shows, or is about to show.
func (f *follower) beginHold(streams []*cuda.Stream, generation uint64) bool {
	f.words.RLock()
	defer f.words.RUnlock()
	f.holds.mu.Lock()
	defer f.holds.mu.Unlock()
	return f.holds.begin(f.slot, f.counts(), streams, generation)
}

// noteWaiting notes that a Next begins to wait.
func (f *follower) noteWaiting() {
	f.holds.mu.Lock()
	defer f.holds.mu.Unlock()
	f.holds.awaiting = true
}

// holdEarly begins a hold of a generation that has arrived, for a Next that waits.
func (f *follower) holdEarly(generation uint64) {
	f.words.RLock()
	defer f.words.RUnlock()
	h := &f.holds
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.awaiting && !h.early {
		h.before, h.early = h.enter(f.slot, f.counts(), generation)
	}
}

// seenByNext returns what the publisher's words read for a Next. The caller has locked the holds
// and mu.
func (f *follower) seenByNext() seen {
	w := f.slot.seen()
	w.intent = f.holds.wanted(f.slot)
	return w
}

// endNext ends the early hold of a Next. If it has shown something to streams, its caller does
// not hold what an earlier Next without streams showed.
func (f *follower) endNext(op string, toStreams bool) error {
	f.words.RLock()
	defer f.words.RUnlock()
	h := &f.holds
	h.mu.Lock()
	defer h.mu.Unlock()
	h.awaiting, h.early = false, false
	h.caller = h.caller && !toStreams
	return f.tellEnded(op)
}

// endHolds ends the holds of some streams, once the work that is on them now is done, and the
// caller's if that is named. What a failed call did not end can be ended by a later one.
func (f *follower) endHolds(op string, streams []*cuda.Stream, caller bool) error {
	f.words.RLock()
	defer f.words.RUnlock()
	h := &f.holds
	h.mu.Lock()
	defer h.mu.Unlock()
	var holding []*cuda.Stream
	for _, s := range streams {
		if _, holds := h.streams[core.StreamOf(s)]; holds {
			holding = append(holding, s)
		}
	}
	release, err := useStreams(core.SystemOf(f.dev), op, holding)
	if err != nil {
		return err
	}
	defer release()
	for _, s := range holding {
		if err := f.releases.behind(f.ctx, op, core.StreamOf(s)); err != nil {
			return err
		}
		delete(h.streams, core.StreamOf(s))
	}
	h.caller = h.caller && !caller
	return f.tellEnded(op)
}

// tellEnded tells the publisher if nothing holds any more. The caller has words and the holds
// locked.
func (f *follower) tellEnded(op string) error {
	h := &f.holds
	if h.any() || h.told == h.number {
		return nil
	}
	if err := f.releases.write(op, f.slot, releasedWord, h.number); err != nil {
		return err
	}
	h.told = h.number
	return nil
}

// release is Follower.Release.
func (f *follower) release(streams []*cuda.Stream) error {
	const op = "publish.Follower.Release"
	if err := f.made(op); err != nil {
		return err
	}
	if !f.closer.Acquire() {
		return errs.PeerClosed(op, "follower")
	}
	defer f.closer.Release()
	free, err := useStreams(core.SystemOf(f.dev), op, streams) // first, so that a capture is refused without effect
	if errors.Is(err, cuda.ErrClosed) {
		return errs.Peer(op, cuda.ErrClosed, "a stream that is closed", "leave it out: what it holds ends with its work, which the next Release or Next tells the publisher")
	}
	if err != nil {
		return err
	}
	defer free()
	return f.endHolds(op, streams, len(streams) == 0)
}

// intact is Follower.Intact.
func (f *follower) intact(generation uint64) bool {
	if f == nil || !f.closer.Acquire() {
		return false
	}
	defer f.closer.Release()
	f.words.RLock()
	defer f.words.RUnlock()
	// A process that takes the publication over does so after the end of the publisher's, which
	// the socket shows at once, even before the goroutine that reads from it runs.
	return f.untouched(generation) && !f.k.conn.in.Socket().HungUp()
}

// untouched is intact for a publisher that lives. The caller holds words.
func (f *follower) untouched(generation uint64) bool {
	f.mu.Lock()
	known := f.sub.mayBeIntact(generation)
	f.mu.Unlock()
	return known && max(f.slot.word(fluxWord).Load(), f.slot.word(cutWord).Load()) < generation
}

// errRewriting says that the publisher wants to rewrite what is shown.
func errRewriting(op string, generation uint64) error {
	return errs.Peer(op, ErrRewriting, fmt.Sprintf("generation %d", generation), "call Next, which waits for the publisher's next announcement")
}

package publish

import (
	"context"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// RewriteOptions configure [Publication.Rewrite].
type RewriteOptions struct {
	// ExcludeAfter is how long Rewrite waits for a follower. One that has not released by
	// then what it reads is excluded: it is told (ErrExcluded), shows nothing (Len is 0), and can no longer
	// prove that what it read was intact (Follower.Intact). 0 excludes none.
	ExcludeAfter time.Duration
	// Excluded is called with each follower that is excluded, before Rewrite returns. A panic
	// is logged.
	Excluded func(FollowerStats)
	// Turn opens one half of the elements alone, and leaves the other readable: see HalfOf.
	Turn bool
}

// rewriting says whether the elements that were announced may change in place, or be away:
//
//	state    means                                   leaves it by                   Announce      AnnounceRange,  Suspend
//	                                                                                              Shrink, Rewrite
//	settled  nothing that was announced changes      Rewrite: opening;              permitted     permitted       permitted
//	                                                 Suspend: leaving
//	opening  Rewrite waits until no follower reads   all released: open;            ErrInUse      ErrInUse        ErrInUse
//	                                                 an error: settled
//	open     the publisher writes                    Announce: settled              permitted     ErrInUse        ErrInUse
//	leaving  Suspend waits until no follower has     all unmapped: away;            ErrSuspended  ErrSuspended    -
//	         the memory                              an error: settled
//	away     the memory is suspended, or came back   Resume: settled; or open, if   ErrSuspended  ErrSuspended    -
//	         and is not shown yet                    the bytes were not kept
//
// While it is opening, open or leaving, the followers' intent words read the view's generation (of halves
// in turn: the one before, see HalfOf): nobody begins to read that. While it is open the flux words read it, too: what a reader was late
// for is no longer intact. A Rewrite or a Suspend that fails shows the same elements as another
// generation, for followers that would not show the one before. Withdraw ends the
// publication in any state: followers that were cut off from an open one show nothing.
type rewriting uint8

const (
	settled rewriting = iota
	opening
	open
	leaving
	away
)

// Rewrite opens the elements that were announced for rewriting: when it returns, the
// publisher may write them, until the Announce that shows them as a new generation. It waits,
// on the host and within the context, until every follower has released what it reads
// (Follower.Release, or its streams' next Next), and from its beginning on no follower begins
// to read: one that has not begun to read a generation by then reads a later one. Before, it
// gives followers some milliseconds to receive the last announcement: a Next that waits for it
// has begun to read it. Between Rewrite and Announce no generation can be read:
// rewrite halves in turn if readers must always have one (RewriteOptions.Turn).
//
// Elements that were announced must not be written without Rewrite: followers may be reading
// them. Elements behind the announced ones may be written at any time. Rewrite also waits for
// the work behind the last announcement. It knows the followers of this publication
// alone: if another publication of this process shows some of the memory, of the same buffer or
// of a fork, Rewrite returns cuda.ErrInUse, and while it is open no other one can announce the
// memory. A publication that shows nothing is rewritten as if it showed all of its memory. What was
// sent, leased or exported otherwise is not known: such memory is not to be rewritten. Rewrite
// may be called before the first Announce, and of no elements.
//
// Only Announce ends a rewriting; until then AnnounceRange, Shrink and another Rewrite return
// cuda.ErrInUse, and so does Announce while Rewrite waits. An Announce that fails leaves it
// open. If the publisher ends meanwhile, followers show nothing, and Err matches
// [ErrUnfinished]; TakeOver returns [ErrIncomplete].
//
// If the context ends first, Rewrite returns an error that names the followers that it waited
// for, and nothing may be written: followers go on with what was there, as another generation.
// Not waited for are: readers of what was mapped with Open; work on a follower's elements on
// streams that its library was never told of; and a follower that closes, even if its
// streams still read.
func (p *Publication) Rewrite(ctx context.Context, o RewriteOptions) error {
	const op = "publish.Publication.Rewrite"
	if err := p.made(op); err != nil {
		return err
	}
	if o.ExcludeAfter < 0 {
		return errs.PeerInvalid(op, fmt.Sprintf("a limit of %v", o.ExcludeAfter), "give a limit of 0 or more; 0 excludes no follower")
	}
	if p.readOnly {
		return errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("publication %q, which this process took over from a follower that only reads", p.name), "publish a copy that this process may write")
	}
	p.awaitReceived(ctx)
	if err := p.beginRewrite(ctx, op, o.Turn); err != nil {
		return err
	}
	err := p.awaitReleased(ctx, op, p.exclusionOf(o))
	p.changes <- struct{}{}
	defer p.changes.Give()
	if p.ctx.Err() != nil { // it may be Withdraw's turn next
		return p.closed(op)
	}
	p.endOpening(err == nil)
	return err
}

// endOpening opens the elements, or leaves them as they are. The caller holds changes.
func (p *Publication) endOpening(may bool) {
	switch {
	case may && p.turning:
		p.setRewriting(open)
	case may:
		p.setRewriting(open)
		p.endTurns()
	case p.turning:
		p.setRewriting(settled)
	default:
		p.setRewriting(settled)
		p.renumber() // for followers that would not show the generation before
	}
}

// awaitReceived waits until the followers have received what was announced last: each Next that
// waits for that holds it by then. It waits neither for one that lags further behind nor for
// long: nobody can tell a slow follower from one that is stopped.
func (p *Publication) awaitReceived(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, mostReceiving)
	defer cancel()
	_ = p.await(limited, "", func() string { // Rewrite itself finds what may be wrong
		for f := range p.followers {
			if f.receives() {
				return "a follower that receives"
			}
		}
		return ""
	})
}

// mostReceiving bounds how long Rewrite waits before it stops followers from beginning to read.
const mostReceiving = 10 * time.Millisecond

// receives reports whether the follower is about to acknowledge what is shown. The caller holds
// the publication's mu.
func (f *replicator) receives() bool {
	g, v := f.progress, f.p.view
	return f.running && f.ending == nil && !g.level(v) && (g.out == nil || g.out.generation == v.generation)
}

// beginRewrite lets no follower begin to read any more.
func (p *Publication) beginRewrite(ctx context.Context, op string, turn bool) error {
	if err := p.turn(ctx, op); err != nil {
		return err
	}
	defer p.changes.Give()
	if err := p.awake(op); err != nil {
		return err
	}
	if err := p.settled(op); err != nil {
		return err
	}
	if turn {
		if err := p.hasHalves(op); err != nil {
			return err
		}
	}
	hidden, err := p.hidden(op)
	if err != nil {
		return err
	}
	if err := sharing.begin(op, p, hidden); err != nil {
		return err
	}
	p.beginTurn(turn)
	p.setRewriting(opening)
	return nil
}

// hidden returns the chunks of the memory if none of it is shown. The caller holds changes.
func (p *Publication) hidden(op string) ([]share.Chunk, error) {
	if p.view.length > 0 {
		return nil, nil
	}
	mem, err := p.memory.View(op, p.memory.Used())
	if err != nil {
		return nil, err
	}
	chunks := mem.Chunks
	return chunks, mem.Release()
}

// renumber shows the same elements as another generation. The caller holds changes.
func (p *Publication) renumber() {
	if p.view.generation == 0 || p.used >= lastGeneration {
		return
	}
	v := p.view
	v.generation = p.spendLike(v.generation)
	// A word that stays behind says that less is complete. It does while all elements may be in flux: the flux word
	// follows behind, and between them they would look whole.
	if p.kept != nil && (p.rewriting != open || p.turning) {
		_ = p.timeline.write("publish: show the same elements", p.kept.page.slot, completeWord, v.generation)
	}
	p.show(v, p.mem)
}

// settled refuses what cannot be done while the elements are open for rewriting. The caller
// holds changes.
func (p *Publication) settled(op string) error {
	switch p.rewriting {
	case opening:
		return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("publication %q, for which a Rewrite waits", p.name), "wait until it returns")
	case open:
		return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("publication %q, which is being rewritten", p.name), "Announce ends that")
	}
	return nil
}

// setRewriting changes the state, and with it the words. The caller holds changes.
func (p *Publication) setRewriting(to rewriting) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rewriting = to; to == settled {
		sharing.end(p)
	}
	p.tellAll()
	p.changeLocked()
}

// tellAll writes the words that say what is rewritten: see rewriting. The caller holds
// changes and mu.
func (p *Publication) tellAll() {
	if p.rewriting == open {
		p.flux = p.wanted()
	}
	for f := range p.followers {
		p.tell(f.slot)
	}
	if p.kept != nil {
		p.tell(p.kept.page.slot)
	}
}

// tell is tellAll for one follower.
func (p *Publication) tell(w *pageSlot) {
	flux := max(p.flux, w.word(fluxWord).Load()) // more for a follower that was excluded
	intent := max(flux, p.older)
	if p.rewriting == opening || p.rewriting == leaving {
		intent = max(flux, p.wanted())
	}
	w.word(intentWord).Store(intent)
	w.word(fluxWord).Store(flux)
}

// setCut notes that something of what is shown is taken back. The caller holds changes.
func (p *Publication) setCut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = p.view.generation
	for f := range p.followers {
		if f.ending == nil {
			f.slot.word(cutWord).Store(p.cut)
		}
	}
	if p.kept != nil {
		p.kept.page.slot.word(cutWord).Store(p.cut)
	}
}

// reads reports whether the follower may read what is shown. One that was told of its end is
// not waited for. The caller holds the publication's mu.
func (f *replicator) reads() bool {
	if f.ending != nil {
		return false
	}
	held := f.slot.word(heldWord).Load() // before the other: a hold that begins between the two is refused
	if f.p.turning {
		held = min(held, f.before) // less if a hold was refused
	}
	return !reached(f.slot.word(releasedWord).Load(), held)
}

// readers returns the followers that read.
func (p *Publication) readers() (all []*replicator) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := range p.followers {
		if f.reads() {
			all = append(all, f)
		}
	}
	return all
}

// awaitReleased waits until no follower reads, and excludes those that are late. Then it waits
// for the work behind the last announcement, since the next writes may be on other streams.
func (p *Publication) awaitReleased(ctx context.Context, op string, e exclusion) error {
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	var reading []*replicator
	var failed error
	ok := wait.Poll(both, func() bool {
		if reading = p.readers(); len(reading) > 0 {
			if e.over() {
				p.exclude(reading, e, fmt.Sprintf("what it read was not released within %v", e.after))
			}
			return false
		}
		var written bool
		written, failed = p.timeline.done()
		return written || failed != nil
	})
	switch {
	case failed != nil:
		return failed
	case !ok && len(reading) == 0:
		return errs.PeerWait(ctx, op, fmt.Sprintf("the work behind the last announcement of %q is not done", p.name), e.undone+"; try again when it is done, or with a longer limit")
	case !ok:
		return errs.PeerWait(ctx, op, fmt.Sprintf("%s of %q that did not release what it reads: %v", errs.Count(len(reading), "follower"), p.name, namesOf(reading)),
			fmt.Sprintf("%s; have followers call Release when they have read, or exclude late ones (%s)", e.undone, e.option))
	}
	return nil
}

// mostNamed bounds the followers that an error names.
const mostNamed = 4

func namesOf(all []*replicator) (names []string) {
	for _, f := range all[:min(len(all), mostNamed)] {
		names = append(names, f.on.String())
	}
	return names
}

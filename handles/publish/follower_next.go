package publish

import (
	"context"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/peererr"
)

// next shows what is pending: see Follower.Next.
func (f *follower) next(ctx context.Context, streams []*cuda.Stream) error {
	const op = "publish.Follower.Next"
	if !f.closer.Acquire() {
		return peererr.Closed(op, "follower")
	}
	defer f.closer.Release()
	release, err := useStreams(core.SystemOf(f.dev), op, streams)
	if err != nil {
		return err
	}
	release() // and checked again when there is something to show
	if !f.nexts.Take(ctx, f.ctx.Done()) {
		return f.notNext(ctx, op)
	}
	defer f.nexts.Give()
	for {
		f.mu.Lock()
		p, cuts, changed := f.pending, f.cuts, f.changed
		if p != nil && p.err == nil && f.cutLocked() && p.ordered > f.completed {
			// It will never be complete, and was never shown. One before it may be.
			if p = nil; f.lastCompleteLocked().generation > f.shown[len(f.shown)-1].generation {
				p = &pending{shown: f.lastCompleteLocked()}
			}
			f.pending = p
		}
		if (len(streams) == 0 || f.stream == nil) && p != nil && p.err == nil && !f.word.reached(p.ordered) {
			p = f.soonestLocked(p)
		}
		var end error
		switch {
		case f.unfinished && f.gone == nil && !f.told:
			f.told, end = true, f.goneLocked()
		case p == nil && f.settled && f.gone != nil:
			end = f.goneLocked()
		}
		if p != nil && p.err != nil {
			f.pending = nil
		}
		f.mu.Unlock()
		switch {
		case end != nil:
			f.awaitEnd()
			return end
		case p != nil && p.err != nil:
			return p.err
		case p != nil:
			done, err := f.show(ctx, op, p, cuts, streams)
			if done || err != nil {
				return err
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return f.notNext(ctx, op)
		case <-f.ctx.Done():
			return f.notNext(ctx, op)
		}
	}
}

func (f *follower) notNext(ctx context.Context, op string) error {
	select {
	case <-f.ctx.Done():
		return peererr.Closed(op, "follower")
	default:
		return peererr.Wait(ctx, op, "nothing new was announced", "try again: nothing was lost")
	}
}

// show orders the streams, and then shows what was pending after so many cuts. It returns
// false if that is not to be shown any more.
func (f *follower) show(ctx context.Context, op string, p *pending, cuts int, streams []*cuda.Stream) (done bool, err error) {
	if done, err = f.order(ctx, op, streams, func() (uint64, bool) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return p.ordered, f.standsLocked(p, cuts)
	}); !done || err != nil {
		return false, err
	}
	if !f.lengths.Take(ctx, f.ctx.Done()) {
		return false, f.notNext(ctx, op)
	}
	defer f.lengths.Give()
	f.mu.Lock()
	stands, grows := f.standsLocked(p, cuts), p.length > f.shown[len(f.shown)-1].length
	f.mu.Unlock()
	if !stands {
		return false, nil
	}
	if grows {
		// The array before Len, so that a goroutine that reads beside Next finds elements
		// wherever Len says. Nothing is unmapped while lengths is held.
		if err := f.setLen(p.length); err != nil {
			return false, err
		}
	}
	f.mu.Lock()
	stands = f.standsLocked(p, cuts)
	if stands {
		f.showLocked(p)
	}
	f.mu.Unlock()
	return stands, f.settleLocked()
}

// soonestLocked returns what a Next that waits on the CPU shows before an update whose work
// is not done: the newest that arrived and is complete, otherwise the oldest that is not
// shown, which is complete first. Waiting for the update itself, a follower would show
// nothing while the publisher's work is always one announcement behind, or for ever if the
// publisher waits for what the follower does with a generation before. The caller holds mu.
func (f *follower) soonestLocked(last *pending) *pending {
	behind := max(f.shown[len(f.shown)-1].generation, f.cut)
	var soonest *shown
	for i := range f.received {
		switch s := &f.received[i]; {
		case s.generation <= behind:
		case soonest == nil || f.word.reached(s.ordered):
			soonest = s
		}
	}
	if soonest == nil || soonest.generation >= last.generation {
		return last
	}
	return &pending{shown: *soonest}
}

// standsLocked reports whether what was pending after so many cuts may be shown, although a
// newer update has arrived. The caller holds mu.
func (f *follower) standsLocked(p *pending, cuts int) bool {
	if p == nil || f.cutLocked() && p.ordered > f.completed {
		return false
	}
	return f.pending == p || f.cuts == cuts && p.generation > f.shown[len(f.shown)-1].generation
}

// showLocked shows an update. The caller holds mu.
func (f *follower) showLocked(p *pending) {
	if f.pending == p {
		f.pending = nil
	}
	// If the publisher ends now, the last complete state remains.
	complete := f.word.value().Load()
	for len(f.shown) > 1 && f.shown[1].ordered <= complete {
		f.shown = f.shown[1:]
	}
	f.shown = append(f.shown, p.shown)
	f.unfinished, f.told = false, false
}

// cutLocked reports whether the publisher's word no longer counts. The caller holds mu.
func (f *follower) cutLocked() bool { return f.gone != nil || f.died }

// lastCompleteLocked returns the last view that arrived and was complete when the
// connection ended; the zero view if none was. The caller holds mu.
func (f *follower) lastCompleteLocked() (last shown) {
	for _, s := range f.received {
		if s.ordered <= f.completed {
			last = s
		}
	}
	return last
}

// goneLocked returns why nothing further arrives, or why less is shown. The caller holds
// mu.
func (f *follower) goneLocked() error {
	if f.unfinished {
		return peererr.Wrap(f.gone, opFollower, ErrUnfinished, "elements that were shown and no longer are", "discard what was computed from them")
	}
	return f.gone
}

// failed is Follower.Err. If the connection has ended, only elements that are complete
// are shown when it returns.
func (f *follower) failed() error {
	f.mu.Lock()
	err := f.goneLocked()
	f.mu.Unlock()
	f.awaitEnd()
	return err
}

// awaitEnd waits until the end of the connection is handled, if it has ended.
func (f *follower) awaitEnd() {
	f.mu.Lock()
	died, ended := f.died, f.ended
	f.mu.Unlock()
	if died {
		<-ended
	}
}

func (f *follower) stateNow() State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}

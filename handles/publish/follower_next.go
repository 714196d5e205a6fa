package publish

import (
	"context"
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// next shows what is pending: see Follower.Next.
func (f *follower) next(ctx context.Context, streams []*cuda.Stream) error {
	const op = "publish.Follower.Next"
	if err := f.made(op); err != nil {
		return err
	}
	if !f.closer.Acquire() {
		return errs.PeerClosed(op, "follower")
	}
	defer f.closer.Release()
	release, err := useStreams(core.SystemOf(f.dev), op, streams)
	if err != nil {
		return err
	}
	release() // and checked again when there is something to show
	if !f.nexts.Try() {
		// The call whose turn it is may wait for an announcement, and the publisher for these streams before that.
		if err := f.endHolds(op, streams, false); err != nil {
			return err
		}
		if !f.nexts.Take(ctx, f.ctx.Done()) {
			return f.notNext(ctx, op)
		}
	}
	defer f.nexts.Give()
	err = f.nextInTurn(ctx, op, streams)
	return errors.Join(err, f.endNext(op, err == nil && len(streams) > 0))
}

// nextInTurn is next for the one caller at a time that has nexts.
func (f *follower) nextInTurn(ctx context.Context, op string, streams []*cuda.Stream) error {
	for released := false; ; {
		c, changed, err := f.candidate(streams)
		switch {
		case err != nil:
			f.awaitEnd(ctx)
			if f.lengths.Take(ctx, f.ctx.Done()) {
				_ = f.settleLocked() // fails only if the follower closes
				f.lengths.Give()
			}
			return err
		case !released && (c.generation == 0 || f.isLate()):
			// The holds end before the wait, because the publisher may wait for that before it
			// announces anything. By then it is noted that this call waits.
			f.noteWaiting()
			if err := f.endHolds(op, streams, true); err != nil {
				return err
			}
			released = true
			continue
		case c.generation > 0:
			done, err := f.show(ctx, op, c, streams)
			if done && err == nil && c.length == 0 { // there is nothing to read
				err = f.endHolds(op, streams, true)
			}
			if done || err != nil {
				return err
			}
			released = false // a hold may have begun, and another publisher may wait for its end
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

// candidate returns what there is to show, or else what tells of a change. An early hold of
// what arrives later begins before that change.
func (f *follower) candidate(streams []*cuda.Stream) (c candidate, changed <-chan struct{}, err error) {
	f.holds.mu.Lock()
	defer f.holds.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	c, err = f.sub.next(f.seenByNext(), f.onHost(streams))
	return c, f.changed, err
}

// isLate reports whether the publisher wants to rewrite what is shown, and has announced another
// half meanwhile.
func (f *follower) isLate() bool {
	f.holds.mu.Lock()
	defer f.holds.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	shown := f.sub.current().generation
	return f.sub.counts() && shown > 0 && f.seenByNext().intent >= shown
}

func (f *follower) notNext(ctx context.Context, op string) error {
	select {
	case <-f.ctx.Done():
		return errs.PeerClosed(op, "follower")
	default:
		return errs.PeerWait(ctx, op, "nothing new was announced", "try again: nothing was lost")
	}
}

// show orders the streams, and then shows the candidate. It returns false if that is not to be
// shown any more.
func (f *follower) show(ctx context.Context, op string, c candidate, streams []*cuda.Stream) (done bool, err error) {
	if done, err = f.order(ctx, op, streams, func() (uint64, bool) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return c.ordered, f.sub.stands(c)
	}); !done || err != nil {
		return false, err
	}
	if c.length > 0 && !f.beginHold(streams, c.generation) {
		return false, nil
	}
	if !f.lengths.Take(ctx, f.ctx.Done()) {
		return false, f.notNext(ctx, op)
	}
	defer f.lengths.Give()
	f.mu.Lock()
	stands, grows := f.sub.stands(c), c.length > f.sub.current().length
	f.mu.Unlock()
	if !stands {
		return false, nil
	}
	if grows {
		// The array before Len, so that a goroutine that reads beside Next finds elements
		// wherever Len says. Nothing is unmapped while lengths is held.
		if err := f.setLen(c.length); err != nil {
			return false, err
		}
	}
	f.mu.Lock()
	shown := f.sub.show(c, f.slot.word(completeWord).Load())
	f.mu.Unlock()
	return shown, f.settleLocked()
}

// failed is Follower.Err. It waits for nothing: what is shown, and why, are one step in die.
func (f *follower) failed() error {
	if err := f.made("publish.Follower.Err"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sub.err()
}

// awaitEnd waits until the end of the connection is handled, if it has ended: then the array
// has the length that is shown.
func (f *follower) awaitEnd(ctx context.Context) {
	f.mu.Lock()
	died, ended := !f.sub.counts(), f.ended
	f.mu.Unlock()
	if !died {
		return
	}
	select {
	case <-ended:
	case <-ctx.Done():
	}
}

func (f *follower) stateNow() State {
	if f == nil {
		return Ended
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sub.state()
}

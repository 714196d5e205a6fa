package publish

import (
	"context"
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// close is Follower.Close.
func (f *follower) close() error {
	if err := f.made("publish.Follower.Close"); err != nil {
		return err
	}
	f.end() // and with it all waits
	return f.closer.Close(func() error {
		f.quiesce()
		if f.stream != nil {
			if err := f.stream.Close(); err != nil {
				return err
			}
			f.stream = nil
		}
		if f.releases != nil {
			if err := f.releases.close(); err != nil {
				return err
			}
			f.releases = nil
		}
		if f.hold != nil {
			f.hold.Release()
		}
		if f.buffer != nil {
			if err := f.buffer.Close(); err != nil {
				return err
			}
			f.buffer = nil
		}
		if f.slot != nil {
			if err := f.slot.close(opFollower); err != nil {
				return err
			}
			f.slot = nil
		}
		return nil
	})
}

// completion is Follower.Released.
func (f *follower) completion() cuda.Completion {
	if err := f.made("publish.Follower.Released"); err != nil {
		return completed(err)
	}
	return f.closer.Completion()
}

// completed returns the end of a closing that never begins.
func completed(err error) cuda.Completion {
	c, end := life.NewCompletion()
	end(err)
	return c
}

// quiesce leaves the publication, and waits until the follower's goroutines have ended
// and its own stream waits for nothing.
func (f *follower) quiesce() {
	leave := func() {
		f.mu.Lock()
		k, token, mailbox := f.k, f.token, f.mailbox
		f.mu.Unlock()
		k.leave(token, mailbox)
	}
	leave()
	f.words.RLock()
	if f.slot != nil {
		f.endWord(f.whyClosed(), (*subscription).close)
		f.letGo() // or the mapping goroutine might wait forever
	}
	f.words.RUnlock()
	f.running.Wait()
	leave() // if it came back meanwhile
}

// whyClosed is why nothing more is announced to a follower that closes: the publisher's
// reason, if that ended first.
func (f *follower) whyClosed() error {
	select {
	case <-f.mailbox.over:
		return f.mailbox.why
	default:
		return errs.PeerClosed(opFollower, "follower")
	}
}

// closeAfter is Follower.CloseAfter.
func (f *follower) closeAfter(streams []*cuda.Stream) error {
	const op = "publish.Follower.CloseAfter"
	if err := f.made(op); err != nil {
		return err
	}
	sys := core.SystemOf(f.dev)
	return life.CloseAfter(&f.closer, sys, func() (*core.Fence, error) {
		if f.quiet != nil { // a teardown failed before
			return new(core.Fence), f.leaveBuffer(streams)
		}
		fence, err := core.FenceOf(sys, op, streams)
		if err != nil {
			return nil, err
		}
		f.hold.Release()
		if err := f.leaveBuffer(streams); err != nil {
			hold, again := f.memory.Hold(op, "the follower of a publication", 0)
			if again == nil {
				f.mu.Lock()
				f.hold = hold
				f.mu.Unlock()
			}
			return nil, errors.Join(err, again)
		}
		f.end()
		f.quiet = make(chan struct{})
		go func() {
			defer close(f.quiet)
			f.quiesce()
		}()
		return fence, nil
	}, f.teardown)
}

// leaveBuffer begins to close the buffer.
func (f *follower) leaveBuffer(streams []*cuda.Stream) error {
	if f.buffer == nil {
		return nil
	}
	released := f.buffer.Released() // before it may fail: then it is that of the next closing
	if err := f.buffer.CloseAfter(streams...); err != nil {
		return err
	}
	f.released = released
	return nil
}

// teardown releases what closeAfter left. It runs on the reclaimer, and never waits.
func (f *follower) teardown() error {
	select {
	case <-f.quiet:
	default:
		return life.ErrAgain
	}
	if f.stream != nil {
		if err := f.stream.Close(); err != nil { // without waiting: it has no work left
			return err
		}
		f.stream = nil
	}
	if f.releases != nil {
		if done, err := f.releases.done(); err == nil && !done {
			return life.ErrAgain
		}
		if err := f.releases.close(); err != nil {
			return err
		}
		f.releases = nil
	}
	if f.buffer != nil {
		select {
		case <-f.released.Done():
		default:
			return life.ErrAgain
		}
		if err := f.released.Wait(context.Background()); err != nil {
			return err // Close and CloseAfter try again
		}
		f.buffer = nil
	}
	if f.slot == nil {
		return nil
	}
	if err := f.slot.closeLater(opFollower); err != nil {
		return err
	}
	f.slot = nil
	return nil
}

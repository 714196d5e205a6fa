package publish

import (
	"errors"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// mayReturn reports whether the follower comes back after a connection ended for that
// reason.
func (f *follower) mayReturn(why error) bool {
	return f.client != nil && f.taking.Err() == nil && f.client.options.ComeBack != nil && f.client.ctx.Err() == nil &&
		(errors.Is(why, peer.ErrGone) || errors.Is(why, errMoved))
}

// returning reports whether the current connection has ended and the follower comes
// back.
func (f *follower) returning() bool {
	select {
	case <-f.mailbox.over:
		return !f.hasEnded() && f.mayReturn(f.mailbox.why) && f.ctx.Err() == nil
	default:
		return false
	}
}

// hasEnded reports whether nothing further arrives, on no connection.
func (f *follower) hasEnded() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gone != nil
}

// comeBack follows again on the client's next connections, until a publisher takes the
// follower in. It returns false if there is nothing to come back to.
func (f *follower) comeBack() bool {
	if f.hasEnded() { // a wait reached its limit when the connection ended
		return false
	}
	ctx := f.taking
	pause := f.client.options.ComeBack.First
	for k := f.k; ; {
		next, err := f.client.after(ctx, k)
		if err == nil {
			k, err = next, f.attach(next)
			for temporary(err) && wait.Sleep(ctx, pause) {
				pause = min(2*pause, f.client.options.ComeBack.Most)
				err = f.attach(k)
			}
			if errors.Is(err, peer.ErrGone) || errors.Is(err, peer.ErrRefused) && k.ended() {
				continue // this connection has ended too, perhaps for lack of room
			}
		}
		switch {
		case err == nil:
			return true
		case ctx.Err() != nil:
			return false
		}
		f.mu.Lock()
		f.gone, f.state = err, Ended
		f.mu.Unlock()
		return false
	}
}

// temporary reports whether a publisher that refused a follower may accept it soon: it
// is not ready yet, or has no room at present.
func temporary(err error) bool {
	return errors.Is(err, ErrUnknown) || errors.Is(err, peer.ErrTooLarge) || errors.Is(err, peer.ErrTimeout)
}

// attach follows on another connection, and keeps the memory that the follower has.
func (f *follower) attach(k *line) error {
	t := &f.replica
	has := possession{publication: f.identity, generation: t.generation, length: t.length}
	for _, c := range t.chunks {
		has.chunks = append(has.chunks, c.id)
	}
	said, r, err := k.subscribe(f.taking, opFollower, f.name, t.room, f.options.ReadOnly, has)
	if err != nil {
		return err
	}
	defer func() { _ = r.page.Close() }()
	w, err := f.fits(k, said, r.page)
	if err != nil {
		k.leave(said.token, r.mailbox)
		return err
	}
	// Nothing uses the word that is replaced, and no stream waits for it. The generations of
	// the new word are another publisher's: what is complete must not be compared with them.
	f.words.Lock()
	f.letGo()
	old := f.word
	f.mu.Lock()
	f.shown = []shown{f.shown[len(f.shown)-1].complete()}
	if last := f.lastCompleteLocked(); last.generation > 0 {
		f.received = []shown{last.complete()}
	} else {
		f.received = nil
	}
	if p := f.pending; p != nil && p.ordered <= f.completed {
		f.pending = &pending{p.shown.complete(), p.err}
	} else {
		f.pending = nil
	}
	f.k, f.token, f.slot, f.mailbox, f.word, f.identity = k, said.token, said.slot, r.mailbox, w, said.identity
	f.about.Exporter = said.about.Exporter
	f.completed, f.died, f.ended = 0, false, make(chan struct{})
	f.cutReceivedLocked()
	f.waits, f.waited = nil, 0
	f.mu.Unlock()
	f.words.Unlock()
	t.serial, t.busy = 0, nil
	_ = old.drop(opFollower, nil) // what the driver refuses is a leftover, and the log has it
	return nil
}

// fits checks that the publication is of the kind that was followed, and opens the new
// word.
func (f *follower) fits(k *line, said *accepted, page *peer.FD) (*fenceWord, error) {
	was, is := f.about, said.about
	if is.Kind != was.Kind || is.Element != was.Element || is.ElementSize != was.ElementSize || is.Location != was.Location || is.Device != was.Device {
		return nil, peererr.New(opFollower, handles.ErrMismatch, "a publication of the same name with other elements, or on another device",
			"close the follower, and follow the publication anew")
	}
	return k.openWord(opFollower, f.dev, page, said.slot)
}

// saw notes the state that a publisher declares, unless the connection has ended since.
func (f *follower) saw(s State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.died {
		f.state = s
	}
}

// mostReceived bounds the views that are kept of a publisher whose work is stalled.
const mostReceived = 1024

// remember keeps a view that arrived until a later one is complete: if the publisher
// dies, the last complete one remains.
func (f *follower) remember(s shown) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.received = append(f.received, s)
	for len(f.received) > 1 && f.word.reached(f.received[1].ordered) {
		f.received = f.received[1:]
	}
	if len(f.received) > mostReceived {
		f.received = append(f.received[:1], f.received[2:]...)
	}
}

package publish

import (
	"errors"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// mayReturn reports whether another publisher may continue after a connection ended for that
// reason.
func (f *follower) mayReturn(why error) bool {
	return f.client != nil && f.client.options.ComeBack != nil && f.client.ctx.Err() == nil &&
		(errors.Is(why, peer.ErrGone) || errors.Is(why, errMoved))
}

// comeBack follows again on the client's next connections, until a publisher takes the
// follower in. It returns false if there is nothing to come back to.
func (f *follower) comeBack() bool {
	f.mu.Lock()
	away := f.sub.phase == phaseAway
	f.mu.Unlock()
	if !away {
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
		f.cutOff(err, (*subscription).end)
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
	defer r.close()
	told, err := k.readDescription(opFollower, said, r.text)
	if err == nil {
		err = f.continues(said, &told)
	}
	var w *pageSlot
	if err == nil {
		w, err = k.openSlot(opFollower, f.dev, r.page, said.slot)
	}
	if err != nil {
		k.leave(said.token, r.mailbox)
		return err
	}
	// Nothing uses the word that is replaced, and no stream waits for it. The generations of
	// the new word are another publisher's: what is complete must not be compared with them.
	f.words.Lock()
	f.letGo()
	old := f.slot
	f.mu.Lock()
	accepted := f.goOnWith(w, said.identity == f.identity)
	if accepted {
		f.attachment, f.about.Exporter, f.told = newAttachment(k, said, r.mailbox, w), said.about.Exporter, told
	} else {
		old = w
	}
	f.mu.Unlock()
	if accepted {
		f.holds.mu.Lock()
		_ = f.tellEnded(opFollower) // or the next release does
		f.holds.mu.Unlock()
	}
	f.words.Unlock()
	if accepted {
		t.serial, t.busy = 0, nil
		_ = f.settle() // fails only if the follower closes
	} else {
		k.leave(said.token, r.mailbox)
		err = errs.PeerClosed(opFollower, "follower") // TakeOver has begun
	}
	_ = old.drop(opFollower, nil) // what the driver refuses is a leftover, and the log has it
	return err
}

// goOnWith has another publisher accept the follower, whose slot is w, of the same publication or of
// another one of its name. It returns false if the follower does not follow it any more. The caller
// holds words and mu.
func (f *follower) goOnWith(w *pageSlot, same bool) bool {
	if !f.sub.accept(same) {
		return false
	}
	shown := f.sub.current().generation
	if safe := f.holds.restart(f.slot, w, shown); !safe && shown > 0 && same {
		f.sub.spoil()
		f.changeLocked()
	}
	return true
}

// continues checks that the publication is of the kind that was followed, with the tensors in the
// same places.
func (f *follower) continues(said *accepted, told *description) error {
	was, is := f.about, said.about
	if is.Kind != was.Kind || is.Element != was.Element || is.ElementSize != was.ElementSize || is.Location != was.Location || is.Device != was.Device {
		return errs.Peer(opFollower, handles.ErrMismatch, "a publication of the same name with other elements, or on another device",
			"close the follower, and follow the publication anew")
	}
	return told.matches(opFollower, f.name, f.told.manifest)
}

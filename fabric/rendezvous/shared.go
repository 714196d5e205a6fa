package rendezvous

import "sync/atomic"

// sharedFiles counts the events that use one contribution's files: a host relays
// a contribution to every rank, and sending does not consume a descriptor.
type sharedFiles struct {
	uses atomic.Int64
	c    Contribution
}

// share makes the event own its files by reference count, with one use.
func (e *Event) share() {
	if len(e.Contribution.Files) > 0 {
		e.shared = &sharedFiles{c: e.Contribution}
		e.shared.uses.Store(1)
	}
}

// use returns the event for one more user, which releases it.
func (e Event) use() Event {
	if e.shared != nil {
		e.shared.uses.Add(1)
	}
	return e
}

// release ends a use of the event, and closes its files after the last.
func (e *Event) release() {
	switch {
	case e.shared == nil:
		e.Contribution.Close()
	case e.shared.uses.Add(-1) == 0:
		e.shared.c.Close()
	}
}

// echo returns the event as its own rank gets it back.
func (e Event) echo() Event {
	e.Contribution, e.shared = Contribution{}, nil
	return e
}

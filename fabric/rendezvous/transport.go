package rendezvous

import (
	"context"

	"github.com/cuvmm/cuvmm/handles/peer"
)

// Limits of a contribution.
const (
	// MaxBody bounds its bytes. An etcd server takes requests of 1.5 MiB.
	MaxBody = 512 << 10
	// MaxFiles bounds its file descriptors.
	MaxFiles = 1024
	// MaxName bounds the name of a step, in bytes of UTF-8.
	MaxName = 256
	// MaxSize bounds the ranks of a group.
	MaxSize = 4096
)

// Contribution is the part of a step that one rank contributes.
type Contribution struct {
	Body []byte
	// Files travel between processes of one host only.
	Files []*peer.FD
}

// Close closes the contribution's files, concurrently: another process may have
// chosen files that are long in closing.
func (c *Contribution) Close() {
	_ = peer.CloseAll(c.Files) // the numbers are released whatever it returns
	c.Files = nil
}

// dup returns the same contribution with files of its own.
func (c Contribution) dup() (Contribution, error) {
	d := Contribution{Body: append([]byte(nil), c.Body...)}
	for _, f := range c.Files {
		g, err := f.Dup()
		if err != nil {
			d.Close()
			return Contribution{}, err
		}
		d.Files = append(d.Files, g)
	}
	return d, nil
}

// Step is a step of a group: the first is 0.
type Step struct {
	Number uint64
	Name   string
}

// EventKind is the kind of an event.
type EventKind uint8

// Kinds of events.
const (
	// Posted: it arrived at a step, with this contribution.
	Posted EventKind = iota + 1
	// Failed: it gave up, for a reason of its own.
	Failed
	// Late: its limit for the step ended before all ranks had arrived.
	Late
	// Left: it closed its side of the group.
	Left
	// Lost: it ended without leaving, or broke the protocol.
	Lost
	// Ended: the transport ended with it, so nothing more is heard of any rank.
	Ended
)

// String names the kind.
func (k EventKind) String() string {
	switch k {
	case Posted:
		return "posted"
	case Failed:
		return "failed"
	case Late:
		return "late"
	case Left:
		return "left"
	case Lost:
		return "lost"
	case Ended:
		return "ended"
	}
	return "unknown"
}

// Event is an act of a rank, or its end.
type Event struct {
	Kind EventKind
	Rank int
	// Step is the step that the rank arrived at, or gave up.
	Step Step
	// Contribution belongs to the receiver. Only Posted has one.
	Contribution Contribution
	// Reason is why the rank failed or counts as lost.
	Reason string

	// shared, if not nil, owns the contribution's files in place of the receiver.
	shared *sharedFiles
}

// Transport carries one rank's side of a group. It delivers the events of all
// ranks, the rank's own included, to all ranks in one order, even to ranks that
// join later; the group's guarantees rest on that order. Events of one rank keep
// the order in which it sent them, and its loss follows them. A Group calls a
// transport from one goroutine at a time, except for Close.
type Transport interface {
	Rank() int
	Size() int
	// CarriesFiles reports whether contributions may have files.
	CarriesFiles() bool
	// Post announces that this rank arrived at a step. The contribution stays
	// the caller's, and does not come back with the rank's own event.
	Post(ctx context.Context, s Step, c Contribution) error
	// Fail announces that this rank gives up a step: e is Failed or Late.
	Fail(ctx context.Context, e Event) error
	// Next waits for the next event. It returns an event that has arrived even if
	// the context has ended, and otherwise the context's error, with which nothing is
	// lost.
	Next(ctx context.Context) (Event, error)
	// Close announces that this rank leaves, ends a Next that waits, and releases
	// events that were not taken. If the group has failed, verdict is the event
	// that decided it, for ranks that have yet to join; otherwise it is nil.
	// Close is idempotent.
	Close(verdict *Event) error
}

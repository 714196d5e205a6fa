package rendezvous

import (
	"context"

	"github.com/cuvmm/cuvmm/handles"
)

// Limits of what one rank brings to a step.
const (
	// MaxBody is the most bytes. An etcd server takes requests of 1.5 MiB.
	MaxBody = 512 << 10
	// MaxFiles is the most file descriptors.
	MaxFiles = 1024
	// MaxName is the longest name of a step, in bytes.
	MaxName = 256
	// MaxSize is the most ranks of a group.
	MaxSize = 4096
)

// Parcel is what a rank brings to a step.
type Parcel struct {
	Body []byte
	// Files travel between processes of one host only.
	Files []*handles.FD
}

// Close closes the parcel's files.
func (p *Parcel) Close() {
	for _, f := range p.Files {
		_ = f.Close()
	}
	p.Files = nil
}

// dup is the same parcel with files of its own.
func (p Parcel) dup() (Parcel, error) {
	d := Parcel{Body: append([]byte(nil), p.Body...)}
	for _, f := range p.Files {
		g, err := f.Dup()
		if err != nil {
			d.Close()
			return Parcel{}, err
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

// EventKind says what a rank did.
type EventKind uint8

// What a rank can do.
const (
	// Posted: it has arrived at a step, and this is what it brought.
	Posted EventKind = iota + 1
	// Failed: it gave up, and says why.
	Failed
	// Left: it closed its side of the group.
	Left
	// Lost: it ended without a word.
	Lost
	// Ended: with it ended what carries the group, so nobody is heard of any
	// more.
	Ended
)

// String names the kind.
func (k EventKind) String() string {
	switch k {
	case Posted:
		return "posted"
	case Failed:
		return "failed"
	case Left:
		return "left"
	case Lost:
		return "lost"
	case Ended:
		return "ended"
	}
	return "unknown"
}

// Event is something that another rank did.
type Event struct {
	Kind EventKind
	Rank int
	// Step is the one that it arrived at, or gave up in.
	Step Step
	// Parcel belongs to the receiver. It is set for Posted alone.
	Parcel Parcel
	// Reason is why it failed or is thought lost.
	Reason string
}

// Board carries one rank's side of a group. What a rank posts reaches all
// others, in the order in which it posted, also those that join later; and that
// it is gone reaches them after what it posted. All hear of all in one order, so
// that a rank which ends since another has is not heard of before that one. A
// Group calls it from one goroutine at a time, but for Close.
type Board interface {
	Rank() int
	Size() int
	// CarriesFiles reports whether parcels may have files.
	CarriesFiles() bool
	// Post shows the others that this rank arrived at a step. The parcel stays
	// the caller's.
	Post(ctx context.Context, s Step, p Parcel) error
	// Fail shows the others that this rank gives up.
	Fail(ctx context.Context, s Step, reason string) error
	// Next waits for the next event of another rank. An event that is there is
	// answered even when the context has ended; without one the answer is then
	// the context's error, and nothing is lost.
	Next(ctx context.Context) (Event, error)
	// Close tells the others that this rank leaves, ends a Next that waits, and
	// gives up what nobody has taken. The second Close does nothing.
	Close() error
}

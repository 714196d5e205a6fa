package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// state is what a buffer that is open permits. A closed buffer permits nothing (life.Closer).
type state uint8

const (
	active state = iota
	// moved: Move gave the memory to a successor as well.
	moved
	// failed: the driver refused to unmap a part of the range, or an undo there.
	failed
	states
)

// operation is a way in to a buffer: what calls of users and of packages that share memory,
// and the jobs that they left, do to it. Whatever is not here asks nothing: lengths, numbers
// and closing.
type operation uint8

const (
	resizing   operation = iota // Grow, Append and its like, Resize, AppendUndefined, Attach
	clipping                    // Clip, ClipAfter and its job
	reclaiming                  // the reclaimer's job on clipped chunks
	moving                      // Move
	forking                     // Fork
	holding                     // Hold, Cover
	following                   // a publication's Shrink; SetLen and Own of a follower
	granting                    // SetAccess
	reading                     // copies from the buffer
	writing                     // copies to the buffer
	hosting                     // Host
	exporting                   // View, DMABuf, Granted
	operations
)

// verdict is what a state says to an operation.
type verdict uint8

const (
	no verdict = iota
	yes
	// partly: the range refuses the part that failed.
	partly
)

// gate is what each state permits. All ways in ask it: a change once it holds changes, a job
// when it runs, a hold under its lock, a copy under mu with each of its pieces.
var gate = [states][operations]verdict{
	active: {
		resizing: yes, clipping: yes, reclaiming: yes, moving: yes, forking: yes, holding: yes,
		following: yes, granting: yes, reading: yes, writing: yes, hosting: yes, exporting: yes,
	},
	moved: {
		resizing: no, clipping: no, reclaiming: yes, moving: no, forking: no, holding: no,
		following: yes, granting: yes, reading: yes, writing: yes, hosting: yes, exporting: yes,
	},
	failed: {
		resizing: partly, clipping: yes, reclaiming: yes, moving: yes, forking: yes, holding: yes,
		following: yes, granting: yes, reading: yes, writing: yes, hosting: yes, exporting: yes,
	},
}

// refusals are the errors of the states that say no.
var refusals = [states]func(b *buffer, op string) error{moved: (*buffer).errMoved}

// state returns the buffer's. It is read without a lock.
func (b *buffer) state() state {
	switch {
	case b.successor.Load() != 0:
		return moved
	case b.res.Stuck() > 0:
		return failed
	}
	return active
}

// allow refuses an operation that the state of the buffer does not permit.
func (b *buffer) allow(op string, o operation) error {
	if s := b.state(); gate[s][o] == no {
		return refusals[s](b, op)
	}
	return nil
}

func (b *buffer) errMoved(op string) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.Moved,
		Asked: fmt.Sprintf("the buffer at %#x has its successor at %#x", uint64(b.res.Base), b.successor.Load()),
		Hint:  "use the buffer that Move returned; this one can only be read, copied from and to, and closed"})
}

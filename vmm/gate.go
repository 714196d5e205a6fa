package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

// state is what a buffer that is open permits. A closed buffer permits nothing (life.Closer).
type state uint8

const (
	active state = iota
	// moved: Move gave the memory to a successor as well.
	moved
	// failed: the driver refused to unmap a part of the range, or an undo there.
	failed
	// suspending, suspended and resuming: a Suspension moves the bytes, or the memory is away.
	// The buffer is in one of the states above besides, and both permit an operation or it is
	// refused.
	suspending
	suspended
	resuming
	states
)

// operation is a way in to a buffer: what calls of users and of packages that share memory,
// and the jobs that they left, do to it. Whatever is not here asks nothing: lengths, numbers
// and closing.
type operation uint8

const (
	resizing   operation = iota // Grow, Append and its like, Resize, AppendUndefined, Attach
	shortening                  // Resize to a shorter length
	clipping                    // Clip, ClipAfter
	catchingUp                  // the job of a ClipAfter that came during a change
	reclaiming                  // the reclaimer's job on clipped chunks
	moving                      // Move
	forking                     // Fork
	holding                     // Hold, Cover
	following                   // a publication's Shrink; SetLen and Own of a follower
	granting                    // SetAccess
	revoking                    // SetAccess that gives no place more than it has
	reading                     // copies from the buffer
	writing                     // copies to the buffer
	hosting                     // Host
	exporting                   // View, DMABuf, Granted
	sleeping                    // Suspend, SuspendAfter
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
		resizing: yes, shortening: yes, clipping: yes, catchingUp: yes, reclaiming: yes, moving: yes, forking: yes, holding: yes,
		following: yes, granting: yes, revoking: yes, reading: yes, writing: yes, hosting: yes, exporting: yes, sleeping: yes,
	},
	moved: {
		resizing: no, shortening: no, clipping: no, catchingUp: no, reclaiming: yes, moving: no, forking: no, holding: no,
		following: yes, granting: yes, revoking: yes, reading: yes, writing: yes, hosting: yes, exporting: yes, sleeping: yes,
	},
	failed: {
		resizing: partly, shortening: yes, clipping: yes, catchingUp: yes, reclaiming: yes, moving: yes, forking: yes, holding: yes,
		following: yes, granting: yes, revoking: yes, reading: yes, writing: yes, hosting: yes, exporting: yes, sleeping: no,
	},
	suspending: {
		resizing: no, shortening: no, clipping: no, catchingUp: yes, reclaiming: yes, moving: no, forking: no, holding: no,
		following: no, granting: no, revoking: no, reading: no, writing: no, hosting: no, exporting: no, sleeping: no,
	},
	suspended: {
		resizing: no, shortening: yes, clipping: yes, catchingUp: yes, reclaiming: yes, moving: no, forking: no, holding: no,
		following: no, granting: no, revoking: yes, reading: no, writing: no, hosting: no, exporting: no, sleeping: no,
	},
	resuming: {
		resizing: no, shortening: no, clipping: no, catchingUp: yes, reclaiming: yes, moving: no, forking: no, holding: no,
		following: no, granting: no, revoking: no, reading: no, writing: no, hosting: no, exporting: no, sleeping: no,
	},
}

// refusals are the errors of the states that say no.
var refusals = [states]func(b *buffer, op string) error{
	moved: (*buffer).errMoved, failed: (*buffer).errFailed,
	suspending: (*buffer).errAsleep, suspended: (*buffer).errAsleep, resuming: (*buffer).errAsleep,
}

// state returns the buffer's, besides that its bytes may be away. It is read without a lock.
func (b *buffer) state() state {
	switch {
	case b.successor.Load() != 0:
		return moved
	case b.res.Stuck() > 0:
		return failed
	}
	return active
}

// asleep are the states in which the bytes are not where they are used.
var asleep = map[suspend.State]state{suspend.Suspending: suspending, suspend.Suspended: suspended, suspend.Resuming: resuming}

// allow refuses an operation that the state of the buffer does not permit.
func (b *buffer) allow(op string, o operation) error {
	if at := b.status.State(); at != suspend.Awake && gate[asleep[at]][o] == no {
		if err := refusals[asleep[at]](b, op); err != nil {
			return err
		}
	}
	if s := b.state(); gate[s][o] == no {
		return refusals[s](b, op)
	}
	return nil
}

// errAsleep returns nil if the buffer has woken meanwhile.
func (b *buffer) errAsleep(op string) error {
	if s := b.status.Sleep(); s != nil {
		return s.Error(op)
	}
	return nil
}

func (b *buffer) errFailed(op string) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
		Asked: fmt.Sprintf("the buffer at %#x, of which %s could not be unmapped", uint64(b.res.Base), errs.Bytes(b.res.Stuck())),
		Hint:  "call Clip or Close, which try again"})
}

func (b *buffer) errMoved(op string) error {
	return b.fail(errs.Failure{Op: op, Kind: errs.Moved,
		Asked: fmt.Sprintf("the buffer at %#x has its successor at %#x", uint64(b.res.Base), b.successor.Load()),
		Hint:  "use the buffer that Move returned; this one can only be read, copied from and to, and closed"})
}

package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// MoveOptions describe what Move makes. The zero value is a range twice as large as
// the old buffer's.
type MoveOptions struct {
	// Reserve is how far the new buffer can grow, in bytes, rounded up to the
	// granularity. 0 is twice the size of the old buffer's range.
	Reserve int
	// Hint and Align are those of BufferOptions. An Align of 0 is the old buffer's.
	Hint  cuda.Ptr
	Align int
}

// Move makes a second buffer for one whose range has become too small. It maps the
// same memory at the new address: nothing is copied. The caller closes both.
//
// From then on the old buffer serves only work in flight: it can be read, copied from
// and to, and closed, with the same bytes at its own address, but its length and its
// memory cannot change (ErrMoved, which names its successor). Until it is closed, its
// successor cannot be made shorter than it is (ErrInUse). Work through the two addresses
// must be ordered by streams or events (see the package documentation).
//
// A buffer that is published is not moved (ErrInUse), nor is one that follows a
// publication, or whose memory a broker keeps for publications (ErrNotPermitted).
func (b *Buffer) Move(o MoveOptions) (*Buffer, error) { return b.inner().move("vmm.Buffer.Move", o) }

func (b *buffer) move(op string, o MoveOptions) (*Buffer, error) {
	if err := b.enter(op, moving); err != nil {
		return nil, err
	}
	defer b.leave()
	if err := b.mayMove(op); err != nil {
		return nil, err
	}
	committed := b.committed.Load()
	if o.Reserve < 0 || o.Reserve > memspec.MaxBytes || o.Reserve > 0 && uint64(o.Reserve) < committed {
		return nil, errs.Invalid(op, fmt.Sprintf("a range of %s, with %d committed", errs.Count(o.Reserve, "byte"), committed),
			fmt.Sprintf("reserve 0 for twice the old range, or at least %s", errs.Bytes(committed)))
	}
	reserve := uint64(o.Reserve)
	if reserve == 0 {
		reserve = min(2*b.res.Size, memspec.MaxBytes)
	}
	next, err := b.twin(op, reserve, ReserveOptions{Hint: o.Hint, Align: o.Align})
	if err != nil {
		return nil, err
	}
	next.imported, next.moved = b.imported.moved(), b
	handles := make([]*phys.Handle, len(b.chunks))
	for i, c := range b.chunks {
		c.Memory.Retain()
		handles[i] = c.Memory
	}
	if err := next.mapChunks(op, handles); err != nil {
		return nil, err
	}
	if err := b.freeze(op, next); err != nil {
		return nil, next.discard(op, err, nil)
	}
	next.used.Store(b.used.Load())
	next.account = b.account
	next.account.Pass(next.inUse)
	next.track(committed, b.Label())
	b.pastLocked() // drops those that are torn down, so that a chain of moves does not retain them
	return next.public(), nil
}

// mayMove refuses to move a buffer whose address or memory another process relies on.
func (b *buffer) mayMove(op string) error {
	switch i := b.imported; {
	case i != nil && i.followed.Load():
		return b.fail(errs.Failure{Op: op, Kind: errs.NotPermitted, Asked: "another range for a buffer that follows a publication",
			Hint: "what the publisher takes back would stay mapped there: follow it anew with a larger FollowOptions.Reserve"})
	case i != nil && i.kept.Load():
		return b.fail(errs.Failure{Op: op, Kind: errs.NotPermitted, Asked: "another range for memory that a broker keeps",
			Hint: "it would stay mapped there while the next process publishes it: publish it where it is"})
	}
	return b.holds.any(op)
}

// freeze makes the successor b's, unless b was published meanwhile.
func (b *buffer) freeze(op string, successor *buffer) error {
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if len(b.holds.all) > 0 {
		return b.holds.all[0].inUse(op)
	}
	b.successor.Store(uint64(successor.res.Base))
	return nil
}

// twin returns an empty buffer of the same kind with a range of its own, not yet in the
// list of live objects.
func (b *buffer) twin(op string, reserve uint64, o ReserveOptions) (*buffer, error) {
	if o.Align == 0 {
		o.Align = b.align
	}
	res, err := reserveFor(op, b.dev, reserve, 0, b.gran, o)
	if err != nil {
		return nil, err
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	return &buffer{dev: b.dev, res: res, prop: b.prop, gran: b.gran, align: o.Align, chosen: b.chosen, plan: b.plan, access: b.access}, nil
}

// mapChunks maps the first chunks of a new buffer and takes over one reference to each.
// If that fails it gives the buffer and the references back.
func (b *buffer) mapChunks(op string, handles []*phys.Handle) error {
	if len(handles) == 0 {
		return nil
	}
	maps, err := b.res.Map(op, nil, 0, handles, b.access)
	if err != nil {
		return b.res.Abandon(op, phys.Abandon(op, err, handles...))
	}
	b.addLocked(maps) // no one else has the buffer
	return nil
}

// discard gives a new buffer back that no user has, after an operation that failed with
// cause: if GPU work on it may be in flight, once the stream has passed it.
func (b *buffer) discard(op string, cause error, on *core.Stream) error {
	own := 0
	for _, c := range b.chunks {
		if c.Memory.Mappings.Load() == 1 {
			own += int(c.Memory.Size)
		}
	}
	undo := b.res.System().NewUndo(core.DeviceOf(b.prop.Location))
	undo.Take(b.res.Undo(op))
	undo.Own("memory", own, func() error { return b.unmap(op, b.chunks) })
	if on != nil {
		f := new(core.Fence)
		f.AddStreams([]*core.Stream{on})
		undo.Behind(f)
	}
	return undo.After(cause)
}

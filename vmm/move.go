package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Move makes a second buffer with a range of reserve bytes, rounded up to the
// granularity, for one whose range has become too small. It maps the same memory
// at the new address: nothing is copied. The caller closes both.
//
// From then on the old buffer is there for work under way: it is read, copied from
// and to, and closed as before, with the same bytes at its own address, but its
// length and its memory stay as they are (ErrMoved, which names its successor).
// While it is open its successor is not made shorter than it (ErrInUse). Work
// through the two addresses must be ordered by streams or events (see the package
// documentation).
//
// A buffer that is published is not moved (ErrInUse), nor is one that follows a
// publication (ErrNotPermitted).
func Move(old *Buffer, reserve int) (*Buffer, error) {
	const op = "vmm.Move"
	if old == nil {
		return nil, errNilBuffer(op)
	}
	in := old.b
	if err := in.enter(op); err != nil {
		return nil, err
	}
	defer in.leave()
	if err := in.mayMove(op); err != nil {
		return nil, err
	}
	committed := in.committed.Load()
	if reserve <= 0 || reserve > maxBytes || uint64(reserve) < committed {
		return nil, errs.Invalid(op, fmt.Sprintf("a range of %s, with %d committed", errs.Count(reserve, "byte"), committed),
			fmt.Sprintf("reserve at least %s, and more than the old range to grow further", errs.Bytes(committed)))
	}
	b, err := in.twin(op, uint64(reserve))
	if err != nil {
		return nil, err
	}
	b.imported, b.moved, b.onGrow = in.imported.moved(), in, in.onGrow
	handles := make([]*phys.Handle, len(in.chunks))
	for i, c := range in.chunks {
		c.phys.Retain()
		handles[i] = c.phys
	}
	if err := b.mapChunks(op, handles); err != nil {
		return nil, err
	}
	if err := in.freeze(op, b); err != nil {
		return nil, b.discard(op, err)
	}
	b.used.Store(in.used.Load())
	b.track(committed)
	in.pastLocked() // forgets those that are gone: a line of moves keeps none of them
	return b.shell(), nil
}

// mayMove refuses to move a buffer that others know by its address.
func (b *buffer) mayMove(op string) error {
	if err := b.frozen(op); err != nil {
		return err
	}
	if b.imported != nil && b.imported.followed.Load() {
		return errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted, Asked: "another range for a buffer that follows a publication",
			Hint: "what the publisher takes back would stay mapped there: follow it anew with a larger FollowOptions.Reserve"})
	}
	return b.holds.any(op)
}

// freeze makes b the past of a buffer, unless it was published meanwhile.
func (b *buffer) freeze(op string, successor *buffer) error {
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if len(b.holds.all) > 0 {
		return b.holds.all[0].inUse(op)
	}
	b.successor.Store(uint64(successor.res.base))
	return nil
}

// frozen refuses what would change a buffer that was moved.
func (b *buffer) frozen(op string) error {
	to := b.successor.Load()
	if to == 0 {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.Moved, Asked: fmt.Sprintf("the buffer at %#x has its successor at %#x", uint64(b.res.base), to),
		Hint: "use the buffer that vmm.Move returned; this one is read, copied from and to, and closed"})
}

// twin is a buffer of the same kind with a range of its own and nothing in it,
// not yet in the list of live objects.
func (b *buffer) twin(op string, reserve uint64) (*buffer, error) {
	res, err := reserveFor(op, b.dev, reserve, 0, b.gran, ReserveOptions{})
	if err != nil {
		return nil, err
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	access := b.access
	for place := range b.refused { // its RevokeAfter has perhaps returned, and follows this change
		access = access.with(accessList{{Location: place, Flags: driver.AccessNone}})
	}
	twin := &buffer{dev: b.dev, res: res, prop: b.prop, gran: b.gran, chosen: b.chosen, plan: b.plan, access: access}
	twin.holds.appends = b.holds.appended()
	return twin, nil
}

// mapChunks maps the first chunks of a new buffer and takes over one count of
// each. If that fails the buffer is gone, and so are the counts.
func (b *buffer) mapChunks(op string, handles []*phys.Handle) error {
	if len(handles) == 0 {
		return nil
	}
	maps, err := b.res.mapRun(op, nil, 0, handles, b.access)
	if err != nil {
		return b.res.abandon(op, b.res.release(err, handles...))
	}
	last := maps[len(maps)-1]
	b.chunks = maps
	b.committed.Store(last.off + last.phys.Size)
	return nil
}

// discard gives a new buffer back that no user has seen, after what failed with
// cause. Work on it may be under way.
func (b *buffer) discard(op string, cause error) error {
	return b.res.undone(cause, func() error {
		if err := b.wait(op); err != nil {
			return err
		}
		if err := b.res.unmapRun(op, b.chunks); err != nil {
			return err
		}
		return b.res.close(op)
	})
}

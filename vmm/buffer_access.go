package vmm

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// SetAccess says who may do what with the buffer's memory, that of now in one
// call and that of later growth; places that are not named keep what they
// have. Where it takes access away it first waits for the devices concerned.
func (b *Buffer) SetAccess(access ...Access) error {
	const op = "vmm.Buffer.SetAccess"
	in := b.b
	if err := in.enter(op); err != nil {
		return err
	}
	defer in.leave()
	changes, err := checkAccess(op, in.dev.System(), in.prop.Location, access)
	if err == nil {
		err = in.imported.mayAccess(op, changes)
	}
	if err != nil {
		return err
	}
	// What goes down is refused to our own operations first, and what goes up
	// is allowed to them last.
	in.mu.Lock()
	before, after, end := in.access, in.access.with(changes), in.mapped()
	in.access = before.lower(after)
	in.pinned = true
	in.mu.Unlock()
	if end > 0 {
		err = in.res.setAccess(op, 0, end, access)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.pinned = false
	switch {
	case err == nil:
		in.access = after
	case !in.res.unsure():
		in.access = before
	}
	return err
}

// RevokeAfter takes all access from a place: for the library's own operations
// at once, and in the driver when the work that is on the streams now is done.
// It does not wait for the GPU, only for copies and changes of this buffer that
// other goroutines have under way. Granting the place access again before that undoes it.
// Without a stream it is ErrInvalidArgument; with one that captures a graph it
// is ErrCapturing and nothing has changed.
func (b *Buffer) RevokeAfter(l cuda.Location, streams ...*cuda.Stream) error {
	const op = "vmm.Buffer.RevokeAfter"
	in := b.b
	if err := in.enter(op); err != nil {
		return err
	}
	defer in.leave()
	changes, err := checkAccess(op, in.dev.System(), in.prop.Location, []Access{{l, NoAccess}})
	if err == nil {
		err = in.imported.mayAccess(op, changes)
	}
	if err != nil {
		return err
	}
	// Refused first and then marked: whoever was let through is before the mark.
	in.mu.Lock()
	before := in.access
	in.access = before.with(changes)
	in.mu.Unlock()
	sys := in.res.System()
	f, err := core.FenceOf(sys, op, streams)
	if err != nil {
		in.mu.Lock()
		in.access = before
		in.mu.Unlock()
		return err
	}
	in.later.Add(1)
	life := new(core.Life)
	life.Close()
	sys.Reclaim(f, life, func() error { return in.revoked(op, changes[0].Location) })
	return nil
}

// revoked makes the driver's access what the list says by now.
func (b *buffer) revoked(op string, l driver.Location) error {
	if !b.mu.TryLock() {
		return core.ErrAgain // the reclaimer waits for nobody's lock
	}
	defer b.mu.Unlock()
	if b.pinned {
		return core.ErrAgain
	}
	defer b.later.Add(-1)
	end := b.mapped()
	if end == 0 || b.res.System().DeviceLost(core.DevicesOf(b.prop.Location)...) != driver.Success {
		return nil
	}
	return b.res.applyAccess(op, 0, end, accessList{{Location: l, Flags: b.access.mode(l)}})
}

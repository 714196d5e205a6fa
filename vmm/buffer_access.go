package vmm

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
)

// SetAccess changes the access of places to the buffer's memory, in one driver call, and
// to the memory of later growth; places that are not named keep what they have. If it
// takes access away it first waits for the devices concerned.
func (b *Buffer) SetAccess(access ...Access) error {
	return b.inner().setAccess("vmm.Buffer.SetAccess", access)
}

func (b *buffer) setAccess(op string, access []Access) error {
	before, after, err := b.enterAccess(op, access)
	if err != nil {
		return err
	}
	defer b.leave()
	if end := b.mappedLocked(); end > 0 {
		err = b.res.setAccess(op, 0, end, access)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err == nil:
		b.access = after
	case !b.res.unsure():
		b.access = before
	}
	return err
}

// enterAccess starts a change of access. Access that is taken is refused to the library's
// own operations first; access that is granted is allowed to them last. If a Host
// function uses memory that the host is to lose, it waits without holding changes.
func (b *buffer) enterAccess(op string, access []Access) (before, after accessList, err error) {
	for {
		if err := b.enter(op); err != nil {
			return nil, nil, err
		}
		changes, err := b.mayAccess(op, access)
		if err != nil {
			b.leave()
			return nil, nil, err
		}
		b.mu.Lock()
		before, after = b.access, b.access.with(changes)
		var v *view
		if home := b.prop.Location; home.Type != driver.LocationDevice && after.mode(home) < before.mode(home) {
			v = b.res.views.over(0, rest)
		}
		if v == nil {
			b.access = before.lower(after)
		}
		b.mu.Unlock()
		if v == nil {
			return before, after, nil
		}
		b.leave()
		if err := v.wait(op); err != nil {
			return nil, nil, err
		}
	}
}

func (b *buffer) mayAccess(op string, access []Access) (accessList, error) {
	changes, err := checkAccess(op, b.dev.System(), b.prop.Location, access)
	if err == nil {
		err = b.imported.mayAccess(op, changes)
	}
	return changes, err
}

// RevokeAfter takes all access from a place: at once as far as the library's own
// operations are concerned, and in the driver when the work that is on the streams now is
// done, the work of copies from and to the buffer that are being submitted during the
// call, and the work that earlier calls for the place named. Work that is already on other
// streams is not waited for. It never blocks. Granting the place access again
// before that undoes it. If another goroutine is changing the buffer the revocation
// follows that change. If the driver refuses the revocation, System.Drain returns the
// error and the place keeps its access until RevokeAfter or SetAccess takes it.
//
// Without a stream it returns ErrInvalidArgument; with one that captures a graph it
// returns ErrCapturing and nothing has changed.
func (b *Buffer) RevokeAfter(l cuda.Location, streams ...*cuda.Stream) error {
	return b.inner().revokeAfter("vmm.Buffer.RevokeAfter", l, streams)
}

func (b *buffer) revokeAfter(op string, l cuda.Location, streams []*cuda.Stream) error {
	if err := b.acquire(op); err != nil {
		return err
	}
	defer b.closer.Release()
	changes, err := b.mayAccess(op, []Access{{l, NoAccess}})
	if err != nil {
		return err
	}
	b.copies.watch()
	alone := b.changes.TryLock()
	if alone {
		defer b.changes.Unlock()
	}
	// Refused first and then fenced: copies that were let through come before the fence.
	place := changes[0].Location
	b.refuse(place, 1)
	f, err := core.FenceOf(b.res.System(), op, streams)
	if err != nil {
		b.copies.unwatch()
		b.refuse(place, -1)
		return err
	}
	revoke := func() {
		b.copies.addTo(f)
		b.copies.unwatch()
		b.mu.Lock()
		b.access = b.access.with(changes)
		b.mu.Unlock()
		b.refuse(place, -1)
		b.revoking.begin(place)
		passed := false
		b.reclaim(f, nil, func() error { return b.revokedLocked(op, place) }, func() {
			if !passed {
				passed = true
				b.revoking.pass(place)
			}
		})
	}
	if alone {
		revoke()
		return nil
	}
	b.runOrQueue(revoke)
	return nil
}

// refuse counts the revocations under way of a place.
func (b *buffer) refuse(place driver.Location, by int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refused == nil {
		b.refused = map[driver.Location]int{}
	}
	if b.refused[place] += by; b.refused[place] == 0 {
		delete(b.refused, place)
	}
}

// modeLocked returns the access that the library's own operations have at a place. The
// caller holds mu.
func (b *buffer) modeLocked(place driver.Location) driver.AccessFlags {
	if b.refused[place] > 0 {
		return driver.AccessNone
	}
	return b.access.mode(place)
}

// revokedLocked makes the driver's access that of the list, unless a later call for the
// place still waits. The caller holds changes.
func (b *buffer) revokedLocked(op string, l driver.Location) error {
	end := b.mappedLocked()
	if end == 0 || !b.revoking.due(l) || b.res.System().DeviceLost(core.DevicesOf(b.prop.Location)...) != driver.Success {
		return nil
	}
	return stillGranted(b.res.applyAccess(op, 0, end, accessList{{Location: l, Flags: b.access.mode(l)}}))
}

// stillGranted adds to the error of a revocation what it means.
func stillGranted(err error) error {
	if err == nil || errors.Is(err, life.ErrAgain) {
		return err
	}
	return fmt.Errorf("%w (the place keeps its access until RevokeAfter or SetAccess takes it)", err)
}

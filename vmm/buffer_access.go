package vmm

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/vrange"
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
		err = setAccess(op, b.res, 0, end, access)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err == nil:
		b.access = after
	case !b.res.Unsure():
		b.access = before
	}
	return err
}

// enterAccess starts a change of access. Access that is taken is refused to the library's
// own operations first; access that is granted is allowed to them last.
func (b *buffer) enterAccess(op string, access []Access) (before, after accessList, err error) {
	if err := b.enter(op, revoking); err != nil {
		return nil, nil, err
	}
	changes, err := b.mayAccess(op, access)
	if err == nil && !b.access.Lowers(changes) {
		err = b.allow(op, granting)
	}
	if err == nil {
		b.mu.Lock()
		before, after = b.access, b.access.With(changes)
		if home := b.prop.Location; home.Type != driver.LocationDevice && after.Mode(home) < before.Mode(home) {
			err = b.res.Views.None(op, 0, vrange.End)
		}
		if err == nil {
			b.access = before.Lower(after)
		}
		b.mu.Unlock()
	}
	if err != nil {
		b.leave()
		return nil, nil, err
	}
	return before, after, nil
}

func (b *buffer) mayAccess(op string, access []Access) (accessList, error) {
	changes, err := checkAccess(op, b.dev.System(), b.prop.Location, access)
	if err == nil {
		err = b.imported.mayAccess(op, changes)
	}
	return changes, err
}
